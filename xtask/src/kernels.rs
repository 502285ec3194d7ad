//! `cargo xtask kernels`: compiles the CUDA sources to fatbins in cargo's target folder, where the
//! build script of paceline-kernels finds them.
//!
//! What is compiled, and what counts as fresh, is decided by the code in `kernels/build/` that the
//! build script uses as well. This file adds what a build script must not do: it installs nvcc
//! where there is none, refuses warnings, and reports.

mod install;
mod usage;

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Error, Result, bail};

use crate::cuda::compile::{Job, compile, for_each};
use crate::cuda::nvcc::Nvcc;
use crate::cuda::sources::{Source, Sources, Target, files_below};
use crate::cuda::store::{Store, installed_cuda, shared, target_folder};
use crate::workspace::Workspace;

/// Flags besides those of the build script: what each kernel uses is printed, and a warning, which
/// a user of another nvcc could not do anything about, is an error for us.
const FLAGS: [&str; 3] = ["-Xptxas=-v", "-Werror", "all-warnings"];

/// What the command line asks for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    /// Compile for these targets only; empty for all that kernels.toml lists.
    targets: Vec<Target>,
    /// Fail where nvcc is too old for a target, instead of leaving it out.
    check: bool,
}

impl Options {
    /// What CI asks for.
    pub(crate) const CHECK: Self = Self { targets: Vec::new(), check: true };

    /// Reads the arguments after `kernels`.
    pub(crate) fn parse(arguments: &[&str]) -> Result<Self> {
        let mut options = Self::default();
        let mut rest = arguments.iter().peekable();
        while let Some(argument) = rest.next() {
            match *argument {
                "--check" => options.check = true,
                "--arch" => {
                    let count = options.targets.len();
                    while let Some(name) = rest.next_if(|name| !name.starts_with("--")) {
                        options.targets.push(Target::parse(name).map_err(Error::msg)?);
                    }
                    if options.targets.len() == count {
                        bail!("`--arch` needs a target, as in `--arch sm_90a`");
                    }
                }
                _ => bail!("`kernels` has no option `{argument}`; it has --arch and --check"),
            }
        }
        Ok(options)
    }
}

/// Cargo's target folder.
pub(crate) fn target(workspace: &Workspace) -> Result<PathBuf> {
    let program = env::current_exe().context("cannot tell where this program lies")?;
    let default = || workspace.root.join("target");
    Ok(target_folder(&program).map_or_else(default, PathBuf::from))
}

/// Compiles what is out of date.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    let sources = Sources::read(&workspace.root.join("kernels")).map_err(Error::msg)?;
    check_all_listed(&sources)?;
    let plan = plan(&sources, &options.targets)?;
    let target = target(workspace)?;
    let store = shared(&target);
    let cuda = installed_cuda(&target);

    let found = Nvcc::find(Some(&cuda)).map_err(Error::msg)?;
    let is_stale = |job: &Job<'_>| !store.is_fresh(job.0, Some(&job.1));
    let nvcc = match found {
        Some(nvcc) => nvcc,
        None if !plan.iter().any(is_stale) => {
            println!("all {} fatbins are up to date", plan.len());
            return Ok(());
        }
        None => install::install(&cuda)?,
    };
    println!("nvcc {}.{} at {}", nvcc.version.0, nvcc.version.1, nvcc.path.display());
    let strict = options.check || !options.targets.is_empty();
    let mut stale = supported(&nvcc, plan, strict)?;
    let count = stale.len();
    stale.retain(is_stale);
    let start = Instant::now();
    for_each(&stale, |job| compile_one(&nvcc, &sources, job, &store)).map_err(Error::msg)?;
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "{} of {count} fatbins compiled in {seconds:.1} s, the others were up to date; in {}",
        stale.len(),
        store.0.display()
    );
    Ok(())
}

/// Every source below `cuda/` must be in kernels.toml: one that is not would never be compiled.
fn check_all_listed(sources: &Sources) -> Result<()> {
    let listed: BTreeSet<String> = sources.list.iter().map(Source::file).collect();
    let files = files_below(&sources.folder).map_err(Error::msg)?;
    let unlisted: Vec<&str> = files
        .keys()
        .filter(|file| file.ends_with(".cu") && !listed.contains(*file))
        .map(String::as_str)
        .collect();
    if !unlisted.is_empty() {
        bail!("kernels/kernels.toml does not list {}; add it there", unlisted.join(", "));
    }
    Ok(())
}

/// The sources with their targets, or with those of the wanted ones that they list.
fn plan<'a>(sources: &'a Sources, wanted: &[Target]) -> Result<Vec<Job<'a>>> {
    let lists = |target: &Target| sources.list.iter().any(|source| source.targets.contains(target));
    if let Some(unlisted) = wanted.iter().find(|target| !lists(target)) {
        bail!("kernels/kernels.toml lists no target {}", unlisted.name());
    }
    let mut plan = Vec::new();
    for source in &sources.list {
        let is_wanted = |target: &&Target| wanted.is_empty() || wanted.contains(target);
        let targets: Vec<Target> = source.targets.iter().filter(is_wanted).cloned().collect();
        if targets.is_empty() {
            println!("{}: left out, not made for the targets of --arch", source.name);
        } else {
            plan.push((source, targets));
        }
    }
    Ok(plan)
}

/// The plan without the targets that nvcc does not know; where `strict`, they are an error.
fn supported<'a>(nvcc: &Nvcc, plan: Vec<Job<'a>>, strict: bool) -> Result<Vec<Job<'a>>> {
    let (supported, left_out) = nvcc.supported(plan);
    if !left_out.is_empty() {
        let message = nvcc.too_old(&left_out);
        if strict {
            bail!("{message}; set PACELINE_NVCC to a newer one");
        }
        println!("warning: {message}; they are left out");
    }
    Ok(supported)
}

fn compile_one(
    nvcc: &Nvcc,
    sources: &Sources,
    job: &Job<'_>,
    store: &Store,
) -> std::result::Result<(), String> {
    let source = job.0;
    let start = Instant::now();
    let log = compile(nvcc, sources, job, &FLAGS, store)?;
    let seconds = start.elapsed().as_secs_f64();
    let bytes = fs::metadata(store.fatbin(source)).map_or(0, |metadata| metadata.len());
    let worst = usage::worst(&log).map_or_else(String::new, |worst| format!("  {worst}"));
    println!("{:32} {seconds:5.1} s {:6.1} KB{worst}", source.name, bytes as f64 / 1e3);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn targets(names: &[&str]) -> Vec<Target> {
        names.iter().map(|name| Target::parse(name).expect("the name is right")).collect()
    }

    fn sources() -> Sources {
        let source = |name: &str, names: &[&str]| Source {
            name: name.to_owned(),
            targets: targets(names),
            flags: Vec::new(),
            fingerprint: 1,
        };
        let list =
            vec![source("a/all", &["sm_80", "sm_90a", "sm_120"]), source("a/one", &["sm_90a"])];
        Sources { folder: PathBuf::new(), list }
    }

    fn names<'a>(plan: &'a [Job<'_>]) -> Vec<(&'a str, Vec<&'a str>)> {
        plan.iter()
            .map(|(source, targets)| {
                (source.name.as_str(), targets.iter().map(Target::name).collect())
            })
            .collect()
    }

    #[test]
    fn options_are_read() {
        let options = Options::parse(&["--arch", "sm_90a", "sm_80", "--check"]);
        let expected = Options { targets: targets(&["sm_90a", "sm_80"]), check: true };
        assert_eq!(options.expect("the options are right"), expected);
        for wrong in [&["--arch"][..], &["--arch", "90"], &["--fast"], &["sm_90a"]] {
            Options::parse(wrong).expect_err("the options are wrong");
        }
    }

    #[test]
    fn a_plan_keeps_what_is_wanted_and_listed() {
        let sources = sources();
        let all = plan(&sources, &[]).expect("everything is listed");
        assert_eq!(all.len(), 2);
        let some = plan(&sources, &targets(&["sm_80"])).expect("it is listed");
        assert_eq!(names(&some), [("a/all", vec!["sm_80"])]);
        let error = plan(&sources, &targets(&["sm_75"])).expect_err("no source lists it");
        assert!(error.to_string().contains("sm_75"), "{error}");
    }

    #[test]
    fn an_old_nvcc_leaves_targets_out_or_is_refused() {
        let sources = sources();
        let nvcc = Nvcc { path: PathBuf::from("/old/nvcc"), version: (12, 4) };
        let all = || plan(&sources, &[]).expect("everything is listed");
        let supported_all = supported(&nvcc, all(), false).expect("targets may be left out");
        let expected = [("a/all", vec!["sm_80", "sm_90a"]), ("a/one", vec!["sm_90a"])];
        assert_eq!(names(&supported_all), expected);
        let error = supported(&nvcc, all(), true).expect_err("nothing may be left out");
        assert!(error.to_string().contains("too old for sm_120"), "{error}");
    }

    #[test]
    fn every_source_is_listed() {
        let workspace = Workspace::find().expect("the tests run in the workspace");
        let mut sources = Sources::read(&workspace.root.join("kernels")).expect("it is there");
        check_all_listed(&sources).expect("kernels.toml lists every source");
        let removed = sources.list.pop().expect("kernels.toml lists a source").file();
        let error = check_all_listed(&sources).expect_err("one is missing");
        assert!(error.to_string().contains(&removed), "{error}");
    }
}
