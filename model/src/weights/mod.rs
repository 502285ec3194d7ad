//! Checkpoints and the weights made of them.
//!
//! A [`Checkpoint`] is the mapped files: named tensors, never copied. [`layout`] says which modules
//! a configuration calls for, [`ModelWeights`] and [`DraftWeights`] are what a forward pass uses,
//! and a [`Report`] tells what a checkpoint is and what would not load. Invariant: whatever is
//! unknown, missing or of another shape is an error that names the tensor. Start reading at
//! [`Source`].

mod checkpoint;
mod draft_loading;
pub(crate) mod draft_weights;
mod gather;
mod latent_split;
pub mod layout;
mod loading;
pub(crate) mod model_weights;
mod rename;
mod report;
mod resolution;
mod safetensors;
mod source;

pub use checkpoint::{Checkpoint, Skipped};
pub use draft_weights::{DraftAttention, DraftWeights, GroupedAttentionWeights};
pub use model_weights::{
    AttentionWeights, Ffn, LayerWeights, MlpWeights, ModelWeights, MoeWeights, Query,
};
pub use report::{RankBytes, Report, Stored};
pub use source::{EmbeddedFiles, Source};
