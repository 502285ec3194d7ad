//! Next-token distributions of a tree's nodes. The invariant: a token of probability 0 is never
//! sampled, whatever rounding does to sums.

use std::ops::Range;

use crate::{SpecError, TokenId};

/// Probabilities over the vocabulary, dense or sparse. They should add up to 1; a sum that rounding
/// has moved a little is harmless.
#[derive(Debug, Clone, Copy)]
pub struct Distribution<'a> {
    tokens: Option<&'a [TokenId]>,
    probabilities: &'a [f32],
}

impl<'a> Distribution<'a> {
    /// One probability for each token, `[vocabulary]`.
    pub fn dense(probabilities: &'a [f32]) -> Self {
        Self { tokens: None, probabilities }
    }

    /// The tokens that can occur, ascending, and their probabilities; all others have 0. The
    /// natural form after top-k or top-p.
    ///
    /// # Errors
    /// [`SpecError::LengthMismatch`] and [`SpecError::SparseUnsorted`].
    pub fn sparse(tokens: &'a [TokenId], probabilities: &'a [f32]) -> Result<Self, SpecError> {
        if tokens.len() != probabilities.len() {
            return Err(SpecError::LengthMismatch {
                what: "the list of probabilities",
                expected: tokens.len(),
                got: probabilities.len(),
            });
        }
        match tokens.windows(2).position(|pair| pair[0] >= pair[1]) {
            Some(index) => Err(SpecError::SparseUnsorted { index: index + 1 }),
            None => Ok(Self { tokens: Some(tokens), probabilities }),
        }
    }

    /// A token's probability, 0 if it is not listed.
    pub fn probability(&self, token: TokenId) -> f32 {
        self.index(token).map_or(0.0, |index| self.probabilities[index])
    }

    /// Samples by the inverse of the cumulative distribution, with `coin` uniform in [0, 1): what a
    /// plain decode step does. None if no probability is positive.
    pub fn sample(&self, coin: f64) -> Option<TokenId> {
        self.sample_without(&[], coin)
    }

    /// As [`sample`](Self::sample), with the probabilities of `excluded` zeroed and the rest
    /// renormalised. None if nothing is left.
    pub fn sample_without(&self, excluded: &[TokenId], coin: f64) -> Option<TokenId> {
        let mut excluded: Vec<usize> =
            excluded.iter().filter_map(|&token| self.index(token)).collect();
        excluded.sort_unstable();
        let holds = |range: &Range<usize>| {
            let next = excluded.partition_point(|&index| index < range.start);
            excluded.get(next).is_some_and(|&index| index < range.end)
        };
        let weight = |index: usize| match excluded.binary_search(&index) {
            Ok(_) => 0.0,
            Err(_) => self.probabilities[index],
        };
        let sum = |range: Range<usize>| {
            if holds(&range) {
                range.map(|index| f64::from(weight(index))).sum()
            } else {
                sum_of(&self.probabilities[range])
            }
        };
        sample_index(self.probabilities.len(), coin, sum, weight).map(|index| self.token(index))
    }

    /// Samples from the normalised max(self - other, 0). None if it is 0 everywhere.
    pub fn sample_excess(&self, other: &Distribution<'_>, coin: f64) -> Option<TokenId> {
        let weight = |index: usize| {
            (self.probabilities[index] - other.probability(self.token(index))).max(0.0)
        };
        let sum = |range: Range<usize>| range.map(|index| f64::from(weight(index))).sum();
        sample_index(self.probabilities.len(), coin, sum, weight).map(|index| self.token(index))
    }

    /// Checks that all probabilities are finite and not negative; `node` is for the error.
    pub(crate) fn check(&self, node: usize) -> Result<(), SpecError> {
        let valid = |value: f32| (0.0..f32::INFINITY).contains(&value);
        // Without an early exit this is vector code.
        if self.probabilities.iter().fold(true, |all, &value| all & valid(value)) {
            return Ok(());
        }
        let index = self.probabilities.iter().position(|&value| !valid(value));
        let index = index.expect("one was found above");
        let (token, value) = (self.token(index), self.probabilities[index]);
        Err(SpecError::ProbabilityInvalid { node, token, value })
    }

    fn token(&self, index: usize) -> TokenId {
        self.tokens.map_or(index as TokenId, |tokens| tokens[index])
    }

    fn index(&self, token: TokenId) -> Option<usize> {
        match self.tokens {
            Some(tokens) => tokens.binary_search(&token).ok(),
            None => Some(token as usize).filter(|&index| index < self.probabilities.len()),
        }
    }
}

/// Gives the distribution at a tree's node, when it is asked for.
///
/// Verification asks for the rows of the accepted path only, the root's first, so an implementation
/// that runs temperature, top-k and top-p lazily into a buffer of its own saves the rest.
pub trait ProbabilityRows {
    /// What can go wrong when a row is prepared.
    type Error: From<SpecError>;

    /// The distribution of the token that follows `node`.
    ///
    /// # Errors
    /// Whatever the implementation cannot do; verification stops with it.
    fn row(&mut self, node: usize) -> Result<Distribution<'_>, Self::Error>;
}

/// Rows that are all there, `[nodes, vocabulary]`.
#[derive(Debug, Clone, Copy)]
pub struct DenseRows<'a> {
    probabilities: &'a [f32],
    vocabulary: usize,
}

impl<'a> DenseRows<'a> {
    /// Cuts `probabilities` into rows of `vocabulary` entries.
    ///
    /// # Errors
    /// [`SpecError::LengthMismatch`] unless it consists of whole rows.
    pub fn new(probabilities: &'a [f32], vocabulary: usize) -> Result<Self, SpecError> {
        let rows = probabilities.len().checked_div(vocabulary).unwrap_or(0);
        if rows * vocabulary != probabilities.len() {
            return Err(SpecError::LengthMismatch {
                what: "the table of probabilities",
                expected: rows * vocabulary,
                got: probabilities.len(),
            });
        }
        Ok(Self { probabilities, vocabulary })
    }
}

impl ProbabilityRows for DenseRows<'_> {
    type Error = SpecError;

    fn row(&mut self, node: usize) -> Result<Distribution<'_>, SpecError> {
        let range = node * self.vocabulary..(node + 1) * self.vocabulary;
        self.probabilities.get(range).map(Distribution::dense).ok_or(SpecError::LengthMismatch {
            what: "the table of probabilities, in rows,",
            expected: node + 1,
            got: self.probabilities.len().checked_div(self.vocabulary).unwrap_or(0),
        })
    }
}

/// The index at which the running sum of `weight` passes `coin` times the total. `sum` adds up the
/// weights of a range; whole blocks that stay below the mark are skipped by it.
fn sample_index(
    count: usize,
    coin: f64,
    sum: impl Fn(Range<usize>) -> f64,
    weight: impl Fn(usize) -> f32,
) -> Option<usize> {
    const BLOCK: usize = 256;
    let blocks = || (0..count).step_by(BLOCK).map(|start| start..count.min(start + BLOCK));
    let mark = coin * blocks().map(&sum).sum::<f64>();
    let mut below = 0.0;
    for block in blocks() {
        let block_sum = sum(block.clone());
        if mark >= below + block_sum {
            below += block_sum;
            continue;
        }
        for index in block {
            below += f64::from(weight(index));
            if mark < below && weight(index) > 0.0 {
                return Some(index);
            }
        }
    }
    // Sums in another order can differ in the last digit and leave a mark unpassed.
    (0..count).rev().find(|&index| weight(index) > 0.0)
}

/// Eight running sums, so that the compiler can use vector registers.
fn sum_of(values: &[f32]) -> f64 {
    let mut lanes = [0.0_f64; 8];
    let mut chunks = values.chunks_exact(8);
    for chunk in &mut chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(value);
        }
    }
    lanes.iter().sum::<f64>() + chunks.remainder().iter().copied().map(f64::from).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Weights over more than one block, most of them 0.
    fn row() -> Vec<f32> {
        let mut row: Vec<f32> =
            (0..1000).map(|i| if i % 7 == 3 { i as f32 } else { 0.0 }).collect();
        let sum: f32 = row.iter().sum();
        row.iter_mut().for_each(|weight| *weight /= sum);
        row
    }

    #[test]
    fn coins_find_the_tokens_of_the_cumulative_distribution() {
        let row = row();
        let dense = Distribution::dense(&row);
        let tokens: Vec<TokenId> = (0..1000).filter(|&token| row[token as usize] > 0.0).collect();
        let values: Vec<f32> = tokens.iter().map(|&token| row[token as usize]).collect();
        let sparse = Distribution::sparse(&tokens, &values).expect("sorted");
        let excluded = [997, 10, 500, 507];
        let kept = |token: usize| if excluded.contains(&(token as u32)) { 0.0 } else { row[token] };
        let total: f64 = (0..1000).map(|token| f64::from(kept(token))).sum();
        let mut below = 0.0;
        for token in 0..1000 {
            let weight = f64::from(kept(token)) / total;
            if weight > 0.0 {
                // Just inside both ends of the token's share.
                for coin in [below + 1e-9, below + weight - 1e-9] {
                    for form in [&dense, &sparse] {
                        let sampled = form.sample_without(&excluded, coin);
                        assert_eq!(sampled, Some(token as TokenId));
                    }
                }
            }
            below += weight;
        }
        for form in [&dense, &sparse] {
            assert_eq!(form.sample(0.0), Some(3));
            assert_eq!(form.sample(1.0), Some(997), "a coin of 1 is out of range, yet harmless");
            assert_eq!(form.sample_without(&tokens, 0.5), None);
            assert_eq!((form.probability(3), form.probability(4)), (row[3], 0.0));
            assert_eq!(form.probability(5000), 0.0);
        }
    }

    #[test]
    fn the_excess_over_another_distribution() {
        let p = Distribution::dense(&[0.5, 0.25, 0.25, 0.0]);
        let (tokens, values) = ([0, 3], [0.75, 0.25]);
        let q = Distribution::sparse(&tokens, &values).expect("sorted");
        assert_eq!(
            [0.0, 0.49, 0.51, 0.99].map(|coin| p.sample_excess(&q, coin)),
            [Some(1), Some(1), Some(2), Some(2)]
        );
        assert_eq!([0.3, 0.99].map(|coin| q.sample_excess(&p, coin)), [Some(0), Some(3)]);
        assert_eq!(p.sample_excess(&p, 0.5), None);
    }

    #[test]
    fn sparse_tokens_ascend() {
        let wrong = |tokens: &[TokenId]| Distribution::sparse(tokens, &[0.5, 0.5]).map(|_| ());
        assert_eq!(wrong(&[1, 1]), Err(SpecError::SparseUnsorted { index: 1 }));
        assert_eq!(wrong(&[2, 1]), Err(SpecError::SparseUnsorted { index: 1 }));
        assert!(matches!(wrong(&[1]), Err(SpecError::LengthMismatch { expected: 1, got: 2, .. })));
        assert_eq!(wrong(&[1, 2]), Ok(()));
    }
}
