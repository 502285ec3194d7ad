//! The program as a user runs it: real processes, pipes and files.

use std::{
    io::Write,
    process::{Command, Output, Stdio},
};

use paceline_model::synthetic::{Synthetic, TinyModel};
use serde_json::Value;

fn paceline(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_paceline"));
    command.args(arguments).stdin(Stdio::null());
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"] {
        command.env_remove(name);
    }
    command
}

fn run(arguments: &[&str]) -> Output {
    paceline(arguments).output().unwrap()
}

fn json(arguments: &[&str]) -> Value {
    let output = run(arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {error}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn reference() -> Value {
    serde_json::from_str(include_str!("../../testdata/stories-moe.json")).unwrap()
}

fn joined(ids: &Value) -> String {
    let ids: Vec<String> = ids.as_array().unwrap().iter().map(ToString::to_string).collect();
    ids.join(",")
}

/// Ids in, the reference's ids out, whoever computes them: one rank, threads, processes.
#[test]
fn json_equals_the_reference_over_threads_and_processes() {
    let reference = reference();
    let prompt = &reference["prompts"][2];
    let ids = joined(&prompt["ids"]);
    let base =
        ["generate", "--json", "--ignore-eos", "--max-tokens", "64", "--token-ids", ids.as_str()];
    let ways: [&[&str]; 6] = [
        &["--spec", "off"],
        &["--spec", "chain", "--draft-tokens", "3", "--tp", "2"],
        &["--spec", "tree", "--tp", "4", "--expert-parallel"],
        &["--tp", "2", "--processes"],
        &["--spec", "off", "--tp", "8", "--processes"],
        &["--spec", "tree", "--tp", "4", "--processes", "--expert-parallel"],
    ];
    for way in ways {
        let object = json(&[&base, way].concat());
        assert_eq!(object["prompt_ids"], prompt["ids"]);
        assert_eq!(object["token_ids"], prompt["greedy_ids"], "{way:?}");
        assert_eq!(object["finish_reason"], "length");
        let rounds = object["speculation"]["rounds"].as_u64().unwrap();
        let passes = rounds + 1;
        let calls = object["all_reduce"]["host"].as_u64().unwrap_or(0);
        let expected = if way.contains(&"--tp") { 16 * passes } else { 0 };
        assert_eq!(calls, expected, "{way:?}: two all-reduces a layer and pass");
        if way.contains(&"tree") {
            assert_eq!(object["speculation"]["mode"], "tree");
            let mean = object["speculation"]["mean_acceptance_length"].as_f64().unwrap();
            assert!(mean > 2.0, "{mean}");
        }
    }
}

/// Ranks that paceline starts itself do not mind what launched paceline.
#[test]
fn processes_work_inside_another_launchers_environment() {
    let mut command = paceline(&["generate", "--tp", "2", "--processes", "--prompt", "Once"]);
    command.args(["--max-tokens", "4", "--json"]);
    for (name, value) in [("WORLD_SIZE", "7"), ("RANK", "3"), ("SLURM_PROCID", "5")] {
        command.env(name, value);
    }
    let output = command.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
}

/// What srun sets for two tasks on one machine is enough.
#[test]
fn srun_can_launch_ranks() {
    let start = |rank: &str| {
        let mut command = paceline(&["generate", "--init", "env://", "--prompt", "Once"]);
        command.args(["--max-tokens", "4", "--json", "--timeout", "20"]);
        let step = std::process::id().to_string();
        for (name, value) in [
            ("SLURM_NTASKS", "2"),
            ("SLURM_PROCID", rank),
            ("SLURM_LOCALID", rank),
            ("SLURM_JOB_ID", "77"),
            ("SLURM_STEP_ID", &step),
            ("SLURM_NNODES", "1"),
        ] {
            command.env(name, value);
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let (first, second) = (start("0"), start("1"));
    let outputs = [first, second].map(|child| child.wait_with_output().unwrap());
    for output in &outputs {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let object: Value = serde_json::from_slice(&outputs[0].stdout).unwrap();
    assert_eq!(object["token_ids"].as_array().unwrap().len(), 4);
    assert!(outputs[1].stdout.is_empty(), "rank 0 prints");
}

/// Ranks by hand that are started differently say so instead of computing nonsense.
#[test]
fn ranks_that_were_started_differently_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let method = format!("file://{}", directory.path().join("meeting").display());
    let start = |rank: &str, more: &[&str]| {
        let mut command = paceline(&["generate", "--init", &method, "--world-size", "2"]);
        command.args(["--rank", rank, "--prompt", "Once", "--timeout", "20"]).args(more);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let (first, second) = (start("0", &[]), start("1", &["--expert-parallel"]));
    for child in [first, second] {
        let output = child.wait_with_output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains("--expert-parallel"), "{error}");
    }
}

#[test]
fn chat_renders_the_template() {
    let reference = reference();
    let prompt = &reference["prompts"][3];
    let message = prompt["messages"][0]["content"].as_str().unwrap();
    let expected = &prompt["ids"];
    let object = json(&["generate", "--json", "--max-tokens", "8", "--chat", message]);
    assert_eq!(&object["prompt_ids"], expected);
    assert_eq!(
        object["token_ids"].as_array().unwrap()[..],
        prompt["greedy_ids"].as_array().unwrap()[..8]
    );
    let object = json(&["generate", "--json", "--max-tokens", "1", "--chat", "--prompt", message]);
    assert_eq!(&object["prompt_ids"], expected);
}

#[test]
fn prompts_come_from_files_and_standard_input() {
    let reference = reference();
    let prompt = &reference["prompts"][7];
    let text = prompt["text"].as_str().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("prompt.txt");
    std::fs::write(&file, text).unwrap();
    let object = json(&["generate", "--json", "--max-tokens", "1", file.to_str().unwrap()]);
    assert_eq!(object["prompt_ids"], prompt["ids"]);
    let mut child = paceline(&["generate", "--json", "--max-tokens", "1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let object: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(object["prompt_ids"], prompt["ids"]);
}

#[test]
fn top_logits_are_the_references() {
    let reference = reference();
    let prompt = &reference["prompts"][4];
    let ids = joined(&prompt["ids"]);
    let base = ["generate", "--json", "--max-tokens", "1", "--token-ids", &ids, "--logprobs"];
    let base = [&base[..], &["--top-logits", "20"]].concat();
    let ways: [&[&str]; 4] =
        [&[], &["--tp", "2", "--expert-parallel"], &["--tp", "8"], &["--tp", "4", "--processes"]];
    let last = prompt["ids"].as_array().unwrap().len() as u64 - 1;
    let expected = prompt["logits"].as_array().unwrap();
    let expected = expected.iter().find(|row| row["position"] == last).unwrap();
    let tops = expected["top"].as_array().unwrap();
    for way in ways {
        let object = json(&[&base, way].concat());
        let got = &object["top_logits"][0];
        assert_eq!(got["position"], last);
        for (got, expected) in got["top"].as_array().unwrap().iter().zip(tops) {
            assert_eq!(got[0], expected[0], "{way:?}");
            let difference = got[1].as_f64().unwrap() - expected[1].as_f64().unwrap();
            assert!(difference.abs() < 1e-3, "{way:?}: {got} {expected}");
        }
        let difference =
            got["logsumexp"].as_f64().unwrap() - expected["logsumexp"].as_f64().unwrap();
        assert!(difference.abs() < 1e-3);
        assert!(object["logprobs"][0].as_f64().unwrap() <= 0.0);
    }
}

/// Penalties as large as these leave no token twice, and none changes nothing.
#[test]
fn penalties_keep_tokens_from_coming_again() {
    let base = ["generate", "--json", "--prompt", "Once upon a time", "--ignore-eos"];
    let base = [&base[..], &["--max-tokens", "48"]].concat();
    let plain = json(&base);
    let penalties: [&[&str]; 2] =
        [&["--presence-penalty", "100"], &["--frequency-penalty", "100", "--spec", "tree"]];
    for penalty in penalties {
        let object = json(&[&base[..], penalty].concat());
        let tokens = object["token_ids"].as_array().unwrap();
        let distinct: std::collections::HashSet<u64> =
            tokens.iter().map(|token| token.as_u64().unwrap()).collect();
        assert_eq!(distinct.len(), 48, "{penalty:?}: {tokens:?}");
        assert_ne!(object["token_ids"], plain["token_ids"]);
    }
    let repetition = json(&[&base[..], &["--repetition-penalty", "2"]].concat());
    assert_ne!(repetition["token_ids"], plain["token_ids"]);
    let none = ["--repetition-penalty", "1", "--presence-penalty", "0"];
    assert_eq!(json(&[&base[..], &none].concat())["token_ids"], plain["token_ids"]);
}

/// The demo model's answer to this prompt ends; with a least length it goes on.
#[test]
fn stop_tokens_wait_for_the_least_length() {
    let reference = reference();
    let prompt = &reference["prompts"][0];
    let ids = joined(&prompt["ids"]);
    let base = ["generate", "--json", "--max-tokens", "64", "--token-ids", &ids];
    let stop = prompt["first_stop"].as_u64().unwrap() as usize;
    let length = |object: &Value| object["token_ids"].as_array().unwrap().len();
    assert_eq!(length(&json(&base)), stop + 1);
    assert!(length(&json(&[&base[..], &["--min-tokens", "40"]].concat())) >= 40);
}

#[test]
fn the_most_probable_tokens_have_their_log_probabilities() {
    let base = ["generate", "--json", "--prompt", "Once upon a time", "--max-tokens", "8"];
    let object = json(&[&base[..], &["--top-logprobs", "3", "--logprobs"]].concat());
    let tops = object["top_logprobs"].as_array().unwrap();
    assert_eq!(tops.len(), 8);
    for (index, top) in tops.iter().enumerate() {
        assert_eq!(top.as_array().unwrap().len(), 3);
        // Greedy: the token itself is the most probable one.
        assert_eq!(top[0][0], object["token_ids"][index]);
        assert_eq!(top[0][1], object["logprobs"][index]);
        let probabilities = top.as_array().unwrap().iter();
        let probabilities = probabilities.map(|pair| pair[1].as_f64().unwrap().exp());
        assert!(probabilities.clone().is_sorted_by(|a, b| a >= b));
        assert!(probabilities.sum::<f64>() <= 1.0 + 1e-6);
    }
}

/// The text that streams is the text of the JSON object.
#[test]
fn text_streams_to_standard_output() {
    let arguments = ["generate", "--chat", "What is a bridge?", "--max-tokens", "40"];
    let text = json(&[&arguments[..], &["--json"]].concat())["text"].as_str().unwrap().to_owned();
    let output = run(&arguments);
    assert_eq!(String::from_utf8(output.stdout).unwrap(), text + "\n");
    let summary = String::from_utf8(output.stderr).unwrap();
    assert!(summary.contains("tok/s") && summary.contains("tokens a round"), "{summary}");
    let quiet = run(&[&arguments[..], &["--quiet"]].concat());
    assert!(quiet.stderr.is_empty());
}

/// A reader that goes away ends the program quietly.
#[test]
fn a_closed_pipe_is_no_error() {
    let mut child =
        paceline(&["generate", "--prompt", "Once", "--max-tokens", "500", "--ignore-eos"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(!message.contains("panic"), "{message}");
}

/// Each mistake has an answer that names it and says what to do.
#[test]
fn mistakes_have_clear_answers() {
    let directory = tempfile::tempdir().unwrap();
    let empty = directory.path().to_str().unwrap();
    let not_text = directory.path().join("prompt");
    std::fs::write(&not_text, [b'a', 0xFF]).unwrap();
    let target = directory.path().join("model");
    std::fs::create_dir(&target).unwrap();
    Synthetic::model(TinyModel::A).write(&target, 1).unwrap();
    let cases: [(&[&str], &str); 22] = [
        (&["--chat", ""], "--chat is empty"),
        (&["--chat", "x", "--template-arg", "thinking=foo"], "thinking=\"foo\""),
        (&["--prompt", "x", "--system", "y"], "--chat TEXT"),
        (&["Once upon a time"], "--prompt TEXT"),
        (&["--prompt", "x", "--draft", target.to_str().unwrap()], "not an EAGLE-3 draft"),
        (&["--chat", "x", "--prompt", "y"], "--prompt"),
        (&["--prompt", "x", "--spec", "off", "--draft-tokens", "3"], "--draft-tokens"),
        (&["--prompt", "x", "--draft-topk", "3"], "--spec tree"),
        (&["--prompt", ""], "empty"),
        (&["--model", "/does/not/exist", "--prompt", "x"], "/does/not/exist"),
        (&["--model", empty, "--prompt", "x"], "config.json"),
        (&["/does/not/exist.txt"], "/does/not/exist.txt"),
        (&[not_text.to_str().unwrap()], "UTF-8"),
        (&["--prompt", "x", "--tp", "3"], "3"),
        (&["--token-ids", "9999"], "4095"),
        (&["--prompt", "x", "--top-p", "2"], "top-p"),
        (&["--prompt", "x", "--presence-penalty", "-101"], "presence penalty"),
        (&["--prompt", "x", "--repetition-penalty", "0"], "repetition penalty"),
        (&["--prompt", "x", "--context", "99999"], "2048"),
        (&["--prompt", "x", "--spec", "tree", "--draft-tokens", "900"], "nodes"),
        (&["--prompt", "x", "--init", "nonsense"], "env://"),
        (&["--chat", "x", "--template-arg", "a"], "NAME=JSON"),
    ];
    for (arguments, expected) in cases {
        let output = run(&[&["generate"], arguments].concat());
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{arguments:?}");
        assert!(message.contains(expected), "{arguments:?}: {message}");
        assert!(!message.contains("panicked"), "{arguments:?}: {message}");
        // One prefix for all, as for what the argument parser finds.
        assert_eq!(message.matches("error: ").count(), 1, "{arguments:?}: {message}");
    }
}

/// Other options would help, or not.
#[test]
fn the_exit_code_tells_usage_from_failure() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("config.json"), "{}").unwrap();
    let cases: [(&[&str], i32); 6] = [
        (&["--nonsense"], 2),
        (&["--prompt", "x", "--spec", "off", "--draft-tokens", "3"], 2),
        (&["--prompt", "x", "--init", "env://"], 2),
        (&["--prompt", "x", "--top-p", "2"], 2),
        (&["--prompt", "x", "--model", "/does/not/exist"], 2),
        (&["--prompt", "x", "--model", directory.path().to_str().unwrap()], 1),
    ];
    for (arguments, code) in cases {
        let output = run(&[&["generate"], arguments].concat());
        assert_eq!(output.status.code(), Some(code), "{arguments:?}");
    }
}

/// With a seed and nothing said of drafting, chains are drafted: they do not follow the clock.
#[test]
fn a_seed_repeats_a_sampled_run() {
    let base = ["generate", "--prompt", "Once", "--temperature", "1", "--max-tokens", "48"];
    let seeded = [&base[..], &["--json", "--seed", "7"]].concat();
    let object = json(&seeded);
    assert_eq!(object["seed"], 7);
    assert_eq!(object["speculation"]["mode"], "chain");
    assert_eq!(object["token_ids"], json(&seeded)["token_ids"]);
    let auto = json(&[&seeded[..], &["--spec", "auto"]].concat());
    assert_eq!(auto["speculation"]["mode"], "auto");
    assert_eq!(json(&[&base[..], &["--json"]].concat())["speculation"]["mode"], "auto");
}

/// The summary says which limit ended an answer, and hints are about what was written.
#[test]
fn notes_say_what_happened() {
    let notes = |arguments: &[&str]| {
        let output = run(&[&["generate"], arguments].concat());
        assert!(output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let text = notes(&["--prompt", "Once upon", "--max-tokens", "3", "--ignore-eos"]);
    assert!(text.contains("prompt tokens: 2; 3 tokens"), "{text}");
    assert!(text.contains("cut at --max-tokens 3"), "{text}");
    let text = notes(&["--prompt", "Once upon", "--context", "5", "--ignore-eos"]);
    assert!(text.contains("cut at the context of 5"), "{text}");
    let text = notes(&["--prompt", "Once", "--max-tokens", "2", "--top-k", "3"]);
    assert!(text.contains("without effect: --top-k"), "{text}");
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    let text = notes(&["--chat", path, "--max-tokens", "2"]);
    assert!(text.contains(&format!("paceline generate {path} --chat")), "{text}");
}

#[test]
fn doctor_and_inspect_answer() {
    let doctor = json(&["doctor", "--json"]);
    let back_ends = doctor["back_ends"].as_array().unwrap();
    let host = back_ends.iter().find(|back_end| back_end["subject"] == "host").unwrap();
    assert_eq!(host["usable"], true);
    assert_eq!(host["compiled"], true);
    // A GPU has an address, and where there is none there is a reason.
    let gpu = &doctor["gpus"][0];
    assert!(gpu["reason"].is_string() || gpu["pci_address"].is_string(), "{gpu}");
    let inspect = json(&["inspect", "--json", "--tp", "4"]);
    assert_eq!(inspect["layers"], 8);
    assert_eq!(inspect["ranks"].as_array().unwrap().len(), 4);
    assert_eq!(inspect["problems"].as_array().unwrap().len(), 0);
    let output = run(&["inspect", "--tp", "3"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stdout).unwrap().contains("would not load"));
}
