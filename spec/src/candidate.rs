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

/// The `k` largest logits by insertion: nearly every entry fails the first comparison.
fn select(logits: &[f32], k: usize, out: &mut Vec<Candidate>) {
    for (token, &logit) in logits.iter().enumerate() {
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
        let place = out.partition_point(|chosen| chosen.log_probability >= logit);
        out.insert(place, Candidate { token: token as TokenId, log_probability: logit });
    }
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
