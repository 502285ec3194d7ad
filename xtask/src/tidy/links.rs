//! Rule: a link in a Markdown file that points into the repository points to something.

use std::collections::BTreeSet;

use super::Finding;

/// Checks the links of one Markdown file. `known` holds all files and directories.
pub(super) fn check(file: &str, text: &str, known: &BTreeSet<String>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (number, target) in targets(text) {
        let Some(path) = local_path(&target) else { continue };
        let found =
            resolve(file, path).is_some_and(|path| path.is_empty() || known.contains(&path));
        if !found {
            let message = format!("the link `{target}` points to nothing in the repository");
            findings.push(Finding::error(file, number, message));
        }
    }
    findings
}

/// The targets of `[text](target)` and `[label]: target`, outside code, with their lines.
fn targets(text: &str) -> Vec<(usize, String)> {
    let mut targets = Vec::new();
    let mut fence = None;
    for (index, line) in text.lines().enumerate() {
        let mark = ["```", "~~~"].into_iter().find(|mark| line.trim_start().starts_with(mark));
        match (fence, mark) {
            (None, Some(_)) => fence = mark,
            (Some(open), Some(mark)) if open == mark => fence = None,
            _ => {}
        }
        if fence.is_some() || mark.is_some() {
            continue;
        }
        let line = without_code(line);
        let inline = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        targets.extend(inline.map(|target| (index + 1, target.to_owned())));
        if let Some((label, target)) = line.split_once("]: ")
            && label.starts_with('[')
            && !label.contains(']')
        {
            targets.push((index + 1, target.to_owned()));
        }
    }
    targets
}

/// The line with the text between backticks removed.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join("``")
}

/// The path part of a target, or `None` for a web address, an anchor or a Rust path.
fn local_path(target: &str) -> Option<&str> {
    let target = target.split_whitespace().next()?.trim_matches(['<', '>']);
    if target.contains("://") || target.contains("::") || target.starts_with("mailto:") {
        return None;
    }
    let path = target.split('#').next()?;
    (!path.is_empty()).then_some(path)
}

/// The path from the root of a path that is relative to `file`; `None` when it leaves the root.
fn resolve(file: &str, path: &str) -> Option<String> {
    let mut parts: Vec<&str> = file.split('/').collect();
    parts.pop();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            name => parts.push(name),
        }
    }
    Some(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn broken(file: &str, text: &str) -> Vec<usize> {
        let known = ["docs", "docs/style.md", "docs/decisions", "README.md", "comm/README.md"];
        let known = known.map(str::to_owned).into_iter().collect();
        check(file, text, &known).iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn links_are_relative_to_their_file() {
        assert_eq!(broken("docs/style.md", "See [why](decisions) and [top](../README.md#a)."), []);
        assert_eq!(broken("README.md", "See\n[a](docs/style.md) and [b](style.md)."), [2]);
        assert_eq!(broken("comm/README.md", "[root](..) [out](../../x)"), [1]);
    }

    #[test]
    fn other_kinds_of_target_are_left_alone() {
        let text = "[a](https://example.org/x) [b](#part) [c](crate::Tensor) [d](mailto:a@b.c)";
        assert_eq!(broken("README.md", text), []);
    }

    #[test]
    fn code_is_left_alone() {
        assert_eq!(broken("README.md", "`a[i](x)` and\n```\n[b](gone.md)\n```\n[c](gone.md)"), [5]);
    }

    #[test]
    fn reference_links_are_checked() {
        assert_eq!(broken("README.md", "[style]: docs/style.md\n[gone]: docs/gone.md"), [2]);
    }
}
