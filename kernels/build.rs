//! Embeds the fatbins of the CUDA sources.
//!
//! It takes those that `cargo xtask kernels` left in cargo's target folder, where they are fresh;
//! compiles the others where it finds nvcc; and else embeds none, with a warning that names the
//! command. It downloads nothing and never needs a GPU. What is embedded is listed in
//! `$OUT_DIR/fatbins.rs`, which `src/fatbin.rs` includes; an empty list is a list, so that no code
//! depends on what this script found. `PACELINE_FATBINS` names another folder of fatbins.

#[path = "build/mod.rs"]
mod cuda;

use std::env;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

use cuda::compile::{compile, for_each};
use cuda::nvcc::{self, Nvcc};
use cuda::sources::{Source, Sources};
use cuda::store::{Store, installed_cuda, shared, target_folder};
use cuda::{Result, because};

/// The folder of fatbins to take instead of the target folder's.
const FATBINS: &str = "PACELINE_FATBINS";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    println!("cargo::rerun-if-changed=kernels.toml");
    println!("cargo::rerun-if-changed=cuda");
    println!("cargo::rerun-if-env-changed={FATBINS}");
    let sources = Sources::read(&folder("CARGO_MANIFEST_DIR")?)?;
    let out = folder("OUT_DIR")?;
    let fatbins = match env::var_os(FATBINS).filter(|named| !named.is_empty()) {
        Some(named) => named_fatbins(&sources, PathBuf::from(named))?,
        None => found_fatbins(&sources, &out)?,
    };
    let list = out.join("fatbins.rs");
    because(fs::write(&list, text(&fatbins)), || format!("cannot write {}", list.display()))
}

fn folder(variable: &str) -> Result<PathBuf> {
    env::var_os(variable).map(PathBuf::from).ok_or_else(|| format!("cargo did not set {variable}"))
}

/// All fatbins of a folder that the user named; one that is missing or stale is an error there.
fn named_fatbins(sources: &Sources, folder: PathBuf) -> Result<Vec<(String, PathBuf)>> {
    if !folder.is_absolute() {
        return Err(format!("{FATBINS} must be an absolute path, not {}", folder.display()));
    }
    println!("cargo::rerun-if-changed={}", folder.display());
    let store = Store(folder);
    let stale: Vec<&str> = sources
        .list
        .iter()
        .filter(|source| !store.is_fresh(source, None))
        .map(|source| source.name.as_str())
        .collect();
    if !stale.is_empty() {
        return Err(format!(
            "{FATBINS}={}: not there, or older than their sources: {}; copy the folder that \
             `cargo xtask kernels` makes, or unset the variable",
            store.0.display(),
            stale.join(", ")
        ));
    }
    Ok(sources.list.iter().map(|source| (source.name.clone(), store.fatbin(source))).collect())
}

/// The fresh fatbins of the target folder, and those that nvcc compiles now.
fn found_fatbins(sources: &Sources, out: &Path) -> Result<Vec<(String, PathBuf)>> {
    let target = target_folder(out);
    let ready = target.map(shared);
    if let Some(ready) = &ready {
        watch(&ready.0)?;
    }
    let is_ready =
        |source: &&Source| ready.as_ref().is_some_and(|store| store.is_fresh(source, None));
    let (fresh, stale): (Vec<&Source>, Vec<&Source>) = sources.list.iter().partition(is_ready);
    let mut fatbins = Vec::new();
    if let Some(ready) = &ready {
        let is_narrow = |source: &&&Source| !ready.is_fresh(source, Some(&source.targets));
        let narrow = fresh.iter().filter(is_narrow).count();
        if narrow > 0 {
            println!(
                "cargo::warning={narrow} CUDA sources are compiled for some of their targets only; \
                 `cargo xtask kernels` compiles them for all"
            );
        }
        fatbins.extend(fresh.iter().map(|source| (source.name.clone(), ready.fatbin(source))));
    }
    if !stale.is_empty() {
        for variable in nvcc::VARIABLES {
            println!("cargo::rerun-if-env-changed={variable}");
        }
        match Nvcc::find(target.map(installed_cuda).as_deref())? {
            Some(nvcc) => fatbins.extend(compiled(&nvcc, sources, &stale, out)?),
            None => println!(
                "cargo::warning={} of {} CUDA sources are not compiled, since there is no nvcc; \
                 to run on GPUs: `cargo xtask kernels`, or install CUDA 12.8 or newer, and build \
                 again",
                stale.len(),
                sources.list.len()
            ),
        }
    }
    Ok(fatbins)
}

/// Makes cargo run this script again when `cargo xtask kernels` writes to the folder.
fn watch(folder: &Path) -> Result<()> {
    // Cargo runs a script at every build while a path that it watches is missing, and once more
    // when it is newer than the script's last run. So the folder must exist and be old.
    if !folder.is_dir() {
        because(fs::create_dir_all(folder), || format!("cannot make {}", folder.display()))?;
        if let Ok(handle) = fs::File::open(folder) {
            // Where this fails, the next build runs this script once more than it needs to.
            let _ = handle.set_modified(SystemTime::UNIX_EPOCH);
        }
    }
    println!("cargo::rerun-if-changed={}", folder.display());
    Ok(())
}

/// Compiles the sources into a folder of this script's own.
fn compiled(
    nvcc: &Nvcc,
    sources: &Sources,
    stale: &[&Source],
    out: &Path,
) -> Result<Vec<(String, PathBuf)>> {
    let store = Store(out.join("kernels"));
    let plan = stale.iter().map(|source| (*source, source.targets.clone())).collect();
    let (jobs, left_out) = nvcc.supported(plan);
    if !left_out.is_empty() {
        println!("cargo::warning={}; kernels are built without them", nvcc.too_old(&left_out));
    }
    for_each(&jobs, |job| match store.is_fresh(job.0, Some(&job.1)) {
        true => Ok(()),
        false => compile(nvcc, sources, job, &[], &store).map(drop),
    })?;
    Ok(jobs.iter().map(|(source, _)| (source.name.clone(), store.fatbin(source))).collect())
}

/// The list as Rust: names and bytes.
fn text(fatbins: &[(String, PathBuf)]) -> String {
    let mut text = String::from("[\n");
    for (name, path) in fatbins {
        writeln!(text, "    ({name:?}, &Aligned(*include_bytes!({path:?}))),")
            .expect("a String takes any text");
    }
    text + "]\n"
}
