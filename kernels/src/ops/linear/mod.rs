//! Products of activations with weights: y = x · Wᵀ.

use crate::{DType, Float, Stream, Tensor, Weight};

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
/// Sums are in f32 and rounded once to the type of `out`.
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
    _stream: &Stream,
    x: &Tensor,
    x_layout: HeadLayout,
    weight: &Weight,
    heads: usize,
    out: &mut Tensor,
    out_layout: HeadLayout,
) {
    assert!(heads > 0 && weight.out_features().is_multiple_of(heads), "heads of the weight");
    assert_eq!(x.rows(), out.rows(), "rows");
    let (outputs, inputs) = (weight.out_features() / heads, weight.in_features());
    let mut row = vec![0.0; x.width()];
    let mut matrix_row = vec![0.0; inputs];
    for r in 0..x.rows() {
        x.read_row_f32(r, &mut row);
        for h in 0..heads {
            let input = &row[x_layout.offset + h * x_layout.stride..][..inputs];
            for o in 0..outputs {
                weight.read_row_f32(h * outputs + o, &mut matrix_row);
                store(
                    out,
                    r,
                    out_layout.offset + h * out_layout.stride + o,
                    dot(input, &matrix_row),
                );
            }
        }
    }
}

pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

pub(super) fn store(out: &mut Tensor, row: usize, column: usize, value: f32) {
    fn each<T: Float>(out: &mut Tensor, index: usize, value: f32) {
        out.as_mut_slice::<T>()[index] = T::from_f32(value);
    }
    let index = row * out.width() + column;
    match out.dtype() {
        DType::F32 => each::<f32>(out, index, value),
        DType::F16 => each::<half::f16>(out, index, value),
        DType::BF16 => each::<half::bf16>(out, index, value),
        other => panic!("activations of type {other}"),
    }
}
