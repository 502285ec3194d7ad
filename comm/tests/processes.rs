//! Ranks that are processes: this test binary starts itself again, once a rank.

mod common;

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use common::{Lcg, stream};
use paceline_comm::{
    CommError, Communicator, InitMethod, InitOptions, LossCause, Rank, ReduceOp, init_distributed,
};
use paceline_kernels::{DType, Tensor};

/// A deadline that no test should meet: what is noticed must be noticed long before.
const LONG: Duration = Duration::from_secs(120);
/// "Long before".
const SOON: Duration = Duration::from_secs(20);

/// Marks the lines of a rank's output that are for the test.
const MARK: &str = "rank says: ";

fn say(line: &str) {
    println!("\n{MARK}{line}");
}

/// A process that is one rank.
struct Process {
    child: Child,
    lines: Box<dyn Iterator<Item = String>>,
}

impl Process {
    fn start(role: &str, rank: usize, world: usize, method: &str, timeout: Duration) -> Self {
        Self::start_with(role, rank, world, method, timeout, &[])
    }

    /// As [`Process::start`], with more variables.
    fn start_with(
        role: &str,
        rank: usize,
        world: usize,
        method: &str,
        timeout: Duration,
        variables: &[(&str, &str)],
    ) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "one_rank", "--ignored", "--nocapture", "--test-threads=1"])
            .env("PACELINE_TEST_ROLE", role)
            .env("PACELINE_TEST_METHOD", method)
            .env("PACELINE_TEST_TIMEOUT_MS", timeout.as_millis().to_string())
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", world.to_string())
            .envs(variables.iter().copied())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let lines = output
            .lines()
            .map_while(Result::ok)
            .filter_map(|line| line.strip_prefix(MARK).map(str::to_owned));
        Self { child, lines: Box::new(lines) }
    }

    /// The next line that the rank says.
    fn hear(&mut self) -> String {
        self.lines.next().expect("the rank ended without a word")
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A test that failed must not leave ranks behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn start_all(role: &str, world: usize, method: &str, timeout: Duration) -> Vec<Process> {
    (0..world).map(|rank| Process::start(role, rank, world, method, timeout)).collect()
}

fn file_method(directory: &Path) -> String {
    format!("file://{}", directory.join("meeting").display())
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// One rank, in a process of its own.
#[test]
#[ignore = "a rank that the other tests start"]
fn one_rank() {
    let variable = |name: &str| std::env::var(name).expect("the other tests start this");
    let mut options = InitOptions::new(variable("PACELINE_TEST_METHOD").parse().unwrap());
    options.group.timeout =
        Duration::from_millis(variable("PACELINE_TEST_TIMEOUT_MS").parse().unwrap());
    options.group.slot_bytes = 4096;
    let mut comm = match init_distributed(&options) {
        Ok(comm) => comm,
        Err(error) => return say(&format!("{error:?}")),
    };
    let result = match variable("PACELINE_TEST_ROLE").as_str() {
        "mixed" => mixed_rounds(&mut comm, 2000),
        "sum for ever" => sum_for_ever(&mut comm),
        "serve" => serve(&mut comm),
        "leave" => Ok(comm.world_size().to_string()),
        role => panic!("no role {role}"),
    };
    say(&match result {
        Ok(text) => text,
        Err(error) => format!("{error:?}"),
    });
}

/// Collectives of all kinds and sizes; what they carry is the index of the call.
fn mixed_rounds(comm: &mut Communicator, rounds: usize) -> Result<String, CommError> {
    let (rank, world) = (comm.rank().index(), comm.world_size());
    let mut random = Lcg::seeded(5);
    let mut skew = Lcg::seeded(rank as u64);
    for round in 0..rounds {
        // Ranks come at different times: some are always late for a short while.
        for _ in 0..skew.below(2000) {
            std::hint::spin_loop();
        }
        let length = [1, 3, 64, 500, 1024, 1100, 5000][random.below(7)];
        let base = (round % 997) as f32;
        match random.below(5) {
            0 | 1 => {
                let mut x = Tensor::from_slice(&[1, length], &vec![base + rank as f32; length]);
                comm.all_reduce(&mut x, ReduceOp::Sum, &stream())?;
                let expected = world as f32 * base + (world * (world - 1) / 2) as f32;
                assert!(x.as_slice::<f32>().iter().all(|&v| v == expected), "round {round}");
            }
            2 => {
                let x = Tensor::from_slice(&[1, length], &vec![(round + rank) as i32; length]);
                let mut out = Tensor::zeros(DType::I32, &[world, length]);
                comm.all_gather(&x, &mut out, &stream())?;
                for (index, &value) in out.as_slice::<i32>().iter().enumerate() {
                    assert_eq!(value as usize, round + index / length);
                }
            }
            3 => {
                let root = random.below(world);
                let mut message = if rank == root { vec![round as u8; length] } else { vec![] };
                comm.broadcast_bytes(&mut message, Rank(root))?;
                assert!(message == vec![round as u8; length], "round {round}");
            }
            _ => comm.barrier(&stream())?,
        }
    }
    Ok("all rounds are right".to_owned())
}

fn sum_for_ever(comm: &mut Communicator) -> Result<String, CommError> {
    let mut x = Tensor::zeros(DType::F32, &[1, 2000]);
    for round in 0.. {
        comm.all_reduce(&mut x, ReduceOp::Sum, &stream())?;
        if round == 50 {
            say("going");
        }
    }
    Ok("never".to_owned())
}

/// Rank 0 sends one plan and then stops sending; the others idle.
fn serve(comm: &mut Communicator) -> Result<String, CommError> {
    let mut plan = Vec::new();
    if comm.rank() == Rank(0) {
        plan = b"plan".to_vec();
        comm.broadcast_bytes(&mut plan, Rank(0))?;
        comm.barrier(&stream())?;
        say("going");
        loop {
            std::thread::park();
        }
    }
    loop {
        comm.broadcast_bytes(&mut plan, Rank(0))?;
        comm.barrier(&stream())?;
        say("going");
    }
}

fn all_say(processes: &mut [Process], expected: &str) {
    for process in processes {
        assert_eq!(process.hear(), expected);
    }
}

#[test]
fn processes_that_met_over_a_file_compute_the_same_as_threads() {
    for world in [2, 3, 8] {
        let directory = tempfile::tempdir().unwrap();
        let method = file_method(directory.path());
        all_say(&mut start_all("mixed", world, &method, LONG), "all rounds are right");
        let left: Vec<_> = std::fs::read_dir(directory.path()).unwrap().collect();
        assert!(left.is_empty(), "left behind: {left:?}");
    }
}

#[test]
fn processes_meet_over_tcp() {
    let method = format!("tcp://127.0.0.1:{}", free_port());
    all_say(&mut start_all("leave", 4, &method, LONG), "4");
}

#[test]
fn processes_meet_as_torchrun_starts_them() {
    let torchrun = |port: u16, more: &[(&str, &str)]| {
        let port = port.to_string();
        let mut variables = vec![
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", port.as_str()),
            ("LOCAL_WORLD_SIZE", "2"),
        ];
        variables.extend(more);
        let mut both =
            [0, 1].map(|rank| Process::start_with("leave", rank, 2, "env://", LONG, &variables));
        all_say(&mut both, "2");
    };
    torchrun(free_port(), &[]);
    // Newer versions listen on the port themselves.
    let agent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = agent.local_addr().unwrap().port();
    let run = format!("{}", std::process::id());
    torchrun(
        port,
        &[("TORCHELASTIC_USE_AGENT_STORE", "True"), ("TORCHELASTIC_RUN_ID", run.as_str())],
    );
}

#[test]
fn threads_do_mixed_rounds_under_skew() {
    common::threads(4, |comm| {
        assert_eq!(mixed_rounds(comm, 10_000).unwrap(), "all rounds are right");
    });
}

#[test]
fn a_killed_process_is_named_long_before_the_deadline() {
    for (world, victim) in [(2, 0), (4, 2)] {
        let directory = tempfile::tempdir().unwrap();
        let mut processes = start_all("sum for ever", world, &file_method(directory.path()), LONG);
        all_say(&mut processes, "going");
        let start = Instant::now();
        processes.remove(victim).signal(rustix::process::Signal::KILL);
        for process in &mut processes {
            let error = process.hear();
            let expected = format!("RankLost {{ rank: Rank({victim}), cause: Died");
            assert!(error.starts_with(&expected), "{error}");
        }
        assert!(start.elapsed() < SOON, "took {:?}", start.elapsed());
    }
}

#[test]
fn idle_ranks_notice_that_rank_0_died() {
    let directory = tempfile::tempdir().unwrap();
    // The deadline is over long before rank 0 dies: idling must not end with it.
    let timeout = Duration::from_millis(1500);
    let mut processes = start_all("serve", 3, &file_method(directory.path()), timeout);
    all_say(&mut processes, "going");
    std::thread::sleep(2 * timeout);
    processes.remove(0).signal(rustix::process::Signal::KILL);
    let start = Instant::now();
    for process in &mut processes {
        let error = process.hear();
        assert!(error.starts_with("RankLost { rank: Rank(0), cause: Died"), "{error}");
    }
    assert!(start.elapsed() < SOON, "took {:?}", start.elapsed());
}

#[test]
fn a_stopped_process_is_named_at_the_deadline() {
    let directory = tempfile::tempdir().unwrap();
    let timeout = Duration::from_secs(3);
    let mut processes = start_all("sum for ever", 3, &file_method(directory.path()), timeout);
    all_say(&mut processes, "going");
    let start = Instant::now();
    let mut stopped = processes.remove(1);
    stopped.signal(rustix::process::Signal::STOP);
    for process in &mut processes {
        let error = process.hear();
        assert!(error.starts_with("Timeout {"), "{error}");
        assert!(error.ends_with("missing: [Rank(1)] }"), "{error}");
    }
    assert!((timeout..timeout + SOON).contains(&start.elapsed()), "{:?}", start.elapsed());
    // When it goes on, it learns the same.
    stopped.signal(rustix::process::Signal::CONT);
    let error = stopped.hear();
    assert!(error.contains("missing: [Rank(1)]"), "{error}");
}

#[test]
fn a_file_of_a_dead_run_does_no_harm() {
    let directory = tempfile::tempdir().unwrap();
    let method = file_method(directory.path());
    // Rank 0 of a run that never completes is killed at the meeting, and leaves its file.
    let alone = Process::start("leave", 0, 2, &method, LONG);
    let path = directory.path().join("meeting");
    while !path.exists() {
        std::thread::yield_now();
    }
    alone.signal(rustix::process::Signal::KILL);
    drop(alone);
    assert!(path.exists());
    // The next run's rank 1 may come before its rank 0, and find the dead run's file.
    let mut late = Process::start("leave", 1, 2, &method, LONG);
    let mut first = Process::start("leave", 0, 2, &method, LONG);
    assert_eq!((late.hear(), first.hear()), ("2".to_owned(), "2".to_owned()));
    assert!(!path.exists());
}

#[test]
fn a_rank_killed_at_the_meeting_may_be_started_again() {
    let directory = tempfile::tempdir().unwrap();
    let method = file_method(directory.path());
    let mut first = Process::start("leave", 0, 3, &method, LONG);
    while !directory.path().join("meeting").exists() {
        std::thread::yield_now();
    }
    // Wherever the signal finds it, before, during or after its introduction.
    Process::start("leave", 1, 3, &method, LONG).signal(rustix::process::Signal::KILL);
    let mut others = [1, 2].map(|rank| Process::start("leave", rank, 3, &method, LONG));
    assert_eq!(first.hear(), "3");
    all_say(&mut others, "3");
}

#[test]
fn a_missing_rank_is_named_to_those_who_came() {
    let directory = tempfile::tempdir().unwrap();
    let method = file_method(directory.path());
    let timeout = Duration::from_secs(2);
    let mut came: Vec<_> =
        [0, 2].map(|rank| Process::start("leave", rank, 4, &method, timeout)).into();
    for process in &mut came {
        let error = process.hear();
        assert!(error.starts_with("NotMet { missing: [Rank(1), Rank(3)]"), "{error}");
    }
}

#[test]
fn two_groups_at_once_do_not_mix() {
    let directory = tempfile::tempdir().unwrap();
    let method = |name| format!("file://{}", directory.path().join(name).display());
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let method = &method;
            scope.spawn(move || {
                let join = |name| {
                    let options = InitOptions {
                        rank: Some(rank),
                        world_size: Some(2),
                        ..InitOptions::new(InitMethod::parse(&method(name)).unwrap())
                    };
                    init_distributed(&options).unwrap()
                };
                let (mut a, mut b) = (join("a"), join("b"));
                for round in 0..200 {
                    let mut x = Tensor::from_slice(&[1], &[round as f32]);
                    let mut y = Tensor::from_slice(&[1], &[-(round as f32)]);
                    // The ranks use the groups in different orders.
                    let mut first = || a.all_reduce(&mut x, ReduceOp::Sum, &stream()).unwrap();
                    let mut second = || b.all_reduce(&mut y, ReduceOp::Sum, &stream()).unwrap();
                    if round % 2 == 0 {
                        first();
                        second();
                    } else {
                        second();
                        first();
                    }
                    assert_eq!(x.as_slice::<f32>(), [2.0 * round as f32]);
                    assert_eq!(y.as_slice::<f32>(), [-2.0 * round as f32]);
                }
            });
        }
    });
}

#[test]
fn a_rank_that_leaves_is_named_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let method = file_method(directory.path());
    let mut leaver = Process::start("leave", 1, 2, &method, LONG);
    let mut other = Process::start("sum for ever", 0, 2, &method, LONG);
    assert_eq!(leaver.hear(), "2");
    let error = other.hear();
    let expected = format!("RankLost {{ rank: Rank(1), cause: {:?}", LossCause::Left);
    assert!(error.starts_with(&expected), "{error}");
}
