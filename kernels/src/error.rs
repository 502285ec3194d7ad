//! What can go wrong in this crate because of its input.

use crate::{DType, driver::DriverError, fatbin::FatbinError};

/// Errors of tensors, weights and streams.
///
/// Mismatched shapes inside a forward pass are bugs and assert; these are for what comes from
/// outside (files, command line, machine).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A byte range does not hold what the shape needs.
    #[error(
        "a tensor of shape {shape:?} and type {dtype} needs {needed} bytes at offset {offset}, \
         but its storage has {available}: the file is truncated or its header is wrong"
    )]
    OutOfBounds {
        /// Shape that was asked for.
        shape: Vec<usize>,
        /// Element type.
        dtype: DType,
        /// Bytes that the shape needs.
        needed: usize,
        /// Byte offset of the first element.
        offset: usize,
        /// Bytes that the storage holds.
        available: usize,
    },
    /// The parts of a weight (codes, scales) do not fit each other.
    #[error("{what}: expected shape {expected:?}, found {found:?}; convert the checkpoint again")]
    WeightShape {
        /// Which part is wrong.
        what: &'static str,
        /// The shape that the other parts call for.
        expected: Vec<usize>,
        /// The shape found.
        found: Vec<usize>,
    },
    /// An element type that this part of a weight cannot have.
    #[error("{what} has element type {found}; supported: {supported}")]
    WeightType {
        /// Which part is wrong.
        what: &'static str,
        /// The type found.
        found: DType,
        /// The types supported.
        supported: &'static str,
    },
    /// A shard boundary that the weight's packing cannot be cut at.
    #[error(
        "cannot cut columns {start}..{end} out of a weight packed in groups of {multiple}: \
         choose a tensor-parallel degree that splits on multiples of {multiple}"
    )]
    Unaligned {
        /// First column.
        start: usize,
        /// Column after the last.
        end: usize,
        /// The columns that belong together.
        multiple: usize,
    },
    /// The thread pool could not be started.
    #[error("cannot start {threads} threads ({reason}): ask for fewer threads")]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// The system's reason.
        reason: String,
    },
    /// A device or its driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The kernels for a device are missing.
    #[error(transparent)]
    Fatbin(#[from] FatbinError),
}

/// Result with this crate's error.
pub type Result<T> = std::result::Result<T, KernelError>;
