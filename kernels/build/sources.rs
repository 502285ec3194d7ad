//! The CUDA sources: what kernels.toml lists, and the fingerprint of all that a fatbin is made of.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::toml::{statements, strings};
use super::{Result, because};

/// Flags of nvcc for every source.
pub(crate) const FLAGS: [&str; 6] =
    ["-O3", "-std=c++17", "-lineinfo", "-Xfatbin=-compress-all", "-fatbin", "-I."];

/// The CUDA sources of the crate `paceline-kernels`.
pub(crate) struct Sources {
    /// The folder `cuda/` of the crate; nvcc runs there.
    pub(crate) folder: PathBuf,
    /// In the order of kernels.toml.
    pub(crate) list: Vec<Source>,
}

/// One CUDA source.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Source {
    /// The path below `cuda/` without its extension, as in `memory/fill`.
    pub(crate) name: String,
    /// What it is compiled for.
    pub(crate) targets: Vec<Target>,
    /// Flags of nvcc besides [`FLAGS`].
    pub(crate) flags: Vec<String>,
    /// Changes with the source, any header below `cuda/`, and the flags; not with the targets.
    pub(crate) fingerprint: u128,
}

/// What machine code (`sm_90a`) or PTX (`compute_80`) is made for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target(String);

impl Target {
    /// Reads a target's name.
    pub(crate) fn parse(name: &str) -> Result<Self> {
        let malformed = || format!("`{name}` is no target; they look like sm_90a or compute_80");
        let (kind, architecture) = name.split_once('_').ok_or_else(malformed)?;
        let digits = architecture.trim_end_matches(['a', 'f']);
        let is_number = digits.len() >= 2 && digits.bytes().all(|byte| byte.is_ascii_digit());
        if !matches!(kind, "sm" | "compute") || !is_number || architecture.len() > digits.len() + 1
        {
            return Err(malformed());
        }
        if kind == "compute" && digits != architecture {
            return Err(format!(
                "`{name}`: PTX of an `a` or `f` target runs on no later GPU, so it is no \
                 fallback; use compute_{digits} or sm_{architecture}"
            ));
        }
        Ok(Self(name.to_owned()))
    }

    /// The name, as in kernels.toml.
    pub(crate) fn name(&self) -> &str {
        &self.0
    }

    /// What follows `sm_` or `compute_`.
    pub(crate) fn architecture(&self) -> &str {
        self.0.split_once('_').map_or("", |(_, architecture)| architecture)
    }
}

impl Sources {
    /// Reads kernels.toml and the sources of the crate in `crate_folder`.
    pub(crate) fn read(crate_folder: &Path) -> Result<Self> {
        let list_file = crate_folder.join("kernels.toml");
        let text = because(fs::read_to_string(&list_file), || {
            format!("cannot read {}", list_file.display())
        })?;
        let folder = crate_folder.join("cuda");
        let mut list = parse(&text).map_err(|error| format!("{}:{error}", list_file.display()))?;
        let mut headers = Vec::new();
        for (path, file) in files_below(&folder)? {
            if path.ends_with(".cuh") {
                headers.push((path, read(&file)?));
            }
        }
        for source in &mut list {
            let text = read(&folder.join(source.file()))?;
            source.fingerprint = fingerprint(&text, &headers, &source.flags);
        }
        Ok(Self { folder, list })
    }
}

impl Source {
    /// The path below `cuda/`.
    pub(crate) fn file(&self) -> String {
        format!("{}.cu", self.name)
    }
}

fn read(file: &Path) -> Result<Vec<u8>> {
    because(fs::read(file), || format!("cannot read {}", file.display()))
}

/// All files below a folder, by their path in it with forward slashes.
pub(crate) fn files_below(folder: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let cannot_list = || format!("cannot list {}", folder.display());
    let mut files = BTreeMap::new();
    for entry in because(fs::read_dir(folder), cannot_list)? {
        let path = because(entry, cannot_list)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            let below = files_below(&path)?.into_iter();
            files.extend(below.map(|(inner, file)| (format!("{name}/{inner}"), file)));
        } else {
            files.insert(name, path);
        }
    }
    Ok(files)
}

/// Reads kernels.toml; fingerprints are left 0. The error starts with the line's number.
fn parse(text: &str) -> Result<Vec<Source>> {
    let mut list: Vec<Source> = Vec::new();
    let mut defaults = Vec::new();
    let mut table = String::new();
    for (number, statement) in statements(text) {
        let fail = |message: String| Err(format!("{number}: {message}"));
        if statement.starts_with('[') {
            table = statement;
            match table.as_str() {
                "[defaults]" => {}
                "[[kernel]]" => list.push(Source {
                    name: String::new(),
                    targets: defaults.clone(),
                    flags: Vec::new(),
                    fingerprint: 0,
                }),
                _ => return fail(format!("unknown table {table}")),
            }
            continue;
        }
        let Some((key, value)) = statement.split_once('=') else {
            return fail(format!("`{statement}` is no `key = value`"));
        };
        let values = strings(value);
        let targets = || -> Result<Vec<Target>> {
            let targets = values.iter().map(|name| Target::parse(name));
            targets.collect::<Result<_>>().map_err(|error| format!("{number}: {error}"))
        };
        match (table.as_str(), key.trim(), list.last_mut()) {
            ("[defaults]", "targets", _) => defaults = targets()?,
            ("[[kernel]]", "targets", Some(source)) => source.targets = targets()?,
            ("[[kernel]]", "flags", Some(source)) => source.flags = values,
            ("[[kernel]]", "source", Some(source)) => {
                let name = values.first().and_then(|file| file.strip_suffix(".cu"));
                let Some(name) = name else {
                    return fail("`source` must be a path that ends in .cu".to_owned());
                };
                source.name = name.to_owned();
            }
            (_, key, _) => return fail(format!("unknown key `{key}` in {table}")),
        }
    }
    for (index, source) in list.iter().enumerate() {
        if source.name.is_empty() || source.targets.is_empty() {
            return Err(format!(" entry {} needs a source and targets", index + 1));
        }
        if list[..index].iter().any(|other| other.name == source.name) {
            return Err(format!(" {} is listed twice", source.file()));
        }
    }
    Ok(list)
}

fn fingerprint(source: &[u8], headers: &[(String, Vec<u8>)], flags: &[String]) -> u128 {
    let mut hash = Fnv::new();
    hash.part(source);
    for (path, text) in headers {
        hash.part(path.as_bytes());
        hash.part(text);
    }
    for flag in FLAGS.into_iter().chain(flags.iter().map(String::as_str)) {
        hash.part(flag.as_bytes());
    }
    hash.0
}

/// FNV-1a with 128 bits: the same on every machine and with every compiler, and short. It guards
/// against forgetting to compile, not against an attacker, who could change the source as well.
struct Fnv(u128);

impl Fnv {
    fn new() -> Self {
        Self(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }

    fn bytes(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 =
                (self.0 ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
    }

    /// Adds bytes with their count before them, so that parts do not run into each other.
    fn part(&mut self, bytes: &[u8]) {
        self.bytes(&(bytes.len() as u64).to_le_bytes());
        self.bytes(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(targets: &[Target]) -> Vec<&str> {
        targets.iter().map(Target::name).collect()
    }

    #[test]
    fn a_list_is_read_with_its_defaults() {
        let text = "[defaults]\ntargets = [\n \"sm_80\", # Ampere\n \"compute_80\",\n]\n\
                    [[kernel]]\nsource = \"a/one.cu\"\n[[kernel]]\nsource = \"a/two_sm90.cu\"\n\
                    targets = [\"sm_90a\"]\nflags = [\"-maxrregcount=64\", \"-DX=1\"]\n";
        let list = parse(text).expect("the list is right");
        assert_eq!(list.len(), 2);
        assert_eq!((list[0].name.as_str(), list[0].file()), ("a/one", "a/one.cu".to_owned()));
        assert_eq!(names(&list[0].targets), ["sm_80", "compute_80"]);
        assert_eq!(list[0].flags, [""; 0]);
        assert_eq!(names(&list[1].targets), ["sm_90a"]);
        assert_eq!(list[1].flags, ["-maxrregcount=64", "-DX=1"]);
    }

    #[test]
    fn a_wrong_list_is_refused_with_its_line() {
        let start = |text: &str| parse(text).expect_err("the list is wrong");
        assert!(start("[kernels]\n").starts_with("1: unknown table"));
        assert!(start("[[kernel]]\nsources = \"a.cu\"\n").starts_with("2: unknown key `sources`"));
        assert!(start("[[kernel]]\nsource = \"a.cuh\"\n").starts_with("2: `source` must"));
        assert!(start("[[kernel]]\nsource = \"a.cu\"\n").contains("needs a source and targets"));
        assert!(start("[defaults]\ntargets = [\n\"sm_9\"]\n").starts_with("2: `sm_9` is no"));
        let twice = "[defaults]\ntargets = [\"sm_80\"]\n[[kernel]]\nsource = \"a.cu\"\n\
                     [[kernel]]\nsource = \"a.cu\"\n";
        assert!(start(twice).contains("a.cu is listed twice"));
    }

    #[test]
    fn ptx_is_never_made_for_one_gpu() {
        let error = Target::parse("compute_90a").expect_err("this PTX runs on sm_90 only");
        assert!(error.contains("use compute_90 or sm_90a"), "{error}");
        assert_eq!(
            Target::parse("sm_100f").map(|target| target.architecture().to_owned()),
            Ok("100f".to_owned())
        );
        for name in ["sm90", "sm_", "gfx_90", "sm_90aa", "sm_9 0"] {
            assert!(Target::parse(name).is_err(), "{name}");
        }
    }

    #[test]
    fn the_hash_is_the_published_one() {
        // Test vectors of the FNV authors (isthe.com/chongo/src/fnv/test_fnv.c) for "" and "a".
        let hash = |text: &str| {
            let mut hash = Fnv::new();
            hash.bytes(text.as_bytes());
            hash.0
        };
        assert_eq!(hash(""), 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
        assert_eq!(hash("a"), 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
    }

    #[test]
    fn the_fingerprint_changes_with_all_that_goes_in() {
        let header = |path: &str, text: &str| vec![(path.to_owned(), text.as_bytes().to_vec())];
        let base = fingerprint(b"source", &header("a.cuh", "x"), &[]);
        let others = [
            fingerprint(b"sourc", &header("a.cuh", "ex"), &[]),
            fingerprint(b"source", &header("b.cuh", "x"), &[]),
            fingerprint(b"source", &header("a.cuh", "y"), &[]),
            fingerprint(b"source", &header("a.cuh", "x"), &["-DX".to_owned()]),
            fingerprint(b"source", &[], &[]),
        ];
        assert!(!others.contains(&base));
        assert_eq!(base, fingerprint(b"source", &header("a.cuh", "x"), &[]));
    }

    #[test]
    fn the_list_of_the_crate_is_right() {
        let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels");
        let sources = Sources::read(&crate_folder).expect("kernels.toml and its sources are there");
        assert!(sources.list.iter().all(|source| source.fingerprint != 0));
    }
}
