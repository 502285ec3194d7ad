//! What belongs to one sequence while it drafts: its place in the draft's cache, and the tree that
//! grows. A chain is a tree with one child a node.

use paceline_kernels::ops::attention::Paths;
use paceline_model::pass::Segment;
use paceline_spec::{Candidate, DraftTree, FrontierNode, TreeBuilder, TreeParameters};

use crate::error::Result;

/// The draft's side of a sequence.
pub(crate) struct Drafting {
    /// Committed rows of the draft's cache.
    pub(super) rows: usize,
    /// Which share of the memory for waiting states is its own.
    pub(super) share: u32,
    /// The token after each waiting state.
    pub(super) waiting: Vec<u32>,
    /// Whether the sequence has outgrown the draft's positions.
    pub(super) is_beyond: bool,
    builder: Option<TreeBuilder>,
    paths: Paths,
}

/// One sequence's tree of one round.
pub(crate) struct Growth<'a> {
    pub(crate) drafting: &'a mut Drafting,
    /// Shape; chains have a `topk` of 1.
    pub(crate) parameters: TreeParameters,
    /// Last emitted token.
    pub(crate) root: u32,
    /// Slots of the sequence, with room for the scratch rows.
    pub(crate) slots: &'a [u32],
    /// The result.
    pub(crate) tree: &'a mut DraftTree,
    /// This sequence's first row in the last pass.
    pub(super) first_row: usize,
    /// Index among the fed nodes of the node that this row stands for.
    fed_start: usize,
}

impl Drafting {
    pub(super) fn new(share: u32, rows: usize) -> Self {
        let (waiting, builder, paths) = (Vec::new(), None, Paths::default());
        Self { rows, share, waiting, is_beyond: false, builder, paths }
    }

    /// Rows that are in the draft's cache.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Rows whose states wait for the draft.
    pub(crate) fn waiting_rows(&self) -> usize {
        self.waiting.len()
    }

    /// Whether there is a state to draft from.
    pub(crate) fn can_grow(&self) -> bool {
        !self.waiting.is_empty() && !self.is_beyond
    }

    /// Rows that it has heard of.
    pub(super) fn end(&self) -> usize {
        self.rows + self.waiting.len()
    }
}

impl<'a> Growth<'a> {
    /// Asks for a tree below `root`.
    pub(crate) fn new(
        drafting: &'a mut Drafting,
        parameters: TreeParameters,
        root: u32,
        slots: &'a [u32],
        tree: &'a mut DraftTree,
    ) -> Self {
        Self { drafting, parameters, root, slots, tree, first_row: 0, fed_start: 0 }
    }

    /// Most rows that it needs in a pass.
    pub(super) fn rows_max(&self) -> usize {
        self.drafting.waiting.len().max(self.parameters.topk())
    }

    /// The waiting rows in the first pass.
    pub(super) fn waiting_segment(&self) -> Segment<'_> {
        let rows = self.drafting.waiting.len();
        let (first_row, context, slots) = (self.first_row, self.drafting.rows, self.slots);
        Segment { first_row, rows, context, earlier: 0, slots, paths: None }
    }

    /// Takes the first level; `last` is the row of the last pass that it comes from.
    pub(super) fn start(&mut self, level: &[Candidate], last: u32) -> Result<()> {
        let Drafting { builder, paths, .. } = &mut *self.drafting;
        paths.clear();
        match builder {
            Some(builder) => builder.restart(self.parameters, self.root, level)?,
            None => *builder = Some(TreeBuilder::start(self.parameters, self.root, level)?),
        }
        self.first_row = last as usize;
        Ok(())
    }

    /// Whether there are nodes to feed.
    pub(super) fn is_growing(&self) -> bool {
        !self.frontier().is_empty()
    }

    /// The nodes to feed.
    pub(super) fn frontier(&self) -> &[FrontierNode] {
        self.drafting.builder.as_ref().map_or(&[], TreeBuilder::frontier)
    }

    /// Appends the rows of the frontier. `sources` gets the rows of the last pass whose states
    /// they go on from.
    pub(super) fn feed(
        &mut self,
        tokens: &mut Vec<u32>,
        positions: &mut Vec<u32>,
        sources: &mut Vec<u32>,
    ) {
        let Drafting { builder, paths, rows, .. } = &mut *self.drafting;
        let Some(builder) = builder else { return };
        let first_row = tokens.len();
        for node in builder.frontier() {
            tokens.push(node.token);
            positions.push(*rows as u32 + node.depth - 1);
            // Parents were fed in the pass before this one; below the root all start from one row.
            let source = node.parent.map_or(0, |parent| parent - self.fed_start);
            sources.push((self.first_row + source) as u32);
            paths.push(node.parent);
        }
        self.first_row = first_row;
        self.fed_start = builder.frontier_start();
    }

    /// The rows of the frontier in the pass; fed node i has scratch row i.
    pub(super) fn frontier_segment(&self) -> Segment<'_> {
        Segment {
            first_row: self.first_row,
            rows: self.frontier().len(),
            context: self.drafting.rows,
            earlier: self.fed_start,
            slots: self.slots,
            paths: Some(&self.drafting.paths),
        }
    }

    /// Takes the children of the frontier.
    pub(super) fn expand(&mut self, level: &[Candidate]) -> Result<()> {
        if let Some(builder) = &mut self.drafting.builder {
            builder.expand(level)?;
        }
        Ok(())
    }

    /// Leaves the best nodes in the tree.
    pub(super) fn finish(&mut self) {
        if let Some(builder) = &mut self.drafting.builder {
            builder.finish_into(self.tree);
        }
    }
}
