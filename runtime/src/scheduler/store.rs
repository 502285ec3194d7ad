//! Pages for sequences: taken from the free ones, or from the prefix cache.
//!
//! Invariant: a page is free, or private to one sequence, or in the prefix cache; it moves from the
//! second state to the third when it is full of committed rows, and is not written from then on.

use crate::{
    pages::{PAGE_ROWS, PageAllocator},
    scheduler::{
        forms::Forms,
        prefix::{Found, Inserted, Key, NodeId, PrefixCache, Query},
        sequence::Sequence,
        submission::PrefixReuse,
    },
};

/// All pages.
#[derive(Debug)]
pub(super) struct PageStore {
    pages: PageAllocator,
    prefixes: PrefixCache,
}

impl PageStore {
    pub(super) fn new(pages: usize) -> Self {
        Self { pages: PageAllocator::new(pages), prefixes: PrefixCache::new() }
    }

    /// Number of pages that hold nothing.
    pub(super) fn free(&self) -> usize {
        self.pages.free()
    }

    /// Number of pages that only the prefix cache keeps.
    pub(super) fn cached(&self) -> usize {
        self.prefixes.unused()
    }

    /// Number of pages that can be taken.
    pub(super) fn available(&self) -> usize {
        self.free() + self.cached()
    }

    /// What a sequence can reuse.
    pub(super) fn lookup(&self, sequence: &Sequence) -> Found {
        let forms = match sequence.reuse {
            PrefixReuse::Off => return Found::default(),
            PrefixReuse::SameTokens if !sequence.has_emitted() => None,
            _ => Some(&sequence.forms),
        };
        let (tokens, draft) = (&sequence.tokens[..], sequence.speculates);
        self.prefixes.lookup(Query { tokens, forms, draft })
    }

    /// How many of the available pages a sequence needs until it can generate.
    pub(super) fn cost(&self, sequence: &Sequence, found: &Found) -> usize {
        let used = found.nodes.iter().filter(|&&node| self.prefixes.is_used(node)).count();
        sequence.pages_to_start() - used
    }

    /// Gives a sequence what was found for it. Rows of a partly used page are copied: their slots
    /// go to `moves`.
    pub(super) fn attach(
        &mut self,
        sequence: &mut Sequence,
        found: Found,
        moves: &mut Vec<(u32, u32)>,
    ) {
        for &node in &found.nodes {
            self.prefixes.hold(node);
            sequence.pages.push(self.prefixes.page(node));
        }
        sequence.committed = found.nodes.len() * PAGE_ROWS;
        let masks = found.nodes.iter().map(|&node| (PAGE_ROWS, self.prefixes.forms(node)));
        let mut reused: Vec<(usize, u16)> = masks.collect();
        if let Some((source, rows)) = found.partial {
            // The copy must not take the page that it copies from.
            self.prefixes.hold(source);
            if let Some(page) = self.take() {
                let (from, to) = (slot(self.prefixes.page(source)), slot(page));
                moves.extend((0..rows as u32).map(|row| (from + row, to + row)));
                sequence.pages.push(page);
                sequence.committed += rows;
                reused.push((rows, self.prefixes.forms(source)));
            }
            self.prefixes.release(source);
        }
        if !sequence.has_emitted() {
            sequence.forms = Forms::of_reused(reused.into_iter(), sequence.prompt);
        }
        sequence.draft_rows = if sequence.speculates { sequence.committed } else { 0 };
        sequence.path = found.nodes;
    }

    /// Adds pages until there is room for `positions` positions, or no page is left. Returns the
    /// positions that there is room for.
    pub(super) fn grow(&mut self, sequence: &mut Sequence, positions: usize) -> usize {
        while sequence.missing(positions) > 0 {
            match self.take() {
                Some(page) => sequence.pages.push(page),
                None => break,
            }
        }
        positions.min(sequence.pages.len() * PAGE_ROWS)
    }

    /// Lets others use the pages that a running sequence has filled, and the draft rows that it
    /// has added. `draft_rows_before` were known of.
    pub(super) fn publish(&mut self, sequence: &mut Sequence, draft_rows_before: usize) {
        for page in draft_rows_before / PAGE_ROWS..sequence.path.len() {
            let rows = draft_rows_of(sequence, page);
            if rows == 0 {
                break;
            }
            self.prefixes.set_draft_rows(sequence.path[page], rows);
        }
        while !sequence.is_detached && self.has_unpublished(sequence, sequence.path.len()) {
            let parent = sequence.path.last().copied().unwrap_or(NodeId::ROOT);
            match self.insert(sequence, sequence.path.len(), PAGE_ROWS, parent) {
                Inserted::Taken { node, .. } => {
                    self.prefixes.hold(node);
                    sequence.path.push(node);
                }
                // Its own page stays private, for the ranks know it by now.
                Inserted::Known { .. } => sequence.is_detached = true,
            }
        }
    }

    /// Takes all pages from a sequence. Its committed rows stay in the prefix cache.
    pub(super) fn detach(&mut self, sequence: &mut Sequence) {
        let kept = match sequence.reuse {
            PrefixReuse::Off => 0,
            _ => self.leave(sequence),
        };
        for &page in &sequence.pages[kept..] {
            self.pages.give(page);
        }
        // The deepest first, so that it is the first to be given up.
        for &node in sequence.path.iter().rev() {
            self.prefixes.release(node);
        }
        sequence.reset();
    }

    /// Gives up all unused prefixes.
    pub(super) fn clear(&mut self) {
        while let Some(page) = self.prefixes.evict() {
            self.pages.give(page);
        }
    }

    /// The lists behind it, for checks.
    pub(super) fn parts(&self) -> (&PrefixCache, &PageAllocator) {
        (&self.prefixes, &self.pages)
    }

    /// Puts all pages with committed rows into the prefix cache, or frees them if it has their
    /// like. Returns their number.
    fn leave(&mut self, sequence: &Sequence) -> usize {
        let mut parent = sequence.path.last().copied().unwrap_or(NodeId::ROOT);
        let mut index = sequence.path.len();
        while index * PAGE_ROWS < sequence.committed {
            let rows = (sequence.committed - index * PAGE_ROWS).min(PAGE_ROWS);
            parent = match self.insert(sequence, index, rows, parent) {
                Inserted::Taken { node, .. } => node,
                Inserted::Known { node } => {
                    self.pages.give(sequence.pages[index]);
                    node
                }
            };
            index += 1;
        }
        index
    }

    fn insert(
        &mut self,
        sequence: &Sequence,
        index: usize,
        rows: usize,
        parent: NodeId,
    ) -> Inserted {
        let first = index * PAGE_ROWS;
        let key = Key::new(&sequence.tokens[first..], rows, sequence.forms.mask(first, rows));
        let draft_rows = draft_rows_of(sequence, index);
        let inserted = self.prefixes.insert(parent, key, sequence.pages[index], draft_rows);
        if let Inserted::Taken { freed: Some(page), .. } = inserted {
            self.pages.give(page);
        }
        inserted
    }

    /// Whether page `index` is full of committed rows and may be shared.
    fn has_unpublished(&self, sequence: &Sequence, index: usize) -> bool {
        sequence.reuse != PrefixReuse::Off && (index + 1) * PAGE_ROWS <= sequence.committed
    }

    fn take(&mut self) -> Option<u32> {
        self.pages.take().or_else(|| self.prefixes.evict())
    }
}

/// First slot of a page.
fn slot(page: u32) -> u32 {
    page * PAGE_ROWS as u32
}

/// How many rows of a sequence's page have draft rows.
fn draft_rows_of(sequence: &Sequence, page: usize) -> usize {
    sequence.draft_rows.saturating_sub(page * PAGE_ROWS).min(PAGE_ROWS)
}
