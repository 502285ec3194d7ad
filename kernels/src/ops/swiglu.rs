//! The gated unit of a feed-forward layer.

use super::linear::{dot, store};
use crate::{Stream, Tensor, Weight};

/// out = silu(x · gateᵀ) ⊙ (x · upᵀ), with `x` `[rows, in]`, `gate` and `up` `[out, in]`, `out`
/// `[rows, out]`; silu(a) = a / (1 + e^−a). All in f32, rounded once (Shazeer 2020, "GLU variants
/// improve transformer").
///
/// # Panics
/// If shapes do not fit or activations are no floats.
pub fn swiglu(_stream: &Stream, x: &Tensor, gate: &Weight, up: &Weight, out: &mut Tensor) {
    assert_eq!(gate.in_features(), x.width(), "input width of gate");
    assert_eq!(up.in_features(), x.width(), "input width of up");
    assert_eq!(gate.out_features(), out.width(), "output width of gate");
    assert_eq!(up.out_features(), out.width(), "output width of up");
    assert_eq!(x.rows(), out.rows(), "rows");
    let mut row = vec![0.0; x.width()];
    let mut matrix_row = vec![0.0; x.width()];
    for r in 0..x.rows() {
        x.read_row_f32(r, &mut row);
        for o in 0..out.width() {
            gate.read_row_f32(o, &mut matrix_row);
            let a = dot(&row, &matrix_row);
            up.read_row_f32(o, &mut matrix_row);
            store(out, r, o, silu(a) * dot(&row, &matrix_row));
        }
    }
}

pub(super) fn silu(a: f32) -> f32 {
    a / (1.0 + (-a).exp())
}
