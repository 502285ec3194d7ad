//! Which form of attention each row of a sequence was or will be computed with.
//!
//! Invariant: the answer for a row never changes while the sequence has emitted something, so that
//! rows computed again after a preemption have the bits of the first time.

use paceline_model::pass::AttentionForm;

use crate::pages::PAGE_ROWS;

/// The forms of a sequence's rows, as runs.
#[derive(Clone, Debug)]
pub(super) struct Forms {
    /// Rows at which the form changes, ascending. Row 0 is expanded unless it is the first change.
    changes: Vec<usize>,
}

impl Forms {
    /// A prompt of `prompt` rows is expanded; the answer after it is absorbed.
    pub(super) fn of_prompt(prompt: usize) -> Self {
        Self { changes: vec![prompt] }
    }

    /// The same for a prompt whose first rows were reused. `reused` gives for each page its number
    /// of rows and its mask.
    pub(super) fn of_reused(reused: impl Iterator<Item = (usize, u16)>, prompt: usize) -> Self {
        let mut changes = Vec::new();
        let (mut row, mut is_absorbed) = (0, false);
        for (rows, mask) in reused {
            for bit in 0..rows {
                if (mask >> bit & 1 == 1) != is_absorbed {
                    is_absorbed = !is_absorbed;
                    changes.push(row + bit);
                }
            }
            row += rows;
        }
        if is_absorbed {
            changes.push(row);
        }
        changes.push(prompt);
        Self { changes }
    }

    /// The form of `row`, and the first row after it with another one.
    pub(super) fn run(&self, row: usize) -> (AttentionForm, usize) {
        let passed = self.changes.partition_point(|&change| change <= row);
        let form = match passed % 2 {
            0 => AttentionForm::Expanded,
            _ => AttentionForm::Absorbed,
        };
        (form, self.changes.get(passed).copied().unwrap_or(usize::MAX))
    }

    /// Bit i says whether row `first` + i is absorbed, for the `rows` rows of a page; at most
    /// [`PAGE_ROWS`].
    pub(super) fn mask(&self, first: usize, rows: usize) -> u16 {
        debug_assert!(rows <= PAGE_ROWS);
        let (mut mask, mut row) = (0, first);
        while row < first + rows {
            let (form, end) = self.run(row);
            let end = end.min(first + rows);
            if form == AttentionForm::Absorbed {
                (row..end).for_each(|row| mask |= 1 << (row - first));
            }
            row = end;
        }
        mask
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use AttentionForm::{Absorbed, Expanded};

    #[test]
    fn answers_follow_prompts() {
        let forms = Forms::of_prompt(20);
        assert_eq!(forms.run(0), (Expanded, 20));
        assert_eq!(forms.run(19), (Expanded, 20));
        assert_eq!(forms.run(20), (Absorbed, usize::MAX));
        assert_eq!(forms.mask(0, 16), 0);
        assert_eq!(forms.mask(16, 16), 0xfff0);
        assert_eq!(forms.mask(16, 5), 0b1_0000);
        assert_eq!(forms.mask(32, 16), 0xffff);
    }

    #[test]
    fn reused_rows_keep_their_forms() {
        // Rows 0..10 expanded, 10..20 absorbed, then the prompt's own rows to 40.
        let reused = [(16, 0xfc00), (4, 0b1111)];
        let forms = Forms::of_reused(reused.into_iter(), 40);
        assert_eq!(forms.run(9), (Expanded, 10));
        assert_eq!(forms.run(10), (Absorbed, 20));
        assert_eq!(forms.run(20), (Expanded, 40));
        assert_eq!(forms.run(40), (Absorbed, usize::MAX));
        assert_eq!(forms.mask(0, 16), 0xfc00);
        assert_eq!(forms.mask(16, 16), 0b1111);
    }

    #[test]
    fn a_first_row_may_be_absorbed() {
        let forms = Forms::of_reused([(1, 1)].into_iter(), 3);
        assert_eq!(forms.run(0), (Absorbed, 1));
        assert_eq!(forms.run(1), (Expanded, 3));
    }
}
