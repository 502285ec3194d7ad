//! The few facts of a `Cargo.toml` that tidy and CI need: its name, dependencies and features.
//!
//! This is no TOML parser: it reads the layout that this workspace uses (tables, dotted keys,
//! arrays over several lines) and needs no dependency for it. What it does not understand it
//! leaves out.

use crate::cuda::toml::{statements, strings};

/// What a `Cargo.toml` says.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Manifest {
    /// `package.name`; empty for a manifest without a package.
    pub(crate) name: String,
    /// Names of the packages in every kind of dependency table, with their line, counted from 1.
    pub(crate) dependencies: Vec<(String, usize)>,
    /// Names in `[features]`, without `default`.
    pub(crate) features: Vec<String>,
    /// `workspace.members`.
    pub(crate) members: Vec<String>,
}

impl Manifest {
    /// Reads the text of a `Cargo.toml`.
    pub(crate) fn parse(text: &str) -> Self {
        let mut manifest = Self::default();
        let mut table = Table::Other;
        for (number, statement) in statements(text) {
            if let Some(header) = statement.strip_prefix('[') {
                table = Table::of(header.trim_end_matches(']').trim());
                if let Table::OneDependency(name) = &table {
                    manifest.dependencies.push((name.clone(), number));
                }
            } else if let Some((key, value)) = statement.split_once('=') {
                manifest.add(&mut table, number, key.trim(), value.trim());
            }
        }
        manifest
    }

    fn add(&mut self, table: &mut Table, number: usize, key: &str, value: &str) {
        match table {
            Table::Package if key == "name" => self.name = unquote(value).to_owned(),
            Table::Workspace if key == "members" => self.members = strings(value),
            Table::Features if key != "default" => self.features.push(unquote(key).to_owned()),
            Table::Dependencies => {
                // `name.workspace = true` and `name = { package = "other" }` both occur.
                let alias = key.split('.').next().unwrap_or(key);
                let package = value.split_once("package").and_then(|(_, rest)| {
                    strings(rest.trim_start().strip_prefix('=')?).into_iter().next()
                });
                let name = package.unwrap_or_else(|| unquote(alias).to_owned());
                self.dependencies.push((name, number));
            }
            Table::OneDependency(_) if key == "package" => {
                if let Some(last) = self.dependencies.last_mut() {
                    last.0 = unquote(value).to_owned();
                }
            }
            _ => {}
        }
    }
}

enum Table {
    Package,
    Workspace,
    Features,
    Dependencies,
    OneDependency(String),
    Other,
}

impl Table {
    fn of(header: &str) -> Self {
        const KINDS: [&str; 3] = ["dependencies", "dev-dependencies", "build-dependencies"];
        match header {
            "package" => return Self::Package,
            "workspace" => return Self::Workspace,
            "features" => return Self::Features,
            _ => {}
        }
        // `[target.'cfg(unix)'.dependencies]` counts, `[workspace.dependencies]` does not: that is
        // a list of versions.
        if header.starts_with("workspace.") {
            return Self::Other;
        }
        if KINDS.iter().any(|kind| last_key(header) == *kind) {
            return Self::Dependencies;
        }
        match header.rsplit_once('.') {
            Some((before, name)) if KINDS.iter().any(|kind| last_key(before) == *kind) => {
                Self::OneDependency(unquote(name).to_owned())
            }
            _ => Self::Other,
        }
    }
}

fn last_key(header: &str) -> &str {
    header.rsplit('.').next().unwrap_or(header)
}

fn unquote(value: &str) -> &str {
    value.trim().trim_matches(['"', '\''])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(manifest: &Manifest) -> Vec<&str> {
        manifest.dependencies.iter().map(|(name, _)| name.as_str()).collect()
    }

    #[test]
    fn reads_every_kind_of_dependency() {
        let manifest = Manifest::parse(
            r#"
[package]
name = "paceline-model" # the name
[dependencies]
paceline-comm.workspace = true
half = { version = "2", features = [
    "bytemuck",
] }
alias = { package = "real-name", version = "1" }
[target.'cfg(unix)'.dependencies]
rustix = "1"
[dev-dependencies.tempfile]
workspace = true
[build-dependencies]
cc = "1"
"#,
        );
        assert_eq!(manifest.name, "paceline-model");
        let expected = ["paceline-comm", "half", "real-name", "rustix", "tempfile", "cc"];
        assert_eq!(names(&manifest), expected);
        assert_eq!(manifest.dependencies[0].1, 5);
    }

    #[test]
    fn the_workspace_table_is_no_dependency() {
        let manifest = Manifest::parse(
            "[workspace]\nmembers = [\n  \"comm\", # first\n  \"cli\",\n]\n\
             [workspace.dependencies]\nanyhow = \"1\"\n",
        );
        assert_eq!(manifest.members, ["comm", "cli"]);
        assert_eq!(names(&manifest), [""; 0]);
    }

    #[test]
    fn features_are_read_without_default() {
        let manifest = Manifest::parse(
            "[features]\ndefault = [\"p2p\"]\np2p = []\nsymm-mem = [\n \"p2p\",\n]\n",
        );
        assert_eq!(manifest.features, ["p2p", "symm-mem"]);
    }

    #[test]
    fn a_hash_in_a_string_is_no_comment() {
        let manifest = Manifest::parse("[package]\ndescription = \"a # b\"\nname = \"c#d\"\n");
        assert_eq!(manifest.name, "c#d");
    }
}
