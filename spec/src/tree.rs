//! The draft tree: what was drafted below the last emitted token. The invariant: node 0 is the
//! root, parents precede their children, and no node has two children with the same token.

use crate::{SpecError, TokenId, TreeMask};

/// The most nodes that a tree can hold, with the root.
pub const NODES_MAX: usize = u16::MAX as usize;

const NONE: u16 = u16::MAX;

/// Drafted tokens as a tree.
///
/// Node 0 is the root: the last emitted token, whose row is not in the target's KV cache yet. With
/// the root at index P of the sequence, a node of depth d stands for index P + d. One target pass
/// over all nodes, each attending to the committed cache, its ancestors and itself, verifies the
/// whole tree. A chain is a tree in which each node has one child.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DraftTree {
    tokens: Vec<TokenId>,
    depths: Vec<u32>,
    links: Vec<Links>,
}

/// A node's neighbours; `NONE` where there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Links {
    parent: u16,
    first_child: u16,
    last_child: u16,
    next_sibling: u16,
}

impl DraftTree {
    /// A tree without drafted tokens: verifying it is a plain decode step.
    pub fn root_only(root: TokenId) -> Self {
        let mut tree = Self { tokens: Vec::new(), depths: Vec::new(), links: Vec::new() };
        tree.reset(root);
        tree
    }

    /// `drafted` one below the other.
    ///
    /// # Panics
    /// If the chain is longer than [`NODES_MAX`].
    pub fn chain(root: TokenId, drafted: &[TokenId]) -> Self {
        let mut tree = Self::root_only(root);
        for &token in drafted {
            tree.push(tree.len() - 1, token).expect("a new leaf has no siblings");
        }
        tree
    }

    /// A tree from one token and one parent for each node, the root first.
    ///
    /// # Errors
    /// [`SpecError::TreeEmpty`], [`SpecError::LengthMismatch`], [`SpecError::TreeTooLarge`],
    /// [`SpecError::ParentInvalid`] unless the root alone has no parent and every other parent
    /// comes before its child, and [`SpecError::SiblingTwice`].
    pub fn from_parents(
        tokens: Vec<TokenId>,
        parents: Vec<Option<usize>>,
    ) -> Result<Self, SpecError> {
        let (Some(&root), Some(&root_parent)) = (tokens.first(), parents.first()) else {
            return Err(SpecError::TreeEmpty);
        };
        if tokens.len() != parents.len() {
            return Err(SpecError::LengthMismatch {
                what: "the list of parents",
                expected: tokens.len(),
                got: parents.len(),
            });
        }
        if root_parent.is_some() {
            return Err(SpecError::ParentInvalid { node: 0, parent: root_parent });
        }
        let mut tree = Self::root_only(root);
        for (node, (&token, &parent)) in tokens.iter().zip(&parents).enumerate().skip(1) {
            let known = parent.filter(|&parent| parent < node);
            let parent = known.ok_or(SpecError::ParentInvalid { node, parent })?;
            tree.push(parent, token)?;
        }
        Ok(tree)
    }

    /// Makes this the tree of `root` alone again, keeping its memory.
    pub fn reset(&mut self, root: TokenId) {
        self.tokens.clear();
        self.depths.clear();
        self.links.clear();
        self.append(root, 0, NONE);
    }

    /// Adds a node below `parent` and returns its index.
    ///
    /// # Errors
    /// [`SpecError::ParentInvalid`] if there is no node `parent`, [`SpecError::TreeTooLarge`], and
    /// [`SpecError::SiblingTwice`] if `parent` has a child with this token.
    pub fn push(&mut self, parent: usize, token: TokenId) -> Result<usize, SpecError> {
        let node = self.len();
        if parent >= node {
            return Err(SpecError::ParentInvalid { node, parent: Some(parent) });
        }
        if node >= NODES_MAX {
            return Err(SpecError::TreeTooLarge { nodes: node + 1, nodes_max: NODES_MAX });
        }
        if self.child_with_token(parent, token).is_some() {
            return Err(SpecError::SiblingTwice { parent, token });
        }
        let links = &mut self.links[parent];
        let elder = std::mem::replace(&mut links.last_child, node as u16);
        match elder {
            NONE => links.first_child = node as u16,
            elder => self.links[usize::from(elder)].next_sibling = node as u16,
        }
        self.append(token, self.depths[parent] + 1, parent as u16);
        Ok(node)
    }

    /// Nodes with the root: the width of the target pass.
    #[expect(clippy::len_without_is_empty, reason = "a tree always has its root")]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Nodes without the root.
    pub fn drafted(&self) -> usize {
        self.len() - 1
    }

    /// The last emitted token.
    pub fn root(&self) -> TokenId {
        self.tokens[0]
    }

    /// One token for each node, the root's first.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// One depth for each node; the root's is 0.
    pub fn depths(&self) -> &[u32] {
        &self.depths
    }

    /// A node's distance from the root.
    ///
    /// # Panics
    /// If there is no such node.
    pub fn depth(&self, node: usize) -> usize {
        self.depths[node] as usize
    }

    /// The depth of the deepest node.
    pub fn depth_max(&self) -> usize {
        self.depths.iter().copied().max().unwrap_or(0) as usize
    }

    /// A node's parent; the root has none.
    ///
    /// # Panics
    /// If there is no such node.
    pub fn parent(&self, node: usize) -> Option<usize> {
        index(self.links[node].parent)
    }

    /// One parent for each node; the root has none.
    pub fn parents(&self) -> impl ExactSizeIterator<Item = Option<usize>> + '_ {
        self.links.iter().map(|links| index(links.parent))
    }

    /// A node's children, by ascending index.
    ///
    /// # Panics
    /// If there is no such node.
    pub fn children(&self, node: usize) -> impl Iterator<Item = usize> + '_ {
        std::iter::successors(index(self.links[node].first_child), |&child| {
            index(self.links[child].next_sibling)
        })
    }

    /// The child of `node` that carries `token`.
    ///
    /// # Panics
    /// If there is no node `node`.
    pub fn child_with_token(&self, node: usize, token: TokenId) -> Option<usize> {
        self.children(node).find(|&child| self.tokens[child] == token)
    }

    /// One position id for each node, `root_position` + depth: what the rotary embedding of the
    /// target pass takes (not `root_position` + node).
    pub fn positions(&self, root_position: u32) -> impl ExactSizeIterator<Item = u32> + '_ {
        self.depths.iter().map(move |depth| root_position + depth)
    }

    /// The path from the root to `node`, both included: the nodes that `node` attends to.
    ///
    /// # Panics
    /// If there is no such node.
    pub fn ancestors(&self, node: usize) -> Vec<usize> {
        let mut path = Vec::with_capacity(self.depth(node) + 1);
        path.extend(std::iter::successors(Some(node), |&node| self.parent(node)));
        path.reverse();
        path
    }

    /// Which node attends to which.
    pub fn mask(&self) -> TreeMask {
        let mut mask = TreeMask::default();
        self.mask_into(&mut mask);
        mask
    }

    /// As [`mask`](Self::mask), into a mask whose memory is kept between rounds.
    pub fn mask_into(&self, mask: &mut TreeMask) {
        mask.clear(self.len());
        for parent in self.parents() {
            mask.push(parent);
        }
    }

    /// Whether each node is the parent of the next one, so that the mask is causal. The root alone
    /// is a chain of nothing.
    pub fn is_chain(&self) -> bool {
        self.branching_node().is_none()
    }

    /// The first node whose parent is not the node before it.
    pub(crate) fn branching_node(&self) -> Option<usize> {
        (1..self.len()).find(|&node| usize::from(self.links[node].parent) + 1 != node)
    }

    fn append(&mut self, token: TokenId, depth: u32, parent: u16) {
        self.tokens.push(token);
        self.depths.push(depth);
        let (first_child, last_child, next_sibling) = (NONE, NONE, NONE);
        self.links.push(Links { parent, first_child, last_child, next_sibling });
    }
}

fn index(link: u16) -> Option<usize> {
    (link != NONE).then_some(usize::from(link))
}
