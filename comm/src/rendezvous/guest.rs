//! The other ranks' side of a meeting.

use std::{
    net::ToSocketAddrs,
    thread,
    time::{Duration, Instant},
};

use super::{
    Clock, file,
    host::SEND_TIME,
    link::{Conversation, Heard, Link, PAUSE},
    wire::{Hello, Message, ranks_of},
};
use crate::{CommError, Result, settings::Meeting};

/// Limit of one attempt to connect over TCP.
const CONNECT_TIME: Duration = Duration::from_secs(3);
/// Longest time between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_millis(50);
/// How much longer than its own deadline a guest waits for rank 0's verdict, which started its
/// clock a little later.
const VERDICT_TIME: Duration = Duration::from_millis(500);

/// Where to fetch the shared memory, and the proof that one may.
pub(super) struct Welcome {
    pub(super) socket: Vec<u8>,
    pub(super) token: Vec<u8>,
}

/// How an attempt to reach rank 0 ended.
pub(super) enum Attempt {
    /// It may succeed later.
    Later(String),
    /// It never will.
    Never(CommError),
}

/// Comes to the meeting and waits for rank 0's verdict.
pub(super) fn visit(meeting: &Meeting, hello: &Hello, clock: Clock) -> Result<Welcome> {
    let address = meeting.to_string();
    let mut pause = PAUSE;
    loop {
        let attempt = connect(meeting, hello, clock)
            .and_then(|link| talk(Conversation::over(link), hello, &address, clock));
        let reason = match attempt {
            Ok(welcome) => return Ok(welcome),
            Err(Attempt::Never(error)) => return Err(error),
            Err(Attempt::Later(reason)) => reason,
        };
        if clock.remaining().is_zero() {
            return Err(CommError::Unreachable { address, waited: clock.waited(), reason });
        }
        thread::sleep(pause.min(clock.remaining()));
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

fn connect(meeting: &Meeting, hello: &Hello, clock: Clock) -> Result<Link, Attempt> {
    let later = |error: std::io::Error| Attempt::Later(error.to_string());
    match meeting {
        Meeting::Tcp { host, port } => {
            let addresses = (host.as_str(), *port).to_socket_addrs().map_err(later)?;
            let mut last = Attempt::Later(format!("{host} has no address"));
            for address in addresses {
                match Link::tcp(&address, CONNECT_TIME.min(clock.remaining())) {
                    Ok(link) => return Ok(link),
                    Err(error) => last = later(error),
                }
            }
            Err(last)
        }
        Meeting::Local { name } => Link::local(name.as_bytes()).map_err(later),
        Meeting::File(path) => file::follow(path, hello),
    }
}

fn talk(
    mut conversation: Conversation,
    hello: &Hello,
    address: &str,
    clock: Clock,
) -> Result<Welcome, Attempt> {
    let hello = Message::Hello(hello.clone());
    if conversation.link.send(&hello, SEND_TIME.min(clock.remaining())).is_err() {
        return Err(Attempt::Later("the connection broke at once".to_owned()));
    }
    let unreachable = |reason: &str| {
        let (address, reason) = (address.to_owned(), reason.to_owned());
        Attempt::Never(CommError::Unreachable { address, waited: clock.waited(), reason })
    };
    let mut missing_mask = None;
    loop {
        let grace = if missing_mask.is_some() { VERDICT_TIME } else { Duration::ZERO };
        match conversation.hear(Some(clock.deadline() + grace)) {
            Heard::Message(Message::Noted { missing_mask: mask }) => missing_mask = Some(mask),
            Heard::Message(Message::Welcome { socket, token }) => {
                return Ok(Welcome { socket, token });
            }
            Heard::Message(Message::Refused(error)) => return Err(Attempt::Never(error)),
            Heard::Message(_) => {
                return Err(foreign(address, "it answered with a question".to_owned()));
            }
            Heard::Foreign(reason) => return Err(foreign(address, reason)),
            Heard::Closed if missing_mask.is_some() => {
                return Err(unreachable("rank 0 ended before all ranks had come; see its log"));
            }
            Heard::Closed => {
                return Err(Attempt::Later("it closed the connection without a word".to_owned()));
            }
            Heard::Nothing => {
                let Some(mask) = missing_mask else {
                    return Err(unreachable(
                        "something accepts connections there, but does not answer as rank 0",
                    ));
                };
                let (missing, address) = (ranks_of(mask), address.to_owned());
                let waited = Instant::now() - clock.start;
                return Err(Attempt::Never(CommError::NotMet { missing, address, waited }));
            }
        }
    }
}

fn foreign(address: &str, reason: String) -> Attempt {
    Attempt::Never(CommError::Foreign {
        address: address.to_owned(),
        reason,
        next_step: "choose an address that no other program uses, and the same version of \
                    paceline on all ranks",
    })
}
