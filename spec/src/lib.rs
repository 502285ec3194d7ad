#![doc = include_str!("../README.md")]
//!
//! # Where to start reading
//!
//! [`DraftTree`] is the data everything else speaks about. A round goes [`TreeBuilder`] (or
//! [`DraftTree::chain`]) → target pass → [`accept_greedy`] or [`accept_sampled`] → [`CommitPlan`];
//! [`Controller`] says before each round how far to draft.
//!
//! The crate's one invariant: nothing in here reads a clock, draws a random number or keeps global
//! state, so equal inputs give equal outputs on every rank.

pub mod accept;
pub mod candidate;
pub mod commit;
pub mod confidence;
pub mod controller;
pub mod distribution;
mod error;
pub mod mask;
pub mod plan;
pub mod statistics;
pub mod tree;
pub mod tree_builder;

pub use accept::{Acceptance, accept_greedy, accept_sampled, accept_sampled_chain};
pub use candidate::{Candidate, top_k_log_softmax};
pub use commit::{CommitPlan, SlotCopy};
pub use confidence::cut_by_confidence;
pub use controller::{Controller, ControllerOptions, RoundOutcome};
pub use distribution::{DenseRows, Distribution, ProbabilityRows};
pub use error::SpecError;
pub use mask::TreeMask;
pub use plan::{Limits, Plan, TreeParameters};
pub use statistics::Statistics;
pub use tree::{DraftTree, NODES_MAX};
pub use tree_builder::{FrontierNode, TreeBuilder};

/// A token of the target's vocabulary. Drafts with a vocabulary of their own map their ids to the
/// target's before they enter a tree.
pub type TokenId = u32;
