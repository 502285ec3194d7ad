//! Configurations of EAGLE-3 drafts.

use paceline_model::ModelError;
use paceline_model::config::ModelConfig;
use paceline_model::eagle3::config::{DraftConfig, DraftKind};
use serde_json::{Value, json};

use crate::published::{deepseek_v3, kimi_k25};
use crate::with;

/// A published training configuration for DeepSeek-V3 (SpecForge).
fn llama() -> Value {
    json!({
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "attention_bias": false,
        "bos_token_id": 0,
        "draft_vocab_size": 32000,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 29, 57],
            "use_aux_hidden_state": true
        },
        "eos_token_id": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 40960,
        "max_position_embeddings": 163840,
        "num_attention_heads": 56,
        "num_hidden_layers": 1,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_scaling": null,
        "tie_word_embeddings": false,
        "torch_dtype": "float16",
        "vocab_size": 129280
    })
}

/// A published training configuration for Kimi-K2.5 (TorchSpec, latent attention).
fn latent() -> Value {
    let target = kimi_k25()["text_config"].clone();
    let mut scaling = target["rope_scaling"].clone();
    scaling["beta_fast"] = json!(1);
    let changes = json!({
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "draft_vocab_size": 163840,
        "eagle_aux_hidden_state_layer_ids": [1, 29, 57],
        "num_hidden_layers": 1,
        "rope_scaling": scaling
    });
    with(&target, changes)
}

fn read(config: &Value) -> DraftConfig {
    DraftConfig::from_json(&config.to_string()).unwrap()
}

#[test]
fn reads_both_attention_kinds() {
    let draft = read(&llama());
    assert_eq!(draft.kind, DraftKind::Llama { kv_heads: 8, head_dim: 128 });
    assert_eq!((draft.hidden, draft.heads, draft.intermediate), (7168, 56, 40_960));
    assert_eq!((draft.vocabulary, draft.draft_vocabulary), (129_280, 32_000));
    assert_eq!((draft.target_hidden, draft.captured_states), (7168, 3));
    assert!(!draft.rope.interleaved && draft.rope.yarn.is_none());
    assert!(!draft.fc_norm && !draft.norm_output && !draft.norm_before_fc);
    assert!(!draft.norm_before_residual && !draft.fc_bias);
    assert_eq!(draft.warnings, Vec::<String>::new());

    let draft = read(&latent());
    let DraftKind::Mla { q_lora_rank, kv_lora_rank, v_head_dim, .. } = draft.kind else {
        panic!("{:?}", draft.kind);
    };
    assert_eq!((q_lora_rank, kv_lora_rank, v_head_dim), (Some(1536), 512, 128));
    assert!(draft.rope.interleaved);
    assert_eq!(draft.rope.theta, 50_000.0);
    assert_eq!(draft.warnings, Vec::<String>::new());
}

#[test]
fn absent_keys_have_their_defaults() {
    let sparse = with(&llama(), json!({"draft_vocab_size": null, "head_dim": null}));
    let draft = read(&sparse);
    assert_eq!(draft.draft_vocabulary, 129_280);
    assert_eq!(draft.kind, DraftKind::Llama { kv_heads: 8, head_dim: 128 });
    let draft = read(&with(&llama(), json!({"num_key_value_heads": null, "architectures": null})));
    assert_eq!(draft.kind, DraftKind::Llama { kv_heads: 56, head_dim: 128 });
    let toggled = json!({"fc_norm": true, "norm_output": true, "norm_before_residual": true});
    let draft = read(&with(&llama(), toggled.clone()));
    assert!(draft.fc_norm && draft.norm_output && draft.norm_before_residual);
    let inner = with(&llama()["eagle_config"], toggled);
    let draft = read(&with(&llama(), json!({"eagle_config": inner})));
    assert!(draft.fc_norm && draft.norm_output && draft.norm_before_residual);
}

/// The Llama kind is not scaled by the magnitude of YaRN, the latent kind is.
#[test]
fn scales_the_scores_by_kind() {
    let yarn = kimi_k25()["text_config"]["rope_scaling"].clone();
    let extended = read(&with(&llama(), json!({"rope_scaling": yarn, "rope_theta": 50000})));
    assert!((extended.softmax_scale() - 128f32.powf(-0.5)).abs() < 1e-9);
    assert_eq!(extended.rope.attention_factor(), 1.0);
    assert!((f64::from(read(&latent()).softmax_scale()) - 0.14467963).abs() < 1e-8);
}

#[test]
fn capture_points_follow_the_layer_ids() {
    let draft = read(&llama());
    assert_eq!(draft.capture_points(61, None).unwrap(), [2, 30, 58]);
    assert_eq!(draft.capture_points(61, Some(&[0, 5, 61])).unwrap(), [0, 5, 61]);
    let ids = |ids: Value| {
        let eagle = json!({"eagle_aux_hidden_state_layer_ids": ids});
        read(&with(&llama(), json!({"eagle_config": eagle})))
    };
    assert_eq!(ids(json!([2, 30, 58])).capture_points(61, None).unwrap(), [2, 30, 58]);
    assert_eq!(ids(json!([0, 30, 61])).capture_points(61, None).unwrap(), [0, 30, 61]);
    let silent = read(&with(&llama(), json!({"eagle_config": null})));
    assert_eq!(silent.capture_points(61, None).unwrap(), [2, 30, 58]);
    assert_eq!(silent.capture_points(27, None).unwrap(), [2, 13, 24]);
    assert!(silent.capture_points(4, None).unwrap_err().to_string().contains("ascend"));
    assert!(draft.capture_points(57, None).unwrap_err().to_string().contains("beyond"));
    assert!(draft.capture_points(61, Some(&[1, 2])).unwrap_err().to_string().contains("three"));
    assert!(matches!(
        draft.capture_points(61, Some(&[3, 3, 4])),
        Err(ModelError::CapturePoints { layers: 61, .. })
    ));

    let path = crate::demo_dir().join("../stories-moe-eagle3/config.json");
    let demo = DraftConfig::from_file(path).unwrap();
    let expected = &crate::reference("stories-moe.json")["capture_points"];
    assert_eq!(json!(demo.capture_points(8, None).unwrap()), *expected);
    assert_eq!(demo.kind, DraftKind::Llama { kv_heads: 4, head_dim: 32 });
    assert_eq!(demo.draft_vocabulary, 2048);
}

#[test]
fn fits_only_its_target() {
    let target = |config: &Value| ModelConfig::from_json(&config.to_string()).unwrap();
    read(&llama()).check_target(&target(&deepseek_v3())).unwrap();
    read(&latent()).check_target(&target(&kimi_k25())).unwrap();
    let error = read(&llama()).check_target(&target(&kimi_k25())).unwrap_err().to_string();
    assert!(error.contains("`vocab_size` is 129280"), "{error}");
    let narrow = read(&with(&llama(), json!({"target_hidden_size": 2048})));
    let error = narrow.check_target(&target(&deepseek_v3())).unwrap_err().to_string();
    assert!(error.contains("`target_hidden_size` is 2048"), "{error}");
}

#[test]
fn refuses_what_it_does_not_support() {
    for (changes, expected) in [
        (json!({"architectures": ["LlamaForCausalLM"]}), "`architectures`"),
        (json!({"architectures": []}), "`architectures`"),
        (json!({"num_hidden_layers": 2}), "`num_hidden_layers` is 2"),
        (json!({"num_aux_hidden_states": 1}), "`num_aux_hidden_states` is 1"),
        (json!({"attention_bias": true}), "`attention_bias` is true"),
        (json!({"mlp_bias": true}), "`mlp_bias` is true"),
        (json!({"hidden_act": "relu"}), "`hidden_act` is \"relu\""),
        (json!({"num_key_value_heads": 9}), "`num_key_value_heads` is 9"),
        (json!({"head_dim": 127}), "`head_dim` is 127"),
        (json!({"head_dim": null, "num_attention_heads": 48}), "`head_dim` is missing"),
        (json!({"draft_vocab_size": 129281}), "`draft_vocab_size` is 129281"),
        (json!({"fc_norm": true, "norm_before_fc": true}), "`norm_before_fc` is true"),
        (json!({"fc_norm": "yes"}), "`fc_norm` is \"yes\""),
        (
            json!({"eagle_config": {"use_aux_hidden_state": false}}),
            "use_aux_hidden_state` is false",
        ),
        (json!({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}), "three layer ids"),
        (json!({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}), "three layer ids"),
        (json!({"rope_scaling": {"rope_type": "llama3", "factor": 8}}), "`rope_scaling.rope_type`"),
    ] {
        let text = with(&llama(), changes.clone()).to_string();
        let refused = DraftConfig::from_json(&text).unwrap_err().to_string();
        assert!(refused.contains(expected), "{changes}: {refused}");
    }
    assert!(matches!(DraftConfig::from_json("{"), Err(ModelError::Json { .. })));
}
