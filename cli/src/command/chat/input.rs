//! Where turns come from: a terminal with line editing and a history, or the lines of a pipe.
//!
//! Both join lines that end with a backslash to the next. Start reading at [`Input::next`].

use std::{
    fs::DirBuilder,
    io::{BufRead, ErrorKind, Read},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use rustyline::{Behavior, Config, Editor, error::ReadlineError, history::FileHistory};

use crate::output::print;

/// A source of turns.
pub(super) enum Input {
    Terminal(Box<Terminal>),
    Lines(Lines),
}

/// What came.
pub(super) enum Typed {
    /// A whole turn, perhaps of several lines.
    Text(String),
    /// Ctrl-C at the prompt.
    Interrupted,
    /// The end.
    End,
}

impl Input {
    /// The next turn.
    ///
    /// # Errors
    /// What cannot be read.
    pub(super) fn next(&mut self) -> Result<Typed> {
        let mut text = String::new();
        loop {
            let line = match self {
                Self::Terminal(terminal) => terminal.line(!text.is_empty())?,
                Self::Lines(lines) => lines.line()?,
            };
            match line {
                Typed::Text(line) => match line.strip_suffix('\\') {
                    Some(begun) => {
                        text.push_str(begun);
                        text.push('\n');
                        self.check(text.len())?;
                    }
                    None => {
                        text.push_str(&line);
                        break;
                    }
                },
                // The last line of a pipe may end with a backslash.
                Typed::End if !text.is_empty() && matches!(self, Self::Lines(_)) => break,
                other => return Ok(other),
            }
        }
        self.check(text.len())?;
        if let Self::Terminal(terminal) = self {
            terminal.remember(&text);
        }
        Ok(Typed::Text(text))
    }

    /// Refuses what no context can hold, before memory fills with it. People cannot type that much.
    fn check(&self, bytes: usize) -> Result<()> {
        match self {
            Self::Lines(Lines { number, bytes_max }) if bytes > *bytes_max => bail!(
                "the turn up to line {number} of standard input is longer than {bytes_max} bytes, \
                 which no context can hold; shorten it"
            ),
            _ => Ok(()),
        }
    }
}

/// Most entries of the history.
const HISTORY_ENTRIES_MAX: usize = 1000;

/// A terminal.
pub(super) struct Terminal {
    editor: Editor<(), FileHistory>,
    /// Where the history is kept; `None` once that has failed.
    history: Option<PathBuf>,
}

impl Terminal {
    /// Takes over the terminal's lines. A history that cannot be read is a warning.
    ///
    /// # Errors
    /// A terminal that cannot be used.
    pub(super) fn open() -> Result<Self> {
        let config = Config::builder()
            .max_history_size(HISTORY_ENTRIES_MAX)
            .and_then(|config| config.history_ignore_dups(true))
            .context("cannot set up line editing")?
            .history_ignore_space(true)
            // So that answers can go to a file or a pipe while the terminal shows the prompt.
            .behavior(Behavior::PreferTerm)
            .build();
        let mut editor = Editor::with_config(config).context("cannot use this terminal")?;
        let history = history_file();
        if let Some(path) = history.as_deref().filter(|path| path.exists())
            && let Err(error) = check_regular(path).and_then(|()| Ok(editor.load_history(path)?))
        {
            let path = path.display();
            print::note(format_args!("warning: cannot read the history in {path}: {error}"));
        }
        Ok(Self { editor, history })
    }

    fn line(&mut self, continued: bool) -> Result<Typed> {
        loop {
            return match self.editor.readline(if continued { "… " } else { "> " }) {
                Ok(line) => Ok(Typed::Text(line)),
                Err(ReadlineError::Interrupted) => Ok(Typed::Interrupted),
                Err(ReadlineError::Eof) => Ok(Typed::End),
                // The editor has read the rest of the line, and leaves it out too.
                Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData => {
                    print::note(format_args!("that is not UTF-8 and was left out: type it again"));
                    continue;
                }
                Err(error) => Err(error).context("cannot read from the terminal"),
            };
        }
    }

    /// Adds a turn to the history, on disk too. A failure is a warning, once.
    fn remember(&mut self, text: &str) {
        let added = self.editor.add_history_entry(text).unwrap_or(false);
        let Some(path) = self.history.as_deref().filter(|_| added) else { return };
        let written = prepare(path).and_then(|()| Ok(self.editor.append_history(path)?));
        if let Err(error) = written {
            let path = path.display();
            print::note(format_args!("warning: cannot keep the history in {path}: {error}"));
            self.history = None;
        }
    }
}

/// `$XDG_STATE_HOME/paceline/history`, with that variable's default (XDG Base Directory
/// Specification 0.8); relative paths do not count.
fn history_file() -> Option<PathBuf> {
    let absolute = |path: PathBuf| path.is_absolute().then_some(path);
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).and_then(absolute);
    let home = || std::env::home_dir().and_then(absolute);
    let state = state.or_else(|| Some(home()?.join(".local/state")))?;
    Some(state.join("paceline/history"))
}

/// Makes the folder, for this user's eyes only.
fn prepare(path: &Path) -> Result<()> {
    if let Some(folder) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    if path.exists() { check_regular(path) } else { Ok(()) }
}

/// Opening a pipe would wait for its other end.
fn check_regular(path: &Path) -> Result<()> {
    if !path.metadata()?.is_file() {
        bail!("it is no regular file");
    }
    Ok(())
}

/// The lines of standard input.
pub(super) struct Lines {
    number: usize,
    bytes_max: usize,
}

impl Lines {
    /// Lines of at most `bytes_max` bytes.
    pub(super) fn new(bytes_max: usize) -> Self {
        Self { number: 0, bytes_max }
    }

    /// Number of the last line read, from 1.
    pub(super) fn number(&self) -> usize {
        self.number
    }

    fn line(&mut self) -> Result<Typed> {
        let mut bytes = Vec::new();
        // Enough to see that a line is too long.
        let limit = self.bytes_max as u64 + 3;
        let mut stdin = std::io::stdin().lock().take(limit);
        stdin.read_until(b'\n', &mut bytes).context("cannot read standard input")?;
        if bytes.is_empty() {
            return Ok(Typed::End);
        }
        self.number += 1;
        if bytes.last() == Some(&b'\n') {
            bytes.pop();
            bytes.pop_if(|byte| *byte == b'\r');
        }
        if bytes.len() > self.bytes_max {
            // The rest of the line was not read, so the last character may be torn.
            return Ok(Typed::Text(String::from_utf8_lossy(&bytes).into_owned()));
        }
        let number = self.number;
        let text = String::from_utf8(bytes).with_context(|| {
            format!("line {number} of standard input is not UTF-8; convert it to UTF-8")
        })?;
        Ok(Typed::Text(text))
    }
}
