//! A mixture of experts: each row goes through the few experts that its router chose.
//!
//! Rows that chose the same expert pass through it together, so its weights are read once.
//! Invariant: a row's result does not depend on the other rows; its experts' outputs are added in
//! the order in which the router named them.

#[cfg(test)]
mod tests;

use std::ops::Range;

use super::{
    linear::{
        GRAIN_PRODUCTS, Inputs, Order, Outputs, Pieces, Prepared, Results, Scratch, Slices, UNIT,
        prepare, product, row_pitch,
    },
    swiglu::GatedUnit,
};
use crate::{DType, Stream, Tensor, Weight, lanes::multiversion};

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

/// A choice that no expert here serves.
const ELSEWHERE: u32 = u32::MAX;

/// Memory that [`moe`] works in, so that a pass does not allocate.
///
/// A choice is a pair of a row and one of its experts. Choices are sorted by expert; their place
/// in this order is their row in `inner` and `outer`.
#[derive(Debug)]
pub struct MoeScratch {
    rows_max: usize,
    experts_per_token: usize,
    hidden: usize,
    intermediate: usize,
    /// The choices of expert e are those from `starts[e]` to `starts[e + 1]`.
    starts: Vec<usize>,
    /// Row of each choice, sorted by expert.
    rows: Vec<u32>,
    /// Place of each choice in the order of the routing, or [`ELSEWHERE`].
    places: Vec<u32>,
    /// `[choices, intermediate]`, with room for any order.
    inner: Tensor,
    /// `[choices, hidden]`.
    outer: Tensor,
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
        let choices = rows_max * experts_per_token;
        Self {
            rows_max,
            experts_per_token,
            hidden,
            intermediate,
            starts: Vec::with_capacity(experts + 2),
            rows: vec![0; choices],
            places: vec![ELSEWHERE; choices],
            inner: Tensor::zeros(
                DType::F32,
                &[choices, row_pitch(Order::floats_max(intermediate))],
            ),
            outer: Tensor::zeros(DType::F32, &[choices, hidden]),
        }
    }

    /// Sorts the choices by expert, rows ascending.
    fn sort(&mut self, routing: &Routing, first_expert: usize, experts: usize) {
        let local = |expert: u32| {
            let index = (expert as usize).wrapping_sub(first_expert);
            (index < experts).then_some(index)
        };
        let chosen = &routing.experts;
        // Counts two places on, then sums: `starts[e + 1]` is the first choice of expert e, and
        // is the one after its last when all are placed.
        self.starts.clear();
        self.starts.resize(experts + 2, 0);
        for index in chosen.iter().filter_map(|&expert| local(expert)) {
            self.starts[index + 2] += 1;
        }
        for index in 2..experts + 2 {
            self.starts[index] += self.starts[index - 1];
        }
        for (choice, &expert) in chosen.iter().enumerate() {
            self.places[choice] = match local(expert) {
                None => ELSEWHERE,
                Some(index) => {
                    let place = self.starts[index + 1];
                    self.starts[index + 1] += 1;
                    self.rows[place] = (choice / routing.experts_per_token) as u32;
                    place as u32
                }
            };
        }
    }
}

/// Adds to each row of `out` `[rows, hidden]` what its experts make of that row of `x`
/// `[rows, hidden]`: out\[r\] += Σ_j weight\[r, j\] · expert\[r, j\](x\[r\]).
///
/// Of the experts that `routing` names, `experts` holds `first_expert` and those after it; the
/// others count for nothing here (expert parallelism). The sum is taken in f32 in the order of j,
/// added to what `out` holds, and rounded once (DeepSeekMoE, section 3).
///
/// # Panics
/// If shapes do not fit, activations are no floats, or `scratch` was made for less.
#[allow(clippy::too_many_arguments)]
pub fn moe(
    stream: &Stream,
    x: &Tensor,
    experts: &[Expert],
    first_expert: usize,
    routing: &Routing,
    scratch: &mut MoeScratch,
    out: &mut Tensor,
) {
    check(x, experts, routing, scratch, out);
    scratch.sort(routing, first_expert, experts.len());
    let choices = scratch.starts[experts.len()];
    if choices == 0 {
        return;
    }
    let mixture = Mixture {
        stream,
        experts,
        starts: &scratch.starts,
        rows: &scratch.rows,
        inner: Outputs::new(&mut scratch.inner),
        outer: Outputs::new(&mut scratch.outer),
        hidden: scratch.hidden,
        intermediate: scratch.intermediate,
    };
    mixture.gate(x);
    mixture.prepare_inner(choices);
    mixture.down();
    combine(stream, routing, &scratch.places, &scratch.outer, out);
}

fn check(x: &Tensor, experts: &[Expert], routing: &Routing, scratch: &MoeScratch, out: &Tensor) {
    let (hidden, intermediate) = (scratch.hidden, scratch.intermediate);
    assert!(x.rows() <= scratch.rows_max, "scratch is made for fewer rows");
    assert!(routing.experts_per_token <= scratch.experts_per_token, "scratch for fewer experts");
    assert_eq!((x.rows(), x.width()), (out.rows(), out.width()), "shapes of x and out");
    assert_eq!(x.width(), hidden, "width of the scratch");
    assert_eq!(x.rows(), routing.rows(), "rows of the routing");
    for expert in experts {
        for (weight, shape) in [
            (&expert.gate, (intermediate, hidden)),
            (&expert.up, (intermediate, hidden)),
            (&expert.down, (hidden, intermediate)),
        ] {
            assert_eq!((weight.out_features(), weight.in_features()), shape, "shape of an expert");
        }
    }
}

/// The experts and the choices that they serve.
struct Mixture<'a> {
    stream: &'a Stream,
    experts: &'a [Expert],
    starts: &'a [usize],
    rows: &'a [u32],
    inner: Outputs,
    outer: Outputs,
    hidden: usize,
    intermediate: usize,
}

impl Mixture<'_> {
    /// inner = silu(x · gateᵀ) ⊙ (x · upᵀ) of each choice.
    fn gate(&self, x: &Tensor) {
        let used = |(index, _): &(usize, &Expert)| self.starts[*index] < self.starts[index + 1];
        let orders = self.experts.iter().enumerate().filter(used);
        let orders = orders.flat_map(|(_, expert)| [&expert.gate, &expert.up].map(Order::of));
        let prepared = Prepared::new(self.stream, x, Slices::whole(self.hidden), orders);
        let isa = self.stream.isa();
        self.split(self.intermediate, 2 * self.hidden, |expert, outputs| {
            let choices = self.starts[expert]..self.starts[expert + 1];
            let Expert { gate, up, .. } = &self.experts[expert];
            let x = [gate, up].map(|weight| {
                prepared.slice(Order::of(weight), 0).pick(&self.rows[choices.clone()])
            });
            let pieces = Pieces::of_both(choices.len(), [gate, up]);
            let mut unit = GatedUnit::new(isa, gate, up, pieces);
            pieces.each(choices.len(), outputs, |rows, outputs| {
                let first = self.inner.direct(choices.start + rows.start, outputs.start);
                let results = first.expect("scratch is f32");
                // SAFETY: the rows are choices of this expert and the outputs are its own; only
                // this thread writes them.
                unsafe { unit.piece(&x, rows, outputs, results) };
            });
        });
    }

    /// Puts `inner` into the order that the experts' `down` needs.
    fn prepare_inner(&self, choices: usize) {
        let (isa, width) = (self.stream.isa(), self.intermediate);
        self.stream.split(choices, GRAIN_PRODUCTS.div_ceil(8 * width.max(1)), |range| {
            let mut expert = self.starts.partition_point(|&start| start <= range.start) - 1;
            for choice in range {
                while choice >= self.starts[expert + 1] {
                    expert += 1;
                }
                let row = self.inner.direct(choice, 0).expect("scratch is f32").first;
                let order = Order::of(&self.experts[expert].down);
                // SAFETY: a row of `inner` is wide enough and belongs to this thread.
                unsafe { prepare(isa, order, DType::F32, row.cast(), width, row) };
            }
        });
    }

    /// outer = inner · downᵀ of each choice.
    fn down(&self) {
        let isa = self.stream.isa();
        self.split(self.hidden, self.intermediate, |expert, outputs| {
            let choices = self.starts[expert]..self.starts[expert + 1];
            let Results { first, pitch } =
                self.inner.direct(choices.start, 0).expect("scratch is f32");
            let x = Inputs::new(first, pitch);
            let down = &self.experts[expert].down;
            let pieces = Pieces::of(choices.len(), down);
            let mut work = Scratch::take(pieces.work);
            pieces.each(choices.len(), outputs, |rows, outputs| {
                let first = self.outer.direct(choices.start + rows.start, outputs.start);
                let results = first.expect("scratch is f32");
                // SAFETY: as in `gate`.
                unsafe { product(isa, down, outputs, &x, rows, results, &mut work) };
            });
        });
    }

    /// Splits the outputs of all experts, `width` each, over threads, so that each gets about as
    /// many products, of `cost` each. Calls `work(expert, outputs)`.
    fn split(&self, width: usize, cost: usize, work: impl Fn(usize, Range<usize>) + Sync) {
        let units = width.div_ceil(UNIT);
        let choices = self.starts[self.experts.len()];
        // One of `choices · units` is a unit of outputs for one choice; all choices of an expert
        // share its outputs, so a unit of outputs goes to whoever has its first choice.
        let grain = GRAIN_PRODUCTS.div_ceil(UNIT * cost.max(1));
        self.stream.split(choices * units, grain, |range| {
            for expert in 0..self.experts.len() {
                let (start, end) = (self.starts[expert], self.starts[expert + 1]);
                let count = end - start;
                if count == 0 || end * units <= range.start || start * units >= range.end {
                    continue;
                }
                let unit = |at: usize| at.saturating_sub(start * units).div_ceil(count).min(units);
                let outputs = unit(range.start) * UNIT..(unit(range.end) * UNIT).min(width);
                if !outputs.is_empty() {
                    work(expert, outputs);
                }
            }
        });
    }
}

/// Adds to each row of `out` the weighted sum of its choices.
fn combine(stream: &Stream, routing: &Routing, places: &[u32], outer: &Tensor, out: &mut Tensor) {
    let (rows, width, isa) = (out.rows(), out.width(), stream.isa());
    let outer = outer.as_slice::<f32>();
    let outputs = Outputs::new(out);
    let grain = (GRAIN_PRODUCTS / 4).div_ceil(routing.experts_per_token * width.max(1));
    stream.split(rows, grain, |range| {
        let mut sum = Scratch::take(width);
        for row in range {
            let choices = row * routing.experts_per_token..(row + 1) * routing.experts_per_token;
            // SAFETY: `sum` has room for a row, and the row of `out` belongs to this thread.
            unsafe {
                let sum = std::slice::from_raw_parts_mut(sum.as_mut_ptr(), width);
                sum.fill(0.0);
                for choice in choices {
                    if places[choice] != ELSEWHERE {
                        let place = places[choice] as usize;
                        let values = &outer[place * width..(place + 1) * width];
                        add_weighted(isa, sum, routing.weights[choice], values);
                    }
                }
                outputs.add(isa, row, 0, sum.as_ptr(), width);
            }
        }
    });
}

multiversion! {
    /// sum += weight · values.
    fn add_weighted[](sum: &mut [f32], weight: f32, values: &[f32]) = add_each
}

#[inline(always)]
fn add_each<const FMA: bool, const LANES: usize>(sum: &mut [f32], weight: f32, values: &[f32]) {
    for (sum, &value) in sum.iter_mut().zip(values) {
        *sum += weight * value;
    }
}
