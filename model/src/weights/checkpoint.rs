//! Checkpoint directories: one or many mapped safetensors files as one set of named tensors.
//!
//! Invariant: every tensor is a view of a mapped file (or of static data) and lies inside it; each
//! name occurs once; the index, where there is one, and the files agree. Names are those of a text
//! model without a wrapper: `language_model.` is gone, and what inference never uses is left out.
//! Start reading at [`Checkpoint::open`].

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use paceline_kernels::{SharedBytes, Tensor};
use serde_json::Value;

use super::safetensors::{self, Stored};
use crate::ModelError;
use crate::config::file::{is_there, read_text};
use crate::config::section::parse_object;

/// The index of a sharded checkpoint.
pub(super) const INDEX_NAME: &str = "model.safetensors.index.json";
/// The only file of an unsharded checkpoint.
pub(super) const SINGLE_NAME: &str = "model.safetensors";
/// Kimi-K2.5's index has 30 MB.
const INDEX_BYTES_MAX: u64 = 1 << 30;

/// The named tensors of a checkpoint. Ranks that are threads of one process share one.
#[derive(Debug)]
pub struct Checkpoint {
    name: String,
    tensors: BTreeMap<String, Entry>,
    files: usize,
    skipped: Skipped,
    spelling: Spelling,
}

#[derive(Debug)]
struct Entry {
    tensor: Tensor,
    /// The name in the file, where it differs.
    stored: Option<Box<str>>,
}

/// Tensors that were left out because inference never uses them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Skipped {
    /// Their number.
    pub tensors: usize,
    /// Their bytes, as far as their types are known.
    pub bytes: u64,
}

/// How the file spells `model.layers.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spelling {
    Plain,
    /// `language_model.model.layers.0` (Kimi-K2.5).
    Nested,
    /// `language_model.layers.0` (some repacks of Kimi-K2.5).
    NestedShort,
}

impl Checkpoint {
    /// Maps the files of a directory: those of `model.safetensors.index.json`, else
    /// `model.safetensors`. Reads headers only.
    ///
    /// The files must not change while the checkpoint is in use: reading a part that was cut off,
    /// or that its disk cannot read, ends a process by SIGBUS unless it handles that signal.
    ///
    /// # Errors
    /// [`ModelError::CheckpointMissing`], [`ModelError::CheckpointIndex`] and
    /// [`ModelError::CheckpointFile`], each with the file or tensor that is wrong.
    pub fn open(directory: impl AsRef<Path>) -> Result<Self, ModelError> {
        let directory = directory.as_ref();
        let index = directory.join(INDEX_NAME);
        let single = directory.join(SINGLE_NAME);
        let mut checkpoint = Self::empty(directory.display().to_string());
        if is_there(&index) {
            checkpoint.add_shards(directory, &index)?;
        } else if is_there(&single) {
            checkpoint.add(&single, map(&single)?, |_| Ok(()))?;
        } else {
            return Err(missing(directory));
        }
        Ok(checkpoint)
    }

    /// The tensors of a safetensors file in static memory. `name` is for messages.
    ///
    /// # Errors
    /// [`ModelError::CheckpointFile`] with what is wrong.
    pub fn from_static(name: &str, bytes: &'static [u8]) -> Result<Self, ModelError> {
        Self::from_shared(name, Arc::new(bytes))
    }

    /// As [`Checkpoint::from_static`], for bytes that something else keeps.
    ///
    /// # Errors
    /// As [`Checkpoint::from_static`].
    pub fn from_shared(name: &str, bytes: SharedBytes) -> Result<Self, ModelError> {
        let mut checkpoint = Self::empty(name.to_owned());
        checkpoint.add(&Path::new(name).join(SINGLE_NAME), bytes, |_| Ok(()))?;
        Ok(checkpoint)
    }

    /// Directory or name, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The tensor of a normalised name, as a view.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name).map(|entry| &entry.tensor)
    }

    /// All normalised names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Number of tensors, without the skipped ones.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there is no tensor.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Bytes of all tensors, without the skipped ones.
    pub fn bytes(&self) -> u64 {
        self.tensors.values().map(|entry| entry.tensor.bytes() as u64).sum()
    }

    /// Number of files.
    pub fn files(&self) -> usize {
        self.files
    }

    /// What was left out: vision parts and stored rotary tables.
    pub fn skipped(&self) -> Skipped {
        self.skipped
    }

    /// The name in the file of a normalised name: as found, or as this checkpoint would spell it.
    pub fn stored_name(&self, name: &str) -> String {
        if let Some(entry) = self.tensors.get(name) {
            return entry.stored.as_deref().unwrap_or(name).to_owned();
        }
        match self.spelling {
            Spelling::Plain => name.to_owned(),
            Spelling::Nested => format!("{NESTED}{name}"),
            Spelling::NestedShort => {
                format!("{NESTED}{}", name.strip_prefix("model.").unwrap_or(name))
            }
        }
    }

    /// The same tensors under other names; messages keep the stored ones.
    pub(super) fn renamed(&self, rename: impl Fn(&str) -> String) -> Result<Self, ModelError> {
        let mut checkpoint = Self::empty(self.name.clone());
        (checkpoint.files, checkpoint.skipped) = (self.files, self.skipped);
        for (name, entry) in &self.tensors {
            let stored = Some(entry.stored.clone().unwrap_or_else(|| name.as_str().into()));
            let entry = Entry { tensor: entry.tensor.clone(), stored };
            if checkpoint.tensors.insert(rename(name), entry).is_some() {
                let reason = format!("tensor {name} is there twice under different prefixes");
                return Err(ModelError::CheckpointFile { path: self.name.clone().into(), reason });
            }
        }
        Ok(checkpoint)
    }

    fn empty(name: String) -> Self {
        Self {
            name,
            tensors: BTreeMap::new(),
            files: 0,
            skipped: Skipped::default(),
            spelling: Spelling::Plain,
        }
    }

    fn add_shards(&mut self, directory: &Path, index: &Path) -> Result<(), ModelError> {
        let mut listed = read_index(index)?;
        let mut shards: BTreeMap<String, usize> = BTreeMap::new();
        for shard in listed.values() {
            *shards.entry(shard.clone()).or_default() += 1;
        }
        let absent = |shard: &&String| !is_there(&directory.join(shard));
        let absent: Vec<String> = shards.keys().filter(absent).cloned().collect();
        if !absent.is_empty() {
            let reason = format!("these files of it are missing: {}", shorten(&absent));
            return Err(ModelError::CheckpointIndex { path: index.to_owned(), reason });
        }
        for shard in shards.keys() {
            let path = directory.join(shard);
            self.add(&path, map(&path)?, |name| match listed.remove(name) {
                Some(expected) if expected == *shard => Ok(()),
                Some(expected) => Err(format!(
                    "tensor {name} is in this file, but {INDEX_NAME} places it in {expected}"
                )),
                None => Err(format!(
                    "tensor {name} is in this file and in another one, or not in {INDEX_NAME}"
                )),
            })?;
        }
        if listed.is_empty() {
            return Ok(());
        }
        let absent: Vec<_> =
            listed.iter().map(|(name, shard)| format!("{name} in {shard}")).collect();
        let reason = format!("it lists tensors that are not there: {}", shorten(&absent));
        Err(ModelError::CheckpointIndex { path: index.to_owned(), reason })
    }

    /// Adds the tensors of one file; `check` sees each stored name once.
    fn add(
        &mut self,
        path: &Path,
        bytes: SharedBytes,
        mut check: impl FnMut(&str) -> Result<(), String>,
    ) -> Result<(), ModelError> {
        let failed = |reason| ModelError::CheckpointFile { path: path.to_owned(), reason };
        let mut tensors = safetensors::read(&bytes).map_err(failed)?;
        tensors.sort_by(|(left, _), (right, _)| left.cmp(right));
        for (stored, tensor) in tensors {
            check(&stored).map_err(failed)?;
            self.insert(stored, tensor).map_err(failed)?;
        }
        self.files += 1;
        Ok(())
    }

    fn insert(&mut self, stored: String, tensor: Stored) -> Result<(), String> {
        if is_skipped(&stored) {
            self.skipped.tensors += 1;
            self.skipped.bytes += tensor.map_or(0, |tensor| tensor.bytes() as u64);
            return Ok(());
        }
        let tensor = tensor.map_err(|reason| format!("tensor {stored}: {reason}"))?;
        let (name, spelling) = normalise(&stored);
        if spelling != Spelling::Plain {
            self.spelling = spelling;
        }
        let stored_name = (name != stored).then(|| stored.clone().into_boxed_str());
        let entry = Entry { tensor, stored: stored_name };
        match self.tensors.insert(name, entry) {
            None => Ok(()),
            Some(_) => Err(format!("tensor {stored} is there twice under different prefixes")),
        }
    }
}

const NESTED: &str = "language_model.";

/// The name of a text model without its wrapper.
fn normalise(stored: &str) -> (String, Spelling) {
    let Some(name) = stored.strip_prefix(NESTED) else {
        return (stored.to_owned(), Spelling::Plain);
    };
    let short = ["layers.", "embed_tokens.", "norm."].iter().any(|start| name.starts_with(start));
    if short {
        return (format!("model.{name}"), Spelling::NestedShort);
    }
    // The head has the same spelling in both.
    let spelling = if name.starts_with("model.") { Spelling::Nested } else { Spelling::Plain };
    (name.to_owned(), spelling)
}

/// What inference of the text model never uses: vision parts, and rotary tables, which are computed
/// from the configuration (stored ones are junk).
fn is_skipped(stored: &str) -> bool {
    stored.contains("rotary_emb.inv_freq")
        || stored.starts_with("vision_tower.")
        || stored.starts_with("mm_projector.")
}

/// Maps a file for reading.
fn map(path: &Path) -> Result<SharedBytes, ModelError> {
    let failed = |source| ModelError::Read { path: path.to_owned(), source };
    // Asked before it is opened: opening a pipe waits for a writer.
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        let reason = "it is not a regular file".to_owned();
        return Err(ModelError::CheckpointFile { path: path.to_owned(), reason });
    }
    let file = File::open(path).map_err(failed)?;
    // SAFETY: the map is read-only and private. That nobody changes or cuts the file while it is
    // in use is a documented condition of `Checkpoint::open`, as for every program that maps
    // weights.
    let map = unsafe { Mmap::map(&file) };
    match map {
        Ok(map) => Ok(Arc::new(map)),
        // Address space is what a limit on a process's memory counts.
        Err(error) if error.kind() == std::io::ErrorKind::OutOfMemory => Err(ModelError::Memory {
            what: format!("mapping {}", path.display()),
            bytes: file.metadata().map_or(0, |metadata| metadata.len()),
            advice: "raise the limit, or split the model over machines",
        }),
        Err(error) => Err(failed(error)),
    }
}

/// The map from stored tensor name to file name.
fn read_index(path: &Path) -> Result<BTreeMap<String, String>, ModelError> {
    let failed = |reason| ModelError::CheckpointIndex { path: path.to_owned(), reason };
    let text = read_text(path, INDEX_BYTES_MAX)?;
    let mut index = parse_object(&text, &path.display().to_string())?;
    let Some(Value::Object(map)) = index.remove("weight_map") else {
        return Err(failed("it has no object `weight_map`".to_owned()));
    };
    let mut listed = BTreeMap::new();
    for (name, file) in map {
        let Value::String(file) = file else {
            return Err(failed(format!("the file of tensor {name} is {file}, not a name")));
        };
        // A name that leads out of the directory has no honest use.
        let mut components = Path::new(&file).components();
        let plain = matches!(components.next(), Some(Component::Normal(_)));
        if !plain || components.next().is_some() || file.contains(['/', '\\']) {
            let reason = format!(
                "tensor {name} is in {file:?}, which is not the name of a file in this directory"
            );
            return Err(failed(reason));
        }
        listed.insert(name, file);
    }
    if listed.is_empty() {
        return Err(failed("its `weight_map` is empty".to_owned()));
    }
    Ok(listed)
}

fn missing(directory: &Path) -> ModelError {
    let mut found: Vec<String> = std::fs::read_dir(directory)
        .map(|entries| {
            let name = |entry: std::fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
            entries.flatten().map(name).collect()
        })
        .unwrap_or_default();
    found.sort();
    let found = if found.is_empty() { "nothing".to_owned() } else { shorten(&found) };
    ModelError::CheckpointMissing { path: PathBuf::from(directory), found }
}

/// The first few of a list, and how many more there are.
fn shorten(names: &[String]) -> String {
    const SHOWN_MAX: usize = 8;
    let shown = names[..names.len().min(SHOWN_MAX)].join(", ");
    match names.len().saturating_sub(SHOWN_MAX) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}
