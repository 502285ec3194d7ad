//! Joining a group of processes.
//!
//! Start with [`init_distributed`]: it reads the settings ([`crate::settings`]), meets the other
//! ranks ([`crate::rendezvous`]) and connects the back ends.

use std::{path::PathBuf, str::FromStr};

use crate::{CommError, Communicator, Group, GroupOptions, Result, rendezvous, settings::Settings};

/// How a process finds the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InitMethod {
    /// `env://`: the variables that torchrun sets, or those of Slurm's srun.
    Env,
    /// `tcp://host:port`: rank 0 listens there, the others connect.
    Tcp {
        /// Name or address of rank 0's machine.
        host: String,
        /// A free port of it.
        port: u16,
    },
    /// `file://path`: rank 0 writes there where it listens. A file left by a dead run does no
    /// harm, and the file is removed when the ranks have met.
    File(PathBuf),
}

impl InitMethod {
    /// Reads `env://`, `tcp://host:port` or `file://path`.
    ///
    /// # Errors
    /// [`CommError::SettingInvalid`].
    pub fn parse(text: &str) -> Result<Self> {
        text.parse()
    }
}

impl FromStr for InitMethod {
    type Err = CommError;

    fn from_str(text: &str) -> Result<Self> {
        let invalid = |expected: &str| CommError::SettingInvalid {
            setting: "init method",
            value: text.to_owned(),
            origin: "the option `method`".to_owned(),
            expected: expected.to_owned(),
        };
        if text == "env://" {
            return Ok(Self::Env);
        }
        if let Some(path) = text.strip_prefix("file://") {
            if path.is_empty() || path.ends_with('/') {
                return Err(invalid("file:// and the path of a file, as in file:///tmp/meeting"));
            }
            return Ok(Self::File(path.into()));
        }
        if let Some(address) = text.strip_prefix("tcp://") {
            let expected = "tcp://host:port with a port from 1 to 65535";
            let (host, port) = address.rsplit_once(':').ok_or_else(|| invalid(expected))?;
            let host = host.trim_start_matches('[').trim_end_matches(']');
            return match port.parse() {
                Ok(port) if port != 0 && !host.is_empty() => {
                    Ok(Self::Tcp { host: host.to_owned(), port })
                }
                _ => Err(invalid(expected)),
            };
        }
        Err(invalid("env://, tcp://host:port or file://path"))
    }
}

/// Settings of one process of a group. What is `None` is read from the environment: from the
/// variables of torchrun or, if it set none of them, of srun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InitOptions {
    /// How to find the others.
    pub method: InitMethod,
    /// Number of ranks (`WORLD_SIZE`, `SLURM_NTASKS`).
    pub world_size: Option<usize>,
    /// This process (`RANK`, `SLURM_PROCID`).
    pub rank: Option<usize>,
    /// Its number on its machine (`LOCAL_RANK`, `SLURM_LOCALID`, else the rank).
    pub local_rank: Option<usize>,
    /// Leave the environment alone: for ranks that a program starts itself, whatever launched it.
    pub ignore_environment: bool,
    /// The back end; `None` or `auto` lets the policy choose for each size.
    pub backend: Option<String>,
    /// The GPU that this process computes on; `None`: the CPU. All ranks have one, or none.
    pub device: Option<u32>,
    /// Settings that all ranks must have alike.
    pub group: GroupOptions,
}

impl InitOptions {
    /// Everything but the method from the environment.
    pub fn new(method: InitMethod) -> Self {
        Self {
            method,
            world_size: None,
            rank: None,
            local_rank: None,
            ignore_environment: false,
            backend: None,
            device: None,
            group: GroupOptions::default(),
        }
    }
}

/// Joins the group of processes that `options` (and the environment) describe. Blocks until all
/// ranks are there, at most for the timeout.
///
/// ```no_run
/// use paceline_comm::{InitMethod, InitOptions, init_distributed};
/// // Under `torchrun --nproc-per-node 2` or `srun --ntasks 2`:
/// let comm = init_distributed(&InitOptions::new(InitMethod::Env))?;
/// println!("rank {} of {}", comm.rank(), comm.world_size());
/// # Ok::<(), paceline_comm::CommError>(())
/// ```
///
/// # Errors
/// The `Setting…` variants of [`CommError`] for what is missing, impossible, contradictory or not
/// the same on all ranks; [`CommError::CannotListen`], [`CommError::Unreachable`],
/// [`CommError::Foreign`], [`CommError::NotMet`], [`CommError::DuplicateRank`] and
/// [`CommError::MeetingFile`] for the meeting; [`CommError::Unavailable`] if the ranks are on
/// several machines or the back end cannot be used.
pub fn init_distributed(options: &InitOptions) -> Result<Communicator> {
    let mut group = join(options)?;
    if let Some(ordinal) = options.device {
        group = group.on_device(ordinal);
    }
    Communicator::connect(group, options.backend.as_deref())
}

/// The first half of [`init_distributed`]: joins the group, and connects no back end.
fn join(options: &InitOptions) -> Result<Group> {
    options.group.check()?;
    let environment =
        |name: &str| (!options.ignore_environment).then(|| std::env::var(name).ok()).flatten();
    let settings = Settings::resolve(options, &environment)?;
    if settings.world_size == 1 {
        return Ok(Group::alone_with(settings.local_rank, options.group.timeout));
    }
    rendezvous::meet(&settings, options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_are_parsed() {
        assert_eq!(InitMethod::parse("env://"), Ok(InitMethod::Env));
        assert_eq!(
            InitMethod::parse("tcp://node-1:29500"),
            Ok(InitMethod::Tcp { host: "node-1".to_owned(), port: 29500 })
        );
        assert_eq!(
            InitMethod::parse("tcp://[::1]:80"),
            Ok(InitMethod::Tcp { host: "::1".to_owned(), port: 80 })
        );
        assert_eq!(InitMethod::parse("file:///tmp/a b"), Ok(InitMethod::File("/tmp/a b".into())));
        for wrong in [
            "",
            "env",
            "env://x",
            "tcp://",
            "tcp://host",
            "tcp://:1",
            "tcp://host:0",
            "file://",
            "tcp://host:65536",
            "tcp://host:x",
            "file:///tmp/",
            "nccl://a:1",
            "/tmp/a",
        ] {
            let error = InitMethod::parse(wrong).unwrap_err();
            assert!(matches!(error, CommError::SettingInvalid { .. }), "{wrong}: {error}");
        }
    }
}
