//! Into which calls of which algorithm a collective is cut: pure functions.
//!
//! Invariant: the answer depends on the arguments only, which are the same on all ranks.

use std::ops::Range;

use paceline_kernels::ops::all_reduce::{Algorithm, Way};

/// What kernels move at a time.
const VECTOR_BYTES: usize = 16;

/// Up to how many bytes each rank sends everything to everybody. Beyond, sharing the work costs a
/// second step but sends less. For two ranks it is where the two took the same time on an H200 with
/// virtual ranks (`docs/results/2026-12-01-h200/launch-shapes.txt`); the bounds of more ranks are
/// estimates from the bytes sent.
pub(super) const fn one_shot_bytes_max(way: Way, world: usize) -> usize {
    match (way, world) {
        (Way::Inbox, ..=2) => 700_000,
        (Way::Inbox, 3..=4) => 128 << 10,
        (Way::Inbox, _) => 64 << 10,
        // Two shots send as much between two ranks.
        (Way::Outbox, ..=2) => usize::MAX,
        (Way::Outbox, _) => 64 << 10,
        (Way::HostOutbox, ..=2) => 224 << 10,
        (Way::HostOutbox, 3..=4) => 64 << 10,
        (Way::HostOutbox, _) => 32 << 10,
    }
}

/// Up to how many bytes the fused kernel is worth it, which sends everything to everybody: between
/// two ranks always what two shots send, with more ranks more.
pub(super) const fn fused_bytes_max(world: usize) -> usize {
    match world {
        ..=2 => 4 << 20,
        3..=4 => 256 << 10,
        _ => 128 << 10,
    }
}

/// A part of an all-reduce that one kernel does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) bytes: Range<usize>,
    pub(super) algorithm: Algorithm,
}

/// What slots hold, and for how many ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slots {
    pub(super) way: Way,
    pub(super) world: usize,
    /// A multiple of 2048.
    pub(super) bytes: usize,
}

impl Slots {
    /// The algorithm for `bytes`.
    pub(super) fn choose(self, bytes: usize) -> Algorithm {
        if bytes <= one_shot_bytes_max(self.way, self.world).min(self.bytes) {
            Algorithm::OneShot
        } else {
            Algorithm::TwoShot
        }
    }

    /// The pieces of an all-reduce of `bytes`.
    pub(super) fn pieces(self, bytes: usize) -> impl Iterator<Item = Piece> {
        ranges(bytes, self.way.two_shot_bytes_max(self.bytes, self.world))
            .map(move |bytes| Piece { algorithm: self.choose(bytes.len()), bytes })
    }

    /// Bytes of each part but the last ones, if ranks share the work on `bytes`.
    pub(super) fn part(self, bytes: usize) -> usize {
        bytes.div_ceil(self.world).next_multiple_of(VECTOR_BYTES)
    }

    /// How many rows of `row_bytes` a slot carries.
    pub(super) fn rows(self, row_bytes: usize) -> usize {
        self.bytes / row_bytes.max(1)
    }

    /// The longest piece of a part that is combined in one call.
    pub(super) fn scattered(self) -> usize {
        self.way.scatter_bytes_max(self.bytes, self.world)
    }

    /// The longest piece of a part that is gathered in one call.
    pub(super) fn gathered(self) -> usize {
        self.way.gather_bytes_max(self.bytes)
    }
}

/// `0..total` in ranges of `longest`, the last perhaps shorter.
pub(super) fn ranges(total: usize, longest: usize) -> impl Iterator<Item = Range<usize>> {
    (0..total).step_by(longest).map(move |start| start..total.min(start + longest))
}

/// Blocks that a kernel may have, of which a multiprocessor holds `at_once`: with two kernels of
/// each rank on every GPU at once, each block finds room, so that kernels that wait never keep out
/// those that they wait for.
pub(super) fn blocks_max(multiprocessors: u32, at_once: u32, ranks_on_device: usize) -> u32 {
    multiprocessors * at_once / (2 * ranks_on_device as u32).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAYS: [Way; 3] = [Way::Inbox, Way::Outbox, Way::HostOutbox];

    #[test]
    fn the_algorithm_follows_the_size() {
        for way in WAYS {
            for world in [2, 3, 4, 8, 16] {
                let slots = Slots { way, world, bytes: 2 << 20 };
                let most = one_shot_bytes_max(way, world).min(slots.bytes);
                assert_eq!(slots.choose(0), Algorithm::OneShot);
                assert_eq!(slots.choose(most), Algorithm::OneShot);
                assert_eq!(slots.choose(most + 1), Algorithm::TwoShot);
            }
            let small = Slots { way, world: 2, bytes: 2048 };
            assert_eq!(small.choose(2048), Algorithm::OneShot);
            assert_eq!(small.choose(2049), Algorithm::TwoShot);
        }
    }

    #[test]
    fn pieces_cover_everything_once_and_fit_in_slots() {
        for way in WAYS {
            for (world, slot) in [(2, 2048), (3, 4096), (8, 2 << 20), (16, 6144)] {
                let slots = Slots { way, world, bytes: slot };
                for bytes in [0, 1, 2, 1535, 1536, 1537, 65_536, 900_001, 5_000_003] {
                    let mut end = 0;
                    for piece in slots.pieces(bytes) {
                        assert_eq!(piece.bytes.start, end);
                        assert_eq!(piece.bytes.start % VECTOR_BYTES, 0);
                        end = piece.bytes.end;
                        let part = slots.part(piece.bytes.len());
                        let sent = match (piece.algorithm, way) {
                            (Algorithm::TwoShot, Way::Inbox) => part,
                            _ => piece.bytes.len(),
                        };
                        assert!(sent <= slot, "{piece:?} in {slots:?}");
                        assert!(part * world >= piece.bytes.len());
                    }
                    assert_eq!(end, bytes);
                }
            }
        }
    }

    #[test]
    fn blocks_of_all_ranks_find_room() {
        assert_eq!(blocks_max(132, 1, 1), 66);
        for ranks in 1..=16 {
            for at_once in 1..=4 {
                let blocks = blocks_max(132, at_once, ranks) as usize;
                assert!(blocks * 2 * ranks <= 132 * at_once as usize);
            }
        }
        assert_eq!(blocks_max(20, 1, 16), 0);
    }
}
