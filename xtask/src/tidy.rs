//! `cargo xtask tidy`: the rules of docs/style.md that a program can check.
//!
//! Every rule is a function from text to [`Finding`]s, without a look at the disk, and has unit
//! tests on strings. This file only collects the texts and prints the findings. Rules of one file's
//! text are in `source.rs`, of links between documents in `links.rs`, of crates in `crates.rs`, of
//! the list of faults in `faults.rs`.

mod crates;
mod faults;
mod links;
mod source;

use std::collections::BTreeSet;
use std::fmt;

use anyhow::{Result, bail};

use crate::manifest::Manifest;
use crate::process::Invocation;
use crate::workspace::Workspace;

/// How much a finding matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Severity {
    /// Printed only.
    Warning,
    /// Tidy fails.
    Error,
}

/// One place that breaks a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    severity: Severity,
    file: String,
    /// Counted from 1; 0 when the whole file is meant.
    line: usize,
    message: String,
}

impl Finding {
    fn error(file: &str, line: usize, message: impl Into<String>) -> Self {
        Self { severity: Severity::Error, file: file.to_owned(), line, message: message.into() }
    }

    fn warning(file: &str, line: usize, message: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, ..Self::error(file, line, message) }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::Warning => "warning",
            Severity::Error => "error",
        };
        match self.line {
            0 => write!(formatter, "{}: {severity}: {}", self.file, self.message),
            line => write!(formatter, "{}:{line}: {severity}: {}", self.file, self.message),
        }
    }
}

/// Checks the workspace and fails when a rule is broken.
pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let files = workspace.files()?;
    let mut findings = check_files(workspace, &files)?;
    findings.extend(check_crates(workspace, &files)?);
    for finding in &findings {
        println!("{finding}");
    }
    let errors = findings.iter().filter(|finding| finding.severity == Severity::Error).count();
    let warnings = findings.len() - errors;
    println!("tidy: {} files, {errors} errors, {warnings} warnings", files.len());
    if errors > 0 {
        bail!("tidy found {errors} errors; the rules are in docs/style.md");
    }
    Ok(())
}

fn check_files(workspace: &Workspace, files: &[String]) -> Result<Vec<Finding>> {
    let known = known_paths(files);
    let mut findings = Vec::new();
    for file in files {
        let Some(text) = workspace.text(file)? else { continue };
        findings.extend(source::check(file, &text));
        if file.ends_with(".md") {
            findings.extend(links::check(file, &text, &known));
        }
        if file == faults::FILE {
            let text_of = |name: &str| workspace.text(name).ok().flatten();
            findings.extend(faults::check(&text, text_of));
        }
    }
    Ok(findings)
}

/// The files and all directories that hold one.
fn known_paths(files: &[String]) -> BTreeSet<String> {
    let mut known: BTreeSet<String> = files.iter().cloned().collect();
    for file in files {
        let directories = file.match_indices('/').map(|(at, _)| file[..at].to_owned());
        known.extend(directories);
    }
    known
}

fn check_crates(workspace: &Workspace, files: &[String]) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let root = read_manifest(workspace, "Cargo.toml")?;
    for member in &root.members {
        let manifest_file = format!("{member}/Cargo.toml");
        let manifest = read_manifest(workspace, &manifest_file)?;
        findings.extend(crates::check_manifest(&manifest_file, &manifest));
        if !files.contains(&format!("{member}/README.md")) {
            let message = "the crate has no README.md; say what it is for, with an example";
            findings.push(Finding::error(&manifest_file, 0, message));
        }
    }
    for rule in crates::TREE_RULES {
        let mut tree = Invocation::cargo(["tree", "--edges", "normal,build", "--prefix", "none"]);
        for package in rule.packages {
            tree = tree.argument("--package").argument(*package);
        }
        findings.extend(crates::check_tree(rule, &tree.output(workspace)?));
    }
    Ok(findings)
}

fn read_manifest(workspace: &Workspace, file: &str) -> Result<Manifest> {
    match workspace.text(file)? {
        Some(text) => Ok(Manifest::parse(&text)),
        None => bail!("{file} is not UTF-8"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_prints_where_and_what() {
        let finding = Finding::error("comm/src/lib.rs", 7, "too long");
        assert_eq!(finding.to_string(), "comm/src/lib.rs:7: error: too long");
        let finding = Finding::warning("comm/src/lib.rs", 0, "long");
        assert_eq!(finding.to_string(), "comm/src/lib.rs: warning: long");
    }

    #[test]
    fn directories_of_files_are_known() {
        let known = known_paths(&["docs/decisions/0001-a.md".to_owned()]);
        assert!(known.contains("docs") && known.contains("docs/decisions"));
        assert!(!known.contains("docs/results"));
    }
}
