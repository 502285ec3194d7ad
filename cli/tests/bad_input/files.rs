//! Weight files and configurations that are cut short, circular, hostile or lie.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::process::Stdio;

use paceline_model::synthetic::{Synthetic, TinyModel};
use paceline_model::weights::Source;
use serde_json::{Value, json};

use crate::{copy, demo, message, paceline, refused, refused_model};

/// What is needed to read each file of the demo.
const FILES: [(&str, &[&str]); 5] = [
    ("config.json", &["--prompt", "x"]),
    ("generation_config.json", &["--prompt", "x"]),
    ("tokenizer.json", &["--prompt", "x"]),
    ("tokenizer_config.json", &["--chat", "x"]),
    ("model.safetensors", &["--prompt", "x"]),
];

/// A disk that was full while the checkpoint was copied.
#[test]
fn every_file_that_is_cut_short_is_named() {
    let directory = demo();
    for (name, more) in FILES {
        let path = directory.path().join(name);
        let whole = fs::read(&path).unwrap();
        for length in [0, 1, whole.len() / 2, whole.len() - 2] {
            fs::write(&path, &whole[..length]).unwrap();
            refused_model(directory.path(), more, &[path.to_str().unwrap()]);
        }
        fs::write(&path, whole).unwrap();
    }
    let draft = copy(Source::DEMO_DRAFT);
    for name in ["config.json", "model.safetensors"] {
        let path = draft.path().join(name);
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() / 2]).unwrap();
        let arguments = ["generate", "--draft", draft.path().to_str().unwrap(), "--prompt", "x"];
        refused(&arguments, &["the draft", path.to_str().unwrap()]);
        fs::write(&path, whole).unwrap();
    }
}

/// Width to which [`enlarge`] stretches the first layer's MLP: more than 256 MB of weights, so that
/// they are used where they are mapped instead of being copied when they are loaded.
const LARGE_WIDTH: usize = 180_000;

/// Stretches the MLP of the demo's first layer with zeros, which change no result and take no room
/// on the disk.
fn enlarge(directory: &Path) {
    let path = directory.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["intermediate_size"] = json!(LARGE_WIDTH);
    fs::write(&path, config.to_string()).unwrap();

    let path = directory.join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    let header_end = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&whole[8..header_end]).unwrap();
    let tensors = header.as_object_mut().unwrap();
    tensors.remove("__metadata__");
    // Where bytes go in the new file, and where they come from.
    let (mut end, mut parts) = (0, Vec::new());
    for (name, entry) in tensors.iter_mut() {
        let [from, to] = [0, 1].map(|at| entry["data_offsets"][at].as_u64().unwrap() as usize);
        let (from, mut bytes) = (header_end + from, to - from);
        if let Some(module) = name.strip_prefix("model.layers.0.mlp.") {
            let [rows, width] = [0, 1].map(|at| entry["shape"][at].as_u64().unwrap() as usize);
            let (large, row_bytes) = match module {
                "down_proj.weight" => ([rows, LARGE_WIDTH], 2 * LARGE_WIDTH),
                _ => ([LARGE_WIDTH, width], 2 * width),
            };
            for row in 0..rows {
                let start = from + 2 * width * row;
                parts.push((end + row_bytes * row, start..start + 2 * width));
            }
            entry["shape"] = json!(large);
            bytes = 2 * large[0] * large[1];
        } else {
            parts.push((end, from..from + bytes));
        }
        entry["data_offsets"] = json!([end, end + bytes]);
        end += bytes;
    }
    let header = header.to_string();
    let file = fs::File::create(&path).unwrap();
    file.write_all_at(&(header.len() as u64).to_le_bytes(), 0).unwrap();
    file.write_all_at(header.as_bytes(), 8).unwrap();
    let start = 8 + header.len();
    for (at, range) in parts {
        file.write_all_at(&whole[range], (start + at) as u64).unwrap();
    }
    file.set_len((start + end) as u64).unwrap();
}

/// The same while the program runs: the mapped file shrinks under it.
#[test]
fn a_weight_file_that_is_cut_short_while_it_is_used_is_named() {
    let directory = demo();
    enlarge(directory.path());
    let path = directory.path().join("model.safetensors");
    let mut child = paceline(&["generate", "--model", directory.path().to_str().unwrap()])
        .args(["--prompt", "Once", "--max-tokens", "100000", "--ignore-eos"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    // The first text has come, so the weights are in use.
    stdout.fill_buf().unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(100_000).unwrap();
    let reader = std::thread::spawn(move || std::io::copy(&mut stdout, &mut std::io::sink()));
    let mut text = String::new();
    child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    reader.join().unwrap().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1), "{text}");
    assert!(text.contains(path.to_str().unwrap()) && text.contains("cut short"), "{text}");
}

/// Links that lead in a circle or nowhere, and directories in the place of files.
#[test]
fn every_file_that_is_no_file_is_named() {
    let directory = demo();
    for (name, more) in FILES {
        let path = directory.path().join(name);
        let whole = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        symlink(name, &path).unwrap();
        refused_model(directory.path(), more, &[path.to_str().unwrap(), "symbolic links"]);
        fs::remove_file(&path).unwrap();
        symlink("nowhere", &path).unwrap();
        refused_model(directory.path(), more, &[path.to_str().unwrap(), "No such file"]);
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        refused_model(directory.path(), more, &[path.to_str().unwrap(), "not a regular file"]);
        fs::remove_dir(&path).unwrap();
        fs::write(&path, whole).unwrap();
    }
    for cyclic in ["shard", "model.safetensors.index.json"] {
        let index = json!({"weight_map": {"lm_head.weight": cyclic}});
        let path = directory.path().join("model.safetensors.index.json");
        fs::write(path, index.to_string()).unwrap();
        let _ = symlink("shard", directory.path().join("shard"));
        refused_model(directory.path(), &["--token-ids", "1"], &[cyclic]);
    }
}

/// Headers that would make a careless reader allocate, overflow, overlap or loop.
#[test]
fn hostile_headers_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    Synthetic::model(TinyModel::A).write(directory.path(), 1).unwrap();
    let path = directory.path().join("model.safetensors");
    let tensor = |shape: &str, begin: u64, end: u64| {
        format!(r#"{{"dtype":"F32","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
    };
    let one = |tensor: String| format!(r#"{{"a":{tensor}}}"#);
    let headers = [
        // Overlapping, with a gap, backwards, beyond the end, overflowing.
        format!(r#"{{"a":{},"b":{}}}"#, tensor("[4]", 0, 16), tensor("[4]", 8, 24)),
        format!(r#"{{"a":{},"b":{}}}"#, tensor("[2]", 0, 8), tensor("[2]", 16, 24)),
        one(tensor("[4]", 16, 0)),
        one(tensor("[400]", 0, 1600)),
        one(tensor("[4611686018427387904]", 0, u64::MAX)),
        one(tensor("[4294967296, 4294967296, 4]", 0, 0)),
        one(tensor("[9223372036854775808]", 0, 1 << 63)),
        one(tensor("[-4]", 0, 16)),
        one(tensor("[1e300]", 0, 16)),
        one(tensor(&format!("{}4{}", "[".repeat(100_000), "]".repeat(100_000)), 0, 16)),
        "[".repeat(1 << 20),
        format!("{}1{}", r#"{"a":"#.repeat(50_000), "}".repeat(50_000)),
        format!(r#"{{"a":{0},"a":{0}}}"#, tensor("[4]", 0, 16)),
        r#"{"__metadata__":7}"#.to_owned(),
        "\u{0}".repeat(64),
    ];
    let begin = |length: u64| length.to_le_bytes().to_vec();
    let header =
        |header: &String| [begin(header.len() as u64), header.clone().into_bytes()].concat();
    let mut files: Vec<Vec<u8>> = headers.iter().map(header).collect();
    files.extend([begin(1 << 63), begin(u64::MAX), begin(100_000_001), begin(25)]);
    for mut file in files {
        file.extend([0; 24]);
        fs::write(&path, file).unwrap();
        refused_model(directory.path(), &["--token-ids", "1"], &["model.safetensors", "again"]);
    }
}

/// Sizes that would take terabytes are compared with the files before anything is allocated.
#[test]
fn absurd_configurations_are_refused_before_memory_is_taken() {
    let directory = demo();
    let path = directory.path().join("config.json");
    let whole: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (changes, part) in [
        (json!({"num_hidden_layers": 1024, "n_routed_experts": 8192}), "tensors"),
        (json!({"num_hidden_layers": 1024}), "problems"),
        (json!({"hidden_size": 131_072}), "model.embed_tokens.weight"),
        (json!({"vocab_size": 1 << 24}), "vocab_size"),
        (json!({"intermediate_size": 1 << 20}), "gate_proj"),
        (json!({"kv_lora_rank": 1 << 16}), "kv_b_proj"),
        (json!({"num_attention_heads": 4096, "num_key_value_heads": 4096}), "_proj"),
        (json!({"num_hidden_layers": 1_000_000_000_000u64}), "num_hidden_layers"),
        (json!({"hidden_size": 0}), "`hidden_size` is 0"),
        (json!({"hidden_size": "256"}), "`hidden_size` is \"256\""),
        (json!({"hidden_size": null}), "`hidden_size` is missing"),
        (json!({"rope_scaling": [1]}), "rope_scaling"),
        (json!({"eos_token_id": 4096}), "`eos_token_id` is 4096"),
    ] {
        let mut config = whole.clone();
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        fs::write(&path, config.to_string()).unwrap();
        // A gigabyte of address space: the lists of problems fit, the tensors do not.
        let arguments = ["generate", "--token-ids", "1", "--threads", "1", "--model"];
        let output =
            crate::limits::limited(1 << 20, &arguments).arg(directory.path()).output().unwrap();
        let text = message(&output);
        assert!(text.contains(part) && text.contains("config.json"), "{changes}: {text}");
        assert!(!text.contains("out of memory"), "{changes}: {text}");
    }
}
