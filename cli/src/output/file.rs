//! Writing whole files.

use std::{fs::Permissions, io::Write, os::unix::fs::PermissionsExt, path::Path};

use anyhow::{Context, Result};

/// Writes a file so that a reader sees the old contents or the new ones, never a part: beside it
/// first, then under its name. What is no regular file, such as a pipe, is written to directly.
pub(crate) fn write(path: &Path, contents: &[u8]) -> Result<()> {
    write_whole(path, contents).with_context(|| format!("cannot write {}", path.display()))
}

fn write_whole(path: &Path, contents: &[u8]) -> Result<()> {
    // A link stays one: what it points to is replaced.
    let target = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let existing = target.metadata().ok();
    if existing.as_ref().is_some_and(|metadata| !metadata.is_file()) {
        std::fs::write(&target, contents)?;
        return Ok(());
    }
    let folder = match target.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let permissions = existing.map(|metadata| metadata.permissions());
    // As any new file: what the user's mask leaves of it.
    let everyone = Permissions::from_mode(0o666);
    let mut builder = tempfile::Builder::new();
    let mut file = builder.prefix(".paceline-").permissions(everyone).tempfile_in(folder)?;
    file.write_all(contents)?;
    if let Some(permissions) = permissions {
        file.as_file().set_permissions(permissions)?;
    }
    file.as_file().sync_all()?;
    file.persist(&target)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_replaced_whole_and_links_kept() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        write(&file, b"one").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write(&link, b"two").unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"two");
        assert!(link.is_symlink());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "nothing is left over");
        write(Path::new("/dev/null"), b"three").unwrap();
        let error = write(&folder.path().join("missing/file"), b"").unwrap_err();
        assert!(format!("{error:#}").contains("missing/file"), "{error:#}");
    }
}
