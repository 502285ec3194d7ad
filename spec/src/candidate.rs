//! The draft's best next tokens. The invariant: equal logits are ranked by index, so the choice is
//! the same on every rank and every run.

use crate::{SpecError, TokenId};

/// A token that the draft proposes, with its log-probability under the draft.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// The token. [`top_k_log_softmax`] leaves the index into its row here; a draft with a reduced
    /// vocabulary maps it to the target's id before it goes into a tree.
    pub token: TokenId,
    /// Natural logarithm of the probability, at most 0.
    pub log_probability: f32,
}

/// Leaves the `k` most probable tokens of a row of `logits` (`[vocabulary]`) in `out`, best first,
/// ties by ascending index. The softmax runs over the whole row; its sum is taken in a fixed order.
///
/// # Errors
/// [`SpecError::VocabularyTooSmall`] if the row has fewer than `k` entries, and
/// [`SpecError::LogitsInvalid`] if it has no softmax. `out` is empty then.
pub fn top_k_log_softmax(
    logits: &[f32],
    k: usize,
    out: &mut Vec<Candidate>,
) -> Result<(), SpecError> {
    out.clear();
    let vocabulary = logits.len();
    if k > vocabulary {
        return Err(SpecError::VocabularyTooSmall { k, vocabulary });
    }
    if k == 0 {
        return Ok(());
    }
    select(logits, k, out);
    let Some(&Candidate { log_probability: max, .. }) = out.first() else {
        return Err(SpecError::LogitsInvalid { vocabulary });
    };
    let sum = sum_of_exponentials(logits, max);
    if !max.is_finite() || !sum.is_finite() || out.len() < k {
        out.clear();
        return Err(SpecError::LogitsInvalid { vocabulary });
    }
    let log_sum = f64::from(max) + sum.ln();
    for candidate in out {
        let log_probability = f64::from(candidate.log_probability) - log_sum;
        candidate.log_probability = log_probability.min(0.0) as f32;
    }
    Ok(())
}

/// The `k` largest logits by insertion. Nearly every block fails the first comparison, which is
/// vector code.
fn select(logits: &[f32], k: usize, out: &mut Vec<Candidate>) {
    const BLOCK: usize = 64;
    for (block, values) in logits.chunks(BLOCK).enumerate() {
        if let Some(worst) = out.get(k - 1) {
            let best = maximum(values);
            if best <= worst.log_probability {
                continue;
            }
        }
        for (index, &logit) in values.iter().enumerate() {
            // Both tests turn NaN away.
            if out.len() == k {
                if logit > out[k - 1].log_probability {
                    out.pop();
                } else {
                    continue;
                }
            } else if logit.is_nan() {
                continue;
            }
            let token = (block * BLOCK + index) as TokenId;
            let place = out.partition_point(|chosen| chosen.log_probability >= logit);
            out.insert(place, Candidate { token, log_probability: logit });
        }
    }
}

/// The largest value; NaN is passed over.
fn maximum(values: &[f32]) -> f32 {
    const LANES: usize = 16;
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut chunks = values.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, value);
        }
    }
    lanes.iter().chain(chunks.remainder()).copied().fold(f32::NEG_INFINITY, larger)
}

/// Σ exp(logit - max). Sixteen running sums, so that the compiler can use vector registers.
fn sum_of_exponentials(logits: &[f32], max: f32) -> f64 {
    const LANES: usize = 16;
    // A block is short enough for f32 sums to keep their digits.
    const BLOCK: usize = 64 * LANES;
    let mut total = 0.0;
    for block in logits.chunks(BLOCK) {
        let mut lanes = [0.0_f32; LANES];
        let mut chunks = block.chunks_exact(LANES);
        for chunk in &mut chunks {
            for (lane, logit) in lanes.iter_mut().zip(chunk) {
                *lane += exponential(logit - max);
            }
        }
        for (lane, logit) in lanes.iter_mut().zip(chunks.remainder()) {
            *lane += exponential(logit - max);
        }
        total += lanes.iter().copied().map(f64::from).sum::<f64>();
    }
    total
}

/// exp(x) for x <= 0, to about 2 units in the last place; NaN stays NaN. Branch-free, unlike the
/// library's, so that loops over it become vector code.
#[inline]
fn exponential(x: f32) -> f32 {
    // Adding and subtracting 1.5 · 2^23 rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts, the first with few enough bits that its product with n is exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    // Below this the result is under 2^-125 and adds nothing to a sum that holds exp(0).
    let clamped = if x < -86.0 { -86.0 } else { x };
    let rounded = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = clamped - n * LN_2_HIGH - n * LN_2_LOW;
    // Taylor series of exp on |r| <= ln 2 / 2; the next term is below 1.2e-8 relative.
    let series = 1.0 / 720.0;
    let series = series * r + 1.0 / 120.0;
    let series = series * r + 1.0 / 24.0;
    let series = series * r + 1.0 / 6.0;
    let series = series * r + 0.5;
    let series = series * r + 1.0;
    let series = series * r + 1.0;
    // The lowest bits of `rounded` are n in two's complement: this is 2^n.
    let scale = f32::from_bits((rounded.to_bits() << 23).wrapping_add(127 << 23));
    if x < -86.0 { 0.0 } else { series * scale }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The obvious way: a full sort and the library's functions in f64.
    fn obvious(logits: &[f32], k: usize) -> Vec<(TokenId, f64)> {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        // A stable sort leaves equal logits, 0 and -0 among them, by index.
        order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).expect("no NaN"));
        let max = f64::from(logits[order[0]]);
        let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - max).exp()).sum();
        let log_probability = |token: usize| f64::from(logits[token]) - max - sum.ln();
        order[..k].iter().map(|&token| (token as TokenId, log_probability(token))).collect()
    }

    fn logits(count: usize, scale: f32) -> Vec<f32> {
        // Steps of 1/8 in a range that makes ties common.
        (0..count).map(|i| scale * ((i * 7919 % 1009) as f32 / 8.0 - 60.0)).collect()
    }

    #[test]
    fn equals_a_full_sort_and_the_library() {
        let mut out = Vec::new();
        for count in [1, 2, 15, 16, 17, 1009, 1025, 5000] {
            for scale in [0.0, 0.01, 0.3, 2.0] {
                let logits = logits(count, scale);
                for k in [0, 1, count.min(3), count.min(10)] {
                    top_k_log_softmax(&logits, k, &mut out).expect("finite logits");
                    assert_eq!(out.len(), k);
                    for (got, (token, log_probability)) in out.iter().zip(obvious(&logits, k)) {
                        assert_eq!(got.token, token, "{count} logits, scale {scale}");
                        let error = (f64::from(got.log_probability) - log_probability).abs();
                        let bound = 1e-6 * (1.0 + log_probability.abs());
                        assert!(error < bound, "{count} logits, scale {scale}: {error:e}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_exponential_is_accurate() {
        for step in 0..100_000 {
            let x = -86.0 * (step as f32 / 100_000.0);
            let exact = f64::from(x).exp();
            let error = (f64::from(exponential(x)) - exact).abs() / exact;
            assert!(error < 3e-7, "exp({x}) is off by {error:e}");
        }
        assert_eq!(exponential(0.0), 1.0);
        assert_eq!(exponential(-1000.0), 0.0);
        assert_eq!(exponential(f32::NEG_INFINITY), 0.0);
    }

    #[test]
    fn rows_without_a_softmax_are_refused() {
        let mut out = Vec::new();
        for logits in [[0.0, f32::NAN, 1.0], [0.0, f32::INFINITY, 1.0], [f32::NEG_INFINITY; 3]] {
            let error = top_k_log_softmax(&logits, 2, &mut out).expect_err("no softmax");
            assert_eq!(error, SpecError::LogitsInvalid { vocabulary: 3 });
            assert!(out.is_empty());
        }
        let error = top_k_log_softmax(&[0.0; 3], 4, &mut out).expect_err("three tokens");
        assert_eq!(error, SpecError::VocabularyTooSmall { k: 4, vocabulary: 3 });
    }

    #[test]
    fn excluded_tokens_come_last() {
        let mut out = Vec::new();
        let logits = [f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY, 1.0];
        top_k_log_softmax(&logits, 3, &mut out).expect("two tokens are possible");
        assert_eq!(out.iter().map(|best| best.token).collect::<Vec<_>>(), [1, 3, 0]);
        assert!((out[0].log_probability - 0.5_f32.ln()).abs() < 1e-6);
        assert_eq!(out[2].log_probability, f32::NEG_INFINITY);
    }
}
