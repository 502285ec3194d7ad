//! The collectives as steps of the flag protocol.
//!
//! Calls larger than a slot go in chunks, one step (or two) each; the two slots of a rank let it
//! write a chunk while others still read the one before. Which algorithm runs, and the bounds of
//! the chunks, depend only on what the call's descriptor says, so all ranks choose alike. None of
//! it changes a bit of a sum: see [`super::reduce`].

use std::ops::Range;

use paceline_kernels::DType;

use super::reduce::{Reducible, reduce};
use crate::{
    Collective, Rank, ReduceOp, Result,
    descriptor::Descriptor,
    protocol::{Channel, Limit, Slots},
};

/// Bytes times (ranks - 1) up to which every rank sums everything. Above, each sums its share
/// and collects the others': one more step, but less to read and add.
const ONE_STEP_BYTES_MAX: usize = 64 << 10;

/// Combines `x` of all ranks, in place.
pub(super) fn all_reduce<T: Reducible>(
    channel: &mut Channel,
    x: &mut [T],
    op: ReduceOp,
) -> Result<()> {
    channel.begin(Descriptor::reduction(Collective::AllReduce, op, T::DTYPE, x.len()))?;
    let chunk_length = channel.slot_bytes() / size_of::<T>();
    let bytes = size_of_val(x).min(channel.slot_bytes());
    let in_one_step = bytes * (channel.world_size() - 1) <= ONE_STEP_BYTES_MAX;
    for chunk in chunks(x.len(), chunk_length) {
        if in_one_step {
            all_reduce_in_one_step(channel, &mut x[chunk], op)?;
        } else {
            all_reduce_in_two_steps(channel, &mut x[chunk], op)?;
        }
    }
    Ok(())
}

/// Every rank publishes its input and sums all inputs.
fn all_reduce_in_one_step<T: Reducible>(
    channel: &mut Channel,
    x: &mut [T],
    op: ReduceOp,
) -> Result<()> {
    share(channel, bytemuck::cast_slice(x))?;
    channel.await_all()?;
    let slots = channel.slots();
    let bytes = size_of_val(x);
    reduce(op, channel.world_size(), |rank| elements(slots, rank, 0..bytes), x);
    Ok(())
}

/// Every rank publishes its input, sums its segment of all inputs, publishes that, and collects
/// the segments of the others.
fn all_reduce_in_two_steps<T: Reducible>(
    channel: &mut Channel,
    x: &mut [T],
    op: ReduceOp,
) -> Result<()> {
    let (rank, world_size, length) = (channel.rank(), channel.world_size(), x.len());
    let segment = |rank| rank * length / world_size..(rank + 1) * length / world_size;
    let Range { start, end } = segment(rank);
    share(channel, bytemuck::cast_slice(x))?;
    channel.await_all()?;
    channel.prepare()?;
    let bytes = start * size_of::<T>()..end * size_of::<T>();
    let (own, slots) = channel.next_slot(bytes.len());
    let own: &mut [T] = bytemuck::cast_slice_mut(own);
    reduce(op, world_size, |rank| elements(slots, rank, bytes.clone()), own);
    channel.publish();
    channel.await_all()?;
    let slots = channel.slots();
    for rank in 0..world_size {
        let segment = segment(rank);
        let bytes = segment.len() * size_of::<T>();
        x[segment].copy_from_slice(elements(slots, rank, 0..bytes));
    }
    Ok(())
}

/// Combines `x` (bytes of elements `T`, perhaps misaligned) of all ranks; `out` gets this
/// rank's of `world_size` equal parts.
pub(super) fn reduce_scatter<T: Reducible>(
    channel: &mut Channel,
    x: &[u8],
    out: &mut [T],
    op: ReduceOp,
) -> Result<()> {
    let (rank, world_size) = (channel.rank(), channel.world_size());
    let count = x.len() / size_of::<T>();
    channel.begin(Descriptor::reduction(Collective::ReduceScatter, op, T::DTYPE, count))?;
    let part_bytes = size_of_val(out);
    let chunk_length = channel.slot_bytes() / size_of::<T>() / world_size;
    for chunk in chunks(out.len(), chunk_length) {
        let bytes = chunk.start * size_of::<T>()..chunk.end * size_of::<T>();
        channel.prepare()?;
        let (own, _) = channel.next_slot(world_size * bytes.len());
        for (part, own) in own.chunks_exact_mut(bytes.len().max(1)).enumerate() {
            own.copy_from_slice(&x[part * part_bytes..][bytes.clone()]);
        }
        channel.publish();
        channel.await_all()?;
        let slots = channel.slots();
        let part = rank * bytes.len()..(rank + 1) * bytes.len();
        reduce(op, world_size, |rank| elements(slots, rank, part.clone()), &mut out[chunk]);
    }
    Ok(())
}

/// Puts `x` of all ranks one after the other into `out`.
pub(super) fn all_gather(
    channel: &mut Channel,
    dtype: DType,
    x: &[u8],
    out: &mut [u8],
) -> Result<()> {
    let count = x.len() / dtype.bytes();
    channel.begin(Descriptor::movement(Collective::AllGather, dtype, None, count))?;
    for chunk in chunks(x.len(), channel.slot_bytes()) {
        share(channel, &x[chunk.clone()])?;
        for rank in 0..channel.world_size() {
            channel.await_rank(rank, Limit::Deadline)?;
            let out = &mut out[rank * x.len()..][chunk.clone()];
            out.copy_from_slice(channel.slots().of(rank, chunk.len()));
        }
    }
    Ok(())
}

/// Copies the root's `x` into that of the others.
pub(super) fn broadcast(
    channel: &mut Channel,
    dtype: DType,
    x: &mut [u8],
    root: Rank,
) -> Result<()> {
    let count = x.len() / dtype.bytes();
    channel.begin(Descriptor::movement(Collective::Broadcast, dtype, Some(root), count))?;
    for chunk in chunks(x.len(), channel.slot_bytes()) {
        broadcast_chunk(channel, &mut x[chunk], root)?;
    }
    Ok(())
}

/// Waits for all ranks.
pub(crate) fn barrier(channel: &mut Channel) -> Result<()> {
    channel.begin(Descriptor::barrier())?;
    share(channel, &[])?;
    channel.await_all()
}

/// Sends the root's message to the others, who do not know its length. `limit` is that of the
/// wait for the root to begin.
pub(crate) fn broadcast_bytes(
    channel: &mut Channel,
    message: &mut Vec<u8>,
    root: Rank,
    limit: Limit,
) -> Result<()> {
    let slot_bytes = channel.slot_bytes();
    let is_root = channel.rank() == root.index();
    channel.begin(Descriptor::message(root, if is_root { message.len() } else { 0 }))?;
    if !is_root {
        share(channel, &[])?;
        channel.await_rank(root.index(), limit)?;
        let length = channel.call_of(root.index()).count as usize;
        message.clear();
        message.resize(length, 0);
        let first = length.min(slot_bytes);
        message[..first].copy_from_slice(channel.slots().of(root.index(), first));
    } else {
        let first = message.len().min(slot_bytes);
        share(channel, &message[..first])?;
    }
    if message.len() > slot_bytes {
        for chunk in chunks(message.len() - slot_bytes, slot_bytes) {
            broadcast_chunk(channel, &mut message[slot_bytes..][chunk], root)?;
        }
    }
    Ok(())
}

fn broadcast_chunk(channel: &mut Channel, x: &mut [u8], root: Rank) -> Result<()> {
    if channel.rank() == root.index() {
        return share(channel, x);
    }
    share(channel, &[])?;
    channel.await_rank(root.index(), Limit::Deadline)?;
    x.copy_from_slice(channel.slots().of(root.index(), x.len()));
    Ok(())
}

/// One step that publishes `bytes`.
fn share(channel: &mut Channel, bytes: &[u8]) -> Result<()> {
    channel.prepare()?;
    channel.next_slot(bytes.len()).0.copy_from_slice(bytes);
    channel.publish();
    Ok(())
}

fn elements<T: Reducible>(slots: Slots<'_>, rank: usize, bytes: Range<usize>) -> &[T] {
    bytemuck::cast_slice(&slots.of(rank, bytes.end)[bytes])
}

/// `0..length` in ranges of `size`; one empty range if there is nothing, because even an empty
/// call is a step that all ranks make.
fn chunks(length: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..length.div_ceil(size).max(1)).map(move |index| index * size..length.min((index + 1) * size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_everything_once() {
        let bounds = |length| chunks(length, 4).map(|chunk| (chunk.start, chunk.end));
        assert_eq!(bounds(0).collect::<Vec<_>>(), [(0, 0)]);
        assert_eq!(bounds(4).collect::<Vec<_>>(), [(0, 4)]);
        assert_eq!(bounds(9).collect::<Vec<_>>(), [(0, 4), (4, 8), (8, 9)]);
    }
}
