//! What the scheduler tells the engine to do.

use paceline_model::pass::AttentionForm;

/// Name of a sequence on all ranks, from its submission to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub u32);

/// Rows that the engine asks for one sequence of a decoding pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Width {
    /// Rows in the target's pass: 1, or the nodes of a draft, its root included.
    pub rows: usize,
    /// Positions after the committed ones that need a slot: `rows`, or more if the draft network
    /// needs more scratch rows. With 1 row nothing is drafted, and its one slot is enough.
    pub room: usize,
}

impl Width {
    /// No draft.
    pub const PLAIN: Self = Self { rows: 1, room: 1 };
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
