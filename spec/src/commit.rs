//! Compaction of the KV cache after a round. The invariant: doing the copies one after the other,
//! in order, leaves the path's rows in consecutive slots and reads no row that an earlier copy
//! wrote.

use crate::SpecError;

/// Copy one row, in every layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotCopy {
    /// Slot of the scratch row.
    pub from: usize,
    /// Slot that the row belongs in; never above `from`.
    pub to: usize,
}

/// What to do with the rows that a verification pass wrote.
///
/// Keys were rotated for position P + depth, which is where the copies put them, so rows move as
/// they are. A parallel copy needs a staging buffer; a serial one does not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommitPlan {
    copies: Vec<SlotCopy>,
    length: usize,
}

impl CommitPlan {
    /// The plan for `path` ([`Acceptance::path`](crate::Acceptance)) with the root at slot
    /// `root_slot`, where node i's row was written to slot `scratch_slot` + i. Rows that are in
    /// place already are not copied. Engines that write the pass right behind the committed rows
    /// pass `root_slot` twice.
    ///
    /// # Errors
    /// [`SpecError::PathInvalid`] unless the path starts at node 0 and ascends, and
    /// [`SpecError::ScratchBeforeRoot`].
    pub fn new(path: &[usize], root_slot: usize, scratch_slot: usize) -> Result<Self, SpecError> {
        let mut plan = Self { copies: Vec::new(), length: 0 };
        plan.rebuild(path, root_slot, scratch_slot)?;
        Ok(plan)
    }

    /// As [`new`](Self::new), keeping this plan's memory.
    ///
    /// # Errors
    /// As [`new`](Self::new); the plan is unchanged then.
    pub fn rebuild(
        &mut self,
        path: &[usize],
        root_slot: usize,
        scratch_slot: usize,
    ) -> Result<(), SpecError> {
        if scratch_slot < root_slot {
            return Err(SpecError::ScratchBeforeRoot { scratch: scratch_slot, root: root_slot });
        }
        let wrong = |index: usize| match index {
            0 => path[0] != 0,
            index => path[index] <= path[index - 1],
        };
        if let Some(index) = (0..path.len()).find(|&index| wrong(index)) {
            return Err(SpecError::PathInvalid { index, node: path[index] });
        }
        let copies = path.iter().enumerate();
        let copies =
            copies.map(|(step, node)| SlotCopy { from: scratch_slot + node, to: root_slot + step });
        self.copies.clear();
        self.copies.extend(copies.filter(|copy| copy.from != copy.to));
        self.length = root_slot + path.len();
        Ok(())
    }

    /// The copies, in an order that is safe to follow.
    pub fn copies(&self) -> &[SlotCopy] {
        &self.copies
    }

    /// Committed rows afterwards, if `root_slot` was the number before: the next root's index. Rows
    /// from here on are free.
    pub fn length(&self) -> usize {
        self.length
    }
}
