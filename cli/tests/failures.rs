//! Ranks as processes that die or stall: the others end with an error that names them.

use std::{
    io::{BufRead, BufReader},
    process::{Child, ChildStderr, Command, Stdio},
    time::{Duration, Instant},
};

/// A long answer over two ranks; returns the process id of rank 1.
fn start(timeout_seconds: &str) -> (Child, BufReader<ChildStderr>, Vec<String>) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_paceline"))
        .args(["generate", "--tp", "2", "--processes", "--timeout", timeout_seconds])
        .args(["--prompt", "Once", "--max-tokens", "100000", "--ignore-eos", "--context", "2048"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    stderr.read_line(&mut line).unwrap();
    let ids = line.split('[').nth(1).unwrap().split(']').next().unwrap();
    let ids = ids.split(", ").map(str::to_owned).collect();
    // The first text has come: all ranks are in the middle of it.
    let mut stdout = BufReader::new(child.stdout.as_mut().unwrap());
    stdout.fill_buf().unwrap();
    (child, stderr, ids)
}

fn signal(name: &str, id: &str) {
    assert!(Command::new("kill").args([name, id]).status().unwrap().success());
}

/// Drains standard output, so that the program never waits for its reader.
fn finish(mut child: Child, mut stderr: BufReader<ChildStderr>) -> (bool, String) {
    let mut stdout = child.stdout.take().unwrap();
    let reader = std::thread::spawn(move || std::io::copy(&mut stdout, &mut std::io::sink()));
    let mut message = String::new();
    std::io::Read::read_to_string(&mut stderr, &mut message).unwrap();
    reader.join().unwrap().unwrap();
    (child.wait().unwrap().success(), message)
}

#[test]
fn a_killed_rank_is_named() {
    let (child, stderr, ids) = start("60");
    let killed = Instant::now();
    signal("-KILL", &ids[0]);
    let (success, message) = finish(child, stderr);
    let how = format!("rank 1 (process {}) was killed by signal 9 (SIGKILL)", ids[0]);
    assert!(!success && message.contains(&how), "{message}");
    assert_eq!(message.lines().count(), 2, "{message}");
    assert!(killed.elapsed() < Duration::from_secs(20), "long before the deadline");
}

#[test]
fn a_stalled_rank_is_named_after_the_deadline() {
    let (child, stderr, ids) = start("2");
    signal("-STOP", &ids[0]);
    let (success, message) = finish(child, stderr);
    assert!(!success && message.contains("rank 1"), "{message}");
    // Rank 0 ended it with itself.
    assert!(!Command::new("kill").args(["-0", &ids[0]]).status().unwrap().success());
}

#[test]
fn a_stalled_leader_is_named_by_the_others() {
    let (mut child, mut stderr, ids) = start("2");
    signal("-STOP", &child.id().to_string());
    // The stopped leader keeps the pipe open, so it is read line by line.
    let mut line = String::new();
    stderr.read_line(&mut line).unwrap();
    assert!(line.contains("rank 0"), "{line}");
    child.kill().unwrap();
    child.wait().unwrap();
    drop(ids);
}

#[test]
fn no_rank_outlives_a_killed_leader() {
    let (mut child, stderr, ids) = start("60");
    child.kill().unwrap();
    child.wait().unwrap();
    // Its stderr is inherited by the ranks: it closes when the last of them has ended.
    let (_, _) = (ids, std::io::read_to_string(stderr).unwrap());
}

/// Ranks that read the same files find the same in them; one says it.
#[test]
fn what_is_wrong_with_a_checkpoint_is_said_once() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("config.json"), "{}").unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_paceline"))
        .args(["generate", "--tp", "3", "--processes", "--quiet", "--prompt", "x", "--model"])
        .arg(directory.path())
        .output()
        .unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert_eq!(message.matches("config.json").count(), 1, "{message}");
}

/// A model of one's own has no draft unless one is named, and drafting without one is refused
/// before anything is loaded.
#[test]
fn speculation_without_a_draft_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    for mode in ["chain", "tree", "auto"] {
        let output = Command::new(env!("CARGO_BIN_EXE_paceline"))
            .args(["generate", "--token-ids", "1", "--spec", mode, "--model"])
            .arg(directory.path())
            .output()
            .unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && message.contains("--draft"), "{message}");
    }
}
