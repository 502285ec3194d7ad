//! Meetings that fail, and visitors that do not belong there. The ranks are threads that act like
//! processes: each calls `init_distributed`.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use paceline_comm::{
    CommError, Communicator, GroupOptions, InitMethod, InitOptions, Rank, Result, init_distributed,
};

const TIMEOUT: Duration = Duration::from_secs(20);
/// For tests that must run into the deadline.
const SHORT: Duration = Duration::from_millis(500);

fn options(method: &str, rank: usize, world: usize, timeout: Duration) -> InitOptions {
    InitOptions {
        rank: Some(rank),
        world_size: Some(world),
        group: GroupOptions { timeout, ..GroupOptions::default() },
        ..InitOptions::new(InitMethod::parse(method).unwrap())
    }
}

fn join(options: &InitOptions) -> Result<usize> {
    init_distributed(options).map(|comm: Communicator| comm.world_size())
}

/// Joins with all of `options` at once, and returns what each got.
fn join_all(options: &[InitOptions]) -> Vec<Result<usize>> {
    thread::scope(|scope| {
        let ranks: Vec<_> =
            options.iter().map(|options| scope.spawn(move || join(options))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

fn file_method(directory: &Path) -> String {
    format!("file://{}", directory.join("meeting").display())
}

fn errors(results: Vec<Result<usize>>) -> Vec<CommError> {
    results.into_iter().map(Result::unwrap_err).collect()
}

#[test]
fn different_world_sizes_are_told_to_both() {
    let directory = tempfile::tempdir().unwrap();
    let method = file_method(directory.path());
    let both = [options(&method, 0, 2, TIMEOUT), options(&method, 1, 3, TIMEOUT)];
    for error in errors(join_all(&both)) {
        let text = error.to_string();
        assert!(matches!(error, CommError::SettingMismatch { rank: Rank(1), .. }), "{text}");
        assert!(text.contains("world size: rank 0 has 2, rank 1 has 3"), "{text}");
    }
}

#[test]
fn different_back_ends_are_told_to_both() {
    let method = format!("tcp://{}", free_address());
    let mut both = [options(&method, 0, 2, TIMEOUT), options(&method, 1, 2, TIMEOUT)];
    both[1].backend = Some("host".to_owned());
    for error in errors(join_all(&both)) {
        let text = error.to_string();
        assert!(text.contains("the back end: rank 0 has auto, rank 1 has host"), "{text}");
    }
}

#[test]
fn two_processes_with_the_same_rank_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let method = file_method(directory.path());
    let three = [0, 2, 2].map(|rank| options(&method, rank, 3, TIMEOUT));
    for error in errors(join_all(&three)) {
        let process = std::process::id().to_string();
        let CommError::DuplicateRank { rank, first, second } = error else { panic!("{error}") };
        assert_eq!(rank, Rank(2));
        assert!(first.ends_with(&process) && second.ends_with(&process), "{first} {second}");
    }
}

#[test]
fn two_rank_0_of_one_file_are_told_apart() {
    let directory = tempfile::tempdir().unwrap();
    let method = file_method(directory.path());
    let path = directory.path().join("meeting");
    thread::scope(|scope| {
        let first = scope.spawn(|| join(&options(&method, 0, 2, TIMEOUT)));
        while !path.exists() {
            thread::yield_now();
        }
        let error = join(&options(&method, 0, 2, TIMEOUT)).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, CommError::MeetingFile { .. }), "{text}");
        assert!(text.contains(&std::process::id().to_string()), "{text}");
        // The first one's meeting goes on.
        assert_eq!(join(&options(&method, 1, 2, TIMEOUT)), Ok(2));
        assert_eq!(first.join().unwrap(), Ok(2));
    });
}

#[test]
fn a_port_in_use_is_reported_at_once() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap();
    let start = Instant::now();
    let error = join(&options(&format!("tcp://{address}"), 0, 2, TIMEOUT)).unwrap_err();
    assert!(start.elapsed() < TIMEOUT);
    let CommError::CannotListen { address: named, reason } = error else { panic!("{error}") };
    assert_eq!(named, format!("tcp://{address}"));
    assert!(reason.contains("in use"), "{reason}");
}

#[test]
fn an_address_of_another_machine_is_reported_at_once() {
    // 192.0.2.0/24 belongs to no machine (RFC 5737).
    let error = join(&options("tcp://192.0.2.1:29500", 0, 2, TIMEOUT)).unwrap_err();
    assert!(error.to_string().contains("not an address of this machine"), "{error}");
}

#[test]
fn nobody_listening_is_reported_at_the_deadline() {
    let method = format!("tcp://{}", free_address());
    let start = Instant::now();
    let error = join(&options(&method, 1, 2, SHORT)).unwrap_err();
    let CommError::Unreachable { address, .. } = &error else { panic!("{error}") };
    assert_eq!(*address, method);
    assert!((SHORT..TIMEOUT).contains(&start.elapsed()));

    let directory = tempfile::tempdir().unwrap();
    let error = join(&options(&file_method(directory.path()), 1, 2, SHORT)).unwrap_err();
    assert!(error.to_string().contains("does not exist yet"), "{error}");
}

#[test]
fn rank_0_alone_names_the_missing() {
    let method = format!("tcp://{}", free_address());
    let error = join(&options(&method, 0, 3, SHORT)).unwrap_err();
    let CommError::NotMet { missing, .. } = error else { panic!("{error}") };
    assert_eq!(missing, [Rank(1), Rank(2)]);
}

#[test]
fn another_program_at_the_address_is_recognised() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let method = format!("tcp://{}", listener.local_addr().unwrap());
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; 16];
        stream.read_exact(&mut request).unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
    });
    let error = join(&options(&method, 1, 2, TIMEOUT)).unwrap_err();
    server.join().unwrap();
    assert!(matches!(error, CommError::Foreign { .. }), "{error}");
    assert!(error.to_string().contains("HTTP/1.1 400"), "{error}");
}

#[test]
fn a_silent_program_at_the_address_is_reported_at_the_deadline() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let method = format!("tcp://{}", listener.local_addr().unwrap());
    let error = join(&options(&method, 1, 2, SHORT)).unwrap_err();
    assert!(error.to_string().contains("does not answer as rank 0"), "{error}");
}

/// Connects as soon as somebody listens.
fn connect(address: &str) -> TcpStream {
    loop {
        match TcpStream::connect(address) {
            Ok(stream) if stream.local_addr().unwrap() != stream.peer_addr().unwrap() => {
                return stream;
            }
            _ => thread::yield_now(),
        }
    }
}

#[test]
fn strangers_neither_break_nor_delay_a_meeting() {
    let address = free_address();
    let method = format!("tcp://{address}");
    let start = Instant::now();
    thread::scope(|scope| {
        let rank_0 = scope.spawn(|| join(&options(&method, 0, 2, TIMEOUT)));
        // A browser, a port scanner, a slow client, a client that says half a word and one that
        // announces more than it may; all stay connected.
        let mut visitors = Vec::new();
        let mut huge = b"paceline\x01\x00\x01\x00".to_vec();
        huge.extend([0xFF; 1 << 16]);
        let noises: [&[u8]; 5] = [b"GET / HTTP/1.1\r\n\r\n", b"\0\xFF\x13", b"", b"pace", &huge];
        for noise in noises {
            let mut stream = connect(&address);
            // Rank 0 may have hung up before all was written.
            let _ = stream.write_all(noise);
            visitors.push(stream);
        }
        for _ in 0..50 {
            drop(connect(&address));
        }
        assert_eq!(join(&options(&method, 1, 2, TIMEOUT)), Ok(2));
        assert_eq!(rank_0.join().unwrap(), Ok(2));
    });
    assert!(start.elapsed() < TIMEOUT);
}

#[test]
fn a_file_of_something_else_is_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("meeting");
    std::fs::write(&path, "a poem").unwrap();
    for rank in [0, 1] {
        let method = file_method(directory.path());
        let error = join(&options(&method, rank, 2, TIMEOUT)).unwrap_err();
        assert!(error.to_string().contains("left alone"), "{error}");
    }
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "a poem");
}

#[test]
fn an_empty_file_is_as_good_as_none() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("meeting"), "").unwrap();
    let method = file_method(directory.path());
    let both = [0, 1].map(|rank| options(&method, rank, 2, TIMEOUT));
    assert_eq!(join_all(&both), [Ok(2), Ok(2)]);
}

#[test]
fn a_directory_that_does_not_exist_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let method = format!("file://{}/none/meeting", directory.path().display());
    let error = join(&options(&method, 0, 2, TIMEOUT)).unwrap_err();
    assert!(error.to_string().contains("none/meeting"), "{error}");
}

#[test]
fn one_rank_meets_nobody() {
    let method = format!("tcp://{}", free_address());
    assert_eq!(join(&options(&method, 0, 1, TIMEOUT)), Ok(1));
}
