//! The scheduler under random traces: everything that [`world::World`] checks at each step, and
//! what must hold at the end.

mod checks;
mod examples;
mod model;
mod world;

use paceline_runtime::scheduler::{PrefixReuse, SchedulerLimits, Submission};
use proptest::{collection::vec, prelude::*, strategy::ValueTree, test_runner::TestRunner};

use crate::{
    model::{answer_alone, number},
    world::{Seen, World},
};

/// Something that happens to an engine.
#[derive(Clone, Debug)]
enum Event {
    Submit { prompt: Prompt, tokens_max: usize, speculates: bool, reuse: PrefixReuse },
    Step { seed: u64 },
    End { index: usize },
    ClearCache,
}

/// How a prompt comes about.
#[derive(Clone, Debug)]
enum Prompt {
    /// The beginning of one of a few texts, then tokens of its own.
    Text { text: u64, shared: usize, own: Vec<u32> },
    /// The beginning of an earlier prompt and its answer, then tokens of its own.
    Continued { earlier: usize, cut: usize, own: Vec<u32> },
}

impl Prompt {
    fn tokens(&self, history: &[Vec<u32>]) -> Vec<u32> {
        let (mut tokens, own) = match self {
            Self::Text { text, shared, own } => {
                let token = |index| 1 + (number(&(text, index)) % 50) as u32;
                ((0..*shared).map(token).collect(), own)
            }
            Self::Continued { earlier, cut, own } => {
                let all =
                    history.len().checked_sub(1).map(|last| &history[last - earlier % (last + 1)]);
                let mut tokens = all.cloned().unwrap_or_default();
                tokens.truncate(tokens.len().saturating_sub(*cut));
                (tokens, own)
            }
        };
        tokens.extend_from_slice(own);
        if tokens.is_empty() {
            tokens.push(1);
        }
        tokens
    }
}

fn prompts() -> impl Strategy<Value = Prompt> {
    let own = || vec(1u32..4, 0..6);
    prop_oneof![
        (0u64..3, 0usize..90, own()).prop_map(|(text, shared, own)| Prompt::Text {
            text,
            shared,
            own
        }),
        (0usize..6, 0usize..20, own()).prop_map(|(earlier, cut, own)| Prompt::Continued {
            earlier,
            cut,
            own
        }),
    ]
}

fn reuses() -> impl Strategy<Value = PrefixReuse> {
    use PrefixReuse::{Off, SameBits, SameTokens};
    prop_oneof![Just(Off), Just(SameBits), Just(SameBits), Just(SameTokens), Just(SameTokens)]
}

fn submissions() -> impl Strategy<Value = Event> {
    (prompts(), 1usize..120, any::<bool>(), reuses()).prop_map(
        |(prompt, tokens_max, speculates, reuse)| Event::Submit {
            prompt,
            tokens_max,
            speculates,
            reuse,
        },
    )
}

fn events(count: usize) -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        15 => submissions(),
        80 => any::<u64>().prop_map(|seed| Event::Step { seed }),
        2 => any::<usize>().prop_map(|index| Event::End { index }),
        1 => Just(Event::ClearCache),
    ];
    vec(event, count / 2..count)
}

fn limits() -> impl Strategy<Value = SchedulerLimits> {
    (1usize..12, 2usize..200, 1usize..40, 1usize..7, 0usize..16, 1usize..8).prop_map(
        |(pages, context_max, prefill_rows_max, sequences_max, more_rows, waiting_max)| {
            SchedulerLimits {
                pages,
                context_max,
                prefill_rows_max,
                decode_rows_max: sequences_max + more_rows,
                sequences_max,
                waiting_max,
            }
        },
    )
}

fn happen(world: &mut World, event: &Event) {
    match event {
        Event::Submit { prompt, tokens_max, speculates, reuse } => {
            let prompt = prompt.tokens(&world.history);
            let (tokens_max, speculates, reuse) = (*tokens_max, *speculates, *reuse);
            world.submit(Submission { prompt, tokens_max, speculates, reuse });
        }
        Event::Step { seed } => {
            world.step(*seed);
        }
        Event::End { index } => {
            if let Some(id) = world.nth(*index) {
                world.end(id);
            }
        }
        Event::ClearCache => {
            world.scheduler.clear_cache();
            world.scheduler.assert_consistent();
            assert_eq!(world.scheduler.occupancy().pages_cached, 0);
        }
    }
}

/// Steps until nothing is left. Every round brings each of its sequences a token nearer to its end,
/// chunks take turns with rounds, and a chunk that no round follows brings its prompt nearer to its
/// first round, which nothing takes back: so there is a bound.
fn run_to_the_end(world: &mut World, limits: &SchedulerLimits) {
    let length_max = limits.context_max.min(limits.pages * 16);
    let steps_max = 3 * length_max * (world.living() + 1) + 10;
    let mut steps = 0;
    while world.step(number(&(steps, "the end"))) {
        steps += 1;
        assert!(steps <= steps_max, "{} sequences do not end", world.living());
    }
}

fn play(limits: SchedulerLimits, events: &[Event]) -> World {
    let mut world = World::new(limits);
    events.iter().for_each(|event| happen(&mut world, event));
    run_to_the_end(&mut world, &limits);
    world
}

/// Failures are printed whole, so no file keeps them.
fn config() -> ProptestConfig {
    ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) }
}

/// Rare things happened in these traces, so the other tests are about them too.
#[test]
fn traces_reach_all_states() {
    let mut runner = TestRunner::deterministic();
    let mut seen = Seen::default();
    for _ in 0..32 {
        let trace = (limits(), events(4000)).new_tree(&mut runner).expect("nothing is rejected");
        let (limits, events) = trace.current();
        seen.add(&play(limits, &events).seen);
    }
    assert!(seen.preempted > 50 && seen.replayed_rows > 500, "{seen:?}");
    assert!(seen.shared_rows > 5000 && seen.copied_rows > 1000, "{seen:?}");
    assert!(seen.absorbed_rows_reused > 500 && seen.shrunk > 500 && seen.resumed > 0, "{seen:?}");
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn all_invariants_hold_at_each_step(limits in limits(), events in events(4000)) {
        let world = play(limits, &events);
        for finished in world.finished.iter().filter(|f| f.reuse != PrefixReuse::SameTokens) {
            let alone = answer_alone(&finished.prompt, finished.tokens_max);
            prop_assert_eq!(&finished.answer, &alone, "batched and single answers are the same");
        }
        let mut scheduler = world.scheduler;
        scheduler.clear_cache();
        prop_assert_eq!(scheduler.occupancy().pages_free, limits.pages);
    }

    #[test]
    fn the_same_calls_give_the_same_steps(limits in limits(), events in events(1000)) {
        let (first, second) = (play(limits, &events), play(limits, &events));
        prop_assert_eq!(first.steps, second.steps);
    }
}
