//! The hot path: collectives become kernels on the stream. Nothing here allocates or waits.

use std::{ops::Range, sync::Arc};

use paceline_kernels::{
    DType, Stream, Tensor,
    driver::{Device, DeviceMemory, DevicePointer, DeviceStream},
    ops::all_reduce::{
        AddRmsNormParams, Algorithm, AllReduceParams, Combine, Failure as DeviceFailure, Kernels,
        Link, PartsParams, RANKS_MAX, ROW_BYTES_MAX, geometry, geometry_of_rows,
    },
};

use super::{inbox::Inbox, plan};
use crate::{
    Abort, AddRmsNorm, Call, Collective, CommError, Connection, FusedAllReduce, Group, Limits,
    Rank, ReduceOp, Result, backend::host::check_dense,
};

pub(super) static LIMITS: Limits = Limits {
    collectives: &[
        Collective::AllReduce,
        Collective::ReduceScatter,
        Collective::AllGather,
        Collective::Barrier,
    ],
    dtypes_reduced: DTYPES_REDUCED,
    dtypes_moved: &DType::ALL,
    bytes: 0..=usize::MAX,
    world_sizes: 2..=RANKS_MAX,
    in_place: true,
    graph_capture: true,
};

const DTYPES_REDUCED: &[DType] = &[DType::F32, DType::F16, DType::BF16];

/// The fused kernel moves whole vectors.
const ROW_ALIGNMENT: usize = 16;

/// Where the barrier's element lies behind the kernels' state: in another cache line.
pub(super) const BARRIER_OFFSET: usize = 128;

/// One rank's connection to the others.
///
/// All calls are on one stream, or on streams that events order: the GPU counts them. Calls can be
/// captured in graphs, and graphs launched while other ranks launch theirs. Two things
/// are the caller's: a graph is uploaded, and its stream synchronised, before any rank launches
/// one; and while a rank captures or uploads, no rank's kernels are waiting for it, since what the
/// driver does then may wait for the whole device, and so for kernels that wait for this rank. A
/// barrier of the threads before and after capturing does it. A captured graph is launched only as
/// long as its connection lives.
pub(super) struct P2pConnection {
    /// First: freeing it waits for this rank's GPU, after which nothing writes into an inbox.
    pub(super) state: DeviceMemory,
    pub(super) kernels: Kernels,
    pub(super) device: Device,
    /// For what is combined.
    pub(super) reduced: Link,
    /// For what is only gathered.
    pub(super) moved: Link,
    /// For what is combined and larger than a slot, where there are inboxes.
    pub(super) large: Option<Large>,
    pub(super) slots: plan::Slots,
    pub(super) blocks_max: u32,
    /// Of the fused kernel.
    pub(super) row_blocks_max: u32,
    /// By rank.
    pub(super) inboxes: Arc<[Arc<Inbox>]>,
}

/// A second way, for large tensors.
pub(super) struct Large {
    pub(super) kernels: Kernels,
    pub(super) link: Link,
    pub(super) slots: plan::Slots,
    pub(super) blocks_max: u32,
}

impl Connection for P2pConnection {
    fn limits(&self) -> &Limits {
        &LIMITS
    }

    unsafe fn enqueue(&mut self, group: &mut Group, call: Call<'_>, stream: &Stream) -> Result<()> {
        let collective = call.collective();
        self.check(group)?;
        let stream = self.queue(stream, collective)?;
        // SAFETY: the caller keeps the tensors; `pointers` has looked where they lie.
        unsafe {
            match call {
                Call::AllReduce { x, op } => {
                    let at = self.target(x, collective)?;
                    self.all_reduce(stream, x.dtype(), [at, at], x.bytes(), combine(op))
                }
                Call::AllReduceInto { x, out, op } => {
                    let ends = [self.source(x, collective)?, self.target(out, collective)?];
                    self.all_reduce(stream, x.dtype(), ends, x.bytes(), combine(op))
                }
                Call::ReduceScatter { x, out, op } => {
                    let from = self.source(x, collective)?;
                    let to = self.target(out, collective)?;
                    let part = out.bytes();
                    self.reduce_scatter(stream, x.dtype(), from, to, part, combine(op))
                }
                Call::AllGather { x, out } => {
                    let from = self.source(x, collective)?;
                    let to = self.target(out, collective)?;
                    self.all_gather(stream, from, to, x.bytes())
                }
                Call::Barrier => {
                    let at = self.state.pointer().add(BARRIER_OFFSET);
                    let bytes = DType::F32.bytes();
                    self.all_reduce(stream, DType::F32, [at, at], bytes, Combine::Sum)
                }
                Call::Broadcast { .. } => Err(CommError::Argument {
                    collective,
                    reason: "back end `p2p` has no broadcast".to_owned(),
                }),
            }
        }
    }

    fn abort_handle(&self, group: &Group) -> Arc<dyn Abort> {
        Arc::new(AbortGroup { group: group.abort_handle(), inboxes: Arc::clone(&self.inboxes) })
    }

    fn check(&mut self, group: &mut Group) -> Result<()> {
        if let Err(error) = group.failure() {
            // So that no kernel of this rank waits any longer.
            self.own_inbox().abort();
            return Err(error);
        }
        match self.own_inbox().failure() {
            None => Ok(()),
            Some(failure) => self.fail(group, failure),
        }
    }

    fn fused(&mut self) -> Option<&mut dyn FusedAllReduce> {
        Some(self)
    }
}

impl FusedAllReduce for P2pConnection {
    fn serves(&self, dtype: DType, rows: usize, width: usize) -> bool {
        let row_bytes = width * dtype.bytes();
        DTYPES_REDUCED.contains(&dtype)
            && (1..=ROW_BYTES_MAX).contains(&row_bytes)
            && row_bytes.is_multiple_of(ROW_ALIGNMENT)
            && self.slots.rows(row_bytes) > 0
            && rows * row_bytes <= plan::fused_bytes_max(self.slots.world)
    }

    unsafe fn add_rms_norm(
        &mut self,
        group: &mut Group,
        call: AddRmsNorm<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let collective = Collective::AllReduce;
        self.check(group)?;
        let stream = self.queue(stream, collective)?;
        let AddRmsNorm { x, residual, weight, epsilon, out } = call;
        let (dtype, rows, width) = (x.dtype(), x.rows(), x.width());
        let fits = |tensor: &Tensor, count| tensor.dtype() == dtype && tensor.len() == count;
        let all_fit = fits(residual, x.len()) && fits(out, x.len()) && fits(weight, width);
        if !all_fit || !self.serves(dtype, rows, width) {
            let reason = format!(
                "x {x:?}, residual {residual:?}, weight {weight:?} and out {out:?} must be of one \
                 floating-point type, [rows, width] each but the weight [width], and not larger \
                 than `fuses` allows"
            );
            return Err(CommError::Argument { collective, reason });
        }
        let x = self.source(x, collective)?;
        let weight = self.source(weight, collective)?;
        let residual = self.target(residual, collective)?;
        let out = self.target(out, collective)?;
        if [x, weight, residual, out].iter().any(|at| !at.0.is_multiple_of(ROW_ALIGNMENT as u64)) {
            let reason = "the tensors must begin at multiples of 16 bytes".to_owned();
            return Err(CommError::Argument { collective, reason });
        }
        let row_bytes = width * dtype.bytes();
        for piece in plan::ranges(rows, self.slots.rows(row_bytes)) {
            let geometry = geometry_of_rows(piece.len(), row_bytes, self.row_blocks_max);
            let start = piece.start * row_bytes;
            let params = AddRmsNormParams {
                link: self.reduced,
                x: x.add(start),
                residual: residual.add(start),
                weight,
                out: out.add(start),
                row_bytes: row_bytes as u64,
                rows: piece.len() as u32,
                epsilon,
            };
            // SAFETY: the rows lie inside the tensors, which the caller keeps; they fit in a slot.
            unsafe { self.kernels.add_rms_norm(stream, dtype, geometry, &params) }?;
        }
        Ok(())
    }
}

/// # Safety of the methods that enqueue
/// Pointers lead to as many bytes as are said, which the caller keeps until the stream has passed.
impl P2pConnection {
    unsafe fn all_reduce(
        &self,
        stream: &DeviceStream,
        dtype: DType,
        [x, out]: [DevicePointer; 2],
        bytes: usize,
        combine: Combine,
    ) -> Result<()> {
        let large = self.large.as_ref().filter(|_| bytes > self.slots.bytes);
        let (kernels, link, slots, blocks_max) = match large {
            Some(large) => (&large.kernels, large.link, large.slots, large.blocks_max),
            None => (&self.kernels, self.reduced, self.slots, self.blocks_max),
        };
        for plan::Piece { bytes, algorithm } in slots.pieces(bytes) {
            let (x, out) = (x.add(bytes.start), out.add(bytes.start));
            let bytes = bytes.len();
            let part = slots.part(bytes);
            let params = AllReduceParams {
                link,
                x,
                out,
                bytes: bytes as u64,
                part_bytes: part as u64,
                combine,
                unused: 0,
            };
            let share = if algorithm == Algorithm::OneShot { bytes } else { part };
            let geometry = geometry(algorithm, slots.way, share, blocks_max);
            // SAFETY: the caller's range, of which what is sent fits in a slot.
            unsafe { kernels.all_reduce(stream, algorithm, dtype, geometry, &params) }?;
        }
        Ok(())
    }

    unsafe fn reduce_scatter(
        &self,
        stream: &DeviceStream,
        dtype: DType,
        x: DevicePointer,
        out: DevicePointer,
        part: usize,
        combine: Combine,
    ) -> Result<()> {
        for piece in plan::ranges(part, self.slots.scattered()) {
            let params = parts(self.reduced, [x, out], piece, part, combine);
            let bytes = params.part_bytes as usize;
            let geometry = geometry(Algorithm::TwoShot, self.slots.way, bytes, self.blocks_max);
            // SAFETY: a piece of each of the caller's parts, which fits in a slot.
            unsafe { self.kernels.reduce_scatter(stream, dtype, geometry, &params) }?;
        }
        Ok(())
    }

    unsafe fn all_gather(
        &self,
        stream: &DeviceStream,
        x: DevicePointer,
        out: DevicePointer,
        part: usize,
    ) -> Result<()> {
        for piece in plan::ranges(part, self.slots.gathered()) {
            let params = parts(self.moved, [x, out], piece, part, Combine::Sum);
            let bytes = params.part_bytes as usize;
            let geometry = geometry(Algorithm::TwoShot, self.slots.way, bytes, self.blocks_max);
            // SAFETY: as above.
            unsafe { self.kernels.all_gather(stream, geometry, &params) }?;
        }
        Ok(())
    }

    fn queue<'a>(&self, stream: &'a Stream, collective: Collective) -> Result<&'a DeviceStream> {
        stream.device_stream().filter(|queue| *queue.device() == self.device).ok_or_else(|| {
            let ordinal = self.device.ordinal();
            let reason = format!("the stream is not of GPU {ordinal}, which this rank computes on");
            CommError::Argument { collective, reason }
        })
    }

    fn source(&self, x: &Tensor, collective: Collective) -> Result<DevicePointer> {
        check_dense(x, collective)?;
        let here = x.device().is_some_and(|device| *device == self.device);
        x.device_pointer().filter(|_| here).ok_or_else(|| self.elsewhere(x, collective))
    }

    fn target(&self, x: &mut Tensor, collective: Collective) -> Result<DevicePointer> {
        let at = self.source(x, collective)?;
        Ok(x.device_pointer_mut().unwrap_or(at))
    }

    fn elsewhere(&self, x: &Tensor, collective: Collective) -> CommError {
        let reason = format!("{x:?} does not lie on GPU {}", self.device.ordinal());
        CommError::Argument { collective, reason }
    }

    fn own_inbox(&self) -> &Inbox {
        &self.inboxes[self.reduced.rank as usize]
    }

    /// Tells the group what this rank's kernels have reported, and frees the kernels of all ranks.
    #[cold]
    fn fail(&self, group: &mut Group, failure: DeviceFailure) -> Result<()> {
        let reported = match failure.code {
            // If a rank is gone, that is the reason.
            DeviceFailure::TIMED_OUT => group
                .check()
                .and_then(|()| group.fail_waiting(Rank(failure.peer as usize), failure.epoch)),
            _ => {
                group.abort_handle().abort("its GPU was told to stop");
                group.failure()
            }
        };
        // After the report, so that the others find it when their kernels end.
        self.inboxes.iter().for_each(|inbox| inbox.abort());
        reported
    }
}

/// A piece of each of the parts, `part` bytes each, of `x` or `out`.
fn parts(
    link: Link,
    [x, out]: [DevicePointer; 2],
    piece: Range<usize>,
    part: usize,
    combine: Combine,
) -> PartsParams {
    PartsParams {
        link,
        x: x.add(piece.start),
        out: out.add(piece.start),
        part_bytes: piece.len() as u64,
        stride_bytes: part as u64,
        combine,
        unused: 0,
    }
}

const fn combine(op: ReduceOp) -> Combine {
    match op {
        ReduceOp::Sum => Combine::Sum,
        ReduceOp::Max => Combine::Max,
    }
}

struct AbortGroup {
    group: Arc<dyn Abort>,
    inboxes: Arc<[Arc<Inbox>]>,
}

impl Abort for AbortGroup {
    fn abort(&self, reason: &str) {
        // First, so that ranks whose kernels end find the reason.
        self.group.abort(reason);
        self.inboxes.iter().for_each(|inbox| inbox.abort());
    }
}
