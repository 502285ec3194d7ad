//! What a round may do: draft nothing, a chain or a tree. The invariant: the parameters of a tree
//! always describe one that can be built.

use crate::{NODES_MAX, SpecError};

/// How a round drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Plan {
    /// One token a pass; the draft does no work.
    Plain,
    /// A chain.
    Chain {
        /// Tokens drafted, at least 1.
        drafted: usize,
    },
    /// A dynamic tree.
    Tree(TreeParameters),
}

impl Plan {
    /// Tokens in the target pass, the root included.
    pub fn width(&self) -> usize {
        match self {
            Self::Plain => 1,
            Self::Chain { drafted } => drafted + 1,
            Self::Tree(parameters) => parameters.nodes(),
        }
    }

    /// The most drafted tokens that the round can accept.
    pub fn depth(&self) -> usize {
        match self {
            Self::Plain => 0,
            Self::Chain { drafted } => *drafted,
            Self::Tree(parameters) => parameters.depth(),
        }
    }

    /// The same plan cut down to what `limits` allow: fewer levels, fewer nodes, or
    /// [`Plan::Plain`]. For a fixed drafting mode near the end of a context or of the token budget.
    #[must_use]
    pub fn limited(self, limits: Limits) -> Self {
        let depth = self.depth().min(limits.depth_max);
        let nodes = self.width().min(limits.width_max);
        if depth == 0 || nodes < 2 {
            return Self::Plain;
        }
        match self {
            Self::Plain => Self::Plain,
            Self::Chain { .. } => Self::Chain { drafted: depth.min(nodes - 1) },
            Self::Tree(TreeParameters { topk, .. }) => {
                let nodes = nodes.min(TreeParameters::candidates(topk, depth) + 1);
                Self::Tree(TreeParameters { topk, depth, nodes })
            }
        }
    }
}

/// What the request still has room for in this round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The most drafted tokens that may be accepted.
    pub depth_max: usize,
    /// The most tokens in the target pass, the root included.
    pub width_max: usize,
}

impl Limits {
    /// No limit.
    pub const NONE: Self = Self { depth_max: usize::MAX, width_max: usize::MAX };

    /// Limits from what is left: `tokens_left` may still be emitted (the bonus token is one of
    /// them), `positions_left` of the context are free from the root's own on, and `rows_left` rows
    /// of the KV cache can take the pass.
    pub fn remaining(tokens_left: usize, positions_left: usize, rows_left: usize) -> Self {
        let depth_max = tokens_left.min(positions_left).saturating_sub(1);
        Self { depth_max, width_max: rows_left }
    }
}

/// The shape of a dynamic draft tree (EAGLE-2, section 4; in that code's names: `total_token` =
/// nodes, `depth` = depth - 1, `top_k` = topk).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TreeParameters {
    topk: usize,
    depth: usize,
    nodes: usize,
}

impl TreeParameters {
    /// `topk` children of each node that is expanded and as many such nodes a level, `depth` levels
    /// below the root, `nodes` nodes kept, the root included.
    ///
    /// # Errors
    /// [`SpecError::TreeParametersInvalid`] if a number is too small, or more nodes are wanted than
    /// the levels yield: topk + (depth - 1) · topk² candidates, and the root.
    pub fn new(topk: usize, depth: usize, nodes: usize) -> Result<Self, SpecError> {
        let invalid = |reason| Err(SpecError::TreeParametersInvalid { topk, depth, nodes, reason });
        if topk == 0 || depth == 0 {
            return invalid("topk and depth must be at least 1");
        }
        if nodes < 2 {
            return invalid("nodes must be at least 2, the root and one drafted token");
        }
        if nodes > NODES_MAX || topk > NODES_MAX || depth > NODES_MAX {
            return invalid("a tree holds at most 65535 nodes");
        }
        if nodes - 1 > Self::candidates(topk, depth) {
            return invalid(
                "more nodes than the root and topk + (depth - 1) · topk² candidates: lower nodes",
            );
        }
        Ok(Self { topk, depth, nodes })
    }

    /// Children of each node that is expanded, and nodes that are expanded a level.
    pub fn topk(&self) -> usize {
        self.topk
    }

    /// Levels below the root.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// Nodes kept, the root included: the width of the target pass.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    fn candidates(topk: usize, depth: usize) -> usize {
        (depth - 1).saturating_mul(topk.saturating_mul(topk)).saturating_add(topk)
    }
}
