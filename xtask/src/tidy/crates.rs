//! Rules about crates: which may depend on which, and what a dependency tree must not hold.

use super::Finding;
use crate::manifest::Manifest;

/// Which crates of the workspace each crate may use; the arrows point one way.
const MAY_USE: [(&str, &[&str]); 7] = [
    ("paceline-kernels", &[]),
    ("paceline-comm", &["paceline-kernels"]),
    ("paceline-model", &["paceline-kernels", "paceline-comm"]),
    ("paceline-spec", &[]),
    ("paceline-runtime", &["paceline-kernels", "paceline-comm", "paceline-model", "paceline-spec"]),
    (
        "paceline-cli",
        &[
            "paceline-kernels",
            "paceline-comm",
            "paceline-model",
            "paceline-spec",
            "paceline-runtime",
        ],
    ),
    ("xtask", &[]),
];
/// The crates whose errors end in a message to a person.
const MAY_USE_ANYHOW: [&str; 2] = ["paceline-cli", "xtask"];
/// The crates that may declare features: the one that tests them and the one that forwards them.
const MAY_HAVE_FEATURES: [&str; 2] = ["paceline-comm", "paceline-cli"];

/// A package that must not be in the dependency tree of some others.
pub(super) struct TreeRule {
    /// Whose tree, dependencies of dependencies included.
    pub(super) packages: &'static [&'static str],
    forbidden: &'static str,
    reason: &'static str,
}

/// The rules about whole dependency trees.
pub(super) const TREE_RULES: &[TreeRule] = &[
    TreeRule {
        packages: &["paceline-spec"],
        forbidden: "cudarc",
        reason: "speculation is pure and knows no device",
    },
    TreeRule {
        packages: &[
            "paceline-kernels",
            "paceline-comm",
            "paceline-model",
            "paceline-spec",
            "paceline-runtime",
        ],
        forbidden: "tokio",
        reason: "only cli may have an asynchronous runtime",
    },
];

/// Checks the direct dependencies and the features of one crate.
pub(super) fn check_manifest(file: &str, manifest: &Manifest) -> Vec<Finding> {
    let name = manifest.name.as_str();
    let Some((_, may_use)) = MAY_USE.iter().find(|(package, _)| *package == name) else {
        let message = format!("tidy does not know `{name}`; add it to xtask/src/tidy/crates.rs");
        return vec![Finding::error(file, 0, message)];
    };
    let mut findings = Vec::new();
    for (dependency, line) in &manifest.dependencies {
        let is_ours = MAY_USE.iter().any(|(package, _)| package == dependency);
        if is_ours && !may_use.contains(&dependency.as_str()) {
            let message = format!("{name} must not depend on {dependency}: arrows point one way");
            findings.push(Finding::error(file, *line, message));
        }
        if dependency == "anyhow" && !MAY_USE_ANYHOW.contains(&name) {
            let message = "a library has a typed error (thiserror); anyhow is for cli and xtask";
            findings.push(Finding::error(file, *line, message));
        }
    }
    if !manifest.features.is_empty() && !MAY_HAVE_FEATURES.contains(&name) {
        let message = format!("{name} must have no features, has {:?}", manifest.features);
        findings.push(Finding::error(file, 0, message));
    }
    findings
}

/// Checks the output of `cargo tree --prefix none`.
pub(super) fn check_tree(rule: &TreeRule, tree: &str) -> Vec<Finding> {
    let is_there = tree.lines().any(|line| line.split(' ').next() == Some(rule.forbidden));
    if !is_there {
        return Vec::new();
    }
    let message = format!(
        "{} is in the dependency tree of {}: {}; `cargo tree --invert {}` says through whom",
        rule.forbidden,
        rule.packages.join(", "),
        rule.reason,
        rule.forbidden,
    );
    vec![Finding::error("Cargo.lock", 0, message)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<usize> {
        let findings = check_manifest("Cargo.toml", &Manifest::parse(text));
        findings.iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn arrows_point_one_way() {
        let manifest = |name: &str, dependency: &str| {
            format!("[package]\nname = \"{name}\"\n[dependencies]\n{dependency}.workspace = true\n")
        };
        assert_eq!(lines(&manifest("paceline-comm", "paceline-kernels")), []);
        assert_eq!(lines(&manifest("paceline-kernels", "paceline-comm")), [4]);
        assert_eq!(lines(&manifest("paceline-spec", "paceline-kernels")), [4]);
        assert_eq!(lines(&manifest("paceline-model", "paceline-spec")), [4]);
        assert_eq!(lines(&manifest("xtask", "paceline-cli")), [4]);
        assert_eq!(lines(&manifest("paceline-runtime", "paceline-spec")), []);
    }

    #[test]
    fn dependencies_of_tests_follow_the_same_arrows() {
        let text = "[package]\nname = \"paceline-comm\"\n[dev-dependencies.paceline-model]\n";
        assert_eq!(lines(text), [3]);
    }

    #[test]
    fn every_arrow_leads_to_a_known_crate_that_does_not_lead_back() {
        let of = |name: &str| MAY_USE.iter().find(|(package, _)| *package == name);
        for (name, may_use) in MAY_USE {
            for dependency in may_use {
                let (_, back) = of(dependency).expect("the crate has an entry of its own");
                assert!(!back.contains(&name), "{name} and {dependency} use each other");
            }
        }
    }

    #[test]
    fn anyhow_is_for_programs() {
        let manifest =
            |name: &str| format!("[package]\nname = \"{name}\"\n[dependencies]\nanyhow = \"1\"\n");
        assert_eq!(lines(&manifest("paceline-cli")), []);
        assert_eq!(lines(&manifest("paceline-model")), [4]);
    }

    #[test]
    fn features_and_unknown_crates_are_found() {
        let text = "[package]\nname = \"paceline-model\"\n[features]\ncuda = []\n";
        assert_eq!(lines(text), [0]);
        assert_eq!(lines("[package]\nname = \"paceline-server\"\n"), [0]);
    }

    #[test]
    fn a_forbidden_package_is_found_by_its_whole_name() {
        let [rule, ..] = TREE_RULES else { panic!("there are rules") };
        let clean = "paceline-spec v0.1.0 (/src/spec)\nthiserror v2.0.0\ncudarc-like v1.0.0\n";
        assert_eq!(check_tree(rule, clean), []);
        let findings = check_tree(rule, &format!("{clean}cudarc v0.19.10 (*)\n"));
        assert_eq!(findings.len(), 1);
    }
}
