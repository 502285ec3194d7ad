//! The two words that describe a call to the other ranks.
//!
//! Invariant: equal calls have equal words, so comparing is two integer comparisons.

use paceline_kernels::DType;

use crate::{CallFacts, Collective, Rank, ReduceOp};

const OPS: [ReduceOp; 2] = [ReduceOp::Sum, ReduceOp::Max];
const NONE: u8 = u8::MAX;

/// A call, packed. Byte 0 of `what` is the collective, 1 the operation, 2 the element type,
/// 3 the root; the upper half is the index of the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Descriptor {
    pub(crate) what: u64,
    pub(crate) count: u64,
}

impl Descriptor {
    pub(crate) fn reduction(
        collective: Collective,
        op: ReduceOp,
        dtype: DType,
        count: usize,
    ) -> Self {
        let op = OPS.iter().position(|&known| known == op).map_or(NONE, |index| index as u8);
        Self::pack(collective, [op, code(dtype), NONE], count)
    }

    pub(crate) fn movement(
        collective: Collective,
        dtype: DType,
        root: Option<Rank>,
        count: usize,
    ) -> Self {
        Self::pack(collective, [NONE, code(dtype), root.map_or(NONE, |root| root.0 as u8)], count)
    }

    pub(crate) fn barrier() -> Self {
        Self::pack(Collective::Barrier, [NONE; 3], 0)
    }

    pub(crate) fn message(root: Rank, bytes: usize) -> Self {
        Self::pack(Collective::BroadcastBytes, [NONE, NONE, root.0 as u8], bytes)
    }

    fn pack(collective: Collective, [op, dtype, root]: [u8; 3], count: usize) -> Self {
        let what = u32::from_le_bytes([collective as u8, op, dtype, root]);
        Self { what: u64::from(what), count: count as u64 }
    }

    /// The same call as call number `index` of its rank.
    pub(crate) fn numbered(self, index: u32) -> Self {
        Self { what: self.what & u64::from(u32::MAX) | u64::from(index) << 32, ..self }
    }

    pub(crate) fn collective(self) -> Collective {
        let index = usize::from(self.what as u8);
        Collective::ALL.get(index).copied().unwrap_or(Collective::Barrier)
    }

    /// Whether another rank's call goes with this one. Only the root knows a message's length.
    #[inline]
    pub(crate) fn agrees(self, other: Self) -> bool {
        self.what == other.what
            && (self.count == other.count || self.collective() == Collective::BroadcastBytes)
    }

    pub(crate) fn facts(self, rank: Rank) -> CallFacts {
        let [_, op, dtype, root, ..] = self.what.to_le_bytes();
        CallFacts {
            rank,
            index: (self.what >> 32) as u32,
            collective: self.collective(),
            op: OPS.get(usize::from(op)).copied(),
            dtype: DType::ALL.get(usize::from(dtype)).copied(),
            root: (root != NONE).then_some(Rank(usize::from(root))),
            count: self.count,
        }
    }
}

fn code(dtype: DType) -> u8 {
    DType::ALL.iter().position(|&known| known == dtype).map_or(NONE, |index| index as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_survive_packing() {
        let call = Descriptor::reduction(Collective::ReduceScatter, ReduceOp::Max, DType::F16, 77);
        let facts = call.numbered(9).facts(Rank(3));
        assert_eq!(facts.to_string(), "rank 3 called reduce_scatter(max, 77 of f16) as call 9");
        let call = Descriptor::movement(Collective::Broadcast, DType::Bool, Some(Rank(2)), 5);
        assert_eq!(
            call.numbered(u32::MAX).facts(Rank(0)).to_string(),
            "rank 0 called broadcast(root 2, 5 of bool) as call 4294967295"
        );
    }

    #[test]
    fn calls_agree_only_if_everything_is_equal() {
        let call = Descriptor::reduction(Collective::AllReduce, ReduceOp::Sum, DType::F32, 8);
        assert!(call.numbered(1).agrees(call.numbered(1)));
        assert!(!call.numbered(1).agrees(call.numbered(2)));
        for other in [
            Descriptor::reduction(Collective::ReduceScatter, ReduceOp::Sum, DType::F32, 8),
            Descriptor::reduction(Collective::AllReduce, ReduceOp::Max, DType::F32, 8),
            Descriptor::reduction(Collective::AllReduce, ReduceOp::Sum, DType::F16, 8),
            Descriptor::reduction(Collective::AllReduce, ReduceOp::Sum, DType::F32, 9),
            Descriptor::barrier(),
        ] {
            assert!(!call.agrees(other), "{other:?}");
        }
        assert!(Descriptor::message(Rank(0), 5).agrees(Descriptor::message(Rank(0), 0)));
        assert!(!Descriptor::message(Rank(0), 5).agrees(Descriptor::message(Rank(1), 5)));
    }
}
