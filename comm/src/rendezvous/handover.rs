//! Handing the shared memory and the lifelines over, as file descriptors through a Unix socket.
//!
//! Rank 0 makes everything. Rank `r` gets the memory file, the end of its own lifeline to hold,
//! and the ends of all others to watch, in this order. Rank 0 keeps no copy of what the others
//! hold, or it would keep dead ranks alive.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    thread,
    time::Duration,
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use super::{
    Clock, Share,
    guest::Welcome,
    host::Guest,
    link::{Link, Listener, Lobby, PAUSE},
    random_name,
    wire::{Message, Parsed, ranks_of},
};
use crate::{
    CommError, Rank, Result,
    liveness::{Lifeline, Lifelines},
    region::{Layout, Region},
};

const WHAT: &str = "handing over the shared memory";

/// Rank 0 makes the shared memory and gives every guest its part.
pub(super) fn give(
    mut guests: Vec<Guest>,
    layout: Layout,
    address: &str,
    clock: Clock,
) -> Result<Share> {
    let (region, file) = Region::memory_file(layout)?;
    let lines: Vec<_> = (0..layout.world_size).map(|_| Lifeline::open()).collect::<Result<_>>()?;
    let (held, watched): (Vec<_>, Vec<_>) =
        lines.into_iter().map(|line| (Some(line.held), line.watched)).unzip();
    let mut parts = Parts { file, held, watched };
    let (socket, token) = (format!("paceline-{}", random_name()?), random_name()?);
    let listener = Listener::local(socket.as_bytes()).map_err(CommError::system(WHAT))?;
    let welcome =
        Message::Welcome { socket: socket.into_bytes(), token: token.clone().into_bytes() };
    guests.iter_mut().for_each(|guest| guest.tell(&welcome));

    let mut lobby = Lobby::of(&listener);
    let mut waiting: u64 = guests.iter().fold(0, |mask, guest| mask | 1 << guest.rank.index());
    while waiting != 0 {
        if clock.remaining().is_zero() {
            let (missing, address) = (ranks_of(waiting), address.to_owned());
            return Err(CommError::NotMet { missing, address, waited: clock.waited() });
        }
        for (message, conversation) in lobby.first_messages() {
            let Message::Claim { rank, token: proof } = message else { continue };
            let Link::Local(stream) = &conversation.link else { continue };
            let is_due = rank < 64 && waiting >> rank & 1 != 0 && proof == token.as_bytes();
            if is_due && is_same_user(stream) && parts.send(stream, rank as usize) {
                waiting &= !(1 << rank);
            }
        }
        if waiting != 0 {
            thread::sleep(PAUSE);
        }
    }
    let lifelines = parts.keep()?;
    Ok(Share { region, lifelines })
}

/// A part is a few bytes for an empty socket; a rank that does not take it is not waited for.
const SEND_MAX: Duration = Duration::from_secs(1);

/// Everything that rank 0 gives away.
struct Parts {
    file: OwnedFd,
    held: Vec<Option<OwnedFd>>,
    watched: Vec<OwnedFd>,
}

impl Parts {
    /// Sends `rank` its part; it then belongs to that rank alone.
    fn send(&mut self, stream: &UnixStream, rank: usize) -> bool {
        let Some(held) = self.held[rank].take() else { return false };
        let mut parts = vec![self.file.as_fd(), held.as_fd()];
        let others = self.watched.iter().enumerate().filter(|&(other, _)| other != rank);
        parts.extend(others.map(|(_, pipe)| pipe.as_fd()));
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(parts.len()))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let frame = Message::Grant.frame();
        control.push(SendAncillaryMessage::ScmRights(&parts))
            && stream.set_nonblocking(false).is_ok()
            && stream.set_write_timeout(Some(SEND_MAX)).is_ok()
            && rustix::net::sendmsg(
                stream,
                &[IoSlice::new(&frame)],
                &mut control,
                SendFlags::NOSIGNAL,
            )
            .is_ok_and(|count| count == frame.len())
    }

    /// Rank 0's own part.
    fn keep(mut self) -> Result<Lifelines> {
        let lost = || CommError::System { what: WHAT, reason: "rank 0 lost its own part".into() };
        let held = self.held[0].take().ok_or_else(lost)?;
        let watched = self.watched.into_iter().enumerate();
        Ok(Lifelines::over(held, watched.map(|(rank, pipe)| (rank != 0).then_some(pipe)).collect()))
    }
}

/// Only processes of the same user may share the memory.
fn is_same_user(stream: &UnixStream) -> bool {
    rustix::net::sockopt::socket_peercred(stream)
        .is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}

/// Fetches this rank's part from rank 0.
pub(super) fn fetch(rank: Rank, welcome: &Welcome, layout: Layout, clock: Clock) -> Result<Share> {
    let failed = |reason: &str| CommError::System { what: WHAT, reason: reason.to_owned() };
    let mut link = Link::local(&welcome.socket).map_err(|error| {
        failed(&format!(
            "rank 0's Unix socket cannot be reached ({error}): run all ranks in one network \
             namespace (container)"
        ))
    })?;
    let claim = Message::Claim { rank: rank.index() as u64, token: welcome.token.clone() };
    link.send(&claim, clock.remaining()).map_err(CommError::system(WHAT))?;
    let Link::Local(stream) = link else { return Err(failed("the socket is no Unix socket")) };
    stream.set_read_timeout(Some(clock.remaining().max(PAUSE))).map_err(CommError::system(WHAT))?;
    let mut parts = receive(&stream, layout.world_size + 1)?.into_iter();
    let (Some(file), Some(held)) = (parts.next(), parts.next()) else {
        return Err(failed("rank 0 sent too few file descriptors"));
    };
    let region = Region::open(&file, layout)?;
    let own = rank.index();
    let watched: Vec<_> = (0..layout.world_size)
        .map(|other| if other == own { None } else { parts.next() })
        .collect();
    if watched.iter().flatten().count() + 1 != layout.world_size {
        return Err(failed("rank 0 sent too few file descriptors"));
    }
    Ok(Share { region, lifelines: Lifelines::over(held, watched) })
}

fn receive(stream: &UnixStream, count: usize) -> Result<Vec<OwnedFd>> {
    let failed = |reason: &str| CommError::System { what: WHAT, reason: reason.to_owned() };
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(count))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0u8; 64];
    let received = loop {
        let mut slices = [IoSliceMut::new(&mut bytes)];
        match rustix::net::recvmsg(stream, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other.map_err(|error| CommError::system(WHAT)(error.into()))?.bytes,
        }
    };
    if received == 0 {
        return Err(failed("rank 0 ended or refused; see its log"));
    }
    match Message::parse(&bytes[..received]) {
        Parsed::Message(message, _) if *message == Message::Grant => {}
        _ => return Err(failed("rank 0 sent something else")),
    }
    let mut parts = Vec::with_capacity(count);
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            parts.extend(descriptors);
        }
    }
    Ok(parts)
}
