//! Which part of each weight a rank needs (tensor and expert parallelism).
//!
//! Pure: sizes in, ranges out. Invariant: over all ranks, the parts of a split weight tile it
//! exactly once, and a replicated weight is whole on every rank. Start reading at
//! [`Parallel::part`].
//!
//! Attention is split by head, MLPs by width (so that each rank adds a partial sum), the output
//! head by vocabulary. Experts are split by width like MLPs, or with expert parallelism dealt out
//! whole: rank g of n owns experts g·E/n to (g+1)·E/n.

use std::ops::Range;

use crate::ModelError;
use crate::config::{ModelConfig, Quantization};

/// A rank's place among the ranks that share one model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parallel {
    /// Number of ranks (the tensor-parallel degree).
    pub tensor: usize,
    /// This rank, counted from 0.
    pub rank: usize,
    /// Whether routed experts are dealt out whole instead of being split. Attention, dense MLPs
    /// and shared experts are split in either case.
    pub expert_parallel: bool,
}

/// How one weight `[rows, columns]` is spread over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Whole on every rank.
    Replicated,
    /// Equal parts of the rows.
    Rows,
    /// Equal parts of the columns.
    Columns,
    /// Rows of the vocabulary, rounded up: the last ranks may have fewer, or none.
    Vocabulary,
    /// As [`Split::Rows`], or whole on the owner of the expert.
    ExpertRows {
        /// Index of the expert.
        expert: usize,
        /// Number of experts.
        experts: usize,
    },
    /// As [`Split::Columns`], or whole on the owner of the expert.
    ExpertColumns {
        /// Index of the expert.
        expert: usize,
        /// Number of experts.
        experts: usize,
    },
}

/// The part of a weight that a rank needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Rows (outputs).
    pub rows: Range<usize>,
    /// Columns (inputs).
    pub columns: Range<usize>,
}

/// Degrees up to this are proposed in messages.
const RANKS_PROPOSED_MAX: usize = 64;

impl Parallel {
    /// The only rank of an unsplit model.
    pub const SINGLE: Self = Self { tensor: 1, rank: 0, expert_parallel: false };

    /// Checks that the rank exists and that the model can be split over the ranks.
    ///
    /// # Errors
    /// [`ModelError::Rank`], and [`ModelError::Split`] with the dimension that does not divide and
    /// the numbers of ranks that would work.
    pub fn check(&self, config: &ModelConfig) -> Result<(), ModelError> {
        let ranks = self.tensor;
        if self.rank >= ranks {
            return Err(ModelError::Rank { rank: self.rank, ranks });
        }
        for (what, size, multiple) in divided(config, self.expert_parallel) {
            if !divides(size, ranks, multiple) {
                let possible = Self::possible(config, self.expert_parallel);
                return Err(ModelError::Split { what, size, ranks, multiple, possible });
            }
        }
        Ok(())
    }

    /// The numbers of ranks, up to 64, that a model can be split over.
    pub fn possible(config: &ModelConfig, expert_parallel: bool) -> Vec<usize> {
        let dimensions = divided(config, expert_parallel);
        let works = |ranks: &usize| {
            dimensions.iter().all(|&(_, size, multiple)| divides(size, *ranks, multiple))
        };
        (1..=RANKS_PROPOSED_MAX).filter(works).collect()
    }

    /// Heads of this rank.
    pub fn heads(&self, config: &ModelConfig) -> Range<usize> {
        self.even(config.heads)
    }

    /// Vocabulary ids that this rank computes logits for.
    pub fn vocabulary(&self, config: &ModelConfig) -> Range<usize> {
        self.rounded_up(config.vocabulary)
    }

    /// Experts that this rank holds at least a part of.
    pub fn experts(&self, experts: usize) -> Range<usize> {
        if self.expert_parallel { self.even(experts) } else { 0..experts }
    }

    /// The part of a weight of this shape that this rank needs; `None` if it needs nothing of it.
    pub fn part(&self, split: Split, [rows, columns]: [usize; 2]) -> Option<Part> {
        let by_rows = || Part { rows: self.even(rows), columns: 0..columns };
        let by_columns = || Part { rows: 0..rows, columns: self.even(columns) };
        let whole = || Part { rows: 0..rows, columns: 0..columns };
        let owned = |expert, experts| self.experts(experts).contains(&expert).then(whole);
        match split {
            Split::Replicated => Some(whole()),
            Split::Rows => Some(by_rows()),
            Split::Columns => Some(by_columns()),
            Split::Vocabulary => Some(Part { rows: self.rounded_up(rows), columns: 0..columns }),
            Split::ExpertRows { expert, experts } if self.expert_parallel => owned(expert, experts),
            Split::ExpertRows { .. } => Some(by_rows()),
            Split::ExpertColumns { expert, experts } if self.expert_parallel => {
                owned(expert, experts)
            }
            Split::ExpertColumns { .. } => Some(by_columns()),
        }
    }

    fn even(&self, size: usize) -> Range<usize> {
        let part = size / self.tensor;
        self.rank * part..(self.rank + 1) * part
    }

    fn rounded_up(&self, size: usize) -> Range<usize> {
        let part = size.div_ceil(self.tensor);
        (self.rank * part).min(size)..((self.rank + 1) * part).min(size)
    }
}

fn divides(size: usize, ranks: usize, multiple: usize) -> bool {
    ranks != 0 && size.is_multiple_of(ranks) && (size / ranks).is_multiple_of(multiple)
}

/// The dimensions that are cut into equal parts, and what each part must be a multiple of.
fn divided(config: &ModelConfig, expert_parallel: bool) -> Vec<(&'static str, usize, usize)> {
    let mut dimensions = vec![("num_attention_heads", config.heads, 1)];
    let moe_layers = (0..config.layers).filter(|&layer| config.is_moe_layer(layer)).count();
    if moe_layers < config.layers {
        dimensions.push(("intermediate_size", config.intermediate, 1));
    }
    let Some(moe) = config.moe.as_ref().filter(|_| moe_layers > 0) else { return dimensions };
    if expert_parallel {
        dimensions.push(("n_routed_experts", moe.experts, 1));
    } else {
        // Columns of packed weights are cut between groups only.
        let multiple = match config.quantization {
            Quantization::Int4PackQuantized { group_size } => group_size,
            Quantization::None | Quantization::Fp8Block { .. } => 1,
        };
        dimensions.push(("moe_intermediate_size", moe.intermediate, multiple));
    }
    let shared = moe.shared_experts * moe.intermediate;
    dimensions.push(("n_shared_experts * moe_intermediate_size", shared, 1));
    dimensions
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::demo;

    fn demo_config() -> ModelConfig {
        ModelConfig::from_json(demo::MODEL.text("config.json").unwrap()).unwrap()
    }

    fn ranks(tensor: usize, expert_parallel: bool) -> impl Iterator<Item = Parallel> {
        (0..tensor).map(move |rank| Parallel { tensor, rank, expert_parallel })
    }

    /// How often each element of the weight occurs over all ranks.
    fn cover(
        tensor: usize,
        expert_parallel: bool,
        split: Split,
        [rows, columns]: [usize; 2],
    ) -> Vec<usize> {
        let mut count = vec![0; rows * columns];
        for rank in ranks(tensor, expert_parallel) {
            let Some(part) = rank.part(split, [rows, columns]) else { continue };
            for row in part.rows {
                for column in part.columns.clone() {
                    count[row * columns + column] += 1;
                }
            }
        }
        count
    }

    proptest! {
        #[test]
        fn parts_tile_each_weight_once(
            tensor in 1usize..9,
            height in 1usize..9,
            width in 1usize..9,
            vocabulary in 1usize..70,
            expert_parallel: bool,
            expert in 0usize..24,
        ) {
            let (rows, columns) = (height * tensor, width * tensor);
            let experts = tensor * 3;
            let expert = expert % experts;
            for split in [
                Split::Rows,
                Split::Columns,
                Split::ExpertRows { expert, experts },
                Split::ExpertColumns { expert, experts },
            ] {
                let count = cover(tensor, expert_parallel, split, [rows, columns]);
                prop_assert!(count.iter().all(|&times| times == 1), "{split:?} {count:?}");
            }
            let count = cover(tensor, expert_parallel, Split::Vocabulary, [vocabulary, width]);
            prop_assert!(count.iter().all(|&times| times == 1), "{count:?}");
            let count = cover(tensor, expert_parallel, Split::Replicated, [height, width]);
            prop_assert!(count.iter().all(|&times| times == tensor));
            let owned: Vec<usize> = if expert_parallel {
                ranks(tensor, true).flat_map(|rank| rank.experts(experts)).collect()
            } else {
                ranks(1, false).flat_map(|rank| rank.experts(experts)).collect()
            };
            prop_assert_eq!(owned, (0..experts).collect::<Vec<_>>());
        }
    }

    #[test]
    fn refusals_name_the_dimension_and_what_works() {
        let config = demo_config();
        for rank in ranks(8, false).chain(ranks(8, true)) {
            rank.check(&config).unwrap();
        }
        let refuse = |tensor, rank, expert_parallel| {
            Parallel { tensor, rank, expert_parallel }.check(&config).unwrap_err().to_string()
        };
        let text = refuse(3, 0, false);
        assert!(text.contains("num_attention_heads = 8"), "{text}");
        assert!(text.contains("[1, 2, 4, 8]"), "{text}");
        assert!(refuse(2, 2, false).contains("rank 2 of 2"));
        assert!(refuse(0, 0, true).contains("rank 0 of 0"));
        // 16 heads would allow 16 ranks, but groups of 32 would not.
        let wide = ModelConfig { heads: 16, ..config.clone() };
        assert_eq!(Parallel::possible(&wide, false), [1, 2, 4, 8]);
        assert_eq!(Parallel::possible(&wide, true), [1, 2, 4, 8, 16]);
        let parallel = Parallel { tensor: 16, rank: 0, expert_parallel: false };
        let text = parallel.check(&wide).unwrap_err().to_string();
        assert!(text.contains("moe_intermediate_size = 256"), "{text}");
        assert!(text.contains("multiples of 32"), "{text}");
    }

    #[test]
    fn vocabulary_may_run_out() {
        let config = ModelConfig { vocabulary: 9, ..demo_config() };
        let rows: Vec<_> = ranks(4, false).map(|rank| rank.vocabulary(&config)).collect();
        assert_eq!(rows, [0..3, 3..6, 6..9, 9..9]);
    }
}
