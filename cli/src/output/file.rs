//! Writing whole files.

use std::{
    fs::{Metadata, Permissions},
    io::{ErrorKind, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use tempfile::NamedTempFile;

/// Writes a file so that a reader sees the old contents or the new ones, never a part: beside it
/// first, then under its name. What is no regular file, such as a pipe, is written to directly.
pub(crate) fn write(path: &Path, contents: &[u8]) -> Result<()> {
    write_whole(path, contents).with_context(|| format!("cannot write {}", path.display()))
}

/// Fails where [`write()`] would fail now: for whoever has a long way to go to the contents.
pub(crate) fn check(path: &Path) -> Result<()> {
    let place = Place::of(path);
    let outcome = match &place.existing {
        Some(metadata) if metadata.is_dir() => Err(ErrorKind::IsADirectory.into()),
        // A pipe may wait for its reader when it is opened.
        Some(metadata) if !metadata.is_file() => Ok(()),
        _ => place.beside().map(drop),
    };
    outcome.with_context(|| format!("cannot write {}", path.display()))
}

fn write_whole(path: &Path, contents: &[u8]) -> Result<()> {
    let place = Place::of(path);
    if place.existing.as_ref().is_some_and(|metadata| !metadata.is_file()) {
        std::fs::write(&place.target, contents)?;
        return Ok(());
    }
    let mut file = place.beside()?;
    // Through the plain file: the other's errors name a file that the user does not know.
    file.as_file_mut().write_all(contents)?;
    if let Some(metadata) = &place.existing {
        file.as_file().set_permissions(metadata.permissions())?;
    }
    file.as_file().sync_all()?;
    file.persist(&place.target).map_err(|error| error.error)?;
    Ok(())
}

/// An error without the name of the file that was to be there for a moment, which tempfile appends.
fn without_path(error: std::io::Error) -> std::io::Error {
    let text = error.to_string();
    let system = text.split_once(" at path ").map_or(text.as_str(), |(system, _)| system);
    std::io::Error::new(error.kind(), system)
}

/// Where a file goes.
struct Place {
    target: PathBuf,
    /// What is there already.
    existing: Option<Metadata>,
}

impl Place {
    fn of(path: &Path) -> Self {
        // A link stays one: what it points to is replaced.
        let target = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let existing = target.metadata().ok();
        Self { target, existing }
    }

    /// A file beside the target, which is removed unless it takes its place.
    fn beside(&self) -> std::io::Result<NamedTempFile> {
        let folder = match self.target.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        // As any new file: what the user's mask leaves of it.
        let everyone = Permissions::from_mode(0o666);
        let mut builder = tempfile::Builder::new();
        let builder = builder.prefix(".paceline-").permissions(everyone);
        builder.tempfile_in(folder).map_err(without_path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_replaced_whole_and_links_kept() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        check(&file).unwrap();
        write(&file, b"one").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write(&link, b"two").unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"two");
        assert!(link.is_symlink());
        check(&link).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "nothing is left over");
        check(Path::new("/dev/null")).unwrap();
        write(Path::new("/dev/null"), b"three").unwrap();
        let missing = folder.path().join("missing/file");
        for error in [check(&missing).unwrap_err(), write(&missing, b"").unwrap_err()] {
            let text = format!("{error:#}");
            assert!(text.contains("missing/file") && !text.contains(".paceline-"), "{text}");
        }
        assert!(check(folder.path()).is_err(), "a folder is no file");
    }
}
