//! What is asked of the scheduler, and what it answers.

use crate::scheduler::step::SequenceId;

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
