//! `config.json` of an EAGLE-3 draft.
//!
//! Invariant: a [`DraftConfig`] describes a draft that the forward pass can run: one layer, three
//! captured states of the target, one of two attention kinds. The target's quantisation is never
//! inherited; drafts are plain floats. Start reading at [`DraftConfig::from_json`].

use std::path::Path;

use serde_json::json;

use crate::ModelError;
use crate::config::file::{CONFIG_BYTES_MAX, directory, read_text};
use crate::config::section::{Section, parse_object};
use crate::config::{
    BOOKKEEPING, EPSILON, FILE, HIDDEN_MAX, MlaSizes, ModelConfig, POSITIONS_MAX, RopeConfig,
    VOCABULARY_MAX, WIDTH_MAX,
};

/// Everything that the weights and the forward pass of a draft depend on.
#[derive(Clone, Debug, PartialEq)]
pub struct DraftConfig {
    /// Attention of the one layer.
    pub kind: DraftKind,
    /// Width of the draft's residual stream (Hd).
    pub hidden: usize,
    /// Width of its dense MLP (Id).
    pub intermediate: usize,
    /// Query heads.
    pub heads: usize,
    /// Tokens of the target (Vt).
    pub vocabulary: usize,
    /// Tokens that the draft can propose (Vd); the target's number if the file does not say.
    pub draft_vocabulary: usize,
    /// Epsilon of all norms, those inside latent attention included.
    pub rms_norm_eps: f32,
    /// Rotary embedding: half-split pairs for the Llama kind, interleaved for the latent kind.
    pub rope: RopeConfig,
    /// Positions beyond this are not drafted.
    pub positions_max: usize,
    /// Width of the target's residual stream (Ht).
    pub target_hidden: usize,
    /// Captured residual streams that are concatenated (A), always 3.
    pub captured_states: usize,
    /// Layer ids as the file writes them; [`DraftConfig::capture_points`] interprets them.
    pub layer_ids: Option<Vec<usize>>,
    /// Whether `fc` has a bias.
    pub fc_bias: bool,
    /// Whether each captured state has its own norm before `fc` (EAGLE-3.1).
    pub fc_norm: bool,
    /// Whether the recurrent state is the normalised one (EAGLE-3.1).
    pub norm_output: bool,
    /// Whether the concatenation of the captured states is normalised as one before `fc`.
    pub norm_before_fc: bool,
    /// Whether the residual of attention is the normalised hidden state.
    pub norm_before_residual: bool,
    /// Keys that were not understood; harmless as far as is known, but worth showing.
    pub warnings: Vec<String>,
}

/// Attention of a draft layer. Its input is two hidden widths: embedding, then hidden state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftKind {
    /// Grouped-query attention, as in Llama.
    Llama {
        /// Key and value heads; divides the query heads.
        kv_heads: usize,
        /// Width of a head, even.
        head_dim: usize,
    },
    /// Multi-head latent attention, as in the target (DeepSeek-V2, section 2.1).
    Mla {
        /// Width of the compressed query; `None` if queries are projected directly.
        q_lora_rank: Option<usize>,
        /// Width of the compressed keys and values (r).
        kv_lora_rank: usize,
        /// Part of a head without position (dn).
        qk_nope_head_dim: usize,
        /// Part of a head with rotary position (dr).
        qk_rope_head_dim: usize,
        /// Width of a head's value (dv).
        v_head_dim: usize,
    },
}

impl DraftConfig {
    /// Reads the text of a draft's `config.json`.
    ///
    /// # Errors
    /// [`ModelError::Json`] for what is not a JSON object, [`ModelError::ConfigMissing`] and
    /// [`ModelError::ConfigValue`] for everything else.
    pub fn from_json(text: &str) -> Result<Self, ModelError> {
        let map = parse_object(text, FILE)?;
        Self::read(&Section::root(&map, FILE))
    }

    /// Reads a draft's `config.json`.
    ///
    /// # Errors
    /// As [`DraftConfig::from_json`], and [`ModelError::Read`].
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ModelError> {
        let path = path.as_ref();
        let text = read_text(path, CONFIG_BYTES_MAX)?;
        Self::from_json(&text).map_err(|error| error.in_directory(directory(path)))
    }

    /// Residual streams of the target that feed this draft, ascending: k is the stream that
    /// enters layer k, `target_layers` the one that leaves the last layer.
    ///
    /// `chosen` overrules the file and is taken as it is. Ids in the file that begin with 1 name
    /// layer outputs (as training tools write them) and are shifted by one; others are capture
    /// points. Without either, the points of EAGLE-3: 2, N/2 and N-3.
    ///
    /// # Errors
    /// [`ModelError::CapturePoints`] if they are not three ascending points of the target.
    pub fn capture_points(
        &self,
        target_layers: usize,
        chosen: Option<&[usize]>,
    ) -> Result<[usize; 3], ModelError> {
        let points = match (chosen, self.layer_ids.as_deref()) {
            (Some(points), _) => points.to_vec(),
            (None, Some(ids)) if ids.first() == Some(&1) => ids.iter().map(|id| id + 1).collect(),
            (None, Some(ids)) => ids.to_vec(),
            (None, None) => vec![2, target_layers / 2, target_layers.saturating_sub(3)],
        };
        let refuse = |reason| {
            let points = points.clone();
            Err(ModelError::CapturePoints { points, layers: target_layers, reason })
        };
        let Ok([low, middle, high]) = <[usize; 3]>::try_from(points.as_slice()) else {
            return refuse("there must be three");
        };
        if low >= middle || middle >= high {
            return refuse("they must ascend");
        }
        if high > target_layers {
            return refuse("the last is beyond the target");
        }
        Ok([low, middle, high])
    }

    /// Factor on the attention scores. The Llama kind is trained with head_dim^-1/2 even under
    /// YaRN; the latent kind as its target.
    pub fn softmax_scale(&self) -> f32 {
        match self.kind {
            DraftKind::Llama { head_dim, .. } => (head_dim as f64).powf(-0.5) as f32,
            DraftKind::Mla { qk_nope_head_dim, qk_rope_head_dim, .. } => {
                let width = (qk_nope_head_dim + qk_rope_head_dim) as f64;
                (width.powf(-0.5) * self.rope.softmax_factor_exact()) as f32
            }
        }
    }

    /// Checks that the draft was made for a target of these sizes.
    ///
    /// # Errors
    /// [`ModelError::ConfigValue`] with the draft's key that does not fit.
    pub fn check_target(&self, target: &ModelConfig) -> Result<(), ModelError> {
        for (key, found, expected) in [
            ("target_hidden_size", self.target_hidden, target.hidden),
            ("vocab_size", self.vocabulary, target.vocabulary),
        ] {
            if found != expected {
                return Err(ModelError::ConfigValue {
                    file: "config.json of the draft".to_owned(),
                    key: key.to_owned(),
                    found: format!("{found} in the draft"),
                    expected: format!("{expected} as in the target; use a draft made for it"),
                });
            }
        }
        Ok(())
    }

    fn read(section: &Section<'_>) -> Result<Self, ModelError> {
        // First, so that a whole model is called what it is.
        let latent = read_is_latent(section)?;
        check_fixed(section)?;
        let hidden = section.size("hidden_size", HIDDEN_MAX)?;
        let (kind, heads) = read_kind(section, latent, hidden)?;
        let interleaved = match kind {
            DraftKind::Llama { .. } => false,
            DraftKind::Mla { .. } => section.flag("rope_interleave", true)?,
        };
        let eagle = section.section("eagle_config")?;
        let toggle = |key: &str| match &eagle {
            Some(eagle) if eagle.has(key) => eagle.flag(key, false),
            _ => section.flag(key, false),
        };
        let vocabulary = section.size("vocab_size", VOCABULARY_MAX)?;
        let draft_vocabulary = section.integer("draft_vocab_size", 1..=vocabulary)?;
        let mut config = Self {
            kind,
            hidden,
            intermediate: section.size("intermediate_size", WIDTH_MAX)?,
            heads,
            vocabulary,
            draft_vocabulary: draft_vocabulary.unwrap_or(vocabulary),
            rms_norm_eps: section.number("rms_norm_eps", EPSILON)?.unwrap_or(1e-6) as f32,
            rope: RopeConfig::read(section, interleaved)?,
            positions_max: section.size("max_position_embeddings", POSITIONS_MAX)?,
            target_hidden: section.integer("target_hidden_size", 1..=HIDDEN_MAX)?.unwrap_or(hidden),
            captured_states: CAPTURED_STATES,
            layer_ids: read_layer_ids(section, eagle.as_ref())?,
            fc_bias: section.flag("bias", false)?,
            fc_norm: toggle("fc_norm")?,
            norm_output: toggle("norm_output")?,
            norm_before_fc: toggle("norm_before_fc")?,
            norm_before_residual: toggle("norm_before_residual")?,
            warnings: Vec::new(),
        };
        if config.fc_norm && config.norm_before_fc {
            return Err(section.invalid("norm_before_fc", "false together with fc_norm"));
        }
        config.warnings = section.unread(&[BOOKKEEPING, IGNORED].concat());
        config.warnings.extend(eagle.iter().flat_map(|eagle| eagle.unread(&[])));
        Ok(config)
    }
}

fn check_fixed(section: &Section<'_>) -> Result<(), ModelError> {
    section.only("hidden_act", &json!("silu"))?;
    section.only("attention_bias", &json!(false))?;
    section.only("mlp_bias", &json!(false))?;
    section.only("num_hidden_layers", &json!(1))?;
    section.only("num_aux_hidden_states", &json!(CAPTURED_STATES))
}

/// Whether the draft has latent attention.
fn read_is_latent(section: &Section<'_>) -> Result<bool, ModelError> {
    let architecture = section.value("architectures");
    let names = architecture.and_then(|names| names.as_array());
    let name = names.and_then(|names| names.first()).and_then(|name| name.as_str());
    match name {
        Some("LlamaForCausalLMEagle3" | "Eagle3LlamaForCausalLM") => Ok(false),
        Some("Eagle3DeepseekV2ForCausalLM" | "Eagle3DeepseekV3ForCausalLM") => Ok(true),
        None if architecture.is_none() => Ok(section.has("kv_lora_rank")),
        _ => {
            let expected = "LlamaForCausalLMEagle3, Eagle3LlamaForCausalLM, \
                            Eagle3DeepseekV2ForCausalLM, Eagle3DeepseekV3ForCausalLM; this is not \
                            an EAGLE-3 draft: use the draft that was trained for the target";
            Err(section.invalid("architectures", expected))
        }
    }
}

fn read_kind(
    section: &Section<'_>,
    latent: bool,
    hidden: usize,
) -> Result<(DraftKind, usize), ModelError> {
    if !latent {
        return read_llama(section, hidden);
    }
    let sizes = MlaSizes::read(section)?;
    let kind = DraftKind::Mla {
        q_lora_rank: sizes.q_lora_rank,
        kv_lora_rank: sizes.kv_lora_rank,
        qk_nope_head_dim: sizes.qk_nope_head_dim,
        qk_rope_head_dim: sizes.qk_rope_head_dim,
        v_head_dim: sizes.v_head_dim,
    };
    Ok((kind, sizes.heads))
}

fn read_llama(section: &Section<'_>, hidden: usize) -> Result<(DraftKind, usize), ModelError> {
    let heads = section.size("num_attention_heads", HEADS_MAX)?;
    let kv_heads = section.integer("num_key_value_heads", 1..=heads)?.unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        let expected = format!("a divisor of num_attention_heads = {heads}");
        return Err(section.invalid("num_key_value_heads", expected));
    }
    let head_dim = match section.integer("head_dim", 1..=HEAD_DIM_MAX)? {
        Some(head_dim) => head_dim,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => return Err(section.missing("head_dim", "the width of a head")),
    };
    if !head_dim.is_multiple_of(2) {
        return Err(section.invalid("head_dim", "an even number (pairs are rotated)"));
    }
    Ok((DraftKind::Llama { kv_heads, head_dim }, heads))
}

fn read_layer_ids<'a>(
    section: &Section<'a>,
    eagle: Option<&Section<'a>>,
) -> Result<Option<Vec<usize>>, ModelError> {
    const KEY: &str = "eagle_aux_hidden_state_layer_ids";
    if let Some(eagle) = eagle {
        // A draft of single-layer features is an EAGLE-1 or 2 head.
        eagle.only("use_aux_hidden_state", &json!(true))?;
    }
    let holder = eagle.filter(|eagle| eagle.value(KEY).is_some()).unwrap_or(section);
    let ids = holder.integers(KEY, 0..=LAYER_ID_MAX)?;
    match ids.len() {
        0 if holder.value(KEY).is_none() => Ok(None),
        CAPTURED_STATES => Ok(Some(ids)),
        _ => Err(holder.invalid(KEY, "three layer ids")),
    }
}

const CAPTURED_STATES: usize = 3;
const LAYER_ID_MAX: usize = 1 << 10;
const HEADS_MAX: usize = 1 << 12;
const HEAD_DIM_MAX: usize = 1 << 12;

/// Keys without influence on a draft.
const IGNORED: &[&str] = &[
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "initializer_range",
    "attention_dropout",
    "pretraining_tp",
    "quantization_config",
    "head_dim",
    "num_key_value_heads",
    "rope_interleave",
    "qk_head_dim",
    "target_model_type",
    "draft_model_type",
    // What a draft derived from its target's configuration still carries.
    "ep_size",
    "seq_aux",
    "aux_loss_alpha",
    "first_k_dense_replace",
    "moe_layer_freq",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "topk_method",
    "scoring_func",
    "norm_topk_prob",
    "routed_scaling_factor",
    "num_nextn_predict_layers",
];
