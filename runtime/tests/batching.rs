//! Several requests at the same time: each gets what it would have got alone, bit for bit,
//! whatever else runs, however it drafts, and even if it has to start anew.

mod common;

use common::{Arrival, demo_options, prompts, serve_all, serve_one, threads};
use paceline_kernels::DType;
use paceline_model::{
    synthetic::{Synthetic, TinyDraft, TinyModel},
    weights::Source,
};
use paceline_runtime::{
    Engine, EngineOptions, FinishReason, Outcome, Request, Sampling, Speculation,
};
use paceline_spec::TreeParameters;

fn modes() -> [Speculation; 6] {
    let tree =
        |topk, depth, nodes| Speculation::Tree(TreeParameters::new(topk, depth, nodes).unwrap());
    let (chain, auto) = (Speculation::Chain(4), Speculation::Auto);
    [Speculation::Off, chain, tree(4, 4, 16), auto, Speculation::Chain(1), tree(2, 3, 7)]
}

fn load(options: EngineOptions, ranks: usize) -> Engine {
    Engine::load(options, threads(ranks), &mut |_, _| {}).unwrap()
}

/// Requests of many lengths and ways of drafting, and steps at which they arrive.
fn requests(count: usize, tokens: usize) -> Vec<Request> {
    let prompts = prompts();
    let request = |index: usize| Request {
        ignore_eos: !index.is_multiple_of(3),
        speculation: modes()[index % 6],
        top_logits: 2,
        ..Request::new(prompts[index % prompts.len()].ids.clone(), tokens + 7 * (index % 4))
    };
    (0..count).map(request).collect()
}

fn alone(options: &EngineOptions, ranks: usize, requests: &[Request]) -> Vec<Outcome> {
    let mut engine = load(EngineOptions { prefix_reuse: false, ..options.clone() }, ranks);
    requests.iter().map(|request| serve_one(&mut engine, request)).collect()
}

fn staggered(requests: &[Request], distance: usize) -> Vec<Arrival> {
    let arrival =
        |(index, request): (usize, &Request)| Arrival::new(index * distance, request.clone());
    requests.iter().enumerate().map(arrival).collect()
}

fn assert_same(batched: &[Outcome], alone: &[Outcome], requests: &[Request], what: &str) {
    for ((batched, alone), request) in batched.iter().zip(alone).zip(requests) {
        assert_eq!(batched.tokens, alone.tokens, "{what}: {:?}", request.speculation);
        assert_eq!(batched.text, alone.text, "{what}");
        assert_eq!(batched.finish_reason, alone.finish_reason, "{what}");
    }
}

/// Rounds accept alike too, where there is room for all drafts.
fn assert_same_rounds(batched: &[Outcome], alone: &[Outcome], requests: &[Request]) {
    for ((batched, alone), request) in batched.iter().zip(alone).zip(requests) {
        // The engine decides by measured times how far to draft.
        if request.speculation != Speculation::Auto {
            assert_eq!(batched.accepted, alone.accepted, "{:?}", request.speculation);
        }
    }
}

#[test]
fn batched_answers_equal_those_of_requests_alone() {
    let requests = requests(12, 30);
    for ranks in [1, 2] {
        let expected = alone(&demo_options(), ranks, &requests);
        for (prefill_rows, prefix_reuse, distance) in [(256, false, 0), (20, true, 3)] {
            let options = EngineOptions { prefill_rows, prefix_reuse, ..demo_options() };
            let mut engine = load(options, ranks);
            let got = serve_all(&mut engine, &staggered(&requests, distance));
            let what = format!("{ranks} ranks, distance {distance}");
            assert_same(&got, &expected, &requests, &what);
            assert_same_rounds(&got, &expected, &requests);
        }
    }
}

/// More requests than may run at the same time.
#[test]
fn requests_wait_for_their_turn() {
    let requests = requests(9, 16);
    let expected = alone(&demo_options(), 1, &requests);
    for sequences_max in [1, 3] {
        let mut engine = load(EngineOptions { sequences_max, ..demo_options() }, 1);
        let got = serve_all(&mut engine, &staggered(&requests, 0));
        assert_same(&got, &expected, &requests, &format!("{sequences_max} at a time"));
        assert_same_rounds(&got, &expected, &requests);
    }
}

#[test]
fn a_small_cache_makes_requests_start_anew_and_changes_nothing() {
    let requests = requests(8, 60);
    for ranks in [1, 2] {
        let expected = alone(&demo_options(), ranks, &requests);
        for prefix_reuse in [false, true] {
            let options = EngineOptions { cache_tokens: 320, prefix_reuse, ..demo_options() };
            let mut engine = load(options, ranks);
            let got = serve_all(&mut engine, &staggered(&requests, 1));
            let preemptions: usize = got.iter().map(|outcome| outcome.preemptions).sum();
            println!("{ranks} ranks, reuse {prefix_reuse}: {preemptions} preemptions");
            assert!(preemptions > 0, "the cache was to be too small");
            assert_same(&got, &expected, &requests, &format!("{ranks} ranks, {prefix_reuse}"));
        }
    }
}

#[test]
fn cancelling_some_does_not_disturb_others() {
    let requests = requests(10, 40);
    let expected = alone(&demo_options(), 1, &requests);
    let mut engine = load(demo_options(), 1);
    let mut arrivals = staggered(&requests, 2);
    for (index, after) in [(1, 1), (3, 9), (4, 0), (8, 20)] {
        arrivals[index].cancel_after = Some(after);
    }
    let got = serve_all(&mut engine, &arrivals);
    for (index, (got, expected)) in got.iter().zip(&expected).enumerate() {
        match arrivals[index].cancel_after {
            None => assert_same(
                std::slice::from_ref(got),
                std::slice::from_ref(expected),
                &requests[index..],
                "not cancelled",
            ),
            Some(after) => {
                assert_eq!(got.finish_reason, FinishReason::Cancelled);
                assert_eq!(got.tokens, expected.tokens[..after]);
            }
        }
    }
}

/// Cancelled by name: while it waits, while it runs, and when it is over already.
#[test]
fn requests_can_be_cancelled_by_name() {
    let mut engine = load(EngineOptions { sequences_max: 1, ..demo_options() }, 1);
    let requests = requests(3, 20);
    let names: Vec<_> =
        requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
    let mut ends = Vec::new();
    let mut listen = |id, event: paceline_runtime::Event<'_>| {
        if let paceline_runtime::Event::Finished(outcome) = event {
            ends.push((id, outcome.finish_reason, outcome.tokens.len()));
        }
        std::ops::ControlFlow::Continue(())
    };
    for _ in 0..4 {
        assert!(engine.step(&mut listen).unwrap());
    }
    assert!(engine.cancel(names[0]) && engine.cancel(names[1]));
    assert!(!engine.cancel(names[0]), "it was cancelled already");
    while engine.step(&mut listen).unwrap() {}
    assert!(engine.is_idle() && !engine.cancel(names[2]));
    assert_eq!(ends.iter().map(|end| end.0).collect::<Vec<_>>(), names);
    assert_eq!((ends[0].1, ends[1].1), (FinishReason::Cancelled, FinishReason::Cancelled));
    assert!(ends[0].2 > 0 && ends[1].2 == 0 && ends[2].2 == 34);
}

/// Each step of sampling with its own random numbers, in a batch or alone.
#[test]
fn sampled_answers_do_not_depend_on_the_batch() {
    let mut requests = requests(8, 24);
    for (seed, request) in requests.iter_mut().enumerate() {
        request.sampling = Sampling {
            temperature: 0.8,
            top_p: 0.95,
            repetition_penalty: 1.0 + 0.1 * (seed % 3) as f32,
            seed: Some(seed as u64),
            ..Sampling::default()
        };
        // What auto drafts depends on measured times, and with it which coin falls where.
        if request.speculation == Speculation::Auto {
            request.speculation = Speculation::Off;
        }
    }
    let expected = alone(&demo_options(), 1, &requests);
    let mut engine = load(demo_options(), 1);
    let got = serve_all(&mut engine, &staggered(&requests, 2));
    assert_same(&got, &expected, &requests, "sampled");
}

/// Random weights, every part of the real models, drafts of both kinds, and the smallest passes.
#[test]
fn tiny_models_serve_batches_as_single_requests() {
    let tiny = [
        (TinyModel::A, Some(TinyDraft::Llama)),
        (TinyModel::A, Some(TinyDraft::Mla)),
        (TinyModel::CInt4, None),
        (TinyModel::D, None),
    ];
    for (model, draft) in tiny {
        let directories = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        Synthetic::model(model).write(directories.0.path(), 1).unwrap();
        let source = |path: &std::path::Path| Source::Directory(path.to_owned());
        if let Some(draft) = draft {
            Synthetic::draft(draft).write(directories.1.path(), 1).unwrap();
        }
        let draft_source = draft.map(|_| source(directories.1.path()));
        let mut options = EngineOptions::new(source(directories.0.path()), draft_source);
        options.capture_points = draft.map(|_| vec![1, 2, 3]);
        options.context_max = 160;
        options.dtype = if draft == Some(TinyDraft::Mla) { DType::BF16 } else { DType::F32 };
        let requests: Vec<Request> = (0..7usize)
            .map(|index| {
                let length = 1 + 13 * index;
                let token = |place: usize| ((place * 31 + index * 7) % 500) as u32;
                let prompt = (0..length).map(token).collect();
                let speculation = match draft {
                    Some(_) => modes()[index % 6],
                    None => Speculation::Off,
                };
                let ignore_eos = true;
                Request { speculation, ignore_eos, ..Request::new(prompt, 20 + index) }
            })
            .collect();
        let expected = alone(&options, 1, &requests);
        let small = EngineOptions {
            cache_tokens: 192,
            prefill_rows: 11,
            sequences_max: 5,
            ..options.clone()
        };
        for options in [options, small] {
            let mut engine = load(options, 1);
            let got = serve_all(&mut engine, &staggered(&requests, 1));
            assert_same(&got, &expected, &requests, &format!("{model:?} {draft:?}"));
        }
    }
}
