//! How many blocks and threads a kernel of [`super::Kernels`] gets: pure functions.
//!
//! Invariant: the answer depends on the arguments only, so it is the same on all ranks; any answer
//! gives the same result. The numbers are those that were fastest on an H200 with two virtual
//! ranks, rows of 14 KiB (`docs/results/2026-12-01-h200/`).

use super::{VECTOR_BYTES, Way};

/// How ranks combine a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// Everything goes to everybody.
    OneShot,
    /// Each rank combines one part, and passes the result on.
    TwoShot,
}

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Blocks.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
}

/// The longest row of [`super::Kernels::add_rms_norm`]: two vectors for each of 1024 threads.
pub const ROW_BYTES_MAX: usize = 2 * 1024 * VECTOR_BYTES;

/// Blocks beyond which more do not help; an outbox has flags for as many.
pub(super) const BLOCKS_MAX: u32 = 64;
/// Most threads of a block, but of the fused kernel.
pub(super) const THREADS_MAX: u32 = 512;
pub(super) const ROW_THREADS_MAX: u32 = 1024;

/// The launch for `bytes` (a part's, where ranks share the work), with at most `blocks_max` blocks.
///
/// One vector a thread, in small blocks first, as they start sooner. Over PCIe fewer blocks
/// suffice, and each costs a fence.
pub fn geometry(algorithm: Algorithm, way: Way, bytes: usize, blocks_max: u32) -> Geometry {
    // Blocks that stay small, blocks at most.
    let (threads_small, blocks_small, blocks_most) = match (way, algorithm) {
        (Way::Inbox, Algorithm::OneShot) => (256, 32, BLOCKS_MAX),
        (Way::Inbox, Algorithm::TwoShot) => (256, BLOCKS_MAX, BLOCKS_MAX),
        (Way::Outbox, _) => (256, BLOCKS_MAX, BLOCKS_MAX),
        (Way::HostOutbox, _) => (128, 16, 16),
    };
    let blocks_most = blocks_most.min(blocks_max).max(1);
    let vectors = bytes.div_ceil(VECTOR_BYTES);
    let blocks_needed = |threads: u32| vectors.div_ceil(threads as usize);
    let mut threads: u32 = threads_small;
    while threads < THREADS_MAX && blocks_needed(threads) > blocks_small.min(blocks_most) as usize {
        threads *= 2;
    }
    let blocks = blocks_needed(threads).clamp(1, blocks_most as usize);
    Geometry { blocks: blocks as u32, threads }
}

/// The launch for `rows` rows of `row_bytes` (at most [`ROW_BYTES_MAX`]): a block for each row, and
/// in it a thread for one or two vectors, in whole warps.
pub fn geometry_of_rows(rows: usize, row_bytes: usize, blocks_max: u32) -> Geometry {
    let vectors = row_bytes.div_ceil(VECTOR_BYTES);
    let threads = vectors.next_multiple_of(32).clamp(32, ROW_THREADS_MAX as usize);
    assert!(vectors <= 2 * threads, "a row of {row_bytes} bytes is too long");
    let blocks = rows.clamp(1, BLOCKS_MAX.min(blocks_max).max(1) as usize);
    Geometry { blocks: blocks as u32, threads: threads as u32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: usize = 14 << 10;

    #[test]
    fn launches_are_near_those_that_were_fastest() {
        let at = |algorithm, way, bytes| {
            let Geometry { blocks, threads } = geometry(algorithm, way, bytes, 64);
            (blocks, threads)
        };
        let one_shot = |rows| at(Algorithm::OneShot, Way::Inbox, rows * ROW);
        assert_eq!([1, 2, 4, 8].map(one_shot), [(4, 256), (7, 256), (14, 256), (28, 256)]);
        assert_eq!([16, 32, 64].map(one_shot), [(28, 512), (56, 512), (64, 512)]);
        // Halves, as two ranks share the work.
        let two_shot = |rows| at(Algorithm::TwoShot, Way::Inbox, rows * ROW / 2);
        assert_eq!([4, 8, 16, 32].map(two_shot), [(7, 256), (14, 256), (28, 256), (56, 256)]);
        assert_eq!(two_shot(64), (56, 512));
        let staged = |rows| at(Algorithm::OneShot, Way::HostOutbox, rows * ROW);
        assert_eq!([1, 2, 4, 8].map(staged), [(7, 128), (14, 128), (14, 256), (14, 512)]);
        assert_eq!(staged(64), (16, 512));
    }

    #[test]
    fn no_launch_is_empty_or_larger_than_allowed() {
        for blocks_max in [0, 1, 3, 8, 64, 1000] {
            for bytes in [0, 1, 16, 17, ROW, 1 << 20, 1 << 40] {
                for way in [Way::Inbox, Way::Outbox, Way::HostOutbox] {
                    for algorithm in [Algorithm::OneShot, Algorithm::TwoShot] {
                        let Geometry { blocks, threads } =
                            geometry(algorithm, way, bytes, blocks_max);
                        assert!((1..=blocks_max.clamp(1, 64)).contains(&blocks));
                        assert!((128..=512).contains(&threads));
                    }
                }
            }
        }
    }

    #[test]
    fn a_row_has_enough_threads_in_whole_warps() {
        for row_bytes in [16, 528, ROW, 16384, ROW_BYTES_MAX] {
            let Geometry { blocks, threads } = geometry_of_rows(100, row_bytes, 33);
            assert_eq!(blocks, 33);
            assert_eq!(threads % 32, 0);
            assert!(2 * threads as usize >= row_bytes.div_ceil(VECTOR_BYTES));
        }
        let fastest = Geometry { blocks: 5, threads: 896 };
        assert_eq!(geometry_of_rows(5, ROW, 64), fastest);
    }
}
