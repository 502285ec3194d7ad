//! Files, prompts and machines that are not as they should be. Each gets an answer that names what
//! is wrong, and an exit code; nothing panics, hangs or ends by a signal.

#[path = "bad_input/files.rs"]
mod files;
#[path = "bad_input/limits.rs"]
mod limits;
#[path = "bad_input/prompts.rs"]
mod prompts;
#[path = "bad_input/texts.rs"]
mod texts;

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use paceline_model::weights::Source;
use tempfile::TempDir;

/// The program, without anything on standard input.
fn paceline(arguments: &[impl AsRef<OsStr>]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_paceline"));
    command.args(arguments).stdin(Stdio::null()).env("RUST_BACKTRACE", "0");
    command
}

/// The answer to something that is wrong: an exit code, nothing on standard output, and a message.
#[track_caller]
fn message(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(matches!(output.status.code(), Some(1 | 2)), "{}: {text}", output.status);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "", "{text}");
    assert!(!text.contains("panicked") && text.len() < 4000, "{text}");
    text
}

/// Runs something that is wrong and checks that the message has these parts.
#[track_caller]
fn refused(arguments: &[impl AsRef<OsStr>], parts: &[&str]) {
    let text = message(&paceline(arguments).output().unwrap());
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

/// `generate` with a model directory and more arguments.
#[track_caller]
fn refused_model(directory: &Path, more: &[&str], parts: &[&str]) {
    let arguments = [&["generate", "--model", directory.to_str().unwrap()], more].concat();
    refused(&arguments, parts);
}

/// The demo model's files in a directory of their own.
fn demo() -> TempDir {
    copy(Source::DEMO)
}

fn copy(source: Source) -> TempDir {
    let Source::Embedded(files) = source else { unreachable!("the demo is embedded") };
    let directory = tempfile::tempdir().unwrap();
    for (name, text) in files.texts {
        std::fs::write(directory.path().join(name), text).unwrap();
    }
    std::fs::write(directory.path().join("model.safetensors"), files.weights).unwrap();
    directory
}
