//! What an engine refuses, what it holds on to, and what it does after a listener's panic.

mod common;

use std::{
    ops::ControlFlow,
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

use common::{Arrival, demo, demo_options, prompts, serve_all, serve_one, threads};
use paceline_runtime::{Engine, EngineOptions, Event, Ranks, Request, RuntimeError, Speculation};
use paceline_spec::{Plan, TreeParameters};

fn load(options: EngineOptions) -> Result<Engine, RuntimeError> {
    Engine::load(options, threads(1), &mut |_, _| {})
}

#[test]
fn what_can_never_fit_is_refused_and_what_fits_is_served() {
    let mut engine = load(EngineOptions { cache_tokens: 60, ..demo_options() }).unwrap();
    assert_eq!(engine.cache_tokens(), 64, "whole pages");
    let error = engine.submit(Request::new(vec![3; 64], 1)).unwrap_err();
    assert!(matches!(error, RuntimeError::Request { .. }), "{error}");
    assert!(error.to_string().contains("64"), "{error}");
    // The answer ends where the cache does.
    for speculation in [Speculation::Off, Speculation::Chain(8), Speculation::Auto] {
        let request = Request { ignore_eos: true, speculation, ..Request::new(vec![3; 40], 1000) };
        let outcome = serve_one(&mut engine, &request);
        assert_eq!(outcome.tokens.len(), 24, "{speculation:?}");
    }
}

#[test]
fn a_full_queue_says_so() {
    let options = EngineOptions { sequences_max: 1, waiting_max: 2, ..demo_options() };
    let mut engine = load(options).unwrap();
    let request = Request::new(prompts()[1].ids.clone(), 8);
    for _ in 0..2 {
        engine.submit(request.clone()).unwrap();
    }
    assert!(!engine.has_room());
    let error = engine.submit(request.clone()).unwrap_err();
    assert!(matches!(error, RuntimeError::Busy { waiting: 2, waiting_max: 2 }), "{error}");
    let error = engine.generate(&request, |_| ControlFlow::Continue(())).unwrap_err();
    assert!(matches!(error, RuntimeError::InUse { requests: 2, .. }), "{error}");
    let error = engine.measure_pass(1, 0, 1).unwrap_err();
    assert!(matches!(error, RuntimeError::InUse { .. }), "{error}");
    // One begins, so another may wait.
    engine.step(&mut |_, _| ControlFlow::Continue(())).unwrap();
    engine.submit(request).unwrap();
    while engine.step(&mut |_, _| ControlFlow::Continue(())).unwrap() {}
    assert!(engine.is_idle() && engine.has_room());
}

#[test]
fn senseless_options_are_refused() {
    let demo = demo_options();
    let bad = [
        EngineOptions { sequences_max: 0, ..demo.clone() },
        EngineOptions { sequences_max: 100_000, ..demo.clone() },
        EngineOptions { waiting_max: 0, ..demo.clone() },
        EngineOptions { cache_tokens: usize::MAX, ..demo.clone() },
        EngineOptions { cache_tokens: 1 << 32, ..demo },
    ];
    for options in bad {
        let text = format!("{} {}", options.sequences_max, options.cache_tokens);
        let error = load(options).err().expect(&text);
        assert!(matches!(error, RuntimeError::Request { .. }), "{text}: {error}");
    }
}

/// Requests one after the other and at the same time leave nothing behind but cached pages.
#[test]
fn finished_requests_leave_only_the_prefix_cache() {
    let mut engine = load(EngineOptions { sequences_max: 3, ..demo_options() }).unwrap();
    let tree = Speculation::Tree(TreeParameters::new(4, 4, 16).unwrap());
    let modes = [Speculation::Off, Speculation::Chain(4), tree, Speculation::Auto];
    for round in 0..12 {
        let arrival = |index: usize| {
            let prompt = prompts()[(index + round) % 8].ids.clone();
            let speculation = modes[(index + round) % 4];
            let cancel_after = (index == 3).then_some(2);
            let request = Request { speculation, ..Request::new(prompt, 6) };
            Arrival { step: index / 2, request, cancel_after }
        };
        let arrivals: Vec<Arrival> = (0..6).map(arrival).collect();
        serve_all(&mut engine, &arrivals);
        let occupancy = engine.occupancy();
        assert_eq!((occupancy.waiting, occupancy.preempted, occupancy.running), (0, 0, 0));
        assert_eq!(occupancy.pages_held, 0);
        assert_eq!(
            (occupancy.pages_free + occupancy.pages_cached) * 16,
            engine.cache_tokens(),
            "no page is lost"
        );
    }
}

#[test]
fn measurements_change_nothing() {
    for ranks in [1, 2] {
        let mut engine = demo(ranks);
        let request = Request {
            speculation: Speculation::Chain(4),
            ignore_eos: true,
            ..Request::new(prompts()[4].ids.clone(), 30)
        };
        let before = serve_one(&mut engine, &request);
        for rows in [1, 5, 16] {
            let times = engine.measure_pass(rows, 100, 4).unwrap();
            assert_eq!((times.passes.len(), times.all_reduces.len()), (4, 4));
            for (pass, all_reduce) in times.passes.iter().zip(&times.all_reduces) {
                assert!(all_reduce < pass, "a part of it");
                assert_eq!(all_reduce.is_zero(), ranks == 1);
            }
        }
        let tree = Plan::Tree(TreeParameters::new(4, 4, 16).unwrap());
        for plan in [Plan::Chain { drafted: 1 }, Plan::Chain { drafted: 8 }, tree] {
            let times = engine.measure_draft(plan, 100, 3).unwrap();
            assert!(times.len() == 3 && times.iter().all(|time| !time.is_zero()));
        }
        assert!(engine.measure_draft(Plan::Plain, 100, 3).unwrap().is_empty());
        let too_much = [(0, 0), (100_000, 0), (1, usize::MAX), (1, engine.context_max())];
        for (rows, context) in too_much {
            let error = engine.measure_pass(rows, context, 1).unwrap_err();
            assert!(matches!(error, RuntimeError::Request { .. }), "{error}");
        }
        let after = serve_one(&mut engine, &request);
        assert_eq!((after.tokens, after.accepted), (before.tokens, before.accepted));
        assert_eq!(after.prefix_reused, 0, "the prefix cache was emptied");
    }
}

#[test]
fn a_panic_of_a_listener_ends_the_engine_and_nothing_hangs() {
    for ranks in [1, 2] {
        let mut engine = demo(ranks);
        let request = Request::new(prompts()[1].ids.clone(), 8);
        engine.submit(request.clone()).unwrap();
        let step = || engine.step(&mut |_, _| panic!("a listener's mistake"));
        assert!(catch_unwind(AssertUnwindSafe(step)).is_err());
        let error = engine.submit(request).unwrap_err();
        assert!(matches!(error, RuntimeError::Stopped { .. }), "{error}");
        assert!(error.to_string().contains("panic"), "{error}");
    }
}

/// A listener that blocks for longer than the group's timeout: the other rank gives up, and every
/// request ends with an error instead of waiting for it.
#[test]
fn a_rank_that_gives_up_ends_all_requests() {
    let timeout = Duration::from_millis(200);
    let ranks = Ranks::Threads { count: 2, timeout };
    let mut engine = Engine::load(demo_options(), ranks, &mut |_, _| {}).unwrap();
    for prompt in prompts().iter().take(3) {
        engine.submit(Request::new(prompt.ids.clone(), 50)).unwrap();
    }
    let error = loop {
        let step = engine.step(&mut |_, event| {
            if matches!(event, Event::Token(_)) {
                std::thread::sleep(3 * timeout);
            }
            ControlFlow::Continue(())
        });
        match step {
            Ok(more) => assert!(more, "no request can finish"),
            Err(error) => break error,
        }
    };
    println!("{error}");
    assert!(engine.is_idle());
    let again = engine.submit(Request::new(vec![3], 1)).unwrap_err();
    assert!(matches!(again, RuntimeError::Stopped { .. }), "{again}");
    assert!(again.to_string().contains(&error.to_string()), "{again}");
}
