//! Several ranks: the same text as one rank up to printed near-ties, speculation that changes
//! nothing, rounds that accept what the reference accepts, and splits that are refused.

mod common;

use std::ops::ControlFlow;

use common::{Run, demo, demo_options, greedy, prompts, threads};
use paceline_runtime::{Engine, Request, Speculation};
use paceline_spec::TreeParameters;

/// Sums in another order move logits by less than this; where the two largest are nearer to each
/// other, another rank count may choose the other one.
const TIE_GAP_MAX: f64 = 1e-3;

/// Compares with the reference's continuation; they may part at a near-tie only.
fn assert_equal_up_to_ties(run: &Run, prompt: &common::Prompt, what: &str) {
    let differs = run.tokens.iter().zip(&prompt.greedy_ids).position(|(a, b)| a != b);
    if let Some(at) = differs {
        let gap = prompt.greedy_gaps[at];
        println!("{what}, {}: parts at token {at}, where the gap is {gap:e}", prompt.name);
        assert!(gap < TIE_GAP_MAX, "{what}, {}: token {at}, gap {gap}", prompt.name);
    }
}

/// Rounds accept what the reference's do, but where its draft had a near-tie.
fn assert_accepts(run: &Run, prompt: &common::Prompt, speculation: Speculation, what: &str) {
    let mode = match speculation {
        Speculation::Chain(_) => "chain_4",
        Speculation::Tree(_) => "tree",
        Speculation::Off | Speculation::Auto => return,
    };
    let expected = &prompt.eagle[mode];
    if expected["smallest_draft_gap"].as_f64().unwrap() < 1e-4 {
        return;
    }
    // The last rounds differ, because the reference's may run past 64 tokens.
    let whole = run.accepted.len().saturating_sub(4);
    for (round, got) in run.accepted[..whole].iter().enumerate() {
        assert_eq!(
            expected["accepted"][round], *got,
            "{what} {mode} {}: round {round}",
            prompt.name
        );
    }
}

#[test]
fn ranks_and_experts_can_be_split_in_every_way() {
    let tree = Speculation::Tree(TreeParameters::new(4, 4, 16).unwrap());
    println!("gap below which rank counts may part: {TIE_GAP_MAX}");
    for ranks in [2, 4, 8] {
        for expert_parallel in [false, true] {
            let mut options = demo_options();
            options.expert_parallel = expert_parallel;
            let mut engine = Engine::load(options, threads(ranks), &mut |_, _| {}).unwrap();
            let what = format!("{ranks} ranks, expert parallel {expert_parallel}");
            for prompt in prompts().iter().step_by(ranks) {
                let plain = greedy(&mut engine, &prompt.ids, 64, Speculation::Off);
                assert_equal_up_to_ties(&plain, prompt, &what);
                for speculation in [Speculation::Chain(4), tree, Speculation::Auto] {
                    let run = greedy(&mut engine, &prompt.ids, 64, speculation);
                    assert_eq!(run.tokens, plain.tokens, "{what} {speculation:?} {}", prompt.name);
                    if plain.tokens == prompt.greedy_ids {
                        assert_accepts(&run, prompt, speculation, &what);
                    }
                }
            }
            let calls: u64 = engine
                .communication()
                .iter()
                .filter(|usage| usage.collective == paceline_comm::Collective::AllReduce)
                .map(|usage| usage.calls)
                .sum();
            // Two a layer and pass, and nothing else.
            assert!(calls > 0 && calls.is_multiple_of(16), "{calls} all-reduces");
        }
    }
}

#[test]
fn impossible_splits_are_refused_with_what_would_work() {
    let load = |ranks| Engine::load(demo_options(), threads(ranks), &mut |_, _| {});
    let error = load(3).err().expect("8 heads over 3 ranks").to_string();
    assert!(error.contains('3') && error.contains('8'), "{error}");
    let error = load(16).err().expect("8 heads over 16 ranks").to_string();
    assert!(error.contains("16"), "{error}");
}

#[test]
fn an_engine_serves_one_request_after_another() {
    let mut engine = demo(2);
    let prompts = prompts();
    let first = greedy(&mut engine, &prompts[2].ids, 40, Speculation::Chain(3));
    let _ = greedy(&mut engine, &prompts[5].ids, 40, Speculation::Auto);
    // Broken off in the middle of a round.
    let request =
        Request { speculation: Speculation::Chain(4), ..Request::new(prompts[3].ids.clone(), 40) };
    let mut seen = 0;
    let outcome = engine
        .generate(&request, |event| {
            seen += usize::from(matches!(event, paceline_runtime::Event::Token(_)));
            if seen < 7 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })
        .unwrap();
    assert_eq!(outcome.finish_reason, paceline_runtime::FinishReason::Cancelled);
    assert_eq!(outcome.tokens.len(), 7);
    let again = greedy(&mut engine, &prompts[2].ids, 40, Speculation::Chain(3));
    assert_eq!(again.tokens, first.tokens);
    assert_eq!(again.accepted, first.accepted);
}
