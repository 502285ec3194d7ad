//! What a measurement found, as data. `--json` prints it as it is; the table and the plot show it.

use serde::Serialize;

use super::samples::Samples;
use crate::output::machine::Facts;

/// Everything.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) machine: Machine,
    pub(super) workload: Workload,
    /// Tokens a second of each setting.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) decode: Vec<Setting>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt: Option<Prompt>,
    /// What passes cost, in the order asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) passes: Vec<Pass>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) batch: Vec<Batch>,
    pub(super) verdicts: Vec<Verdict>,
}

/// Where it was measured, and on what.
#[derive(Debug, Serialize)]
pub(super) struct Machine {
    #[serde(flatten)]
    pub(super) facts: Facts,
    /// Of each rank.
    pub(super) threads: usize,
    pub(super) dtype: String,
    pub(super) ranks: usize,
    pub(super) model: String,
    pub(super) draft: Option<String>,
}

/// What was asked.
#[derive(Debug, Serialize)]
pub(super) struct Workload {
    pub(super) prompts: usize,
    /// Of each answer.
    pub(super) tokens: usize,
    pub(super) repetitions: usize,
}

/// A way of decoding.
#[derive(Debug, Serialize)]
pub(super) struct Setting {
    pub(super) name: String,
    /// Without prompts: from the first token of each answer to its last.
    pub(super) tokens_per_second: Samples,
    /// Emitted in a round, the target's own token included.
    pub(super) tokens_per_round: f64,
    pub(super) rounds: u64,
    pub(super) drafted: u64,
    pub(super) accepted: u64,
    /// Share of decoding that drafting took.
    pub(super) draft_share: f64,
    /// Share of decoding, prompts included, that rank 0 spent in all-reduces.
    pub(super) all_reduce_share: f64,
    /// Whether all answers were those of the first setting.
    pub(super) same_tokens: bool,
}

/// The processing of a long prompt, without a draft.
#[derive(Debug, Serialize)]
pub(super) struct Prompt {
    pub(super) tokens: usize,
    pub(super) tokens_per_second: Samples,
}

/// A pass of the model over some tokens of one sequence.
#[derive(Debug, Default, Serialize)]
pub(super) struct Pass {
    pub(super) tokens: usize,
    /// Tokens before them.
    pub(super) context: usize,
    pub(super) seconds: Samples,
    /// Share of it that rank 0 spent in all-reduces.
    pub(super) all_reduce_share: Samples,
}

/// Several sequences at the same time.
#[derive(Debug, Serialize)]
pub(super) struct Batch {
    pub(super) sequences: usize,
    pub(super) setting: String,
    /// Of all together, from when the last one has begun its answer.
    pub(super) tokens_per_second: Samples,
    /// How often a sequence had to give its place in the cache to another.
    pub(super) preemptions: usize,
}

/// Whether a promise is kept. The ratio is the median of those of neighbouring runs.
#[derive(Debug, Serialize)]
pub(super) struct Verdict {
    pub(super) compared: String,
    pub(super) ratio: f64,
    pub(super) at_least: f64,
    pub(super) holds: bool,
}

/// Names of the settings that verdicts are about.
const AUTO: &str = "auto";
const PLAIN: &str = "off";

/// `auto` is to reach this share of the best fixed setting, and this one of plain decoding.
const BEST_SHARE: f64 = 0.95;
const PLAIN_SHARE: f64 = 0.97;

/// What the settings say about `auto`.
pub(super) fn verdicts(settings: &[Setting]) -> Vec<Verdict> {
    let Some(auto) = settings.iter().find(|setting| setting.name == AUTO) else {
        return Vec::new();
    };
    let median = |setting: &&Setting| setting.tokens_per_second.median();
    let fixed = settings.iter().filter(|setting| setting.name != AUTO);
    let best = fixed.max_by(|a, b| median(a).total_cmp(&median(b)));
    let plain = settings.iter().find(|setting| setting.name == PLAIN);
    let verdict = |what: &str, other: &Setting, at_least| {
        let ratio = auto.tokens_per_second.ratio(&other.tokens_per_second);
        Verdict { compared: format!("auto to {what}"), ratio, at_least, holds: ratio >= at_least }
    };
    let best = best
        .map(|best| verdict(&format!("the best fixed setting ({})", best.name), best, BEST_SHARE));
    let plain = plain.map(|plain| verdict("plain decoding", plain, PLAIN_SHARE));
    best.into_iter().chain(plain).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting(name: &str, speeds: &[f64]) -> Setting {
        Setting {
            name: name.to_owned(),
            tokens_per_second: speeds.iter().copied().collect(),
            tokens_per_round: 1.0,
            rounds: 1,
            drafted: 0,
            accepted: 0,
            draft_share: 0.0,
            all_reduce_share: 0.0,
            same_tokens: true,
        }
    }

    #[test]
    fn auto_is_held_against_the_best_and_against_plain() {
        let settings = [
            setting("off", &[100.0, 50.0, 100.0]),
            setting("chain-2", &[110.0, 60.0, 120.0]),
            setting("auto", &[99.0, 57.0, 108.0]),
        ];
        let verdicts = verdicts(&settings);
        assert!(verdicts[0].compared.contains("chain-2"));
        assert!((verdicts[0].ratio - 0.9).abs() < 1e-9 && !verdicts[0].holds);
        assert!((verdicts[1].ratio - 1.08).abs() < 1e-9 && verdicts[1].holds);
        assert!(super::verdicts(&settings[..2]).is_empty());
    }
}
