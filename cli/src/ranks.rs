//! Ranks as processes: joining a group that something started, or starting one.

use std::{
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use paceline_comm::{Communicator, GroupOptions, InitMethod, InitOptions, init_distributed};
use paceline_runtime::Ranks;

use crate::{
    args::{DistributedArguments, ModelArguments},
    interrupt,
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
            ensure!(tp == world_size, "--tp {tp} and --world-size {world_size} contradict");
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
            processes.check()?;
            thread::sleep(POLL);
        }
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
    let method = InitMethod::parse(method)?;
    let options =
        InitOptions { world_size, rank, group, ignore_environment, ..InitOptions::new(method) };
    Ok(init_distributed(&options)?)
}

/// Ranks 1 and up as processes that this one started.
#[derive(Default)]
pub(crate) struct RankProcesses {
    meeting: Option<PathBuf>,
    children: Vec<Child>,
}

const POLL: Duration = Duration::from_millis(1);

/// Ranks end within moments of rank 0; after this they are killed.
const END_MAX: Duration = Duration::from_secs(5);

impl RankProcesses {
    /// Starts this program again for each other rank, with the same arguments.
    fn start(count: usize, command_words: usize) -> Result<Self> {
        let program = std::env::current_exe().context("cannot find this program's own file")?;
        let meeting = meeting_file()?;
        let mut processes = Self { meeting: Some(meeting), children: Vec::new() };
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
                bail!("rank {} ended with {status} before it joined the others", index + 1);
            }
        }
        Ok(())
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
            ensure!(status.success(), "rank {} ended with {status}", index + 1);
        }
        self.children.clear();
        Ok(())
    }
}

impl Drop for RankProcesses {
    /// No rank outlives rank 0, whatever happened.
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        if let Some(path) = &self.meeting {
            let _ = std::fs::remove_file(path);
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
