//! What can go wrong in this crate.

use std::{path::PathBuf, time::Duration};

use paceline_kernels::{DType, driver::DriverError};

use crate::{Collective, Rank, ReduceOp, Unavailable, rank};

/// Errors of groups and collectives.
///
/// After [`RankLost`](Self::RankLost), [`Timeout`](Self::Timeout),
/// [`PeerTimeout`](Self::PeerTimeout), [`Aborted`](Self::Aborted)
/// or [`Mismatch`](Self::Mismatch) the group is unusable on every rank: all of them get the
/// first such failure, now and on every later call. The way on is a group of new processes.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// A rank is gone.
    #[error(
        "rank {rank} {cause} while {collective} needed it: look for its own message or, if it was \
         killed, for the system's, then start all ranks again"
    )]
    RankLost {
        /// The rank that is gone.
        rank: Rank,
        /// How it went.
        cause: LossCause,
        /// What the rank that noticed was doing.
        collective: Collective,
    },
    /// Ranks did not come in time.
    #[error(
        "{collective}: rank {} did not come within {}: look whether it is stopped, overloaded or \
         stuck elsewhere, or raise the timeout",
        rank::list(missing),
        rounded(*waited)
    )]
    Timeout {
        /// What the rank that gave up was doing.
        collective: Collective,
        /// How long it waited.
        waited: Duration,
        /// The ranks that did not come.
        missing: Vec<Rank>,
    },
    /// A GPU waited in vain for what another should have sent.
    #[error(
        "the GPU of rank {rank} waited {limit:?} for rank {peer} in its collective {index}: look \
         whether rank {peer} is stopped, stuck elsewhere or made other calls, or raise the timeout"
    )]
    PeerTimeout {
        /// The rank that gave up.
        rank: Rank,
        /// The rank that it waited for.
        peer: Rank,
        /// Which of the kernels that communicate, counted from 1, modulo 2³².
        index: u32,
        /// How long it waited.
        limit: Duration,
    },
    /// Somebody gave the group up through an [`Abort`](crate::Abort) handle.
    #[error("the group was aborted by rank {by}: {reason}")]
    Aborted {
        /// The rank whose handle was used.
        by: Rank,
        /// What the caller said.
        reason: String,
    },
    /// Two ranks called different things.
    #[error("ranks disagree: {first}, but {second}; all ranks must make the same calls in order")]
    Mismatch {
        /// One rank's call.
        first: CallFacts,
        /// Another rank's call.
        second: CallFacts,
    },
    /// A call that this rank alone can see is wrong. Nothing was sent, the group stays usable.
    #[error("{collective}: {reason}")]
    Argument {
        /// The call.
        collective: Collective,
        /// What is wrong, and what would be right.
        reason: String,
    },
    /// No back end serves this call.
    #[error("no back end serves {collective} of {bytes} bytes of {dtype}: {reasons}")]
    NotServed {
        /// The call.
        collective: Collective,
        /// Size of the call.
        bytes: usize,
        /// Element type of the call.
        dtype: DType,
        /// Each back end with its reason.
        reasons: String,
    },
    /// A device or its driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The back end asked for cannot be used.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),

    /// A setting was neither given nor found in the environment.
    #[error("{setting} is not known: give the option `{option}` or set {variables}")]
    SettingMissing {
        /// What is missing.
        setting: &'static str,
        /// The option that gives it.
        option: &'static str,
        /// The environment variables that give it.
        variables: &'static str,
    },
    /// A setting has an impossible value.
    #[error("{setting} is {value:?} (from {origin}), but must be {expected}")]
    SettingInvalid {
        /// Which setting.
        setting: &'static str,
        /// Its value.
        value: String,
        /// The option or environment variable that it came from.
        origin: String,
        /// What it must be.
        expected: String,
    },
    /// An option says something else than the environment.
    #[error(
        "{setting}: the option `{option}` says {given}, but the environment variable {variable} \
         says {found}: remove one or make them agree"
    )]
    SettingContradiction {
        /// Which setting.
        setting: &'static str,
        /// The option.
        option: &'static str,
        /// Its value.
        given: String,
        /// The variable.
        variable: &'static str,
        /// Its value.
        found: String,
    },
    /// Two ranks were started with different settings.
    #[error("ranks disagree on {setting}: rank 0 has {expected}, rank {rank} has {found}")]
    SettingMismatch {
        /// Which setting.
        setting: String,
        /// The rank that differs from rank 0.
        rank: Rank,
        /// Rank 0's value.
        expected: String,
        /// The other rank's value.
        found: String,
    },
    /// Two processes said that they are the same rank.
    #[error(
        "two processes ({first} and {second}) both say that they are rank {rank}: give each its \
         own rank, and each run its own address"
    )]
    DuplicateRank {
        /// The rank.
        rank: Rank,
        /// One process, as `host:pid`.
        first: String,
        /// The other process, as `host:pid`.
        second: String,
    },
    /// Rank 0 cannot listen on the address.
    #[error("rank 0 cannot listen on {address} ({reason}): choose a free port of this machine")]
    CannotListen {
        /// The address.
        address: String,
        /// The system's reason.
        reason: String,
    },
    /// Rank 0 was not reached.
    #[error(
        "rank 0 was not reached at {address} within {} ({reason}): look whether it was started, \
         with the same address, and still runs",
        rounded(*waited)
    )]
    Unreachable {
        /// The address tried.
        address: String,
        /// How long it was tried.
        waited: Duration,
        /// What happened last.
        reason: String,
    },
    /// Another program answers at the address.
    #[error("what answers at {address} is not rank 0 of a paceline group ({reason}): {next_step}")]
    Foreign {
        /// The address.
        address: String,
        /// What was seen.
        reason: String,
        /// What to do about it.
        next_step: &'static str,
    },
    /// Ranks did not come to the meeting in time.
    #[error(
        "rank {} did not come to the meeting at {address} within {}: look whether it was started, \
         with the same address and world size",
        rank::list(missing),
        rounded(*waited)
    )]
    NotMet {
        /// The ranks that did not come.
        missing: Vec<Rank>,
        /// Where they should have come to.
        address: String,
        /// How long they were waited for.
        waited: Duration,
    },
    /// The file of a `file://` meeting cannot be used.
    #[error("the meeting file {}: {reason}", path.display())]
    MeetingFile {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do about it.
        reason: String,
    },
    /// The system refused something that a group needs.
    #[error("{what} failed: {reason}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The system's reason.
        reason: String,
    },
}

impl CommError {
    pub(crate) fn system(what: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |error| Self::System { what, reason: error.to_string() }
    }
}

/// A duration as people would say it, to a tenth of a second; below that, to a millisecond.
fn rounded(duration: Duration) -> String {
    let tenths = (duration.as_secs_f64() * 10.0).round();
    match tenths {
        0.0..1.0 => format!("{} ms", duration.as_millis()),
        _ => format!("{} s", tenths / 10.0),
    }
}

/// How a rank was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LossCause {
    /// Its process ended without leaving the group: killed or crashed.
    Died,
    /// Its thread panicked.
    Panicked,
    /// It dropped its communicator.
    Left,
}

impl std::fmt::Display for LossCause {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Died => "died",
            Self::Panicked => "panicked",
            Self::Left => "left the group",
        })
    }
}

/// What a rank called: the facts that all ranks must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallFacts {
    /// Who called.
    pub rank: Rank,
    /// How many collectives it had called before, modulo 2³².
    pub index: u32,
    /// What it called.
    pub collective: Collective,
    /// How elements are combined.
    pub op: Option<ReduceOp>,
    /// Element type.
    pub dtype: Option<DType>,
    /// The root of a broadcast.
    pub root: Option<Rank>,
    /// Elements of the input.
    pub count: u64,
}

impl std::fmt::Display for CallFacts {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "rank {} called {}(", self.rank, self.collective)?;
        if let Some(op) = self.op {
            write!(formatter, "{op}, ")?;
        }
        if let Some(root) = self.root {
            write!(formatter, "root {root}, ")?;
        }
        match self.dtype {
            Some(dtype) => write!(formatter, "{} of {dtype})", self.count)?,
            None => write!(formatter, "{})", self.count)?,
        }
        write!(formatter, " as call {}", self.index)
    }
}

/// Result with this crate's error.
pub type Result<T, E = CommError> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_rounded() {
        let cases = [
            (Duration::from_nanos(3_000_346_407), "3 s"),
            (Duration::from_millis(2_549), "2.5 s"),
            (Duration::from_millis(100), "0.1 s"),
            (Duration::from_micros(7_900), "7 ms"),
            (Duration::from_secs(600), "600 s"),
        ];
        for (duration, expected) in cases {
            assert_eq!(rounded(duration), expected);
        }
    }
}
