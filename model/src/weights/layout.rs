//! The modules that a configuration calls for: names, logical shapes, and how ranks share them.
//!
//! Pure. Invariant: this list is the only place that knows the names of a checkpoint's modules and
//! their shapes; loading, reports and synthetic checkpoints all follow it. Start reading at
//! [`model_modules`].

use crate::config::{MlaSizes, ModelConfig, MoeConfig, Selection};
use crate::eagle3::config::{DraftConfig, DraftKind};
use crate::shard::Split;

/// One module of a model: a linear layer, a table or a vector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Module {
    /// Name after normalisation. Of matrices without the suffix (`.weight`, `.weight_packed`, …),
    /// of vectors the name of the tensor.
    pub name: String,
    /// What it holds.
    pub kind: ModuleKind,
    /// How ranks share it.
    pub split: Split,
}

/// What a module holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModuleKind {
    /// A matrix `[out, in]`.
    Matrix {
        /// Outputs and inputs.
        shape: [usize; 2],
        /// Whether it may be stored as INT4 or FP8.
        quantizable: bool,
    },
    /// Floats of any type.
    Vector {
        /// Their number.
        length: usize,
    },
}

/// The modules of a target model (DeepSeek-V2 and V3, section 2.1), in the order of a pass.
pub fn model_modules(config: &ModelConfig) -> Vec<Module> {
    let table = [config.vocabulary, config.hidden];
    let mut modules = Modules::default();
    modules.plain("model.embed_tokens", table);
    for layer in 0..config.layers {
        let prefix = format!("model.layers.{layer}.");
        modules.norm(&format!("{prefix}input_layernorm"), config.hidden);
        modules.attention(&prefix, &config.mla_sizes(), config.hidden, config.hidden);
        modules.norm(&format!("{prefix}post_attention_layernorm"), config.hidden);
        match &config.moe {
            Some(moe) if config.is_moe_layer(layer) => {
                modules.experts(&format!("{prefix}mlp."), moe, config.hidden);
            }
            _ => {
                let shape = [config.intermediate, config.hidden];
                modules.mlp(&format!("{prefix}mlp."), shape, Split::Rows, Split::Columns);
            }
        }
    }
    modules.norm("model.norm", config.hidden);
    if !config.tied_embeddings {
        modules.matrix("lm_head", table, Split::Vocabulary);
    }
    modules.0
}

/// A number that [`model_modules`] lists more modules than, without listing them: those of the
/// routed experts, and one a layer.
pub fn model_modules_count(config: &ModelConfig) -> u64 {
    let experts = config.moe.as_ref().map_or(0, |moe| moe.experts);
    let layers = (0..config.layers).filter(|&layer| config.is_moe_layer(layer)).count();
    3 * (layers * experts) as u64 + config.layers as u64
}

/// The modules of a draft (EAGLE-3, section 3) that are always there, or there because its
/// configuration says so; all are plain floats. Head, embedding and vocabulary maps are not among
/// them.
pub fn draft_modules(config: &DraftConfig) -> Vec<Module> {
    let (hidden, captured) = (config.hidden, config.captured_states * config.target_hidden);
    let mut modules = Modules::default();
    if config.norm_before_fc {
        modules.norm("input_norm", captured);
    }
    for state in 0..if config.fc_norm { config.captured_states } else { 0 } {
        modules.norm(&format!("fc_norm.{state}"), config.target_hidden);
    }
    modules.plain("fc", [hidden, captured]);
    if config.fc_bias {
        modules.vector("fc.bias", hidden);
    }
    modules.norm("midlayer.input_layernorm", hidden);
    modules.norm("midlayer.hidden_norm", hidden);
    match config.mla_sizes() {
        Some(sizes) => modules.attention("midlayer.", &sizes, 2 * hidden, hidden),
        None => modules.grouped_attention(config),
    }
    modules.norm("midlayer.post_attention_layernorm", hidden);
    let mlp = [config.intermediate, hidden];
    modules.mlp("midlayer.mlp.", mlp, Split::Replicated, Split::Replicated);
    modules.norm("norm", hidden);
    for module in &mut modules.0 {
        module.split = Split::Replicated;
        if let ModuleKind::Matrix { quantizable, .. } = &mut module.kind {
            *quantizable = false;
        }
    }
    modules.0
}

#[derive(Default)]
struct Modules(Vec<Module>);

impl Modules {
    /// Multi-head latent attention from `input` to `output` wide.
    fn attention(&mut self, layer: &str, sizes: &MlaSizes, input: usize, output: usize) {
        let prefix = format!("{layer}self_attn.");
        let query = sizes.heads * (sizes.qk_nope_head_dim + sizes.qk_rope_head_dim);
        match sizes.q_lora_rank {
            Some(rank) => {
                self.matrix(&format!("{prefix}q_a_proj"), [rank, input], Split::Replicated);
                self.norm(&format!("{prefix}q_a_layernorm"), rank);
                self.matrix(&format!("{prefix}q_b_proj"), [query, rank], Split::Rows);
            }
            None => self.matrix(&format!("{prefix}q_proj"), [query, input], Split::Rows),
        }
        let latent = sizes.kv_lora_rank;
        let down = [latent + sizes.qk_rope_head_dim, input];
        self.matrix(&format!("{prefix}kv_a_proj_with_mqa"), down, Split::Replicated);
        self.norm(&format!("{prefix}kv_a_layernorm"), latent);
        let up = [sizes.heads * (sizes.qk_nope_head_dim + sizes.v_head_dim), latent];
        self.matrix(&format!("{prefix}kv_b_proj"), up, Split::Rows);
        let out = [output, sizes.heads * sizes.v_head_dim];
        self.matrix(&format!("{prefix}o_proj"), out, Split::Columns);
    }

    /// Grouped-query attention of a draft.
    fn grouped_attention(&mut self, config: &DraftConfig) {
        let DraftKind::Llama { kv_heads, head_dim } = config.kind else { return };
        let input = 2 * config.hidden;
        let output = [config.hidden, config.heads * head_dim];
        for (name, shape) in [
            ("q_proj", [config.heads * head_dim, input]),
            ("k_proj", [kv_heads * head_dim, input]),
            ("v_proj", [kv_heads * head_dim, input]),
            ("o_proj", output),
        ] {
            self.plain(&format!("midlayer.self_attn.{name}"), shape);
        }
    }

    fn experts(&mut self, prefix: &str, moe: &MoeConfig, hidden: usize) {
        self.plain(&format!("{prefix}gate"), [moe.experts, hidden]);
        if moe.selection == Selection::NoAuxTc {
            self.vector(&format!("{prefix}gate.e_score_correction_bias"), moe.experts);
        }
        let experts = moe.experts;
        for expert in 0..experts {
            let (rows, columns) =
                (Split::ExpertRows { expert, experts }, Split::ExpertColumns { expert, experts });
            let shape = [moe.intermediate, hidden];
            self.mlp(&format!("{prefix}experts.{expert}."), shape, rows, columns);
        }
        if moe.shared_experts > 0 {
            let shape = [moe.shared_experts * moe.intermediate, hidden];
            self.mlp(&format!("{prefix}shared_experts."), shape, Split::Rows, Split::Columns);
        }
    }

    fn mlp(&mut self, prefix: &str, [wide, hidden]: [usize; 2], rows: Split, columns: Split) {
        self.matrix(&format!("{prefix}gate_proj"), [wide, hidden], rows);
        self.matrix(&format!("{prefix}up_proj"), [wide, hidden], rows);
        self.matrix(&format!("{prefix}down_proj"), [hidden, wide], columns);
    }

    fn matrix(&mut self, name: &str, shape: [usize; 2], split: Split) {
        let kind = ModuleKind::Matrix { shape, quantizable: true };
        self.0.push(Module { name: name.to_owned(), kind, split });
    }

    /// A matrix that is never quantised and whole on every rank.
    fn plain(&mut self, name: &str, shape: [usize; 2]) {
        let kind = ModuleKind::Matrix { shape, quantizable: false };
        self.0.push(Module { name: name.to_owned(), kind, split: Split::Replicated });
    }

    fn norm(&mut self, name: &str, length: usize) {
        self.vector(&format!("{name}.weight"), length);
    }

    fn vector(&mut self, name: &str, length: usize) {
        let kind = ModuleKind::Vector { length };
        self.0.push(Module { name: name.to_owned(), kind, split: Split::Replicated });
    }
}

impl ModelConfig {
    pub(super) fn mla_sizes(&self) -> MlaSizes {
        MlaSizes {
            heads: self.heads,
            q_lora_rank: self.q_lora_rank,
            kv_lora_rank: self.kv_lora_rank,
            qk_nope_head_dim: self.qk_nope_head_dim,
            qk_rope_head_dim: self.qk_rope_head_dim,
            v_head_dim: self.v_head_dim,
        }
    }
}

impl DraftConfig {
    pub(super) fn mla_sizes(&self) -> Option<MlaSizes> {
        match self.kind {
            DraftKind::Llama { .. } => None,
            DraftKind::Mla {
                q_lora_rank,
                kv_lora_rank,
                qk_nope_head_dim,
                qk_rope_head_dim,
                v_head_dim,
            } => Some(MlaSizes {
                heads: self.heads,
                q_lora_rank,
                kv_lora_rank,
                qk_nope_head_dim,
                qk_rope_head_dim,
                v_head_dim,
            }),
        }
    }
}
