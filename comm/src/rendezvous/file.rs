//! The file of a `file://` meeting: it says on which Unix socket rank 0 listens.
//!
//! Rank 0 writes the text to a temporary file beside it and links that into place, so that a
//! reader sees all of it or nothing. A file whose socket nobody listens on was left by a dead run
//! and is replaced; one that was not written by this module is never touched. Rank 0 removes the
//! file when the ranks have met, or could not.

use std::{
    fs,
    io::{ErrorKind, Write},
    path::{Path, PathBuf},
};

use super::{guest::Attempt, link::Link, random_name, wire::Hello};
use crate::{CommError, Result};

const FIRST_LINE: &str = "paceline meeting, version 1";
/// No such file is longer.
const BYTES_MAX: u64 = 1024;

/// What the file says.
#[derive(Debug, PartialEq, Eq)]
struct Note {
    boot_id: String,
    process: String,
    socket: String,
}

impl Note {
    fn text(&self) -> String {
        let Self { boot_id, process, socket } = self;
        format!("{FIRST_LINE}\nboot {boot_id}\nprocess {process}\nsocket {socket}\n")
    }

    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let mut value = |name: &str| Some(lines.next()?.strip_prefix(name)?.to_owned());
        if !value(FIRST_LINE)?.is_empty() {
            return None;
        }
        let (boot_id, process, socket) = (value("boot ")?, value("process ")?, value("socket ")?);
        Some(Self { boot_id, process, socket })
    }
}

/// What is at the path.
enum Found {
    Nothing,
    Note(Note),
    SomethingElse,
}

fn look(path: &Path) -> Result<Found> {
    let failed = |error: std::io::Error| CommError::MeetingFile {
        path: path.to_owned(),
        reason: error.to_string(),
    };
    let metadata = match fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Found::Nothing),
        metadata => metadata.map_err(failed)?,
    };
    if !metadata.is_file() || metadata.len() > BYTES_MAX {
        return Ok(Found::SomethingElse);
    }
    match fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Found::Nothing),
        // A file made by `mktemp` is as good as none.
        Ok(bytes) if bytes.is_empty() => Ok(Found::Nothing),
        Ok(bytes) => {
            let note = str::from_utf8(&bytes).ok().and_then(Note::parse);
            Ok(note.map_or(Found::SomethingElse, Found::Note))
        }
        Err(error) => Err(failed(error)),
    }
}

fn not_ours(path: &Path) -> CommError {
    let reason = "it exists, but was not written for a meeting of ranks; it is left alone: \
                  choose another path or remove it";
    CommError::MeetingFile { path: path.to_owned(), reason: reason.to_owned() }
}

/// Rank 0's file; removed on drop, unless somebody else has replaced it.
pub(super) struct MeetingFile {
    path: PathBuf,
    text: String,
}

impl MeetingFile {
    /// Puts the file in place.
    pub(super) fn create(path: &Path, socket: &str, hello: &Hello) -> Result<Self> {
        let note = Note {
            boot_id: hello.boot_id.clone(),
            process: format!("{}:{}", hello.host, hello.process),
            socket: socket.to_owned(),
        };
        match look(path)? {
            Found::SomethingElse => return Err(not_ours(path)),
            Found::Note(other) if other.boot_id == note.boot_id && is_live(&other) => {
                let reason = format!("process {} uses it: choose another path", other.process);
                return Err(CommError::MeetingFile { path: path.to_owned(), reason });
            }
            Found::Note(_) | Found::Nothing => {}
        }
        let text = note.text();
        let failed = |error: std::io::Error| CommError::MeetingFile {
            path: path.to_owned(),
            reason: format!("{error}: choose a path in a directory that can be written"),
        };
        let mut beside = path.as_os_str().to_owned();
        beside.push(format!(".{}", random_name()?));
        let beside = PathBuf::from(beside);
        let placed = fs::File::create_new(&beside)
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .and_then(|()| fs::rename(&beside, path));
        if let Err(error) = placed {
            // What is left beside has a name that nobody else uses; removing it is a courtesy.
            let _ = fs::remove_file(&beside);
            return Err(failed(error));
        }
        Ok(Self { path: path.to_owned(), text })
    }
}

impl Drop for MeetingFile {
    fn drop(&mut self) {
        if fs::read_to_string(&self.path).is_ok_and(|text| text == self.text) {
            // If it cannot be removed, the next run finds that nobody listens and replaces it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn is_live(note: &Note) -> bool {
    Link::local(note.socket.as_bytes()).is_ok()
}

/// Connects to where the file says.
pub(super) fn follow(path: &Path, hello: &Hello) -> Result<Link, Attempt> {
    match look(path).map_err(Attempt::Never)? {
        Found::Nothing => Err(Attempt::Later("the file does not exist yet".to_owned())),
        Found::SomethingElse => Err(Attempt::Never(not_ours(path))),
        Found::Note(note) if note.boot_id != hello.boot_id => Err(Attempt::Later(
            "the file was written on another machine, or before this one was started again"
                .to_owned(),
        )),
        Found::Note(note) => Link::local(note.socket.as_bytes()).map_err(|_| {
            let process = note.process;
            Attempt::Later(format!("the file was left by process {process}, which is gone"))
        }),
    }
}
