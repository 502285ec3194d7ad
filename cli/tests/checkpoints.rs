//! Checkpoints on disk: a synthetic one in Kimi-K2.5's layout, and broken ones.

use std::{path::Path, process::Command};

use paceline_model::synthetic::{Synthetic, TinyDraft, TinyModel};
use serde_json::Value;

fn run(arguments: &[&str]) -> (bool, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_paceline")).args(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

fn golden() -> Value {
    serde_json::from_str(include_str!("../../testdata/tiny.json")).unwrap()
}

fn generate(directory: &Path, ids: &Value, more: &[&str]) -> Value {
    let ids: Vec<String> = ids.as_array().unwrap().iter().map(ToString::to_string).collect();
    let ids = ids.join(",");
    let directory = directory.to_str().unwrap();
    let base = [
        "generate",
        "--json",
        "--model",
        directory,
        "--max-tokens",
        "8",
        "--ignore-eos",
        "--token-ids",
        &ids,
    ];
    let (success, stdout, stderr) = run(&[&base, more].concat());
    assert!(success, "{stderr}");
    serde_json::from_str(&stdout).unwrap()
}

#[test]
fn a_checkpoint_in_kimi_k25_layout_loads_and_passes_inspection() {
    let directory = tempfile::tempdir().unwrap();
    Synthetic::kimi_k25().write(directory.path(), 5).unwrap();
    let path = directory.path().to_str().unwrap();
    let (success, stdout, stderr) = run(&["inspect", "--model", path, "--tp", "4"]);
    assert!(success, "{stdout}{stderr}");
    assert!(stdout.contains("KimiK25") && stdout.contains("int4"), "{stdout}");
    let golden = &golden()["models"]["C_int4"];
    for more in [&[][..], &["--tp", "2"], &["--tp", "4", "--processes", "--expert-parallel"]] {
        let object = generate(directory.path(), &golden["ids"], more);
        assert_eq!(object["token_ids"], golden["greedy_ids"], "{more:?}");
        assert_eq!(object["text"], "", "there is no tokenizer");
    }
}

#[test]
fn a_renamed_or_missing_tensor_is_named() {
    let name = "language_model.model.layers.2.self_attn.o_proj.weight";
    for renamed in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        let mut synthetic = Synthetic::kimi_k25();
        if renamed {
            synthetic.tensor_mut(name).unwrap().name += "_old";
        } else {
            synthetic.tensors.retain(|tensor| tensor.name != name);
        }
        synthetic.write(directory.path(), 3).unwrap();
        let path = directory.path().to_str().unwrap();
        let (success, stdout, _) = run(&["inspect", "--model", path]);
        assert!(!success && stdout.contains("layers.2.self_attn.o_proj.weight"), "{stdout}");
        let (success, _, stderr) = run(&["generate", "--model", path, "--token-ids", "1"]);
        assert!(!success && stderr.contains("layers.2.self_attn.o_proj.weight"), "{stderr}");
    }
}

/// People see the first problems and how many there are; programs see all.
#[test]
fn many_problems_are_cut_and_a_missing_layer_is_one() {
    let directory = tempfile::tempdir().unwrap();
    let synthetic = Synthetic::kimi_k25();
    let path = directory.path().to_str().unwrap();
    let write = |keep: &dyn Fn(&str) -> bool| {
        let mut synthetic = synthetic.clone();
        synthetic.tensors.retain(|tensor| keep(&tensor.name));
        synthetic.write(directory.path(), 1).unwrap();
        let (success, stdout, _) = run(&["inspect", "--model", path]);
        assert!(!success);
        stdout
    };
    let stdout = write(&|name| !name.contains("layers.3."));
    assert!(stdout.contains("layer 3 is missing whole"), "{stdout}");
    assert!(stdout.contains("says 4 layers, the weights have 3"), "{stdout}");
    let stdout = write(&|name| !name.contains("norm"));
    let (_, json, _) = run(&["inspect", "--json", "--model", path]);
    let all = serde_json::from_str::<Value>(&json).unwrap()["problems"].as_array().unwrap().len();
    assert!(all > 4);
    assert!(stdout.contains(&format!("problems: {all}")), "{stdout}");
    assert!(stdout.contains("one and the same checkpoint"), "{stdout}");
}

#[test]
fn corrupt_and_truncated_files_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    Synthetic::model(TinyModel::A).write(directory.path(), 1).unwrap();
    let file = directory.path().join("model.safetensors");
    let whole = std::fs::read(&file).unwrap();
    let path = directory.path().to_str().unwrap();
    let mut header = whole.clone();
    header[0..8].copy_from_slice(&(1u64 << 63).to_le_bytes());
    let mut json = whole.clone();
    json[8] = b'x';
    let truncated = whole[..whole.len() - 1000].to_vec();
    for bytes in [header, json, truncated, Vec::new(), vec![0; 7]] {
        std::fs::write(&file, bytes).unwrap();
        for command in [&["generate", "--token-ids", "1"][..], &["inspect"]] {
            let (success, stdout, stderr) = run(&[command, &["--model", path]].concat());
            assert!(!success);
            let message = stdout + &stderr;
            assert!(message.contains("model.safetensors"), "{message}");
            assert!(!message.contains("panicked"), "{message}");
        }
    }
}

/// A draft for the wrong model, and the right one with its capture points.
#[test]
fn drafts_are_checked_against_their_model() {
    let (model, draft) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    Synthetic::model(TinyModel::A).write(model.path(), 2).unwrap();
    Synthetic::draft(TinyDraft::Mla).write(draft.path(), 1).unwrap();
    let golden = &golden()["models"]["A"];
    let draft_path = draft.path().to_str().unwrap();
    let more = ["--draft", draft_path, "--capture-points", "1,2,3", "--spec", "chain"];
    let object = generate(model.path(), &golden["ids"], &more);
    assert_eq!(object["token_ids"], golden["greedy_ids"]);
    let (success, _, stderr) =
        run(&["generate", "--draft", draft_path, "--capture-points", "1,2,3", "--token-ids", "1"]);
    assert!(!success && stderr.contains("4096") && stderr.contains("512"), "{stderr}");
}
