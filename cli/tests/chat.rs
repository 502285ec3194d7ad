//! `paceline chat` through pipes: real processes, a conversation a run.

use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use paceline_model::synthetic::{Synthetic, TinyModel};
use serde_json::Value;

fn chat(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_paceline"));
    command.arg("chat").args(arguments);
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"] {
        command.env_remove(name);
    }
    command
}

fn run(arguments: &[&str], input: impl AsRef<[u8]>) -> Output {
    let mut child = chat(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A program that has ended reads no more.
    let _ = child.stdin.take().unwrap().write_all(input.as_ref());
    child.wait_with_output().unwrap()
}

/// One JSON object a turn.
fn turns(arguments: &[&str], input: &str) -> Vec<Value> {
    let output = run(&[&["--json", "--quiet"], arguments].concat(), input);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{arguments:?}: {error}");
    let lines = String::from_utf8(output.stdout).unwrap();
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn failure(arguments: &[&str], input: impl AsRef<[u8]>) -> String {
    let output = run(arguments, input);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "{error}");
    assert!(!error.contains("panicked"), "{error}");
    error
}

/// What the tokenizer makes of a text with the demo model's turn marks.
fn ids(text: &str) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_paceline"))
        .args(["generate", "--json", "--max-tokens", "1", "--prompt", text])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let object: Value = serde_json::from_slice(&output.stdout).unwrap();
    object["prompt_ids"].clone()
}

/// A conversation as the demo model's template writes it, with the beginning of an answer.
fn rendered(messages: &[(&str, &str)]) -> String {
    let turn =
        |(role, text): &(&str, &str)| format!("<|im_{role}|>{role}<|im_middle|>{text}<|im_end|>");
    let turns: String = messages.iter().map(turn).collect();
    format!("[BOS]{turns}<|im_assistant|>assistant<|im_middle|>")
}

fn reference() -> Value {
    serde_json::from_str(include_str!("../../testdata/stories-moe.json")).unwrap()
}

/// The second prompt holds the first turn, and its rows are not computed again.
#[test]
fn a_conversation_goes_through_the_template() {
    let reference = reference();
    let prompt = &reference["prompts"][3];
    let message = prompt["messages"][0]["content"].as_str().unwrap();
    let input = format!("{message}\n\nAnd at night?\n");
    let ways: [&[&str]; 3] = [&[], &["--tp", "2"], &["--tp", "2", "--processes", "--spec", "tree"]];
    for way in ways {
        let turns = turns(&[way, &["--max-tokens", "24"]].concat(), &input);
        assert_eq!(turns.len(), 2, "an empty line is no turn");
        assert_eq!(turns[0]["prompt_ids"], prompt["ids"]);
        let greedy = &prompt["greedy_ids"].as_array().unwrap()[..24];
        assert_eq!(turns[0]["token_ids"].as_array().unwrap()[..], *greedy, "{way:?}");
        let answer = turns[0]["text"].as_str().unwrap();
        let expected =
            rendered(&[("user", message), ("assistant", answer), ("user", "And at night?")]);
        assert_eq!(turns[1]["prompt_ids"], ids(&expected), "{way:?}");
        let reused = turns[1]["prefix_reused"].as_u64().unwrap();
        assert!(reused >= 16, "{way:?}: {reused}");
    }
}

/// A filter: answers on standard output, everything else on standard error.
#[test]
fn text_is_the_answers_only() {
    let input = "What is a bridge?\nWhat is a boat?\n";
    let expected: String = turns(&["--max-tokens", "12"], input)
        .iter()
        .map(|turn| format!("{}\n", turn["text"].as_str().unwrap()))
        .collect();
    let output = run(&["--max-tokens", "12"], input);
    assert!(output.status.success());
    assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
    let summaries = String::from_utf8(output.stderr).unwrap();
    assert_eq!(summaries.lines().filter(|line| line.contains("tok/s")).count(), 2, "{summaries}");
    let quiet = run(&["--max-tokens", "12", "--quiet"], input);
    assert!(quiet.stderr.is_empty());
}

#[test]
fn commands_change_the_conversation() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("record.json");
    let input = format!(
        "Hi\n/retry\n/system Be kind.\nHo\n/save {0}\n/clear\n//Hu\n/system\n/clear\nHe\\\nllo\\\n",
        file.display()
    );
    let turns = turns(&["--max-tokens", "4", "--system", "Be brief."], &input);
    let expect = |turn: usize, messages: &[(&str, &str)]| {
        assert_eq!(turns[turn]["prompt_ids"], ids(&rendered(messages)), "turn {turn}");
    };
    assert_eq!(turns.len(), 5);
    expect(0, &[("system", "Be brief."), ("user", "Hi")]);
    expect(1, &[("system", "Be brief."), ("user", "Hi")]);
    assert_eq!(turns[0]["token_ids"], turns[1]["token_ids"], "greedy");
    let answer = turns[1]["text"].as_str().unwrap();
    expect(2, &[("system", "Be kind."), ("user", "Hi"), ("assistant", answer), ("user", "Ho")]);
    expect(3, &[("system", "Be kind."), ("user", "/Hu")]);
    expect(4, &[("user", "He\nllo\n")]);
    let record: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let roles: Vec<&str> = record["messages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|message| message["role"].as_str().unwrap())
        .collect();
    assert_eq!(roles, ["system", "user", "assistant", "user", "assistant"]);
    assert_eq!(record["messages"][2]["content"], turns[1]["text"]);
    assert_eq!(record["messages"][4]["content"], turns[2]["text"]);
}

/// Sampled answers can be had again with a seed; /retry draws others.
#[test]
fn seeds_repeat_a_conversation() {
    let arguments = ["--temperature", "1", "--seed", "5", "--spec", "off", "--max-tokens", "16"];
    let input = "Tell a story.\n/retry\n/retry\n";
    let (first, second) = (turns(&arguments, input), turns(&arguments, input));
    let tokens = |turns: &[Value]| -> Vec<Value> {
        turns.iter().map(|turn| turn["token_ids"].clone()).collect()
    };
    assert_eq!(tokens(&first), tokens(&second));
    assert!(first[0]["token_ids"] != first[1]["token_ids"]);
}

/// Old turns go when there is no more room, and the system message stays.
#[test]
fn a_long_conversation_drops_its_oldest_turns() {
    let input = "Tell a story about a small dog and a big tree in the wood.\n".repeat(8);
    let arguments = ["--context", "160", "--max-tokens", "32", "--system", "Be kind."];
    let turns = turns(&arguments, &input);
    assert_eq!(turns.len(), 8);
    let system = ids("[BOS]<|im_system|>system<|im_middle|>Be kind.<|im_end|>");
    let system = system.as_array().unwrap();
    for turn in &turns {
        let prompt = turn["prompt_ids"].as_array().unwrap();
        assert!(prompt.starts_with(system));
        assert!(prompt.len() + 32 <= 160, "there is room for an answer");
    }
    let dropped: Vec<u64> =
        turns.iter().map(|turn| turn["dropped_turns"].as_u64().unwrap()).collect();
    assert!(dropped.is_sorted() && dropped[0] == 0 && dropped[7] > 0, "{dropped:?}");
    let output = run(&[&["--quiet"], &arguments[..]].concat(), &input);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("no longer fits into 160 tokens"), "{error}");
}

#[test]
fn a_message_that_fits_no_context_is_refused() {
    let input = format!("Hi\n{}\n", "word ".repeat(400));
    let error = failure(&["--context", "100", "--max-tokens", "4", "--quiet"], input);
    assert!(error.contains("line 2") && error.contains("--context"), "{error}");
    // Neither do they fit into memory: nothing is tokenized.
    for endless in ["x".repeat(100 * 256 + 1), "x\\\n".repeat(100 * 128 + 1)] {
        let error = failure(&["--context", "100"], endless);
        assert!(error.contains("longer than 25600 bytes"), "{error}");
    }
}

/// Each mistake has an answer that names it.
#[test]
fn mistakes_have_clear_answers() {
    let folder = tempfile::tempdir().unwrap();
    let existing = folder.path().join("existing");
    std::fs::write(&existing, "precious").unwrap();
    let save = format!("/save {}\n", existing.display());
    let cases: [(&[&str], &[u8], &str); 8] = [
        (&[], b"\n/nonsense\n", "line 2"),
        (&[], b"/save\n", "name of a file"),
        (&[], b"/retry\n", "nothing to answer"),
        (&[], b"/save /does/not/exist/file\n", "/does/not/exist/file"),
        (&[], save.as_bytes(), "exists already"),
        (&[], b"ab\xFF\n", "line 1 of standard input is not UTF-8"),
        (&["--template-arg", "x"], b"", "NAME=JSON"),
        (&["--top-p", "2"], b"Hi\n", "top-p"),
    ];
    for (arguments, input, expected) in cases {
        let error = failure(arguments, input);
        assert!(error.contains(expected), "{expected}: {error}");
    }
    assert_eq!(std::fs::read(&existing).unwrap(), b"precious");
    Synthetic::model(TinyModel::A).write(folder.path(), 1).unwrap();
    let error = failure(&["--model", folder.path().to_str().unwrap()], "Hi\n");
    assert!(error.contains("no tokenizer"), "{error}");
}

/// A template that refuses a conversation: the error says so, and nothing crashes.
#[test]
fn a_template_may_refuse() {
    let folder = tempfile::tempdir().unwrap();
    copy_demo(folder.path());
    let template = "{{ raise_exception('no talking today') }}";
    std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    let error = failure(&["--model", folder.path().to_str().unwrap()], "Hi\n");
    assert!(error.contains("no talking today"), "{error}");
}

/// The demo model as a directory.
fn copy_demo(folder: &Path) {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/demo/stories-moe");
    for entry in std::fs::read_dir(demo).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.join(path.file_name().unwrap())).unwrap();
    }
}

/// Nobody reads the answers: a quiet end.
#[test]
fn a_closed_pipe_is_no_error() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut child = chat(&["--max-tokens", "64", "--quiet"])
        .stdin(Stdio::piped())
        .stdout(writer)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let _ = child.stdin.take().unwrap().write_all(b"Tell a story.\nAnother.\n");
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

/// Issue 3: whoever reads one object and goes away ends the program, however many messages wait.
#[test]
fn a_reader_of_one_object_ends_the_conversation() {
    let mut child = chat(&["--json", "--max-tokens", "1", "--quiet"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    input.write_all(b"Hi\n").unwrap();
    let mut object = String::new();
    BufReader::new(output).read_line(&mut object).unwrap();
    assert!(serde_json::from_str::<Value>(&object).is_ok(), "{object}");
    // Writing fails as soon as the program has ended. Else it is slower than what is written.
    let deadline = Instant::now() + Duration::from_secs(60);
    while input.write_all(b"/clear\nHi\n").is_ok() {
        assert!(Instant::now() < deadline, "nobody reads the answers, and they are computed");
    }
    drop(input);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}
