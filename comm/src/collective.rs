//! What ranks can do together, and the trait of the hot path.
//!
//! Start with [`Connection`]: what a back end returns once it is connected. Its one method that
//! acts takes a [`Call`], so that a new collective adds a variant and not a method.

use std::sync::Arc;

use paceline_kernels::{DType, Stream, Tensor};

use crate::{Group, Limits, Rank, Result};

/// How an all-reduce or reduce-scatter combines elements.
///
/// Arithmetic is in f32, in the fixed order rank 0, 1, 2, …, and is rounded to the element type
/// once: the result has the same bits on every rank and in every run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The largest; NaN if any element is NaN.
    Max,
}

impl std::fmt::Display for ReduceOp {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Sum => "sum",
            Self::Max => "max",
        })
    }
}

/// The kinds of things that ranks do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Every rank gets the combination of all inputs.
    AllReduce,
    /// Every rank gets its share of the combination of all inputs.
    ReduceScatter,
    /// Every rank gets the inputs of all ranks, one after the other.
    AllGather,
    /// Every rank gets the root's tensor.
    Broadcast,
    /// No rank leaves before all have come.
    Barrier,
    /// Every rank gets the root's message, whose length it did not know.
    BroadcastBytes,
}

impl Collective {
    /// All kinds, in the order of their declaration.
    pub const ALL: [Self; 6] = [
        Self::AllReduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Broadcast,
        Self::Barrier,
        Self::BroadcastBytes,
    ];

    /// The name of the method that starts it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast => "broadcast",
            Self::Barrier => "barrier",
            Self::BroadcastBytes => "broadcast_bytes",
        }
    }

    /// Whether it computes (and so needs a floating-point type) rather than moves.
    pub const fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter)
    }
}

impl std::fmt::Display for Collective {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.name())
    }
}

/// One collective with its tensors. All ranks pass the same variant, sizes and types.
#[derive(Debug)]
pub enum Call<'a> {
    /// Combines `x` of all ranks, in place.
    AllReduce {
        /// Input and output.
        x: &'a mut Tensor,
        /// How to combine.
        op: ReduceOp,
    },
    /// Combines `x` of all ranks into `out`, of the same size and type.
    AllReduceInto {
        /// Input.
        x: &'a Tensor,
        /// Output.
        out: &'a mut Tensor,
        /// How to combine.
        op: ReduceOp,
    },
    /// Combines `x` of all ranks; rank `r` gets the `r`-th of equal parts.
    ReduceScatter {
        /// Input.
        x: &'a Tensor,
        /// Output, world size times smaller than the input.
        out: &'a mut Tensor,
        /// How to combine.
        op: ReduceOp,
    },
    /// Puts the inputs of all ranks one after the other, in order of rank.
    AllGather {
        /// Input.
        x: &'a Tensor,
        /// Output, world size times larger than the input.
        out: &'a mut Tensor,
    },
    /// Copies the root's `x` into that of the others.
    Broadcast {
        /// Input on the root, output elsewhere.
        x: &'a mut Tensor,
        /// The rank that has the data.
        root: Rank,
    },
    /// Waits for all ranks.
    Barrier,
}

impl Call<'_> {
    /// Which collective this is.
    pub fn collective(&self) -> Collective {
        match self {
            Self::AllReduce { .. } | Self::AllReduceInto { .. } => Collective::AllReduce,
            Self::ReduceScatter { .. } => Collective::ReduceScatter,
            Self::AllGather { .. } => Collective::AllGather,
            Self::Broadcast { .. } => Collective::Broadcast,
            Self::Barrier => Collective::Barrier,
        }
    }

    /// Bytes of this rank's input (of the output on a broadcast), and their type.
    pub fn payload(&self) -> (usize, DType) {
        match self {
            Self::AllReduce { x, .. } | Self::Broadcast { x, .. } => (x.bytes(), x.dtype()),
            Self::AllReduceInto { x, .. }
            | Self::ReduceScatter { x, .. }
            | Self::AllGather { x, .. } => (x.bytes(), x.dtype()),
            Self::Barrier => (0, DType::U8),
        }
    }
}

/// A back end that is connected to the other ranks: the hot path.
///
/// Set-up ([`Backend::connect`](crate::Backend::connect), [`Connection::register`]) may block
/// and allocate. [`Connection::enqueue`] allocates nothing and takes no lock.
pub trait Connection: Send {
    /// What this connection can do; the same on all ranks.
    fn limits(&self) -> &Limits;

    /// Starts `call` on `stream`. On the CPU it has finished when this returns; on a device it
    /// is ordered after what the stream holds already, and can be captured in a graph where
    /// [`Limits::graph_capture`] says so.
    ///
    /// # Safety
    /// Until the stream has passed this call, the tensors' memory stays allocated and nobody
    /// else touches it. The policy has checked `call` against [`Connection::limits`].
    ///
    /// # Errors
    /// As [`Communicator`](crate::Communicator)'s methods.
    unsafe fn enqueue(&mut self, group: &mut Group, call: Call<'_>, stream: &Stream) -> Result<()>;

    /// Stops this rank's pending work from another thread.
    fn abort_handle(&self, group: &Group) -> Arc<dyn Abort>;

    /// Looks, without waiting, whether work that was started earlier has failed; if so the group
    /// fails. Back ends whose calls are over when they return have nothing to look for.
    ///
    /// # Errors
    /// The group's first failure.
    fn check(&mut self, group: &mut Group) -> Result<()> {
        let _ = group;
        Ok(())
    }

    /// All-reduce together with what follows it in a model, if the back end has that.
    fn fused(&mut self) -> Option<&mut dyn FusedAllReduce> {
        None
    }

    /// Makes the memory of `tensor` reachable by the peers. All ranks register the same number
    /// of tensors in the same order. Back ends that need no registration accept anything.
    ///
    /// # Errors
    /// Those of the back end.
    fn register(&mut self, group: &mut Group, tensor: &Tensor) -> Result<()> {
        let _ = (group, tensor);
        Ok(())
    }
}

/// The end of a transformer's half layer: what a [`FusedAllReduce`] does in one kernel.
///
/// `residual = round(residual + round(sum of x over ranks))`, then
/// `out = round(residual / sqrt(mean(residual²) + epsilon) · weight)`, statistics in f32. All
/// tensors have one type: f32, f16 or bf16.
#[derive(Debug)]
pub struct AddRmsNorm<'a> {
    /// Input `[rows, width]`.
    pub x: &'a Tensor,
    /// The residual stream `[rows, width]`, in and out: the same on all ranks.
    pub residual: &'a mut Tensor,
    /// `[width]`.
    pub weight: &'a Tensor,
    /// Added to the mean square.
    pub epsilon: f32,
    /// Output `[rows, width]`.
    pub out: &'a mut Tensor,
}

/// All-reduce, residual addition and RMSNorm as one.
pub trait FusedAllReduce {
    /// Whether it takes such tensors, and saves time with them. The same on all ranks.
    fn serves(&self, dtype: DType, rows: usize, width: usize) -> bool;

    /// Starts `call` on `stream`; can be captured in a graph. All ranks pass the same sizes.
    ///
    /// # Safety
    /// As [`Connection::enqueue`].
    ///
    /// # Errors
    /// [`CommError::Argument`](crate::CommError::Argument) if shapes, types or devices do not fit;
    /// otherwise as [`Connection::enqueue`].
    unsafe fn add_rms_norm(
        &mut self,
        group: &mut Group,
        call: AddRmsNorm<'_>,
        stream: &Stream,
    ) -> Result<()>;
}

/// Frees a rank that is stuck in a collective, from any thread.
pub trait Abort: Send + Sync {
    /// Makes the pending and every later collective of the whole group fail with
    /// [`CommError::Aborted`](crate::CommError::Aborted). Only the first failure of a group
    /// counts; `reason` is cut to 200 bytes.
    fn abort(&self, reason: &str);
}
