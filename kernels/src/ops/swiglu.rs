//! The gated unit of a feed-forward layer.

use std::ops::Range;

use super::linear::{
    GRAIN_PRODUCTS, Inputs, Order, Outputs, Pieces, Prepared, Results, Scratch, Slices, UNIT,
    product,
};
use crate::{
    Isa, Stream, Tensor, Weight,
    lanes::{exp, multiversion},
};

/// out = silu(x · gateᵀ) ⊙ (x · upᵀ), with `x` `[rows, in]`, `gate` and `up` `[out, in]`, `out`
/// `[rows, out]`; silu(a) = a / (1 + e^−a). All in f32, rounded once (Shazeer 2020, "GLU variants
/// improve transformer").
///
/// # Panics
/// If shapes do not fit or activations are no floats.
pub fn swiglu(stream: &Stream, x: &Tensor, gate: &Weight, up: &Weight, out: &mut Tensor) {
    assert_eq!(gate.in_features(), x.width(), "input width of gate");
    assert_eq!(up.in_features(), x.width(), "input width of up");
    assert_eq!(gate.out_features(), out.width(), "output width of gate");
    assert_eq!(up.out_features(), out.width(), "output width of up");
    assert_eq!(x.rows(), out.rows(), "rows");
    let (rows, inputs, width) = (x.rows(), x.width(), out.width());
    if rows == 0 || width == 0 {
        return;
    }

    let orders = [Order::of(gate), Order::of(up)];
    let prepared = Prepared::new(stream, x, Slices::whole(inputs), orders);
    let outputs = Outputs::new(out);
    let pieces = Pieces::of_both(rows, [gate, up]);
    let grain = (GRAIN_PRODUCTS / 2).div_ceil(UNIT * rows * inputs.max(1));
    stream.split(width.div_ceil(UNIT), grain, |units| {
        let range = units.start * UNIT..(units.end * UNIT).min(width);
        let inputs = orders.map(|order| prepared.slice(order, 0));
        let mut unit = GatedUnit::new(stream.isa(), gate, up, pieces);
        let pitch = pieces.outputs;
        let mut unrounded = Scratch::take(pieces.rows * pitch);
        pieces.each(rows, range, |rows, part| {
            let direct = outputs.direct(rows.start, part.start);
            let results =
                direct.unwrap_or_else(|| Results { first: unrounded.as_mut_ptr(), pitch });
            // SAFETY: rows and outputs were checked to exist, the pieces are as the unit was made
            // for, and the elements of `out` belong to these outputs, so to this thread.
            unsafe {
                unit.piece(&inputs, rows.clone(), part.clone(), results);
                if direct.is_none() {
                    for (index, row) in rows.enumerate() {
                        let from = results.first.add(index * pitch);
                        outputs.round(stream.isa(), row, part.start, from, part.len());
                    }
                }
            }
        });
    });
}

/// One thread's view of a gated unit.
pub(super) struct GatedUnit<'a> {
    isa: Isa,
    gate: &'a Weight,
    up: &'a Weight,
    pieces: Pieces,
    work: Scratch,
    ups: Scratch,
}

impl<'a> GatedUnit<'a> {
    /// A unit that is computed in `pieces`.
    pub(super) fn new(isa: Isa, gate: &'a Weight, up: &'a Weight, pieces: Pieces) -> Self {
        let work = Scratch::take(pieces.work);
        let ups = Scratch::take(pieces.rows * pieces.outputs);
        Self { isa, gate, up, pieces, work, ups }
    }

    /// Writes a piece of silu(x · gateᵀ) ⊙ (x · upᵀ) to `results`; `x` is the input in the orders
    /// of gate and up.
    ///
    /// # Safety
    /// Rows and outputs exist and are at most a piece; `results` is valid for writes of them, and
    /// no one else uses it now. The processor has the instruction set.
    pub(super) unsafe fn piece(
        &mut self,
        x: &[Inputs<'_>; 2],
        rows: Range<usize>,
        outputs: Range<usize>,
        results: Results,
    ) {
        let ups = Results { first: self.ups.as_mut_ptr(), pitch: self.pieces.outputs };
        let (row_count, count) = (rows.len(), outputs.len());
        // SAFETY: by the caller's promise; `ups` and `work` have room for a piece.
        unsafe {
            let work = &mut self.work;
            product(self.isa, self.gate, outputs.clone(), &x[0], rows.clone(), results, work);
            product(self.isa, self.up, outputs, &x[1], rows, ups, work);
            for row in 0..row_count {
                let gates = results.first.add(row * results.pitch);
                let gates = std::slice::from_raw_parts_mut(gates, count);
                let ups = std::slice::from_raw_parts(ups.first.add(row * ups.pitch), count);
                gate_values(self.isa, gates, ups);
            }
        }
    }
}

multiversion! {
    /// gates = silu(gates) ⊙ ups.
    fn gate_values[](gates: &mut [f32], ups: &[f32]) = gate_each
}

#[inline(always)]
fn gate_each<const FMA: bool, const LANES: usize>(gates: &mut [f32], ups: &[f32]) {
    for (gate, &up) in gates.iter_mut().zip(ups) {
        *gate = *gate / (1.0 + exp::<FMA>(-*gate)) * up;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        DType,
        ops::linear::tests::{Numbers, TestFormat, available, copy_rows, exact_dot},
    };

    #[test]
    fn values_are_those_of_f64() {
        let mut numbers = Numbers(11);
        for isa in available() {
            for threads in [1, 3] {
                let stream = Stream::host(threads).unwrap().with_isa(isa);
                for (rows, inputs, width) in [(1, 64, 9), (2, 32, 1), (5, 96, 67), (19, 160, 70)] {
                    for format in TestFormat::ALL {
                        let x = numbers.tensor(DType::F32, &[rows, inputs]);
                        let gate = numbers.weight(format, width, inputs);
                        // The formats of gate and up may differ.
                        let up = numbers.weight(TestFormat::Bf16, width, inputs);
                        let mut out = Tensor::zeros(DType::F32, &[rows, width]);
                        swiglu(&stream, &x, &gate, &up, &mut out);
                        let results = out.as_slice::<f32>().chunks_exact(width);
                        for (x, results) in x.as_slice::<f32>().chunks_exact(inputs).zip(results) {
                            for (output, &result) in results.iter().enumerate() {
                                let (a, a_size) = exact_dot(x, &gate, output);
                                let (b, b_size) = exact_dot(x, &up, output);
                                let exact = a / (1.0 + (-a).exp()) * b;
                                let bound = 2e-6 * (a_size * b_size + 1e-30);
                                assert!((f64::from(result) - exact).abs() <= bound, "{format:?}");
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_in_any_company() {
        let mut numbers = Numbers(12);
        for isa in available() {
            let stream = Stream::host(1).unwrap().with_isa(isa);
            for dtype in [DType::F32, DType::BF16] {
                for format in TestFormat::ALL {
                    let x = numbers.tensor(dtype, &[20, 96]);
                    let gate = numbers.weight(format, 75, 96);
                    let up = numbers.weight(format, 75, 96);
                    let mut all = Tensor::zeros(dtype, &[20, 75]);
                    swiglu(&stream, &x, &gate, &up, &mut all);
                    for (first, count) in [(0, 1), (3, 2), (7, 5), (19, 1)] {
                        let mut out = Tensor::zeros(dtype, &[count, 75]);
                        swiglu(&stream, &copy_rows(&x, first..first + count), &gate, &up, &mut out);
                        for row in 0..count {
                            assert_eq!(out.row_bytes(row), all.row_bytes(first + row));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn large_values_saturate() {
        let stream = Stream::host(1).unwrap();
        for (value, expected) in [(200.0, 200.0), (-200.0, 0.0), (0.0, 0.0)] {
            let gate = Weight::float(Tensor::from_slice(&[1, 1], &[value as f32])).unwrap();
            let up = Weight::float(Tensor::from_slice(&[1, 1], &[1f32])).unwrap();
            let mut out = Tensor::zeros(DType::F32, &[1, 1]);
            swiglu(&stream, &Tensor::from_slice(&[1, 1], &[1f32]), &gate, &up, &mut out);
            assert!((out.as_slice::<f32>()[0] - expected).abs() < 1e-30);
        }
    }
}
