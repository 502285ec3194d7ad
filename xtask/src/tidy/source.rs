//! Rules about the text of one file: length, width, module docs, forbidden words, features.

use super::Finding;

const LINES_WARN: usize = 500;
const LINES_MAX: usize = 600;
const COLUMNS_MAX: usize = 100;
/// The reason for a long file stands among the module docs, so near the top.
const REASON_WITHIN_LINES: usize = 40;
const REASON: &str = "//! Long because ";
const FEATURE_FILE: &str = "comm/src/backend.rs";

// The words are put together here so that this file does not break its own rules.
const WORDS: [&str; 2] = [concat!("TO", "DO"), concat!("FIX", "ME")];
const MACROS: [&str; 2] = [concat!("to", "do!("), concat!("unimple", "mented!(")];
const FEATURE: &str = concat!("feat", "ure");

/// Applies all rules of this file to a text.
pub(super) fn check(file: &str, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    if !is_data(file) {
        check_words(file, text, &mut findings);
    }
    if file.ends_with(".rs") {
        check_length(file, text, &mut findings);
        check_columns(file, text, &mut findings);
        check_features(file, text, &mut findings);
        if file.contains("/src/") {
            check_module_docs(file, text, &mut findings);
        }
    }
    findings
}

/// Vocabularies and golden values may hold any word.
fn is_data(file: &str) -> bool {
    file.ends_with(".json") || file.ends_with(".lock")
}

fn check_words(file: &str, text: &str, findings: &mut Vec<Finding>) {
    for (number, line) in numbered(text) {
        for word in WORDS.iter().filter(|word| has_word(line, word)) {
            let message = format!("`{word}`: do it, or file an issue and say here what holds now");
            findings.push(Finding::error(file, number, message));
        }
        for name in MACROS.iter().filter(|name| line.contains(**name)) {
            let message = format!("`{name}…)`: a part that is not there must not compile");
            findings.push(Finding::error(file, number, message));
        }
    }
}

fn check_length(file: &str, text: &str, findings: &mut Vec<Finding>) {
    let lines = text.lines().count();
    let has_reason = text.lines().take(REASON_WITHIN_LINES).any(|line| line.starts_with(REASON));
    if has_reason || lines <= LINES_WARN {
        return;
    }
    let message = format!("{lines} lines; split it, or say why in a line `{REASON}…` near the top");
    findings.push(if lines > LINES_MAX {
        Finding::error(file, 0, format!("{message} (more than {LINES_MAX})"))
    } else {
        Finding::warning(file, 0, format!("{message} (more than {LINES_WARN})"))
    });
}

fn check_columns(file: &str, text: &str, findings: &mut Vec<Finding>) {
    for (number, line) in numbered(text) {
        let columns = line.chars().count();
        if columns > COLUMNS_MAX {
            let message = format!("{columns} columns; the limit is {COLUMNS_MAX}");
            findings.push(Finding::error(file, number, message));
        }
    }
}

fn check_features(file: &str, text: &str, findings: &mut Vec<Finding>) {
    if file == FEATURE_FILE {
        return;
    }
    for (number, line) in numbered(text) {
        let mut rests = line.split(FEATURE).skip(1);
        if rests.any(|rest| rest.trim_start().starts_with('=')) {
            let message = format!("features are tested in {FEATURE_FILE} and nowhere else");
            findings.push(Finding::error(file, number, message));
        }
    }
}

fn check_module_docs(file: &str, text: &str, findings: &mut Vec<Finding>) {
    // `#![doc = include_str!("../README.md")]` makes the README the module's docs.
    let first = text.lines().find(|line| !line.trim().is_empty()).unwrap_or("");
    if !first.starts_with("//!") && !first.starts_with("#![doc") {
        let message = "no module docs; start with `//!`: what for, which invariant, where to read";
        findings.push(Finding::error(file, 1, message));
    }
}

fn has_word(line: &str, word: &str) -> bool {
    let is_word = |character: char| character.is_alphanumeric() || character == '_';
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + word.len()..].chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    })
}

fn numbered(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().map(|(index, line)| (index + 1, line))
}

#[cfg(test)]
mod tests {
    use super::super::Severity;
    use super::*;

    fn messages(file: &str, text: &str) -> Vec<(usize, Severity)> {
        check(file, text).iter().map(|finding| (finding.line, finding.severity)).collect()
    }

    #[test]
    fn a_clean_file_has_no_findings() {
        let text = "//! Docs.\n\nfn main() {\n    // A feature is tested elsewhere.\n}\n";
        assert_eq!(messages("comm/src/lib.rs", text), []);
    }

    #[test]
    fn forbidden_words_are_found_as_words() {
        for word in WORDS {
            let text = format!("# Title\n\n{word}: later\n{word}S and a{word} are other words\n");
            assert_eq!(messages("docs/plan.md", &text), [(3, Severity::Error)]);
            assert_eq!(messages("model/demo/tokenizer.json", &text), []);
        }
    }

    #[test]
    fn forbidden_macros_are_found() {
        for name in MACROS {
            let text = format!("//! Docs.\nfn f() {{\n    {name})\n}}\n");
            assert_eq!(messages("comm/src/lib.rs", &text), [(3, Severity::Error)]);
        }
    }

    #[test]
    fn long_files_need_a_reason() {
        let text = |lines: usize| format!("//! Docs.\n{}", "\n".repeat(lines - 1));
        assert_eq!(messages("comm/src/lib.rs", &text(LINES_WARN)), []);
        let warned = messages("comm/src/lib.rs", &text(LINES_WARN + 1));
        assert_eq!(warned, [(0, Severity::Warning)]);
        assert_eq!(messages("comm/src/lib.rs", &text(LINES_MAX)), [(0, Severity::Warning)]);
        assert_eq!(messages("comm/src/lib.rs", &text(LINES_MAX + 1)), [(0, Severity::Error)]);
        let excused = format!("//! Docs.\n{REASON}it is a table.\n{}", "\n".repeat(LINES_MAX));
        assert_eq!(messages("comm/src/lib.rs", &excused), []);
        let too_late = format!("{}{REASON}it is a table.\n", text(LINES_MAX));
        assert_eq!(messages("comm/src/lib.rs", &too_late), [(0, Severity::Error)]);
    }

    #[test]
    fn columns_are_counted_in_characters() {
        let text = |columns: usize| format!("//! {}\n", "é".repeat(columns - 4));
        assert_eq!(messages("comm/src/lib.rs", &text(COLUMNS_MAX)), []);
        assert_eq!(messages("comm/src/lib.rs", &text(COLUMNS_MAX + 1)), [(1, Severity::Error)]);
        assert_eq!(messages("README.md", &text(COLUMNS_MAX + 1)), []);
    }

    #[test]
    fn features_are_tested_in_one_file() {
        for equals in ["=", " =", "  ="] {
            let text = format!("//! Docs.\n#[cfg({FEATURE}{equals} \"p2p\")]\nmod p2p;\n");
            assert_eq!(messages("comm/src/lib.rs", &text), [(2, Severity::Error)]);
            assert_eq!(messages("model/tests/load.rs", &text), [(2, Severity::Error)]);
            assert_eq!(messages(FEATURE_FILE, &text), []);
        }
        let two = format!("//! Docs.\n// A {FEATURE} is a {FEATURE} = yes.\n");
        assert_eq!(messages("comm/src/lib.rs", &two), [(2, Severity::Error)]);
    }

    #[test]
    fn source_files_need_module_docs() {
        assert_eq!(messages("comm/src/a.rs", "use std::fs;\n"), [(1, Severity::Error)]);
        assert_eq!(messages("comm/src/a.rs", ""), [(1, Severity::Error)]);
        assert_eq!(messages("comm/src/a.rs", "\n//! Docs.\n"), []);
        let readme = "#![doc = include_str!(\"../README.md\")]\n";
        assert_eq!(messages("comm/src/lib.rs", readme), []);
        assert_eq!(messages("comm/tests/agree.rs", "use std::fs;\n"), []);
    }
}
