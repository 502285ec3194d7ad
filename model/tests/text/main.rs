//! What a checkpoint's JSON and text files mean: configurations, stop ids, tokenizers, templates.

mod chat;
mod config;
mod draft;
mod kimi;
mod published;
mod tokenizer;

use std::path::PathBuf;

use published::with;
use serde_json::Value;

/// The demo model's directory.
fn demo_dir() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/demo/stories-moe"))
}

/// A file of reference values.
fn reference(name: &str) -> Value {
    let path = format!("{}/../testdata/{name}", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}
