//! Groups of ranks: who is in, and the control channel that all back ends can rely on.

use std::{sync::Arc, time::Duration};

use crate::{
    Abort, CommError, Placement, Rank, Result, Topology,
    backend::host::algorithms,
    failure::{Failure, NothingToAbort},
    protocol::{Channel, Limit},
    region::{Layout, Region, SLOT_BYTES_MAX, SLOT_BYTES_MIN, WORLD_SIZE_MAX},
};

/// How long ranks wait for each other unless told otherwise.
pub(crate) const TIMEOUT_DEFAULT: Duration = Duration::from_secs(120);

/// Settings of a group, the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupOptions {
    /// Deadline of the meeting and of each collective.
    pub timeout: Duration,
    /// Size of the pieces in which the back end `host` sends large tensors: a multiple of 4096.
    /// Each rank has two.
    pub slot_bytes: usize,
    /// How GPUs receive.
    pub inbox: InboxOptions,
}

/// How a GPU receives from the others, in the back end `p2p`. The same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InboxOptions {
    /// Memory for what one rank sends at a time: a multiple of 2048. A GPU has eight for each rank.
    pub slot_bytes: usize,
    /// Receive in host memory even where GPUs reach each other's.
    pub in_host_memory: bool,
}

impl Default for InboxOptions {
    /// 2 MiB, in the memory of GPUs where they reach it.
    fn default() -> Self {
        Self { slot_bytes: 2 << 20, in_host_memory: false }
    }
}

impl Default for GroupOptions {
    /// 120 seconds, slots of 256 KiB.
    fn default() -> Self {
        Self { timeout: TIMEOUT_DEFAULT, slot_bytes: 256 << 10, inbox: InboxOptions::default() }
    }
}

impl GroupOptions {
    pub(crate) fn check(&self) -> Result<()> {
        let invalid = |setting, value, expected: &str| CommError::SettingInvalid {
            setting,
            value,
            origin: "the options".to_owned(),
            expected: expected.to_owned(),
        };
        if self.timeout.is_zero() {
            return Err(invalid("timeout", "0".to_owned(), "longer than nothing"));
        }
        let in_bounds = (SLOT_BYTES_MIN..=SLOT_BYTES_MAX).contains(&self.slot_bytes);
        if !in_bounds || !self.slot_bytes.is_multiple_of(SLOT_BYTES_MIN) {
            let expected = "a multiple of 4096 up to 256 MiB";
            return Err(invalid("slot_bytes", self.slot_bytes.to_string(), expected));
        }
        let inbox = self.inbox.slot_bytes;
        if !(2048..=SLOT_BYTES_MAX).contains(&inbox) || !inbox.is_multiple_of(2048) {
            let expected = "a multiple of 2048 up to 256 MiB";
            return Err(invalid("inbox.slot_bytes", inbox.to_string(), expected));
        }
        Ok(())
    }

    pub(crate) fn layout(&self, world_size: usize) -> Layout {
        Layout { world_size, slot_bytes: self.slot_bytes }
    }
}

/// One rank's membership of a group. Dropping it leaves the group.
///
/// [`Communicator::connect`](crate::Communicator::connect) makes it usable for tensors; back ends
/// use it to exchange what they need to connect.
pub struct Group {
    rank: Rank,
    local_rank: usize,
    topology: Topology,
    device: Option<u32>,
    timeout: Duration,
    inbox: InboxOptions,
    /// None if this rank is alone.
    channel: Option<Channel>,
}

impl Group {
    /// A group of one, where every collective is the identity.
    pub fn alone() -> Self {
        Self {
            rank: Rank(0),
            local_rank: 0,
            topology: Topology { world_size: 1, placement: Placement::Threads, on_devices: false },
            device: None,
            timeout: TIMEOUT_DEFAULT,
            inbox: InboxOptions::default(),
            channel: None,
        }
    }

    /// A group of one with settings.
    pub(crate) fn alone_with(local_rank: usize, timeout: Duration) -> Self {
        Self { local_rank, timeout, ..Self::alone() }
    }

    pub(crate) fn over(
        channel: Channel,
        local_rank: usize,
        topology: Topology,
        timeout: Duration,
    ) -> Self {
        let rank = Rank(channel.rank());
        let (device, inbox) = (None, InboxOptions::default());
        Self { rank, local_rank, topology, device, timeout, inbox, channel: Some(channel) }
    }

    /// How GPUs receive.
    pub(crate) fn with_inbox(mut self, inbox: InboxOptions) -> Self {
        self.inbox = inbox;
        self
    }

    /// Says that this rank computes on GPU `ordinal`, where its tensors then lie. Ranks may share
    /// a GPU. All ranks of a group say so, or none.
    #[must_use]
    pub fn on_device(mut self, ordinal: u32) -> Self {
        self.device = Some(ordinal);
        self.topology.on_devices = true;
        self
    }

    /// The GPU that this rank computes on; none: the CPU.
    pub fn device(&self) -> Option<u32> {
        self.device
    }

    /// How GPUs receive.
    pub fn inbox(&self) -> InboxOptions {
        self.inbox
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// This rank's number among those of its machine: which device it takes.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.topology.world_size
    }

    /// Where the ranks are.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The deadline of each collective.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Gives every rank the messages of all ranks, by rank. For set-up.
    ///
    /// # Errors
    /// As [`Communicator::broadcast_bytes`](crate::Communicator::broadcast_bytes).
    pub fn exchange(&mut self, message: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut messages = vec![Vec::new(); self.world_size()];
        messages[self.rank.index()] = message.to_vec();
        if let Some(channel) = &mut self.channel {
            for (root, message) in messages.iter_mut().enumerate() {
                algorithms::broadcast_bytes(channel, message, Rank(root), Limit::Deadline)?;
            }
        }
        Ok(messages)
    }

    /// Whether the group can still be used: looks for failures and lost ranks, and does not wait.
    ///
    /// # Errors
    /// The group's first failure.
    pub fn check(&mut self) -> Result<()> {
        self.channel.as_mut().map_or(Ok(()), Channel::check)
    }

    /// A handle that frees this rank from another thread.
    pub fn abort_handle(&self) -> Arc<dyn Abort> {
        match &self.channel {
            Some(channel) => channel.abort_handle(),
            None => Arc::new(NothingToAbort),
        }
    }

    /// The failure that the group has, if it is known: costs one load.
    pub(crate) fn failure(&mut self) -> Result<()> {
        self.channel.as_mut().map_or(Ok(()), Channel::check_failure)
    }

    /// For back ends: makes the group fail, because this rank's device waited for `peer` in vain,
    /// in its collective number `index`.
    ///
    /// # Errors
    /// Always, if there are other ranks: the group's first failure, which may be another.
    pub fn fail_waiting(&mut self, peer: Rank, index: u32) -> Result<()> {
        let (rank, limit) = (self.rank, self.timeout);
        let failure = Failure::PeerTimeout { rank, peer, index, limit };
        self.channel.as_mut().map_or(Ok(()), |channel| channel.fail(failure))
    }

    pub(crate) fn channel_mut(&mut self) -> Option<&mut Channel> {
        self.channel.as_mut()
    }
}

impl std::fmt::Debug for Group {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Group(rank {} of {})", self.rank, self.topology)
    }
}

/// Makes a group of `world_size` ranks that are threads of this process. Give each thread one;
/// the list is in order of rank.
///
/// # Errors
/// [`CommError::SettingInvalid`] or [`CommError::System`].
pub fn in_process(world_size: usize, options: &GroupOptions) -> Result<Vec<Group>> {
    options.check()?;
    check_world_size(world_size, "the call")?;
    if world_size == 1 {
        return Ok(vec![Group::alone_with(0, options.timeout)]);
    }
    let region = Arc::new(Region::anonymous(options.layout(world_size))?);
    let topology = Topology { world_size, placement: Placement::Threads, on_devices: false };
    let group = |rank| {
        let channel = Channel::open(region.clone(), rank, None, options.timeout);
        Group::over(channel, rank, topology.clone(), options.timeout).with_inbox(options.inbox)
    };
    Ok((0..world_size).map(group).collect())
}

pub(crate) fn check_world_size(world_size: usize, origin: &str) -> Result<()> {
    if (1..=WORLD_SIZE_MAX).contains(&world_size) {
        return Ok(());
    }
    Err(CommError::SettingInvalid {
        setting: "world size",
        value: world_size.to_string(),
        origin: origin.to_owned(),
        expected: format!("1 to {WORLD_SIZE_MAX}"),
    })
}
