//! Changes to logits that depend on the tokens so far: penalties, bias, and stop ids that must
//! wait.
//!
//! Invariant: a row's changes are a function of the prompt, the answer before it and the drafted
//! tokens on its path, so a drafted token is judged as plain decoding would judge it.

use std::collections::HashMap;

use paceline_kernels::{DType, Tensor};

use crate::request::{Request, Sampling};

/// The changes of one request.
pub(super) struct Penalties {
    repetition: f32,
    presence: f32,
    frequency: f32,
    bias: Vec<(u32, f32)>,
    /// Tokens that cannot be chosen among the first `tokens_min`.
    stop_ids: Vec<u32>,
    tokens_min: usize,
    /// Tokens of the answer so far.
    answered: usize,
    occurrences: HashMap<u32, Occurrences>,
    /// One row of changed logits.
    changed: Tensor,
}

/// Where a token occurs.
#[derive(Clone, Copy, Default)]
struct Occurrences {
    is_in_prompt: bool,
    in_answer: u32,
}

impl Penalties {
    /// The changes that a request asks for; none if it asks for none.
    pub(super) fn of(request: &Request, stop_ids: &[u32]) -> Option<Self> {
        let Sampling { repetition_penalty, presence_penalty, frequency_penalty, .. } =
            request.sampling;
        let stop_ids = match request.tokens_min {
            0 => &[],
            _ if request.ignore_eos => &[],
            _ => stop_ids,
        };
        let counts = repetition_penalty != 1.0 || presence_penalty != 0.0;
        let counts = counts || frequency_penalty != 0.0;
        if !counts && request.sampling.logit_bias.is_empty() && stop_ids.is_empty() {
            return None;
        }
        let mut occurrences: HashMap<u32, Occurrences> = HashMap::new();
        if repetition_penalty != 1.0 {
            let prompt = Occurrences { is_in_prompt: true, in_answer: 0 };
            occurrences.extend(request.prompt.iter().map(|&token| (token, prompt)));
        }
        Some(Self {
            repetition: repetition_penalty,
            presence: presence_penalty,
            frequency: frequency_penalty,
            bias: request.sampling.logit_bias.clone(),
            stop_ids: stop_ids.to_vec(),
            tokens_min: request.tokens_min,
            answered: 0,
            occurrences,
            changed: Tensor::zeros(DType::F32, &[1, 1]),
        })
    }

    /// Counts tokens of the answer.
    pub(super) fn record(&mut self, tokens: &[u32]) {
        self.answered += tokens.len();
        for &token in tokens {
            self.occurrences.entry(token).or_default().in_answer += 1;
        }
    }

    /// Logits as they are after `path`, tokens that were drafted after the answer so far.
    pub(super) fn apply(&mut self, logits: &[f32], path: &[u32]) -> &Tensor {
        if self.changed.width() != logits.len() {
            self.changed = Tensor::zeros(DType::F32, &[1, logits.len()]);
        }
        self.record(path);
        let Self { repetition, presence, frequency, .. } = *self;
        let changed = self.changed.as_mut_slice::<f32>();
        changed.copy_from_slice(logits);
        for (&token, &Occurrences { in_answer, .. }) in &self.occurrences {
            let logit = &mut changed[token as usize];
            *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
            if in_answer > 0 {
                *logit -= presence + in_answer as f32 * frequency;
            }
        }
        for &(token, bias) in &self.bias {
            changed[token as usize] += bias;
        }
        if self.answered < self.tokens_min {
            self.stop_ids.iter().for_each(|&id| changed[id as usize] = f32::NEG_INFINITY);
        }
        self.forget(path);
        &self.changed
    }

    /// Takes back what [`Penalties::record`] counted.
    fn forget(&mut self, tokens: &[u32]) {
        self.answered -= tokens.len();
        for token in tokens {
            let Some(found) = self.occurrences.get_mut(token) else { continue };
            found.in_answer -= 1;
            if found.in_answer == 0 && !found.is_in_prompt {
                self.occurrences.remove(token);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(request: &Request, answer: &[u32], path: &[u32]) -> Vec<f32> {
        let mut penalties = Penalties::of(request, &[3]).unwrap();
        penalties.record(answer);
        let logits = [2.0, -2.0, 1.0, 4.0];
        // Once more: what a path counted is taken back.
        penalties.apply(&logits, &[0, 1, 2, 3, 3]);
        penalties.apply(&logits, path).as_slice::<f32>().to_vec()
    }

    fn request(sampling: Sampling) -> Request {
        Request { sampling, ..Request::new(vec![0, 1], 8) }
    }

    #[test]
    fn repetition_counts_prompt_and_answer_once() {
        let request = request(Sampling { repetition_penalty: 2.0, ..Sampling::default() });
        assert_eq!(changed(&request, &[], &[]), [1.0, -4.0, 1.0, 4.0]);
        assert_eq!(changed(&request, &[2, 2, 0], &[]), [1.0, -4.0, 0.5, 4.0]);
        assert_eq!(changed(&request, &[2], &[3]), [1.0, -4.0, 0.5, 2.0]);
    }

    #[test]
    fn presence_and_frequency_count_the_answer_only() {
        let sampling = Sampling { presence_penalty: 0.5, ..Sampling::default() };
        assert_eq!(changed(&request(sampling), &[0, 0], &[1]), [1.5, -2.5, 1.0, 4.0]);
        let sampling = Sampling { frequency_penalty: 0.5, ..Sampling::default() };
        assert_eq!(changed(&request(sampling), &[0, 0], &[0, 1]), [0.5, -2.5, 1.0, 4.0]);
    }

    #[test]
    fn bias_comes_last_and_stop_ids_wait() {
        let sampling = Sampling {
            repetition_penalty: 2.0,
            logit_bias: vec![(0, -1.0), (2, 10.0)],
            ..Sampling::default()
        };
        let mut request = request(sampling);
        assert_eq!(changed(&request, &[], &[]), [0.0, -4.0, 11.0, 4.0]);
        request.tokens_min = 2;
        assert_eq!(changed(&request, &[2], &[])[3], f32::NEG_INFINITY);
        assert_eq!(changed(&request, &[2], &[1])[3], 4.0);
        request.ignore_eos = true;
        assert_eq!(changed(&request, &[2], &[])[3], 4.0);
        request.sampling = Sampling::default();
        assert!(Penalties::of(&request, &[3]).is_none());
    }
}
