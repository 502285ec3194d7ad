//! Where the workspace is and which files belong to it.
//!
//! Paths are relative to the root, with forward slashes, so that messages and rules read the same
//! wherever the checkout lies.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The checked-out repository.
pub(crate) struct Workspace {
    /// Absolute path of the directory that holds the root `Cargo.toml`.
    pub(crate) root: PathBuf,
}

impl Workspace {
    /// Finds the workspace that this program was built from.
    pub(crate) fn find() -> Result<Self> {
        let crate_directory = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root = crate_directory.parent().context("xtask lies in no workspace")?;
        if !root.join("Cargo.toml").is_file() {
            bail!("no Cargo.toml in {}: was the checkout moved? Build xtask again", root.display());
        }
        Ok(Self { root: root.to_path_buf() })
    }

    /// All files that git tracks or would track, sorted.
    pub(crate) fn files(&self) -> Result<Vec<String>> {
        let output = Command::new("git")
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .current_dir(&self.root)
            .output()
            .context("cannot run git, which lists the files to check; install it")?;
        if !output.status.success() {
            let reason = String::from_utf8_lossy(&output.stderr);
            bail!("git cannot list the files of {}: {}", self.root.display(), reason.trim());
        }
        let mut files: Vec<String> = String::from_utf8(output.stdout)
            .context("a file name is not UTF-8; rename it")?
            .split_terminator('\0')
            .map(str::to_owned)
            // A tracked file may be deleted in the work tree.
            .filter(|file| self.root.join(file).is_file())
            .collect();
        files.sort();
        files.dedup();
        Ok(files)
    }

    /// The text of a file, or `None` if it is not UTF-8.
    pub(crate) fn text(&self, file: &str) -> Result<Option<String>> {
        let bytes =
            fs::read(self.root.join(file)).with_context(|| format!("cannot read {file}"))?;
        Ok(String::from_utf8(bytes).ok())
    }
}
