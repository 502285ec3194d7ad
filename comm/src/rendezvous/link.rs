//! Streams and listeners of a meeting: TCP or Unix, and reading messages from them with a limit.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr as LocalAddr, UnixListener, UnixStream},
    },
    time::{Duration, Instant},
};

use super::wire::{Message, Parsed};

/// How often rank 0 and those who look for it look again. A meeting happens once.
pub(super) const PAUSE: Duration = Duration::from_millis(2);
/// How long a visitor may take to say who it is.
const INTRODUCTION_TIME: Duration = Duration::from_secs(5);
/// Visitors that have not yet said who they are; more have to wait.
const STRANGERS_MAX: usize = 128;
/// Shortest limit that a socket takes.
const SHORTEST: Duration = Duration::from_millis(1);

/// A place where rank 0 listens.
pub(super) enum Listener {
    Tcp(TcpListener),
    Local(UnixListener),
}

impl Listener {
    /// Listens on the first of `addresses` that is possible.
    pub(super) fn tcp(addresses: &[SocketAddr]) -> io::Result<Self> {
        let listener = TcpListener::bind(addresses)?;
        listener.set_nonblocking(true)?;
        Ok(Self::Tcp(listener))
    }

    /// Listens on a Unix socket in the abstract namespace, which leaves no file behind.
    pub(super) fn local(name: &[u8]) -> io::Result<Self> {
        let listener = UnixListener::bind_addr(&LocalAddr::from_abstract_name(name)?)?;
        listener.set_nonblocking(true)?;
        Ok(Self::Local(listener))
    }

    /// The next visitor, if one is waiting.
    pub(super) fn accept(&self) -> io::Result<Option<Link>> {
        let accepted = match self {
            Self::Tcp(listener) => listener.accept().map(|(stream, _)| Link::Tcp(stream)),
            Self::Local(listener) => listener.accept().map(|(stream, _)| Link::Local(stream)),
        };
        match accepted {
            Ok(link) => Ok(Some(link)),
            Err(error) if is_transient(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Nothing is there yet, or a visitor went away before it was let in.
fn is_transient(error: &io::Error) -> bool {
    use ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted, WouldBlock};
    matches!(error.kind(), WouldBlock | Interrupted | ConnectionAborted | ConnectionReset)
}

/// A stream to one other process.
pub(super) enum Link {
    Tcp(TcpStream),
    Local(UnixStream),
}

impl Link {
    pub(super) fn tcp(address: &SocketAddr, limit: Duration) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(address, limit.max(SHORTEST))?;
        // If nobody listens on a port of the range that outgoing connections are numbered from,
        // a stream can be given that very port, and be connected to itself.
        if stream.local_addr()? == stream.peer_addr()? {
            return Err(ErrorKind::ConnectionRefused.into());
        }
        stream.set_nodelay(true)?;
        Ok(Self::Tcp(stream))
    }

    pub(super) fn local(name: &[u8]) -> io::Result<Self> {
        UnixStream::connect_addr(&LocalAddr::from_abstract_name(name)?).map(Self::Local)
    }

    pub(super) fn set_nonblocking(&self, is_nonblocking: bool) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.set_nonblocking(is_nonblocking),
            Self::Local(stream) => stream.set_nonblocking(is_nonblocking),
        }
    }

    /// Sends `message`; gives up after `limit`, so that a visitor that never reads is harmless.
    pub(super) fn send(&mut self, message: &Message, limit: Duration) -> io::Result<()> {
        self.set_nonblocking(false)?;
        let limit = Some(limit.max(SHORTEST));
        match self {
            Self::Tcp(stream) => stream.set_write_timeout(limit)?,
            Self::Local(stream) => stream.set_write_timeout(limit)?,
        }
        match self {
            Self::Tcp(stream) => stream.write_all(&message.frame()),
            Self::Local(stream) => stream.write_all(&message.frame()),
        }
    }

    fn read(&mut self, bytes: &mut [u8], limit: Duration) -> io::Result<usize> {
        let limit = Some(limit.max(SHORTEST));
        match self {
            Self::Tcp(stream) => {
                stream.set_read_timeout(limit)?;
                stream.read(bytes)
            }
            Self::Local(stream) => {
                stream.set_read_timeout(limit)?;
                stream.read(bytes)
            }
        }
    }
}

/// A stream with what was received on it and not yet understood.
pub(super) struct Conversation {
    pub(super) link: Link,
    received: Vec<u8>,
}

/// Those who have connected and not yet said anything: a bounded number, for a bounded time.
pub(super) struct Lobby<'a> {
    listener: &'a Listener,
    strangers: Vec<(Instant, Conversation)>,
}

impl<'a> Lobby<'a> {
    pub(super) fn of(listener: &'a Listener) -> Self {
        Self { listener, strangers: Vec::new() }
    }

    /// The first messages of those who have sent one since the last call. Whoever sends
    /// something else, or nothing for too long, is dropped.
    pub(super) fn first_messages(&mut self) -> Vec<(Message, Conversation)> {
        // A failure to accept (out of file descriptors, say) may pass; the caller has a deadline.
        while self.strangers.len() < STRANGERS_MAX
            && let Ok(Some(link)) = self.listener.accept()
        {
            self.strangers.push((Instant::now(), Conversation::over(link)));
        }
        let mut heard = Vec::new();
        for (arrived, mut conversation) in std::mem::take(&mut self.strangers) {
            match conversation.hear(None) {
                Heard::Message(message) => heard.push((message, conversation)),
                Heard::Nothing if arrived.elapsed() < INTRODUCTION_TIME => {
                    self.strangers.push((arrived, conversation));
                }
                Heard::Nothing | Heard::Foreign(_) | Heard::Closed => {}
            }
        }
        heard
    }
}

/// What a conversation brought.
#[derive(Debug)]
pub(super) enum Heard {
    /// Nothing within the limit.
    Nothing,
    Message(Message),
    /// Something that is no message.
    Foreign(String),
    /// The other side closed the stream, or it broke.
    Closed,
}

impl Conversation {
    pub(super) fn over(link: Link) -> Self {
        Self { link, received: Vec::new() }
    }

    /// The next message, waited for until `deadline`; `None` only takes what is there already.
    pub(super) fn hear(&mut self, deadline: Option<Instant>) -> Heard {
        if self.link.set_nonblocking(deadline.is_none()).is_err() {
            return Heard::Closed;
        }
        loop {
            if !self.received.is_empty() {
                match Message::parse(&self.received) {
                    Parsed::Foreign(reason) => return Heard::Foreign(reason),
                    Parsed::Message(message, bytes) => {
                        self.received.drain(..bytes);
                        return Heard::Message(*message);
                    }
                    Parsed::Incomplete => {}
                }
            }
            let remaining = match deadline.map(|end| end.saturating_duration_since(Instant::now()))
            {
                Some(Duration::ZERO) => return Heard::Nothing,
                remaining => remaining.unwrap_or(SHORTEST),
            };
            let mut bytes = [0; 512];
            match self.link.read(&mut bytes, remaining) {
                Ok(0) => return Heard::Closed,
                Ok(count) => self.received.extend(&bytes[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) =>
                {
                    if deadline.is_none() {
                        return Heard::Nothing;
                    }
                }
                Err(_) => return Heard::Closed,
            }
        }
    }
}
