//! Penalties, bias and minimum lengths: speculation does not change what they do, and they do
//! what their definitions say.

mod common;

use std::{collections::HashSet, ops::ControlFlow};

use common::{Arrival, demo, prompts, serve_all, serve_one};
use paceline_runtime::{Engine, Event, FinishReason, Request, Sampling, Speculation, TokenEvent};
use paceline_spec::TreeParameters;

fn modes() -> [Speculation; 3] {
    let tree = Speculation::Tree(TreeParameters::new(4, 4, 16).unwrap());
    [Speculation::Chain(4), tree, Speculation::Auto]
}

fn samplings(stop_id: u32) -> Vec<Sampling> {
    let plain = Sampling::default();
    vec![
        Sampling { repetition_penalty: 1.3, ..plain.clone() },
        Sampling { presence_penalty: 1.5, ..plain.clone() },
        Sampling { frequency_penalty: 0.7, ..plain.clone() },
        Sampling { frequency_penalty: -0.4, presence_penalty: -0.3, ..plain.clone() },
        Sampling { logit_bias: vec![(stop_id, -100.0), (17, 3.0)], ..plain.clone() },
        Sampling {
            repetition_penalty: 0.9,
            presence_penalty: 0.5,
            frequency_penalty: 0.2,
            logit_bias: vec![(30, 2.0)],
            ..plain
        },
    ]
}

#[test]
fn speculation_changes_no_penalised_answer() {
    let mut engine = demo(1);
    let prompts = prompts();
    let mut changed = 0;
    for (index, sampling) in samplings(engine.stop_ids()[0]).into_iter().enumerate() {
        for tokens_min in [0, 30] {
            let prompt = &prompts[index % prompts.len()];
            let plain = Request {
                sampling: sampling.clone(),
                tokens_min,
                ..Request::new(prompt.ids.clone(), 80)
            };
            let expected = serve_one(&mut engine, &plain);
            changed += usize::from(!prompt.greedy_ids.starts_with(&expected.tokens));
            let mut requests = vec![Arrival::new(0, plain.clone())];
            for speculation in modes() {
                let request = Request { speculation, ..plain.clone() };
                let got = serve_one(&mut engine, &request);
                assert_eq!(got.tokens, expected.tokens, "{sampling:?} {speculation:?}");
                requests.push(Arrival::new(requests.len(), request));
            }
            for got in serve_all(&mut engine, &requests) {
                assert_eq!(got.tokens, expected.tokens, "{sampling:?} in a batch");
            }
        }
    }
    assert!(changed > 6, "{changed} answers differ from those without penalties");
}

fn tokens(engine: &mut Engine, request: &Request) -> Vec<TokenEvent> {
    let mut tokens = Vec::new();
    let keep = |event: Event<'_>| {
        if let Event::Token(token) = event {
            tokens.push(token.clone());
        }
        ControlFlow::Continue(())
    };
    engine.generate(request, keep).unwrap();
    tokens
}

/// Follows the definitions with the raw logits that are reported: all of them, so that nothing
/// that a penalty lifts is missed.
#[test]
fn choices_follow_the_definitions() {
    let mut engine = demo(1);
    let vocabulary = engine.config().vocabulary;
    for sampling in samplings(5) {
        for speculation in [Speculation::Off, Speculation::Chain(4)] {
            let request = Request {
                sampling: sampling.clone(),
                speculation,
                ignore_eos: true,
                top_logits: vocabulary,
                ..Request::new(prompts()[3].ids.clone(), 40)
            };
            let mut answer: Vec<u32> = Vec::new();
            for token in tokens(&mut engine, &request) {
                let penalised = |&(id, logit): &(u32, f32)| {
                    let mut logit = logit;
                    if request.prompt.contains(&id) || answer.contains(&id) {
                        let repetition = sampling.repetition_penalty;
                        logit = if logit > 0.0 { logit / repetition } else { logit * repetition };
                    }
                    let count = answer.iter().filter(|&&other| other == id).count() as f32;
                    if count > 0.0 {
                        logit -= sampling.presence_penalty + count * sampling.frequency_penalty;
                    }
                    let bias = sampling.logit_bias.iter().find(|entry| entry.0 == id);
                    logit + bias.map_or(0.0, |entry| entry.1)
                };
                let logits = token.logits.unwrap();
                assert_eq!(logits.top.len(), vocabulary);
                let chosen = logits.top.iter().find(|entry| entry.0 == token.id).unwrap();
                let best = logits.top.iter().map(penalised).fold(f32::NEG_INFINITY, f32::max);
                assert_eq!(penalised(chosen), best, "{sampling:?}, token {}", token.index);
                answer.push(token.id);
            }
        }
    }
}

#[test]
fn stop_ids_wait_for_the_minimum_and_stop_texts_do_not() {
    let mut engine = demo(1);
    // The reference's first stop id of this prompt comes at token 22.
    let prompt = prompts().remove(0);
    let stop_ids: HashSet<u32> = engine.stop_ids().iter().copied().collect();
    for speculation in [Speculation::Off].into_iter().chain(modes()) {
        for tokens_min in [1, 22, 23, 40] {
            let request =
                Request { tokens_min, speculation, ..Request::new(prompt.ids.clone(), 60) };
            let outcome = serve_one(&mut engine, &request);
            let first = outcome.tokens.iter().position(|id| stop_ids.contains(id));
            let stopped = outcome.finish_reason == FinishReason::Stop;
            assert_eq!(stopped, first.is_some());
            assert!(first.is_none_or(|first| first >= tokens_min), "{tokens_min}: {first:?}");
            if tokens_min <= 22 {
                assert_eq!(outcome.tokens, prompt.greedy_ids[..=22]);
            } else {
                assert_eq!(outcome.tokens[..22], prompt.greedy_ids[..22]);
                assert!(outcome.tokens.len() > tokens_min.min(59));
            }
        }
    }
    let plain = serve_one(&mut engine, &Request::new(prompt.ids.clone(), 20));
    let word = plain.text.split_whitespace().nth(3).unwrap().to_owned();
    let stop_texts = vec![word];
    let request = Request { tokens_min: 20, stop_texts, ..Request::new(prompt.ids, 60) };
    let outcome = serve_one(&mut engine, &request);
    assert!(outcome.finish_reason == FinishReason::Stop && outcome.tokens.len() < 20);
}

#[test]
fn alternatives_are_normalised_and_include_the_choice() {
    let mut engine = demo(1);
    for speculation in [Speculation::Off, Speculation::Chain(3)] {
        let request = Request {
            logprobs: true,
            top_logprobs: 5,
            top_logits: 5,
            speculation,
            ..Request::new(prompts()[5].ids.clone(), 20)
        };
        for token in tokens(&mut engine, &request) {
            let logits = token.logits.unwrap();
            assert_eq!(token.top_logprobs.len(), 5);
            assert_eq!(token.top_logprobs[0], (token.id, token.logprob.unwrap()));
            for (alternative, logit) in token.top_logprobs.iter().zip(&logits.top) {
                assert_eq!(alternative.0, logit.0);
                assert!((alternative.1 - (logit.1 - logits.logsumexp)).abs() < 1e-4);
            }
            let sum: f32 = token.top_logprobs.iter().map(|entry| entry.1.exp()).sum();
            assert!(token.top_logprobs.is_sorted_by(|a, b| a.1 >= b.1) && sum <= 1.0 + 1e-5);
        }
    }
}
