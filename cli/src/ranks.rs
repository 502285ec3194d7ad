//! Ranks as processes: joining a group that something started, or starting one.

use std::{
    os::unix::process::ExitStatusExt,
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use paceline_comm::{
    CommError, Communicator, GroupOptions, InitMethod, InitOptions, Rank, init_distributed,
};
use paceline_model::ModelError;
use paceline_runtime::{Ranks, RuntimeError};

use crate::{
    args::{DistributedArguments, ModelArguments},
    failure::UsageError,
    interrupt,
    output::print,
};

/// This process's place: it leads, or it serves another.
pub(crate) enum Place {
    /// Rank 0, with the processes that it started.
    Leader(Ranks, RankProcesses),
    /// Another rank.
    Server(Box<Communicator>),
}

/// Finds this process's place, and starts the other ranks if it is to. `command_words` is the
/// length of the command's name in words.
pub(crate) fn place(
    model: &ModelArguments,
    arguments: &DistributedArguments,
    command_words: usize,
) -> Result<Place> {
    let timeout = Duration::from_secs(arguments.timeout.into());
    let tp = model.tp.map(usize::from);
    if let Some(method) = &arguments.init {
        if arguments.own_group {
            end_with_parent()?;
            // Ctrl-C reaches every process of a terminal; what it means is for rank 0 to say.
            interrupt::ignore()?;
        }
        if let (Some(tp), Some(world_size)) = (tp, arguments.world_size) {
            let text = || format!("--tp {tp} and --world-size {world_size} contradict");
            ensure!(tp == world_size, UsageError(text()));
        }
        let world_size = arguments.world_size.or(tp);
        let own = arguments.own_group;
        let communicator = join(method, world_size, arguments.rank, timeout, own)?;
        return Ok(match communicator.rank().0 {
            0 => Place::Leader(Ranks::Process(Box::new(communicator)), RankProcesses::default()),
            _ => Place::Server(Box::new(communicator)),
        });
    }
    let count = tp.unwrap_or(1);
    if arguments.processes && count > 1 {
        let mut processes = RankProcesses::start(count, command_words)?;
        let method = processes.method();
        // In a thread of its own, so that a rank that fails at its start is noticed at once.
        let meeting = thread::spawn(move || join(&method, Some(count), Some(0), timeout, true));
        while !meeting.is_finished() {
            if let Err(error) = processes.check() {
                // A rank may have joined and then failed. This one then joins in a moment, too, and
                // finds what the other found.
                let deadline = Instant::now() + JOINED_MAX;
                while !meeting.is_finished() && Instant::now() < deadline {
                    thread::sleep(POLL);
                }
                ensure!(meeting.is_finished(), error);
                break;
            }
            thread::sleep(POLL);
        }
        processes.told = false;
        let communicator = meeting.join().map_err(|_| anyhow!("joining the ranks failed"))??;
        return Ok(Place::Leader(Ranks::Process(Box::new(communicator)), processes));
    }
    Ok(Place::Leader(Ranks::Threads { count, timeout }, RankProcesses::default()))
}

fn join(
    method: &str,
    world_size: Option<usize>,
    rank: Option<usize>,
    timeout: Duration,
    ignore_environment: bool,
) -> Result<Communicator> {
    let group = GroupOptions { timeout, ..GroupOptions::default() };
    let method = InitMethod::parse(method).map_err(with_option_names)?;
    let options =
        InitOptions { world_size, rank, group, ignore_environment, ..InitOptions::new(method) };
    init_distributed(&options).map_err(with_option_names)
}

/// What this program calls the settings that comm's errors name.
const OPTION_NAMES: [(&str, &str); 4] = [
    ("the option `world_size`", "--world-size"),
    ("the option `rank`", "--rank"),
    ("the option `method tcp://host:port`", "--init tcp://HOST:PORT"),
    ("the option `method`", "--init"),
];

/// An error about settings, with the names of this program's options.
fn with_option_names(error: CommError) -> anyhow::Error {
    use CommError::{SettingContradiction, SettingInvalid, SettingMissing};
    match error {
        SettingContradiction { .. } | SettingInvalid { .. } | SettingMissing { .. } => {
            let text = OPTION_NAMES
                .iter()
                .fold(error.to_string(), |text, (name, option)| text.replace(name, option));
            UsageError(text).into()
        }
        other => other.into(),
    }
}

/// Whether this rank, another than 0, need not report an error, since one that shares its standard
/// error does: how the group was lost, the lowest of those that are left; what is wrong with files
/// that all read alike, rank 0.
pub(crate) fn is_told_by_another(rank: Rank, error: &RuntimeError) -> bool {
    let error = match error {
        RuntimeError::Comm(error) | RuntimeError::Model(ModelError::Comm(error)) => error,
        RuntimeError::Model(error) | RuntimeError::Draft(error) => {
            return !matches!(error, ModelError::Memory { .. } | ModelError::Read { .. });
        }
        RuntimeError::Request { .. } => return true,
        _ => return false,
    };
    let lost: &[Rank] = match error {
        CommError::RankLost { rank, .. } => std::slice::from_ref(rank),
        CommError::Timeout { missing, .. } => missing,
        CommError::Aborted { .. } => &[],
        _ => return false,
    };
    (0..rank.index()).any(|below| !lost.contains(&Rank(below)))
}

/// Ranks 1 and up as processes that this one started.
#[derive(Default)]
pub(crate) struct RankProcesses {
    meeting: Option<PathBuf>,
    children: Vec<Child>,
    /// Whether an error already tells how a rank ended.
    told: bool,
}

const POLL: Duration = Duration::from_millis(1);

/// How long rank 0 needs at most to have joined when another has.
const JOINED_MAX: Duration = Duration::from_millis(500);

/// How long after a failure it is looked whether a signal has ended a rank.
const NEWS_MAX: Duration = Duration::from_millis(50);

/// Ranks end within moments of rank 0; after this they are killed.
const END_MAX: Duration = Duration::from_secs(5);

impl RankProcesses {
    /// Starts this program again for each other rank, with the same arguments.
    fn start(count: usize, command_words: usize) -> Result<Self> {
        let program = std::env::current_exe().context("cannot find this program's own file")?;
        let meeting = meeting_file()?;
        let mut processes = Self { meeting: Some(meeting), children: Vec::new(), told: false };
        for rank in 1..count {
            let mut command = Command::new(&program);
            // Right after the command's name: behind the rest they could be taken for a file.
            let mut arguments = std::env::args_os().skip(1);
            command.args(arguments.by_ref().take(command_words));
            command.arg("--init").arg(processes.method()).arg("--own-group");
            command.args(["--world-size", &count.to_string(), "--rank", &rank.to_string()]);
            command.args(arguments.filter(|argument| argument != "--processes"));
            command.stdin(Stdio::null()).stdout(Stdio::null());
            let child = command.spawn().with_context(|| format!("cannot start rank {rank}"))?;
            processes.children.push(child);
        }
        Ok(processes)
    }

    fn method(&self) -> String {
        let path = self.meeting.as_deref().unwrap_or_else(|| "".as_ref());
        format!("file://{}", path.display())
    }

    /// Fails if a rank has ended.
    fn check(&mut self) -> Result<()> {
        for (index, child) in self.children.iter_mut().enumerate() {
            if let Some(status) = child.try_wait().context("cannot watch a rank")? {
                let end = Ended { rank: index + 1, process: child.id(), status };
                self.told = true;
                bail!("{end} before it joined the others");
            }
        }
        Ok(())
    }

    /// Says which ranks a signal has ended. False if none.
    fn tell_killed(&mut self) -> bool {
        let mut told = false;
        for (index, child) in self.children.iter_mut().enumerate() {
            if let Ok(Some(status)) = child.try_wait()
                && status.signal().is_some()
            {
                print::note(Ended { rank: index + 1, process: child.id(), status });
                told = true;
            }
        }
        told
    }

    /// Process ids of ranks 1 and up.
    pub(crate) fn ids(&self) -> Vec<u32> {
        self.children.iter().map(Child::id).collect()
    }

    /// Waits until all have ended.
    pub(crate) fn finish(mut self) -> Result<()> {
        let deadline = Instant::now() + END_MAX;
        for (index, child) in self.children.iter_mut().enumerate() {
            let status = loop {
                match child.try_wait().context("cannot wait for a rank")? {
                    Some(status) => break status,
                    None if Instant::now() > deadline => {
                        bail!("rank {} did not end; it was killed", index + 1)
                    }
                    None => thread::sleep(POLL),
                }
            };
            let end = Ended { rank: index + 1, process: child.id(), status };
            self.told = !status.success();
            ensure!(status.success(), "{end}");
        }
        self.children.clear();
        Ok(())
    }
}

impl Drop for RankProcesses {
    /// No rank outlives rank 0, whatever happened.
    fn drop(&mut self) {
        // The system tells of an end a moment after the others can notice it.
        let deadline = Instant::now() + NEWS_MAX;
        let wanted = !self.told && !self.children.is_empty();
        while wanted && !self.tell_killed() && Instant::now() < deadline {
            thread::sleep(POLL);
        }
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        if let Some(path) = &self.meeting {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// The end of a rank's process, as the beginning of a sentence.
struct Ended {
    rank: usize,
    process: u32,
    status: ExitStatus,
}

impl std::fmt::Display for Ended {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { rank, process, status } = self;
        write!(formatter, "rank {rank} (process {process}) ")?;
        match (status.signal(), status.code()) {
            (Some(signal), _) => {
                let name = signal_hook::low_level::signal_name(signal).unwrap_or("unknown");
                write!(formatter, "was killed by signal {signal} ({name})")
            }
            (None, Some(code)) => write!(formatter, "ended with exit status {code}"),
            (None, None) => write!(formatter, "ended: {status}"),
        }
    }
}

/// Lets the system end this rank when the process that started it ends, in whatever way.
fn end_with_parent() -> Result<()> {
    use rustix::process::{Signal, getppid, set_parent_process_death_signal};
    set_parent_process_death_signal(Some(Signal::KILL)).context("cannot watch rank 0")?;
    // It may have ended before it was watched; orphans belong to process 1.
    ensure!(getppid().is_some_and(|parent| !parent.is_init()), "rank 0 has ended");
    Ok(())
}

/// A path that no other run uses.
fn meeting_file() -> Result<PathBuf> {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let nanoseconds = since.context("the clock stands before 1970; set it")?.as_nanos();
    let name = format!("paceline-{}-{nanoseconds}", std::process::id());
    Ok(std::env::temp_dir().join(name))
}

#[cfg(test)]
mod tests {
    use paceline_comm::{Collective, LossCause};

    use super::*;

    #[test]
    fn the_lowest_rank_that_is_left_reports_a_loss() {
        let lost = |lost: usize| {
            let (cause, collective) = (LossCause::Died, Collective::AllReduce);
            RuntimeError::Comm(CommError::RankLost { rank: Rank(lost), cause, collective })
        };
        assert!(is_told_by_another(Rank(1), &lost(2)), "rank 0 does");
        assert!(!is_told_by_another(Rank(1), &lost(0)), "nobody else does");
        assert!(is_told_by_another(Rank(2), &lost(0)), "rank 1 does");
        let missing = vec![Rank(0), Rank(1)];
        let waited = Duration::from_secs(1);
        let collective = Collective::AllReduce;
        let late = RuntimeError::Comm(CommError::Timeout { collective, waited, missing });
        assert!(!is_told_by_another(Rank(2), &late) && is_told_by_another(Rank(3), &late));
    }

    #[test]
    fn errors_name_this_programs_options() {
        let error = InitMethod::parse("nonsense").map_err(with_option_names).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("(from --init)") && !text.contains('`'), "{text}");
        let missing = CommError::SettingMissing {
            setting: "world size",
            option: "world_size",
            variables: "WORLD_SIZE",
        };
        let text = with_option_names(missing).to_string();
        assert!(text.contains("give --world-size or set WORLD_SIZE"), "{text}");
    }
}
