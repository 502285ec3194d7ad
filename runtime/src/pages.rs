//! Pages of the cache and who holds them. Pure bookkeeping; no memory is touched here.
//!
//! Invariant: a page is taken once until it is given back; who shares it with whom is decided by
//! the [scheduler](crate::scheduler). A sequence's slots are in the order of its positions, so that
//! a slot list is all that a forward pass needs to know.

/// Rows of one page.
pub const PAGE_ROWS: usize = 16;

/// Hands out pages of a cache.
#[derive(Debug)]
pub struct PageAllocator {
    free: Vec<u32>,
    is_held: Vec<bool>,
}

impl PageAllocator {
    /// An allocator over `pages` pages, all free. Lower pages are given first.
    pub fn new(pages: usize) -> Self {
        Self { free: (0..pages as u32).rev().collect(), is_held: vec![false; pages] }
    }

    /// Number of pages in all.
    pub fn pages(&self) -> usize {
        self.is_held.len()
    }

    /// Number of free pages.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// The free pages.
    pub fn all_free(&self) -> impl Iterator<Item = u32> {
        self.free.iter().copied()
    }

    /// Takes a page; `None` when all are held.
    pub fn take(&mut self) -> Option<u32> {
        let page = self.free.pop()?;
        self.is_held[page as usize] = true;
        Some(page)
    }

    /// Gives a page back.
    ///
    /// # Panics
    /// If it was not taken.
    pub fn give(&mut self, page: u32) {
        let was_held = std::mem::replace(&mut self.is_held[page as usize], false);
        assert!(was_held, "page {page} is given back twice");
        self.free.push(page);
    }
}

/// The pages of one sequence, as a list of slots in the order of positions.
#[derive(Clone, Debug, Default)]
pub struct BlockTable {
    pages: Vec<u32>,
    slots: Vec<u32>,
}

impl BlockTable {
    /// Appends a page: room for [`PAGE_ROWS`] more positions.
    pub fn push(&mut self, page: u32) {
        self.pages.push(page);
        let first = page * PAGE_ROWS as u32;
        self.slots.extend(first..first + PAGE_ROWS as u32);
    }

    /// Slot of each position that there is room for.
    pub fn slots(&self) -> &[u32] {
        &self.slots
    }

    /// Pages that must be added to make room for `positions` positions.
    pub fn missing(&self, positions: usize) -> usize {
        positions.div_ceil(PAGE_ROWS).saturating_sub(self.pages.len())
    }

    /// Gives up all pages and returns them.
    pub fn take_pages(&mut self) -> Vec<u32> {
        self.slots.clear();
        std::mem::take(&mut self.pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_follow_the_pages() {
        let mut allocator = PageAllocator::new(3);
        let mut table = BlockTable::default();
        assert_eq!(table.missing(PAGE_ROWS + 1), 2);
        let (first, second) = (allocator.take().unwrap(), allocator.take().unwrap());
        table.push(second);
        table.push(first);
        assert_eq!(table.slots()[0], second * 16);
        assert_eq!(table.slots()[17], first * 16 + 1);
        assert_eq!(table.missing(32), 0);
        assert_eq!(table.missing(33), 1);
        assert!(allocator.take().is_some() && allocator.take().is_none());
        for page in table.take_pages() {
            allocator.give(page);
        }
        assert_eq!((allocator.free(), table.slots().len()), (2, 0));
    }
}
