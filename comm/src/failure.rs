//! The first failure of a group, which every rank reports.
//!
//! Each rank has two records that only it writes (one for the rank itself, one for its abort
//! handle); the region's `first_failure` names the record that counts. It is set once, by
//! compare-and-swap, after the record was written. So nobody reads a half-written record, and a
//! rank that dies while it reports cannot block the others.

use std::{
    sync::atomic::Ordering::{AcqRel, Acquire},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use crate::{
    Abort, Collective, CommError, LossCause, Rank, descriptor::Descriptor, region::Region,
};

const TEXT_BYTES_MAX: usize = 200;

/// A failure as it lies in shared memory.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct FailureRecord {
    kind: u32,
    first_rank: u32,
    second_rank: u32,
    cause: u32,
    index: u32,
    missing_mask: u64,
    waited_ns: u64,
    calls: [Descriptor; 2],
    text_bytes: u32,
    text: [u8; TEXT_BYTES_MAX],
}

const KIND_LOST: u32 = 1;
const KIND_TIMEOUT: u32 = 2;
const KIND_ABORTED: u32 = 3;
const KIND_MISMATCH: u32 = 4;
const KIND_PEER_TIMEOUT: u32 = 5;

const CAUSES: [LossCause; 3] = [LossCause::Died, LossCause::Panicked, LossCause::Left];

/// What can make a group fail.
#[derive(Clone, Copy)]
pub(crate) enum Failure<'a> {
    Lost {
        rank: Rank,
        cause: LossCause,
    },
    Timeout {
        waited: Duration,
        missing_mask: u64,
    },
    Aborted {
        by: Rank,
        reason: &'a str,
    },
    Mismatch {
        ranks: [Rank; 2],
        calls: [Descriptor; 2],
    },
    /// A GPU gave up in its collective number `index`.
    PeerTimeout {
        rank: Rank,
        peer: Rank,
        index: u32,
        limit: Duration,
    },
}

/// Which of a rank's two records.
#[derive(Clone, Copy)]
pub(crate) enum Reporter {
    Rank = 0,
    AbortHandle = 1,
}

impl Region {
    /// Makes `failure` the group's, unless it has one already, and wakes everybody. Each
    /// reporter of a rank calls this at most once at a time.
    pub(crate) fn report(&self, rank: usize, reporter: Reporter, failure: Failure<'_>) {
        if self.first_failure().load(Acquire) != 0 {
            return;
        }
        let cell = &self.block(rank).failures[reporter as usize];
        // SAFETY: only this reporter writes the record, and nobody reads it before the
        // compare-and-swap below names it, after which it is never written again.
        unsafe { cell.get().write(FailureRecord::from(failure)) };
        let name = (2 * rank + reporter as usize + 1) as u32;
        let _ = self.first_failure().compare_exchange(0, name, AcqRel, Acquire);
        self.wake_all();
    }

    /// The group's failure, as the error of a rank that is in `collective`.
    pub(crate) fn failure(&self, collective: Collective) -> Option<CommError> {
        let index = self.first_failure().load(Acquire).checked_sub(1)? as usize;
        let cell = &self.block(index / 2).failures[index % 2];
        // SAFETY: the record was completed before it was named, and is never written again.
        let record = unsafe { cell.get().read() };
        Some(record.error(collective))
    }
}

impl From<Failure<'_>> for FailureRecord {
    fn from(failure: Failure<'_>) -> Self {
        let mut record = Self {
            kind: 0,
            first_rank: 0,
            second_rank: 0,
            cause: 0,
            index: 0,
            missing_mask: 0,
            waited_ns: 0,
            calls: [Descriptor::barrier(); 2],
            text_bytes: 0,
            text: [0; TEXT_BYTES_MAX],
        };
        match failure {
            Failure::Lost { rank, cause } => {
                record.kind = KIND_LOST;
                record.first_rank = rank.0 as u32;
                record.cause = CAUSES.iter().position(|&known| known == cause).unwrap_or(0) as u32;
            }
            Failure::Timeout { waited, missing_mask } => {
                record.kind = KIND_TIMEOUT;
                record.waited_ns = nanoseconds(waited);
                record.missing_mask = missing_mask;
            }
            Failure::Aborted { by, reason } => {
                record.kind = KIND_ABORTED;
                record.first_rank = by.0 as u32;
                let text = cut(reason, TEXT_BYTES_MAX).as_bytes();
                record.text[..text.len()].copy_from_slice(text);
                record.text_bytes = text.len() as u32;
            }
            Failure::Mismatch { ranks: [first, second], calls } => {
                record.kind = KIND_MISMATCH;
                record.first_rank = first.0 as u32;
                record.second_rank = second.0 as u32;
                record.calls = calls;
            }
            Failure::PeerTimeout { rank, peer, index, limit } => {
                record.kind = KIND_PEER_TIMEOUT;
                record.first_rank = rank.0 as u32;
                record.second_rank = peer.0 as u32;
                record.index = index;
                record.waited_ns = nanoseconds(limit);
            }
        }
        record
    }
}

impl FailureRecord {
    fn error(&self, collective: Collective) -> CommError {
        let rank = Rank(self.first_rank as usize);
        match self.kind {
            KIND_LOST => {
                let cause = CAUSES.get(self.cause as usize).copied().unwrap_or(LossCause::Died);
                CommError::RankLost { rank, cause, collective }
            }
            KIND_TIMEOUT => CommError::Timeout {
                collective,
                waited: Duration::from_nanos(self.waited_ns),
                missing: (0..64)
                    .filter(|rank| self.missing_mask >> rank & 1 != 0)
                    .map(Rank)
                    .collect(),
            },
            KIND_PEER_TIMEOUT => CommError::PeerTimeout {
                rank,
                peer: Rank(self.second_rank as usize),
                index: self.index,
                limit: Duration::from_nanos(self.waited_ns),
            },
            KIND_MISMATCH => CommError::Mismatch {
                first: self.calls[0].facts(rank),
                second: self.calls[1].facts(Rank(self.second_rank as usize)),
            },
            _ => {
                let text = &self.text[..TEXT_BYTES_MAX.min(self.text_bytes as usize)];
                let reason = String::from_utf8_lossy(text).into_owned();
                CommError::Aborted { by: rank, reason }
            }
        }
    }
}

/// The abort handle of a rank in a region.
pub(crate) struct RegionAbort {
    region: Arc<Region>,
    rank: usize,
    /// Held while the record is written, so that two threads do not write it at once.
    used: Mutex<bool>,
}

impl RegionAbort {
    pub(crate) fn over(region: Arc<Region>, rank: usize) -> Self {
        Self { region, rank, used: Mutex::new(false) }
    }
}

impl Abort for RegionAbort {
    fn abort(&self, reason: &str) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if !std::mem::replace(&mut *used, true) {
            let failure = Failure::Aborted { by: Rank(self.rank), reason };
            self.region.report(self.rank, Reporter::AbortHandle, failure);
        }
    }
}

/// The abort handle of a group of one, where nobody ever waits.
pub(crate) struct NothingToAbort;

impl Abort for NothingToAbort {
    fn abort(&self, _reason: &str) {}
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The start of `text`, at most `bytes_max` long, without cutting a character.
fn cut(text: &str, bytes_max: usize) -> &str {
    let limit = bytes_max.min(text.len());
    let end = (0..=limit).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::{Layout, SLOT_BYTES_MIN};

    fn region() -> Arc<Region> {
        let layout = Layout { world_size: 3, slot_bytes: SLOT_BYTES_MIN };
        Arc::new(Region::anonymous(layout).unwrap())
    }

    #[test]
    fn only_the_first_failure_counts() {
        let region = region();
        assert_eq!(region.failure(Collective::Barrier), None);
        let waited = Duration::from_millis(7);
        region.report(2, Reporter::Rank, Failure::Timeout { waited, missing_mask: 0b11 });
        region.report(0, Reporter::Rank, Failure::Lost { rank: Rank(2), cause: LossCause::Died });
        let expected = CommError::Timeout {
            collective: Collective::AllGather,
            waited,
            missing: vec![Rank(0), Rank(1)],
        };
        assert_eq!(region.failure(Collective::AllGather), Some(expected));
    }

    #[test]
    fn what_a_gpu_reports_survives_shared_memory() {
        let region = region();
        let limit = Duration::from_millis(300);
        let failure = Failure::PeerTimeout { rank: Rank(2), peer: Rank(1), index: 77, limit };
        region.report(2, Reporter::Rank, failure);
        let error = CommError::PeerTimeout { rank: Rank(2), peer: Rank(1), index: 77, limit };
        assert_eq!(region.failure(Collective::Barrier), Some(error));
    }

    #[test]
    fn a_long_reason_is_cut_between_characters() {
        let region = region();
        let handle = RegionAbort::over(region.clone(), 1);
        handle.abort(&"ä".repeat(101).replacen('ä', "a", 1));
        handle.abort("too late");
        let Some(CommError::Aborted { by, reason }) = region.failure(Collective::Barrier) else {
            panic!("not aborted");
        };
        assert_eq!(by, Rank(1));
        assert_eq!(reason, format!("a{}", "ä".repeat(99)));
    }
}
