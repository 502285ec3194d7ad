//! `config.json` of targets and drafts, and `generation_config.json`.

use paceline_model::config::ModelConfig;
use paceline_model::eagle3::config::DraftConfig;
use paceline_model::shard::Parallel;
use paceline_model::stop::stop_ids;
use paceline_model::synthetic::{TinyDraft, TinyModel};
use paceline_model::weights::Source;
use paceline_model::weights::layout::{draft_modules, model_modules, model_modules_count};
use serde_json::{Value, json};

use crate::harness::{check_message, run};
use crate::{json, published};

const WORDS: &[&str] = &[
    "yarn",
    "deepseek_v2",
    "deepseek_v3",
    "kimi_k25",
    "sigmoid",
    "softmax",
    "greedy",
    "noaux_tc",
    "group_limited_greedy",
    "fp8",
    "compressed-tensors",
    "rope_parameters",
    "rope_scaling",
    "text_config",
    "Eagle3DeepseekV2ForCausalLM",
    "eagle_config",
];

fn parsed(source: &Source) -> Value {
    serde_json::from_str(&source.config().unwrap()).unwrap()
}

#[test]
fn target_config() {
    let mut files = vec![
        parsed(&Source::DEMO),
        published::deepseek_v3(),
        published::kimi_k2_thinking(),
        published::kimi_k25(),
        published::moonlight(),
        published::deepseek_v2_lite(),
    ];
    files.extend([TinyModel::A, TinyModel::D, TinyModel::CInt4].map(TinyModel::config));
    run("target_config", 50_000, |random| {
        let file = random.below(files.len());
        let text = json::mutate(random, &files[file], WORDS);
        let config = match ModelConfig::from_json(&text) {
            Ok(config) => config,
            Err(error) => return check_message(&error),
        };
        // Whatever is accepted has numbers to go on with.
        let frequencies = config.rope.frequencies(config.qk_rope_head_dim);
        assert!(frequencies.iter().all(|frequency| frequency.is_finite()), "{text}");
        assert!(config.softmax_scale().is_finite() && config.rope.attention_factor().is_finite());
        for tensor in [1, 2, 3, 8, 64] {
            let parallel = Parallel { tensor, rank: tensor - 1, expert_parallel: tensor == 2 };
            if let Err(error) = parallel.check(&config) {
                check_message(&error);
            }
        }
        if model_modules_count(&config) < 1000 {
            assert!(model_modules(&config).len() as u64 > model_modules_count(&config));
        }
    });
}

#[test]
fn draft_config() {
    let target = Source::DEMO.model_config().unwrap();
    let mut files = vec![parsed(&Source::DEMO_DRAFT)];
    files.extend([TinyDraft::Llama, TinyDraft::Mla].map(TinyDraft::config));
    run("draft_config", 50_000, |random| {
        let file = random.below(files.len());
        let text = json::mutate(random, &files[file], WORDS);
        let config = match DraftConfig::from_json(&text) {
            Ok(config) => config,
            Err(error) => return check_message(&error),
        };
        assert!(config.softmax_scale().is_finite(), "{text}");
        for layers in [1, 8, 61] {
            if let Err(error) = config.capture_points(layers, None) {
                check_message(&error);
            }
        }
        if let Err(error) = config.check_target(&target) {
            check_message(&error);
        }
        assert!(!draft_modules(&config).is_empty());
    });
}

#[test]
fn generation_config() {
    let target = Source::DEMO.model_config().unwrap();
    let files = [
        serde_json::from_str(&Source::DEMO.text("generation_config.json").unwrap().unwrap()),
        Ok(json!({"eos_token_id": 7, "bos_token_id": [0, 1], "max_length": 20})),
    ]
    .map(Result::unwrap);
    run("generation_config", 100_000, |random| {
        let file = random.below(files.len());
        let text = json::mutate(random, &files[file], WORDS);
        match stop_ids(&target, Some(&text)) {
            Ok(ids) => assert!(ids.iter().all(|&id| (id as usize) < target.vocabulary)),
            Err(error) => check_message(&error),
        }
    });
}
