//! The router of a mixture of experts: which experts a token goes to, and with what weight.
//!
//! DeepSeek-V3 (technical report, section 2.1.2): sigmoid scores, a bias that counts for the
//! choice only, groups of experts. DeepSeek-V2: softmax scores. All in f32; ties go to the lower
//! index, so that all ranks choose alike.

use crate::{Tensor, ops::moe::Routing};

/// How router logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// 1 / (1 + e^−x), each expert for itself.
    Sigmoid,
    /// Softmax over all experts.
    Softmax,
}

/// How a group of experts is rated when groups are limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupScore {
    /// Its largest score (DeepSeek-V2, `group_limited_greedy`).
    Largest,
    /// The sum of its two largest biased scores (DeepSeek-V3, `noaux_tc`).
    SumOfTwo,
}

/// Parameters of [`route`].
#[derive(Clone, Copy, Debug)]
pub struct RouterParameters {
    /// Scores of logits.
    pub scoring: Scoring,
    /// Rating of groups.
    pub group_score: GroupScore,
    /// Number of groups of experts (1: no grouping).
    pub groups: usize,
    /// Groups that a token may use.
    pub groups_per_token: usize,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub normalize: bool,
    /// Factor on all weights.
    pub scale: f32,
}

/// Chooses experts for each row of f32 `logits` `[rows, experts]`; `bias` f32 `[experts]`.
///
/// The number of experts a token is that of `routing`, whose rows are set.
///
/// # Panics
/// If shapes do not fit.
pub fn route(
    logits: &Tensor,
    bias: Option<&Tensor>,
    parameters: &RouterParameters,
    routing: &mut Routing,
) {
    let experts = logits.width();
    let per_token = routing.experts_per_token();
    assert!(per_token <= experts && experts.is_multiple_of(parameters.groups));
    routing.set_rows(logits.rows());
    let bias = bias.map(|bias| bias.as_slice::<f32>());
    SCRATCH.with_borrow_mut(|scratch| {
        for (row, logits) in logits.as_slice::<f32>().chunks_exact(experts).enumerate() {
            let (chosen, weights) = routing.row_mut(row);
            route_row(logits, bias, parameters, scratch, chosen, weights);
        }
    });
}

#[derive(Default)]
struct Scratch {
    scores: Vec<f32>,
    biased: Vec<f32>,
    groups: Vec<f32>,
}

thread_local! {
    static SCRATCH: std::cell::RefCell<Scratch> = std::cell::RefCell::default();
}

fn route_row(
    logits: &[f32],
    bias: Option<&[f32]>,
    parameters: &RouterParameters,
    scratch: &mut Scratch,
    chosen: &mut [u32],
    weights: &mut [f32],
) {
    let Scratch { scores, biased, groups } = scratch;
    scores.clear();
    match parameters.scoring {
        Scoring::Sigmoid => scores.extend(logits.iter().map(|x| 1.0 / (1.0 + (-x).exp()))),
        Scoring::Softmax => {
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            scores.extend(logits.iter().map(|x| (x - largest).exp()));
            let total: f32 = scores.iter().sum();
            scores.iter_mut().for_each(|score| *score /= total);
        }
    }
    biased.clear();
    match bias {
        Some(bias) => biased.extend(scores.iter().zip(bias).map(|(score, bias)| score + bias)),
        None => biased.extend_from_slice(scores),
    }
    if parameters.groups > 1 {
        drop_groups(parameters, biased, groups);
    }
    for choice in chosen.iter_mut() {
        let best = first_largest(biased);
        *choice = best as u32;
        biased[best] = f32::NEG_INFINITY;
    }
    let total: f32 = chosen.iter().map(|&expert| scores[expert as usize]).sum();
    let factor = match parameters.normalize {
        true => parameters.scale / (total + 1e-20),
        false => parameters.scale,
    };
    for (weight, &expert) in weights.iter_mut().zip(chosen.iter()) {
        *weight = scores[expert as usize] * factor;
    }
}

/// Puts all experts outside the best groups out of reach.
fn drop_groups(parameters: &RouterParameters, biased: &mut [f32], ratings: &mut Vec<f32>) {
    let size = biased.len() / parameters.groups;
    ratings.clear();
    ratings.extend(biased.chunks_exact(size).map(|group| {
        let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for &score in group {
            if score > first {
                (first, second) = (score, first);
            } else if score > second {
                second = score;
            }
        }
        match parameters.group_score {
            GroupScore::Largest => first,
            GroupScore::SumOfTwo => first + second,
        }
    }));
    for _ in 0..parameters.groups_per_token {
        let best = first_largest(ratings);
        ratings[best] = f32::NAN;
    }
    for (group, rating) in biased.chunks_exact_mut(size).zip(ratings) {
        if !rating.is_nan() {
            group.fill(f32::NEG_INFINITY);
        }
    }
}

/// Index of the first largest number that is not NaN; 0 if all is −∞ or NaN (corrupt weights), so
/// that an expert may then be chosen twice, but nothing panics.
fn first_largest(values: &[f32]) -> usize {
    let mut best = 0;
    let mut largest = f32::NEG_INFINITY;
    for (index, &value) in values.iter().enumerate() {
        if value > largest {
            (best, largest) = (index, value);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(scoring: Scoring, groups: usize, kept: usize) -> RouterParameters {
        RouterParameters {
            scoring,
            group_score: GroupScore::SumOfTwo,
            groups,
            groups_per_token: kept,
            normalize: true,
            scale: 2.0,
        }
    }

    fn sigmoid(x: f32) -> f32 {
        1.0 / (1.0 + (-x).exp())
    }

    #[test]
    fn bias_chooses_but_does_not_weigh() {
        let logits = Tensor::from_slice(&[1, 4], &[0.0f32, 1.0, 2.0, 3.0]);
        let bias = Tensor::from_slice(&[4], &[10.0f32, 0.0, 0.0, 0.0]);
        let mut routing = Routing::with_capacity(1, 2);
        route(&logits, Some(&bias), &parameters(Scoring::Sigmoid, 1, 1), &mut routing);
        let (chosen, weights) = routing.row_mut(0);
        assert_eq!(chosen, [0, 3]);
        let total = sigmoid(0.0) + sigmoid(3.0);
        assert!((weights[0] - 2.0 * sigmoid(0.0) / total).abs() < 1e-6);
        assert!((weights[1] - 2.0 * sigmoid(3.0) / total).abs() < 1e-6);
    }

    #[test]
    fn only_the_best_groups_are_used() {
        // Group 0 has the single best expert, group 1 the best pair.
        let logits = Tensor::from_slice(&[1, 4], &[5.0f32, -9.0, 2.0, 2.0]);
        let mut routing = Routing::with_capacity(1, 2);
        route(&logits, None, &parameters(Scoring::Sigmoid, 2, 1), &mut routing);
        assert_eq!(routing.row_mut(0).0, [2, 3]);
        let largest = RouterParameters {
            group_score: GroupScore::Largest,
            ..parameters(Scoring::Softmax, 2, 1)
        };
        route(&logits, None, &largest, &mut routing);
        assert_eq!(routing.row_mut(0).0, [0, 1]);
    }

    #[test]
    fn ties_go_to_the_lower_index_and_nan_does_not_panic() {
        let mut routing = Routing::with_capacity(2, 3);
        let logits = Tensor::from_slice(
            &[2, 4],
            &[1.0, 1.0, 1.0, 1.0, f32::NAN, f32::NAN, f32::NAN, f32::NAN],
        );
        route(&logits, None, &parameters(Scoring::Sigmoid, 1, 1), &mut routing);
        assert_eq!(routing.row_mut(0).0, [0, 1, 2]);
        assert_eq!(routing.row_mut(1).0, [0, 0, 0]);
    }
}
