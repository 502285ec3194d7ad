//! Configurations of tiny models that have every part of a real one.

use serde_json::{Map, Value, json};

/// A tiny target model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TinyModel {
    /// As DeepSeek-V3: compressed queries, groups of experts, YaRN.
    A,
    /// As Moonlight: direct queries, two shared experts, no YaRN.
    B,
    /// As Kimi-K2, with its head dimensions.
    C,
    /// As DeepSeek-V2-Lite: softmax router without bias.
    D,
    /// A with FP8 blocks.
    AFp8,
    /// C with INT4 experts.
    CInt4,
}

/// A tiny EAGLE-3 draft of [`TinyModel::A`]. It reads the residual streams that enter layers 1, 2
/// and 3, which a draft's file cannot express; name these capture points when loading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TinyDraft {
    /// Grouped-query attention.
    Llama,
    /// Multi-head latent attention.
    Mla,
}

impl TinyModel {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::A, Self::B, Self::C, Self::D, Self::AFp8, Self::CInt4];

    /// Its `config.json`.
    pub fn config(self) -> Value {
        let changes = match self {
            Self::A => json!({}),
            Self::AFp8 => json!({ "quantization_config": fp8_quantization() }),
            Self::B => json!({
                "vocab_size": 1024, "moe_intermediate_size": 256, "num_attention_heads": 8,
                "num_key_value_heads": 8, "n_shared_experts": 2, "routed_scaling_factor": 2.446,
                "q_lora_rank": null, "n_group": 1, "topk_group": 1,
                "max_position_embeddings": 8192, "rope_theta": 50000.0, "rope_scaling": null,
            }),
            Self::C => kimi_changes(),
            Self::CInt4 => {
                let mut changes = kimi_changes();
                changes["quantization_config"] = int4_quantization();
                changes
            }
            Self::D => json!({
                "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
                "q_lora_rank": null, "n_shared_experts": 2, "n_group": 1, "topk_group": 1,
                "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": false,
                "routed_scaling_factor": 1.0, "rope_scaling": yarn(40.0, 0.707),
            }),
        };
        merged(base(), changes)
    }
}

impl TinyDraft {
    /// Its `config.json`.
    pub fn config(self) -> Value {
        let common = json!({
            "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4,
            "num_hidden_layers": 1, "hidden_act": "silu", "vocab_size": 512,
            "draft_vocab_size": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "max_position_embeddings": 163840, "tie_word_embeddings": false,
        });
        let kind = match self {
            Self::Llama => json!({
                "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
                "num_key_value_heads": 2, "head_dim": 64,
            }),
            Self::Mla => json!({
                "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2",
                "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 64,
                "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
                "rope_scaling": yarn(40.0, 1.0),
            }),
        };
        merged(common, kind)
    }

    /// What the names of its tensors are prefixed with before they are hashed, so that the weights
    /// differ from the target's.
    pub(super) fn prefix(self) -> &'static str {
        match self {
            Self::Llama => "draft.",
            Self::Mla => "draft_mla.",
        }
    }
}

/// [`TinyModel::CInt4`] in the wrapper of Kimi-K2.5.
pub(super) fn kimi_k25() -> Value {
    let changes = json!({ "model_type": "kimi_k2" });
    json!({
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "media_placeholder_token_id": 1023,
        "pad_token_id": 1022,
        "quantization_config": int4_quantization(),
        "text_config": merged(TinyModel::CInt4.config(), changes),
        "vision_config": { "hidden_size": 8, "patch_size": 2 },
    })
}

fn base() -> Value {
    json!({
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512,
        "moe_intermediate_size": 128, "num_hidden_layers": 4, "num_nextn_predict_layers": 0,
        "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 1,
        "n_routed_experts": 16, "routed_scaling_factor": 2.5, "kv_lora_rank": 64,
        "q_lora_rank": 96, "qk_rope_head_dim": 32, "v_head_dim": 64, "qk_nope_head_dim": 64,
        "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "norm_topk_prob": true, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "hidden_act": "silu", "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6, "bos_token_id": 0, "eos_token_id": 1,
        "tie_word_embeddings": false, "attention_bias": false, "rope_interleave": true,
        "rope_theta": 10000.0, "rope_scaling": yarn(40.0, 1.0),
    })
}

fn kimi_changes() -> Value {
    json!({
        "vocab_size": 1024, "moe_intermediate_size": 256, "num_attention_heads": 8,
        "num_key_value_heads": 8, "routed_scaling_factor": 2.827, "kv_lora_rank": 512,
        "q_lora_rank": 192, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "n_group": 1, "topk_group": 1, "max_position_embeddings": 262144,
        "rope_theta": 50000.0, "rope_scaling": yarn(64.0, 1.0),
    })
}

fn yarn(factor: f64, mscale: f64) -> Value {
    json!({
        "type": "yarn", "rope_type": "yarn", "factor": factor,
        "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": mscale, "mscale_all_dim": mscale,
    })
}

fn fp8_quantization() -> Value {
    json!({
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    })
}

fn int4_quantization() -> Value {
    json!({
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": { "group_0": {
            "targets": ["Linear"], "input_activations": null, "output_activations": null,
            "weights": {
                "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32,
                "symmetric": true, "dynamic": false, "actorder": null,
            },
        } },
        "ignore": [
            "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        ],
        "kv_cache_scheme": null,
    })
}

fn merged(base: Value, changes: Value) -> Value {
    let object = |value| match value {
        Value::Object(map) => map,
        _ => Map::new(),
    };
    let mut map = object(base);
    map.extend(object(changes));
    Value::Object(map)
}
