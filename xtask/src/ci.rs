//! `cargo xtask ci`: the steps of CI, in order. This is the only list of them.
//!
//! All steps share the development profile and one target directory, so that a dependency is
//! compiled once for checking and once for running. Tests come last: their count closes the output.

mod count;
mod features;

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use self::count::Count;
use crate::kernels;
use crate::manifest::Manifest;
use crate::process::Invocation;
use crate::tidy;
use crate::workspace::Workspace;

struct Step {
    name: &'static str,
    work: Work,
}

enum Work {
    /// Runs these, one after the other.
    Commands(Vec<Invocation>),
    /// Runs tidy in this process.
    Tidy,
    /// Compiles the CUDA sources in this process.
    Kernels,
    /// Runs this where the cargo subcommand is installed.
    IfInstalled { probe: Invocation, command: Invocation },
    /// Runs the tests and counts them.
    Tests(Invocation),
}

/// Runs the named steps, or all; stops at the first that fails.
pub(crate) fn run(workspace: &Workspace, names: &[&str]) -> Result<()> {
    let steps = chosen(steps(workspace)?, names)?;
    let begin = Instant::now();
    let mut times = Vec::new();
    let mut count = None;
    for step in &steps {
        let start = Instant::now();
        println!("\n== {} ==", step.name);
        count = perform(workspace, step).with_context(|| {
            format!("CI step `{0}` failed; to repeat it alone: cargo xtask ci {0}", step.name)
        })?;
        times.push((step.name, start.elapsed()));
    }
    println!("\n{}", summary(&times, begin.elapsed()));
    if let Some(count) = count {
        println!("{count}");
    }
    Ok(())
}

/// Prints the steps and what each runs.
pub(crate) fn list(workspace: &Workspace) -> Result<()> {
    for step in steps(workspace)? {
        match step.work {
            Work::Commands(commands) => {
                for command in commands {
                    println!("{:9} {command}", step.name);
                }
            }
            Work::Tidy => println!("{:9} cargo xtask tidy", step.name),
            Work::Kernels => println!("{:9} cargo xtask kernels --check", step.name),
            Work::IfInstalled { command, .. } => {
                println!("{:9} {command} (where installed)", step.name);
            }
            Work::Tests(command) => println!("{:9} {command}", step.name),
        }
    }
    Ok(())
}

fn steps(workspace: &Workspace) -> Result<Vec<Step>> {
    let clippy = ["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"];
    let doc = Invocation::cargo(["doc", "--workspace", "--no-deps"])
        .variable("RUSTDOCFLAGS", "-D warnings");
    Ok(vec![
        step("fmt", [Invocation::cargo(["fmt", "--all", "--check"])]),
        Step { name: "tidy", work: Work::Tidy },
        // Before everything that builds the workspace: all crates stand on the one that embeds
        // the result.
        Step { name: "kernels", work: Work::Kernels },
        step("clippy", [Invocation::cargo(clippy)]),
        step("doc", [doc]),
        step("features", feature_checks(workspace)?),
        Step {
            name: "deny",
            work: Work::IfInstalled {
                probe: Invocation::cargo(["deny", "--version"]),
                command: Invocation::cargo(["deny", "check", "licenses", "bans", "sources"]),
            },
        },
        // The README promises this very command.
        Step { name: "test", work: Work::Tests(Invocation::cargo(["test", "--workspace"])) },
    ])
}

fn step(name: &'static str, commands: impl IntoIterator<Item = Invocation>) -> Step {
    Step { name, work: Work::Commands(commands.into_iter().collect()) }
}

/// One check of the binary for every set of its features.
fn feature_checks(workspace: &Workspace) -> Result<Vec<Invocation>> {
    let text = workspace.text("cli/Cargo.toml")?.context("cli/Cargo.toml is not UTF-8")?;
    let manifest = Manifest::parse(&text);
    let check = ["check", "--package", manifest.name.as_str(), "--no-default-features"];
    let checks = features::subsets(&manifest.features).into_iter().map(|set| {
        let check = Invocation::cargo(check);
        if set.is_empty() { check } else { check.argument("--features").argument(set.join(",")) }
    });
    Ok(checks.collect())
}

fn chosen(steps: Vec<Step>, names: &[&str]) -> Result<Vec<Step>> {
    if let Some(unknown) = names.iter().find(|name| steps.iter().all(|step| step.name != **name)) {
        let known: Vec<&str> = steps.iter().map(|step| step.name).collect();
        bail!("no CI step `{unknown}`; there are {}", known.join(", "));
    }
    Ok(steps.into_iter().filter(|step| names.is_empty() || names.contains(&step.name)).collect())
}

/// Runs a step and returns the count of tests where it has one.
fn perform(workspace: &Workspace, step: &Step) -> Result<Option<Count>> {
    match &step.work {
        Work::Commands(commands) => {
            for command in commands {
                println!("{command}");
                command.run(workspace)?;
            }
            Ok(None)
        }
        Work::Tidy => tidy::run(workspace).map(|()| None),
        Work::Kernels => kernels::run(workspace, &kernels::Options::CHECK).map(|()| None),
        Work::IfInstalled { probe, command } => {
            if !probe.succeeds(workspace) {
                println!("left out: `{probe}` does not run here");
                return Ok(None);
            }
            println!("{command}");
            command.run(workspace).map(|()| None)
        }
        Work::Tests(command) => {
            println!("{command}");
            run_tests(workspace, command).map(Some)
        }
    }
}

/// Runs the tests, passes their output on line by line, and adds up the results.
fn run_tests(workspace: &Workspace, invocation: &Invocation) -> Result<Count> {
    let mut child = invocation
        .command(workspace)
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start `{invocation}`"))?;
    let output = child.stdout.take().context("the output of the tests was not piped")?;
    let mut count = Count::default();
    let mut stdout = std::io::stdout().lock();
    for line in BufReader::new(output).split(b'\n') {
        let line = line.context("cannot read the output of the tests")?;
        let line = String::from_utf8_lossy(&line);
        count.add_line(&line);
        writeln!(stdout, "{line}").context("cannot write the output of the tests")?;
    }
    let status = child.wait().context("cannot wait for the tests")?;
    if !status.success() {
        bail!("`{invocation}` failed ({status}); {count}");
    }
    if count.passed == 0 {
        bail!("`{invocation}` ran no test");
    }
    Ok(count)
}

fn summary(times: &[(&str, Duration)], total: Duration) -> String {
    let mut text = String::new();
    for (name, time) in times {
        text += &format!("{name:9} {:6.1} s\n", time.as_secs_f64());
    }
    text + &format!("{:9} {:6.1} s", "all", total.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_steps() -> Vec<Step> {
        steps(&Workspace::find().expect("the tests run in the workspace"))
            .expect("the workspace can be read")
    }

    #[test]
    fn tests_come_last_and_are_the_command_of_the_readme() {
        let steps = all_steps();
        let last = steps.last().expect("there are steps");
        match &last.work {
            Work::Tests(command) => assert_eq!(command.to_string(), "cargo test --workspace"),
            _ => panic!("`{}` is last, not the tests", last.name),
        }
    }

    #[test]
    fn steps_are_chosen_by_name_and_keep_their_order() {
        let names = |names: &[&str]| -> Vec<&str> {
            let steps = chosen(all_steps(), names).expect("the names exist");
            steps.iter().map(|step| step.name).collect()
        };
        assert_eq!(names(&["tidy", "fmt"]), ["fmt", "tidy"]);
        assert_eq!(names(&[]).len(), all_steps().len());
    }

    #[test]
    fn an_unknown_step_is_named_with_the_known_ones() {
        let Err(error) = chosen(all_steps(), &["fmt", "lint"]) else { panic!("no step `lint`") };
        assert!(error.to_string().contains("`lint`"), "{error}");
        assert!(error.to_string().contains("clippy"), "{error}");
    }
}
