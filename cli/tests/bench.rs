//! `paceline bench decode`: that it measures what it says. No time is a pass mark.

use std::process::{Command, Output};

use paceline_model::synthetic::{Synthetic, TinyDraft, TinyModel};
use serde_json::Value;

fn run(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_paceline"));
    command.args(["bench", "decode", "--quick"]).args(arguments);
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"] {
        command.env_remove(name);
    }
    command.output().unwrap()
}

fn json(arguments: &[&str]) -> Value {
    let output = run(&[&["--json"], arguments].concat());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {error}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn array(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

fn names(settings: &Value) -> Vec<&str> {
    array(settings).iter().map(|setting| setting["name"].as_str().unwrap()).collect()
}

/// One sample, and a median between the least and the most.
fn check_samples(samples: &Value, count: usize) {
    assert_eq!(array(&samples["samples"]).len(), count);
    let number = |name: &str| samples[name].as_f64().unwrap();
    assert!(0.0 < number("least"), "{samples}");
    assert!(number("least") <= number("median") && number("median") <= number("most"), "{samples}");
}

#[test]
fn everything_is_measured() {
    let folder = tempfile::tempdir().unwrap();
    let plot = folder.path().join("plot.svg");
    let report = json(&["--plot", plot.to_str().unwrap(), "--batch", "1,3", "--passes", "1,4"]);
    assert_eq!(report["workload"]["repetitions"], 1);
    assert_eq!(report["machine"]["model"], "stories-moe");
    assert_eq!(report["machine"]["dtype"], "f32");
    let settings = &report["decode"];
    let expected = ["off", "chain-1", "chain-2", "chain-3", "chain-4", "chain-6", "tree-2x4x7"];
    assert_eq!(names(settings), [&expected[..], &["tree-4x4x15", "auto"]].concat());
    for setting in array(settings) {
        check_samples(&setting["tokens_per_second"], 1);
        assert_eq!(setting["same_tokens"], true, "{setting}");
        let length = setting["tokens_per_round"].as_f64().unwrap();
        // Two answers of eight tokens, the first of each from the prompt's pass.
        let tokens = length * setting["rounds"].as_f64().unwrap();
        assert!((tokens - 14.0).abs() < 1e-6, "{setting}");
        match setting["name"].as_str().unwrap() {
            "off" => assert!(length == 1.0 && setting["drafted"] == 0),
            // So short an answer may end before anything is tried.
            "auto" => {
                let accepted = setting["accepted"].as_u64().unwrap();
                assert!(accepted <= setting["drafted"].as_u64().unwrap(), "{setting}");
            }
            _ => assert!(length > 1.0 && setting["draft_share"].as_f64().unwrap() > 0.0),
        }
    }
    assert_eq!(report["prompt"]["tokens"], 64);
    check_samples(&report["prompt"]["tokens_per_second"], 1);
    let tokens: Vec<&Value> = array(&report["passes"]).iter().map(|pass| &pass["tokens"]).collect();
    assert_eq!(tokens, [1, 4]);
    array(&report["passes"]).iter().for_each(|pass| check_samples(&pass["seconds"], 1));
    let batches: Vec<(u64, &str)> = array(&report["batch"])
        .iter()
        .inspect(|batch| check_samples(&batch["tokens_per_second"], 1))
        .map(|batch| (batch["sequences"].as_u64().unwrap(), batch["setting"].as_str().unwrap()))
        .collect();
    assert_eq!(batches, [(1, "off"), (1, "auto"), (3, "off"), (3, "auto")]);
    assert_eq!(array(&report["verdicts"]).len(), 2);
    let svg = std::fs::read_to_string(&plot).unwrap();
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    for text in ["tree-4x4x15", "tokens a second", "stories-moe", "tokens in a pass"] {
        assert!(svg.contains(text), "{text}");
    }
}

#[test]
fn the_table_shows_what_was_asked_for() {
    let output =
        run(&["--settings", "off,chain-2,auto", "--parts", "decode", "--repetitions", "3"]);
    assert!(output.status.success());
    let table = String::from_utf8(output.stdout).unwrap();
    for text in ["stories-moe", "chain-2", "tokens a round", "auto to plain decoding: "] {
        assert!(table.contains(text), "{text}: {table}");
    }
    assert!(!table.contains("prompt of") && !table.contains("DIFFERENT"), "{table}");
    let progress = String::from_utf8(output.stderr).unwrap();
    assert!(progress.contains("decoding"), "{progress}");
    assert!(run(&["--parts", "prompt", "--quiet"]).stderr.is_empty());
}

/// Random weights draft tokens that are not accepted, and change no answer.
#[test]
fn a_random_draft_is_of_no_use() {
    let settings = ["--parts", "decode", "--settings", "off,chain-3,tree-2x2x4"];
    let settings = &settings[..];
    let processes = ["--random-draft", "--tp", "2", "--processes"];
    let reports = [&processes[..1], &processes].map(|ranks| json(&[settings, ranks].concat()));
    for setting in reports.iter().flat_map(|report| array(&report["decode"])) {
        assert_eq!(setting["same_tokens"], true);
        assert!(setting["tokens_per_round"].as_f64().unwrap() < 1.2, "{setting}");
    }
    let report = &reports[0];
    assert!(report["decode"][1]["drafted"].as_u64().unwrap() > 0);
    let draft = report["machine"]["draft"].as_str().unwrap();
    assert!(draft.contains("random"), "{draft}");
    assert!(report["verdicts"].as_array().unwrap().is_empty(), "auto was not measured");
}

#[test]
fn ranks_spend_time_in_all_reduces() {
    for ranks in [&["--tp", "2"][..], &["--tp", "2", "--processes"]] {
        let arguments = ["--parts", "decode,passes,batch", "--settings", "off,chain-2"];
        let report = json(&[&arguments, &["--passes", "1", "--batch", "2"], ranks].concat());
        assert_eq!(report["machine"]["ranks"], 2);
        for setting in array(&report["decode"]) {
            let share = setting["all_reduce_share"].as_f64().unwrap();
            assert!(0.0 < share && share < 1.0, "{setting}");
            assert_eq!(setting["same_tokens"], true);
        }
        let share = report["passes"][0]["all_reduce_share"]["median"].as_f64().unwrap();
        assert!(0.0 < share && share < 1.0, "{share}");
    }
}

/// Without a tokenizer the prompts are made up; without a draft there is nothing to compare.
#[test]
fn any_checkpoint_can_be_measured() {
    let (model, draft) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    Synthetic::model(TinyModel::A).write(model.path(), 2).unwrap();
    Synthetic::draft(TinyDraft::Llama).write(draft.path(), 1).unwrap();
    let model = ["--model", model.path().to_str().unwrap(), "--context", "512"];
    let report = json(&model);
    assert_eq!(names(&report["decode"]), ["off"]);
    assert!(report["machine"]["draft"].is_null());
    let draft = ["--draft", draft.path().to_str().unwrap(), "--capture-points", "1,2,3"];
    for more in [&[][..], &["--random-draft"]] {
        let settings = ["--parts", "decode", "--settings", "off,chain-9,tree-5x5x30"];
        let report = json(&[&model, &draft, &settings[..], more].concat());
        assert!(array(&report["decode"]).iter().all(|setting| setting["same_tokens"] == true));
    }
}

#[test]
fn prompts_come_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prompts.txt");
    std::fs::write(&file, "What is a bridge?\n\n  \n").unwrap();
    let arguments = ["--parts", "decode", "--settings", "off", "--prompt-file"];
    let report = json(&[&arguments[..], &[file.to_str().unwrap()]].concat());
    assert_eq!(report["workload"]["prompts"], 1);
}

#[test]
fn mistakes_have_clear_answers() {
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().join("empty");
    std::fs::write(&empty, "\n").unwrap();
    Synthetic::model(TinyModel::A).write(folder.path(), 1).unwrap();
    let model = folder.path().to_str().unwrap();
    // Those of the parts that run last are found before anything is measured.
    let cases: [(&[&str], &str); 11] = [
        (&["--settings", "chain"], "chain-N"),
        (&["--settings", "tree-2x1x9"], "lower nodes"),
        (&["--parts", "nonsense"], "possible values"),
        (&["--model", model, "--settings", "auto"], "--draft"),
        (&["--model", model, "--random-draft"], "--draft"),
        (&["--prompt-file", "/does/not/exist"], "/does/not/exist"),
        (&["--prompt-file", empty.to_str().unwrap()], "no line with text"),
        (&["--context", "20", "--tokens", "19"], "--context"),
        (&["--context", "200", "--passes", "1,101"], "lower --passes"),
        (&["--context", "200", "--batch", "64"], "lower --batch"),
        (&["--plot", "/does/not/exist/p.svg"], "/does/not/exist/p.svg"),
    ];
    for (arguments, expected) in cases {
        let output = run(arguments);
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{arguments:?}");
        assert!(message.contains(expected), "{arguments:?}: {message}");
        assert!(!message.contains("panicked"), "{arguments:?}: {message}");
        assert!(!message.contains("decoding: "), "{arguments:?}: {message}");
    }
}
