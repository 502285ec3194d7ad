//! The keys of published configurations, as far as they are known.

use serde_json::{Value, json};

/// DeepSeek-V3 and R1.
pub(crate) fn deepseek_v3() -> Value {
    let text = r#"{
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "aux_loss_alpha": 0.001,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": true,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "pretraining_tp": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128]
        },
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "seq_aux": true,
        "tie_word_embeddings": false,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "use_cache": true,
        "v_head_dim": 128,
        "vocab_size": 129280
    }"#;
    let scaled = json!({"rope_scaling": yarn(40, 32, 1.0)});
    with(&serde_json::from_str(text).unwrap(), scaled)
}

/// Kimi-K2-Instruct, the first release.
pub(crate) fn kimi_k2_instruct() -> Value {
    let changes = json!({
        "bos_token_id": 163584,
        "eos_token_id": 163585,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131072,
        "model_type": "kimi_k2",
        "n_group": 1,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0,
        "rope_scaling": yarn(32, 1, 1.0),
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "topk_group": 1,
        "vocab_size": 163840
    });
    with(&deepseek_v3(), changes)
}

/// Kimi-K2-Instruct-0905.
pub(crate) fn kimi_k2_0905() -> Value {
    let changes = json!({"max_position_embeddings": 262144, "rope_scaling": yarn(64, 1, 1.0)});
    with(&kimi_k2_instruct(), changes)
}

/// Kimi-K2-Thinking.
pub(crate) fn kimi_k2_thinking() -> Value {
    let changes = json!({"rms_norm_eps": 1e-5, "quantization_config": int4()});
    with(&kimi_k2_0905(), changes)
}

/// Kimi-K2.5 with its nested text part.
pub(crate) fn kimi_k25() -> Value {
    let text = with(&kimi_k2_thinking(), json!({"rope_scaling": yarn(64, 32, 1.0)}));
    json!({
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "media_placeholder_token_id": 163605,
        "pad_token_id": 163839,
        "quantization_config": int4(),
        "text_config": text,
        "tie_word_embeddings": false,
        "vision_config": {"model_type": "kimi_k25_vision"}
    })
}

/// Moonlight-16B-A3B-Instruct.
pub(crate) fn moonlight() -> Value {
    let changes = json!({
        "eos_token_id": 163586,
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "max_position_embeddings": 8192,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "quantization_config": null,
        "rms_norm_eps": 1e-5,
        "rope_scaling": null,
        "routed_scaling_factor": 2.446
    });
    let mut config = with(&kimi_k2_instruct(), changes);
    config["q_lora_rank"] = Value::Null;
    config
}

/// DeepSeek-V2-Lite.
pub(crate) fn deepseek_v2_lite() -> Value {
    let changes = json!({
        "architectures": ["DeepseekV2ForCausalLM"],
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "intermediate_size": 10944,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v2",
        "norm_topk_prob": false,
        "num_nextn_predict_layers": null,
        "rms_norm_eps": 1e-6,
        "rope_scaling": yarn(40, 32, 0.707),
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "vocab_size": 102400
    });
    with(&moonlight(), changes)
}

/// Parameters of a YaRN extension from 4096 positions.
fn yarn(factor: u32, beta_fast: u32, mscale: f64) -> Value {
    json!({
        "beta_fast": beta_fast,
        "beta_slow": 1,
        "factor": factor,
        "mscale": mscale,
        "mscale_all_dim": mscale,
        "original_max_position_embeddings": 4096,
        "type": "yarn"
    })
}

/// Experts packed as INT4.
fn int4() -> Value {
    json!({
        "config_groups": {
            "group_0": {
                "input_activations": null,
                "output_activations": null,
                "targets": ["Linear"],
                "weights": {
                    "actorder": null,
                    "block_structure": null,
                    "dynamic": false,
                    "group_size": 32,
                    "num_bits": 4,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "strategy": "group",
                    "symmetric": true,
                    "type": "int"
                }
            }
        },
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
        "kv_cache_scheme": null,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed"
    })
}

/// The object with keys replaced; a null removes the key.
pub(crate) fn with(object: &Value, changes: Value) -> Value {
    let mut changed = object.clone();
    for (key, value) in changes.as_object().unwrap() {
        match value {
            Value::Null => changed.as_object_mut().unwrap().remove(key),
            value => changed.as_object_mut().unwrap().insert(key.clone(), value.clone()),
        };
    }
    changed
}
