//! Configurations of targets.

use paceline_model::ModelError;
use paceline_model::config::{Family, ModelConfig, Quantization, Scoring, Selection};
use paceline_model::shard::Parallel;
use paceline_model::stop::stop_ids;
use paceline_model::weights::Source;
use serde_json::{Value, json};

use crate::published::*;
use crate::with;

fn read(config: &Value) -> ModelConfig {
    ModelConfig::from_json(&config.to_string()).unwrap()
}

/// The key, the value and the supported values that a refusal names.
fn refusal(config: &Value) -> String {
    match ModelConfig::from_json(&config.to_string()) {
        Ok(config) => panic!("accepted {config:?}"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn reads_the_published_configurations() {
    let int4 = Quantization::Int4PackQuantized { group_size: 32 };
    let fp8 = Quantization::Fp8Block { block: [128, 128] };
    let rows = [
        (deepseek_v3(), Family::DeepseekV3, fp8, 163_840, 1e-6, Some(1536)),
        (kimi_k2_instruct(), Family::KimiK2, fp8, 131_072, 1e-6, Some(1536)),
        (kimi_k2_0905(), Family::KimiK2, fp8, 262_144, 1e-6, Some(1536)),
        (kimi_k2_thinking(), Family::KimiK2, int4, 262_144, 1e-5, Some(1536)),
        (kimi_k25(), Family::KimiK25, int4, 262_144, 1e-5, Some(1536)),
        (moonlight(), Family::DeepseekV3, Quantization::None, 8192, 1e-5, None),
        (deepseek_v2_lite(), Family::DeepseekV2, Quantization::None, 163_840, 1e-6, None),
    ];
    for (json, family, quantization, positions, eps, q_lora_rank) in rows {
        let config = read(&json);
        assert_eq!(config.family, family);
        assert_eq!(config.quantization, quantization, "{family:?}");
        assert_eq!(config.positions_max, positions);
        assert_eq!(config.rms_norm_eps, eps);
        assert_eq!(config.inner_norm_eps, 1e-6);
        assert_eq!(config.q_lora_rank, q_lora_rank);
        assert_eq!(config.latent_width(), 576);
        assert_eq!(config.query_head_dim(), 192);
        assert!(config.rope.interleaved && !config.tied_embeddings);
        assert_eq!(config.warnings, Vec::<String>::new(), "{family:?}");
    }
}

#[test]
fn reads_the_experts() {
    let moe = read(&deepseek_v3()).moe.unwrap();
    assert_eq!((moe.experts, moe.experts_per_token, moe.shared_experts), (256, 8, 1));
    assert_eq!((moe.groups, moe.groups_per_token, moe.intermediate), (8, 4, 2048));
    assert_eq!((moe.scoring, moe.selection), (Scoring::Sigmoid, Selection::NoAuxTc));
    assert!(moe.normalize_weights);
    assert_eq!(moe.scaling_factor, 2.5);
    let moe = read(&kimi_k25()).moe.unwrap();
    assert_eq!((moe.experts, moe.groups, moe.groups_per_token), (384, 1, 1));
    assert_eq!(moe.scaling_factor, 2.827);
    let moe = read(&deepseek_v2_lite()).moe.unwrap();
    assert_eq!((moe.scoring, moe.selection), (Scoring::Softmax, Selection::Greedy));
    assert_eq!((moe.shared_experts, moe.experts_per_token), (2, 6));
    assert!(!moe.normalize_weights);
    assert_eq!(moe.scaling_factor, 1.0);
    // Without the keys, the family decides.
    let silent = with(&deepseek_v2_lite(), json!({"scoring_func": null, "topk_method": null}));
    assert_eq!(read(&silent).moe.unwrap().scoring, Scoring::Softmax);
    let silent = with(&deepseek_v3(), json!({"scoring_func": null, "topk_method": null}));
    assert_eq!(read(&silent).moe.unwrap().selection, Selection::NoAuxTc);
}

#[test]
fn knows_which_layers_have_experts() {
    let experts = |config: &Value| -> Vec<usize> {
        let config = read(config);
        (0..config.layers).filter(|&layer| config.is_moe_layer(layer)).collect()
    };
    assert_eq!(experts(&deepseek_v3()), (3..=60).collect::<Vec<_>>());
    assert_eq!(experts(&kimi_k25()), (1..=60).collect::<Vec<_>>());
    assert_eq!(experts(&moonlight()), (1..=26).collect::<Vec<_>>());
    let sparse = with(&deepseek_v3(), json!({"moe_layer_freq": 20}));
    assert_eq!(experts(&sparse), [20, 40, 60]);
    let mut dense = with(&deepseek_v3(), json!({"first_k_dense_replace": null}));
    dense["n_routed_experts"] = Value::Null;
    assert_eq!(experts(&dense), Vec::<usize>::new());
}

/// Values of the table in the rotary section of the specification.
#[test]
fn derives_the_rotary_numbers() {
    let rows = [
        (deepseek_v3(), 10.472241, 22.513441, 10.0, 23.0, 1.36888795, 1.87385421, 0.13523378),
        (kimi_k2_instruct(), 19.164575, 19.164575, 19.0, 20.0, 1.34657359, 1.81326043, 0.13086080),
        (kimi_k2_0905(), 19.164575, 19.164575, 19.0, 20.0, 1.41588831, 2.00473970, 0.14467963),
        (kimi_k2_thinking(), 19.164575, 19.164575, 19.0, 20.0, 1.41588831, 2.00473970, 0.14467963),
        (kimi_k25(), 8.914499, 19.164575, 8.0, 20.0, 1.41588831, 2.00473970, 0.14467963),
        (deepseek_v2_lite(), 10.472241, 22.513441, 10.0, 23.0, 1.26080378, 1.58962617, 0.11472139),
    ];
    for (json, fast, slow, low, high, g, g2, scale) in rows {
        let config = read(&json);
        let (theta, yarn) = (config.rope.theta, config.rope.yarn.clone().unwrap());
        assert!((yarn.correction(yarn.beta_fast, theta, 64) - fast).abs() < 1e-6);
        assert!((yarn.correction(yarn.beta_slow, theta, 64) - slow).abs() < 1e-6);
        assert_eq!(yarn.correction_range(theta, 64), (low, high));
        assert!((yarn.magnitude(yarn.mscale_all_dim) - g).abs() < 1e-8);
        assert!((f64::from(config.rope.softmax_factor()) - g2).abs() < 1e-7);
        assert!((f64::from(config.softmax_scale()) - scale).abs() < 1e-8, "{json}");
        assert_eq!(config.rope.attention_factor(), 1.0);
    }
    let config = read(&moonlight());
    assert_eq!(config.rope.yarn, None);
    assert!((f64::from(config.softmax_scale()) - 0.07216878).abs() < 1e-8);
}

#[test]
fn rotary_frequencies_follow_the_formula() {
    let plain = read(&moonlight()).rope.frequencies(64);
    assert_eq!((plain.len(), plain[0]), (32, 1.0));
    assert!((plain[16] - 50_000f32.powf(-0.5)).abs() < 1e-9);
    let rope = read(&deepseek_v3()).rope;
    let extended = rope.frequencies(64);
    let exact = |i: f64| 10_000f64.powf(-2.0 * i / 64.0);
    // Pairs up to 10 are kept, those from 23 divided by 40, and pair 15 is at 5/13 of the way.
    for (i, frequency) in extended.iter().enumerate() {
        let divisor = match i {
            0..=10 => 1.0,
            23.. => 40.0,
            _ => continue,
        };
        assert!((f64::from(*frequency) / exact(i as f64) * divisor - 1.0).abs() < 1e-6);
    }
    let mixed = exact(15.0) * (8.0 / 13.0) + exact(15.0) / 40.0 * (5.0 / 13.0);
    assert!((f64::from(extended[15]) / mixed - 1.0).abs() < 1e-6);
}

#[test]
fn attention_factor_follows_the_magnitudes() {
    let factor = |changes: Value| {
        let mut config = deepseek_v3();
        config["rope_scaling"] = with(&config["rope_scaling"], changes);
        f64::from(read(&config).rope.attention_factor())
    };
    let g = |m: f64| 0.1 * m * 40f64.ln() + 1.0;
    assert!((factor(json!({"mscale": 0.707})) - g(0.707) / g(1.0)).abs() < 1e-6);
    assert!((factor(json!({"mscale": null, "mscale_all_dim": null})) - g(1.0)).abs() < 1e-6);
    assert!((factor(json!({"mscale_all_dim": 0})) - g(1.0)).abs() < 1e-6);
    assert!((factor(json!({"attention_factor": 0.75})) - 0.75).abs() < 1e-6);
    assert!((factor(json!({"factor": 1.0, "mscale_all_dim": null})) - 1.0).abs() < 1e-6);
}

#[test]
fn reads_both_forms_of_the_rotary_parameters() {
    let legacy = read(&deepseek_v3());
    let mut parameters = deepseek_v3()["rope_scaling"].clone();
    parameters = with(&parameters, json!({"type": null, "rope_type": "yarn", "rope_theta": 10000}));
    let changes = json!({"rope_scaling": null, "rope_theta": null, "rope_parameters": parameters});
    assert_eq!(read(&with(&deepseek_v3(), changes)), legacy);
    let both = with(&deepseek_v3(), json!({"rope_parameters": parameters}));
    assert_eq!(read(&both), legacy);
    let alias = with(&deepseek_v3()["rope_scaling"], json!({"type": "deepseek_yarn"}));
    assert_eq!(read(&with(&deepseek_v3(), json!({"rope_scaling": alias}))), legacy);

    let plain = with(&deepseek_v3(), json!({"rope_scaling": null}));
    let named = json!({"rope_type": "default", "rope_theta": 10000.0});
    let named = with(&plain, json!({"rope_parameters": named, "rope_theta": null}));
    assert_eq!(read(&named).rope, read(&plain).rope);
    assert_eq!(read(&named).rope.yarn, None);
    let untyped = with(&deepseek_v3()["rope_scaling"], json!({"type": null}));
    assert_eq!(read(&with(&deepseek_v3(), json!({"rope_scaling": untyped}))).rope.yarn, None);
    let split = with(&deepseek_v3(), json!({"rope_interleave": false}));
    assert!(!read(&split).rope.interleaved);

    let other = with(&parameters, json!({"factor": 8}));
    let refused = refusal(&with(&deepseek_v3(), json!({"rope_parameters": other})));
    assert!(refused.contains("`rope_scaling`"), "{refused}");
    let other = with(&parameters, json!({"rope_theta": 5}));
    let refused = refusal(&with(&deepseek_v3(), json!({"rope_parameters": other})));
    assert!(refused.contains("`rope_parameters.rope_theta` is 5"), "{refused}");
}

#[test]
fn reads_the_tiny_and_the_demo_configurations() {
    let tiny = crate::reference("tiny.json");
    for name in ["A", "B", "C", "D", "A_fp8", "C_int4"] {
        let config = read(&tiny["models"][name]["config"]);
        assert_eq!(config.layers, 4, "{name}");
        assert_eq!(config.moe.clone().unwrap().experts, 16);
        assert_eq!(config.family == Family::DeepseekV2, name == "D");
        assert_eq!(config.warnings, Vec::<String>::new(), "{name}");
    }
    let demo = ModelConfig::from_file(crate::demo_dir().join("config.json")).unwrap();
    assert_eq!((demo.vocabulary, demo.hidden, demo.layers, demo.heads), (4096, 256, 8, 8));
    assert_eq!(demo.quantization, Quantization::Int4PackQuantized { group_size: 32 });
    let reference = crate::reference("stories-moe.json");
    assert_eq!(json!(demo.capture_points_default()), reference["capture_points"]);
    assert_eq!(read(&deepseek_v3()).capture_points_default(), [2, 30, 58]);
    assert_eq!(read(&moonlight()).capture_points_default(), [2, 13, 24]);
}

#[test]
fn refuses_what_it_does_not_support() {
    let rows = [
        (json!({"model_type": "llama"}), "`model_type` is \"llama\""),
        (json!({"model_type": null}), "`model_type` is missing"),
        (json!({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}), "`architectures`"),
        (json!({"architectures": "x"}), "`architectures`"),
        (json!({"hidden_act": "gelu"}), "`hidden_act` is \"gelu\"; supported: \"silu\""),
        (json!({"attention_bias": true}), "`attention_bias` is true; supported: false"),
        (json!({"num_key_value_heads": 8}), "`num_key_value_heads` is 8"),
        (json!({"qk_rope_head_dim": 63}), "`qk_rope_head_dim` is 63; supported: an even"),
        (json!({"n_group": 7}), "`n_group` is 7; supported: a divisor"),
        (json!({"n_group": 256}), "at least two experts"),
        (json!({"topk_group": 9}), "`topk_group` is 9; supported: at most n_group = 8"),
        (json!({"topk_group": 1, "num_experts_per_tok": 33}), "`num_experts_per_tok` is 33"),
        (json!({"num_experts_per_tok": 257}), "`num_experts_per_tok` is 257"),
        (json!({"n_group": null}), "`n_group` is missing"),
        (json!({"topk_method": "greedy"}), "`topk_method` is \"greedy\""),
        (json!({"topk_method": "other"}), "`topk_method` is \"other\""),
        (json!({"scoring_func": "softmax"}), "`topk_method` is \"noaux_tc\""),
        (json!({"scoring_func": "tanh"}), "`scoring_func` is \"tanh\""),
        (json!({"first_k_dense_replace": 62}), "`first_k_dense_replace` is 62"),
        (json!({"first_k_dense_replace": null}), "`first_k_dense_replace` is missing"),
        (json!({"n_routed_experts": null}), "`n_routed_experts` is missing"),
        (json!({"q_lora_rank": null}), "`q_lora_rank` is missing"),
        (json!({"vocab_size": 0}), "`vocab_size` is 0"),
        (json!({"vocab_size": 1e30}), "`vocab_size` is 1e+30"),
        (json!({"vocab_size": u64::MAX}), "`vocab_size` is 18446744073709551615"),
        (json!({"hidden_size": -1}), "`hidden_size` is -1"),
        (json!({"hidden_size": "7168"}), "`hidden_size` is \"7168\""),
        (json!({"hidden_size": 7168.5}), "`hidden_size` is 7168.5"),
        (json!({"hidden_size": [7168]}), "`hidden_size` is [7168]"),
        (json!({"num_hidden_layers": 100000}), "`num_hidden_layers` is 100000"),
        (json!({"eos_token_id": 129280}), "`eos_token_id` is 129280"),
        (json!({"eos_token_id": [1, "x"]}), "`eos_token_id` is [1,\"x\"]"),
        (json!({"rms_norm_eps": 0}), "`rms_norm_eps` is 0"),
        (json!({"rope_theta": 1.0}), "`rope_theta` is 1.0"),
        (json!({"rope_scaling": "yarn"}), "`rope_scaling` is \"yarn\""),
        (json!({"tie_word_embeddings": 1}), "`tie_word_embeddings` is 1"),
        (json!({"routed_scaling_factor": 1e9}), "`routed_scaling_factor`"),
    ];
    for (changes, expected) in rows {
        let refused = refusal(&with(&deepseek_v3(), changes.clone()));
        assert!(refused.contains(expected), "{changes}: {refused}");
    }
    for (changes, expected) in [
        (json!({"norm_topk_prob": true}), "`norm_topk_prob` is true"),
        (json!({"rope_interleave": false}), "`rope_interleave` is false"),
        (json!({"topk_method": "noaux_tc"}), "`topk_method` is \"noaux_tc\""),
        (json!({"hidden_size": 2056}), "`hidden_size` is 2056; supported: a multiple"),
    ] {
        let refused = refusal(&with(&deepseek_v2_lite(), changes.clone()));
        assert!(refused.contains(expected), "{changes}: {refused}");
    }
}

#[test]
fn refuses_rotary_parameters_that_it_does_not_know() {
    for (changes, expected) in [
        (json!({"type": "linear"}), "`rope_scaling.type` is \"linear\""),
        (json!({"rope_type": "default"}), "`rope_scaling.type` is \"yarn\""),
        (json!({"factor": null}), "`rope_scaling.factor` is missing"),
        (json!({"factor": 0.5}), "`rope_scaling.factor` is 0.5"),
        (json!({"original_max_position_embeddings": null}), "original_max_position_embeddings"),
        (json!({"beta_fast": 0.5}), "`rope_scaling.beta_fast` is 0.5"),
        (json!({"truncate": false}), "`rope_scaling.truncate` is false"),
        (json!({"short_factor": [1]}), "`rope_scaling.short_factor`"),
        (json!({"partial_rotary_factor": 0.5}), "`rope_scaling.partial_rotary_factor` is 0.5"),
    ] {
        let scaling = with(&deepseek_v3()["rope_scaling"], changes.clone());
        let refused = refusal(&with(&deepseek_v3(), json!({"rope_scaling": scaling})));
        assert!(refused.contains(expected), "{changes}: {refused}");
    }
}

#[test]
fn refuses_quantisation_that_it_cannot_read() {
    let thinking = kimi_k2_thinking();
    let weights = "/quantization_config/config_groups/group_0/weights";
    for (path, key, value) in [
        (weights, "num_bits", json!(8)),
        (weights, "symmetric", json!(false)),
        (weights, "group_size", json!(48)),
        (weights, "actorder", json!("group")),
        (weights, "strategy", json!("channel")),
        (weights, "type", json!("float")),
        ("/quantization_config", "format", json!("nvfp4-pack-quantized")),
        ("/quantization_config", "quant_method", json!("gptq")),
        ("/quantization_config", "kv_cache_scheme", json!({"num_bits": 8})),
        ("/quantization_config", "config_groups", json!({})),
        ("/quantization_config/config_groups/group_0", "input_activations", json!({})),
    ] {
        let mut config = thinking.clone();
        config.pointer_mut(path).unwrap()[key] = value;
        let refused = refusal(&config);
        assert!(refused.contains(key), "{key}: {refused}");
    }
    for (key, value) in [
        ("weight_block_size", json!(null)),
        ("weight_block_size", json!([64, 64])),
        ("fmt", json!("e5m2")),
        ("activation_scheme", json!("static")),
    ] {
        let mut config = deepseek_v3();
        config["quantization_config"][key] = value;
        let refused = refusal(&config);
        assert!(refused.contains(key), "{key}: {refused}");
    }
    let odd = refusal(&with(&thinking, json!({"moe_intermediate_size": 2000})));
    assert!(odd.contains("`moe_intermediate_size` is 2000"), "{odd}");
    let mut v31 = deepseek_v3();
    v31["quantization_config"]["scale_fmt"] = json!("ue8m0");
    assert_eq!(read(&v31).quantization, read(&deepseek_v3()).quantization);
}

#[test]
fn reads_the_nested_text_part() {
    let mut outside = kimi_k25();
    outside["text_config"].as_object_mut().unwrap().remove("quantization_config");
    assert_eq!(read(&outside), read(&kimi_k25()));
    let mut inside = kimi_k25();
    inside.as_object_mut().unwrap().remove("quantization_config");
    assert_eq!(read(&inside), read(&kimi_k25()));
    let mut different = kimi_k25();
    different["quantization_config"] = deepseek_v3()["quantization_config"].clone();
    assert!(refusal(&different).contains("`quantization_config`"));
    let absent = with(&kimi_k25(), json!({"text_config": null}));
    assert!(refusal(&absent).contains("`text_config` is missing"));
    let mut wrong = kimi_k25();
    wrong["text_config"]["hidden_size"] = json!("wide");
    assert!(refusal(&wrong).contains("`text_config.hidden_size` is \"wide\""));
}

#[test]
fn shows_keys_that_it_does_not_understand() {
    let config = read(&with(&deepseek_v3(), json!({"sliding_window": 4096, "_name_or_path": "x"})));
    assert_eq!(config.warnings, ["sliding_window"]);
    let mut nested = kimi_k25();
    nested["text_config"]["index_topk"] = json!(1);
    nested["novelty"] = json!(1);
    assert_eq!(read(&nested).warnings, ["text_config.index_topk", "novelty"]);
}

#[test]
fn refuses_texts_that_are_no_configuration() {
    for text in ["", "{", "[]", "null", "{\"model_type\": }", "\u{0}", "{\"vocab_size\": 1e999}"] {
        let error = ModelConfig::from_json(text).unwrap_err();
        assert!(matches!(error, ModelError::Json { .. }), "{text}: {error}");
    }
    let deep = "[".repeat(100_000);
    assert!(matches!(ModelConfig::from_json(&deep), Err(ModelError::Json { .. })));
    assert!(matches!(ModelConfig::from_json("{}"), Err(ModelError::ConfigMissing { .. })));
    let error = ModelConfig::from_file("/nonexistent/config.json").unwrap_err();
    assert!(error.to_string().contains("/nonexistent/config.json"), "{error}");
    let long = with(&deepseek_v3(), json!({"hidden_act": "é".repeat(10_000)}));
    assert!(refusal(&long).len() < 400);
}

#[test]
fn splits_over_ranks_where_everything_divides() {
    let check = |config: &Value, tensor| {
        let parallel = Parallel { tensor, rank: 0, expert_parallel: false };
        parallel.check(&read(config)).map_err(|error| error.to_string())
    };
    for ranks in [1, 2, 4, 8, 16] {
        check(&deepseek_v3(), ranks).unwrap();
        check(&kimi_k25(), ranks).unwrap();
    }
    let refused = check(&deepseek_v3(), 3).unwrap_err();
    assert!(refused.contains('3') && refused.contains("16"), "{refused}");
    assert!(check(&deepseek_v3(), 0).is_err());
    // Moonlight splits over eight ranks in bf16: 1408 / 8 = 176, which is no multiple of 32.
    check(&moonlight(), 8).unwrap();
    let mut packed = moonlight();
    packed["quantization_config"] = kimi_k2_thinking()["quantization_config"].clone();
    let refused = check(&packed, 8).unwrap_err();
    assert!(refused.contains("1408"), "{refused}");
}

#[test]
fn collects_the_stop_ids() {
    let ids = |config: &Value, generation: Option<Value>| {
        let generation = generation.map(|value| value.to_string());
        stop_ids(&read(config), generation.as_deref())
    };
    assert_eq!(ids(&deepseek_v3(), None).unwrap(), [1]);
    assert_eq!(ids(&deepseek_v2_lite(), None).unwrap(), [100_001]);
    assert_eq!(ids(&kimi_k2_instruct(), None).unwrap(), [163_585, 163_586]);
    assert_eq!(ids(&kimi_k25(), None).unwrap(), [163_585, 163_586]);
    assert_eq!(ids(&moonlight(), None).unwrap(), [163_586]);
    let list = json!({"eos_token_id": [7, 1, 7], "max_length": 9});
    assert_eq!(ids(&deepseek_v3(), Some(list)).unwrap(), [1, 7]);
    assert_eq!(ids(&deepseek_v3(), Some(json!({"eos_token_id": 9}))).unwrap(), [1, 9]);
    assert_eq!(ids(&deepseek_v3(), Some(json!({"eos_token_id": null}))).unwrap(), [1]);
    assert!(ids(&deepseek_v3(), Some(json!({"eos_token_id": "end"}))).is_err());
    assert!(ids(&deepseek_v3(), Some(json!([]))).is_err());
    let demo = ModelConfig::from_file(crate::demo_dir().join("config.json")).unwrap();
    let found = paceline_model::stop::stop_ids_from_dir(&demo, crate::demo_dir()).unwrap();
    assert_eq!(json!(found), crate::reference("stories-moe.json")["stop_ids"]);
}

/// An error says which file it is about, with its whole path where there is one.
#[test]
fn errors_name_their_file() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, value: &Value| {
        let path = directory.path().join(name);
        std::fs::write(&path, value.to_string()).unwrap();
        path.display().to_string()
    };
    let wrong = with(&deepseek_v3(), json!({"hidden_size": "wide"}));
    assert!(refusal(&wrong).starts_with("config.json: "), "{}", refusal(&wrong));
    let source = Source::Directory(directory.path().into());
    for changes in [json!({"hidden_size": 0}), json!({"vocab_size": null})] {
        let path = write("config.json", &with(&deepseek_v3(), changes));
        for error in [
            ModelConfig::from_file(&path).unwrap_err(),
            source.model_config().unwrap_err(),
            source.draft_config().unwrap_err(),
        ] {
            assert!(error.to_string().starts_with(&format!("{path}: ")), "{error}");
        }
    }
    let config = read(&deepseek_v3());
    let path = write("generation_config.json", &json!({"eos_token_id": "end"}));
    for error in [
        source.stop_ids(&config).unwrap_err(),
        paceline_model::stop::stop_ids_from_dir(&config, directory.path()).unwrap_err(),
    ] {
        assert!(error.to_string().starts_with(&format!("{path}: ")), "{error}");
    }
}
