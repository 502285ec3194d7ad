//! Safetensors headers and the index of a sharded checkpoint, up to the weights made of them.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use paceline_model::config::ModelConfig;
use paceline_model::shard::Parallel;
use paceline_model::synthetic::{Storage, Synthetic, TinyModel};
use paceline_model::weights::{Checkpoint, DraftWeights, ModelWeights, Report, Source};
use serde_json::{Value, json};

use crate::harness::{check_message, run};
use crate::random::Random;
use crate::{bytes, json};

const WORDS: &[&str] = &[
    "F32",
    "BF16",
    "F16",
    "F8_E4M3",
    "F8_E8M0",
    "I32",
    "I64",
    "U8",
    "BOOL",
    "C64",
    "F4",
    "__metadata__",
    "data_offsets",
    "shape",
    "dtype",
    "language_model.",
    "model.layers.1.",
    "vision_tower.",
    "18446744073709551615",
    "9223372036854775808",
];

/// A model of one layer, as small as packed experts allow.
fn small() -> Synthetic {
    let mut config = TinyModel::CInt4.config();
    for (key, value) in [
        ("vocab_size", 8),
        ("hidden_size", 32),
        ("intermediate_size", 32),
        ("moe_intermediate_size", 32),
        ("num_hidden_layers", 1),
        ("first_k_dense_replace", 0),
        ("num_attention_heads", 1),
        ("num_key_value_heads", 1),
        ("n_routed_experts", 2),
        ("n_group", 1),
        ("topk_group", 1),
        ("num_experts_per_tok", 1),
        ("q_lora_rank", 32),
        ("kv_lora_rank", 32),
        ("qk_nope_head_dim", 8),
        ("qk_rope_head_dim", 8),
        ("v_head_dim", 8),
    ] {
        config[key] = json!(value);
    }
    Synthetic::of_config(config, Storage::Int4Experts).unwrap()
}

/// Header and data of a file.
fn parts(file: &[u8]) -> (Value, &[u8]) {
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&file[8..8 + length]).unwrap(), &file[8 + length..])
}

/// A file with a changed header, changed length field, changed data or all of them.
fn mutated(random: &mut Random, header: &Value, data: &[u8]) -> Vec<u8> {
    let text = match random.below(3) {
        0 => bytes::mutate_text(random, &header.to_string(), WORDS),
        1 => move_tensors(random, header).to_string(),
        _ => json::mutate(random, header, WORDS),
    };
    let mut file = (text.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(text.as_bytes());
    file.extend_from_slice(data);
    match random.below(10) {
        0 => bytes::mutate(random, &mut file, WORDS),
        1 => {
            let mut length = file[..8].to_vec();
            bytes::mutate(random, &mut length, &[]);
            file.splice(..8, length);
        }
        2 => file.truncate(random.below(file.len())),
        3 => file.extend(std::iter::repeat_n(0, 1 + random.below(100))),
        _ => {}
    }
    file
}

/// Offsets that overlap, leave gaps or lie outside, and shapes that still multiply to the size.
fn move_tensors(random: &mut Random, header: &Value) -> Value {
    let mut header = header.clone();
    let Some(map) = header.as_object_mut() else { return header };
    let others: Vec<Value> = map.values().cloned().collect();
    for _ in 0..=random.below(3) {
        let at = random.below(map.len());
        let Some(tensor) = map.values_mut().nth(at) else { continue };
        let other = random.of(&others);
        match random.below(5) {
            0 => tensor["data_offsets"] = other["data_offsets"].clone(),
            1 => tensor["shape"] = other["shape"].clone(),
            2 => *tensor = other.clone(),
            3 => {
                let shape = [json!(1u64 << random.below(64)), json!(1u64 << random.below(64))];
                tensor["shape"] = json!(shape);
            }
            _ => {
                let (begin, end) = (random.next() >> random.below(64), random.next());
                tensor["data_offsets"] = json!([begin, end >> random.below(64)]);
            }
        }
    }
    header
}

#[test]
fn safetensors_header() {
    let small = small();
    let config = ModelConfig::from_json(&small.config.to_string()).unwrap();
    let (demo_config, draft_config) =
        (Source::DEMO.model_config().unwrap(), Source::DEMO_DRAFT.draft_config().unwrap());
    let file = small.to_safetensors();
    let (header, data) = parts(&file);
    let Source::Embedded(demo_draft) = Source::DEMO_DRAFT else { unreachable!("it is embedded") };
    let (draft_header, draft_data) = parts(demo_draft.weights);
    run("safetensors_header", 20_000, |random| {
        // The real file is large, so it has its turn now and then.
        let is_draft = random.once_in(64);
        let file = match is_draft {
            true => mutated(random, &draft_header, draft_data),
            false => mutated(random, &header, data),
        };
        let checkpoint = match Checkpoint::from_shared("fuzz", Arc::new(file)) {
            Ok(checkpoint) => checkpoint,
            Err(error) => {
                assert!(error.to_string().contains("model.safetensors"), "{error}");
                return check_message(&error);
            }
        };
        let loaded = match is_draft {
            true => DraftWeights::load(&checkpoint, &draft_config).map(drop),
            false => {
                let parallel = Parallel::SINGLE;
                ModelWeights::load(&checkpoint, &config, &parallel, &mut |_, _| ()).map(drop)
            }
        };
        if let Err(error) = loaded {
            check_message(&error);
        }
        Report::of_checkpoint(&checkpoint, &config, 2, false);
        if random.once_in(16) {
            Report::of_checkpoint(&checkpoint, &demo_config, 2, true);
        }
    });
}

#[test]
fn safetensors_index() {
    let directory = tempfile::tempdir().unwrap();
    small().write(directory.path(), 3).unwrap();
    let path = directory.path().join("model.safetensors.index.json");
    let index: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let config = ModelConfig::from_file(directory.path().join("config.json")).unwrap();
    let words = [
        "weight_map",
        "metadata",
        "model-1-of-3.safetensors",
        "model-9-of-3.safetensors",
        "model.safetensors.index.json",
        "../x",
        "/etc/passwd",
        "a/b",
        ".",
        "..",
        "\u{0}",
    ];
    run("safetensors_index", 2_000, |random| {
        fs::write(&path, json::mutate(random, &index, &words)).unwrap();
        match open(directory.path(), &config) {
            Ok(()) => {}
            Err(error) => check_message(&error),
        }
    });
}

fn open(directory: &Path, config: &ModelConfig) -> Result<(), paceline_model::ModelError> {
    let checkpoint = Checkpoint::open(directory)?;
    ModelWeights::load(&checkpoint, config, &Parallel::SINGLE, &mut |_, _| ()).map(drop)
}
