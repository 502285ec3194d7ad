//! Running nvcc: one source to one fatbin in a store, and several at a time.

use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::Result;
use super::nvcc::Nvcc;
use super::sources::{FLAGS, Source, Sources, Target};
use super::store::Store;

/// How many nvcc run at a time; each compiles for two targets at a time (`-t2`). More would need
/// more than a gigabyte of memory.
const AT_A_TIME: usize = 2;

/// A source, and what to compile it for.
pub(crate) type Job<'a> = (&'a Source, Vec<Target>);

/// Does a job with `extra` flags, puts the fatbin into the store and returns what nvcc printed. An
/// error holds nvcc's message.
pub(crate) fn compile(
    nvcc: &Nvcc,
    sources: &Sources,
    (source, targets): &Job<'_>,
    extra: &[&str],
    store: &Store,
) -> Result<String> {
    store.replace(source, targets, |output| {
        let mut command = Command::new(&nvcc.path);
        command
            // Relative paths, so that the line information is the same wherever the checkout lies.
            .current_dir(&sources.folder)
            .args(FLAGS)
            .arg("-t2")
            .args(extra)
            .args(&source.flags)
            .args(code_generation(targets))
            .arg("-o")
            .arg(output)
            .arg(source.file());
        let result = command.output();
        let result = result.map_err(|error| format!("cannot run {command:?}: {error}"))?;
        let text = [result.stdout, result.stderr].concat();
        let text = String::from_utf8_lossy(&text).into_owned();
        if !result.status.success() {
            let status = result.status;
            return Err(format!("nvcc failed ({status}) for {}:\n{text}", source.file()));
        }
        Ok(text)
    })
}

/// Does the work for every item, two at a time, and returns all errors as one.
pub(crate) fn for_each<T: Sync>(items: &[T], work: impl Fn(&T) -> Result<()> + Sync) -> Result<()> {
    let next = AtomicUsize::new(0);
    let errors = Mutex::new(Vec::new());
    let worker = || {
        while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = work(item) {
                errors.lock().expect("no worker panics while it holds the lock").push(error);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..AT_A_TIME.min(items.len()) {
            scope.spawn(worker);
        }
    });
    let errors = errors.into_inner().expect("no worker panics while it holds the lock");
    if errors.is_empty() { Ok(()) } else { Err(errors.join("\n")) }
}

/// The `-gencode` flags. Machine code and PTX of one architecture share a flag and with it one run
/// of nvcc's front end.
fn code_generation(targets: &[Target]) -> Vec<String> {
    let mut groups: Vec<(&str, Vec<&str>)> = Vec::new();
    for target in targets {
        let architecture = target.architecture();
        match groups.iter_mut().find(|(known, _)| *known == architecture) {
            Some((_, names)) => names.push(target.name()),
            None => groups.push((architecture, vec![target.name()])),
        }
    }
    let flag = |(architecture, names): (&str, Vec<&str>)| {
        format!("-gencode=arch=compute_{architecture},code=[{}]", names.join(","))
    };
    groups.into_iter().map(flag).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::store::{installed_cuda, target_folder};
    use super::*;

    fn targets(names: &[&str]) -> Vec<Target> {
        names.iter().map(|name| Target::parse(name).expect("the name is right")).collect()
    }

    #[test]
    fn code_and_ptx_of_one_architecture_share_a_flag() {
        let flags = code_generation(&targets(&["sm_80", "sm_90a", "compute_80"]));
        let expected = [
            "-gencode=arch=compute_80,code=[sm_80,compute_80]",
            "-gencode=arch=compute_90a,code=[sm_90a]",
        ];
        assert_eq!(flags, expected);
    }

    #[test]
    fn every_item_is_worked_on_and_every_error_told() {
        let items: Vec<usize> = (0..7).collect();
        let sum = AtomicUsize::new(0);
        let work = |item: &usize| {
            sum.fetch_add(*item, Ordering::Relaxed);
            if item.is_multiple_of(3) { Err(format!("item {item}")) } else { Ok(()) }
        };
        let error = for_each(&items, work).expect_err("three items fail");
        assert_eq!(sum.into_inner(), 21);
        let mut lines: Vec<&str> = error.lines().collect();
        lines.sort_unstable();
        assert_eq!(lines, ["item 0", "item 3", "item 6"]);
        assert_eq!(for_each(&[] as &[usize], |_| Err("no item".to_owned())), Ok(()));
    }

    /// The nvcc of this machine, or `None` after a line that says so.
    fn nvcc_or_skip() -> Option<Nvcc> {
        let program = std::env::current_exe().expect("the test is a program");
        let installed = target_folder(&program).map(installed_cuda);
        let nvcc = Nvcc::find(installed.as_deref()).expect("an nvcc that is there runs");
        if nvcc.is_none() {
            println!("SKIP: no nvcc; `cargo xtask kernels` installs one");
        }
        nvcc
    }

    #[test]
    fn nvcc_compiles_and_its_errors_are_told() {
        let Some(nvcc) = nvcc_or_skip() else { return };
        let folder = std::env::temp_dir().join(format!("paceline-nvcc-{}", std::process::id()));
        let source = |name: &str| Source {
            name: name.to_owned(),
            targets: targets(&["sm_80"]),
            flags: vec!["-DVALUE=7".to_owned()],
            fingerprint: 1,
        };
        fs::create_dir_all(&folder).expect("the folder can be written");
        let good = "extern \"C\" __global__ void set(int* to) { *to = VALUE; }\n";
        fs::write(folder.join("good.cu"), good).expect("the folder can be written");
        fs::write(folder.join("bad.cu"), "__global__ void set(int* to) { *to = NOTHING; }\n")
            .expect("the folder can be written");
        let sources = Sources { folder: folder.clone(), list: vec![source("good"), source("bad")] };
        let store = Store(folder.join("store"));
        let run = |source: &Source| {
            compile(&nvcc, &sources, &(source, targets(&["sm_80"])), &["-Xptxas=-v"], &store)
        };
        let log = run(&sources.list[0]);
        let error = run(&sources.list[1]);
        let is_fresh: Vec<bool> = sources
            .list
            .iter()
            .map(|source| store.is_fresh(source, Some(&source.targets)))
            .collect();
        let code = fs::read(store.fatbin(&sources.list[0]));
        fs::remove_dir_all(&folder).expect("the folder was written");
        let log = log.expect("the source is right");
        assert!(log.contains("'set' for 'sm_80'"), "{log}");
        // The magic number of a fatbin (cuda.h's fatbinary format), little-endian.
        assert_eq!(code.expect("it was compiled")[..4], [0x50, 0xed, 0x55, 0xba]);
        let error = error.expect_err("the source is wrong");
        assert!(error.contains("bad.cu") && error.contains("NOTHING"), "{error}");
        assert_eq!(is_fresh, [true, false]);
    }
}
