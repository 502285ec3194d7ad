//! Small traces, step by step.

use paceline_model::pass::AttentionForm::{Absorbed, Expanded};
use paceline_runtime::{
    pages::PAGE_ROWS,
    scheduler::{
        Action, Part, PrefixReuse, Refusal, Scheduler, SchedulerLimits, SequenceId, Step,
        Submission, Width,
    },
};

fn limits() -> SchedulerLimits {
    SchedulerLimits {
        pages: 8,
        context_max: 100,
        prefill_rows_max: 20,
        decode_rows_max: 8,
        sequences_max: 4,
        waiting_max: 2,
    }
}

fn submission(prompt: &[u32], tokens_max: usize) -> Submission {
    let reuse = PrefixReuse::SameBits;
    Submission { prompt: prompt.to_vec(), tokens_max, speculates: false, reuse }
}

/// Tokens `first..first + count`.
fn text(first: u32, count: usize) -> Vec<u32> {
    (first..).take(count).collect()
}

fn submit(scheduler: &mut Scheduler, submission: Submission) -> SequenceId {
    scheduler.submit(submission).expect("there is room").sequence
}

/// A step without drafts whose pass emits 7s. Returns it.
fn step(scheduler: &mut Scheduler) -> Step {
    drafting_step(scheduler, Width::PLAIN, 0)
}

fn drafting_step(scheduler: &mut Scheduler, width: Width, draft_rows: usize) -> Step {
    let step = scheduler.next(|_| width);
    match &step.action {
        Action::Idle => {}
        Action::Prefill { part, gives_token, .. } => {
            let emitted: &[u32] = if *gives_token { &[7] } else { &[] };
            scheduler.commit(part.sequence, emitted, draft_rows);
        }
        Action::Decode { parts } => {
            parts.iter().for_each(|part| scheduler.commit(part.sequence, &[7], draft_rows));
        }
    }
    step
}

/// The part of a chunk.
fn chunk(step: &Step) -> &Part {
    match &step.action {
        Action::Prefill { part, .. } => part,
        other => panic!("{other:?} is no chunk"),
    }
}

/// Steps until the sequence has all tokens that it may have, and ends it.
fn finish(scheduler: &mut Scheduler, id: SequenceId, length: usize) {
    while scheduler.tokens(id).expect("it lives").len() < length {
        step(scheduler);
    }
    scheduler.end(id);
}

#[test]
fn chunks_and_rounds_take_turns() {
    let mut scheduler = Scheduler::new(limits()).unwrap();
    let first = submit(&mut scheduler, submission(&text(0, 5), 9));
    let part = Part { sequence: first, new_pages: vec![0], context: 0, rows: 5, starts: true };
    let action = Action::Prefill { part, form: Expanded, gives_token: true };
    assert_eq!(step(&mut scheduler), Step { action, ..Step::default() });

    let second = submit(&mut scheduler, submission(&text(50, 45), 9));
    let mut seen = Vec::new();
    for _ in 0..7 {
        seen.push(match step(&mut scheduler).action {
            Action::Prefill { part, gives_token, .. } => {
                assert_eq!((part.sequence, gives_token), (second, part.context == 40));
                part.rows
            }
            Action::Decode { parts } => {
                assert_eq!(parts[0].sequence, first);
                100 + parts.len()
            }
            Action::Idle => 0,
        });
    }
    assert_eq!(seen, [101, 20, 101, 20, 101, 5, 102]);
}

#[test]
fn what_never_fits_is_refused_with_facts() {
    let mut scheduler = Scheduler::new(limits()).unwrap();
    let never = Refusal::NeverFits { prompt: 100, context_max: 100, cache_rows: 128 };
    assert_eq!(scheduler.submit(submission(&text(0, 100), 1)), Err(never));
    assert_eq!(scheduler.submit(submission(&text(0, 99), 5)).unwrap().tokens_max, 1);
    let narrow = SchedulerLimits { pages: 2, ..limits() };
    let mut scheduler = Scheduler::new(narrow).unwrap();
    let never = Refusal::NeverFits { prompt: 32, context_max: 100, cache_rows: 32 };
    assert_eq!(scheduler.submit(submission(&text(0, 32), 1)), Err(never));
    assert_eq!(scheduler.submit(submission(&[], 1)), Err(Refusal::Empty));
    assert_eq!(scheduler.submit(submission(&[1], 0)), Err(Refusal::Empty));
}

#[test]
fn a_full_queue_is_busy_until_one_leaves_it() {
    let mut scheduler = Scheduler::new(limits()).unwrap();
    let first = submit(&mut scheduler, submission(&text(0, 5), 9));
    submit(&mut scheduler, submission(&text(0, 5), 9));
    let third = submission(&text(0, 5), 9);
    assert_eq!(scheduler.submit(third.clone()), Err(Refusal::Busy { waiting: 2 }));
    step(&mut scheduler);
    let third_id = submit(&mut scheduler, third.clone());
    assert_eq!(scheduler.submit(third.clone()), Err(Refusal::Busy { waiting: 2 }));
    scheduler.end(third_id);
    submit(&mut scheduler, third);
    assert_eq!(scheduler.next(|_| Width::PLAIN).forget, [], "{first:?} still runs");
}

#[test]
fn impossible_limits_are_refused() {
    let few_rows = SchedulerLimits { decode_rows_max: 3, ..limits() };
    let error = Scheduler::new(few_rows).unwrap_err().to_string();
    assert!(error.contains("is 3") && error.contains("each of 4 sequences"), "{error}");
    assert!(Scheduler::new(SchedulerLimits { pages: 0, ..limits() }).is_err());
    assert!(Scheduler::new(SchedulerLimits { context_max: 1, ..limits() }).is_err());
    assert!(Scheduler::new(SchedulerLimits { prefill_rows_max: 0, ..limits() }).is_err());
    assert!(Scheduler::new(SchedulerLimits { waiting_max: 0, ..limits() }).is_err());
    assert!(Scheduler::new(SchedulerLimits { pages: 1 << 40, ..limits() }).is_err());
}

#[test]
fn the_same_prompt_shares_pages_and_copies_the_last_one() {
    let mut scheduler = Scheduler::new(limits()).unwrap();
    let first = submit(&mut scheduler, submission(&text(0, 20), 2));
    finish(&mut scheduler, first, 22);
    submit(&mut scheduler, submission(&text(0, 20), 2));
    let second = step(&mut scheduler);
    assert_eq!(second.forget, [first]);
    // All rows but the last, which is computed for its logits.
    assert_eq!((chunk(&second).context, chunk(&second).rows), (19, 1));
    assert_eq!(chunk(&second).new_pages, [0, 2]);
    assert_eq!(second.moves, [(16, 32), (17, 33), (18, 34)]);
}

#[test]
fn a_prompt_is_shared_while_its_first_answer_runs() {
    let mut scheduler = Scheduler::new(limits()).unwrap();
    submit(&mut scheduler, submission(&text(0, 18), 9));
    step(&mut scheduler);
    submit(&mut scheduler, submission(&text(0, 18), 9));
    step(&mut scheduler);
    let second = step(&mut scheduler);
    let expected = (16, vec![0, 2], Vec::new());
    let part = chunk(&second);
    assert_eq!((part.context, part.new_pages.clone(), second.moves.clone()), expected);
}

#[test]
fn answers_are_reused_only_where_other_bits_are_welcome() {
    // The first turn's prompt, its answer and a question.
    let prompt: Vec<u32> = [text(0, 20), vec![7; 10], text(90, 4)].concat();
    let cases = [(PrefixReuse::Off, 0), (PrefixReuse::SameBits, 20), (PrefixReuse::SameTokens, 29)];
    for (reuse, rows) in cases {
        let mut scheduler = Scheduler::new(limits()).unwrap();
        let first = submit(&mut scheduler, submission(&text(0, 20), 10));
        finish(&mut scheduler, first, 30);
        submit(&mut scheduler, Submission { reuse, ..submission(&prompt, 2) });
        let second = step(&mut scheduler);
        assert_eq!(chunk(&second).context, rows, "{reuse:?}");
        assert_eq!(second.moves.len(), rows.saturating_sub(PAGE_ROWS), "{reuse:?}");
    }
}

#[test]
fn without_reuse_no_rows_stay() {
    let mut scheduler = Scheduler::new(limits()).unwrap();
    let reuse = PrefixReuse::Off;
    let id = submit(&mut scheduler, Submission { reuse, ..submission(&text(0, 40), 9) });
    finish(&mut scheduler, id, 49);
    assert_eq!(scheduler.occupancy().pages_free, 8);
}

#[test]
fn speculation_reuses_rows_that_have_draft_rows() {
    for (draft_rows, reused) in [(0, 0), (10, 10), (16, 16), (21, 20)] {
        let mut scheduler = Scheduler::new(limits()).unwrap();
        let speculating = Submission { speculates: true, ..submission(&text(0, 21), 2) };
        let first = submit(&mut scheduler, speculating.clone());
        step(&mut scheduler);
        drafting_step(&mut scheduler, Width::PLAIN, 0);
        drafting_step(&mut scheduler, Width { rows: 3, room: 4 }, draft_rows);
        scheduler.end(first);
        submit(&mut scheduler, speculating);
        assert_eq!(chunk(&step(&mut scheduler)).context, reused, "{draft_rows} draft rows");
    }
}

#[test]
fn a_preempted_answer_is_replayed_in_the_forms_of_the_first_time() {
    let narrow = SchedulerLimits { pages: 5, ..limits() };
    let mut scheduler = Scheduler::new(narrow).unwrap();
    let older = submit(&mut scheduler, submission(&text(0, 20), 30));
    let reuse = PrefixReuse::Off;
    let younger = submit(&mut scheduler, Submission { reuse, ..submission(&text(30, 20), 30) });
    let mut preempting = step(&mut scheduler);
    while preempting.preempted.is_empty() {
        preempting = step(&mut scheduler);
    }
    // Both answers have filled two pages, and there is a fifth one for the older one only.
    assert_eq!((preempting.preempted, preempting.forget), (vec![younger], vec![younger]));
    let emitted = scheduler.tokens(younger).unwrap().len();
    assert_eq!(emitted, 33);
    let newcomer = submit(&mut scheduler, submission(&text(60, 4), 2));
    finish(&mut scheduler, older, 50);
    let mut replay = Vec::new();
    loop {
        match step(&mut scheduler).action {
            Action::Prefill { part, form, gives_token } => {
                assert_eq!((part.sequence, gives_token), (younger, false), "before {newcomer:?}");
                replay.push((part.context, part.rows, form));
            }
            Action::Decode { parts } => {
                assert_eq!((parts[0].context, parts[0].starts), (emitted - 1, false));
                break;
            }
            Action::Idle => panic!("nothing is left"),
        }
    }
    assert_eq!(replay, [(0, 20, Expanded), (20, 8, Absorbed), (28, 4, Absorbed)]);
}

#[test]
fn a_prompt_waits_if_it_would_soon_be_preempted() {
    for (pages, is_admitted) in [(4, false), (5, true)] {
        let mut scheduler = Scheduler::new(SchedulerLimits { pages, ..limits() }).unwrap();
        for first in [0, 30] {
            submit(&mut scheduler, submission(&text(first, 17), 40));
        }
        // Each takes two pages at first, and the older one will need another.
        step(&mut scheduler);
        step(&mut scheduler);
        let chunk = matches!(step(&mut scheduler).action, Action::Prefill { .. });
        assert_eq!(chunk, is_admitted, "{pages} pages");
    }
}

#[test]
fn widths_shrink_before_a_page_is_missing() {
    let narrow = SchedulerLimits { pages: 2, ..limits() };
    let mut scheduler = Scheduler::new(narrow).unwrap();
    let id = submit(&mut scheduler, submission(&text(0, 10), 22));
    step(&mut scheduler);
    let mut rows = Vec::new();
    for _ in 0..21 {
        let round = drafting_step(&mut scheduler, Width { rows: 4, room: 6 }, 0);
        let Action::Decode { parts } = round.action else { panic!("it generates") };
        rows.push(parts[0].rows);
    }
    // Room for 6 more is there up to row 26; one row is there to the end.
    assert_eq!(rows, [vec![4; 17], vec![1; 4]].concat());
    scheduler.end(id);
}

#[test]
fn rows_of_a_round_are_limited_and_the_oldest_drafts_first() {
    let mut scheduler = Scheduler::new(limits()).unwrap();
    for first in [0, 30, 60] {
        submit(&mut scheduler, submission(&text(first, 4), 9));
        step(&mut scheduler);
        step(&mut scheduler);
    }
    let round = drafting_step(&mut scheduler, Width { rows: 4, room: 4 }, 0);
    let Action::Decode { parts } = round.action else { panic!("all generate") };
    let rows: Vec<usize> = parts.iter().map(|part| part.rows).collect();
    assert_eq!(rows, [4, 1, 1], "8 rows hold one draft of 4 and two others");
}

#[test]
fn prefixes_that_were_used_last_stay_longest() {
    let mut scheduler = Scheduler::new(SchedulerLimits { pages: 4, ..limits() }).unwrap();
    // Two prefixes of a page each; the first is used again.
    for first in [0, 50, 0] {
        let id = submit(&mut scheduler, submission(&text(first, 16), 1));
        finish(&mut scheduler, id, 17);
    }
    assert_eq!(scheduler.occupancy().pages_cached, 2);
    // A prompt of three pages takes one of them.
    let id = submit(&mut scheduler, submission(&text(70, 40), 1));
    finish(&mut scheduler, id, 41);
    for (first, reused) in [(0, 15), (50, 0)] {
        let id = submit(&mut scheduler, submission(&text(first, 16), 1));
        let started = step(&mut scheduler);
        assert_eq!(chunk(&started).context, reused);
        scheduler.end(id);
    }
}

#[test]
fn endings_reach_the_ranks_even_if_nothing_follows() {
    let mut scheduler = Scheduler::new(limits()).unwrap();
    let ids = [0, 30].map(|first| submit(&mut scheduler, submission(&text(first, 30), 9)));
    let chunk = scheduler.next(|_| Width::PLAIN);
    assert!(matches!(chunk.action, Action::Prefill { .. }));
    // One ends in a pass, one before it ever ran: ranks know the first only.
    ids.iter().for_each(|&id| scheduler.end(id));
    scheduler.end(ids[0]);
    let last = Step { forget: vec![ids[0]], ..Step::default() };
    assert_eq!(scheduler.next(|_| Width::PLAIN), last);
    assert_eq!(scheduler.occupancy().pages_free, 8);
}
