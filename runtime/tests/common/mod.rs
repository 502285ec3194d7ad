//! What several tests need: the demo engine, the reference prompts, greedy runs.

#![allow(dead_code, unreachable_pub, reason = "each test uses a part of it")]

use std::{collections::HashMap, ops::ControlFlow, time::Duration};

use paceline_model::weights::Source;
use paceline_runtime::{
    Engine, EngineOptions, Event, FinishReason, Outcome, Ranks, Request, RequestId, Speculation,
};

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

/// A request, and the step before which it comes.
pub struct Arrival {
    pub step: usize,
    pub request: Request,
    /// Tokens after which its listener breaks it off.
    pub cancel_after: Option<usize>,
}

impl Arrival {
    pub fn new(step: usize, request: Request) -> Self {
        Self { step, request, cancel_after: None }
    }
}

/// Submits requests as they arrive and steps until all are finished. The outcomes are in the
/// order of the arrivals; streams of tokens and text are compared with them.
pub fn serve_all(engine: &mut Engine, arrivals: &[Arrival]) -> Vec<Outcome> {
    #[derive(Default)]
    struct Heard {
        tokens: Vec<u32>,
        text: String,
        outcome: Option<Outcome>,
    }
    let mut names: Vec<Option<RequestId>> = vec![None; arrivals.len()];
    let mut heard: HashMap<RequestId, Heard> = HashMap::new();
    let mut step = 0;
    while step == 0 || !engine.is_idle() || names.contains(&None) {
        for (arrival, name) in arrivals.iter().zip(&mut names) {
            if arrival.step == step {
                *name = Some(engine.submit(arrival.request.clone()).unwrap());
            }
        }
        let mut listen = |id: RequestId, event: Event<'_>| {
            let heard = heard.entry(id).or_default();
            assert!(heard.outcome.is_none(), "nothing comes after the end");
            match event {
                Event::Prefill { done, total } => assert!(0 < done && done <= total),
                Event::Token(token) => heard.tokens.push(token.id),
                Event::Text(text) => heard.text.push_str(text),
                Event::Finished(outcome) => heard.outcome = Some(outcome.clone()),
            }
            let place = names.iter().position(|name| *name == Some(id)).unwrap();
            match arrivals[place].cancel_after {
                Some(tokens) if heard.tokens.len() >= tokens => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        };
        engine.step(&mut listen).unwrap();
        step += 1;
    }
    let occupancy = engine.occupancy();
    assert_eq!((occupancy.waiting, occupancy.running, occupancy.pages_held), (0, 0, 0));
    let mut outcome = |name: Option<RequestId>| {
        let heard = heard.remove(&name.unwrap()).unwrap();
        let outcome = heard.outcome.unwrap();
        assert_eq!(outcome.tokens, heard.tokens);
        if outcome.finish_reason != FinishReason::Cancelled {
            assert_eq!(outcome.text, heard.text);
        }
        outcome
    };
    names.into_iter().map(&mut outcome).collect()
}

/// One request alone.
pub fn serve_one(engine: &mut Engine, request: &Request) -> Outcome {
    engine.generate(request, |_| ControlFlow::Continue(())).unwrap()
}
