//! What one forward pass computes: rows, where their cache lives, and what they see.
//!
//! Invariant: a [`Pass`] is plain data made by the host before anything runs, the same on every
//! rank. It names cache slots, never memory.

use paceline_kernels::ops::attention::Paths;

/// Tokens of one or several sequences that go through the model together.
#[derive(Clone, Copy, Debug)]
pub struct Pass<'a> {
    /// One token a row.
    pub tokens: &'a [u32],
    /// Position of each row, for rotary embedding.
    pub positions: &'a [u32],
    /// The sequences, in the order of their rows; together they cover all rows.
    pub segments: &'a [Segment<'a>],
    /// How attention is computed.
    pub form: AttentionForm,
    /// Rows whose logits are wanted, ascending.
    pub logit_rows: &'a [u32],
}

/// The rows of one sequence in a pass.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    /// First row of the pass.
    pub first_row: usize,
    /// Number of rows.
    pub rows: usize,
    /// Rows of the sequence that are already in the cache; all rows see them.
    pub context: usize,
    /// Rows after these that earlier passes wrote and that are not committed: the first nodes of
    /// a tree of which this segment holds the next ones. 0 for a target's passes.
    pub earlier: usize,
    /// Cache slot of each of these, then of each row of this segment.
    pub slots: &'a [u32],
    /// For the nodes of a draft tree, the path of each; `None`: each row sees those before it.
    pub paths: Option<&'a Paths>,
}

/// The two forms of multi-head latent attention (DeepSeek-V2, section 2.1; the specification's
/// golden values hold for both). They agree to rounding, not to the bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionForm {
    /// Keys and values are expanded from the latent rows: less arithmetic for many rows.
    Expanded,
    /// Queries are taken into the latent space: less memory traffic for few rows.
    Absorbed,
}

impl<'a> Segment<'a> {
    /// The slots that this segment's rows are written to.
    pub fn new_slots(&self) -> &'a [u32] {
        let first = self.context + self.earlier;
        &self.slots[first..first + self.rows]
    }
}

impl Pass<'_> {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Asserts that the parts fit each other; a pass that does not is a bug of its maker.
    pub(crate) fn assert_consistent(&self, slots: usize) {
        assert_eq!(self.tokens.len(), self.positions.len());
        assert_cover(self.segments, self.rows(), slots);
    }
}

/// Asserts that segments follow each other, cover all rows, and name slots that there are.
pub(crate) fn assert_cover(segments: &[Segment<'_>], rows: usize, slots: usize) {
    let mut row = 0;
    for segment in segments {
        assert_eq!(segment.first_row, row, "segments follow each other");
        let rows_after = segment.earlier + segment.rows;
        assert!(segment.slots.len() >= segment.context + rows_after);
        assert!(segment.new_slots().iter().all(|&slot| (slot as usize) < slots));
        assert!(segment.paths.is_none_or(|paths| paths.len() >= rows_after));
        row += segment.rows;
    }
    assert_eq!(row, rows, "segments cover all rows");
}
