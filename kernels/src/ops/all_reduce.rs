//! Launching the kernels by which the GPUs of a group combine and move tensors.
//!
//! The kernels and their parameters are in `cuda/all_reduce/`; the protocol, and why it is right,
//! in `docs/all-reduce.md`. Who connects the ranks fills a [`Link`] and keeps its memory.
//! Invariant: the structs here are byte for byte those of the CUDA sources; sizes are compared when
//! this crate is compiled. Start with [`Kernels`].

use crate::{
    DType, Result,
    driver::{self, Device, DevicePointer, DeviceStream, Function, Launch, Module},
    fatbin::fatbin,
};

mod geometry;

pub use geometry::{Algorithm, Geometry, ROW_BYTES_MAX, geometry, geometry_of_rows};

/// The most ranks that a [`Link`] holds.
pub const RANKS_MAX: usize = 16;

/// Bytes of a vector: what one thread moves at a time.
const VECTOR_BYTES: usize = 16;

/// A rank's counters, in its own device memory. All zero at first.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct State {
    /// Calls that this rank has begun.
    pub epoch: u32,
    /// Not 0 once a call failed.
    pub failed: u32,
    /// Blocks of the running call that have read the epoch.
    pub arrived: u32,
    /// Fills a cache line.
    pub unused: [u32; 29],
}

/// What went wrong first on a rank, in pinned memory. All zero at first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Failure {
    /// 0 if nothing did, else [`Failure::TIMED_OUT`] or [`Failure::ABORTED`]; written last.
    pub code: u32,
    /// The rank.
    pub rank: u32,
    /// The rank that it waited for.
    pub peer: u32,
    /// The call, counted from 1.
    pub epoch: u32,
}

impl Failure {
    /// The peer did not come within the link's time limit.
    pub const TIMED_OUT: u32 = 1;
    /// The abort word was set.
    pub const ABORTED: u32 = 2;
}

/// How a rank reaches its peers, in one [`Way`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Link {
    /// By rank, as this rank's device reaches it: the inbox
    /// `[parity 2][stage 2][source rank][slot_bytes]`, or the outbox, [`OUTBOX_FLAG_BYTES`] and
    /// then `[parity 2][stage 2][slot_bytes]`.
    pub boxes: [DevicePointer; RANKS_MAX],
    /// This rank's [`State`].
    pub state: DevicePointer,
    /// This rank's [`Failure`], in pinned memory.
    pub failure: DevicePointer,
    /// A word in pinned memory: not 0 ends all waits.
    pub abort: DevicePointer,
    /// Longest wait for a peer.
    pub timeout_ns: u64,
    /// Bytes of a slot, a multiple of 2048.
    pub slot_bytes: u64,
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub world: u32,
}

/// How ranks combine elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Combine {
    /// The sum.
    Sum = 0,
    /// The largest; NaN if any is NaN.
    Max = 1,
}

/// Parameters of [`Kernels::all_reduce`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct AllReduceParams {
    /// The ranks.
    pub link: Link,
    /// Input.
    pub x: DevicePointer,
    /// Output; may be the input.
    pub out: DevicePointer,
    /// Bytes of the input.
    pub bytes: u64,
    /// Two shots: bytes of each rank's part, a multiple of 16; the last parts may be shorter or
    /// empty.
    pub part_bytes: u64,
    /// How to combine.
    pub combine: Combine,
    /// Padding.
    pub unused: u32,
}

/// Parameters of [`Kernels::reduce_scatter`] and [`Kernels::all_gather`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PartsParams {
    /// The ranks.
    pub link: Link,
    /// Input: a part for each rank; of [`Kernels::all_gather`] this rank's.
    pub x: DevicePointer,
    /// Output: a part for each rank; of [`Kernels::reduce_scatter`] this rank's.
    pub out: DevicePointer,
    /// Bytes of a part.
    pub part_bytes: u64,
    /// Bytes from one part to the next in the tensor that holds all.
    pub stride_bytes: u64,
    /// How to combine.
    pub combine: Combine,
    /// Padding.
    pub unused: u32,
}

/// Parameters of [`Kernels::add_rms_norm`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct AddRmsNormParams {
    /// The ranks.
    pub link: Link,
    /// Input `[rows, width]`.
    pub x: DevicePointer,
    /// Residual stream `[rows, width]`, in and out.
    pub residual: DevicePointer,
    /// Weight `[width]`.
    pub weight: DevicePointer,
    /// Output `[rows, width]`; may be the input.
    pub out: DevicePointer,
    /// Bytes of a row: a multiple of 16, as all pointers are; at most [`ROW_BYTES_MAX`].
    pub row_bytes: u64,
    /// Number of rows, as many as a slot carries or fewer.
    pub rows: u32,
    /// Added to the mean square.
    pub epsilon: f32,
}

// As the `static_assert`s of the CUDA sources.
const _: () = assert!(size_of::<State>() == 128);
const _: () = assert!(size_of::<Failure>() == 16);
const _: () = assert!(size_of::<Link>() == 176);
const _: () = assert!(size_of::<AllReduceParams>() == 216);
const _: () = assert!(size_of::<PartsParams>() == 216);
const _: () = assert!(size_of::<AddRmsNormParams>() == 224);

/// Where ranks put what others read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    /// Each rank writes into the inboxes of the others, in the memory of their GPUs. Of elements to
    /// combine, a word of all ones means "nothing yet": an inbox is all ones at first. What is only
    /// gathered travels in packets, through an inbox of its own that is all zeros at first.
    Inbox,
    /// Each rank writes into its outbox, in the memory of its own GPU, and reads those of the
    /// others: fewer bytes than through inboxes, but a fence and a second way. An outbox is all
    /// zeros at first.
    Outbox,
    /// As [`Way::Outbox`], in pinned host memory.
    HostOutbox,
}

/// Bytes of the flags at the start of an outbox.
pub const OUTBOX_FLAG_BYTES: usize = 2 * geometry::BLOCKS_MAX as usize * 128;

/// Packets carry 3 words in 16 bytes, for the 32 lanes of a warp side by side.
const PACKETS_PAYLOAD_BYTES: usize = 32 * 3 * VECTOR_BYTES;
const PACKETS_BYTES: usize = 32 * 4 * VECTOR_BYTES;

impl Way {
    /// The longest piece of a part that one [`Kernels::reduce_scatter`] of `world` ranks takes,
    /// with slots of `slot_bytes` (a multiple of 2048).
    pub const fn scatter_bytes_max(self, slot_bytes: usize, world: usize) -> usize {
        match self {
            Self::Inbox => slot_bytes,
            // All parts lie in one slot, each from a vector on.
            Self::Outbox | Self::HostOutbox => slot_bytes / world / VECTOR_BYTES * VECTOR_BYTES,
        }
    }

    /// The longest part of one [`Kernels::all_gather`].
    pub const fn gather_bytes_max(self, slot_bytes: usize) -> usize {
        match self {
            Self::Inbox => slot_bytes / PACKETS_BYTES * PACKETS_PAYLOAD_BYTES,
            Self::Outbox | Self::HostOutbox => slot_bytes,
        }
    }

    /// The most bytes of one [`Kernels::all_reduce`] of `world` ranks in two steps.
    pub const fn two_shot_bytes_max(self, slot_bytes: usize, world: usize) -> usize {
        match self {
            Self::Inbox => slot_bytes * world,
            Self::Outbox | Self::HostOutbox => slot_bytes,
        }
    }
}

/// The world for which a kernel is compiled, as few registers as it then needs; 0 stands for any.
const fn compiled_world(world: usize) -> usize {
    match world {
        2 | 4 | 8 => world,
        _ => 0,
    }
}

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// One kernel for each type of [`DTYPES`].
struct Typed([Function; DTYPES.len()]);

impl Typed {
    fn load(module: &Module, operation: &str, world: usize) -> driver::Result<Self> {
        let load = |dtype| module.function(&format!("{operation}_{dtype}_w{world}"));
        let [f32, f16, bf16] = DTYPES.map(load);
        Ok(Self([f32?, f16?, bf16?]))
    }

    fn of(&self, dtype: DType) -> &Function {
        let place = DTYPES.iter().position(|&known| known == dtype);
        &self.0[place.expect("callers combine f32, f16 and bf16 only")]
    }
}

/// The kernels for one device, number of ranks and way.
///
/// Each method enqueues one kernel, as a programmatic dependent of what is before it.
///
/// # Safety of the methods
/// Every address in the parameters is valid until the kernel has ended, and as long as a graph that
/// it was captured into is launched. All ranks enqueue the same kernels in the same order, with the
/// same sizes and geometry, and their links are of these kernels' way ([`Kernels::all_gather`] over
/// inboxes has its own). What is sent fits in a slot, as [`Way`] says. All blocks of two kernels of
/// each rank that shares a device must fit on it at once, as kernels of different ranks wait for
/// each other: see [`Kernels::blocks_at_once`].
///
/// # Errors of the methods
/// If the driver refuses.
pub struct Kernels {
    one_shot: Typed,
    two_shot: Typed,
    reduce_scatter: Typed,
    add_rms_norm: Typed,
    all_gather: Function,
}

impl Kernels {
    /// Loads the kernels onto `device`.
    ///
    /// # Errors
    /// If this build has none ([`KernelError::Fatbin`](crate::KernelError::Fatbin)), or none that
    /// run on `device`.
    pub fn load(device: &Device, way: Way, world: usize) -> Result<Self> {
        let module =
            |name: &str| -> Result<Module> { Ok(Module::load(device, fatbin(&in_folder(name))?)?) };
        let world = compiled_world(world);
        let add_rms_norm = module("add_rms_norm")?;
        Ok(match way {
            Way::Inbox => {
                let two_shot = module("two_shot")?;
                Self {
                    one_shot: Typed::load(&module("one_shot")?, "all_reduce_one_shot", world)?,
                    two_shot: Typed::load(&two_shot, "all_reduce_two_shot", world)?,
                    reduce_scatter: Typed::load(&two_shot, "reduce_scatter_inbox", 0)?,
                    add_rms_norm: Typed::load(
                        &add_rms_norm,
                        "all_reduce_add_rms_norm_inbox",
                        world,
                    )?,
                    all_gather: module("all_gather")?.function("all_gather_inbox")?,
                }
            }
            Way::Outbox | Way::HostOutbox => {
                let staged = module("staged")?;
                Self {
                    one_shot: Typed::load(&staged, "all_reduce_staged_one_shot", world)?,
                    two_shot: Typed::load(&staged, "all_reduce_staged_two_shot", world)?,
                    reduce_scatter: Typed::load(&staged, "reduce_scatter_staged", 0)?,
                    add_rms_norm: Typed::load(
                        &add_rms_norm,
                        "all_reduce_add_rms_norm_staged",
                        world,
                    )?,
                    all_gather: staged.function("all_gather_staged")?,
                }
            }
        })
    }

    /// Whether this build has the kernels.
    ///
    /// # Errors
    /// Why not.
    pub fn available() -> Result<()> {
        FATBINS.iter().try_for_each(|name| Ok(fatbin(&in_folder(name)).map(drop)?))
    }

    /// Blocks of the largest launches that one multiprocessor holds at once: of the all-reduces,
    /// and of the fused kernel.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn blocks_at_once(&self) -> driver::Result<[u32; 2]> {
        let least = |kernels: &[&Typed], threads| {
            let kernels = kernels.iter().flat_map(|typed| &typed.0);
            kernels
                .map(|kernel| kernel.blocks_per_multiprocessor(threads, 0))
                .try_fold(u32::MAX, |least, blocks| Ok(least.min(blocks?)))
        };
        let all = [&self.one_shot, &self.two_shot, &self.reduce_scatter];
        let gather = self.all_gather.blocks_per_multiprocessor(geometry::THREADS_MAX, 0)?;
        Ok([
            least(&all, geometry::THREADS_MAX)?.min(gather),
            least(&[&self.add_rms_norm], geometry::ROW_THREADS_MAX)?,
        ])
    }

    /// All-reduce in one step, or in two, of which each rank does one part.
    ///
    /// # Errors
    /// See [`Kernels`].
    ///
    /// # Safety
    /// See [`Kernels`].
    pub unsafe fn all_reduce(
        &self,
        stream: &DeviceStream,
        algorithm: Algorithm,
        dtype: DType,
        geometry: Geometry,
        params: &AllReduceParams,
    ) -> driver::Result<()> {
        let kernels = match algorithm {
            Algorithm::OneShot => &self.one_shot,
            Algorithm::TwoShot => &self.two_shot,
        };
        // SAFETY: the kernel takes these parameters and waits for the one before; the rest is the
        // caller's.
        unsafe { kernels.of(dtype).launch(stream, geometry.into(), params) }
    }

    /// The first of the two steps alone.
    ///
    /// # Errors
    /// See [`Kernels`].
    ///
    /// # Safety
    /// See [`Kernels`].
    pub unsafe fn reduce_scatter(
        &self,
        stream: &DeviceStream,
        dtype: DType,
        geometry: Geometry,
        params: &PartsParams,
    ) -> driver::Result<()> {
        // SAFETY: as in `all_reduce`.
        unsafe { self.reduce_scatter.of(dtype).launch(stream, geometry.into(), params) }
    }

    /// Every rank gets the parts of all, of any bytes.
    ///
    /// # Errors
    /// See [`Kernels`].
    ///
    /// # Safety
    /// See [`Kernels`].
    pub unsafe fn all_gather(
        &self,
        stream: &DeviceStream,
        geometry: Geometry,
        params: &PartsParams,
    ) -> driver::Result<()> {
        // SAFETY: as in `all_reduce`.
        unsafe { self.all_gather.launch(stream, geometry.into(), params) }
    }

    /// All-reduce in one step, sum only, with `residual = round(residual + round(sum))` and
    /// `out = round(residual / rms(residual) * weight)`.
    ///
    /// # Errors
    /// See [`Kernels`].
    ///
    /// # Safety
    /// See [`Kernels`]. The geometry is that of [`geometry_of_rows`].
    pub unsafe fn add_rms_norm(
        &self,
        stream: &DeviceStream,
        dtype: DType,
        geometry: Geometry,
        params: &AddRmsNormParams,
    ) -> driver::Result<()> {
        // SAFETY: as in `all_reduce`.
        unsafe { self.add_rms_norm.of(dtype).launch(stream, geometry.into(), params) }
    }
}

const FATBINS: [&str; 5] = ["one_shot", "two_shot", "all_gather", "staged", "add_rms_norm"];

fn in_folder(name: &str) -> String {
    format!("all_reduce/{name}")
}

impl From<Geometry> for Launch {
    fn from(Geometry { blocks, threads }: Geometry) -> Self {
        Self { dependent: true, ..Self::new(blocks, threads) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names that macros write out in the sources, so looked up in what the macros are given.
    #[test]
    fn every_name_is_one_that_the_sources_make() {
        let instances = include_str!("../../cuda/all_reduce/instances.cuh");
        for world in 1..=RANKS_MAX {
            let compiled = compiled_world(world);
            assert!(compiled == 0 || compiled == world);
            assert!(instances.contains(&format!("PACELINE_FOR_TYPES(DO, name, {compiled})")));
        }
        for dtype in DTYPES {
            assert!(instances.contains(&format!(", {dtype}, world)")), "{dtype}");
        }
    }

    #[test]
    fn slots_hold_what_they_are_said_to() {
        for slot in [2048, 4096, 2 << 20] {
            for world in [2, 3, 8, 16] {
                let part = Way::HostOutbox.scatter_bytes_max(slot, world);
                assert!(part.is_multiple_of(VECTOR_BYTES) && part * world <= slot);
                assert!((part + VECTOR_BYTES) * world > slot);
            }
            let packets = Way::Inbox.gather_bytes_max(slot);
            assert_eq!(packets / PACKETS_PAYLOAD_BYTES * PACKETS_BYTES, slot);
        }
    }
}
