//! `config.json` of the DeepSeek-V3 family, read into plain checked facts.
//!
//! Invariant: a [`ModelConfig`] is consistent and supported. Sizes are positive and bounded, so
//! that no product of them that describes a tensor overflows, and whatever the forward pass cannot
//! do was refused with the key, the value found and what is supported. Start reading at
//! [`ModelConfig::from_json`].

use std::path::Path;

use paceline_kernels::DType;
use serde_json::json;

use crate::ModelError;
use section::Section;

pub(crate) mod file;
mod mla;
mod moe;
mod quantization;
mod rope;
pub(crate) mod section;

pub(crate) use mla::MlaSizes;
pub use moe::{MoeConfig, Scoring, Selection};
pub use quantization::Quantization;
pub use rope::{RopeConfig, Yarn};

/// Everything that the weights and the forward pass of a target model depend on.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Which member of the family.
    pub family: Family,
    /// Rows of the embedding and of the output head (`vocab_size`).
    pub vocabulary: usize,
    /// Width of the residual stream (H).
    pub hidden: usize,
    /// Decoder layers (N), without multi-token-prediction layers.
    pub layers: usize,
    /// Attention heads (Nh).
    pub heads: usize,
    /// Width of the compressed query; `None` if queries are projected directly.
    pub q_lora_rank: Option<usize>,
    /// Width of the compressed keys and values (r).
    pub kv_lora_rank: usize,
    /// Part of a head's query and key without position (dn).
    pub qk_nope_head_dim: usize,
    /// Part of a head's query and key with rotary position (dr), even.
    pub qk_rope_head_dim: usize,
    /// Width of a head's value (dv).
    pub v_head_dim: usize,
    /// Width of the MLP of dense layers (I).
    pub intermediate: usize,
    /// Layers before this one are dense.
    pub first_dense_layers: usize,
    /// Only layers divisible by this have experts.
    pub moe_layer_frequency: usize,
    /// Experts; `None` if every layer is dense.
    pub moe: Option<MoeConfig>,
    /// Epsilon of the norms before attention, before the MLP and before the head.
    pub rms_norm_eps: f32,
    /// Epsilon of the two norms inside attention. 1e-6 as in DeepSeek's own code; other engines
    /// use `rms_norm_eps`, so this is a switch.
    pub inner_norm_eps: f32,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// Longest context (`max_position_embeddings`).
    pub positions_max: usize,
    /// First token of a sequence, if the file names one.
    pub bos: Option<u32>,
    /// Tokens that end a sequence; see [`crate::stop`] for the full set.
    pub eos: Vec<u32>,
    /// Whether the output head is the embedding.
    pub tied_embeddings: bool,
    /// Multi-token-prediction layers stored after the decoder layers; they are skipped.
    pub mtp_layers: usize,
    /// Storage of the linear weights.
    pub quantization: Quantization,
    /// Keys that were not understood; harmless as far as is known, but worth showing.
    pub warnings: Vec<String>,
}

/// Member of the family, by `model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// DeepSeek-V2 and V2-Lite.
    DeepseekV2,
    /// DeepSeek-V3 and R1, Moonlight.
    DeepseekV3,
    /// Kimi-K2 and K2-Thinking.
    KimiK2,
    /// Kimi-K2.5 (its text part).
    KimiK25,
}

impl ModelConfig {
    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    /// [`ModelError::Json`] for what is not a JSON object, [`ModelError::ConfigMissing`] and
    /// [`ModelError::ConfigValue`] for everything else.
    pub fn from_json(text: &str) -> Result<Self, ModelError> {
        let map = section::parse_object(text, FILE)?;
        let outer = Section::root(&map, FILE);
        let family = Family::read(&outer)?;
        if family != Family::KimiK25 {
            return Self::read(&outer, family);
        }
        let inner = outer.section("text_config")?;
        let inner = inner.ok_or_else(|| outer.missing("text_config", "the decoder's object"))?;
        if !matches!(inner.text("model_type")?, None | Some("kimi_k2" | "deepseek_v3")) {
            return Err(inner.invalid("model_type", "\"kimi_k2\" or \"deepseek_v3\""));
        }
        check_architectures(&inner)?;
        let mut config = Self::read(&inner, family)?;
        if let Some(declared) = Quantization::read(&outer)? {
            if config.quantization == Quantization::None {
                config.quantization = declared;
                config.check_quantization(&outer)?;
            } else if config.quantization != declared {
                let expected = "the same as text_config.quantization_config";
                return Err(outer.invalid("quantization_config", expected));
            }
        }
        let rest = outer.unread(&[BOOKKEEPING, MULTIMODAL].concat());
        config.warnings.extend(rest);
        Ok(config)
    }

    /// Reads a `config.json`.
    ///
    /// # Errors
    /// As [`ModelConfig::from_json`], and [`ModelError::Read`].
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ModelError> {
        let path = path.as_ref();
        let text = file::read_text(path, file::CONFIG_BYTES_MAX)?;
        Self::from_json(&text).map_err(|error| error.in_directory(file::directory(path)))
    }

    /// Whether a layer's MLP is a mixture of experts.
    pub fn is_moe_layer(&self, layer: usize) -> bool {
        self.moe.is_some()
            && layer >= self.first_dense_layers
            && layer.is_multiple_of(self.moe_layer_frequency)
    }

    /// Width of a head's query and key (dq = dn + dr).
    pub fn query_head_dim(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    /// Cached values per token and layer (r + dr).
    pub fn latent_width(&self) -> usize {
        self.kv_lora_rank + self.qk_rope_head_dim
    }

    /// Bytes of a cache of `slots` rows a layer, on each rank.
    pub fn cache_bytes(&self, slots: usize, dtype: DType) -> u64 {
        [self.layers, self.latent_width(), slots, dtype.bytes()]
            .into_iter()
            .fold(1, |product, size| product.saturating_mul(size as u64))
    }

    /// Factor on the attention scores: dq^-1/2, times YaRN's softmax factor.
    pub fn softmax_scale(&self) -> f32 {
        let plain = (self.query_head_dim() as f64).powf(-0.5);
        (plain * self.rope.softmax_factor_exact()) as f32
    }

    /// Residual streams that an EAGLE-3 draft reads unless it says otherwise: those entering
    /// layers 2, N/2 and N-3. Ascending for N of at least 7; a draft of a smaller target names
    /// its own.
    pub fn capture_points_default(&self) -> [usize; 3] {
        [2, self.layers / 2, self.layers.saturating_sub(3)]
    }

    /// Whether this is a chat model of the Kimi kind, by family or by Kimi's vocabulary
    /// (Moonlight is a `deepseek_v3` with it).
    pub fn has_kimi_vocabulary(&self) -> bool {
        const KIMI_VOCABULARY: usize = 163_840;
        matches!(self.family, Family::KimiK2 | Family::KimiK25)
            || self.vocabulary == KIMI_VOCABULARY
    }

    fn read(section: &Section<'_>, family: Family) -> Result<Self, ModelError> {
        check_fixed(section)?;
        let layers = section.size("num_hidden_layers", LAYERS_MAX)?;
        let moe = MoeConfig::read(section, family)?;
        let first_dense = section.integer("first_k_dense_replace", 0..=layers)?;
        let first_dense = match (first_dense, &moe) {
            (Some(first), _) => first,
            (None, None) => layers,
            (None, Some(_)) => {
                let expected = "the number of dense layers at the bottom";
                return Err(section.missing("first_k_dense_replace", expected));
            }
        };
        let vocabulary = section.size("vocab_size", VOCABULARY_MAX)?;
        let id = |id: usize| u32::try_from(id).expect("ids are below the bounded vocabulary");
        let sizes = MlaSizes::read(section)?;
        let mtp_layers = section.integer("num_nextn_predict_layers", 0..=LAYERS_MAX)?;
        let mtp_layers = mtp_layers.or(section.integer("num_mtp_layers", 0..=LAYERS_MAX)?);
        let mut config = Self {
            family,
            vocabulary,
            hidden: section.size("hidden_size", HIDDEN_MAX)?,
            layers,
            heads: sizes.heads,
            q_lora_rank: sizes.q_lora_rank,
            kv_lora_rank: sizes.kv_lora_rank,
            qk_nope_head_dim: sizes.qk_nope_head_dim,
            qk_rope_head_dim: sizes.qk_rope_head_dim,
            v_head_dim: sizes.v_head_dim,
            intermediate: section.size("intermediate_size", WIDTH_MAX)?,
            first_dense_layers: first_dense,
            moe_layer_frequency: section.integer("moe_layer_freq", 1..=LAYERS_MAX)?.unwrap_or(1),
            moe,
            rms_norm_eps: section.number("rms_norm_eps", EPSILON)?.unwrap_or(1e-6) as f32,
            inner_norm_eps: 1e-6,
            rope: RopeConfig::read(section, read_interleaved(section, family)?)?,
            positions_max: section.size("max_position_embeddings", POSITIONS_MAX)?,
            bos: section.integer("bos_token_id", 0..=vocabulary - 1)?.map(id),
            eos: section
                .integers("eos_token_id", 0..=vocabulary - 1)?
                .into_iter()
                .map(id)
                .collect(),
            tied_embeddings: section.flag("tie_word_embeddings", false)?,
            mtp_layers: mtp_layers.unwrap_or(0),
            quantization: Quantization::read(section)?.unwrap_or(Quantization::None),
            warnings: Vec::new(),
        };
        if family == Family::DeepseekV2 && !config.hidden.is_multiple_of(config.heads) {
            let expected = format!("a multiple of num_attention_heads = {}", config.heads);
            return Err(section.invalid("hidden_size", expected));
        }
        config.check_quantization(section)?;
        config.warnings = section.unread(&[BOOKKEEPING, IGNORED].concat());
        Ok(config)
    }

    /// Packed INT4 experts have whole groups only.
    fn check_quantization(&self, section: &Section<'_>) -> Result<(), ModelError> {
        let (Quantization::Int4PackQuantized { group_size }, Some(moe)) =
            (self.quantization, &self.moe)
        else {
            return Ok(());
        };
        let expected = format!("a multiple of the quantisation group size {group_size}");
        if !self.hidden.is_multiple_of(group_size) {
            return Err(section.invalid("hidden_size", expected));
        }
        if !moe.intermediate.is_multiple_of(group_size) {
            return Err(section.invalid("moe_intermediate_size", expected));
        }
        Ok(())
    }
}

impl Family {
    fn read(section: &Section<'_>) -> Result<Self, ModelError> {
        check_architectures(section)?;
        let supported = "\"deepseek_v2\", \"deepseek_v3\", \"kimi_k2\" or \"kimi_k25\"";
        match section.text("model_type")? {
            Some("deepseek_v2") => Ok(Self::DeepseekV2),
            Some("deepseek_v3") => Ok(Self::DeepseekV3),
            Some("kimi_k2") => Ok(Self::KimiK2),
            Some("kimi_k25") => Ok(Self::KimiK25),
            None => Err(section.missing("model_type", supported)),
            Some(_) => Err(section.invalid("model_type", supported)),
        }
    }
}

/// Refuses a draft (and anything else) in the place of a target.
fn check_architectures(section: &Section<'_>) -> Result<(), ModelError> {
    let Some(found) = section.value("architectures") else { return Ok(()) };
    let names = found.as_array().map(Vec::as_slice).unwrap_or_default();
    let known =
        |name: &serde_json::Value| name.as_str().is_some_and(|name| ARCHITECTURES.contains(&name));
    if names.is_empty() || !names.iter().all(known) {
        return Err(section.invalid("architectures", ARCHITECTURES.join(", ")));
    }
    Ok(())
}

/// Keys for which the forward pass knows one value only.
fn check_fixed(section: &Section<'_>) -> Result<(), ModelError> {
    section.only("hidden_act", &json!("silu"))?;
    section.only("attention_bias", &json!(false))?;
    section.only("mlp_bias", &json!(false))
}

fn read_interleaved(section: &Section<'_>, family: Family) -> Result<bool, ModelError> {
    let interleaved = section.flag("rope_interleave", true)?;
    if family == Family::DeepseekV2 && !interleaved {
        return Err(section.invalid("rope_interleave", "true for deepseek_v2"));
    }
    Ok(interleaved)
}

pub(crate) const FILE: &str = "config.json";

const ARCHITECTURES: &[&str] = &[
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "KimiK2ForCausalLM",
    "KimiK25ForConditionalGeneration",
];

// Bounds several times above any known model, and low enough that the bytes of all weights
// together fit 64 bits.
pub(crate) const VOCABULARY_MAX: usize = 1 << 24;
pub(crate) const HIDDEN_MAX: usize = 1 << 17;
const LAYERS_MAX: usize = 1 << 10;
const EXPERTS_MAX: usize = 1 << 13;
const EXPERT_WIDTH_MAX: usize = 1 << 18;
pub(crate) const WIDTH_MAX: usize = 1 << 20;
pub(crate) const POSITIONS_MAX: usize = 1 << 30;
pub(crate) const EPSILON: std::ops::RangeInclusive<f64> = 1e-12..=1e-2;

/// Keys of the family that have no influence on inference.
const IGNORED: &[&str] = &[
    "ep_size",
    "seq_aux",
    "aux_loss_alpha",
    "pretraining_tp",
    "initializer_range",
    "attention_dropout",
    "output_router_logits",
    "head_dim",
    "qk_head_dim",
    "moe_router_dtype",
    "n_group",
    "topk_group",
    // Router keys of a model whose experts are null.
    "scoring_func",
    "topk_method",
    "norm_topk_prob",
    "routed_scaling_factor",
    "n_shared_experts",
    "moe_intermediate_size",
];

/// What the Python library writes into every file.
pub(crate) const BOOKKEEPING: &[&str] = &[
    "architectures",
    "model_type",
    "auto_map",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "use_cache",
    "pad_token_id",
    "unk_token_id",
    "sep_token_id",
    "tokenizer_class",
    "name_or_path",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "use_return_dict",
    "is_encoder_decoder",
    "is_decoder",
    "add_cross_attention",
    "cross_attention_hidden_size",
    "tie_encoder_decoder",
    "chunk_size_feed_forward",
    "problem_type",
    "id2label",
    "label2id",
    "finetuning_task",
    "task_specific_params",
    "torchscript",
    "pruned_heads",
    "prefix",
    "decoder_start_token_id",
    "begin_suppress_tokens",
    "suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "bad_words_ids",
    "exponential_decay_length_penalty",
    "num_beams",
    "num_beam_groups",
    "num_return_sequences",
    "diversity_penalty",
    "length_penalty",
    "repetition_penalty",
    "encoder_no_repeat_ngram_size",
    "no_repeat_ngram_size",
    "remove_invalid_values",
    "early_stopping",
    "do_sample",
    "max_length",
    "min_length",
    "output_scores",
    "return_dict_in_generate",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "tf_legacy_loss",
    "use_bfloat16",
];

/// Parts of Kimi-K2.5 that text-only use leaves out.
const MULTIMODAL: &[&str] = &[
    "vision_config",
    "media_placeholder_token_id",
    "ignore_index",
    "use_unified_vision_chunk",
    "video_placeholder",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
];
