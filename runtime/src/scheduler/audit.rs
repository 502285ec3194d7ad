//! Checks of the whole bookkeeping, for tests.

use std::collections::{BTreeMap, BTreeSet};

use crate::scheduler::{
    Scheduler,
    prefix::NodeId,
    sequence::{Place, Sequence},
};

impl Scheduler {
    /// Asserts that all lists and counts agree: each page has one owner, each page of the prefix
    /// cache exactly the users that sequences say, and each sequence is in one place. It looks at
    /// everything, so it is for tests.
    ///
    /// # Panics
    /// If something contradicts.
    pub fn assert_consistent(&self) {
        let mut owners: BTreeMap<u32, String> = BTreeMap::new();
        let mut own = |page: u32, owner: String| {
            if let Some(other) = owners.insert(page, owner.clone()) {
                panic!("page {page} belongs to {other} and to {owner}");
            }
        };
        let mut users: BTreeMap<NodeId, usize> = BTreeMap::new();
        for (id, sequence) in &self.sequences {
            self.assert_pages(sequence);
            for &node in &sequence.path {
                *users.entry(node).or_default() += 1;
            }
            for &page in &sequence.pages[sequence.path.len()..] {
                own(page, format!("{id:?}"));
            }
        }
        let (prefixes, pages) = self.store.parts();
        for (page, node) in prefixes.audit(&users) {
            own(page, format!("{node:?}"));
        }
        for page in pages.all_free() {
            own(page, "nobody".to_owned());
        }
        assert_eq!(owners.len(), self.limits().pages, "no page is lost");
        self.assert_places();
    }

    /// The pages of a sequence hold its rows, and its first ones are those of its path.
    fn assert_pages(&self, sequence: &Sequence) {
        let (prefixes, _) = self.store.parts();
        let path: Vec<u32> = sequence.path.iter().map(|&node| prefixes.page(node)).collect();
        assert_eq!(path, sequence.pages[..path.len()]);
        assert_eq!(sequence.missing(sequence.committed), 0);
        assert!(
            sequence.committed < sequence.tokens.len()
                && sequence.announced <= sequence.pages.len()
        );
        assert!(sequence.draft_rows <= sequence.committed);
        assert_eq!(sequence.place == Place::Queue, sequence.pages.is_empty());
    }

    fn assert_places(&self) {
        let mut places: BTreeMap<_, Place> = BTreeMap::new();
        places.extend(self.queue.all().map(|id| (id, Place::Queue)));
        places.extend(self.prefilling.map(|id| (id, Place::Prefill)));
        places.extend(self.running.iter().map(|&id| (id, Place::Running)));
        let listed = self.queue.all().count() + usize::from(self.prefilling.is_some());
        assert_eq!(listed + self.running.len(), self.sequences.len(), "each is in one list");
        for (id, sequence) in &self.sequences {
            assert_eq!(places.get(id), Some(&sequence.place));
        }
        let fresh = self.queue.all().filter(|id| !self.sequences[id].was_admitted);
        assert_eq!(fresh.count(), self.queue.fresh());
        let with_pages = self.running.len() + usize::from(self.prefilling.is_some());
        assert!(with_pages <= self.limits().sequences_max);
        let distinct: BTreeSet<_> = self.running.iter().collect();
        assert_eq!(distinct.len(), self.running.len());
    }
}
