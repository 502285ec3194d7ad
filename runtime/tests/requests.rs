//! What requests ask for: sampling, stop texts, limits, log-probabilities, bf16.

mod common;

use std::ops::ControlFlow;

use common::{demo, demo_options, greedy, prompts, threads};
use paceline_kernels::DType;
use paceline_runtime::{
    Engine, Event, FinishReason, Outcome, Request, Sampling, Speculation, TokenEvent,
};

fn run(engine: &mut Engine, request: &Request) -> (Outcome, String, Vec<TokenEvent>) {
    let (mut text, mut tokens) = (String::new(), Vec::new());
    let outcome = engine
        .generate(request, |event| {
            match event {
                Event::Text(piece) => text.push_str(piece),
                Event::Token(token) => tokens.push(token.clone()),
                Event::Prefill { .. } | Event::Finished(_) => {}
            }
            ControlFlow::Continue(())
        })
        .unwrap();
    (outcome, text, tokens)
}

#[test]
fn text_streams_whole_and_ends_at_stops() {
    let mut engine = demo(1);
    let prompt = prompts().remove(2);
    for speculation in [Speculation::Off, Speculation::Chain(4), Speculation::Auto] {
        let mut request = Request { speculation, ..Request::new(prompt.ids.clone(), 300) };
        let (whole, text, tokens) = run(&mut engine, &request);
        assert_eq!(whole.text, text);
        assert_eq!(whole.tokens.len(), tokens.len());
        let words: Vec<&str> = text.split(' ').collect();
        let stop = format!("{} {}", words[9], words[10]);
        request.stop_texts = vec![stop.clone(), "never in it".to_owned()];
        let (cut, streamed, _) = run(&mut engine, &request);
        assert_eq!(cut.finish_reason, FinishReason::Stop);
        assert_eq!(cut.text, text[..text.find(&stop).unwrap()]);
        assert_eq!(cut.text, streamed);
    }
}

#[test]
fn stop_ids_end_answers_unless_ignored() {
    let mut engine = demo(1);
    // The reference's first stop id of this prompt comes at token 22.
    let prompt = prompts().remove(0);
    let mut request = Request::new(prompt.ids, 64);
    let (outcome, _, _) = run(&mut engine, &request);
    assert_eq!(outcome.finish_reason, FinishReason::Stop);
    assert_eq!(outcome.tokens, prompt.greedy_ids[..=22]);
    request.ignore_eos = true;
    let (outcome, _, _) = run(&mut engine, &request);
    assert_eq!(outcome.finish_reason, FinishReason::Length);
    assert_eq!(outcome.tokens, prompt.greedy_ids);
}

#[test]
fn the_context_ends_a_request() {
    let mut options = demo_options();
    options.context_max = 60;
    let mut engine = Engine::load(options, threads(1), &mut |_, _| {}).unwrap();
    let prompt = prompts().remove(2);
    let plain = Request { ignore_eos: true, ..Request::new(prompt.ids.clone(), 1000) };
    let (expected, _, _) = run(&mut engine, &plain);
    // 28 tokens of prompt.
    assert_eq!(expected.tokens.len(), 60 - 28);
    for speculation in [Speculation::Chain(8), Speculation::Auto] {
        let (outcome, _, _) = run(&mut engine, &Request { speculation, ..plain.clone() });
        assert_eq!(outcome.tokens, expected.tokens);
        assert_eq!(outcome.finish_reason, FinishReason::Length);
    }
    let error =
        engine.generate(&Request::new(vec![3; 60], 1), |_| ControlFlow::Continue(())).unwrap_err();
    assert!(error.to_string().contains("60"), "{error}");
}

#[test]
fn chunks_of_the_prompt_change_nothing() {
    let prompt = prompts().remove(9);
    let mut outputs = Vec::new();
    for prefill_rows in [7, 64, 1024] {
        let mut options = demo_options();
        options.prefill_rows = prefill_rows;
        let mut engine = Engine::load(options, threads(1), &mut |_, _| {}).unwrap();
        let run = greedy(&mut engine, &prompt.ids, 48, Speculation::Chain(4));
        outputs.push((run.tokens, run.accepted));
    }
    assert_eq!(outputs[0], outputs[1]);
    assert_eq!(outputs[0], outputs[2]);
}

#[test]
fn seeds_repeat_and_differ() {
    let mut engine = demo(1);
    let prompt = prompts().remove(3);
    let mut sample = |seed, speculation| {
        let sampling = Sampling { temperature: 1.0, seed: Some(seed), ..Sampling::default() };
        let request = Request { sampling, speculation, ..Request::new(prompt.ids.clone(), 40) };
        run(&mut engine, &request).0.tokens
    };
    assert_eq!(sample(1, Speculation::Off), sample(1, Speculation::Off));
    assert_eq!(sample(1, Speculation::Chain(3)), sample(1, Speculation::Chain(3)));
    assert_ne!(sample(1, Speculation::Off), sample(2, Speculation::Off));
}

/// With one token kept, sampling is greedy.
#[test]
fn one_kept_token_is_greedy() {
    let mut engine = demo(1);
    let prompt = prompts().remove(4);
    let sampling = Sampling { temperature: 0.8, top_k: 1, seed: Some(5), ..Sampling::default() };
    for speculation in [Speculation::Off, Speculation::Chain(4)] {
        let request = Request {
            sampling: sampling.clone(),
            speculation,
            ignore_eos: true,
            ..Request::new(prompt.ids.clone(), 64)
        };
        assert_eq!(run(&mut engine, &request).0.tokens, prompt.greedy_ids);
    }
}

#[test]
fn log_probabilities_belong_to_the_tokens() {
    let mut engine = demo(1);
    let prompt = prompts().remove(3);
    let request = Request {
        logprobs: true,
        top_logits: 3,
        speculation: Speculation::Chain(3),
        ..Request::new(prompt.ids.clone(), 20)
    };
    let (_, _, tokens) = run(&mut engine, &request);
    for (index, token) in tokens.iter().enumerate() {
        let logits = token.logits.as_ref().unwrap();
        assert_eq!(logits.position, prompt.ids.len() - 1 + index);
        assert_eq!(logits.top[0].0, token.id, "greedy takes the largest");
        let expected = logits.top[0].1 - logits.logsumexp;
        assert!((token.logprob.unwrap() - expected).abs() < 1e-4);
        assert!(logits.top[0].1 - logits.top[1].1 >= 0.0);
    }
}

/// bf16 moves logits of about 15 by up to a few percent; where the two largest are nearer to each
/// other than this, it may choose the other one.
const BF16_GAP_MAX: f64 = 0.5;

/// bf16 keeps to the reference at nearly every step, and speculation changes nothing in it.
#[test]
fn bf16_is_close_and_consistent() {
    let mut options = demo_options();
    options.dtype = DType::BF16;
    // Rows of earlier answers are absorbed, rows of a prompt expanded: near-ties may part.
    options.prefix_reuse_of_answers = false;
    let mut engine = Engine::load(options, threads(1), &mut |_, _| {}).unwrap();
    let (mut same, mut steps) = (0, 0);
    for prompt in prompts() {
        let plain = greedy(&mut engine, &prompt.ids, 64, Speculation::Off);
        for speculation in [Speculation::Chain(4), Speculation::Auto] {
            let run = greedy(&mut engine, &prompt.ids, 64, speculation);
            assert_eq!(run.tokens, plain.tokens, "{} {speculation:?}", prompt.name);
        }
        // Teacher forced: the reference's text, one choice a position.
        for step in (0..64).step_by(8) {
            let mut text = prompt.ids.clone();
            text.extend_from_slice(&prompt.greedy_ids[..step]);
            let next = greedy(&mut engine, &text, 1, Speculation::Off).tokens[0];
            same += usize::from(next == prompt.greedy_ids[step]);
            steps += 1;
            if next != prompt.greedy_ids[step] {
                let gap = prompt.greedy_gaps[step];
                println!("{}: parts at step {step}, where the gap is {gap}", prompt.name);
                assert!(gap < BF16_GAP_MAX, "{}: step {step}, gap {gap}", prompt.name);
            }
        }
    }
    println!("gap below which bf16 may part: {BF16_GAP_MAX}");
    println!("bf16: the reference's choice at {same} of {steps} steps");
    assert!(same * 100 >= steps * 96, "{same} of {steps}");
}

#[test]
fn requests_that_cannot_work_are_refused() {
    let mut engine = demo(1);
    let good = Request::new(vec![3, 5], 4);
    let bad = [
        Request { prompt: vec![], ..good.clone() },
        Request { prompt: vec![4096], ..good.clone() },
        Request { tokens_max: 0, ..good.clone() },
        Request { speculation: Speculation::Chain(0), ..good.clone() },
        Request { speculation: Speculation::Chain(1000), ..good.clone() },
        Request { sampling: Sampling { top_p: -1.0, ..Sampling::default() }, ..good.clone() },
    ];
    for request in bad {
        let error = engine.generate(&request, |_| ControlFlow::Continue(())).unwrap_err();
        assert!(matches!(error, paceline_runtime::RuntimeError::Request { .. }), "{error}");
    }
    // And it still works.
    assert_eq!(run(&mut engine, &good).0.tokens.len(), 4);
}
