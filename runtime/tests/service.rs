//! An engine that many threads use: answers, dropped answers, the end of the service, failures.

mod common;

use std::{
    collections::HashSet,
    sync::mpsc::{RecvTimeoutError, channel},
    thread,
    time::Duration,
};

use common::{demo, demo_options, prompts, serve_one, threads};
use paceline_comm::{Communicator, GroupOptions, in_process};
use paceline_kernels::DType;
use paceline_model::{
    synthetic::{Synthetic, TinyModel},
    weights::Source,
};
use paceline_runtime::{
    Answer, AnswerEvent, Engine, EngineOptions, FinishReason, Outcome, Ranks, Request,
    RuntimeError, Service, Speculation, serve,
};

/// Far more than anything here takes.
const LONG: Duration = Duration::from_secs(100);

fn finish(answer: Answer) -> Outcome {
    let (mut tokens, mut text) = (Vec::new(), String::new());
    for event in answer {
        match event.unwrap() {
            AnswerEvent::Prefill { done, total } => assert!(done <= total),
            AnswerEvent::Token(token) => tokens.push(token.id),
            AnswerEvent::Text(piece) => text.push_str(&piece),
            AnswerEvent::Finished(outcome) => {
                assert_eq!((&outcome.tokens, &outcome.text), (&tokens, &text));
                return *outcome;
            }
        }
    }
    panic!("answers end with an outcome");
}

fn requests() -> Vec<Request> {
    let modes = [Speculation::Off, Speculation::Chain(4), Speculation::Auto];
    let request = |(index, prompt): (usize, common::Prompt)| Request {
        speculation: modes[index % 3],
        ..Request::new(prompt.ids, 24)
    };
    prompts().into_iter().enumerate().map(request).collect()
}

#[test]
fn threads_get_the_answers_of_requests_alone() {
    let mut engine = demo(2);
    let requests = requests();
    let expected: Vec<Outcome> =
        requests.iter().map(|request| serve_one(&mut engine, request)).collect();
    let service = Service::start(engine).unwrap();
    thread::scope(|scope| {
        for (request, expected) in requests.iter().zip(&expected) {
            let service = &service;
            scope.spawn(move || {
                let outcome = finish(service.submit(request.clone()).unwrap());
                assert_eq!(outcome.tokens, expected.tokens);
                assert_eq!(outcome.finish_reason, expected.finish_reason);
            });
        }
    });
    assert_eq!(service.requests(), 0);
    let occupancy = service.occupancy(LONG).unwrap();
    assert_eq!((occupancy.running, occupancy.waiting, occupancy.pages_held), (0, 0, 0));
    // The engine comes back whole.
    let mut engine = service.shutdown().unwrap();
    assert!(engine.is_idle());
    assert_eq!(serve_one(&mut engine, &requests[1]).tokens, expected[1].tokens);
}

#[test]
fn dropped_answers_are_cancelled_and_make_room() {
    let options = EngineOptions { sequences_max: 1, waiting_max: 2, ..demo_options() };
    let engine = Engine::load(options, threads(1), &mut |_, _| {}).unwrap();
    let service = Service::start(engine).unwrap();
    // So long that it still runs when the others come.
    let long = Request { ignore_eos: true, ..Request::new(prompts()[2].ids.clone(), 400) };
    let mut first = service.submit(long.clone()).unwrap();
    let mut tokens = 0;
    while tokens < 3 {
        let event = first.next_within(LONG).unwrap().unwrap();
        tokens += usize::from(matches!(event, AnswerEvent::Token(_)));
    }
    let second = service.submit(long.clone()).unwrap();
    let third = service.submit(long.clone()).unwrap();
    let error = service.submit(long.clone()).err().unwrap();
    assert!(matches!(error, RuntimeError::Busy { waiting: 2, waiting_max: 2 }), "{error}");
    // One that waits, and one that runs.
    drop(third);
    drop(first);
    second.cancel();
    let outcome = finish(second);
    assert_eq!(outcome.finish_reason, FinishReason::Cancelled);
    let outcome = finish(service.submit(Request::new(prompts()[3].ids.clone(), 4)).unwrap());
    assert_eq!(outcome.tokens, prompts()[3].greedy_ids[..4]);
    assert_eq!(service.requests(), 0);
    let error = service.submit(Request::new(vec![], 4)).err().unwrap();
    assert!(matches!(error, RuntimeError::Request { .. }), "{error}");
}

#[test]
fn shutting_down_ends_every_answer() {
    let engine = demo(2);
    let service = Service::start(engine).unwrap();
    let long = Request { ignore_eos: true, ..Request::new(prompts()[2].ids.clone(), 2000) };
    let answers: Vec<Answer> = (0..24).map(|_| service.submit(long.clone()).unwrap()).collect();
    let engine = service.shutdown().unwrap();
    assert!(engine.is_idle());
    for answer in answers {
        assert_eq!(finish(answer).finish_reason, FinishReason::Cancelled);
    }
}

/// Issue 3: who submits hears of it, not who reads the answer.
#[test]
fn what_can_never_fit_is_refused_at_once() {
    let options = EngineOptions { cache_tokens: 64, ..demo_options() };
    let engine = Engine::load(options, threads(1), &mut |_, _| {}).unwrap();
    let service = Service::start(engine).unwrap();
    let error = service.submit(Request::new(vec![3; 64], 1)).err().unwrap();
    assert!(error.to_string().contains("the whole cache holds 64 tokens"), "{error}");
    let outcome = finish(service.submit(Request::new(vec![3; 63], 9)).unwrap());
    assert_eq!(outcome.tokens.len(), 1);
}

/// A model whose logits become NaN as soon as one token is fed.
fn damaged() -> (tempfile::TempDir, u32) {
    const TOKEN: u32 = 77;
    let mut synthetic = Synthetic::model(TinyModel::A);
    let embedding = synthetic
        .tensors
        .iter_mut()
        .find(|tensor| tensor.name == "model.embed_tokens.weight")
        .unwrap();
    assert_eq!(embedding.dtype, DType::F32);
    let row_bytes = embedding.shape[1] * 4;
    let start = TOKEN as usize * row_bytes;
    embedding.bytes[start..start + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    let directory = tempfile::tempdir().unwrap();
    synthetic.write(directory.path(), 1).unwrap();
    (directory, TOKEN)
}

#[test]
fn a_failure_reaches_every_answer_and_later_requests() {
    let (directory, token) = damaged();
    for ranks in [1, 2] {
        let mut options = EngineOptions::new(Source::Directory(directory.path().to_owned()), None);
        options.sequences_max = 2;
        let load = || Engine::load(options.clone(), threads(ranks), &mut |_, _| {}).unwrap();
        let good = Request { ignore_eos: true, ..Request::new(vec![3, 5], 5000) };
        let bad = Request::new(vec![4, token], 8);

        let mut engine = load();
        let good_name = engine.submit(good.clone()).unwrap();
        engine.submit(bad.clone()).unwrap();
        let mut heard = HashSet::new();
        let error = loop {
            let step = engine.step(&mut |name, _| {
                heard.insert(name);
                std::ops::ControlFlow::Continue(())
            });
            match step {
                Ok(more) => assert!(more),
                Err(error) => break error,
            }
        };
        assert!(matches!(error, RuntimeError::LogitsNotFinite { position: 1 }), "{error}");
        assert!(heard.contains(&good_name));
        assert!(engine.is_idle() && !engine.cancel(good_name));
        let again = engine.submit(good.clone()).unwrap_err();
        assert!(matches!(again, RuntimeError::Stopped { .. }), "{again}");
        assert!(again.to_string().contains(&error.to_string()), "{again}");
        drop(engine);

        let service = Service::start(load()).unwrap();
        let answers: Vec<Answer> = [&good, &good, &good, &bad, &good]
            .into_iter()
            .filter_map(|request| service.submit(request.clone()).ok())
            .collect();
        // The bad one waits for a place.
        answers[0].cancel();
        for (index, answer) in answers.into_iter().enumerate() {
            let last = answer.last().unwrap();
            match last {
                Ok(AnswerEvent::Finished(outcome)) => {
                    assert_eq!((index, outcome.finish_reason), (0, FinishReason::Cancelled))
                }
                Ok(other) => panic!("answers do not end with {other:?}"),
                Err(error) => assert!(matches!(error, RuntimeError::Stopped { .. }), "{error}"),
            }
        }
        let error = service.submit(good).err().unwrap();
        assert!(error.to_string().contains("not finite"), "{error}");
        assert!(service.shutdown().is_err());
    }
}

/// Issue 3: rank 0 fails and lives on. The other rank hears that the sequences are gone, those of
/// the pass that failed too, so it waits for the engine's end for longer than the group's timeout
/// and ends without an error.
#[test]
fn a_failure_of_rank_0_leaves_the_others_waiting_for_its_end() {
    let timeout = Duration::from_secs(2);
    let (directory, token) = damaged();
    let options = EngineOptions::new(Source::Directory(directory.path().to_owned()), None);
    let group = GroupOptions { timeout, ..GroupOptions::default() };
    let [leader, follower] = in_process(2, &group).unwrap().try_into().unwrap();
    let (sender, end) = channel();
    let follower_options = options.clone();
    let thread = thread::spawn(move || {
        let communicator = Communicator::connect(follower, None).unwrap();
        sender.send(serve(&follower_options, communicator)).unwrap();
    });
    let leader = Ranks::Process(Box::new(Communicator::connect(leader, None).unwrap()));
    let mut engine = Engine::load(options, leader, &mut |_, _| {}).unwrap();
    let good = Request { ignore_eos: true, ..Request::new(vec![3, 5], 5000) };
    for request in [good, Request::new(vec![4, token], 8)] {
        engine.submit(request).unwrap();
    }
    let error = loop {
        match engine.step(&mut |_, _| std::ops::ControlFlow::Continue(())) {
            Ok(more) => assert!(more),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, RuntimeError::LogitsNotFinite { .. }), "{error}");
    let early = end.recv_timeout(2 * timeout);
    assert!(matches!(early, Err(RecvTimeoutError::Timeout)), "{early:?}");
    drop(engine);
    end.recv_timeout(LONG).unwrap().unwrap();
    thread.join().unwrap();
}
