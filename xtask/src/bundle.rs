//! `cargo xtask bundle`: the binary, the test programs and a runner, for a machine without cargo.
//!
//! Everything is compiled here and stripped; the machine needs bash, glibc of this machine's
//! version or newer, the driver, and a checkout for the demo model's weights. It is one archive,
//! kept small enough to be copied often.

mod artifact;
mod demo;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use self::artifact::{TestProgram, test_programs};
use crate::kernels;
use crate::process::Invocation;
use crate::workspace::Workspace;

/// The archive's limit.
const BYTES_MAX: u64 = 30_000_000;

/// What the names of tests that use GPUs have in them.
const GPU_MODULE: &str = "gpu::";

const RUNNER: &str = include_str!("bundle/run-tests.sh");

/// The packages whose tests use GPUs.
const TESTED: [&str; 2] = ["paceline-kernels", "paceline-comm"];

/// Builds, packs and reports.
pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    kernels::run(workspace, &kernels::Options::CHECK)?;
    let target = kernels::target(workspace)?;
    let target_argument = target.to_str().context("the target folder's path is not UTF-8")?;

    let build = Invocation::cargo(["build", "--release", "--package", "paceline-cli"])
        .argument("--all-features")
        .argument("--target-dir")
        .argument(target_argument);
    println!("{build}");
    build.run(workspace)?;
    // The tests keep the development profile: it is optimised, and checks what release does not.
    let mut tests = Invocation::cargo(["test", "--no-run", "--lib", "--tests", "--all-features"])
        .argument("--message-format=json-render-diagnostics")
        .argument("--target-dir")
        .argument(target_argument);
    for package in TESTED {
        tests = tests.argument("--package").argument(package);
    }
    println!("{tests}");
    let mut programs = Vec::new();
    for program in test_programs(&tests.output(workspace)?) {
        if has_gpu_tests(&program.path)? {
            programs.push(program);
        }
    }
    if programs.is_empty() {
        bail!("`{tests}` named no program with tests in a module `gpu`");
    }

    let folder = target.join("bundle");
    if folder.exists() {
        let cannot_remove = || format!("cannot remove {}", folder.display());
        fs::remove_dir_all(&folder).with_context(cannot_remove)?;
    }
    let tests_folder = folder.join("tests");
    fs::create_dir_all(&tests_folder)
        .with_context(|| format!("cannot make {}", tests_folder.display()))?;
    strip(&target.join("release/paceline"), &folder.join("paceline"))?;
    for TestProgram { name, path } in &programs {
        strip(path, &tests_folder.join(name))?;
    }
    demo::cut_out(workspace, &folder.join("paceline"), &folder.join("demo.txt"))?;
    write_script(&folder.join("restore-demo.sh"), demo::RESTORE)?;
    write_script(&folder.join("run-tests.sh"), RUNNER)?;
    let archive = pack(&target)?;
    report(&folder, &archive)
}

/// Whether a test program has tests in a module `gpu`. The others have nothing to do on a GPU
/// machine, and each would bring the kernels along once more.
fn has_gpu_tests(program: &Path) -> Result<bool> {
    let output = Command::new(program)
        .args(["--list", "--format", "terse"])
        .output()
        .with_context(|| format!("cannot start {}", program.display()))?;
    if !output.status.success() {
        bail!("`{} --list` failed ({})", program.display(), output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).lines().any(|line| line.contains(GPU_MODULE)))
}

/// Copies a program without its symbols and line numbers.
fn strip(from: &Path, to: &Path) -> Result<()> {
    let status = Command::new("strip")
        .arg("-o")
        .arg(to)
        .arg(from)
        .status()
        .context("cannot start `strip`; install binutils")?;
    if !status.success() {
        bail!("`strip` failed for {} ({status})", from.display());
    }
    Ok(())
}

fn write_script(path: &Path, text: &str) -> Result<()> {
    let cannot_write = || format!("cannot write {}", path.display());
    fs::write(path, text).with_context(cannot_write)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).with_context(cannot_write)
}

/// Packs the folder `bundle` of the target folder into an archive beside it.
fn pack(target: &Path) -> Result<PathBuf> {
    let archive = target.join("bundle.tar.gz");
    let status = Command::new("tar")
        .arg("-czf")
        .arg(&archive)
        .arg("-C")
        .arg(target)
        .arg("bundle")
        .status()
        .context("cannot start `tar`; install it and gzip")?;
    if !status.success() {
        bail!("`tar` failed for {} ({status})", archive.display());
    }
    Ok(archive)
}

/// Prints what is in the bundle, largest first; fails if the archive is too large.
fn report(folder: &Path, archive: &Path) -> Result<()> {
    let mut files = Vec::new();
    for (name, path) in crate::cuda::sources::files_below(folder).map_err(anyhow::Error::msg)? {
        files.push((bytes(&path)?, name));
    }
    files.sort_by(|left, right| right.cmp(left));
    for (bytes, name) in &files {
        println!("{name:32} {:7.2} MB", megabytes(*bytes));
    }
    let unpacked = files.iter().map(|(bytes, _)| bytes).sum();
    let packed = bytes(archive)?;
    println!(
        "{}: {:.2} MB, {:.2} MB unpacked; on a GPU machine: \
         tar -xzf bundle.tar.gz && bundle/restore-demo.sh CHECKOUT && bundle/run-tests.sh GPUS",
        archive.display(),
        megabytes(packed),
        megabytes(unpacked)
    );
    check_size(packed, &files)
}

fn bytes(file: &Path) -> Result<u64> {
    let metadata = fs::metadata(file).with_context(|| format!("cannot read {}", file.display()))?;
    Ok(metadata.len())
}

/// Fails above the limit with the largest files, which come first.
fn check_size(packed: u64, files: &[(u64, String)]) -> Result<()> {
    if packed <= BYTES_MAX {
        return Ok(());
    }
    let largest: Vec<&str> = files.iter().take(3).map(|(_, name)| name.as_str()).collect();
    bail!(
        "the bundle has {:.1} MB, more than {:.0}; the largest files in it are {}",
        megabytes(packed),
        megabytes(BYTES_MAX),
        largest.join(", ")
    )
}

fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bundle_that_is_too_large_names_its_largest_files() {
        let files: Vec<(u64, String)> = (0..5).map(|n| (9 - n, format!("file-{n}"))).collect();
        check_size(BYTES_MAX, &files).expect("the limit itself is allowed");
        let error = check_size(BYTES_MAX + 1, &files).expect_err("it is too large").to_string();
        assert!(error.contains("file-0, file-1, file-2") && !error.contains("file-3"), "{error}");
    }

    /// Runs the runner over programs that are small shell scripts.
    fn run_tests(name: &str, programs: &[(&str, &str)], arguments: &[&str]) -> (i32, String) {
        let folder =
            std::env::temp_dir().join(format!("paceline-run-{name}-{}", std::process::id()));
        fs::create_dir_all(folder.join("tests")).expect("the folder can be written");
        for (program, text) in programs {
            let path = folder.join("tests").join(program);
            fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("the folder can be written");
            let executable = fs::Permissions::from_mode(0o755);
            fs::set_permissions(&path, executable).expect("the file was written");
        }
        write_script(&folder.join("run-tests.sh"), RUNNER).expect("the folder can be written");
        let mut command = Command::new("bash");
        command.arg(folder.join("run-tests.sh")).args(arguments).env("PACELINE_TEST_SECONDS", "1");
        let output = command.output().expect("bash runs");
        fs::remove_dir_all(&folder).expect("the folder was written");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.code().expect("it ended by itself"), text)
    }

    const GOOD: &str = "[ \"$PACELINE_REQUIRE_GPUS $1\" = \"2 gpu::\" ] || exit 9\n\
                        echo 'SKIP: needs 4 GPUs'\n\
                        echo 'test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured'";
    const BAD: &str = "echo 'test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured'\n\
                       exit 101";

    #[test]
    fn the_runner_counts() {
        let (code, text) = run_tests("good", &[("a", GOOD)], &["2"]);
        assert!(text.contains("GPU tests: 2 passed, 0 failed, 2 skipped"), "{text}");
        assert_eq!(code, 0);
        let (code, text) = run_tests("bad", &[("a", GOOD), ("b", BAD)], &["2"]);
        assert!(text.contains("GPU tests: 3 passed, 2 failed, 2 skipped"), "{text}");
        assert!(text.contains("failed: tests/b (exit code 101)"), "{text}");
        assert_eq!(code, 1);
    }

    #[test]
    fn the_runner_fails_where_a_program_crashes_hangs_or_runs_nothing() {
        let (code, text) = run_tests("crash", &[("a", GOOD), ("b", "kill -9 $$")], &["2"]);
        assert!(text.contains("2 passed, 1 failed") && code == 1, "{code} {text}");
        let (code, text) = run_tests("hang", &[("a", "exec tail -f /dev/null")], &["2"]);
        assert!(text.contains("0 passed, 1 failed") && code == 1, "{code} {text}");
        let nothing = "echo 'test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured'";
        let (code, text) = run_tests("nothing", &[("a", nothing)], &["2"]);
        assert!(text.contains("0 passed, 0 failed") && code == 1, "{code} {text}");
        let (code, _) = run_tests("usage", &[("a", GOOD)], &[]);
        assert_eq!(code, 2);
    }
}
