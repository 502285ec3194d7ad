//! From logits to the distribution that tokens are drawn from.
//!
//! Invariant: plain and speculative decoding ask this module for the same distribution, so that
//! they differ in speed only.

use paceline_kernels::Tensor;
use paceline_spec::{Distribution, ProbabilityRows};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha12Rng;

use crate::{
    error::{Result, RuntimeError},
    request::{Sampling, TopLogits},
};

/// Checks sampling parameters.
///
/// # Errors
/// [`RuntimeError::Request`] naming the parameter.
pub(crate) fn check(sampling: &Sampling) -> Result<()> {
    let refuse = |what, value: f32, limit: &str| {
        Err(RuntimeError::Request {
            what,
            got: value.to_string(),
            limit: limit.to_owned(),
            advice: "choose a value in this range",
        })
    };
    if !(0.0..=1e4).contains(&sampling.temperature) {
        return refuse("temperature", sampling.temperature, "it must lie in 0..=10000");
    }
    if !(sampling.top_p > 0.0 && sampling.top_p <= 1.0) {
        return refuse("top-p", sampling.top_p, "it must lie above 0 and not above 1");
    }
    if !(0.0..=1.0).contains(&sampling.min_p) {
        return refuse("min-p", sampling.min_p, "it must lie in 0..=1");
    }
    Ok(())
}

/// Random numbers and filters of one request.
pub(crate) struct Sampler {
    random: ChaCha12Rng,
    filter: Filter,
}

/// Makes distributions of logits, in memory of its own.
struct Filter {
    sampling: Sampling,
    order: Vec<(f32, u32)>,
    tokens: Vec<u32>,
    probabilities: Vec<f32>,
}

impl Sampler {
    pub(crate) fn new(sampling: Sampling) -> Self {
        let random = ChaCha12Rng::seed_from_u64(sampling.seed.unwrap_or_else(entropy));
        let (order, tokens, probabilities) = (Vec::new(), Vec::new(), Vec::new());
        Self { random, filter: Filter { sampling, order, tokens, probabilities } }
    }

    /// Whether the largest logit is always taken.
    pub(crate) fn is_greedy(&self) -> bool {
        self.filter.sampling.temperature == 0.0
    }

    /// The distributions after each row of f32 `logits`, whose first row is at `position`, and
    /// coins uniform in [0, 1).
    pub(crate) fn rows<'a>(
        &'a mut self,
        logits: &'a Tensor,
        position: usize,
    ) -> (Rows<'a>, impl FnMut() -> f64 + 'a) {
        let Self { random, filter } = self;
        (Rows { filter, logits, position }, || random.random())
    }
}

impl Filter {
    /// Fills `tokens` and `probabilities` from one row of logits.
    fn prepare(&mut self, logits: &[f32]) -> Option<()> {
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.sampling;
        if logits.iter().any(|logit| logit.is_nan()) {
            return None;
        }
        self.order.clear();
        self.order.extend(logits.iter().enumerate().map(|(token, &logit)| (logit, token as u32)));
        let by_logit = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        if top_k > 0 && top_k < self.order.len() {
            self.order.select_nth_unstable_by(top_k - 1, by_logit);
            self.order.truncate(top_k);
        }
        let largest = self.order.iter().map(|entry| entry.0).fold(f32::NEG_INFINITY, f32::max);
        if !largest.is_finite() {
            return None;
        }
        let mut total = 0.0f64;
        for entry in &mut self.order {
            entry.0 = ((entry.0 - largest) / temperature).exp();
            total += f64::from(entry.0);
        }
        if !total.is_finite() {
            return None;
        }
        // The largest has weight 1, so min-p is a bound on weights.
        if min_p > 0.0 {
            self.order.retain(|entry| entry.0 >= min_p);
        }
        if top_p < 1.0 {
            self.order.sort_unstable_by(by_logit);
            let mut sum = 0.0;
            let enough = |entry: &(f32, u32)| {
                sum += f64::from(entry.0);
                sum >= f64::from(top_p) * total
            };
            if let Some(last) = self.order.iter().position(enough) {
                self.order.truncate(last + 1);
            }
        }
        self.order.sort_unstable_by_key(|entry| entry.1);
        let kept: f64 = self.order.iter().map(|entry| f64::from(entry.0)).sum();
        self.tokens.clear();
        self.tokens.extend(self.order.iter().map(|entry| entry.1));
        self.probabilities.clear();
        let share = |entry: &(f32, u32)| (f64::from(entry.0) / kept) as f32;
        self.probabilities.extend(self.order.iter().map(share));
        Some(())
    }
}

/// Distributions after the rows of one pass, made when asked for.
pub(crate) struct Rows<'a> {
    filter: &'a mut Filter,
    logits: &'a Tensor,
    position: usize,
}

impl ProbabilityRows for Rows<'_> {
    type Error = RuntimeError;

    fn row(&mut self, node: usize) -> Result<Distribution<'_>> {
        let width = self.logits.width();
        let row = &self.logits.as_slice::<f32>()[node * width..(node + 1) * width];
        let position = self.position;
        self.filter.prepare(row).ok_or(RuntimeError::LogitsNotFinite { position })?;
        let Filter { tokens, probabilities, .. } = &*self.filter;
        Ok(Distribution::sparse(tokens, probabilities)?)
    }
}

/// The largest logits of a row, and its mean and log-sum-exp.
pub(crate) fn top_logits(logits: &[f32], position: usize, count: usize) -> TopLogits {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let by_logit =
        |&a: &u32, &b: &u32| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b));
    let count = count.min(order.len());
    if count < order.len() && count > 0 {
        order.select_nth_unstable_by(count - 1, by_logit);
    }
    order.truncate(count);
    order.sort_unstable_by(by_logit);
    let top = order.into_iter().map(|token| (token, logits[token as usize])).collect();
    let mean = logits.iter().map(|&x| f64::from(x)).sum::<f64>() / logits.len() as f64;
    TopLogits { position, top, mean: mean as f32, logsumexp: log_sum_exp(logits) as f32 }
}

/// log Σ exp(logit), in f64.
pub(crate) fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum();
    largest + sum.ln()
}

/// A seed from the system's hash keys: not secret, only different each time.
fn entropy() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::time::SystemTime::now())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn distribution(sampling: Sampling, logits: &[f32]) -> Vec<(u32, f32)> {
        let mut sampler = Sampler::new(sampling).filter;
        sampler.prepare(logits).unwrap();
        sampler.tokens.iter().copied().zip(sampler.probabilities.iter().copied()).collect()
    }

    const LOGITS: [f32; 4] = [0.0, 3.0, 1.0, 2.0];

    fn plain() -> Sampling {
        Sampling { temperature: 1.0, ..Sampling::default() }
    }

    #[test]
    fn temperature_divides_logits() {
        let got = distribution(Sampling { temperature: 2.0, ..plain() }, &LOGITS);
        let total: f64 = LOGITS.iter().map(|&x| (f64::from(x) / 2.0).exp()).sum();
        for ((token, probability), logit) in got.into_iter().zip(LOGITS) {
            let expected = (f64::from(logit) / 2.0).exp() / total;
            assert!((f64::from(probability) - expected).abs() < 1e-6, "token {token}");
        }
    }

    #[test]
    fn filters_keep_the_right_tokens() {
        let tokens = |sampling| -> Vec<u32> {
            distribution(sampling, &LOGITS).into_iter().map(|entry| entry.0).collect()
        };
        assert_eq!(tokens(Sampling { top_k: 2, ..plain() }), [1, 3]);
        // Probabilities of tokens 1, 3, 2, 0: 0.644, 0.237, 0.087, 0.032.
        assert_eq!(tokens(Sampling { top_p: 0.6, ..plain() }), [1]);
        assert_eq!(tokens(Sampling { top_p: 0.7, ..plain() }), [1, 3]);
        assert_eq!(tokens(Sampling { top_p: 0.9, ..plain() }), [1, 2, 3]);
        assert_eq!(tokens(Sampling { min_p: 0.3, ..plain() }), [1, 3]);
        assert_eq!(tokens(Sampling { top_k: 9, ..plain() }), [0, 1, 2, 3]);
        let sum: f32 = distribution(Sampling { top_p: 0.9, ..plain() }, &LOGITS)
            .into_iter()
            .map(|entry| entry.1)
            .sum();
        assert!((sum - 1.0).abs() < 1e-6);
    }

    #[test]
    fn numbers_that_are_no_logits_are_noticed() {
        let mut sampler = Sampler::new(plain()).filter;
        assert!(sampler.prepare(&[f32::NAN; 3]).is_none());
        assert!(sampler.prepare(&[f32::NEG_INFINITY; 3]).is_none());
        assert!(sampler.prepare(&[1.0, f32::NAN, 2.0]).is_none());
        assert!(sampler.prepare(&[1.0, f32::INFINITY]).is_none());
        assert!(sampler.prepare(&[1.0, f32::NEG_INFINITY]).is_some());
    }

    #[test]
    fn parameters_are_checked() {
        for sampling in [
            Sampling { temperature: -1.0, ..plain() },
            Sampling { temperature: f32::NAN, ..plain() },
            Sampling { top_p: 0.0, ..plain() },
            Sampling { min_p: 1.5, ..plain() },
        ] {
            assert!(check(&sampling).is_err(), "{sampling:?}");
        }
        assert!(check(&plain()).is_ok());
    }

    #[test]
    fn largest_logits_come_first() {
        let top = top_logits(&LOGITS, 7, 2);
        assert_eq!(top.top, [(1, 3.0), (3, 2.0)]);
        assert!((top.mean - 1.5).abs() < 1e-6);
        assert!((top.logsumexp - 3.440_19).abs() < 1e-4);
    }
}
