//! Damaged, incomplete and foreign checkpoints are refused with messages that name what is wrong.

use std::fs;
use std::path::Path;

use paceline_kernels::DType;
use paceline_model::config::ModelConfig;
use paceline_model::eagle3::config::DraftConfig;
use paceline_model::shard::Parallel;
use paceline_model::synthetic::{Storage, Synthetic, SyntheticTensor, TinyDraft, TinyModel};
use paceline_model::weights::{Checkpoint, DraftWeights, ModelWeights, Report, Source};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Two layers, one with experts, as small as packed experts allow.
fn small_config() -> Value {
    let mut config = TinyModel::CInt4.config();
    for (key, value) in [
        ("vocab_size", 40),
        ("hidden_size", 64),
        ("intermediate_size", 64),
        ("moe_intermediate_size", 64),
        ("num_hidden_layers", 2),
        ("num_attention_heads", 2),
        ("num_key_value_heads", 2),
        ("n_routed_experts", 4),
        ("q_lora_rank", 32),
        ("kv_lora_rank", 32),
        ("qk_nope_head_dim", 16),
        ("qk_rope_head_dim", 16),
        ("v_head_dim", 16),
    ] {
        config[key] = json!(value);
    }
    config
}

/// The small model under Kimi-K2.5's names.
fn small() -> Synthetic {
    let mut synthetic = Synthetic::of_config(small_config(), Storage::Int4Experts).unwrap();
    for tensor in &mut synthetic.tensors {
        tensor.name.insert_str(0, "language_model.");
    }
    synthetic
}

fn written(synthetic: &Synthetic, shards: usize) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    synthetic.write(directory.path(), shards).unwrap();
    directory
}

fn load(directory: &Path) -> Result<ModelWeights, String> {
    let config = ModelConfig::from_file(directory.join("config.json")).unwrap();
    let checkpoint = Checkpoint::open(directory).map_err(|error| error.to_string())?;
    ModelWeights::load(&checkpoint, &config, &Parallel::SINGLE, &mut |_, _| ())
        .map_err(|error| error.to_string())
}

/// The message of loading, after a check that the report says the same.
fn refusal(synthetic: &Synthetic) -> String {
    let directory = written(synthetic, 2);
    let text = load(directory.path()).expect_err("this checkpoint is wrong");
    let report = Report::of_source(&Source::Directory(directory.path().into()), 1, false);
    assert!(!report.problems.is_empty());
    for problem in report.problems.iter().take(20) {
        assert!(text.contains(problem.as_str()), "{problem} is not in {text}");
    }
    text
}

fn open_refusal(directory: &TempDir) -> String {
    Checkpoint::open(directory.path()).expect_err("this checkpoint is wrong").to_string()
}

#[track_caller]
fn assert_says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

#[test]
fn the_small_model_itself_loads() {
    let directory = written(&small(), 2);
    load(directory.path()).unwrap();
    let report = Report::of_source(&Source::Directory(directory.path().into()), 2, true);
    assert_eq!(report.problems, Vec::<String>::new());
    assert_eq!((report.files, report.ranks.len()), (2, 2));
    assert_eq!(report.storages["int4"].modules, 12);
}

#[test]
fn every_missing_tensor_is_named() {
    let whole = small();
    for index in 0..whole.tensors.len() {
        let mut synthetic = whole.clone();
        let removed = synthetic.tensors.remove(index).name;
        assert_says(&refusal(&synthetic), &[&format!("{removed} is missing"), "problems: 1\n"]);
    }
}

#[test]
fn every_renamed_tensor_is_named_with_its_old_name() {
    let whole = small();
    for index in 0..whole.tensors.len() {
        let mut synthetic = whole.clone();
        let tensor = &mut synthetic.tensors[index];
        let old = tensor.name.clone();
        tensor.name.push_str("_x");
        let new = tensor.name.clone();
        let guess = format!("{new} is not part of this model: is it the renamed {old}?");
        assert_says(&refusal(&synthetic), &[&format!("{old} is missing"), &guess]);
    }
}

#[test]
fn every_tensor_of_a_wrong_shape_is_named() {
    let whole = small();
    for index in 0..whole.tensors.len() {
        let mut synthetic = whole.clone();
        let tensor = &mut synthetic.tensors[index];
        tensor.shape[0] *= 2;
        tensor.bytes = tensor.bytes.repeat(2);
        let found = format!("{} has shape {:?}, expected", tensor.name, tensor.shape);
        assert_says(&refusal(&synthetic), &[&found]);
    }
}

#[test]
fn every_tensor_of_a_wrong_type_is_named() {
    let whole = small();
    for index in 0..whole.tensors.len() {
        let mut synthetic = whole.clone();
        let tensor = &mut synthetic.tensors[index];
        // No module has bytes, so the width in bytes can be kept in the last dimension.
        *tensor.shape.last_mut().unwrap() *= tensor.dtype.bytes();
        tensor.dtype = DType::U8;
        let found = format!("{} has element type u8, expected", tensor.name);
        assert_says(&refusal(&synthetic), &[&found]);
    }
}

#[test]
fn packed_weights_are_checked() {
    let module = "language_model.model.layers.1.mlp.experts.3.down_proj";
    let mut synthetic = small();
    let shape = synthetic.tensor_mut(&format!("{module}.weight_shape")).unwrap();
    shape.bytes[0] = 65;
    let text = refusal(&synthetic);
    assert_says(&text, &[&format!("{module}.weight_shape says [65, 64], expected [64, 64]")]);

    // I64, as some files have it.
    let mut synthetic = small();
    let shape = synthetic.tensor_mut(&format!("{module}.weight_shape")).unwrap();
    shape.dtype = DType::I64;
    shape.bytes = [64i64, 64].into_iter().flat_map(i64::to_le_bytes).collect();
    load(written(&synthetic, 1).path()).unwrap();

    // Both forms at once.
    let mut synthetic = small();
    let name = format!("{module}.weight");
    synthetic.tensors.push(SyntheticTensor::new(
        &name,
        DType::F32,
        &[64, 64],
        vec![0; 64 * 64 * 4],
    ));
    assert_says(&refusal(&synthetic), &[&format!("{module}.weight_packed is not part")]);
}

#[test]
fn packed_rows_are_whole_groups() {
    let mut config = small_config();
    config["moe_intermediate_size"] = json!(48);
    config.as_object_mut().unwrap().remove("quantization_config");
    let mut synthetic = Synthetic::of_config(config, Storage::F32).unwrap();
    let module = "model.layers.1.mlp.experts.0.down_proj";
    synthetic.tensors.retain(|tensor| tensor.name != format!("{module}.weight"));
    for (part, dtype, shape) in [
        ("weight_packed", DType::I32, vec![64, 6]),
        ("weight_scale", DType::BF16, vec![64, 2]),
        ("weight_shape", DType::I32, vec![2]),
    ] {
        let bytes = vec![0; shape.iter().product::<usize>() * dtype.bytes()];
        let name = format!("{module}.{part}");
        synthetic.tensors.push(SyntheticTensor::new(&name, dtype, &shape, bytes));
    }
    let text = refusal(&synthetic);
    assert_says(&text, &[&format!("{module}.weight_packed packs rows of 48"), "problems: 1\n"]);
}

#[test]
fn packed_groups_are_not_cut() {
    // Without a declaration the degree looks possible until the weights are seen.
    let mut config = small_config();
    config.as_object_mut().unwrap().remove("quantization_config");
    let synthetic = Synthetic::of_config(config, Storage::Int4Experts).unwrap();
    let directory = written(&synthetic, 1);
    let config = ModelConfig::from_file(directory.path().join("config.json")).unwrap();
    let config = ModelConfig { heads: 4, qk_nope_head_dim: 8, v_head_dim: 8, ..config };
    let config = ModelConfig { qk_rope_head_dim: 8, ..config };
    let checkpoint = Checkpoint::open(directory.path()).unwrap();
    let report = Report::of_checkpoint(&checkpoint, &config, 4, false);
    let problem = report.problems.last().unwrap();
    assert_says(problem, &["experts.0.down_proj", "0..16", "groups of 32"]);
    assert!(report.ranks.is_empty());
}

#[test]
fn many_problems_are_counted() {
    let mut synthetic = small();
    synthetic.tensors.retain(|tensor| !tensor.name.contains("experts"));
    let text = load(written(&synthetic, 1).path()).unwrap_err();
    assert_says(&text, &["problems: 15\n"]);
    let mut synthetic = small();
    // Of a packed matrix without any of its parts, one is named.
    let is_part = |name: &str| name.ends_with("weight_scale") || name.ends_with("weight_shape");
    let is_gone = |name: &str| !name.contains("norm");
    let names = synthetic.tensors.iter().map(|tensor| tensor.name.as_str());
    let missing = names.filter(|name| is_gone(name) && !is_part(name)).count();
    synthetic.tensors.retain(|tensor| !is_gone(&tensor.name));
    let text = load(written(&synthetic, 1).path()).unwrap_err();
    let (more, count) = (format!("and {} more", missing - 20), format!("problems: {missing}\n"));
    assert_says(&text, &[&more, &count]);
}

/// A download that ended early, or another model's configuration.
#[test]
fn a_layer_of_which_nothing_is_there_is_one_problem() {
    let mut synthetic = small();
    let whole = synthetic.tensors.len();
    synthetic.tensors.retain(|tensor| !tensor.name.contains("layers.0."));
    let missing = whole - synthetic.tensors.len();
    let text = load(written(&synthetic, 1).path()).unwrap_err();
    let layer = format!("layer 0 is missing whole ({missing} tensors)");
    assert_says(&text, &[&layer, "problems: 1\n"]);
    // Beside a stranger each tensor is named: it may be that layer under another name.
    for tensor in &mut synthetic.tensors {
        tensor.name = tensor.name.replace("layers.1.", "blocks.1.");
    }
    let text = load(written(&synthetic, 1).path()).unwrap_err();
    assert!(!text.contains("missing whole") && text.contains("is missing"), "{text}");
}

/// Numbers that would make a list of millions of modules are refused without making it.
#[test]
fn absurd_numbers_of_modules_are_refused() {
    let directory = written(&small(), 1);
    let checkpoint = Checkpoint::open(directory.path()).unwrap();
    let config = ModelConfig::from_file(directory.path().join("config.json")).unwrap();
    let mut moe = config.moe.clone().unwrap();
    moe.experts = 8192;
    let config = ModelConfig { layers: 1024, moe: Some(moe), ..config };
    let loaded = ModelWeights::load(&checkpoint, &config, &Parallel::SINGLE, &mut |_, _| ());
    let text = loaded.unwrap_err().to_string();
    assert_says(&text, &["1024 layers with 8192 experts", "config.json"]);
    assert_eq!(Report::of_checkpoint(&checkpoint, &config, 1, false).problems, [text]);
}

#[test]
fn prediction_layers_are_skipped() {
    for declared in [0, 1] {
        let mut synthetic = small();
        synthetic.config["num_nextn_predict_layers"] = json!(declared);
        for name in ["eh_proj.weight", "enorm.weight", "mlp.experts.0.up_proj.weight"] {
            let name = format!("language_model.model.layers.2.{name}");
            let tensor = SyntheticTensor::new(&name, DType::BF16, &[64], vec![0; 128]);
            synthetic.tensors.push(tensor);
        }
        let directory = written(&synthetic, 2);
        load(directory.path()).unwrap();
        let report = Report::of_source(&Source::Directory(directory.path().into()), 1, false);
        assert_eq!((report.skipped.tensors, report.skipped.bytes), (3, 384));
    }
    // A decoder layer too many is no such layer.
    let mut synthetic = small();
    let name = "language_model.model.layers.2.input_layernorm.weight";
    synthetic.tensors.push(SyntheticTensor::new(name, DType::BF16, &[64], vec![0; 128]));
    assert_says(&refusal(&synthetic), &[&format!("{name} is not part of this model")]);
}

#[test]
fn truncated_and_padded_files_are_refused() {
    let bytes = small().to_safetensors();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    let lengths = [0, 1, 7, 8, 9, header - 1, header, header + 1, bytes.len() - 1];
    for length in lengths {
        fs::write(&path, &bytes[..length]).unwrap();
        let text = open_refusal(&directory);
        assert_says(&text, &["model.safetensors", &format!("it has {length} bytes"), "again"]);
    }
    fs::write(&path, [&bytes[..], &[0]].concat()).unwrap();
    assert_says(&open_refusal(&directory), &["after the last tensor"]);
}

#[test]
fn corrupt_headers_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    let refuse = |length: u64, header: &str, parts: &[&str]| {
        fs::write(&path, [&length.to_le_bytes(), header.as_bytes(), &[0; 64]].concat()).unwrap();
        assert_says(&open_refusal(&directory), parts);
    };
    for length in [1 << 63, u64::MAX, 100_000_001] {
        refuse(length, "{}", &[&length.to_string(), "corrupt"]);
    }
    refuse(4096, "{}", &["less than its header of 4096 bytes"]);
    let corrupt = |header: &str| {
        refuse(header.len() as u64, header, &["model.safetensors", "header cannot be read"]);
    };
    corrupt("no JSON at all");
    corrupt("[]");
    let tensor = |dtype: &str, shape: &str, begin: u64, end: u64| {
        format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}}}"#)
    };
    corrupt(&tensor("F32", "[17]", 0, 64));
    corrupt(&tensor("F32", "[16]", 4, 68));
    corrupt(&tensor("F32", "[16]", 64, 0));
    corrupt(&tensor("F32", "[4611686018427387904, 16]", 0, 64));
    corrupt(&tensor("F32", "[-1]", 0, 64));
    corrupt(&tensor("F3", "[16]", 0, 64));
    let whole = tensor("F64", "[8]", 0, 64);
    refuse(whole.len() as u64, &whole, &["tensor a", "F64"]);
    let scalar = tensor("I8", "[]", 0, 1);
    fs::write(&path, [&(scalar.len() as u64).to_le_bytes(), scalar.as_bytes(), &[0]].concat())
        .unwrap();
    assert_says(&open_refusal(&directory), &["tensor a", "0 dimensions"]);
}

#[test]
fn a_damaged_header_never_panics() {
    let bytes = Synthetic::draft(TinyDraft::Llama).to_safetensors();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    for position in (0..header).step_by(7) {
        let mut damaged = bytes.clone();
        damaged[position] ^= 0x15;
        fs::write(&path, damaged).unwrap();
        // A damaged name still opens; everything else is refused.
        if let Err(error) = Checkpoint::open(directory.path()) {
            assert_says(&error.to_string(), &["model.safetensors"]);
        }
    }
}

#[test]
fn shards_and_index_must_agree() {
    let change = |edit: &dyn Fn(&Path, &mut Value)| {
        let directory = written(&small(), 3);
        let path = directory.path().join("model.safetensors.index.json");
        let mut index = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        edit(directory.path(), &mut index);
        fs::write(&path, index.to_string()).unwrap();
        let text = open_refusal(&directory);
        assert_says(&text, &[&directory.path().display().to_string()]);
        text
    };
    let head = "language_model.lm_head.weight";
    let [first, second] = ["model-1-of-3.safetensors", "model-2-of-3.safetensors"];
    let text = change(&|directory, _| fs::remove_file(directory.join(second)).unwrap());
    assert_says(&text, &[second, "missing"]);
    let text = change(&|_, index| {
        let shard = index["weight_map"][head].as_str().unwrap();
        let other = if shard == first { second } else { first };
        index["weight_map"][head] = json!(other);
    });
    assert_says(&text, &[head, first]);
    let text = change(&|_, index| {
        index["weight_map"]["language_model.ghost.weight"] = json!(first);
    });
    assert_says(&text, &["lists tensors that are not there", "ghost.weight in model-1-of-3"]);
    let text = change(&|_, index| {
        index["weight_map"].as_object_mut().unwrap().remove(head);
    });
    assert_says(&text, &[head, "not in model.safetensors.index.json"]);
    // The same tensors in two files.
    let text = change(&|directory, _| {
        fs::copy(directory.join(first), directory.join(second)).map(drop).unwrap();
    });
    assert_says(&text, &["tensor language_model."]);
    for evil in ["../model-1-of-3.safetensors", "/etc/passwd", "..", ".", "", "a/b", "a\\b"] {
        let text = change(&|_, index| index["weight_map"][head] = json!(evil));
        assert_says(&text, &[head, &format!("{evil:?}"), "not the name of a file"]);
    }
    let text = change(&|_, index| index["weight_map"][head] = json!(7));
    assert_says(&text, &[head, "not a name"]);
    assert_says(&change(&|_, index| *index = json!({})), &["weight_map"]);
    assert_says(&change(&|_, index| index["weight_map"] = json!({})), &["empty"]);
    assert_says(&change(&|_, index| *index = json!("text")), &["JSON"]);
}

#[test]
fn directories_without_weights_say_what_they_hold() {
    let directory = tempfile::tempdir().unwrap();
    assert_says(&open_refusal(&directory), &["neither", "found: nothing"]);
    fs::write(directory.path().join("pytorch_model.bin"), "x").unwrap();
    assert_says(&open_refusal(&directory), &["found: pytorch_model.bin"]);
    fs::create_dir(directory.path().join("model.safetensors")).unwrap();
    assert_says(&open_refusal(&directory), &["not a regular file"]);
    let absent = Source::Directory(directory.path().join("absent"));
    let report = Report::of_source(&absent, 1, false);
    assert_eq!(report.problems.len(), 2);
    assert_says(&report.problems.join("\n"), &["absent", "config.json"]);
}

#[test]
fn reports_refuse_impossible_splits() {
    let directory = written(&small(), 1);
    let report = Report::of_source(&Source::Directory(directory.path().into()), 3, false);
    assert_says(&report.problems.join("\n"), &["num_attention_heads = 2", "[1, 2]"]);
    assert!(report.ranks.is_empty() && report.bytes > 0);
}

#[test]
fn wrong_drafts_are_refused() {
    let refuse = |edit: &dyn Fn(&mut Synthetic), parts: &[&str]| {
        let mut synthetic = Synthetic::draft(TinyDraft::Llama);
        edit(&mut synthetic);
        let directory = written(&synthetic, 1);
        let config = DraftConfig::from_file(directory.path().join("config.json")).unwrap();
        let checkpoint = Checkpoint::open(directory.path()).unwrap();
        let error = DraftWeights::load(&checkpoint, &config).unwrap_err();
        assert_says(&error.to_string(), parts);
    };
    let remove = |name: &'static str| {
        move |synthetic: &mut Synthetic| synthetic.tensors.retain(|tensor| tensor.name != name)
    };
    for name in ["fc.weight", "midlayer.hidden_norm.weight", "norm.weight", "lm_head.weight", "d2t"]
    {
        refuse(&remove(name), &[&format!("{name} is missing")]);
    }
    refuse(
        &|synthetic| synthetic.tensor_mut("midlayer.mlp.up_proj.weight").unwrap().name.push('s'),
        &["midlayer.mlp.up_proj.weights is not part", "renamed midlayer.mlp.up_proj.weight?"],
    );
    refuse(
        &|synthetic| synthetic.tensor_mut("d2t").unwrap().bytes[0] = 2,
        &["d2t", "128 ids", "below 512", "t2d"],
    );
    refuse(
        &|synthetic| synthetic.config["fc_norm"] = json!(true),
        &["fc_norm.0.weight is missing"],
    );
    refuse(&|synthetic| synthetic.config["hidden_size"] = json!(128), &["fc.weight has shape"]);
    // Drafts are never quantised.
    refuse(
        &|synthetic| {
            let tensor = synthetic.tensor_mut("midlayer.self_attn.o_proj.weight").unwrap();
            tensor.dtype = DType::F8E4M3;
            tensor.bytes.truncate(256 * 256);
        },
        &["midlayer.self_attn.o_proj.weight has element type f8_e4m3"],
    );
}

#[test]
fn optional_parts_of_drafts_are_loaded() {
    let mut synthetic = Synthetic::draft(TinyDraft::Mla);
    for key in ["fc_norm", "bias"] {
        synthetic.config[key] = json!(true);
    }
    let mut add = |name: &str, shape: &[usize]| {
        let bytes = vec![0; shape.iter().product::<usize>() * 2];
        synthetic.tensors.push(SyntheticTensor::new(name, DType::F16, shape, bytes));
    };
    for name in ["aux_norm_low", "aux_norm_mid", "aux_norm_high"] {
        add(&format!("{name}.weight"), &[256]);
    }
    add("fc.bias", &[256]);
    add("embed_tokens.weight", &[512, 256]);
    let ids = (0..128i64).flat_map(|id| (4 * id + 1).to_le_bytes());
    synthetic.tensor_mut("d2t").unwrap().bytes = ids.collect();
    let directory = written(&synthetic, 2);
    let config = DraftConfig::from_file(directory.path().join("config.json")).unwrap();
    let checkpoint = Checkpoint::open(directory.path()).unwrap();
    let draft = DraftWeights::load(&checkpoint, &config).unwrap();
    assert_eq!(draft.captured_norms.len(), 3);
    assert!(draft.fc_bias.is_some() && draft.captured_norm.is_none());
    assert_eq!(draft.embedding.unwrap().dtype(), DType::F16);
    // The file held ids in the place of offsets.
    assert_eq!(draft.draft_to_target[..3], [1, 5, 9]);

    // A draft over the full vocabulary may share its target's head.
    let mut synthetic = Synthetic::draft(TinyDraft::Llama);
    synthetic.config["draft_vocab_size"] = Value::Null;
    let own = ["lm_head.weight", "d2t", "t2d"];
    synthetic.tensors.retain(|tensor| !own.contains(&tensor.name.as_str()));
    let directory = written(&synthetic, 1);
    let config = DraftConfig::from_file(directory.path().join("config.json")).unwrap();
    let draft = DraftWeights::load(&Checkpoint::open(directory.path()).unwrap(), &config).unwrap();
    assert!(draft.head.is_none());
    assert_eq!(draft.draft_to_target, (0..512).collect::<Vec<u32>>());
}
