//! The weights of an EAGLE-3 draft (EAGLE-3, section 3), in the form that its forward pass uses.
//!
//! Invariant: plain floats, never quantised and never sharded: a draft runs on one rank. Start
//! reading at [`DraftWeights`].
//!
//! Letters of the shapes: Hd the draft's width, Ht the target's, A captured states, Id the width
//! of the MLP, Vt and Vd the vocabularies of target and draft.

use paceline_kernels::{Tensor, Weight};

use super::{AttentionWeights, MlpWeights};

/// A draft network.
#[derive(Clone, Debug)]
pub struct DraftWeights {
    /// Norm of all captured states as one, f32 `[A * Ht]` (`norm_before_fc`).
    pub captured_norm: Option<Tensor>,
    /// One norm for each captured state, f32 `[Ht]` each (`fc_norm`); empty without.
    pub captured_norms: Vec<Tensor>,
    /// From the captured states to the draft's width, `[Hd, A * Ht]`.
    pub fc: Weight,
    /// f32 `[Hd]`.
    pub fc_bias: Option<Tensor>,
    /// Norm of the token embedding, f32 `[Hd]`.
    pub embedding_norm: Tensor,
    /// Norm of the hidden state, f32 `[Hd]`.
    pub hidden_norm: Tensor,
    /// Attention, whose input is embedding then hidden state, 2 · Hd wide.
    pub attention: DraftAttention,
    /// Norm before the MLP, f32 `[Hd]`.
    pub ffn_norm: Tensor,
    /// `[Id, Hd]` twice and `[Hd, Id]`.
    pub mlp: MlpWeights,
    /// Norm before the head, f32 `[Hd]`.
    pub final_norm: Tensor,
    /// Output head `[Vd, Hd]`; `None` to use the target's.
    pub head: Option<Weight>,
    /// Embedding `[Vt, Hd]`; `None` to use the target's.
    pub embedding: Option<Tensor>,
    /// The target's id of each of the draft's Vd ids; the ids themselves for a full vocabulary.
    pub draft_to_target: Vec<u32>,
}

/// Attention of a draft layer.
#[derive(Clone, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "there is one per layer, and it is never moved about"
)]
pub enum DraftAttention {
    /// Grouped-query attention, as in Llama.
    Llama(GroupedAttentionWeights),
    /// Multi-head latent attention, as in the target.
    Mla(AttentionWeights),
}

/// Grouped-query attention: Nh query heads and Nkv key and value heads of width d.
#[derive(Clone, Debug)]
pub struct GroupedAttentionWeights {
    /// `[Nh * d, 2 * Hd]`.
    pub query: Weight,
    /// `[Nkv * d, 2 * Hd]`.
    pub key: Weight,
    /// `[Nkv * d, 2 * Hd]`.
    pub value: Weight,
    /// `[Hd, Nh * d]`.
    pub output: Weight,
}
