//! Comparison with sums in f64, and bit by bit between ways to compute the same row.

use super::*;
use crate::ops::linear::tests::{Numbers, TestFormat, available, copy_rows};

const HIDDEN: usize = 96;
const INTERMEDIATE: usize = 64;
const EXPERTS: usize = 7;

fn experts(numbers: &mut Numbers, formats: &[TestFormat]) -> Vec<Expert> {
    (0..EXPERTS)
        .map(|index| {
            let format = formats[index % formats.len()];
            Expert {
                gate: numbers.weight(format, INTERMEDIATE, HIDDEN),
                up: numbers.weight(format, INTERMEDIATE, HIDDEN),
                down: numbers.weight(format, HIDDEN, INTERMEDIATE),
            }
        })
        .collect()
}

/// Each row to `per_token` different experts.
fn routing(numbers: &mut Numbers, rows: usize, per_token: usize) -> Routing {
    let mut routing = Routing::with_capacity(rows, per_token);
    routing.set_rows(rows);
    for row in 0..rows {
        let first = numbers.next() as usize;
        let (experts, weights) = routing.row_mut(row);
        for (j, (expert, weight)) in experts.iter_mut().zip(weights).enumerate() {
            *expert = ((first + 3 * j) % EXPERTS) as u32;
            *weight = numbers.signed();
        }
    }
    routing
}

fn matrix(weight: &Weight) -> Vec<Vec<f64>> {
    let values = weight.dequantize().to_f32_vec();
    let rows = values.chunks_exact(weight.in_features());
    rows.map(|row| row.iter().map(|&value| f64::from(value)).collect()).collect()
}

fn times(matrix: &[Vec<f64>], x: &[f64]) -> Vec<f64> {
    matrix.iter().map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

/// The sum over the experts in `held` for one row, in f64.
fn exact(x: &[f32], experts: &[Expert], held: Range<usize>, routing: (&[u32], &[f32])) -> Vec<f64> {
    let x: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
    let mut sum = vec![0.0; HIDDEN];
    for (&expert, &weight) in routing.0.iter().zip(routing.1) {
        if !held.contains(&(expert as usize)) {
            continue;
        }
        let expert = &experts[expert as usize];
        let (a, b) = (times(&matrix(&expert.gate), &x), times(&matrix(&expert.up), &x));
        let inner: Vec<_> = a.iter().zip(&b).map(|(a, b)| a / (1.0 + (-a).exp()) * b).collect();
        let outer = times(&matrix(&expert.down), &inner);
        sum.iter_mut().zip(&outer).for_each(|(sum, y)| *sum += f64::from(weight) * y);
    }
    sum
}

#[test]
fn sums_are_those_of_f64() {
    let mut numbers = Numbers(21);
    let formats = [TestFormat::Int4(DType::BF16), TestFormat::Bf16, TestFormat::Fp8];
    for isa in available() {
        for threads in [1, 2, 3] {
            let stream = Stream::host(threads).unwrap().with_isa(isa);
            for formats in [&formats[..1], &formats[1..2], &formats] {
                let experts = experts(&mut numbers, formats);
                // Expert parallel: some experts are elsewhere.
                for (rows, per_token, held) in [(1, 2, 0..7), (5, 3, 2..6), (33, 2, 0..3)] {
                    let routing = routing(&mut numbers, rows, per_token);
                    let x = numbers.tensor(DType::F32, &[rows, HIDDEN]);
                    let base = numbers.tensor(DType::F32, &[rows, HIDDEN]);
                    let mut out = base.clone();
                    let count = held.len();
                    let mut scratch = MoeScratch::for_rows(40, 3, count, HIDDEN, INTERMEDIATE);
                    let part = &experts[held.clone()];
                    moe(&stream, &x, part, held.start, &routing, &mut scratch, &mut out);
                    for row in 0..rows {
                        let at = row * HIDDEN..(row + 1) * HIDDEN;
                        let x = &x.as_slice::<f32>()[at.clone()];
                        let sum = exact(x, &experts, held.clone(), routing.row(row));
                        let size = sum.iter().fold(1.0, |size: f64, y| size.max(y.abs()));
                        for (index, sum) in at.zip(sum) {
                            let exact = sum + f64::from(base.as_slice::<f32>()[index]);
                            let error = f64::from(out.as_slice::<f32>()[index]) - exact;
                            assert!(error.abs() < 3e-6 * size, "{isa}: {error} of {exact}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_company() {
    let mut numbers = Numbers(22);
    for isa in available() {
        for dtype in [DType::F32, DType::BF16] {
            for format in [TestFormat::Int4(DType::BF16), TestFormat::Bf16] {
                let experts = experts(&mut numbers, &[format]);
                let all = routing(&mut numbers, 50, 4);
                let x = numbers.tensor(dtype, &[50, HIDDEN]);
                let mut scratch = MoeScratch::for_rows(50, 4, EXPERTS, HIDDEN, INTERMEDIATE);
                let mut expected = Tensor::zeros(dtype, &[50, HIDDEN]);
                let stream = Stream::host(1).unwrap().with_isa(isa);
                moe(&stream, &x, &experts, 0, &all, &mut scratch, &mut expected);
                for (threads, rows) in [(1, 0..1), (2, 3..5), (3, 10..15), (3, 0..50)] {
                    let stream = Stream::host(threads).unwrap().with_isa(isa);
                    let mut some = Routing::with_capacity(rows.len(), 4);
                    some.set_rows(rows.len());
                    for (index, row) in rows.clone().enumerate() {
                        let (experts, weights) = some.row_mut(index);
                        experts.copy_from_slice(all.row(row).0);
                        weights.copy_from_slice(all.row(row).1);
                    }
                    let x = copy_rows(&x, rows.clone());
                    let mut out = Tensor::zeros(dtype, &[rows.len(), HIDDEN]);
                    moe(&stream, &x, &experts, 0, &some, &mut scratch, &mut out);
                    for (index, row) in rows.enumerate() {
                        assert_eq!(out.row_bytes(index), expected.row_bytes(row), "{isa}");
                    }
                }
            }
        }
    }
}

#[test]
fn experts_elsewhere_change_nothing() {
    let mut numbers = Numbers(23);
    let experts = experts(&mut numbers, &[TestFormat::Bf16]);
    let mut routing = Routing::with_capacity(1, 1);
    routing.set_rows(1);
    routing.row_mut(0).0[0] = 4;
    let x = numbers.tensor(DType::F32, &[1, HIDDEN]);
    let mut out = numbers.tensor(DType::F32, &[1, HIDDEN]);
    let before = out.to_f32_vec();
    let mut scratch = MoeScratch::for_rows(1, 1, 3, HIDDEN, INTERMEDIATE);
    let stream = Stream::host(1).unwrap();
    moe(&stream, &x, &experts[5..], 5, &routing, &mut scratch, &mut out);
    moe(&stream, &x, &experts[..3], 0, &routing, &mut scratch, &mut out);
    assert_eq!(out.to_f32_vec(), before);
}
