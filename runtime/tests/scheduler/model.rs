//! A model in which a cache row is a number that depends on all that a real row depends on: the
//! tokens up to its own, and the form of attention of each of these rows.

use std::hash::{DefaultHasher, Hash, Hasher};

use paceline_model::pass::AttentionForm;

/// Tokens that answers consist of.
const VOCABULARY: u64 = 4;

/// The token that ends an answer.
pub(crate) const STOP: u32 = 0;

/// A cache row that nobody may read.
pub(crate) const GARBAGE: u64 = u64::MAX;

/// The row of `token` after the row `previous`.
pub(crate) fn target_row(previous: Option<u64>, token: u32, form: AttentionForm) -> u64 {
    number(&(previous, token, form == AttentionForm::Expanded))
}

/// The draft's row that goes with a target's row and the token after it.
pub(crate) fn draft_row(target: u64, next: u32) -> u64 {
    number(&(target, next, "draft"))
}

/// The token that the model continues a row with. It seldom is [`STOP`].
pub(crate) fn next_token(row: u64) -> u32 {
    match number(&row) % (30 * VOCABULARY) {
        0 => STOP,
        other => (1 + other % VOCABULARY) as u32,
    }
}

/// The answer that a prompt gets when it has the model for itself.
pub(crate) fn answer_alone(prompt: &[u32], tokens_max: usize) -> Vec<u32> {
    let mut row = None;
    for &token in prompt {
        row = Some(target_row(row, token, AttentionForm::Expanded));
    }
    let mut answer = vec![next_token(row.expect("prompts are not empty"))];
    while answer.len() < tokens_max && answer[answer.len() - 1] != STOP {
        row = Some(target_row(row, answer[answer.len() - 1], AttentionForm::Absorbed));
        answer.push(next_token(row.expect("it was set")));
    }
    answer
}

/// A number that is different for different values, as far as tests can tell.
pub(crate) fn number(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish() >> 1
}

/// Numbers that look random.
pub(crate) struct Dice {
    seed: u64,
    throws: u64,
}

impl Dice {
    /// The same seed gives the same numbers.
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed, throws: 0 }
    }

    /// A number below `limit`, or 0.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.throws += 1;
        (number(&(self.seed, self.throws)) % limit.max(1) as u64) as usize
    }

    /// True once in `count` times.
    pub(crate) fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }
}
