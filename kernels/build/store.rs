//! A folder of fatbins: `<name>.fatbin`, and beside it `<name>.stamp`, which says what went in.

use std::fs;
use std::path::{Path, PathBuf};

use super::sources::{Source, Target};
use super::{Result, because};

/// A folder of fatbins.
#[derive(Debug, Clone)]
pub(crate) struct Store(pub(crate) PathBuf);

impl Store {
    /// Where the fatbin of a source is.
    pub(crate) fn fatbin(&self, source: &Source) -> PathBuf {
        self.0.join(format!("{}.fatbin", source.name))
    }

    fn stamp(&self, source: &Source) -> PathBuf {
        self.0.join(format!("{}.stamp", source.name))
    }

    /// Whether the fatbin was made of what the source, its headers and its flags are now, and for
    /// these targets if any are given.
    pub(crate) fn is_fresh(&self, source: &Source, targets: Option<&[Target]>) -> bool {
        let Some(text) = self.stamp_text(source) else { return false };
        match targets {
            Some(targets) => text == stamp(source, targets),
            None => text.lines().next() == Some(&first_line(source)),
        }
    }

    fn stamp_text(&self, source: &Source) -> Option<String> {
        if !self.fatbin(source).is_file() {
            return None;
        }
        fs::read_to_string(self.stamp(source)).ok()
    }

    /// Makes what `make` writes to the path that it is given the fatbin of a source. The stamp is
    /// written last, so an end in between leaves a stale fatbin, never a wrong one.
    pub(crate) fn replace<T>(
        &self,
        source: &Source,
        targets: &[Target],
        make: impl FnOnce(&Path) -> Result<T>,
    ) -> Result<T> {
        let fatbin = self.fatbin(source);
        let cannot_write = || format!("cannot write {}", fatbin.display());
        because(fs::create_dir_all(fatbin.parent().unwrap_or(&self.0)), cannot_write)?;
        let partial = fatbin.with_extension(format!("partial-{}", std::process::id()));
        let made = make(&partial).inspect_err(|_| {
            // It may not exist; what matters is the first error.
            let _ = fs::remove_file(&partial);
        })?;
        because(fs::write(self.stamp(source), ""), cannot_write)?;
        because(fs::rename(&partial, &fatbin), cannot_write)?;
        because(fs::write(self.stamp(source), stamp(source, targets)), cannot_write)?;
        Ok(made)
    }
}

fn first_line(source: &Source) -> String {
    format!("sources {:032x}", source.fingerprint)
}

fn stamp(source: &Source, targets: &[Target]) -> String {
    let names: Vec<&str> = targets.iter().map(Target::name).collect();
    format!("{}\ntargets {}\n", first_line(source), names.join(" "))
}

/// Cargo's target folder, given a path inside it; cargo marks the folder with these files.
pub(crate) fn target_folder(inside: &Path) -> Option<&Path> {
    const MARKS: [&str; 2] = ["CACHEDIR.TAG", ".rustc_info.json"];
    inside.ancestors().find(|folder| MARKS.iter().any(|mark| folder.join(mark).is_file()))
}

/// The store of `cargo xtask kernels` in cargo's target folder.
pub(crate) fn shared(target_folder: &Path) -> Store {
    Store(target_folder.join("kernels"))
}

/// The folder in cargo's target folder where `cargo xtask kernels` installs nvcc.
pub(crate) fn installed_cuda(target_folder: &Path) -> PathBuf {
    target_folder.join("cuda")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(fingerprint: u128) -> Source {
        Source { name: "a/b".to_owned(), targets: Vec::new(), flags: Vec::new(), fingerprint }
    }

    fn targets(names: &[&str]) -> Vec<Target> {
        names.iter().map(|name| Target::parse(name).expect("the name is right")).collect()
    }

    /// A store in a folder that is removed when it goes out of scope.
    struct Temporary(Store);

    impl Temporary {
        fn new(name: &str) -> Self {
            let name = format!("paceline-store-{name}-{}", std::process::id());
            Self(Store(std::env::temp_dir().join(name)))
        }
    }

    impl Drop for Temporary {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0.0);
        }
    }

    #[test]
    fn a_fatbin_is_fresh_for_what_it_was_made_of() {
        let temporary = Temporary::new("fresh");
        let store = &temporary.0;
        let all = targets(&["sm_80", "sm_90a"]);
        assert!(!store.is_fresh(&source(1), None));
        let write = |path: &Path| because(fs::write(path, "code"), || "write".to_owned());
        store.replace(&source(1), &all, write).expect("the folder can be written");
        assert!(store.is_fresh(&source(1), None) && store.is_fresh(&source(1), Some(&all)));
        assert!(!store.is_fresh(&source(2), None) && !store.is_fresh(&source(2), Some(&all)));
        assert!(!store.is_fresh(&source(1), Some(&all[1..])));
        fs::remove_file(store.fatbin(&source(1))).expect("it was written");
        assert!(!store.is_fresh(&source(1), None));
    }

    #[test]
    fn a_failure_keeps_what_was_there() {
        let temporary = Temporary::new("failure");
        let store = &temporary.0;
        let write = |path: &Path| because(fs::write(path, "code"), || "write".to_owned());
        store.replace(&source(1), &[], write).expect("the folder can be written");
        let fail = |path: &Path| {
            write(path)?;
            Err::<(), _>("no code".to_owned())
        };
        assert_eq!(store.replace(&source(2), &[], fail), Err("no code".to_owned()));
        assert!(store.is_fresh(&source(1), None));
        let files = fs::read_dir(store.0.join("a")).expect("it was made").count();
        assert_eq!(files, 2, "the fatbin and its stamp");
    }

    #[test]
    fn the_target_folder_is_found_from_inside() {
        let temporary = Temporary::new("target");
        let root = &temporary.0.0;
        let inside = root.join("debug/build/crate-0/out");
        fs::create_dir_all(&inside).expect("the folder can be written");
        assert_ne!(target_folder(&inside), Some(root.as_path()));
        fs::write(root.join("CACHEDIR.TAG"), "").expect("the folder can be written");
        assert_eq!(target_folder(&inside), Some(root.as_path()));
    }
}
