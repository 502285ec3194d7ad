//! Grows a dynamic draft tree level by level (EAGLE-2, section 4) while the engine runs the draft
//! network. The invariant: a candidate's score never exceeds its parent's and its index is higher,
//! so the best candidates, ties by index, always include their parents.

use std::cmp::Ordering;

use crate::{Candidate, DraftTree, SpecError, TokenId, TreeMask, TreeParameters};

/// A node that the draft has to be fed so that the tree can grow below it.
///
/// With the root at index P of the sequence, its draft row has position P + depth - 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FrontierNode {
    /// The node's token.
    pub token: TokenId,
    /// The node's depth: 1 below the root.
    pub depth: u32,
    /// Index among the fed nodes (see [`TreeBuilder::fed`]) of the parent, whose draft state this
    /// row takes; none for a child of the root, which takes the last committed row's.
    pub parent: Option<usize>,
    /// Index among the candidates.
    pub candidate: usize,
    /// Cumulative log-probability under the draft.
    pub score: f32,
}

/// The state of one tree under construction.
///
/// ```
/// use paceline_spec::{Candidate, TreeBuilder, TreeParameters};
///
/// let candidate = |token, log_probability| Candidate { token, log_probability };
/// let parameters = TreeParameters::new(2, 2, 4)?;
/// let level = [candidate(5, -0.1), candidate(6, -2.4)];
/// let mut builder = TreeBuilder::start(parameters, 9, &level)?;
/// while !builder.frontier().is_empty() {
///     // Here the engine feeds the frontier to its draft, and takes the best two of each row.
///     let children = [(7, -0.2), (8, -1.7), (7, -0.7), (8, -0.7)].map(|(t, l)| candidate(t, l));
///     builder.expand(&children)?;
/// }
/// let tree = builder.finish();
/// assert_eq!(tree.tokens(), [9, 5, 7, 8]);
/// # Ok::<(), paceline_spec::SpecError>(())
/// ```
#[derive(Debug, Clone)]
pub struct TreeBuilder {
    parameters: TreeParameters,
    root: TokenId,
    levels: usize,
    candidates: Vec<Grown>,
    fed: Vec<FrontierNode>,
    fed_mask: TreeMask,
    frontier_start: usize,
    order: Vec<usize>,
    scores: Vec<f32>,
}

/// A candidate with its place in the tree.
#[derive(Debug, Clone, Copy)]
struct Grown {
    token: TokenId,
    score: f32,
    parent: Option<usize>,
    node: usize,
}

impl TreeBuilder {
    /// Starts a tree below `root` with the `topk` best continuations of the last committed draft
    /// row, best first.
    ///
    /// # Errors
    /// As [`restart`](Self::restart).
    pub fn start(
        parameters: TreeParameters,
        root: TokenId,
        level: &[Candidate],
    ) -> Result<Self, SpecError> {
        let mut builder = Self {
            parameters,
            root,
            levels: 0,
            candidates: Vec::new(),
            fed: Vec::new(),
            fed_mask: TreeMask::default(),
            frontier_start: 0,
            order: Vec::new(),
            scores: Vec::new(),
        };
        builder.restart(parameters, root, level)?;
        Ok(builder)
    }

    /// As [`start`](Self::start), keeping this builder's memory.
    ///
    /// # Errors
    /// [`SpecError::LengthMismatch`] unless `level` has topk entries,
    /// [`SpecError::CandidateNotANumber`] and [`SpecError::SiblingTwice`].
    pub fn restart(
        &mut self,
        parameters: TreeParameters,
        root: TokenId,
        level: &[Candidate],
    ) -> Result<(), SpecError> {
        check(level, parameters.topk(), 1, |_| 0)?;
        self.parameters = parameters;
        self.root = root;
        self.levels = 1;
        self.candidates.clear();
        self.fed.clear();
        self.fed_mask.clear(parameters.topk() * (parameters.depth() - 1));
        self.frontier_start = 0;
        for candidate in level {
            self.grow(candidate, None);
        }
        self.advance(0, |_| None);
        Ok(())
    }

    /// The nodes to feed to the draft now, best first; empty when the tree has all its levels.
    pub fn frontier(&self) -> &[FrontierNode] {
        &self.fed[self.frontier_start..]
    }

    /// Index among the fed nodes of the frontier's first node.
    pub fn frontier_start(&self) -> usize {
        self.frontier_start
    }

    /// All nodes fed so far and the frontier, in the order of feeding: with one scratch row of
    /// draft KV for each, node `i` has scratch row `i`.
    pub fn fed(&self) -> &[FrontierNode] {
        &self.fed
    }

    /// Which fed node attends to which, besides all committed draft rows: one row for each of
    /// [`fed`](Self::fed).
    pub fn fed_mask(&self) -> &TreeMask {
        &self.fed_mask
    }

    /// Candidates so far: topk, and topk² for each further level.
    pub fn candidates(&self) -> usize {
        self.candidates.len()
    }

    /// Adds a level: `children` holds the topk best continuations of each frontier node, in the
    /// frontier's order, `[frontier, topk]`. A log-probability above 0 counts as 0.
    ///
    /// # Errors
    /// [`SpecError::NothingToExpand`] when the tree has all its levels,
    /// [`SpecError::LengthMismatch`], [`SpecError::CandidateNotANumber`] and
    /// [`SpecError::SiblingTwice`]. The builder is unchanged then.
    pub fn expand(&mut self, children: &[Candidate]) -> Result<(), SpecError> {
        let frontier = self.frontier_start..self.fed.len();
        if frontier.is_empty() {
            return Err(SpecError::NothingToExpand { depth: self.parameters.depth() });
        }
        let topk = self.parameters.topk();
        check(children, topk, frontier.len(), |row| self.fed[frontier.start + row].candidate)?;
        let first = self.candidates.len();
        for (row, fed) in frontier.clone().enumerate() {
            for candidate in &children[row * topk..(row + 1) * topk] {
                self.grow(candidate, Some(self.fed[fed].candidate));
            }
        }
        self.levels += 1;
        self.advance(first, |candidate| Some(frontier.start + (candidate - first) / topk));
        Ok(())
    }

    /// The tree of the best candidates: nodes - 1 of them by cumulative score over all levels, ties
    /// by candidate index, in the order of candidate index. May be called before all levels are
    /// there; a tree may then be smaller than asked for.
    pub fn finish(&mut self) -> DraftTree {
        let mut tree = DraftTree::root_only(self.root);
        self.finish_into(&mut tree);
        tree
    }

    /// As [`finish`](Self::finish), into a tree whose memory is kept between rounds.
    pub fn finish_into(&mut self, tree: &mut DraftTree) {
        tree.reset(self.root);
        self.scores.clear();
        self.scores.push(0.0);
        select(&self.candidates, 0, self.parameters.nodes() - 1, &mut self.order);
        self.order.sort_unstable();
        for &index in &self.order {
            let Grown { token, score, parent, .. } = self.candidates[index];
            let parent = parent.map_or(0, |parent| self.candidates[parent].node);
            let node = tree.push(parent, token).expect("siblings were checked when they came");
            self.candidates[index].node = node;
            self.scores.push(score);
        }
    }

    /// Cumulative log-probability of each node of the tree that was finished last, the root's 0
    /// first.
    pub fn scores(&self) -> &[f32] {
        &self.scores
    }

    fn grow(&mut self, candidate: &Candidate, parent: Option<usize>) {
        let base = parent.map_or(0.0, |parent| self.candidates[parent].score);
        let score = base + candidate.log_probability.min(0.0);
        self.candidates.push(Grown { token: candidate.token, score, parent, node: 0 });
    }

    /// Makes the best of the candidates from `first` on the next frontier, unless they are the last
    /// level.
    fn advance(&mut self, first: usize, parent: impl Fn(usize) -> Option<usize>) {
        self.frontier_start = self.fed.len();
        if self.levels == self.parameters.depth() {
            return;
        }
        select(&self.candidates, first, self.parameters.topk(), &mut self.order);
        let candidates = &self.candidates;
        self.order.sort_unstable_by(|&a, &b| rank(candidates, a, b));
        for &candidate in &self.order {
            let Grown { token, score, .. } = self.candidates[candidate];
            let parent = parent(candidate);
            self.fed_mask.push(parent);
            let depth = self.levels as u32;
            self.fed.push(FrontierNode { token, depth, parent, candidate, score });
        }
    }
}

/// Leaves the indices of the `count` best candidates from `first` on in `order`, in no order.
fn select(candidates: &[Grown], first: usize, count: usize, order: &mut Vec<usize>) {
    order.clear();
    order.extend(first..candidates.len());
    if count < order.len() {
        order.select_nth_unstable_by(count, |&a, &b| rank(candidates, a, b));
        order.truncate(count);
    }
}

/// Best first, ties by index. Not `total_cmp`, which tells -0 from 0 and could part a child of
/// probability 1 from its parent.
fn rank(candidates: &[Grown], a: usize, b: usize) -> Ordering {
    let scores = candidates[b].score.partial_cmp(&candidates[a].score);
    scores.expect("scores were checked not to be NaN").then(a.cmp(&b))
}

fn check(
    children: &[Candidate],
    topk: usize,
    rows: usize,
    parent: impl Fn(usize) -> usize,
) -> Result<(), SpecError> {
    if children.len() != topk * rows {
        return Err(SpecError::LengthMismatch {
            what: "the list of candidates",
            expected: topk * rows,
            got: children.len(),
        });
    }
    if let Some(index) = children.iter().position(|child| child.log_probability.is_nan()) {
        return Err(SpecError::CandidateNotANumber { index });
    }
    for (row, siblings) in children.chunks_exact(topk).enumerate() {
        for (index, sibling) in siblings.iter().enumerate() {
            if siblings[..index].iter().any(|elder| elder.token == sibling.token) {
                return Err(SpecError::SiblingTwice { parent: parent(row), token: sibling.token });
            }
        }
    }
    Ok(())
}
