//! Writing to standard output and standard error.

use std::io::{ErrorKind, Write};

use anyhow::{Context, Result};
use paceline_runtime::{Event, TokenEvent};

/// An answer on its way to standard output: its text as it comes, or its tokens kept for an object.
pub(crate) struct AnswerWriter {
    json: bool,
    stdout: std::io::StdoutLock<'static>,
    tokens: Vec<TokenEvent>,
    failure: Option<anyhow::Error>,
    reader_gone: bool,
}

impl AnswerWriter {
    /// A writer of text, or with `json` a keeper of tokens.
    pub(crate) fn new(json: bool) -> Self {
        let stdout = std::io::stdout().lock();
        Self { json, stdout, tokens: Vec::new(), failure: None, reader_gone: false }
    }

    /// Takes an event. False once nothing more can be written.
    pub(crate) fn hear(&mut self, event: &Event<'_>) -> bool {
        let written = match event {
            Event::Token(token) if self.json => {
                self.tokens.push((*token).clone());
                Ok(())
            }
            Event::Text(text) if !self.json => {
                self.stdout.write_all(text.as_bytes()).and_then(|()| self.stdout.flush())
            }
            _ => Ok(()),
        };
        match read_away(written) {
            Ok(gone) => self.reader_gone |= gone,
            Err(error) => self.failure = Some(error),
        }
        self.failure.is_none() && !self.reader_gone
    }

    /// The tokens that were kept, and whether the reader has gone away.
    ///
    /// # Errors
    /// What made writing fail.
    pub(crate) fn finish(self) -> Result<(Vec<TokenEvent>, bool)> {
        match self.failure {
            Some(error) => Err(error),
            None => Ok((self.tokens, self.reader_gone)),
        }
    }
}

/// Writes a line. A reader that has gone away is no error; a full disk is.
pub(crate) fn line(text: impl std::fmt::Display) -> Result<()> {
    line_to_reader(text).map(|_| ())
}

/// As [`line()`], and says whether the reader has gone away, for whoever has more to write.
pub(crate) fn line_to_reader(text: impl std::fmt::Display) -> Result<bool> {
    let mut stdout = std::io::stdout().lock();
    read_away(writeln!(stdout, "{text}").and_then(|()| stdout.flush()))
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
