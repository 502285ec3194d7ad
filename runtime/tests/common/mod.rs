//! What several tests need: the demo engine, the reference prompts, greedy runs.

#![allow(dead_code, unreachable_pub, reason = "each test uses a part of it")]

use std::{ops::ControlFlow, time::Duration};

use paceline_model::weights::Source;
use paceline_runtime::{Engine, EngineOptions, Ranks, Request, Speculation};

/// A prompt of the reference.
pub struct Prompt {
    pub name: String,
    pub ids: Vec<u32>,
    pub greedy_ids: Vec<u32>,
    pub greedy_gaps: Vec<f64>,
    pub eagle: serde_json::Value,
}

pub fn prompts() -> Vec<Prompt> {
    let text = include_str!("../../../testdata/stories-moe.json");
    let reference: serde_json::Value = serde_json::from_str(text).unwrap();
    let ids = |value: &serde_json::Value| {
        value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    };
    let prompt = |prompt: &serde_json::Value| Prompt {
        name: prompt["name"].as_str().unwrap().to_owned(),
        ids: ids(&prompt["ids"]),
        greedy_ids: ids(&prompt["greedy_ids"]),
        greedy_gaps: prompt["greedy_gaps"]
            .as_array()
            .unwrap()
            .iter()
            .map(|gap| gap.as_f64().unwrap())
            .collect(),
        eagle: prompt["eagle"].clone(),
    };
    reference["prompts"].as_array().unwrap().iter().map(prompt).collect()
}

pub fn demo_options() -> EngineOptions {
    EngineOptions::new(Source::DEMO, Some(Source::DEMO_DRAFT))
}

pub fn threads(count: usize) -> Ranks {
    Ranks::Threads { count, timeout: Duration::from_secs(60) }
}

/// The demo model over this many ranks.
pub fn demo(ranks: usize) -> Engine {
    Engine::load(demo_options(), threads(ranks), &mut |_, _| {}).unwrap()
}

/// A finished request.
pub struct Run {
    pub tokens: Vec<u32>,
    pub text: String,
    pub accepted: Vec<usize>,
}

/// Runs a greedy request that does not stop at stop ids.
pub fn greedy(
    engine: &mut Engine,
    prompt: &[u32],
    tokens_max: usize,
    speculation: Speculation,
) -> Run {
    let request =
        Request { ignore_eos: true, speculation, ..Request::new(prompt.to_vec(), tokens_max) };
    let outcome = engine.generate(&request, |_| ControlFlow::Continue(())).unwrap();
    Run { tokens: outcome.tokens, text: outcome.text, accepted: outcome.accepted }
}
