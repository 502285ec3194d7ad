//! Machines without memory, disks without space, readers that went away, caches that are full.

use std::fs::{self, File};
use std::process::{Command, Stdio};

use paceline_model::synthetic::{Synthetic, TinyModel};
use serde_json::json;

use crate::{message, paceline, refused};

/// The program with so many KiB of address space.
pub(crate) fn limited(kibibytes: u64, arguments: &[&str]) -> Command {
    let mut command = Command::new("sh");
    let script = format!("ulimit -v {kibibytes} && exec \"$0\" \"$@\"");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_paceline")]).args(arguments);
    command.stdin(Stdio::null()).env("RUST_BACKTRACE", "0");
    command
}

/// Whatever the limit, the program works or says how much was missing.
#[test]
fn too_little_memory_is_said_with_an_amount() {
    let mut refusals = 0;
    for arguments in [&["--prompt", "Once"][..], &["--chat", "Once", "--tp", "2"]] {
        // Below 50 MB the system cannot even start the program, which has the demo inside.
        for kibibytes in (60_000..300_000).step_by(24_000) {
            let arguments = [&["generate", "--max-tokens", "4"], arguments].concat();
            let output = limited(kibibytes, &arguments).output().unwrap();
            if output.status.success() {
                continue;
            }
            let text = message(&output);
            let amount = text.contains("bytes") || text.contains("threads");
            assert!(amount, "{kibibytes}: {text}");
            refusals += 1;
        }
    }
    assert!(refusals > 0, "the smallest limits are too small");
}

/// A cache that no machine can hold is refused with its size.
#[test]
fn a_context_that_needs_terabytes_is_refused_with_its_size() {
    let directory = tempfile::tempdir().unwrap();
    let mut synthetic = Synthetic::model(TinyModel::A);
    synthetic.config["max_position_embeddings"] = json!(1 << 30);
    synthetic.write(directory.path(), 1).unwrap();
    let model = directory.path().to_str().unwrap();
    let arguments = ["generate", "--model", model, "--token-ids", "1", "--context", "1073741824"];
    // 2^30 and some rows of 4 layers, each more than 100 values of 4 bytes.
    refused(&arguments, &["the cache needs", "bytes", "--context"]);
}

/// A full cache ends the answer; a prompt that can never fit is refused.
#[test]
fn the_cache_holds_no_more_than_the_context() {
    let ids: Vec<String> = (10..26).map(|id| id.to_string()).collect();
    let generate = |prompt: usize, more: &[&str]| {
        let ids = ids[..prompt].join(",");
        let base = ["generate", "--json", "--ignore-eos", "--context", "16", "--token-ids", &ids];
        paceline(&[&base, more].concat()).output().unwrap()
    };
    for spec in ["off", "chain", "tree", "auto"] {
        for prompt in [1, 10, 15] {
            let output = generate(prompt, &["--max-tokens", "500", "--spec", spec]);
            let error = String::from_utf8_lossy(&output.stderr);
            let object: serde_json::Value = serde_json::from_slice(&output.stdout).expect(&error);
            assert_eq!(object["token_ids"].as_array().unwrap().len(), 16 - prompt, "{spec}");
            assert_eq!(object["finish_reason"], "length");
        }
        let text = message(&generate(16, &["--spec", spec]));
        assert!(text.contains("16 tokens long") && text.contains("context"), "{text}");
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("prompt");
    fs::write(&file, "once upon a time ".repeat(100_000)).unwrap();
    let path = file.to_str().unwrap();
    refused(&["generate", path], &[path, "2048", "shorten"]);
    // A file without an end is read no further than a prompt can be long.
    refused(&["generate", "/dev/zero"], &["/dev/zero", "2048", "shorten"]);
}

/// Output that cannot be written is an error.
#[test]
fn a_full_disk_is_an_error() {
    for arguments in [
        &["generate", "--prompt", "Once", "--max-tokens", "4"][..],
        &["generate", "--prompt", "Once", "--max-tokens", "4", "--json"],
        &["generate", "--prompt", "Once", "--max-tokens", "4", "--tp", "2", "--processes"],
        &["inspect"],
        &["inspect", "--json"],
        &["doctor"],
        &["doctor", "--json"],
    ] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = paceline(arguments).stdout(full).output().unwrap();
        let text = message(&output);
        assert!(text.contains("standard output") && text.contains("No space"), "{text}");
    }
}

/// Standard streams that are closed from the beginning, or whose readers have gone away.
#[test]
fn closed_streams_are_no_reason_to_fail() {
    for (command, arguments) in [
        ("generate", "--prompt Once --max-tokens 40"),
        ("generate", "--prompt Once --max-tokens 40 --json"),
        ("inspect", ""),
        ("inspect", "--json"),
        ("doctor", ""),
    ] {
        for redirection in [">&-", "2>&-", "<&- >&- 2>&-", "| true"] {
            // The exit code of a pipeline is that of its last command, so it is printed.
            let script =
                format!("{{ \"$0\" {command} {arguments}; echo $? >&3; }} 3>&1 {redirection}");
            let script = match redirection.starts_with('|') {
                true => format!("{{ {script}; }}"),
                false => format!("\"$0\" {command} {arguments} {redirection}; echo $?"),
            };
            let output = Command::new("sh")
                .args(["-c", &script, env!("CARGO_BIN_EXE_paceline")])
                .stdin(Stdio::null())
                .output()
                .unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(!errors.contains("panicked"), "{script}: {errors}");
            if !redirection.starts_with('|') {
                assert_eq!(text.trim_end().lines().last(), Some("0"), "{script}: {errors}");
            }
        }
    }
}
