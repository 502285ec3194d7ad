//! The compiled CUDA kernels that this crate carries.
//!
//! A fatbin holds one CUDA source for several GPU architectures; the driver picks the part that
//! fits. `kernels.toml` lists the sources and build.rs embeds what was compiled, which may be
//! nothing: that is an answer at run time, never another build. Start reading at [`fatbin`].

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// The folder of fatbins to take instead of the embedded ones, as `cargo xtask kernels` makes it.
pub const FATBINS_VARIABLE: &str = "PACELINE_FATBINS";

/// Bytes where the driver may read them: it wants more than the alignment 1 of an embedded file.
#[repr(C, align(16))]
struct Aligned<Bytes: ?Sized>(Bytes);

/// Names, as [`fatbin`] takes them, and bytes.
static EMBEDDED: &[(&str, &Aligned<[u8]>)] = &include!(concat!(env!("OUT_DIR"), "/fatbins.rs"));

/// Fatbins read from the folder of [`FATBINS_VARIABLE`], each at most once in a process.
static READ: Mutex<BTreeMap<PathBuf, &'static [u8]>> = Mutex::new(BTreeMap::new());

/// Why there is no fatbin.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FatbinError {
    /// This build embeds no fatbin of that name.
    #[error(
        "this build holds no CUDA kernels of `{name}`: run `cargo xtask kernels` and build again, \
         or set {FATBINS_VARIABLE} to a folder of compiled kernels"
    )]
    NoKernels {
        /// The name asked for.
        name: String,
    },
    /// The folder of [`FATBINS_VARIABLE`] does not give that fatbin.
    #[error(
        "cannot read {path} ({reason}): correct {FATBINS_VARIABLE}, or unset it to use the kernels \
         of this build"
    )]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        reason: String,
    },
}

/// The fatbin of a CUDA source, for `cuModuleLoadData`: its bytes begin at a multiple of 16.
///
/// `name` is the source's path below `cuda/` without its extension, as in `memory/fill`. Where the
/// environment variable `PACELINE_FATBINS` names a folder, the fatbin comes from there, so that
/// kernels can be compiled again on a GPU machine without building the program; each file is read
/// once and kept until the process ends. Call it at set-up: it may read a file and allocate.
///
/// # Errors
///
/// [`FatbinError::NoKernels`] if this build has none of that name, and
/// [`FatbinError::Unreadable`] if the folder has none.
pub fn fatbin(name: &str) -> Result<&'static [u8], FatbinError> {
    match env::var_os(FATBINS_VARIABLE).filter(|folder| !folder.is_empty()) {
        Some(folder) => read(&Path::new(&folder).join(format!("{name}.fatbin"))),
        None => EMBEDDED
            .iter()
            .find(|(embedded, _)| *embedded == name)
            .map(|(_, bytes)| &bytes.0)
            .ok_or_else(|| FatbinError::NoKernels { name: name.to_owned() }),
    }
}

/// The names and sizes in bytes of the fatbins that this build embeds.
pub fn embedded() -> impl Iterator<Item = (&'static str, usize)> {
    EMBEDDED.iter().map(|(name, bytes)| (*name, bytes.0.len()))
}

fn read(path: &Path) -> Result<&'static [u8], FatbinError> {
    // A panic elsewhere cannot leave the map half changed.
    let mut files = READ.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(bytes) = files.get(path) {
        return Ok(bytes);
    }
    let bytes = fs::read(path).map_err(|error| FatbinError::Unreadable {
        path: path.to_owned(),
        reason: error.to_string(),
    })?;
    let bytes = aligned(&bytes);
    files.insert(path.to_owned(), bytes);
    Ok(bytes)
}

/// A copy that is never freed and begins at a multiple of 16.
fn aligned(bytes: &[u8]) -> &'static [u8] {
    let blocks = bytes.chunks(16).map(|chunk| {
        let mut block = Aligned([0; 16]);
        block.0[..chunk.len()].copy_from_slice(chunk);
        block
    });
    let blocks: &'static [Aligned<[u8; 16]>] = Vec::leak(blocks.collect());
    let all = blocks.as_ptr().cast::<u8>();
    // SAFETY: the blocks are 16 bytes each without padding between them, and live for ever; they
    // hold all of `bytes` and so at least that many.
    unsafe { std::slice::from_raw_parts(all, bytes.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_no_source_has_is_told_with_the_next_step() {
        let error = fatbin("memory/no_such_source").expect_err("kernels.toml lists no such source");
        let text = error.to_string();
        assert!(text.contains("memory/no_such_source"), "{text}");
        assert!(text.contains("cargo xtask kernels") || text.contains(FATBINS_VARIABLE), "{text}");
    }

    #[test]
    fn what_is_embedded_is_found_aligned_and_not_empty() {
        for (name, bytes) in EMBEDDED {
            assert_eq!(bytes.0.as_ptr().addr() % 16, 0, "{name}");
            // The magic number with which every fatbin starts.
            assert_eq!(bytes.0[..4], 0xba55_ed50_u32.to_le_bytes(), "{name}");
        }
        let names: Vec<&str> = embedded().map(|(name, _)| name).collect();
        let listed = include_str!("../kernels.toml");
        for name in names {
            assert!(listed.contains(&format!("source = \"{name}.cu\"")), "{name}");
        }
    }

    #[test]
    fn a_file_is_read_once_and_aligned() {
        let path = env::temp_dir().join(format!("paceline-fatbin-{}", std::process::id()));
        let missing = read(&path).expect_err("nothing was written yet");
        assert!(missing.to_string().contains(FATBINS_VARIABLE), "{missing}");
        let content: Vec<u8> = (0..37).collect();
        fs::write(&path, &content).expect("the temporary folder can be written");
        let first = read(&path).expect("it was written");
        fs::remove_file(&path).expect("it was written");
        assert_eq!(first, content);
        assert_eq!(first.as_ptr().addr() % 16, 0);
        let second = read(&path).expect("it was read before");
        assert_eq!(first.as_ptr(), second.as_ptr());
    }
}
