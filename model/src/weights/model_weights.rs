//! The weights of one rank of a target model, in the form that the forward pass uses.
//!
//! Invariant: shapes are those of the configuration, cut for the rank by [`crate::shard`]. The
//! weights of large models are views of the checkpoint's bytes, but for the split of `kv_b_proj`,
//! the norms and the router; small models are copied together. Start reading at [`ModelWeights`].
//!
//! Letters of the shapes: V vocabulary, H hidden width, Nh heads of this rank, dn and dr the parts
//! of a query head without and with rotary position, dv the width of a value head, r the width of
//! the compressed keys and values, I the width of an MLP on this rank, E experts of the model.

use std::ops::Range;

use paceline_kernels::{Tensor, Weight};

/// The weights of a target model that one rank needs.
#[derive(Clone, Debug)]
pub struct ModelWeights {
    /// Rows of the vocabulary, `[V, H]`, in the file's float type; the same on every rank.
    pub embedding: Tensor,
    /// The decoder layers, first to last.
    pub layers: Vec<LayerWeights>,
    /// Norm before the head, f32 `[H]`.
    pub final_norm: Tensor,
    /// Output head: this rank's rows of the vocabulary, `[head_rows.len(), H]`.
    pub head: Weight,
    /// The vocabulary ids that [`ModelWeights::head`] gives logits for.
    pub head_rows: Range<usize>,
}

/// One decoder layer.
#[derive(Clone, Debug)]
pub struct LayerWeights {
    /// Norm before attention, f32 `[H]`.
    pub attention_norm: Tensor,
    /// Multi-head latent attention.
    pub attention: AttentionWeights,
    /// Norm before the MLP, f32 `[H]`.
    pub ffn_norm: Tensor,
    /// The MLP or the experts.
    pub ffn: Ffn,
}

/// Multi-head latent attention (DeepSeek-V2, section 2.1), the heads of one rank.
#[derive(Clone, Debug)]
pub struct AttentionWeights {
    /// From the layer's input to the queries.
    pub query: Query,
    /// `[r + dr, H]`: latent rows first, then the rotary key's.
    pub kv_down: Weight,
    /// Norm of the latent, f32 `[r]`.
    pub kv_norm: Tensor,
    /// From the latent to the keys without position, `[Nh * dn, r]`, head by head.
    pub key_up: Weight,
    /// `key_up` with each head transposed, `[Nh * r, dn]`: takes a query into the latent space
    /// (the absorbed form).
    pub key_up_transposed: Weight,
    /// From the latent to the values, `[Nh * dv, r]`, head by head.
    pub value_up: Weight,
    /// From the heads' values to the residual stream, `[H, Nh * dv]`; a partial sum on each rank.
    pub output: Weight,
}

/// How queries are made.
#[derive(Clone, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "there is one per layer, and it is never moved about"
)]
pub enum Query {
    /// Directly: `[Nh * (dn + dr), H]`.
    Full(Weight),
    /// Through a compressed query.
    LowRank {
        /// `[rq, H]`, the same on every rank.
        down: Weight,
        /// f32 `[rq]`.
        norm: Tensor,
        /// `[Nh * (dn + dr), rq]`, head by head; in a head first dn, then dr.
        up: Weight,
    },
}

/// What follows attention in a layer.
#[derive(Clone, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "there is one per layer, and it is never moved about"
)]
pub enum Ffn {
    /// One MLP.
    Dense(MlpWeights),
    /// A mixture of experts.
    Moe(MoeWeights),
}

/// An MLP: (silu(x · gateᵀ) ⊙ (x · upᵀ)) · downᵀ. A partial sum on each rank when it is split.
#[derive(Clone, Debug)]
pub struct MlpWeights {
    /// `[I, H]`.
    pub gate: Weight,
    /// `[I, H]`.
    pub up: Weight,
    /// `[H, I]`.
    pub down: Weight,
}

/// A mixture of experts (DeepSeek-V3, section 2.1.2).
#[derive(Clone, Debug)]
pub struct MoeWeights {
    /// f32 `[E, H]`, the same on every rank.
    pub router: Weight,
    /// Bias on the scores for selection only, f32 `[E]`; none with softmax scoring.
    pub bias: Option<Tensor>,
    /// The experts of this rank: all of them with split widths, or whole ones from
    /// [`MoeWeights::first_expert`] on.
    pub experts: Vec<MlpWeights>,
    /// The model's index of the first of [`MoeWeights::experts`].
    pub first_expert: usize,
    /// All shared experts as one MLP, split over the ranks.
    pub shared: Option<MlpWeights>,
}
