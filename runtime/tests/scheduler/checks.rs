//! What is checked of pages and widths at each step.

use std::{collections::BTreeSet, ops::Range};

use paceline_runtime::{
    pages::PAGE_ROWS,
    scheduler::{Part, SequenceId, Width},
};

use crate::world::World;

impl World {
    /// No other sequence has the pages of these positions.
    pub(crate) fn assert_private(&self, id: SequenceId, positions: Range<usize>) {
        let (pages, _) = &self.tables[&id];
        for page in &pages[positions.start / PAGE_ROWS..positions.end.div_ceil(PAGE_ROWS)] {
            for (other, (theirs, _)) in self.tables.iter().filter(|(other, _)| **other != id) {
                assert!(!theirs.contains(page), "{id:?} writes to a page of {other:?}");
            }
        }
    }

    /// Widths are as asked for, or 1 if rows or pages are short.
    pub(crate) fn assert_widths(&self, parts: &[Part], widths: &[Width]) {
        let rows: usize = parts.iter().map(|part| part.rows).sum();
        assert!(rows <= self.limits.decode_rows_max);
        let after = self.scheduler.occupancy();
        let available = after.pages_free + after.pages_cached;
        for (part, width) in parts.iter().zip(widths) {
            if part.rows == width.rows {
                continue;
            }
            let is_crowded = self.limits.decode_rows_max - rows < width.rows - 1;
            assert!(
                part.rows == 1 && (is_crowded || available < self.lacks(part.sequence, width.room))
            );
        }
    }

    /// Pages that a sequence lacks for `rows` more rows.
    pub(crate) fn lacks(&self, id: SequenceId, rows: usize) -> usize {
        let table = self.tables.get(&id).map_or(0, |(pages, _)| pages.len());
        (self.lives[&id].committed + rows).div_ceil(PAGE_ROWS).saturating_sub(table)
    }

    /// The scheduler's counts are those of the tables.
    pub(crate) fn count_pages(&self) {
        let occupancy = self.scheduler.occupancy();
        let living = self.tables.iter().filter(|(id, _)| self.lives.contains_key(id));
        let held: BTreeSet<u32> = living.flat_map(|(_, (pages, _))| pages).copied().collect();
        assert_eq!(occupancy.pages_held, held.len());
        let all = occupancy.pages_held + occupancy.pages_free + occupancy.pages_cached;
        assert_eq!(all, self.limits.pages);
        assert_eq!(occupancy.waiting, self.waiting.len());
        assert_eq!(occupancy.running, self.running.len());
        let with_pages = occupancy.running + occupancy.prefilling;
        assert!(with_pages <= self.limits.sequences_max);
        assert_eq!(with_pages + occupancy.preempted + occupancy.waiting, self.lives.len());
    }
}
