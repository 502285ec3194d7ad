//! Completions, manual pages, and all that prints into a pipe that nobody reads.

use std::{
    collections::BTreeSet,
    process::{Command, Output},
};

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_paceline")).args(arguments).output().unwrap()
}

fn text(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn every_shell_knows_all_commands_and_options() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = text(&["completions", shell]);
        for word in ["generate", "chat", "bench", "draft-tokens", "repetition-penalty"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
    let error = String::from_utf8(run(&["completions", "tcsh"]).stderr).unwrap();
    assert!(error.contains("powershell"), "{error}");
}

/// The script does what a shell asks of it.
#[test]
fn bash_completes() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("paceline");
    std::fs::write(&script, text(&["completions", "bash"])).unwrap();
    let complete = |words: &str, index: usize, word: &str, before: &str| {
        let commands = format!(
            "source {}; COMP_WORDS=({words}); COMP_CWORD={index}; \
             _paceline paceline '{word}' '{before}'; echo \"${{COMPREPLY[@]}}\"",
            script.display()
        );
        let output = Command::new("bash").args(["-c", &commands]).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    assert_eq!(complete("paceline ge", 1, "ge", "paceline"), "generate");
    assert_eq!(complete("paceline generate --spec tr", 3, "tr", "--spec"), "tree");
    assert_eq!(complete("paceline bench dec", 2, "dec", "bench"), "decode");
}

#[test]
fn each_command_has_a_manual_page() {
    let main = text(&["man"]);
    assert!(main.contains(".TH paceline 1") && main.contains("paceline\\-generate(1)"), "{main}");
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("man1");
    assert_eq!(text(&["man", "--dir", pages.to_str().unwrap()]), "");
    let names: BTreeSet<String> = std::fs::read_dir(&pages)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let help = text(&["--help"]);
    let commands = help.split("Commands:").nth(1).unwrap().split("\n\n").next().unwrap();
    let commands =
        commands.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let mut expected: BTreeSet<String> = commands
        .map(|line| line.split_whitespace().next().unwrap())
        .filter(|&name| name != "help")
        .map(|name| format!("paceline-{name}.1"))
        .collect();
    expected.insert("paceline.1".to_owned());
    expected.insert("paceline-bench-decode.1".to_owned());
    expected.insert("paceline-bench-all-reduce.1".to_owned());
    assert_eq!(names, expected);
    let generate = std::fs::read_to_string(pages.join("paceline-generate.1")).unwrap();
    assert!(generate.contains("draft\\-tokens") && generate.contains("SAMPLING"), "{generate}");
    assert_eq!(text(&["man", "generate"]), generate);
    let decode = std::fs::read_to_string(pages.join("paceline-bench-decode.1")).unwrap();
    assert_eq!(text(&["man", "bench", "decode"]), decode);
    let error = String::from_utf8(run(&["man", "nonsense"]).stderr).unwrap();
    assert!(error.contains("generate, chat"), "{error}");
    // Every page that is referred to is there.
    let main = std::fs::read_to_string(pages.join("paceline.1")).unwrap();
    for line in main.lines().filter(|line| line.ends_with("(1)")) {
        let name = line.replace('\\', "").replace("(1)", ".1");
        assert!(names.contains(&name), "{name}");
    }
    let error = run(&["man", "--dir", "/dev/null/pages"]);
    assert!(!error.status.success());
    assert!(String::from_utf8(error.stderr).unwrap().contains("/dev/null/pages"));
}

/// As `paceline … | head -1` when head has gone: a quiet end.
#[test]
fn closed_pipes_are_no_errors() {
    let commands: [&[&str]; 10] = [
        &["--help"],
        &["--version"],
        &["generate", "--help"],
        &["generate", "--prompt", "Once", "--max-tokens", "64", "--quiet"],
        &["generate", "--prompt", "Once", "--max-tokens", "4", "--json", "--quiet"],
        &["inspect"],
        &["doctor"],
        &["completions", "zsh"],
        &["man"],
        &["bench", "decode", "--quick", "--parts", "prompt", "--quiet"],
    ];
    for command in commands {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = Command::new(env!("CARGO_BIN_EXE_paceline"))
            .args(command)
            .stdout(writer)
            .output()
            .unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && error.is_empty(), "{command:?}: {error}");
    }
}

/// Nobody reads the errors and notes either: no panic, and the exit status tells.
#[test]
fn closed_standard_error_is_no_trouble() {
    let cases: [(&[&str], bool); 3] = [
        (&["generate", "--prompt", "Once", "--max-tokens", "4"], true),
        (&["generate", "--model", "/does/not/exist", "--prompt", "x"], false),
        (&["generate", "--nonsense"], false),
    ];
    for (command, success) in cases {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut process = Command::new(env!("CARGO_BIN_EXE_paceline"));
        let status = process.args(command).stdout(writer.try_clone().unwrap()).stderr(writer);
        let code = status.status().unwrap().code();
        // 101 is a panic.
        assert!(code.is_some_and(|code| (code == 0) == success && code != 101), "{code:?}");
    }
}
