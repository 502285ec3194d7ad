//! What is reported of the logits that a token was chosen from.

use crate::request::{Request, TokenEvent, TopLogits};

/// The event of token `id`, the answer's number `index`, chosen from the raw `logits` of the
/// token at `position`.
pub(crate) fn token_event(
    request: &Request,
    id: u32,
    index: usize,
    logits: &[f32],
    position: usize,
) -> TokenEvent {
    let mut event = TokenEvent { id, index, logprob: None, top_logprobs: Vec::new(), logits: None };
    let Request { logprobs, top_logprobs, top_logits, .. } = *request;
    if !logprobs && top_logprobs == 0 && top_logits == 0 {
        return event;
    }
    let sum = log_sum_exp(logits);
    let logprob = |logit: f32| (f64::from(logit) - sum) as f32;
    if logprobs {
        event.logprob = Some(logprob(logits[id as usize]));
    }
    if top_logprobs > 0 {
        event.top_logprobs = largest(logits, top_logprobs);
        event.top_logprobs.iter_mut().for_each(|entry| entry.1 = logprob(entry.1));
    }
    if top_logits > 0 {
        let mean = logits.iter().map(|&x| f64::from(x)).sum::<f64>() / logits.len() as f64;
        let (top, mean, logsumexp) = (largest(logits, top_logits), mean as f32, sum as f32);
        event.logits = Some(TopLogits { position, top, mean, logsumexp });
    }
    event
}

/// The largest logits and their tokens, largest first, ties by token.
fn largest(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let by_logit =
        |&a: &u32, &b: &u32| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b));
    let count = count.min(order.len());
    if count < order.len() && count > 0 {
        order.select_nth_unstable_by(count - 1, by_logit);
    }
    order.truncate(count);
    order.sort_unstable_by(by_logit);
    order.into_iter().map(|token| (token, logits[token as usize])).collect()
}

/// log Σ exp(logit), in f64.
fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum();
    largest + sum.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 4] = [0.0, 3.0, 1.0, 2.0];

    #[test]
    fn what_was_asked_for_is_reported() {
        let mut request = Request::new(vec![0], 1);
        let event = token_event(&request, 3, 5, &LOGITS, 7);
        assert_eq!((event.id, event.index, event.logprob), (3, 5, None));
        assert!(event.top_logprobs.is_empty() && event.logits.is_none());
        request.logprobs = true;
        request.top_logprobs = 3;
        request.top_logits = 2;
        let event = token_event(&request, 3, 5, &LOGITS, 7);
        let logits = event.logits.unwrap();
        assert_eq!((logits.position, logits.top), (7, vec![(1, 3.0), (3, 2.0)]));
        assert!((logits.mean - 1.5).abs() < 1e-6);
        assert!((logits.logsumexp - 3.440_19).abs() < 1e-4);
        assert!((event.logprob.unwrap() - (2.0 - 3.440_19)).abs() < 1e-4);
        let tokens: Vec<u32> = event.top_logprobs.iter().map(|entry| entry.0).collect();
        assert_eq!(tokens, [1, 3, 2]);
        assert!((event.top_logprobs[0].1 - (3.0 - 3.440_19)).abs() < 1e-4);
        request.top_logprobs = 9;
        let all = token_event(&request, 3, 5, &LOGITS, 7).top_logprobs;
        let sum: f64 = all.iter().map(|entry| f64::from(entry.1).exp()).sum();
        assert!(all.len() == 4 && (sum - 1.0).abs() < 1e-6);
    }
}
