//! The crate's one error type. Its invariant: every variant holds the facts, and its text says what
//! to change.

use thiserror::Error;

use crate::TokenId;

/// What can be wrong with the inputs of this crate.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum SpecError {
    /// A tree was described without its root.
    #[error("a draft tree needs at least its root: give the last emitted token as node 0")]
    TreeEmpty,
    /// A tree would have more nodes than node indices can name.
    #[error("a draft tree of {nodes} nodes is over the limit of {nodes_max}: draft fewer tokens")]
    TreeTooLarge {
        /// Nodes asked for, with the root.
        nodes: usize,
        /// The most that a tree can hold, with the root.
        nodes_max: usize,
    },
    /// Two lists that describe the same things differ in length.
    #[error("{what} has {got} entries where {expected} are needed: pass one for each")]
    LengthMismatch {
        /// Which list.
        what: &'static str,
        /// Entries needed.
        expected: usize,
        /// Entries given.
        got: usize,
    },
    /// A node's parent is absent, itself, or listed after it; or the root has one.
    #[error(
        "node {node} has parent {parent:?}: the root (node 0) has none, and the parent of every \
         other node must come before it"
    )]
    ParentInvalid {
        /// The node.
        node: usize,
        /// The parent that it was given.
        parent: Option<usize>,
    },
    /// Two children of one node carry the same token, so acceptance would be ambiguous.
    #[error("token {token} is drafted twice below node {parent}: draft each token once a node")]
    SiblingTwice {
        /// The parent (a node, or for a builder the frontier node's candidate).
        parent: usize,
        /// The token.
        token: TokenId,
    },
    /// Tree parameters that contradict one another.
    #[error("tree of topk {topk}, depth {depth}, {nodes} nodes: {reason}")]
    TreeParametersInvalid {
        /// Children a node.
        topk: usize,
        /// Levels below the root.
        depth: usize,
        /// Nodes with the root.
        nodes: usize,
        /// What to change.
        reason: &'static str,
    },
    /// The tree has all its levels already.
    #[error("the tree has its {depth} levels: call finish instead of expand")]
    NothingToExpand {
        /// Levels of the tree.
        depth: usize,
    },
    /// A draft's log-probability is not a number.
    #[error(
        "candidate {index} has a log-probability that is not a number: check the draft's logits"
    )]
    CandidateNotANumber {
        /// Index into the slice given.
        index: usize,
    },
    /// More candidates were asked for than the vocabulary has tokens.
    #[error("the {k} best of a vocabulary of {vocabulary} cannot be chosen: lower topk")]
    VocabularyTooSmall {
        /// Candidates asked for.
        k: usize,
        /// Tokens in the row.
        vocabulary: usize,
    },
    /// A row of logits holds NaN or +inf, or nothing but -inf.
    #[error(
        "a row of {vocabulary} logits has no softmax (NaN, +inf, or all -inf): check the forward"
    )]
    LogitsInvalid {
        /// Tokens in the row.
        vocabulary: usize,
    },
    /// A rule for chains was given a tree that branches.
    #[error(
        "node {node} of the tree does not follow its predecessor: this rule verifies chains only"
    )]
    NotAChain {
        /// The first node whose parent is not the node before it.
        node: usize,
    },
    /// A probability is negative, infinite or not a number.
    #[error("token {token} has probability {value} at node {node}: probabilities are finite, >= 0")]
    ProbabilityInvalid {
        /// The node of the row.
        node: usize,
        /// The token.
        token: TokenId,
        /// What was given.
        value: f32,
    },
    /// A row in which no token can be sampled.
    #[error("no token has a positive probability at node {node}: check the sampling filters")]
    NothingToSample {
        /// The node of the row.
        node: usize,
    },
    /// A drafted token that its own proposal distribution cannot have produced.
    #[error(
        "token {token} was drafted below node {node} with probability 0: pass the exact proposal \
         distribution, in target ids"
    )]
    ProposalImpossible {
        /// The node below which the token was drafted.
        node: usize,
        /// The token.
        token: TokenId,
    },
    /// A sparse distribution's tokens do not ascend.
    #[error("entry {index} of a sparse distribution does not ascend: sort its tokens, each once")]
    SparseUnsorted {
        /// The first entry that is not above its predecessor.
        index: usize,
    },
    /// A path that cannot be one of a tree whose parents precede their children.
    #[error("entry {index} of the path is node {node}: paths start at node 0 and ascend")]
    PathInvalid {
        /// Index into the path.
        index: usize,
        /// The node found there.
        node: usize,
    },
    /// Scratch rows that begin before the root's slot, so that copies could destroy rows.
    #[error("scratch rows start at slot {scratch}, before the root's slot {root}: move them up")]
    ScratchBeforeRoot {
        /// Slot of node 0's scratch row.
        scratch: usize,
        /// Slot that the root's row must end up in.
        root: usize,
    },
    /// A cost that no comparison of rates can use.
    #[error("a pass of {width} tokens costs {cost}: costs must be positive and finite")]
    CostInvalid {
        /// Tokens in the pass.
        width: usize,
        /// What was given.
        cost: f64,
    },
}
