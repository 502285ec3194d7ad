//! Verification: which drafted tokens the target keeps, and the token it adds. The invariant: what
//! is emitted has exactly the law of plain decoding, whatever was drafted.
//!
//! Under tensor parallelism, decide on one rank and broadcast, or make sure that all ranks see
//! equal bits.

mod greedy;
mod sampled;
mod sampled_chain;

pub use greedy::accept_greedy;
pub use sampled::accept_sampled;
pub use sampled_chain::accept_sampled_chain;

use crate::{DraftTree, TokenId};

/// The outcome of a round: k accepted drafted tokens and one bonus token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Acceptance {
    /// The accepted nodes, the root first, each the parent of the next: k + 1 nodes, whose rows of
    /// the target's KV cache and features are kept.
    pub path: Vec<usize>,
    /// The tokens emitted, k + 1 of them: those of the path's nodes but the root, then the bonus
    /// token, which is the next round's root.
    pub emitted: Vec<TokenId>,
}

impl Acceptance {
    /// Drafted tokens accepted: k.
    pub fn accepted(&self) -> usize {
        self.path.len() - 1
    }

    /// The last token emitted: the next root.
    ///
    /// # Panics
    /// If the public fields were emptied by hand.
    pub fn bonus(&self) -> TokenId {
        *self.emitted.last().expect("a round emits at least one token")
    }

    /// Keeps the first `emitted` tokens only, for a stop token or a token budget inside the round.
    /// The last one kept takes the place of the bonus token, and the path ends before it, so that
    /// the next root is not in the KV cache, as ever. At least one token is kept.
    pub fn truncate(&mut self, emitted: usize) {
        self.emitted.truncate(emitted.max(1));
        self.path.truncate(emitted.max(1));
    }

    fn new(tree: &DraftTree, path: Vec<usize>, bonus: TokenId) -> Self {
        let mut emitted = Vec::with_capacity(path.len());
        emitted.extend(path[1..].iter().map(|&node| tree.tokens()[node]));
        emitted.push(bonus);
        Self { path, emitted }
    }
}
