//! How processes find each other and come to share memory.
//!
//! 1. Rank 0 listens at the meeting place; the others connect, say who they are, and wait
//!    ([`host`], [`guest`]). Rank 0 checks that all said the same and lets everybody know.
//! 2. Rank 0 makes the shared memory and hands it over, with the pipes that show who is alive,
//!    through a Unix socket ([`handover`]).
//! 3. A barrier in that memory ends the meeting.
//!
//! Invariant: nothing that connects to the meeting place can stop it. Visitors are read without
//! blocking, have a limit in time and bytes, and are interpreted only if they speak the protocol.
//! Every wait ends with the group's timeout, and says who was missing.
//! Start with [`meet`].

use std::{
    io::Read,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    CommError, Group, InitOptions, Placement, Rank, Result, Topology, backend::host::algorithms,
    liveness::Lifelines, protocol::Channel, region::Region, settings::Settings,
};
use wire::Hello;

mod file;
mod guest;
mod handover;
mod host;
mod link;
mod wire;

/// What this rank got from the meeting.
struct Share {
    region: Region,
    lifelines: Lifelines,
}

/// The limit of a meeting.
#[derive(Clone, Copy)]
struct Clock {
    start: Instant,
    timeout: Duration,
}

impl Clock {
    fn deadline(self) -> Instant {
        self.start + self.timeout
    }

    fn remaining(self) -> Duration {
        self.deadline().saturating_duration_since(Instant::now())
    }

    fn waited(self) -> Duration {
        self.start.elapsed()
    }
}

/// Joins the group; blocks until all ranks are there, at most for the timeout.
pub(crate) fn meet(settings: &Settings, options: &InitOptions) -> Result<Group> {
    let clock = Clock { start: Instant::now(), timeout: options.group.timeout };
    let hello = introduction(settings, options)?;
    let layout = options.group.layout(settings.world_size);
    let share = if settings.rank == Rank(0) {
        let (place, _file) = host::open(&settings.meeting, &hello)?;
        let guests = host::gather(&place, &hello, &settings.meeting.to_string(), clock)?;
        handover::give(guests, layout, &settings.meeting.to_string(), clock)?
    } else {
        let welcome = guest::visit(&settings.meeting, &hello, clock)?;
        handover::fetch(settings.rank, &welcome, layout, clock)?
    };
    let Share { region, lifelines } = share;
    let rank = settings.rank.index();
    let region = Arc::new(region);
    let mut channel = Channel::open(region, rank, Some(lifelines), clock.remaining());
    algorithms::barrier(&mut channel)?;
    let timeout = options.group.timeout;
    channel.set_timeout(timeout);
    let topology = Topology {
        world_size: settings.world_size,
        placement: Placement::Processes,
        on_devices: false,
    };
    let group = Group::over(channel, settings.local_rank, topology, timeout);
    Ok(group.with_inbox(options.group.inbox))
}

fn introduction(settings: &Settings, options: &InitOptions) -> Result<Hello> {
    let read = |path: &str| std::fs::read_to_string(path).map(|text| text.trim().to_owned());
    let boot_id = read("/proc/sys/kernel/random/boot_id")
        .map_err(CommError::system("reading the machine's boot id from /proc"))?;
    Ok(Hello {
        rank: settings.rank.index() as u64,
        world_size: settings.world_size as u64,
        process: u64::from(std::process::id()),
        slot_bytes: options.group.slot_bytes as u64,
        timeout_ms: options.group.timeout.as_millis() as u64,
        backend: options.backend.clone().unwrap_or_else(|| "auto".to_owned()),
        boot_id,
        // Only for messages.
        host: read("/proc/sys/kernel/hostname").unwrap_or_else(|_| "unknown".to_owned()),
    })
}

/// Bytes that nobody can guess, in hexadecimal.
fn random_name() -> Result<String> {
    let mut bytes = [0u8; 16];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(CommError::system("reading random bytes from /dev/urandom"))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
