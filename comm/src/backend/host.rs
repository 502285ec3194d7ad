//! Back end `host`: ranks as threads of one process or as processes of one machine, which meet
//! in shared memory. It is complete, and the reference that other back ends are compared with.
//!
//! It has no state of its own: the memory and the flags belong to the group's
//! [`Channel`], so that data and control messages share one order.
//! Start with `algorithms`.

use std::sync::Arc;

use half::{bf16, f16};
use paceline_kernels::{DType, Element, Stream, Tensor};

use crate::{
    Abort, Backend, Call, Collective, CommError, Connection, Group, Limits, Placement, ReduceOp,
    Result, Topology, Unavailable, protocol::Channel, region::WORLD_SIZE_MAX,
};

pub(crate) mod algorithms;
mod reduce;

/// The back end itself.
pub(super) struct Host;

static LIMITS: Limits = Limits {
    collectives: &[
        Collective::AllReduce,
        Collective::ReduceScatter,
        Collective::AllGather,
        Collective::Broadcast,
        Collective::Barrier,
    ],
    dtypes_reduced: &[DType::F32, DType::F16, DType::BF16],
    dtypes_moved: &[
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::I64,
        DType::I32,
        DType::U8,
        DType::I8,
    ],
    bytes: 0..=usize::MAX,
    world_sizes: 1..=WORLD_SIZE_MAX,
    in_place: true,
    graph_capture: false,
};

impl Backend for Host {
    fn name(&self) -> &'static str {
        "host"
    }

    fn probe(&self, topology: &Topology) -> Result<Limits, Unavailable> {
        let not_possible = |why: String, next_step: &str| {
            let next_step = next_step.to_owned();
            Unavailable::NotPossible { name: "host", why, next_step }
        };
        if topology.placement == Placement::Machines {
            return Err(not_possible(
                "its ranks meet in the memory of one machine".to_owned(),
                "start all ranks on one machine",
            ));
        }
        if topology.on_devices {
            return Err(not_possible(
                "the tensors of these ranks lie on GPUs".to_owned(),
                "choose `p2p`, or compute on the CPU",
            ));
        }
        if topology.world_size > WORLD_SIZE_MAX {
            return Err(not_possible(
                format!("it takes at most {WORLD_SIZE_MAX} ranks, not {}", topology.world_size),
                "start fewer ranks",
            ));
        }
        Ok(LIMITS.clone())
    }

    fn connect(&self, _group: &mut Group) -> Result<Box<dyn Connection>> {
        Ok(Box::new(HostConnection))
    }
}

struct HostConnection;

impl Connection for HostConnection {
    fn limits(&self) -> &Limits {
        &LIMITS
    }

    unsafe fn enqueue(&mut self, group: &mut Group, call: Call<'_>, stream: &Stream) -> Result<()> {
        let Some(channel) = group.channel_mut() else { return alone(call, stream) };
        match call {
            Call::AllReduce { x, op } => all_reduce(channel, x, op),
            Call::AllReduceInto { x, out, op } => {
                copy(x, out, Collective::AllReduce, stream)?;
                all_reduce(channel, out, op)
            }
            Call::ReduceScatter { x, out, op } => reduce_scatter(channel, x, out, op),
            Call::AllGather { x, out } => {
                let (dtype, x) = (x.dtype(), input_bytes(x, Collective::AllGather)?);
                algorithms::all_gather(channel, dtype, x, bytes_mut(out)?)
            }
            Call::Broadcast { x, root } => {
                let dtype = x.dtype();
                algorithms::broadcast(channel, dtype, bytes_mut(x)?, root)
            }
            Call::Barrier => algorithms::barrier(channel),
        }
    }

    fn abort_handle(&self, group: &Group) -> Arc<dyn Abort> {
        group.abort_handle()
    }
}

/// The collectives of a group of one.
pub(crate) fn alone(call: Call<'_>, stream: &Stream) -> Result<()> {
    let collective = call.collective();
    match call {
        Call::AllReduceInto { x, out, .. }
        | Call::ReduceScatter { x, out, .. }
        | Call::AllGather { x, out } => copy(x, out, collective, stream),
        Call::AllReduce { .. } | Call::Broadcast { .. } | Call::Barrier => Ok(()),
    }
}

fn copy(x: &Tensor, out: &mut Tensor, collective: Collective, stream: &Stream) -> Result<()> {
    let Some(queue) = stream.device_stream() else {
        bytes_mut(out)?.copy_from_slice(input_bytes(x, collective)?);
        return Ok(());
    };
    check_dense(x, collective)?;
    let (Some(from), Some(to)) = (x.device_pointer(), out.device_pointer_mut()) else {
        let reason = format!("{x:?} or {out:?} is on the host, the stream on a GPU");
        return Err(CommError::Argument { collective, reason });
    };
    // SAFETY: both hold as many bytes without gaps; they are borrowed now, and freeing device
    // memory waits for the stream.
    Ok(unsafe { queue.copy(to, from, x.bytes()) }?)
}

fn all_reduce(channel: &mut Channel, x: &mut Tensor, op: ReduceOp) -> Result<()> {
    match x.dtype() {
        DType::F32 => algorithms::all_reduce(channel, x.as_mut_slice::<f32>(), op),
        DType::F16 => algorithms::all_reduce(channel, x.as_mut_slice::<f16>(), op),
        DType::BF16 => algorithms::all_reduce(channel, x.as_mut_slice::<bf16>(), op),
        other => Err(unsupported(Collective::AllReduce, other)),
    }
}

fn reduce_scatter(channel: &mut Channel, x: &Tensor, out: &mut Tensor, op: ReduceOp) -> Result<()> {
    fn typed<T: reduce::Reducible>(
        channel: &mut Channel,
        x: &Tensor,
        out: &mut Tensor,
        op: ReduceOp,
    ) -> Result<()> {
        let x = input_bytes(x, Collective::ReduceScatter)?;
        algorithms::reduce_scatter(channel, x, out.as_mut_slice::<T>(), op)
    }
    match x.dtype() {
        DType::F32 => typed::<f32>(channel, x, out, op),
        DType::F16 => typed::<f16>(channel, x, out, op),
        DType::BF16 => typed::<bf16>(channel, x, out, op),
        other => Err(unsupported(Collective::ReduceScatter, other)),
    }
}

fn unsupported(collective: Collective, dtype: DType) -> CommError {
    CommError::Argument { collective, reason: format!("back end `host` has no type {dtype}") }
}

pub(super) fn check_dense(x: &Tensor, collective: Collective) -> Result<()> {
    if x.rows() <= 1 || x.pitch_bytes() == x.width() * x.dtype().bytes() {
        return Ok(());
    }
    let reason = format!("{x:?} has gaps between its rows: copy it into a tensor without");
    Err(CommError::Argument { collective, reason })
}

/// The elements of a tensor without gaps, as bytes; they may be misaligned.
fn input_bytes(x: &Tensor, collective: Collective) -> Result<&[u8]> {
    check_dense(x, collective)?;
    // SAFETY: without gaps the elements are `bytes()` initialised bytes from the first on.
    Ok(unsafe { std::slice::from_raw_parts(x.as_ptr(), x.bytes()) })
}

/// The elements of a tensor that owns its memory, as bytes.
fn bytes_mut(x: &mut Tensor) -> Result<&mut [u8]> {
    fn typed<T: Element>(x: &mut Tensor) -> &mut [u8] {
        bytemuck::cast_slice_mut(x.as_mut_slice::<T>())
    }
    match x.dtype() {
        DType::F32 => Ok(typed::<f32>(x)),
        DType::F16 => Ok(typed::<f16>(x)),
        DType::BF16 => Ok(typed::<bf16>(x)),
        DType::I64 => Ok(typed::<i64>(x)),
        DType::I32 => Ok(typed::<i32>(x)),
        DType::U8 => Ok(typed::<u8>(x)),
        DType::I8 => Ok(typed::<i8>(x)),
        other => Err(unsupported(Collective::Broadcast, other)),
    }
}
