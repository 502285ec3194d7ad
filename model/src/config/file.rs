//! Reading of small text files with a limit on their size.

use std::fs;
use std::path::Path;

use crate::ModelError;

/// No real `config.json` comes near this size (Kimi-K2.5's has 8 KiB).
pub(crate) const CONFIG_BYTES_MAX: u64 = 16 << 20;

/// Reads a whole file; refuses one of more than `bytes_max` bytes before reading it.
pub(crate) fn read_bytes(path: &Path, bytes_max: u64) -> Result<Vec<u8>, ModelError> {
    let failed = |source| ModelError::Read { path: path.to_owned(), source };
    let bytes = fs::metadata(path).map_err(failed)?.len();
    if bytes > bytes_max {
        return Err(ModelError::FileTooLarge { path: path.to_owned(), bytes, bytes_max });
    }
    fs::read(path).map_err(failed)
}

/// As [`read_bytes`], for UTF-8 text.
pub(crate) fn read_text(path: &Path, bytes_max: u64) -> Result<String, ModelError> {
    String::from_utf8(read_bytes(path, bytes_max)?).map_err(|error| ModelError::Json {
        what: path.display().to_string(),
        reason: format!("it is not UTF-8 ({error})"),
    })
}
