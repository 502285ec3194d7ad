//! Decides what the engine does next: which sequences go through the model together, with how many
//! rows, and in which pages of the cache.
//!
//! A state machine without clocks, threads or a model: submissions, results and endings go in, the
//! next [`Step`] comes out, and the same calls give the same steps. Sequences join and leave between
//! passes. A pass is either a chunk of one prompt or one round of all answers; the two take turns.
//!
//! Invariant: each page is free, or private to one sequence, or in the prefix cache, where any
//! number of sequences read it and nobody writes. Start reading at [`Scheduler::next`].

use paceline_model::pass::AttentionForm;

use crate::error::Result;

/// Name of a sequence on all ranks, from its submission to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub u32);

/// What a scheduler may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerLimits {
    /// Pages of the cache, of [`PAGE_ROWS`](crate::pages::PAGE_ROWS) rows.
    pub pages: usize,
    /// Longest sequence, prompt and answer together, in tokens.
    pub context_max: usize,
    /// Rows of a chunk of a prompt.
    pub prefill_rows_max: usize,
    /// Rows of a decoding pass over all its sequences; at least `sequences_max`.
    pub decode_rows_max: usize,
    /// Sequences that have pages at the same time.
    pub sequences_max: usize,
    /// Requests that wait for their first pass.
    pub waiting_max: usize,
}

/// A request, as far as it matters here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Submission {
    /// Token ids; at least one.
    pub prompt: Vec<u32>,
    /// Most tokens of the answer; at least one.
    pub tokens_max: usize,
    /// Whether the draft network will be used, so that reused rows need draft rows too.
    pub speculates: bool,
    /// Which rows of earlier sequences it may use.
    pub reuse: PrefixReuse,
}

/// Which rows of other sequences a request may use instead of computing them.
///
/// Rows of prompts and rows of answers are computed in two forms of attention that agree to
/// rounding only, so a prompt that repeats an answer has rows with slightly different bits in the
/// cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrefixReuse {
    /// None, and it leaves none for others.
    Off,
    /// Those with the bits that its own passes would give: answers do not depend on what ran
    /// before.
    #[default]
    SameBits,
    /// Any with the same tokens, the answers of a conversation included.
    SameTokens,
}

/// A submission that was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// Its name from now on.
    pub sequence: SequenceId,
    /// Most tokens of the answer: what was asked for, or what the context and the cache hold. The
    /// caller ends the sequence when it has that many.
    pub tokens_max: usize,
}

/// Why a submission was not taken. Nothing has changed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The prompt and one token do not fit, whatever else ends.
    NeverFits {
        /// Tokens of the prompt.
        prompt: usize,
        /// Longest sequence of the model, in tokens.
        context_max: usize,
        /// Rows of the whole cache.
        cache_rows: usize,
    },
    /// An empty prompt, or an answer of no tokens.
    Empty,
    /// Too many requests wait already; try again when one has started.
    Busy {
        /// Requests that wait.
        waiting: usize,
    },
}

/// Rows that the engine asks for one sequence of a decoding pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Width {
    /// Rows in the target's pass: 1, or the nodes of a draft, its root included.
    pub rows: usize,
    /// Positions after the committed ones that need a slot: `rows`, or more if the draft network
    /// needs more scratch rows.
    pub room: usize,
}

/// What the engine does next, in the order of the fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Sequences whose tables all ranks must forget: ended ones, and `preempted`.
    pub forget: Vec<SequenceId>,
    /// Those of `forget` that lost their pages and come back later under the same name: the first
    /// pass then has `starts` set. Their drafts' waiting states are void.
    pub preempted: Vec<SequenceId>,
    /// Rows to copy from slot to slot, one after the other, in the caches of target and draft:
    /// reused rows of partly used pages. They come after the moves that the last results left, and
    /// before the pass.
    pub moves: Vec<(u32, u32)>,
    /// The pass.
    pub action: Action,
}

/// A pass, or none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Action {
    /// A chunk of one sequence: tokens `context..context + rows`.
    Prefill {
        /// The sequence and its rows.
        part: Part,
        /// Expanded for rows of the prompt; absorbed when rows of an answer are replayed after a
        /// preemption, as they were computed first.
        form: AttentionForm,
        /// Whether the last row's logits give the first token of the answer. Otherwise no logits
        /// are needed and nothing is emitted.
        gives_token: bool,
    },
    /// One round of all running sequences, absorbed. Each starts from its last token.
    Decode {
        /// The sequences and their rows, oldest first.
        parts: Vec<Part>,
    },
    /// Nothing to do until something is submitted.
    #[default]
    Idle,
}

/// A sequence in a pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The sequence.
    pub sequence: SequenceId,
    /// Pages to append to its table before the pass and before `moves` are looked up in it. Shared
    /// ones come first.
    pub new_pages: Vec<u32>,
    /// Committed rows.
    pub context: usize,
    /// Rows of this pass. When decoding: as asked for, or 1 if rows or pages are short.
    pub rows: usize,
    /// Whether this is its first pass since it got pages, of which rows `0..context` were reused;
    /// if the sequence speculates, their draft rows too.
    pub starts: bool,
}

/// How many sequences and pages are in which state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Occupancy {
    /// Requests before their first pass.
    pub waiting: usize,
    /// Sequences that lost their pages.
    pub preempted: usize,
    /// Sequences with part of their prompt to come: 0 or 1.
    pub prefilling: usize,
    /// Sequences that generate.
    pub running: usize,
    /// Pages that hold nothing.
    pub pages_free: usize,
    /// Pages that sequences use, shared ones counted once.
    pub pages_held: usize,
    /// Pages that only the prefix cache keeps. They are given up when pages are short.
    pub pages_cached: usize,
}

/// The scheduler.
#[derive(Debug)]
pub struct Scheduler {
    limits: SchedulerLimits,
}

impl Scheduler {
    /// A scheduler over an empty cache.
    ///
    /// # Errors
    /// [`RuntimeError::Request`](crate::RuntimeError::Request) for limits that nothing can run
    /// within.
    pub fn new(limits: SchedulerLimits) -> Result<Self> {
        Ok(Self { limits })
    }

    /// Takes a request into the queue.
    ///
    /// # Errors
    /// A [`Refusal`].
    pub fn submit(&mut self, submission: Submission) -> std::result::Result<Accepted, Refusal> {
        todo!("{submission:?}")
    }

    /// What to do now. `width` is asked for each sequence of a decoding pass, oldest first.
    ///
    /// Between two calls every sequence of the first one's pass is committed or ended, and those
    /// that have all their tokens are ended.
    pub fn next(&mut self, width: impl FnMut(SequenceId) -> Width) -> Step {
        let _ = width;
        todo!("{:?}", self.limits)
    }

    /// The pass has computed this sequence's rows. `emitted` are its new tokens: none for a chunk
    /// unless it `gives_token`; when decoding one for each row that is kept, the rows of the tokens
    /// before them: 1 to the number of rows. `draft_rows` of its rows have draft rows in the cache.
    pub fn commit(&mut self, sequence: SequenceId, emitted: &[u32], draft_rows: usize) {
        todo!("{sequence:?} {emitted:?} {draft_rows}")
    }

    /// Ends a sequence in any state: finished, cancelled or failed. Its committed rows stay in the
    /// prefix cache unless it was submitted without reuse. If it is in a pass and not committed,
    /// that pass's rows are dropped. Unknown names are ignored.
    pub fn end(&mut self, sequence: SequenceId) {
        todo!("{sequence:?}")
    }

    /// Prompt and emitted tokens; `None` for an unknown sequence.
    pub fn tokens(&self, sequence: SequenceId) -> Option<&[u32]> {
        todo!("{sequence:?}")
    }

    /// Gives up all cached prefixes that no sequence uses.
    pub fn clear_cache(&mut self) {
        todo!()
    }

    /// What is in which state.
    pub fn occupancy(&self) -> Occupancy {
        todo!()
    }

    /// What this scheduler may use.
    pub fn limits(&self) -> &SchedulerLimits {
        &self.limits
    }
}
