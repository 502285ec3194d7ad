//! Tokenizers that are broken or belong to another model.

use std::fs;

use serde_json::{Value, json};

use crate::{demo, refused_model};

#[test]
fn broken_tokenizers_are_named() {
    let directory = demo();
    let path = directory.path().join("tokenizer.json");
    let whole: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let changed = |pointer: &str, value: Value| {
        let mut file = whole.clone();
        *file.pointer_mut(pointer).unwrap() = value;
        file.to_string().into_bytes()
    };
    let mut without_byte = whole.clone();
    without_byte["model"]["vocab"].as_object_mut().unwrap().shift_remove("!");
    let name = path.to_str().unwrap();
    for (bytes, parts) in [
        (b"{\"model\":".to_vec(), &[name][..]),
        (b"\xff\xfe{}".to_vec(), &[name]),
        (b"{}".to_vec(), &[name, "decoder"]),
        ("[".repeat(100_000).into_bytes(), &[name]),
        (without_byte.to_string().into_bytes(), &[name]),
        (changed("/model/vocab", json!([])), &[name, "vocab"]),
        (changed("/model/merges/0", json!(["no", "such"])), &[name, "merges"]),
        (changed("/model/continuing_subword_prefix", json!("##")), &[name, "prefix"]),
        (changed("/model/vocab/!", json!(4_000_000_000u32)), &[name, "4000000000"]),
        (changed("/model/vocab/!", json!(-1)), &[name]),
        (changed("/decoder", json!(null)), &[name, "ByteLevel"]),
    ] {
        fs::write(&path, bytes).unwrap();
        refused_model(directory.path(), &["--prompt", "x"], parts);
    }
}

#[test]
fn tokenizers_of_other_models_are_refused() {
    let directory = demo();
    let path = directory.path().join("tokenizer.json");
    let whole: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let mut larger = whole.clone();
    let token = json!({"id": 4096, "content": "<more>", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true});
    larger["added_tokens"].as_array_mut().unwrap().push(token);
    fs::write(&path, larger.to_string()).unwrap();
    refused_model(directory.path(), &["--prompt", "x"], &["4097", "4096", "tokenizer"]);
    fs::write(&path, whole.to_string()).unwrap();
    // The configuration ends answers with an id that the tokenizer does not have.
    let config = directory.path().join("config.json");
    let mut object: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    object["vocab_size"] = json!(4200);
    fs::write(&config, object.to_string()).unwrap();
    let generation = directory.path().join("generation_config.json");
    fs::write(&generation, json!({"eos_token_id": [1, 4150]}).to_string()).unwrap();
    refused_model(directory.path(), &["--prompt", "x"], &["token 4150", "tokenizer"]);
    fs::write(&generation, json!({"eos_token_id": 4200}).to_string()).unwrap();
    let parts = [generation.to_str().unwrap(), "`eos_token_id` is 4200"];
    refused_model(directory.path(), &["--prompt", "x"], &parts);
}

#[test]
fn broken_tiktoken_files_are_named() {
    let directory = demo();
    let (ranks, config) =
        (directory.path().join("tiktoken.model"), directory.path().join("tokenizer_config.json"));
    let good = json!({"added_tokens_decoder": {"256": {"content": "[BOS]", "special": true}}});
    for (text, parts) in [
        (&b"!!!! 0\n"[..], &["tiktoken.model", "line 1", "base64"][..]),
        (b"\xff\xff 0\n", &["tiktoken.model", "line 1", "base64"]),
        (b"YQ== 4294967296\n", &["tiktoken.model", "line 1", "number"]),
        (b"YQ== -1\n", &["tiktoken.model", "line 1", "number"]),
        (b"YQ==", &["tiktoken.model", "no rank"]),
        (b"YQ== 0\nYQ== 1\n", &["tiktoken.model", "line 2", "twice"]),
        (b"", &["tiktoken.model", "0x00"]),
    ] {
        fs::write(&ranks, text).unwrap();
        fs::write(&config, good.to_string()).unwrap();
        refused_model(directory.path(), &["--prompt", "x"], parts);
    }
    let bytes = (0..=255u8).map(|byte| format!("{} {byte}\n", base64_of(byte)));
    fs::write(&ranks, bytes.collect::<String>()).unwrap();
    for (text, part) in [
        ("{", "JSON"),
        ("{}", "`added_tokens_decoder` is missing"),
        ("{\"added_tokens_decoder\": {\"9\": {\"content\": \"x\"}}}", "`added_tokens_decoder.9`"),
        ("{\"added_tokens_decoder\": {\"256\": {}}}", "content"),
    ] {
        fs::write(&config, text).unwrap();
        let parts = [config.to_str().unwrap(), part];
        refused_model(directory.path(), &["--prompt", "x"], &parts);
    }
    fs::remove_file(&config).unwrap();
    refused_model(directory.path(), &["--prompt", "x"], &[config.to_str().unwrap()]);
}

/// One byte as base64.
fn base64_of(byte: u8) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (first, second) = (LETTERS[usize::from(byte >> 2)], LETTERS[usize::from(byte & 3) << 4]);
    format!("{}{}==", char::from(first), char::from(second))
}
