//! Comparison with sums in f64, and bit by bit between ways to compute the same row.

use std::sync::Arc;

use half::{bf16, f16};

use super::*;
use crate::{DType, Isa, SharedBytes};

/// Formats that weights are tested in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::ops) enum TestFormat {
    F32,
    F16,
    Bf16,
    Int4(DType),
    Fp8,
}

impl TestFormat {
    pub(in crate::ops) const ALL: [Self; 7] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Int4(DType::BF16),
        Self::Int4(DType::F16),
        Self::Int4(DType::F32),
        Self::Fp8,
    ];

    /// Whether rows of `inputs` elements exist in this format.
    pub(in crate::ops) fn allows(self, inputs: usize) -> bool {
        !matches!(self, Self::Int4(_)) || inputs.is_multiple_of(32)
    }
}

/// Numbers that look random (a linear congruential generator, Knuth's MMIX).
pub(in crate::ops) struct Numbers(pub(in crate::ops) u64);

impl Numbers {
    pub(in crate::ops) fn next(&mut self) -> u32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    /// In −1 … 1.
    pub(in crate::ops) fn signed(&mut self) -> f32 {
        self.next() as f32 / (1u32 << 30) as f32 - 1.0
    }

    pub(in crate::ops) fn tensor(&mut self, dtype: DType, shape: &[usize]) -> Tensor {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| self.signed()).collect();
        match dtype {
            DType::F32 => Tensor::from_slice(shape, &values),
            DType::F16 => {
                let values: Vec<_> = values.into_iter().map(f16::from_f32).collect();
                Tensor::from_slice(shape, &values)
            }
            DType::BF16 => {
                let values: Vec<_> = values.into_iter().map(bf16::from_f32).collect();
                Tensor::from_slice(shape, &values)
            }
            other => panic!("no random numbers of type {other}"),
        }
    }

    /// Bytes in memory that is not aligned, as in a mapped file.
    fn bytes(&mut self, count: usize) -> SharedBytes {
        let mut bytes = vec![0; count + 1];
        bytes.iter_mut().for_each(|byte| *byte = self.next() as u8);
        Arc::new(bytes)
    }

    /// A weight of `[outputs, inputs]` in misaligned memory, cut out of a larger one if possible.
    pub(in crate::ops) fn weight(
        &mut self,
        format: TestFormat,
        outputs: usize,
        inputs: usize,
    ) -> Weight {
        let (rows, columns) = (outputs + 2, inputs + 64);
        let shift = |values: Tensor| {
            let bytes: Vec<u8> = std::iter::once(0)
                .chain((0..values.rows()).flat_map(|row| values.row_bytes(row).to_vec()))
                .collect();
            Tensor::from_shared(values.dtype(), values.shape(), Arc::new(bytes), 1).unwrap()
        };
        let whole = match format {
            TestFormat::F32 => Weight::float(shift(self.tensor(DType::F32, &[rows, columns]))),
            TestFormat::F16 => Weight::float(shift(self.tensor(DType::F16, &[rows, columns]))),
            TestFormat::Bf16 => Weight::float(shift(self.tensor(DType::BF16, &[rows, columns]))),
            TestFormat::Int4(scale) => {
                let shape = [rows, columns / 8];
                let codes = self.bytes(rows * columns / 2);
                let packed = Tensor::from_shared(DType::I32, &shape, codes, 1).unwrap();
                let scale = self.tensor(scale, &[rows, columns / 32]);
                Weight::int4(packed, shift(scale))
            }
            TestFormat::Fp8 => {
                let mut codes = vec![0u8; rows * columns];
                // All codes but those of NaN.
                codes.iter_mut().for_each(|code| {
                    *code = (self.next() % 0x7F) as u8 | (self.next() & 0x80) as u8
                });
                let shape = [rows, columns];
                let codes = Tensor::from_shared(DType::F8E4M3, &shape, Arc::new(codes), 0).unwrap();
                let blocks = [rows.div_ceil(128), columns.div_ceil(128)];
                Weight::fp8(codes, self.tensor(DType::F32, &blocks), [128, 128])
            }
        };
        whole.unwrap().slice_rows(1..outputs + 1).slice_columns(32..32 + inputs).unwrap()
    }
}

pub(in crate::ops) fn available() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

/// A dot product in f64, and the sum of the magnitudes of its terms.
pub(in crate::ops) fn exact_dot(x: &[f32], weight: &Weight, output: usize) -> (f64, f64) {
    let mut row = vec![0.0; weight.in_features()];
    weight.read_row_f32(output, &mut row);
    x.iter().zip(&row).fold((0.0, 0.0), |(sum, size), (&x, &w)| {
        let product = f64::from(x) * f64::from(w);
        (sum + product, size + product.abs())
    })
}

fn bits(tensor: &Tensor) -> Vec<u8> {
    (0..tensor.rows()).flat_map(|row| tensor.row_bytes(row).to_vec()).collect()
}

/// Rows `range` of an owned tensor, copied.
pub(in crate::ops) fn copy_rows(tensor: &Tensor, range: Range<usize>) -> Tensor {
    let mut copy = Tensor::zeros(tensor.dtype(), &[range.len(), tensor.width()]);
    let source: Vec<u8> = range.flat_map(|row| tensor.row_bytes(row).to_vec()).collect();
    match tensor.dtype() {
        DType::F32 => {
            bytemuck::cast_slice_mut::<_, u8>(copy.as_mut_slice::<f32>()).copy_from_slice(&source);
        }
        DType::BF16 => {
            bytemuck::cast_slice_mut::<_, u8>(copy.as_mut_slice::<bf16>()).copy_from_slice(&source);
        }
        other => panic!("rows of type {other}"),
    }
    copy
}

const INPUTS: [usize; 11] = [1, 7, 31, 32, 33, 64, 80, 96, 255, 256, 1152];

#[test]
fn products_are_those_of_f64() {
    let mut numbers = Numbers(1);
    for isa in available() {
        let stream = Stream::host(1).unwrap().with_isa(isa);
        for format in TestFormat::ALL {
            for inputs in INPUTS.into_iter().filter(|&inputs| format.allows(inputs)) {
                for (rows, outputs) in [(1, 13), (2, 9), (3, 1), (5, 8), (6, 11), (17, 133)] {
                    let x = numbers.tensor(DType::F32, &[rows, inputs]);
                    let weight = numbers.weight(format, outputs, inputs);
                    let mut out = Tensor::zeros(DType::F32, &[rows, outputs]);
                    linear(&stream, &x, &weight, &mut out);
                    let result = out.as_slice::<f32>();
                    for (row, x) in x.as_slice::<f32>().chunks_exact(inputs).enumerate() {
                        for output in 0..outputs {
                            let (exact, size) = exact_dot(x, &weight, output);
                            let error = (f64::from(result[row * outputs + output]) - exact).abs();
                            assert!(
                                error <= 5e-7 * size,
                                "{isa}, {format:?}, {rows} x {outputs} x {inputs}: error \
                                 {error} of {exact}, terms {size}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_company() {
    let mut numbers = Numbers(2);
    for isa in available() {
        for (dtype, format) in [DType::F32, DType::BF16]
            .into_iter()
            .flat_map(|dtype| TestFormat::ALL.map(|format| (dtype, format)))
        {
            for inputs in INPUTS.into_iter().filter(|&inputs| format.allows(inputs)) {
                let (rows, outputs) = (37, 75);
                let all = numbers.tensor(dtype, &[rows, inputs]);
                let weight = numbers.weight(format, outputs, inputs);
                let plain = Stream::host(1).unwrap().with_isa(isa);
                let mut expected = Vec::new();
                for row in 0..rows {
                    let mut out = Tensor::zeros(dtype, &[1, outputs]);
                    linear(&plain, &copy_rows(&all, row..row + 1), &weight, &mut out);
                    expected.extend(bits(&out));
                }
                let row_bytes = expected.len() / rows;
                for count in [2, 3, 4, 5, 6, 7, 8, 12, 37] {
                    let mut out = Tensor::zeros(dtype, &[count, outputs]);
                    linear(&plain, &copy_rows(&all, 0..count), &weight, &mut out);
                    assert_eq!(
                        bits(&out),
                        expected[..count * row_bytes],
                        "{isa}, {format:?}, {count} rows of {inputs}"
                    );
                }
            }
        }
    }
}

#[test]
fn rows_and_outputs_split_over_threads_have_the_same_bits() {
    let mut numbers = Numbers(3);
    let (inputs, outputs) = (512, 1030);
    for isa in available() {
        let streams = [1, 2, 3].map(|threads| Stream::host(threads).unwrap().with_isa(isa));
        for format in TestFormat::ALL {
            let weight = numbers.weight(format, outputs, inputs);
            for rows in [1, 2, 16, 131] {
                let x = numbers.tensor(DType::F32, &[rows, inputs]);
                let results = streams.each_ref().map(|stream| {
                    let mut out = Tensor::zeros(DType::F32, &[rows, outputs]);
                    linear(stream, &x, &weight, &mut out);
                    bits(&out)
                });
                assert!(results.iter().all(|result| *result == results[0]), "{isa}, {format:?}");
            }
        }
    }
}

#[test]
fn heads_use_their_slices_and_leave_the_rest_alone() {
    let mut numbers = Numbers(4);
    let (heads, outputs, inputs, rows) = (3, 21, 32, 5);
    let (x_layout, out_layout) =
        (HeadLayout { offset: 4, stride: 40 }, HeadLayout { offset: 2, stride: 24 });
    for isa in available() {
        for threads in [1, 3] {
            let stream = Stream::host(threads).unwrap().with_isa(isa);
            for format in TestFormat::ALL {
                let x = numbers.tensor(DType::F32, &[rows, 130]);
                let weight = numbers.weight(format, heads * outputs, inputs);
                let mut out = Tensor::from_slice(&[rows, 80], &vec![-7f32; rows * 80]);
                linear_heads(&stream, &x, x_layout, &weight, heads, &mut out, out_layout);
                let mut expected = vec![None; rows * 80];
                for (row, x) in x.as_slice::<f32>().chunks_exact(130).enumerate() {
                    for head in 0..heads {
                        let x = &x[4 + 40 * head..][..inputs];
                        for output in 0..outputs {
                            let exact = exact_dot(x, &weight, head * outputs + output);
                            expected[row * 80 + 2 + 24 * head + output] = Some(exact);
                        }
                    }
                }
                for (&value, expected) in out.as_slice::<f32>().iter().zip(expected) {
                    match expected {
                        None => assert_eq!(value, -7.0),
                        Some((exact, size)) => {
                            assert!((f64::from(value) - exact).abs() <= 5e-7 * size);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn activations_are_rounded_once() {
    let mut numbers = Numbers(5);
    for isa in available() {
        let stream = Stream::host(1).unwrap().with_isa(isa);
        for rows in [1, 9] {
            let x = numbers.tensor(DType::BF16, &[rows, 96]);
            let weight = numbers.weight(TestFormat::Int4(DType::BF16), 70, 96);
            let wide = Tensor::from_slice(&[rows, 96], &x.to_f32_vec());
            let mut exact = Tensor::zeros(DType::F32, &[rows, 70]);
            linear(&stream, &wide, &weight, &mut exact);
            let mut rounded = Tensor::zeros(DType::BF16, &[rows, 70]);
            linear(&stream, &x, &weight, &mut rounded);
            let mut half = Tensor::zeros(DType::F16, &[rows, 70]);
            linear(&stream, &x, &weight, &mut half);
            for (index, &value) in exact.as_slice::<f32>().iter().enumerate() {
                assert_eq!(rounded.as_slice::<bf16>()[index], bf16::from_f32(value));
                assert_eq!(half.as_slice::<f16>()[index], f16::from_f32(value));
            }
        }
    }
}

/// NaN codes and subnormal codes are kept.
#[test]
fn every_f8_code_has_its_value() {
    for isa in available() {
        let stream = Stream::host(1).unwrap().with_isa(isa);
        let codes: Vec<u8> = (0..=255).collect();
        let codes = Tensor::from_shared(DType::F8E4M3, &[256, 1], Arc::new(codes), 0).unwrap();
        let scale = Tensor::from_slice(&[2, 1], &[1.0f32, 1.0]);
        let weight = Weight::fp8(codes, scale, [128, 128]).unwrap();
        let mut out = Tensor::zeros(DType::F32, &[1, 256]);
        linear(&stream, &Tensor::from_slice(&[1, 1], &[1f32]), &weight, &mut out);
        for (code, &value) in (0..=255).zip(out.as_slice::<f32>()) {
            let expected = crate::f8e4m3_to_f32(code);
            assert!(value == expected || value.is_nan() && expected.is_nan(), "{isa}: {code:#x}");
        }
    }
}

#[test]
fn no_rows_and_no_outputs_are_fine() {
    let stream = Stream::host(1).unwrap();
    let weight = Numbers(6).weight(TestFormat::Bf16, 4, 8);
    let mut out = Tensor::zeros(DType::F32, &[0, 4]);
    linear(&stream, &Tensor::zeros(DType::F32, &[0, 8]), &weight, &mut out);
    let none = weight.slice_rows(0..0);
    let mut out = Tensor::zeros(DType::F32, &[2, 0]);
    linear(&stream, &Tensor::zeros(DType::F32, &[2, 8]), &none, &mut out);
}

#[test]
#[should_panic(expected = "input width")]
fn a_weight_of_another_width_is_a_bug() {
    let weight = Numbers(7).weight(TestFormat::F32, 4, 8);
    let x = Tensor::zeros(DType::F32, &[1, 9]);
    linear(&Stream::host(1).unwrap(), &x, &weight, &mut Tensor::zeros(DType::F32, &[1, 4]));
}
