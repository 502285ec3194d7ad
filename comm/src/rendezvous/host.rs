//! Rank 0's side of a meeting.

use std::{io::ErrorKind, net::ToSocketAddrs, thread, time::Duration};

use super::{
    Clock,
    file::MeetingFile,
    link::{Conversation, Heard, Listener, Lobby, PAUSE},
    random_name,
    wire::{Hello, Message, ranks_of},
};
use crate::{CommError, Rank, Result, Unavailable, settings::Meeting};

/// How long sending one short message may take.
pub(super) const SEND_TIME: Duration = Duration::from_secs(1);

/// Opens the meeting place. The file, if there is one, is removed when it is dropped.
pub(super) fn open(meeting: &Meeting, hello: &Hello) -> Result<(Listener, Option<MeetingFile>)> {
    let failed = |error: std::io::Error| CommError::CannotListen {
        address: meeting.to_string(),
        reason: match error.kind() {
            ErrorKind::AddrInUse => "the address is in use, perhaps by another run".to_owned(),
            ErrorKind::AddrNotAvailable => "it is not an address of this machine".to_owned(),
            _ => error.to_string(),
        },
    };
    match meeting {
        Meeting::Tcp { host, port } => {
            let addresses: Vec<_> =
                (host.as_str(), *port).to_socket_addrs().map_err(failed)?.collect();
            Ok((Listener::tcp(&addresses).map_err(failed)?, None))
        }
        Meeting::Local { name } => Ok((Listener::local(name.as_bytes()).map_err(failed)?, None)),
        Meeting::File(path) => {
            let socket = format!("paceline-{}", random_name()?);
            let listener = Listener::local(socket.as_bytes()).map_err(failed)?;
            Ok((listener, Some(MeetingFile::create(path, &socket, hello)?)))
        }
    }
}

/// A rank that has come.
pub(super) struct Guest {
    pub(super) rank: Rank,
    hello: Hello,
    conversation: Conversation,
}

impl Guest {
    pub(super) fn tell(&mut self, message: &Message) {
        // A guest that hears nothing any more is noticed when it does not come to the handover.
        let _ = self.conversation.link.send(message, SEND_TIME);
    }

    /// A guest speaks once; afterwards its stream can only end.
    fn is_gone(&mut self) -> bool {
        !matches!(self.conversation.hear(None), Heard::Nothing)
    }
}

/// Waits until all other ranks have come, in agreement with `own`. If that fails, those who
/// have come are told why.
pub(super) fn gather(
    place: &Listener,
    own: &Hello,
    address: &str,
    clock: Clock,
) -> Result<Vec<Guest>> {
    let mut guests: Vec<Guest> = Vec::new();
    let result = gather_into(&mut guests, place, own, address, clock);
    if let Err(error) = &result {
        guests.iter_mut().for_each(|guest| guest.tell(&Message::Refused(error.clone())));
    }
    result.map(|()| guests)
}

fn gather_into(
    guests: &mut Vec<Guest>,
    place: &Listener,
    own: &Hello,
    address: &str,
    clock: Clock,
) -> Result<()> {
    let mut lobby = Lobby::of(place);
    let mut told = None;
    loop {
        for (message, conversation) in lobby.first_messages() {
            if let Message::Hello(hello) = message
                && hello.rank < hello.world_size
            {
                let rank = Rank(hello.rank as usize);
                admit(guests, Guest { rank, hello, conversation }, own)?;
            }
        }
        guests.retain_mut(|guest| !guest.is_gone());
        let missing = missing(guests, own.world_size);
        if missing == 0 {
            return Ok(());
        }
        if clock.remaining().is_zero() {
            let (missing, address) = (ranks_of(missing), address.to_owned());
            return Err(CommError::NotMet { missing, address, waited: clock.waited() });
        }
        let news = Some((missing, guests.len()));
        if told != news {
            told = news;
            let message = Message::Noted { missing_mask: missing };
            guests.iter_mut().for_each(|guest| guest.tell(&message));
        }
        thread::sleep(PAUSE);
    }
}

fn missing(guests: &[Guest], world_size: u64) -> u64 {
    (1..world_size)
        .filter(|&rank| guests.iter().all(|guest| guest.hello.rank != rank))
        .fold(0, |mask, rank| mask | 1 << rank)
}

/// Lets a rank in, or finds the reason why there can be no group. The guest that shows the
/// reason is let in too, so that it is told.
fn admit(guests: &mut Vec<Guest>, guest: Guest, own: &Hello) -> Result<()> {
    let hello = guest.hello.clone();
    let name = |hello: &Hello| format!("{}:{}", hello.host, hello.process);
    guests.retain_mut(|earlier| earlier.hello.rank != hello.rank || !earlier.is_gone());
    let first = guests.iter().map(|guest| &guest.hello).chain([own]);
    let first = first.filter(|earlier| earlier.rank == hello.rank).map(name).next();
    let rank = guest.rank;
    guests.push(guest);
    if let Some(first) = first {
        return Err(CommError::DuplicateRank { rank, first, second: name(&hello) });
    }
    if hello.boot_id != own.boot_id {
        let why = format!(
            "its ranks meet in the memory of one machine, but rank {rank} is on {} and rank 0 \
             on {}",
            hello.host, own.host
        );
        let next_step = "start all ranks on one machine".to_owned();
        return Err(Unavailable::NotPossible { name: "host", why, next_step }.into());
    }
    let settings = [
        ("the world size", own.world_size.to_string(), hello.world_size.to_string()),
        ("slot_bytes", own.slot_bytes.to_string(), hello.slot_bytes.to_string()),
        ("the timeout (ms)", own.timeout_ms.to_string(), hello.timeout_ms.to_string()),
        ("the back end", own.backend.clone(), hello.backend.clone()),
    ];
    match settings.into_iter().find(|(_, expected, found)| expected != found) {
        None => Ok(()),
        Some((setting, expected, found)) => {
            let setting = setting.to_owned();
            Err(CommError::SettingMismatch { setting, rank, expected, found })
        }
    }
}
