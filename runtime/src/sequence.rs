//! One request from its submission to its outcome, as rank 0 sees it.
//!
//! Invariant: the cache holds rows 0..`committed` of the sequence's tokens, which are all but the
//! last one, the root of the next round, as soon as the answer has begun. The tokens themselves
//! are the scheduler's.

use std::time::{Duration, Instant};

use paceline_spec::{DraftTree, Limits, Plan};

use crate::{
    answer::Answer,
    drafter::Drafting,
    pages::BlockTable,
    request::{Event, FinishReason, Flow, Outcome, Request, RequestId, Speculation, Timings},
    sampling::Sampler,
    scheduler::{Part, SequenceId},
};

/// Who hears of the events of all requests.
pub(crate) type Listener<'a> = &'a mut dyn FnMut(RequestId, Event<'_>) -> Flow;

/// A request that is not finished.
pub(crate) struct Sequence {
    pub(crate) id: SequenceId,
    pub(crate) request: RequestId,
    pub(crate) answer: Answer,
    pub(crate) sampler: Sampler,
    /// Its pages; the other ranks hear of them with the pass that needs them.
    pub(crate) table: BlockTable,
    /// Rows in the cache.
    pub(crate) committed: usize,
    /// The draft's side, while it has pages and speculates.
    pub(crate) drafting: Option<Drafting>,
    /// What this round verifies.
    pub(crate) tree: DraftTree,
    pub(crate) plan: Plan,
    pub(crate) timings: Timings,
    pub(crate) prefix_reused: usize,
    pub(crate) preemptions: usize,
    submitted: Instant,
    started: Option<Instant>,
    first_token: Option<Instant>,
}

impl Sequence {
    /// A request that waits.
    pub(crate) fn new(
        id: SequenceId,
        request: RequestId,
        answer: Answer,
        sampler: Sampler,
    ) -> Self {
        Self {
            id,
            request,
            answer,
            sampler,
            table: BlockTable::default(),
            committed: 0,
            drafting: None,
            tree: DraftTree::root_only(0),
            plan: Plan::Plain,
            timings: Timings::default(),
            prefix_reused: 0,
            preemptions: 0,
            submitted: Instant::now(),
            started: None,
            first_token: None,
        }
    }

    /// What was asked for.
    pub(crate) fn asked(&self) -> &Request {
        self.answer.request()
    }

    /// Whether it drafts, now and then at least.
    pub(crate) fn speculates(&self) -> bool {
        self.asked().speculation != Speculation::Off
    }

    /// Whether its answer has begun, and all rows that the next round needs are in the cache: not
    /// so while it waits for pages, or while what it lost is computed again.
    pub(crate) fn is_running(&self) -> bool {
        let tokens = self.asked().prompt.len() + self.answer.tokens().len();
        self.has_answer() && self.committed + 1 == tokens
    }

    /// Whether something can be drafted now.
    pub(crate) fn can_draft(&self) -> bool {
        self.drafting.as_ref().is_some_and(Drafting::can_grow)
    }

    /// What it has room for in a round, with `draft_positions` positions known to the draft and
    /// `rows_max` rows of a pass.
    pub(crate) fn limits(&self, draft_positions: usize, rows_max: usize) -> Limits {
        // Beyond the positions that the draft was trained for, nothing is drafted. The target's
        // own end is in the answer's limit.
        let positions_left = draft_positions.saturating_sub(self.committed);
        Limits::remaining(self.answer.tokens_left(), positions_left, rows_max)
    }

    /// Takes the pages of a pass.
    pub(crate) fn open(&mut self, part: &Part) {
        if part.starts {
            self.committed = part.context;
            if self.started.is_none() {
                self.started = Some(Instant::now());
                self.timings.queue = self.submitted.elapsed();
                self.prefix_reused = part.context;
            }
        }
        part.new_pages.iter().for_each(|&page| self.table.push(page));
        debug_assert_eq!(self.committed, part.context, "the scheduler counts the same rows");
    }

    /// Gives its pages up and waits again.
    pub(crate) fn preempt(&mut self) {
        self.table.take_pages();
        self.committed = 0;
        self.preemptions += 1;
    }

    /// Whether its answer has begun.
    pub(crate) fn has_answer(&self) -> bool {
        self.first_token.is_some()
    }

    /// Rows that are in the draft's cache.
    pub(crate) fn draft_rows(&self) -> usize {
        self.drafting.as_ref().map_or(0, Drafting::rows)
    }

    /// Rows that the draft has not seen.
    pub(crate) fn waiting_rows(&self) -> usize {
        self.drafting.as_ref().map_or(0, Drafting::waiting_rows)
    }

    /// Notes the time of the first token.
    pub(crate) fn begin_answer(&mut self) {
        self.first_token = Some(Instant::now());
        self.timings.first_token = self.submitted.elapsed();
    }

    /// Tells the end, after the last text.
    pub(crate) fn finish(&mut self, reason: FinishReason, on_event: Listener<'_>) {
        let decode = self.first_token.map_or(Duration::ZERO, |first| first.elapsed());
        let name = self.request;
        let outcome = Outcome {
            timings: Timings { decode, ..self.timings },
            prefix_reused: self.prefix_reused,
            preemptions: self.preemptions,
            ..self.answer.finish(reason, &mut |event| on_event(name, event))
        };
        // It is over, whatever the listener says.
        let _ = on_event(name, Event::Finished(&outcome));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Issue 3: a sequence that is computed again was counted among those of the round.
    #[test]
    fn a_preempted_sequence_runs_when_its_rows_are_back() {
        let request = Request::new(vec![1, 2, 3], 8);
        let sampler = Sampler::new(&request, &[]);
        let answer = Answer::new(request, 8, None, [].into());
        let mut sequence = Sequence::new(SequenceId(0), RequestId(0), answer, sampler);
        sequence.committed = 2;
        assert!(!sequence.is_running(), "a prompt");
        sequence.begin_answer();
        assert!(sequence.is_running());
        sequence.preempt();
        let part = |context, starts| Part {
            sequence: SequenceId(0),
            new_pages: vec![0],
            context,
            rows: 1,
            starts,
        };
        sequence.open(&part(0, true));
        sequence.committed += 1;
        assert!(!sequence.is_running(), "one of its two rows is back");
        sequence.open(&part(1, false));
        sequence.committed += 1;
        assert!(sequence.is_running());
    }
}
