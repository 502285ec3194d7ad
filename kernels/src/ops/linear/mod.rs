//! Products of activations with weights: y = x · Wᵀ.
//!
//! Weights are read as they are stored, in any of the formats of [`Weight`]. Start reading at
//! [`linear`]; `product` is the work of one thread, `tile` the inner loop, `lanes` what an
//! instruction set has to offer.
//!
//! Invariant: each element of a result is one dot product whose operations and their order depend
//! on the length, the weight's format and the instruction set only. So a row has the same bits
//! alone and among others, on one thread and on many.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod inputs;
mod lanes;
mod outputs;
mod portable;
mod product;
mod scratch;
#[cfg(test)]
pub(super) mod tests;
mod tile;

use std::ops::Range;

pub(super) use self::{
    inputs::{Inputs, Prepared, Slices, prepare},
    lanes::{Kernel, LANES_MAX, Lanes, run_on},
    outputs::Outputs,
    product::{Order, Pieces, Results, product, row_pitch},
    scratch::Scratch,
};
use crate::{Stream, Tensor, Weight};

/// Products that a thread should get, at least: several times what a fork costs.
pub(super) const GRAIN_PRODUCTS: usize = 1 << 18;
/// Outputs that are not split over threads: the largest tile.
pub(super) const UNIT: usize = 8;

/// Where the heads lie in the rows of a tensor: head `h` starts at column `offset + h · stride`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadLayout {
    /// Column of head 0.
    pub offset: usize,
    /// Columns from one head to the next.
    pub stride: usize,
}

/// out = x · Wᵀ, with `x` `[rows, in]`, `weight` `[out, in]`, `out` `[rows, out]`.
///
/// Activations are f32, bf16 or f16. Sums are in f32 and rounded once to the type of `out`.
///
/// # Panics
/// If shapes do not fit or activations are no floats.
pub fn linear(stream: &Stream, x: &Tensor, weight: &Weight, out: &mut Tensor) {
    let layout = HeadLayout { offset: 0, stride: 0 };
    assert_eq!(x.width(), weight.in_features(), "input width");
    assert_eq!(out.width(), weight.out_features(), "output width");
    linear_heads(stream, x, layout, weight, 1, out, layout);
}

/// The products of each head's slice of a row with the head's own part of the weight.
///
/// For each head h of N = out_features / heads outputs:
/// `out[r, out_layout(h) ..][..N] = x[r, x_layout(h) ..][..in] · W[h·N .. (h+1)·N]ᵀ`.
/// Columns of `out` outside the heads are left alone. This is the absorbed form of multi-head
/// latent attention (DeepSeek-V2, section 2.1.2).
///
/// # Panics
/// If shapes do not fit or activations are no floats.
pub fn linear_heads(
    stream: &Stream,
    x: &Tensor,
    x_layout: HeadLayout,
    weight: &Weight,
    heads: usize,
    out: &mut Tensor,
    out_layout: HeadLayout,
) {
    assert!(heads > 0 && weight.out_features().is_multiple_of(heads), "heads of the weight");
    assert_eq!(x.rows(), out.rows(), "rows");
    let head_outputs = weight.out_features() / heads;
    let last = out_layout.offset + (heads - 1) * out_layout.stride + head_outputs;
    assert!(last <= out.width(), "heads reach beyond the rows of the output");
    let separate = heads == 1 || out_layout.stride >= head_outputs;
    assert!(separate, "heads of the output overlap");
    if x.rows() == 0 || head_outputs == 0 {
        return;
    }

    let (rows, inputs) = (x.rows(), weight.in_features());
    let HeadLayout { offset, stride } = x_layout;
    let slices = Slices { count: heads, width: inputs, offset, stride };
    let order = Order::of(weight);
    let prepared = Prepared::new(stream, x, slices, [order]);
    let outputs = Outputs::new(out);
    let pieces = Pieces::of(rows, weight);
    let units = (heads * head_outputs).div_ceil(UNIT);
    stream.split(units, GRAIN_PRODUCTS.div_ceil(UNIT * rows * inputs.max(1)), |units| {
        let range = units.start * UNIT..(units.end * UNIT).min(heads * head_outputs);
        let mut worker = Worker::new(stream, weight, pieces, &outputs);
        for head in range.start / head_outputs..range.end.div_ceil(head_outputs) {
            let first = head * head_outputs;
            let part = range.start.max(first)..range.end.min(first + head_outputs);
            let column = (out_layout.offset + head * out_layout.stride).wrapping_sub(first);
            let x = prepared.slice(order, head);
            pieces.each(rows, part, |rows, outputs| worker.piece(&x, rows, outputs, column));
        }
    });
}

/// One thread's part of [`linear_heads`].
struct Worker<'a> {
    stream: &'a Stream,
    weight: &'a Weight,
    outputs: &'a Outputs,
    pieces: Pieces,
    work: Scratch,
    /// Results before they are rounded, if they are.
    unrounded: Scratch,
}

impl<'a> Worker<'a> {
    fn new(stream: &'a Stream, weight: &'a Weight, pieces: Pieces, outputs: &'a Outputs) -> Self {
        let work = Scratch::take(pieces.work);
        let rounds = outputs.direct(0, 0).is_none();
        let unrounded = Scratch::take(if rounds { pieces.rows * pieces.outputs } else { 0 });
        Self { stream, weight, outputs, pieces, work, unrounded }
    }

    /// Computes one piece; output o goes to column `column + o` (wrapping).
    fn piece(&mut self, x: &Inputs<'_>, rows: Range<usize>, outputs: Range<usize>, column: usize) {
        let isa = self.stream.isa();
        let column = outputs.start.wrapping_add(column);
        let direct = self.outputs.direct(rows.start, column);
        let pitch = self.pieces.outputs;
        let results =
            direct.unwrap_or_else(|| Results { first: self.unrounded.as_mut_ptr(), pitch });
        let (first_row, row_count, count) = (rows.start, rows.len(), outputs.len());
        // SAFETY: rows and outputs were checked to exist; `work` and `unrounded` have the sizes of
        // a piece; the elements of `out` belong to these outputs, so to this thread.
        unsafe {
            product(isa, self.weight, outputs, x, rows, results, &mut self.work);
            if direct.is_none() {
                for row in 0..row_count {
                    let from = results.first.add(row * pitch);
                    self.outputs.round(isa, first_row + row, column, from, count);
                }
            }
        }
    }
}
