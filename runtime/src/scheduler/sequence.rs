//! A sequence as the scheduler sees it: its tokens, its rows, its pages.
//!
//! Invariant: `committed` rows are in the first pages, in the order of their positions; the pages
//! of `path` belong to the prefix cache and are full, the rest is private.

use std::collections::VecDeque;

use paceline_model::pass::AttentionForm;

use crate::{
    pages::PAGE_ROWS,
    scheduler::{
        forms::Forms,
        prefix::NodeId,
        step::{Part, SequenceId},
        submission::{PrefixReuse, Submission},
    },
};

/// Where a sequence is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In the queue, without pages.
    Queue,
    /// Its prompt goes through the model.
    Prefill,
    /// It generates.
    Running,
}

/// A sequence from its submission to its end.
#[derive(Debug)]
pub(super) struct Sequence {
    /// Prompt and emitted tokens.
    pub(super) tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub(super) prompt: usize,
    /// Most tokens, prompt and answer together.
    pub(super) length_max: usize,
    pub(super) speculates: bool,
    pub(super) reuse: PrefixReuse,
    pub(super) place: Place,
    /// Whether it ever had pages.
    pub(super) was_admitted: bool,
    pub(super) forms: Forms,
    /// Rows in the cache that count.
    pub(super) committed: usize,
    /// How many of them have draft rows.
    pub(super) draft_rows: usize,
    pub(super) pages: Vec<u32>,
    /// How many of the pages the ranks know.
    pub(super) announced: usize,
    /// Nodes of the prefix cache that are its first pages.
    pub(super) path: Vec<NodeId>,
    /// Whether another sequence's page is where its next one would go in the prefix cache.
    pub(super) is_detached: bool,
    /// Whether no pass was committed since it got pages.
    pub(super) starts: bool,
    /// Rows of the pass that it is in.
    pub(super) rows_in_flight: Option<usize>,
}

impl Sequence {
    pub(super) fn new(submission: Submission, length_max: usize) -> Self {
        let prompt = submission.prompt.len();
        Self {
            tokens: submission.prompt,
            prompt,
            length_max,
            speculates: submission.speculates,
            reuse: submission.reuse,
            place: Place::Queue,
            was_admitted: false,
            forms: Forms::of_prompt(prompt),
            committed: 0,
            draft_rows: 0,
            pages: Vec::new(),
            announced: 0,
            path: Vec::new(),
            is_detached: false,
            starts: true,
            rows_in_flight: None,
        }
    }

    /// Whether it has emitted something, so that its rows must not change.
    pub(super) fn has_emitted(&self) -> bool {
        self.tokens.len() > self.prompt
    }

    /// Rows that must be in the cache before it can generate. The last emitted token's row is
    /// computed by the next round.
    pub(super) fn prefill_rows(&self) -> usize {
        if self.has_emitted() { self.tokens.len() - 1 } else { self.prompt }
    }

    /// Pages for these rows and the first of a round.
    pub(super) fn pages_to_start(&self) -> usize {
        (self.prefill_rows() + 1).div_ceil(PAGE_ROWS)
    }

    /// Pages that it lacks for `positions` positions.
    pub(super) fn missing(&self, positions: usize) -> usize {
        positions.div_ceil(PAGE_ROWS).saturating_sub(self.pages.len())
    }

    /// Form and end of the next chunk.
    pub(super) fn chunk(&self, expanded_max: usize, absorbed_max: usize) -> (AttentionForm, usize) {
        let (form, end) = self.forms.run(self.committed);
        let rows_max = match form {
            AttentionForm::Expanded => expanded_max,
            AttentionForm::Absorbed => absorbed_max,
        };
        (form, end.min(self.prefill_rows()).min(self.committed.saturating_add(rows_max)))
    }

    /// Puts its next `rows` rows into a pass.
    pub(super) fn launch(&mut self, sequence: SequenceId, rows: usize) -> Part {
        let new_pages = self.pages[self.announced..].to_vec();
        self.announced = self.pages.len();
        self.rows_in_flight = Some(rows);
        Part { sequence, new_pages, context: self.committed, rows, starts: self.starts }
    }

    /// The rows of its pass have been computed.
    pub(super) fn land(&mut self, emitted: &[u32], draft_rows: usize) {
        let rows = self.rows_in_flight.take().expect("a sequence is committed once after a pass");
        let kept = match self.place {
            Place::Running => {
                let kept = 1..=rows;
                assert!(kept.contains(&emitted.len()), "a round keeps 1 to all of its rows");
                emitted.len()
            }
            _ => {
                let gives_token = !self.has_emitted() && self.committed + rows == self.prompt;
                assert_eq!(emitted.len(), usize::from(gives_token), "tokens of a chunk");
                rows
            }
        };
        self.committed += kept;
        self.tokens.extend_from_slice(emitted);
        self.starts = false;
        assert!(draft_rows <= self.committed, "draft rows are made from committed rows");
        if self.speculates {
            self.draft_rows = self.draft_rows.max(draft_rows);
        }
    }

    /// Forgets its rows and pages; it may come back.
    pub(super) fn reset(&mut self) {
        self.place = Place::Queue;
        self.committed = 0;
        self.draft_rows = 0;
        self.pages.clear();
        self.announced = 0;
        self.path.clear();
        self.is_detached = false;
        self.starts = true;
        self.rows_in_flight = None;
        if !self.has_emitted() {
            self.forms = Forms::of_prompt(self.prompt);
        }
    }
}

/// Sequences without pages, in the order in which they get some.
#[derive(Debug, Default)]
pub(super) struct Queue {
    order: VecDeque<SequenceId>,
    /// How many of them never had pages. They are behind the others.
    fresh: usize,
}

impl Queue {
    /// Number of requests that never had pages.
    pub(super) fn fresh(&self) -> usize {
        self.fresh
    }

    /// Number of sequences that had pages before.
    pub(super) fn preempted(&self) -> usize {
        self.order.len() - self.fresh
    }

    /// The next one.
    pub(super) fn head(&self) -> Option<SequenceId> {
        self.order.front().copied()
    }

    /// All of them, the next one first.
    pub(super) fn all(&self) -> impl Iterator<Item = SequenceId> {
        self.order.iter().copied()
    }

    /// A new request queues up.
    pub(super) fn push(&mut self, sequence: SequenceId) {
        self.order.push_back(sequence);
        self.fresh += 1;
    }

    /// The youngest of those with pages comes back.
    pub(super) fn put_back(&mut self, sequence: SequenceId) {
        self.order.push_front(sequence);
    }

    /// The head leaves. `was_admitted`: it had pages before.
    pub(super) fn pop(&mut self, was_admitted: bool) {
        self.order.pop_front();
        self.fresh -= usize::from(!was_admitted);
    }

    /// One leaves from anywhere.
    pub(super) fn remove(&mut self, sequence: SequenceId, was_admitted: bool) {
        let place = self.order.iter().position(|&other| other == sequence);
        self.order.remove(place.expect("the sequence waits"));
        self.fresh -= usize::from(!was_admitted);
    }
}
