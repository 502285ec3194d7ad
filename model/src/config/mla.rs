//! Sizes of multi-head latent attention (DeepSeek-V2, section 2.1), shared by targets and drafts.

use super::section::Section;
use crate::ModelError;

/// Heads and widths of one latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MlaSizes {
    pub(crate) heads: usize,
    pub(crate) q_lora_rank: Option<usize>,
    pub(crate) kv_lora_rank: usize,
    pub(crate) qk_nope_head_dim: usize,
    pub(crate) qk_rope_head_dim: usize,
    pub(crate) v_head_dim: usize,
}

impl MlaSizes {
    pub(crate) fn read(section: &Section<'_>) -> Result<Self, ModelError> {
        let heads = section.size("num_attention_heads", HEADS_MAX)?;
        if section.integer("num_key_value_heads", 1..=HEADS_MAX)?.unwrap_or(heads) != heads {
            let expected =
                format!("num_attention_heads = {heads} (latent attention has no groups)");
            return Err(section.invalid("num_key_value_heads", expected));
        }
        // Other software silently takes 1536 for an absent key, so absence is not "none".
        if !section.has("q_lora_rank") {
            let expected = "a width, or null for queries that are projected directly";
            return Err(section.missing("q_lora_rank", expected));
        }
        let sizes = Self {
            heads,
            q_lora_rank: section.integer("q_lora_rank", 1..=RANK_MAX)?,
            kv_lora_rank: section.size("kv_lora_rank", RANK_MAX)?,
            qk_nope_head_dim: section.size("qk_nope_head_dim", HEAD_DIM_MAX)?,
            qk_rope_head_dim: section.size("qk_rope_head_dim", HEAD_DIM_MAX)?,
            v_head_dim: section.size("v_head_dim", HEAD_DIM_MAX)?,
        };
        if !sizes.qk_rope_head_dim.is_multiple_of(2) {
            return Err(section.invalid("qk_rope_head_dim", "an even number (pairs are rotated)"));
        }
        Ok(sizes)
    }
}

const HEADS_MAX: usize = 1 << 12;
const HEAD_DIM_MAX: usize = 1 << 12;
const RANK_MAX: usize = 1 << 16;
