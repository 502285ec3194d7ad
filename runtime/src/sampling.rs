//! From logits to tokens: penalties, the greedy choice, and the distribution that tokens are drawn
//! from.
//!
//! Invariant: plain and speculative decoding ask this module for the same distribution, so that
//! they differ in speed only.

use paceline_kernels::{Stream, Tensor, ops::argmax::argmax};
use paceline_spec::{
    Acceptance, Distribution, DraftTree, ProbabilityRows, accept_greedy, accept_sampled,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha12Rng;

use crate::{
    error::{Result, RuntimeError},
    request::{Request, Sampling},
};

mod penalties;

use penalties::Penalties;

/// Checks sampling parameters for a model of `vocabulary` tokens.
///
/// # Errors
/// [`RuntimeError::Request`] naming the parameter.
pub(crate) fn check(sampling: &Sampling, vocabulary: usize) -> Result<()> {
    let refuse = |what, got: String, limit: &str| {
        let (limit, advice) = (limit.to_owned(), "choose a value in this range");
        Err(RuntimeError::Request { what, got, limit, advice })
    };
    let Sampling { temperature, top_p, min_p, .. } = *sampling;
    if !(0.0..=1e4).contains(&temperature) {
        return refuse("temperature", temperature.to_string(), "it must lie in 0..=10000");
    }
    if !(top_p > 0.0 && top_p <= 1.0) {
        return refuse("top-p", top_p.to_string(), "it must lie above 0 and not above 1");
    }
    if !(0.0..=1.0).contains(&min_p) {
        return refuse("min-p", min_p.to_string(), "it must lie in 0..=1");
    }
    let repetition = sampling.repetition_penalty;
    if !(0.01..=100.0).contains(&repetition) {
        let what = "the repetition penalty";
        return refuse(what, repetition.to_string(), "it must lie in 0.01..=100");
    }
    let (presence, frequency) = (sampling.presence_penalty, sampling.frequency_penalty);
    for (what, value) in [("presence penalty", presence), ("frequency penalty", frequency)] {
        if !(-100.0..=100.0).contains(&value) {
            return refuse(what, value.to_string(), "it must lie in -100..=100");
        }
    }
    for (index, &(token, bias)) in sampling.logit_bias.iter().enumerate() {
        if token as usize >= vocabulary {
            let limit = format!("this model's ids end at {}", vocabulary - 1);
            return refuse("a token id of the logit bias", token.to_string(), &limit);
        }
        if !(-100.0..=100.0).contains(&bias) {
            return refuse("a logit bias", bias.to_string(), "it must lie in -100..=100");
        }
        if sampling.logit_bias[..index].iter().any(|entry| entry.0 == token) {
            let got = format!("there twice for token {token}");
            return refuse("a logit bias", got, "each token has one");
        }
    }
    Ok(())
}

/// Chooses the tokens of one request: penalties, filters and random numbers.
pub(crate) struct Sampler {
    random: ChaCha12Rng,
    filter: Filter,
    penalties: Option<Penalties>,
    /// The greedy choice after each node of a tree.
    choices: Vec<u32>,
    path: Vec<u32>,
}

/// Makes distributions of logits, in memory of its own.
struct Filter {
    sampling: Sampling,
    order: Vec<(f32, u32)>,
    tokens: Vec<u32>,
    probabilities: Vec<f32>,
}

/// Logits of the nodes of a tree: some rows of a pass.
#[derive(Clone, Copy)]
pub(crate) struct NodeLogits<'a> {
    pub(crate) stream: &'a Stream,
    /// f32 logits of the whole pass.
    pub(crate) logits: &'a Tensor,
    /// The largest logit's token of each of these rows; may be empty if nobody is
    /// [plainly greedy](Sampler::is_plainly_greedy).
    pub(crate) choices: &'a [u32],
    /// The row of the root.
    pub(crate) first_row: usize,
    /// Position of the root in its sequence.
    pub(crate) position: usize,
}

impl NodeLogits<'_> {
    /// The logits after a node.
    pub(crate) fn row(&self, node: usize) -> &[f32] {
        let width = self.logits.width();
        let first = (self.first_row + node) * width;
        &self.logits.as_slice::<f32>()[first..first + width]
    }

    /// The same, if there is no NaN among them and no infinity that could be chosen.
    fn checked_row(&self, node: usize) -> Result<&[f32]> {
        let row = self.row(node);
        // Without an early exit this is vector code.
        let invalid = |logit: f32| logit.is_nan() || logit == f32::INFINITY;
        match row.iter().fold(false, |any, &logit| any | invalid(logit)) {
            true => Err(RuntimeError::LogitsNotFinite { position: self.position }),
            false => Ok(row),
        }
    }
}

impl Sampler {
    /// The sampler of a request to a model that ends answers with `stop_ids`.
    pub(crate) fn new(request: &Request, stop_ids: &[u32]) -> Self {
        let sampling = request.sampling.clone();
        let random = ChaCha12Rng::seed_from_u64(sampling.seed.unwrap_or_else(entropy));
        let (order, tokens, probabilities) = (Vec::new(), Vec::new(), Vec::new());
        let filter = Filter { sampling, order, tokens, probabilities };
        let penalties = Penalties::of(request, stop_ids);
        Self { random, filter, penalties, choices: Vec::new(), path: Vec::new() }
    }

    /// Whether the largest raw logit is always taken.
    pub(crate) fn is_plainly_greedy(&self) -> bool {
        self.is_greedy() && self.penalties.is_none()
    }

    fn is_greedy(&self) -> bool {
        self.filter.sampling.temperature == 0.0
    }

    /// What is kept of a tree, and the token after it.
    ///
    /// # Errors
    /// [`RuntimeError::LogitsNotFinite`].
    pub(crate) fn accept(&mut self, tree: &DraftTree, nodes: NodeLogits<'_>) -> Result<Acceptance> {
        let acceptance = match self.is_greedy() {
            true => {
                self.choose(tree, nodes)?;
                accept_greedy(tree, &self.choices)?
            }
            false => {
                let Self { random, filter, penalties, path, .. } = self;
                let mut rows = Rows { filter, penalties: penalties.as_mut(), path, tree, nodes };
                accept_sampled(tree, &mut rows, &mut || random.random())?
            }
        };
        if let Some(penalties) = &mut self.penalties {
            penalties.record(&acceptance.emitted);
        }
        Ok(acceptance)
    }

    /// Fills `choices` along the path that they lead down; the others do not matter.
    fn choose(&mut self, tree: &DraftTree, nodes: NodeLogits<'_>) -> Result<()> {
        self.choices.clear();
        self.choices.resize(tree.len(), 0);
        self.path.clear();
        let mut next = Some(0);
        while let Some(node) = next {
            let row = nodes.checked_row(node)?;
            let mut choice = [0];
            match &mut self.penalties {
                None => choice[0] = nodes.choices[nodes.first_row + node],
                Some(penalties) => {
                    argmax(nodes.stream, penalties.apply(row, &self.path), &mut choice);
                }
            }
            if !row[choice[0] as usize].is_finite() {
                return Err(RuntimeError::LogitsNotFinite { position: nodes.position });
            }
            self.choices[node] = choice[0];
            self.path.push(choice[0]);
            next = tree.child_with_token(node, choice[0]);
        }
        Ok(())
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

/// Distributions after the nodes of a tree, made when asked for.
struct Rows<'a> {
    filter: &'a mut Filter,
    penalties: Option<&'a mut Penalties>,
    path: &'a mut Vec<u32>,
    tree: &'a DraftTree,
    nodes: NodeLogits<'a>,
}

impl ProbabilityRows for Rows<'_> {
    type Error = RuntimeError;

    fn row(&mut self, node: usize) -> Result<Distribution<'_>> {
        let mut row = self.nodes.checked_row(node)?;
        if let Some(penalties) = &mut self.penalties {
            // The root is part of the answer already.
            self.path.clear();
            let mut next = node;
            while let Some(parent) = self.tree.parent(next) {
                self.path.push(self.tree.tokens()[next]);
                next = parent;
            }
            row = penalties.apply(row, self.path).as_slice();
        }
        let position = self.nodes.position;
        self.filter.prepare(row).ok_or(RuntimeError::LogitsNotFinite { position })?;
        let Filter { tokens, probabilities, .. } = &*self.filter;
        Ok(Distribution::sparse(tokens, probabilities)?)
    }
}

/// A seed from the system's hash keys: not secret, only different each time.
fn entropy() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::time::SystemTime::now())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(sampling: Sampling) -> Filter {
        Sampler::new(&Request { sampling, ..Request::new(vec![0], 1) }, &[]).filter
    }

    fn distribution(sampling: Sampling, logits: &[f32]) -> Vec<(u32, f32)> {
        let mut sampler = filter(sampling);
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
        let mut sampler = filter(plain());
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
            Sampling { repetition_penalty: 0.0, ..plain() },
            Sampling { presence_penalty: f32::INFINITY, ..plain() },
            Sampling { frequency_penalty: f32::NAN, ..plain() },
            Sampling { logit_bias: vec![(4, 0.0)], ..plain() },
            Sampling { logit_bias: vec![(3, f32::NEG_INFINITY)], ..plain() },
            Sampling { logit_bias: vec![(3, 1.0), (2, 1.0), (3, 1.0)], ..plain() },
        ] {
            assert!(check(&sampling, 4).is_err(), "{sampling:?}");
        }
        let sampling = Sampling { logit_bias: vec![(3, 1.0), (2, -1.0)], ..plain() };
        assert!(check(&sampling, 4).is_ok() && check(&plain(), 4).is_ok());
    }

    /// A drafted token's distribution is the one that plain decoding would have after the tokens
    /// above it, whatever is drafted beside it.
    #[test]
    fn drafted_tokens_are_penalised_for_their_path() {
        let sampling = Sampling {
            repetition_penalty: 1.5,
            presence_penalty: 0.4,
            frequency_penalty: 0.3,
            ..plain()
        };
        let request = Request { sampling, ..Request::new(vec![0, 2], 9) };
        let logits = Tensor::from_slice(&[5, 4], &LOGITS.repeat(5));
        let stream = Stream::host(1).unwrap();
        let nodes = |first_row| NodeLogits {
            stream: &stream,
            logits: &logits,
            choices: &[],
            first_row,
            position: 3,
        };
        let row = |answer: &[u32], tree: &DraftTree, node: usize| -> Vec<(u32, f32)> {
            let mut sampler = Sampler::new(&request, &[]);
            let penalties = sampler.penalties.as_mut().unwrap();
            penalties.record(answer);
            let (filter, path) = (&mut sampler.filter, &mut sampler.path);
            let penalties = Some(penalties);
            let mut rows = Rows { filter, penalties, path, tree, nodes: nodes(0) };
            rows.row(node).unwrap();
            let pairs = filter.tokens.iter().copied().zip(filter.probabilities.iter().copied());
            pairs.collect()
        };
        let parents = vec![None, Some(0), Some(0), Some(2), Some(3)];
        let tree = DraftTree::from_parents(vec![1, 3, 2, 1, 1], parents).unwrap();
        let root = DraftTree::root_only(1);
        for (node, path) in [(0, &[][..]), (1, &[3]), (2, &[2]), (3, &[2, 1]), (4, &[2, 1, 1])] {
            let answer: Vec<u32> = [1].iter().chain(path).copied().collect();
            assert_eq!(row(&[1], &tree, node), row(&answer, &root, 0), "node {node}");
        }
    }
}
