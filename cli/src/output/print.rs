//! Writing to standard output and standard error.

use std::io::{ErrorKind, Write};

use anyhow::{Context, Result};

/// Writes a line. A reader that has gone away is no error; a full disk is.
pub(crate) fn line(text: impl std::fmt::Display) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    read_away(writeln!(stdout, "{text}").and_then(|()| stdout.flush())).map(|_| ())
}

/// Whether the reader has gone away.
pub(crate) fn read_away(written: std::io::Result<()>) -> Result<bool> {
    match written {
        Ok(()) => Ok(false),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(true),
        Err(error) => Err(error).context("cannot write to standard output"),
    }
}

/// Writes a line to standard error; whoever closed it does not want it.
pub(crate) fn note(text: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}
