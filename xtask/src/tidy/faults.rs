//! Rule: the tests and types that docs/faults.md names exist.

use super::Finding;

/// The page that names them, as `` `file.rs::name` `` or `` `file.rs` ``.
pub(super) const FILE: &str = "docs/faults.md";

/// Checks the names on the page; `text_of` gives the text of a file, if there is one.
pub(super) fn check(page: &str, text_of: impl Fn(&str) -> Option<String>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (number, line) in page.lines().enumerate() {
        for code in line.split('`').skip(1).step_by(2) {
            let (file, name) = match code.split_once(".rs::") {
                Some((stem, name)) => (format!("{stem}.rs"), Some(name)),
                None if code.ends_with(".rs") => (code.to_owned(), None),
                None => continue,
            };
            let message = match (text_of(&file), name) {
                (None, _) => format!("there is no file {file}"),
                (Some(text), Some(name)) if !defines(&text, name) => {
                    format!("{file} defines no `{name}`; was it renamed?")
                }
                _ => continue,
            };
            findings.push(Finding::error(FILE, number + 1, message));
        }
    }
    findings
}

/// Whether a source file defines a function or a type of this name.
fn defines(text: &str, name: &str) -> bool {
    ["fn", "struct", "enum", "trait", "type", "const"].iter().any(|keyword| {
        let start = format!("{keyword} {name}");
        text.match_indices(&start).any(|(at, _)| {
            let next = text[at + start.len()..].chars().next();
            !next.is_some_and(|next| next.is_alphanumeric() || next == '_')
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_do_not_exist_are_found() {
        let text_of = |file: &str| {
            let text = "#[test]\nfn it_works() {}\npub struct Plan<'a> {}\n";
            (file == "spec/tests/plan.rs").then(|| text.to_owned())
        };
        let lines = |page: &str| -> Vec<usize> {
            check(page, text_of).iter().map(|finding| finding.line).collect()
        };
        assert_eq!(lines("| `spec/tests/plan.rs::it_works` and `spec/tests/plan.rs::Plan` |"), []);
        assert_eq!(lines("`spec/tests/plan.rs`, `paceline bench`, spec/x.rs"), []);
        assert_eq!(
            lines("\n| `spec/tests/plan.rs::it_work` | `spec/tests/plan.rs::works` |"),
            [2, 2]
        );
        assert_eq!(lines("`spec/tests/other.rs::it_works`"), [1]);
    }
}
