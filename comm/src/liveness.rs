//! How a process notices that another one has died.
//!
//! Each rank alone holds the writing end of a pipe; all others hold its reading end. Nobody ever
//! writes. When the process ends, however it ends, the system closes the writing end, and reading
//! gives "end of file" instead of "nothing yet". This needs no signals, no process ids (which
//! containers translate) and no thread.

use std::{
    io::ErrorKind,
    os::fd::{AsFd, OwnedFd},
};

use rustix::fs::OFlags;

use crate::{CommError, Result};

/// One pipe: the end to hold and the end to watch.
pub(crate) struct Lifeline {
    pub(crate) held: OwnedFd,
    pub(crate) watched: OwnedFd,
}

impl Lifeline {
    pub(crate) fn open() -> Result<Self> {
        let what = "opening a pipe";
        let (watched, held) = std::io::pipe().map_err(CommError::system(what))?;
        let (watched, held) = (OwnedFd::from(watched), OwnedFd::from(held));
        rustix::fs::fcntl_setfl(&watched, OFlags::NONBLOCK)
            .map_err(|error| CommError::system(what)(error.into()))?;
        Ok(Self { held, watched })
    }
}

/// The pipes that one rank needs.
pub(crate) struct Lifelines {
    /// Closed by the system when this process ends.
    _held: OwnedFd,
    /// By rank; none for the rank itself.
    watched: Vec<Option<OwnedFd>>,
}

impl Lifelines {
    pub(crate) fn over(held: OwnedFd, watched: Vec<Option<OwnedFd>>) -> Self {
        Self { _held: held, watched }
    }

    /// Whether the process of `rank` has ended (or closed its end when it left).
    pub(crate) fn has_ended(&self, rank: usize) -> bool {
        self.watched[rank].as_ref().is_some_and(is_at_end)
    }
}

fn is_at_end(pipe: impl AsFd) -> bool {
    let mut byte = [0u8; 1];
    match rustix::io::read(pipe, &mut byte) {
        Ok(count) => count == 0,
        Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_ends_with_its_holder() {
        let Lifeline { held, watched } = Lifeline::open().unwrap();
        assert!(!is_at_end(&watched));
        let second_holder = held.try_clone().unwrap();
        drop(held);
        assert!(!is_at_end(&watched));
        drop(second_holder);
        assert!(is_at_end(&watched));
    }
}
