//! Connecting the ranks: step by step, each of which all ranks take or none.

use std::sync::Arc;

use paceline_kernels::{
    KernelError,
    driver::{Device, DeviceMemory, DevicePointer},
    ops::all_reduce::{Kernels, Link, RANKS_MAX, State, Way},
};

use super::{
    NAME,
    connection::{BARRIER_OFFSET, Large, P2pConnection},
    inbox::{self, Inbox, Listed, OUTBOX_SLOTS},
    not_possible, plan,
};
use crate::{CommError, Group, InboxOptions, Rank, Result, Unavailable};

/// The oldest GPUs that the kernels are compiled for.
const CAPABILITY_MIN: (u32, u32) = (8, 0);

/// Connects this rank; the others call this too.
pub(super) fn connect(group: &mut Group) -> Result<P2pConnection> {
    let world = group.world_size();
    let InboxOptions { slot_bytes, in_host_memory } = group.inbox();

    let device = open(group);
    let offers = agree(
        group,
        device.as_ref().map(|device| {
            let on_host = u32::from(in_host_memory);
            [device.ordinal(), device.multiprocessors(), slot_bytes as u32, on_host]
        }),
    )?;
    let device = device?;
    let [ordinals, multiprocessors, slots, on_host] = columns(&offers);
    check_same(&slots)?;
    check_same(&on_host)?;
    let reached = if in_host_memory { Ok(false) } else { reach(&device, &ordinals) };
    let reached = agree(group, reached.map(|reached| [u32::from(reached)]))?;
    let in_host_memory = reached.iter().any(|&[reached]| reached == 0);
    let way = if in_host_memory { Way::HostOutbox } else { Way::Inbox };

    let own = prepare(&device, world, way, slot_bytes);
    let prepared = agree(
        group,
        own.as_ref().map(|own| {
            let number = own.listed.number;
            let [reduce, rows, large] = own.blocks_at_once;
            [number as u32, (number >> 32) as u32, reduce, rows, large]
        }),
    )?;
    let own = own?;
    let [low, high, reduce, rows, large] = columns(&prepared);
    let blocks_max = blocks_max(&ordinals, &multiprocessors, &reduce)?;
    let row_blocks_max = self::blocks_max(&ordinals, &multiprocessors, &rows)?;
    let large_blocks_max = self::blocks_max(&ordinals, &multiprocessors, &large)?;
    let inboxes: Option<Vec<Arc<Inbox>>> = low
        .iter()
        .zip(high)
        .map(|(&low, high)| inbox::find(u64::from(high) << 32 | u64::from(low)))
        .collect();
    let inboxes = inboxes.ok_or_else(|| {
        let why = "a rank is not a thread of this process".to_owned();
        CommError::from(not_possible(why, "start all ranks in one process"))
    });
    agree(group, inboxes.as_ref().map(|_| []))?;

    let inboxes: Arc<[Arc<Inbox>]> = inboxes?.into();
    let reduced = link(group, &own.state, &inboxes, Inbox::combined, slot_bytes);
    let moved = link(group, &own.state, &inboxes, Inbox::gathered, slot_bytes);
    let slots = plan::Slots { way, world, bytes: slot_bytes };
    let Prepared { state, kernels, large, .. } = own;
    let large = large.map(|kernels| {
        let bytes = OUTBOX_SLOTS * slot_bytes;
        Large {
            kernels,
            link: link(group, &state, &inboxes, Inbox::outbox, bytes),
            slots: plan::Slots { way: Way::Outbox, world, bytes },
            blocks_max: large_blocks_max,
        }
    });
    Ok(P2pConnection {
        state,
        kernels,
        device,
        reduced,
        moved,
        large,
        slots,
        blocks_max,
        row_blocks_max,
        inboxes,
    })
}

/// This rank's own memory and kernels.
struct Prepared {
    state: DeviceMemory,
    kernels: Kernels,
    /// Keeps the inbox until the others have found it.
    _inbox: Arc<Inbox>,
    listed: Listed,
    large: Option<Kernels>,
    /// Of the all-reduces, the fused kernel, and the all-reduces of large tensors.
    blocks_at_once: [u32; 3],
}

fn prepare(device: &Device, world: usize, way: Way, slot_bytes: usize) -> Result<Prepared> {
    let kernels = Kernels::load(device, way, world).map_err(unusable)?;
    let [reduce, rows] = kernels.blocks_at_once()?;
    let large = match way {
        Way::Inbox => Some(Kernels::load(device, Way::Outbox, world).map_err(unusable)?),
        Way::Outbox | Way::HostOutbox => None,
    };
    let of_large = large.as_ref().map(Kernels::blocks_at_once).transpose()?;
    let blocks_at_once = [reduce, rows, of_large.map_or(reduce, |[reduce, _]| reduce)];
    let inbox = Arc::new(Inbox::new(device, way, world, slot_bytes)?);
    let listed = Listed::new(&inbox);
    let state = DeviceMemory::zeroed(device, BARRIER_OFFSET + size_of::<State>())?;
    Ok(Prepared { state, kernels, _inbox: inbox, listed, large, blocks_at_once })
}

fn unusable(error: KernelError) -> CommError {
    match error {
        KernelError::Driver(error) => error.into(),
        other => Unavailable::NotFound {
            name: NAME,
            what: "its kernels".to_owned(),
            next_step: other.to_string(),
        }
        .into(),
    }
}

fn open(group: &Group) -> Result<Device> {
    let Some(ordinal) = group.device() else {
        let why = "this rank was given no GPU".to_owned();
        return Err(not_possible(why, "give each rank a GPU").into());
    };
    let device = Device::open(ordinal)?;
    let (major, minor) = device.compute_capability();
    if (major, minor) < CAPABILITY_MIN {
        let why = format!("GPU {ordinal} has compute capability {major}.{minor}, less than 8.0");
        return Err(not_possible(why, "use newer GPUs").into());
    }
    Ok(device)
}

/// Whether `device` reaches the memory of all others; if so it may from now on.
fn reach(device: &Device, ordinals: &[u32]) -> Result<bool> {
    for &ordinal in ordinals.iter().filter(|&&ordinal| ordinal != device.ordinal()) {
        let peer = Device::open(ordinal)?;
        if !device.can_access_peer(&peer)? {
            return Ok(false);
        }
        device.enable_peer_access(&peer)?;
    }
    Ok(true)
}

/// The blocks that every rank's kernels may have, of which their multiprocessors hold `at_once`.
fn blocks_max(ordinals: &[u32], multiprocessors: &[u32], at_once: &[u32]) -> Result<u32> {
    let ranks_on = |ordinal| ordinals.iter().filter(|&&other| other == ordinal).count();
    let of_rank = |((&ordinal, &count), &at_once): ((&u32, &u32), &u32)| {
        plan::blocks_max(count, at_once, ranks_on(ordinal))
    };
    let blocks = ordinals.iter().zip(multiprocessors).zip(at_once).map(of_rank).min();
    blocks.filter(|&blocks| blocks > 0).ok_or_else(|| {
        let why = "so many ranks share a GPU that their kernels would keep each other out";
        not_possible(why.to_owned(), "give fewer ranks the same GPU").into()
    })
}

fn link(
    group: &Group,
    state: &DeviceMemory,
    inboxes: &[Arc<Inbox>],
    address: impl Fn(&Inbox) -> DevicePointer,
    slot_bytes: usize,
) -> Link {
    let rank = group.rank().index();
    let mut boxes = [DevicePointer::NULL; RANKS_MAX];
    for (place, inbox) in boxes.iter_mut().zip(inboxes) {
        *place = address(inbox);
    }
    Link {
        boxes,
        state: state.pointer(),
        failure: inboxes[rank].failure_pointer(),
        abort: inboxes[rank].abort_pointer(),
        // So far from the end that a clock can be added to it.
        timeout_ns: group.timeout().as_nanos().min(u128::from(u64::MAX / 2)) as u64,
        slot_bytes: slot_bytes as u64,
        rank: rank as u32,
        world: inboxes.len() as u32,
    }
}

/// The settings of all ranks must be the same.
fn check_same(values: &[u32]) -> Result<()> {
    let Some(rank) = values.iter().position(|&value| value != values[0]) else { return Ok(()) };
    Err(CommError::SettingMismatch {
        setting: "the inboxes of GPUs".to_owned(),
        rank: Rank(rank),
        expected: values[0].to_string(),
        found: values[rank].to_string(),
    })
}

/// What each rank has to say, by field.
fn columns<const N: usize>(rows: &[[u32; N]]) -> [Vec<u32>; N] {
    std::array::from_fn(|field| rows.iter().map(|row| row[field]).collect())
}

/// One step of all ranks: gives each the words of all, or if a rank failed an error on every rank.
/// A rank that fails must still take part, or the others would wait for it.
fn agree<const N: usize>(
    group: &mut Group,
    own: Result<[u32; N], impl ToString>,
) -> Result<Vec<[u32; N]>> {
    let message = match &own {
        Ok(words) => [&[1][..], bytemuck::cast_slice(words)].concat(),
        Err(reason) => [&[0][..], reason.to_string().as_bytes()].concat(),
    };
    let messages = group.exchange(&message)?;
    let words = |(rank, message): (usize, &Vec<u8>)| match message.split_first() {
        Some((1, words)) if words.len() == size_of::<[u32; N]>() => {
            let mut values = [0u32; N];
            bytemuck::cast_slice_mut::<u32, u8>(&mut values).copy_from_slice(words);
            Ok(values)
        }
        other => {
            let reason = other.map(|(_, text)| String::from_utf8_lossy(text)).unwrap_or_default();
            let why = format!("rank {rank} failed ({reason})");
            Err(not_possible(why, "choose another back end").into())
        }
    };
    messages.iter().enumerate().map(words).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GroupOptions, in_process};

    #[test]
    fn a_rank_that_fails_fails_the_step_on_all_and_leaves_them_in_step() {
        std::thread::scope(|scope| {
            for mut group in in_process(3, &GroupOptions::default()).unwrap() {
                scope.spawn(move || {
                    let rank = group.rank().index() as u32;
                    let all = agree(&mut group, Ok::<_, String>([rank, 7])).unwrap();
                    assert_eq!(all, [[0, 7], [1, 7], [2, 7]]);
                    let own = if rank == 1 { Err("no memory") } else { Ok([rank]) };
                    let error = agree(&mut group, own).unwrap_err().to_string();
                    assert!(error.contains("rank 1 failed (no memory)"), "{error}");
                    assert_eq!(agree(&mut group, Ok::<_, String>([])).unwrap().len(), 3);
                });
            }
        });
    }

    #[test]
    fn ranks_that_share_a_gpu_share_its_multiprocessors() {
        assert_eq!(blocks_max(&[0, 1], &[132, 132], &[1, 1]).unwrap(), 66);
        assert_eq!(blocks_max(&[0, 0, 1], &[132, 132, 20], &[1, 1, 1]).unwrap(), 10);
        assert_eq!(blocks_max(&[0, 0], &[132, 132], &[2, 2]).unwrap(), 66);
        assert!(blocks_max(&[0; 16], &[20; 16], &[1; 16]).is_err());
    }
}
