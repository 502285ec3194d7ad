//! A mixture of experts: each row goes through the few experts that its router chose.

use super::{
    linear::{dot, store},
    swiglu::silu,
};
use crate::{Stream, Tensor, Weight};

/// One expert: down · (silu(gate · x) ⊙ (up · x)).
#[derive(Clone, Debug)]
pub struct Expert {
    /// `[intermediate, hidden]`.
    pub gate: Weight,
    /// `[intermediate, hidden]`.
    pub up: Weight,
    /// `[hidden, intermediate]`.
    pub down: Weight,
}

/// The experts of each row and their weights, as the router chose them.
#[derive(Clone, Debug)]
pub struct Routing {
    experts: Vec<u32>,
    weights: Vec<f32>,
    experts_per_token: usize,
}

impl Routing {
    /// A routing of no rows, with memory for `rows_max` rows of `experts_per_token` experts.
    ///
    /// # Panics
    /// If `experts_per_token` is 0.
    pub fn with_capacity(rows_max: usize, experts_per_token: usize) -> Self {
        assert!(experts_per_token > 0, "a row of a mixture goes to at least one expert");
        let choices = rows_max * experts_per_token;
        Self {
            experts: Vec::with_capacity(choices),
            weights: Vec::with_capacity(choices),
            experts_per_token,
        }
    }

    /// Sets the number of rows; new rows go to expert 0 with weight 0.
    pub fn set_rows(&mut self, rows: usize) {
        self.experts.resize(rows * self.experts_per_token, 0);
        self.weights.resize(rows * self.experts_per_token, 0.0);
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.experts.len() / self.experts_per_token
    }

    /// Experts of a row.
    pub fn experts_per_token(&self) -> usize {
        self.experts_per_token
    }

    /// Experts and weights of row `row`.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row(&self, row: usize) -> (&[u32], &[f32]) {
        let range = row * self.experts_per_token..(row + 1) * self.experts_per_token;
        (&self.experts[range.clone()], &self.weights[range])
    }

    /// Experts and weights of row `row`, writable.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row_mut(&mut self, row: usize) -> (&mut [u32], &mut [f32]) {
        let range = row * self.experts_per_token..(row + 1) * self.experts_per_token;
        (&mut self.experts[range.clone()], &mut self.weights[range])
    }
}

/// Memory that [`moe`] works in, so that a pass does not allocate.
#[derive(Debug)]
pub struct MoeScratch {
    rows_max: usize,
}

impl MoeScratch {
    /// Memory for up to `rows_max` rows of `experts_per_token` choices among `experts` experts
    /// (those that one call is given) of the given widths.
    pub fn for_rows(
        rows_max: usize,
        experts_per_token: usize,
        experts: usize,
        hidden: usize,
        intermediate: usize,
    ) -> Self {
        let _ = (experts_per_token, experts, hidden, intermediate);
        Self { rows_max }
    }
}

/// Adds to each row of `out` `[rows, hidden]` what its experts make of that row of `x`
/// `[rows, hidden]`: out\[r\] += Σ_j weight\[r, j\] · expert\[r, j\](x\[r\]).
///
/// Of the experts that `routing` names, `experts` holds `first_expert` and those after it; the
/// others count for nothing here (expert parallelism). The sum is taken in f32 in the order of j,
/// added to what `out` holds, and rounded once.
///
/// # Panics
/// If shapes do not fit, activations are no floats, or `scratch` was made for less.
#[allow(clippy::too_many_arguments)]
pub fn moe(
    _stream: &Stream,
    x: &Tensor,
    experts: &[Expert],
    first_expert: usize,
    routing: &Routing,
    scratch: &mut MoeScratch,
    out: &mut Tensor,
) {
    assert!(x.rows() <= scratch.rows_max, "scratch is made for fewer rows");
    assert_eq!((x.rows(), x.width()), (out.rows(), out.width()), "shapes of x and out");
    assert_eq!(x.rows(), routing.rows(), "rows of the routing");
    let mut input = vec![0.0; x.width()];
    let mut base = vec![0.0; x.width()];
    for r in 0..x.rows() {
        x.read_row_f32(r, &mut input);
        out.read_row_f32(r, &mut base);
        let mut sum = vec![0.0; x.width()];
        let (chosen, weights) = routing.row(r);
        for (&expert, &weight) in chosen.iter().zip(weights) {
            let Some(expert) = (expert as usize).checked_sub(first_expert) else { continue };
            let Some(expert) = experts.get(expert) else { continue };
            let mut matrix_row = vec![0.0; x.width()];
            let mut inner = vec![0.0; expert.gate.out_features()];
            for (o, value) in inner.iter_mut().enumerate() {
                expert.gate.read_row_f32(o, &mut matrix_row);
                let a = dot(&input, &matrix_row);
                expert.up.read_row_f32(o, &mut matrix_row);
                *value = silu(a) * dot(&input, &matrix_row);
            }
            let mut matrix_row = vec![0.0; inner.len()];
            for (o, value) in sum.iter_mut().enumerate() {
                expert.down.read_row_f32(o, &mut matrix_row);
                *value += weight * dot(&inner, &matrix_row);
            }
        }
        for (o, sum) in sum.iter().enumerate() {
            store(out, r, o, base[o] + sum);
        }
    }
}
