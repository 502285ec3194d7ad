//! Development tasks of paceline: `cargo xtask tidy`, `ci`, `kernels` and `bundle`.
//!
//! One file a subcommand; this one only reads the command line. Start reading in `ci.rs` (the list
//! of CI steps) or in `tidy.rs` (the list of rules). The crate uses no other crate of the
//! workspace, so it builds in a second and can check a workspace that does not compile; the one
//! folder that it shares is `kernels/build/`, which is compiled into both.

mod bundle;
mod ci;
#[path = "../../kernels/build/mod.rs"]
mod cuda;
mod kernels;
mod manifest;
mod process;
mod tidy;
mod workspace;

use std::env;
use std::process::ExitCode;

use anyhow::{Result, bail};

use crate::workspace::Workspace;

const HELP: &str = "\
Development tasks of paceline.

Usage: cargo xtask <command>

Commands:
  tidy           check the rules of docs/style.md that a program can check
  ci             run every step of CI and stop at the first that fails
  ci <step>...   run only the named steps
  ci --list      print the steps and the commands behind them
  kernels        compile the CUDA sources, with an nvcc that is found or installed from PyPI
    --arch <target>...  only for these, as in sm_90a
    --check             fail where nvcc is too old for a target, as CI does
  bundle         pack the binary and the GPU tests for a machine without cargo
  help           print this text
";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[&str]) -> Result<()> {
    match arguments {
        [] | ["help" | "-h" | "--help"] => {
            print!("{HELP}");
            Ok(())
        }
        ["tidy"] => tidy::run(&Workspace::find()?),
        ["ci", "--list"] => ci::list(&Workspace::find()?),
        ["ci", steps @ ..] => ci::run(&Workspace::find()?, steps),
        ["kernels", options @ ..] => {
            kernels::run(&Workspace::find()?, &kernels::Options::parse(options)?)
        }
        ["bundle"] => bundle::run(&Workspace::find()?),
        [command @ ("tidy" | "bundle"), rest @ ..] => {
            bail!("`{command}` takes no arguments, got {rest:?}")
        }
        [command, ..] => bail!("no command `{command}`; `cargo xtask help` lists them"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_command_is_named() {
        let error = run(&["tydi"]).expect_err("there is no such command");
        assert!(error.to_string().contains("`tydi`"), "{error}");
    }

    #[test]
    fn tidy_takes_no_arguments() {
        let error = run(&["tidy", "--fast"]).expect_err("tidy has no options");
        assert!(error.to_string().contains("--fast"), "{error}");
    }
}
