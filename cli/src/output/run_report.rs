//! What a run did: one line for people, one JSON object for programs.

use std::{collections::BTreeMap, time::Duration};

use paceline_comm::{Collective, Usage};
use paceline_runtime::{FinishReason, Outcome, Request, Speculation, TokenEvent};
use serde_json::{Value, json};

/// Calls of all-reduce per back end.
fn all_reduces(usage: &[Usage]) -> BTreeMap<&'static str, u64> {
    let reduces = usage.iter().filter(|usage| usage.collective == Collective::AllReduce);
    reduces.map(|usage| (usage.backend, usage.calls)).collect()
}

/// What came to the counts of `before`.
pub(crate) fn usage_since(before: &[Usage], now: &[Usage]) -> Vec<Usage> {
    let same = |a: &Usage, b: &Usage| (a.backend, a.collective) == (b.backend, b.collective);
    let since = |usage: &Usage| match before.iter().find(|earlier| same(earlier, usage)) {
        None => *usage,
        Some(earlier) => Usage {
            calls: usage.calls - earlier.calls,
            bytes: usage.bytes - earlier.bytes,
            seconds: usage.seconds - earlier.seconds,
            ..*usage
        },
    };
    now.iter().map(since).collect()
}

/// The summary line of a request by itself: with the prompt's length, and which limit cut it.
pub(crate) fn request_summary(
    request: &Request,
    context_max: usize,
    outcome: &Outcome,
    usage: &[Usage],
    ranks: usize,
) -> String {
    let limit = match outcome.tokens.len() < request.tokens_max {
        true => format!("the context of {context_max}"),
        false => format!("--max-tokens {}", request.tokens_max),
    };
    let line = summary_with_limit(outcome, usage, ranks, &limit);
    format!("prompt tokens: {}; {line}", request.prompt.len())
}

/// The summary line.
pub(crate) fn summary(outcome: &Outcome, usage: &[Usage], ranks: usize) -> String {
    summary_with_limit(outcome, usage, ranks, "the limit")
}

fn summary_with_limit(outcome: &Outcome, usage: &[Usage], ranks: usize, limit: &str) -> String {
    let statistics = &outcome.speculation;
    let milliseconds = outcome.timings.first_token.as_secs_f64() * 1e3;
    let mut line = format!(
        "{} tokens, {:.0} tok/s, first token after {milliseconds:.0} ms; {} rounds",
        outcome.tokens.len(),
        outcome.tokens_per_second(),
        statistics.rounds(),
    );
    if outcome.finish_reason == FinishReason::Length {
        line += &format!(", cut at {limit}");
    }
    if statistics.drafted() > 0 {
        line += &format!(", {:.2} tokens a round", statistics.mean_acceptance_length());
    }
    if outcome.prefix_reused > 0 {
        line += &format!(", {} prompt tokens from the cache", outcome.prefix_reused);
    }
    let reduces = all_reduces(usage);
    if ranks > 1 {
        let counts: Vec<_> =
            reduces.iter().map(|(name, calls)| format!("{name} {calls}")).collect();
        line += &format!("; {ranks} ranks, all-reduces: {}", counts.join(", "));
    }
    line
}

/// The JSON object.
pub(crate) fn json(
    request: &Request,
    outcome: &Outcome,
    tokens: &[TokenEvent],
    usage: &[Usage],
    load: Duration,
) -> Value {
    let timings = &outcome.timings;
    let statistics = &outcome.speculation;
    let mut object = json!({
        "prompt_ids": request.prompt,
        "token_ids": outcome.tokens,
        "text": outcome.text,
        "finish_reason": outcome.finish_reason,
        "seed": request.sampling.seed,
        "prefix_reused": outcome.prefix_reused,
        "timings": {
            "load_seconds": load.as_secs_f64(),
            "prefill_seconds": timings.prefill.as_secs_f64(),
            "first_token_seconds": timings.first_token.as_secs_f64(),
            "decode_seconds": timings.decode.as_secs_f64(),
            "draft_seconds": timings.draft.as_secs_f64(),
            "verify_seconds": timings.verify.as_secs_f64(),
            "tokens_per_second": outcome.tokens_per_second(),
        },
        "speculation": {
            "mode": match request.speculation {
                Speculation::Off => "off",
                Speculation::Chain(_) => "chain",
                Speculation::Tree(_) => "tree",
                Speculation::Auto => "auto",
            },
            "rounds": statistics.rounds(),
            "drafted": statistics.drafted(),
            "accepted": statistics.accepted(),
            "mean_acceptance_length": statistics.mean_acceptance_length(),
            "accepted_by_round": outcome.accepted,
        },
        "all_reduce": all_reduces(usage),
    });
    if request.logprobs {
        object["logprobs"] = tokens.iter().map(|token| token.logprob).collect();
    }
    if request.top_logprobs > 0 {
        object["top_logprobs"] = tokens.iter().map(|token| json!(token.top_logprobs)).collect();
    }
    if request.top_logits > 0 {
        object["top_logits"] = tokens.iter().map(|token| json!(token.logits)).collect();
    }
    object
}
