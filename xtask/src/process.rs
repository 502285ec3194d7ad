//! Running other programs: an invocation as data, so that it can be printed, listed and run.

use std::fmt;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::workspace::Workspace;

/// A program with its arguments and what it changes in the environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Invocation {
    program: String,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
}

impl Invocation {
    /// An invocation of cargo with the given arguments.
    pub(crate) fn cargo<const N: usize>(arguments: [&str; N]) -> Self {
        Self {
            program: "cargo".to_owned(),
            arguments: arguments.map(str::to_owned).to_vec(),
            environment: Vec::new(),
        }
    }

    /// Adds an argument.
    pub(crate) fn argument(mut self, argument: impl Into<String>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// Sets an environment variable.
    pub(crate) fn variable(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// The command to start, in the workspace's root.
    pub(crate) fn command(&self, workspace: &Workspace) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).current_dir(&workspace.root);
        // `cargo run` sets variables for the program that it runs; a cargo below it must not see
        // them, or it compiles crates again that read them.
        for (name, _) in std::env::vars_os() {
            if name.to_str().is_some_and(is_set_by_cargo_run) {
                command.env_remove(name);
            }
        }
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Runs with the output going to the terminal; fails if the program does.
    pub(crate) fn run(&self, workspace: &Workspace) -> Result<()> {
        let status = self
            .command(workspace)
            .status()
            .with_context(|| format!("cannot start `{self}`; is it installed?"))?;
        if !status.success() {
            bail!("`{self}` failed ({status})");
        }
        Ok(())
    }

    /// Runs and returns standard output; the error holds standard error.
    pub(crate) fn output(&self, workspace: &Workspace) -> Result<String> {
        let output = self
            .command(workspace)
            .output()
            .with_context(|| format!("cannot start `{self}`; is it installed?"))?;
        if !output.status.success() {
            let reason = String::from_utf8_lossy(&output.stderr);
            bail!("`{self}` failed ({}):\n{}", output.status, reason.trim());
        }
        String::from_utf8(output.stdout).with_context(|| format!("`{self}` printed no UTF-8"))
    }

    /// Whether the program can be started and ends with success.
    pub(crate) fn succeeds(&self, workspace: &Workspace) -> bool {
        self.command(workspace).output().is_ok_and(|output| output.status.success())
    }
}

impl fmt::Display for Invocation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, value) in &self.environment {
            write!(formatter, "{name}={} ", quoted(value))?;
        }
        formatter.write_str(&self.program)?;
        for argument in &self.arguments {
            write!(formatter, " {}", quoted(argument))?;
        }
        Ok(())
    }
}

fn is_set_by_cargo_run(name: &str) -> bool {
    name.starts_with("CARGO_PKG_") || name == "CARGO_MANIFEST_DIR" || name == "CARGO_MANIFEST_PATH"
}

/// The text as a shell would need it.
fn quoted(text: &str) -> String {
    if text.contains(' ') || text.is_empty() { format!("\"{text}\"") } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invocation_prints_as_a_shell_line() {
        let invocation =
            Invocation::cargo(["doc", "--no-deps"]).variable("RUSTDOCFLAGS", "-D warnings");
        assert_eq!(invocation.to_string(), "RUSTDOCFLAGS=\"-D warnings\" cargo doc --no-deps");
        let invocation = Invocation::cargo(["check"]).argument("--features").argument("");
        assert_eq!(invocation.to_string(), "cargo check --features \"\"");
    }

    #[test]
    fn a_program_that_does_not_exist_is_named() {
        let workspace = Workspace::find().expect("the tests run in the workspace");
        let mut invocation = Invocation::cargo(["--version"]);
        invocation.program = "no-such-program-anywhere".to_owned();
        let error = invocation.run(&workspace).expect_err("there is no such program");
        assert!(error.to_string().contains("no-such-program-anywhere"), "{error}");
        assert!(!invocation.succeeds(&workspace));
    }
}
