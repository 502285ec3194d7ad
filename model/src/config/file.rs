//! Reading of small text files with a limit on their size.

use std::fs;
use std::io::Read;
use std::path::Path;

use crate::ModelError;

/// No real `config.json` comes near this size (Kimi-K2.5's has 8 KiB).
pub(crate) const CONFIG_BYTES_MAX: u64 = 16 << 20;

/// Reads a whole file; refuses one of more than `bytes_max` bytes before reading it.
pub(crate) fn read_bytes(path: &Path, bytes_max: u64) -> Result<Vec<u8>, ModelError> {
    let failed = |source| ModelError::Read { path: path.to_owned(), source };
    let bytes = regular_file_bytes(path).map_err(failed)?;
    if bytes > bytes_max {
        return Err(ModelError::FileTooLarge { path: path.to_owned(), bytes, bytes_max });
    }
    let mut contents = Vec::with_capacity(bytes as usize);
    let file = fs::File::open(path).map_err(failed)?;
    file.take(bytes_max).read_to_end(&mut contents).map_err(failed)?;
    Ok(contents)
}

/// Whether there is something of this name, even a link that leads nowhere or in a circle: reading
/// it then says so, while taking it for absent would leave out what it was meant to say.
pub(crate) fn is_there(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// The directory of a file.
pub(crate) fn directory(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
}

/// Size of a regular file; anything else could block or never end.
pub(crate) fn regular_file_bytes(path: &Path) -> std::io::Result<u64> {
    let metadata = fs::metadata(path)?;
    match metadata.is_file() {
        true => Ok(metadata.len()),
        false => Err(std::io::Error::other("it is not a regular file")),
    }
}

/// As [`read_bytes`], for UTF-8 text.
pub(crate) fn read_text(path: &Path, bytes_max: u64) -> Result<String, ModelError> {
    String::from_utf8(read_bytes(path, bytes_max)?).map_err(|error| ModelError::Json {
        what: path.display().to_string(),
        reason: format!("it is not UTF-8 ({error})"),
    })
}
