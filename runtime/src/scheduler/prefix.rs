//! The prefix cache: rows of earlier sequences, as a tree over pages.
//!
//! A node is a page. Its key is what its rows are made of: their tokens, the form of attention of
//! each, and the token after the last, on which the draft's last row depends. So a path of nodes
//! determines every bit of its rows, and two sequences with the same path can share its pages.
//!
//! Invariants: nodes with children are full pages; whoever uses a node uses all nodes above it,
//! so that giving up unused leaves, least recently used first, reaches every unused page. Start
//! reading at [`PrefixCache::lookup`].

use std::collections::{BTreeMap, BTreeSet};

use crate::{pages::PAGE_ROWS, scheduler::forms::Forms};

/// A node, as long as it exists: unused leaves go when pages are short.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct NodeId(u32);

impl NodeId {
    /// Above all pages; it has none itself.
    pub(super) const ROOT: Self = Self(0);
}

/// What the rows of a page are made of. Sorted by tokens first: the keys that have most in common
/// with another are its neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    /// Tokens of the rows, and the one after; 0 behind them.
    tokens: [u32; PAGE_ROWS + 1],
    rows: u8,
    /// Bit i: whether row i is absorbed.
    forms: u16,
}

/// The cache's tree.
#[derive(Debug)]
pub(super) struct PrefixCache {
    nodes: Vec<Node>,
    vacant: Vec<NodeId>,
    children: BTreeMap<(NodeId, Key), NodeId>,
    /// Unused leaves by the time of their last use.
    evictable: BTreeSet<(u64, NodeId)>,
    /// Number of unused nodes.
    unused: usize,
    /// Counts uses.
    time: u64,
}

#[derive(Debug)]
struct Node {
    parent: NodeId,
    key: Key,
    page: u32,
    /// The first rows that have draft rows.
    draft_rows: usize,
    children: usize,
    /// Sequences that use the page.
    users: usize,
    used_last: u64,
}

/// What is looked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Query<'a> {
    /// Tokens of a sequence. All but the last row can be found: its logits are wanted, or it is
    /// to be computed next.
    pub(super) tokens: &'a [u32],
    /// The forms that its rows must have; `None`: any.
    pub(super) forms: Option<&'a Forms>,
    /// Whether rows need draft rows.
    pub(super) draft: bool,
}

/// What was found.
#[derive(Clone, Debug, Default)]
pub(super) struct Found {
    /// Full pages, from the first.
    pub(super) nodes: Vec<NodeId>,
    /// A page after them that begins alike, and how many of its rows are of use.
    pub(super) partial: Option<(NodeId, usize)>,
}

/// Whether an inserted page belongs to the cache now.
#[derive(Clone, Copy, Debug)]
pub(super) enum Inserted {
    /// Yes, as this node. If `freed`, that page is of no use any more.
    Taken {
        /// The new node.
        node: NodeId,
        /// A page that it replaces.
        freed: Option<u32>,
    },
    /// No: this node has the same rows.
    Known {
        /// The older node.
        node: NodeId,
    },
}

impl Key {
    /// The key of `rows` rows, with `tokens` from the first row on, at least one more than rows.
    pub(super) fn new(tokens: &[u32], rows: usize, forms: u16) -> Self {
        let mut all = [0; PAGE_ROWS + 1];
        all[..=rows].copy_from_slice(&tokens[..=rows]);
        Self { tokens: all, rows: rows as u8, forms }
    }

    /// Rows of the page that hold something.
    pub(super) fn rows(&self) -> usize {
        usize::from(self.rows)
    }

    fn is_full(&self) -> bool {
        self.rows() == PAGE_ROWS
    }

    /// How many first rows of both have the same tokens, the one after them included.
    fn common_rows(&self, other: &Self) -> usize {
        let rows = self.rows().min(other.rows());
        let pairs = self.tokens[..=rows].iter().zip(&other.tokens);
        pairs.take_while(|(a, b)| a == b).count().saturating_sub(1)
    }

    /// How many first rows of both have the same form.
    fn common_forms(&self, other: &Self) -> usize {
        (self.forms ^ other.forms).trailing_zeros() as usize
    }

    /// Whether this page holds all that `other` holds.
    fn covers(&self, other: &Self) -> bool {
        self.common_rows(other) == other.rows() && self.common_forms(other) >= other.rows()
    }
}

/// Neighbours on each side that are looked at for the page to copy rows from.
const NEIGHBOURS: usize = 3;

impl PrefixCache {
    pub(super) fn new() -> Self {
        let key = Key { tokens: [0; PAGE_ROWS + 1], rows: 0, forms: 0 };
        let root = Node {
            parent: NodeId::ROOT,
            key,
            page: u32::MAX,
            draft_rows: 0,
            children: 0,
            users: 1,
            used_last: 0,
        };
        Self {
            nodes: vec![root],
            vacant: Vec::new(),
            children: BTreeMap::new(),
            evictable: BTreeSet::new(),
            unused: 0,
            time: 0,
        }
    }

    /// Number of pages that no sequence uses. All of them can be evicted.
    pub(super) fn unused(&self) -> usize {
        self.unused
    }

    /// Whether sequences use the node.
    pub(super) fn is_used(&self, node: NodeId) -> bool {
        self.node(node).users > 0
    }

    /// Its page.
    pub(super) fn page(&self, node: NodeId) -> u32 {
        self.node(node).page
    }

    /// Its rows' forms, as in [`Forms::mask`].
    pub(super) fn forms(&self, node: NodeId) -> u16 {
        self.node(node).key.forms
    }

    /// The longest known prefix of a sequence. Of several pages that could be copied from, one
    /// near the best is found.
    pub(super) fn lookup(&self, query: Query<'_>) -> Found {
        let mut found = Found::default();
        let mut parent = NodeId::ROOT;
        loop {
            let first = found.nodes.len() * PAGE_ROWS;
            let rest = &query.tokens[first..];
            let rows = (rest.len() - 1).min(PAGE_ROWS);
            let forms = query.forms.map_or(0, |forms| forms.mask(first, rows));
            let wanted = Key::new(rest, rows, forms);
            match self.full_page(parent, wanted, query) {
                Some(node) => found.nodes.push(node),
                None => {
                    found.partial = self.closest(parent, wanted, query);
                    return found;
                }
            }
            parent = found.nodes[found.nodes.len() - 1];
        }
    }

    fn full_page(&self, parent: NodeId, wanted: Key, query: Query<'_>) -> Option<NodeId> {
        if !wanted.is_full() {
            return None;
        }
        let last = match query.forms {
            Some(_) => wanted.forms,
            None => u16::MAX,
        };
        let keys = (parent, wanted)..=(parent, Key { forms: last, ..wanted });
        let nodes = self.children.range(keys).map(|(_, &node)| node);
        nodes.into_iter().find(|&node| !query.draft || self.node(node).draft_rows == PAGE_ROWS)
    }

    fn closest(&self, parent: NodeId, wanted: Key, query: Query<'_>) -> Option<(NodeId, usize)> {
        let after = self.children.range((parent, wanted)..).take(NEIGHBOURS);
        let before = self.children.range(..(parent, wanted)).rev().take(NEIGHBOURS);
        let siblings = after.chain(before).filter(|((above, _), _)| *above == parent);
        let useful = siblings.map(|((_, key), &node)| {
            let mut rows = wanted.common_rows(key);
            if query.forms.is_some() {
                rows = rows.min(wanted.common_forms(key));
            }
            if query.draft {
                rows = rows.min(self.node(node).draft_rows);
            }
            (node, rows)
        });
        useful.filter(|&(_, rows)| rows > 0).max_by_key(|&(_, rows)| rows)
    }

    /// One more sequence uses the node. It uses the nodes above already.
    pub(super) fn hold(&mut self, node: NodeId) {
        if self.node(node).users == 0 {
            self.evictable.remove(&(self.node(node).used_last, node));
            self.unused -= 1;
        }
        self.node_mut(node).users += 1;
    }

    /// One sequence less uses the node, and none of those below.
    pub(super) fn release(&mut self, node: NodeId) {
        self.node_mut(node).users -= 1;
        if self.node(node).users == 0 {
            self.unused += 1;
            self.mark_used(node);
        }
    }

    /// Adds `page` below `parent`, unused. `draft_rows` of its rows have draft rows.
    pub(super) fn insert(
        &mut self,
        parent: NodeId,
        key: Key,
        page: u32,
        draft_rows: usize,
    ) -> Inserted {
        if let Some(node) = self.covering(parent, key, draft_rows) {
            self.mark_used(node);
            return Inserted::Known { node };
        }
        if let Some(&node) = self.children.get(&(parent, key)) {
            // Only its lack of draft rows kept it from covering this page.
            self.mark_used(node);
            if self.is_used(node) {
                return Inserted::Known { node };
            }
            let known = self.node_mut(node);
            known.draft_rows = draft_rows;
            return Inserted::Taken { node, freed: Some(std::mem::replace(&mut known.page, page)) };
        }
        let freed = self.remove_covered(parent, key, draft_rows);
        let node =
            self.add(Node { parent, key, page, draft_rows, children: 0, users: 0, used_last: 0 });
        Inserted::Taken { node, freed }
    }

    /// The first `rows` rows of the node have draft rows now.
    pub(super) fn set_draft_rows(&mut self, node: NodeId, rows: usize) {
        let node = self.node_mut(node);
        debug_assert!(rows <= node.key.rows());
        node.draft_rows = node.draft_rows.max(rows);
    }

    /// Gives up the least recently used leaf that no sequence uses, and returns its page.
    pub(super) fn evict(&mut self) -> Option<u32> {
        let &(_, node) = self.evictable.first()?;
        Some(self.remove(node))
    }

    /// Asserts that all nodes agree with each other and with `users`, the number of sequences that
    /// use each. Returns their pages.
    pub(super) fn audit(&self, users: &BTreeMap<NodeId, usize>) -> Vec<(u32, NodeId)> {
        let mut children: BTreeMap<NodeId, usize> = BTreeMap::new();
        for ((parent, key), &id) in &self.children {
            let node = self.node(id);
            assert_eq!((node.parent, node.key), (*parent, *key));
            assert!(*parent == NodeId::ROOT || self.node(*parent).key.is_full());
            assert!(node.draft_rows <= key.rows() && key.rows() > 0);
            assert_eq!(node.users, users.get(&id).copied().unwrap_or(0), "users of {id:?}");
            assert!(node.users == 0 || self.is_used(*parent), "who uses a node uses its parent");
            let is_evictable = node.users == 0 && node.children == 0;
            assert_eq!(is_evictable, self.evictable.contains(&(node.used_last, id)));
            *children.entry(*parent).or_default() += 1;
        }
        let mut all = self.children.values().copied().chain([NodeId::ROOT]);
        assert!(all.all(|id| self.node(id).children == children.get(&id).copied().unwrap_or(0)));
        let unused = |id: &&NodeId| !self.is_used(**id);
        assert_eq!(self.children.values().filter(unused).count(), self.unused);
        assert!(self.evictable.len() <= self.unused);
        assert_eq!(self.children.len() + self.vacant.len() + 1, self.nodes.len());
        self.children.values().map(|&id| (self.page(id), id)).collect()
    }

    /// A sibling that makes a page with this key superfluous.
    fn covering(&self, parent: NodeId, key: Key, draft_rows: usize) -> Option<NodeId> {
        let mut next = self.children.range((parent, key)..);
        let ((above, other), &node) = next.next()?;
        let covers =
            *above == parent && other.covers(&key) && self.node(node).draft_rows >= draft_rows;
        covers.then_some(node)
    }

    /// Removes a page that one with this key makes superfluous. Pages that are not full are copied
    /// from at most, so nobody uses it.
    fn remove_covered(&mut self, parent: NodeId, key: Key, draft_rows: usize) -> Option<u32> {
        let ((above, other), &node) = self.children.range(..(parent, key)).next_back()?;
        let known = self.node(node);
        let superfluous = *above == parent
            && !other.is_full()
            && key.covers(other)
            && draft_rows >= known.draft_rows;
        superfluous.then(|| self.remove(node))
    }

    fn add(&mut self, node: Node) -> NodeId {
        let (parent, key) = (node.parent, node.key);
        let id = match self.vacant.pop() {
            Some(id) => {
                self.nodes[id.0 as usize] = node;
                id
            }
            None => {
                self.nodes.push(node);
                NodeId(self.nodes.len() as u32 - 1)
            }
        };
        self.children.insert((parent, key), id);
        let used_last = self.node(parent).used_last;
        self.evictable.remove(&(used_last, parent));
        self.node_mut(parent).children += 1;
        self.unused += 1;
        self.mark_used(id);
        id
    }

    fn remove(&mut self, id: NodeId) -> u32 {
        let Node { parent, key, page, used_last, .. } = *self.node(id);
        self.evictable.remove(&(used_last, id));
        self.children.remove(&(parent, key));
        self.vacant.push(id);
        self.unused -= 1;
        self.node_mut(parent).children -= 1;
        let above = self.node(parent);
        if above.users == 0 && above.children == 0 {
            self.evictable.insert((above.used_last, parent));
        }
        page
    }

    fn mark_used(&mut self, id: NodeId) {
        self.time += 1;
        let time = self.time;
        let node = self.node_mut(id);
        let before = std::mem::replace(&mut node.used_last, time);
        let is_evictable = node.users == 0 && node.children == 0;
        self.evictable.remove(&(before, id));
        if is_evictable {
            self.evictable.insert((time, id));
        }
    }

    fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id.0 as usize]
    }
}
