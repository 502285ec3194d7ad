//! Counts of what speculation did. The invariant: every count is a sum over rounds, so parts can be
//! merged.

/// Counts over rounds, where a round is one pass of the target that emits tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Statistics {
    rounds: u64,
    rounds_drafting: u64,
    drafted: u64,
    accepted: u64,
    emitted: u64,
    histogram: Vec<u64>,
    depths: Vec<DepthCount>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct DepthCount {
    reached: u64,
    accepted: u64,
}

impl Statistics {
    /// Adds a round that drafted `drafted` nodes, at most `depth` deep, accepted `accepted` of them
    /// and emitted `emitted` tokens (`accepted` + 1, or fewer if the request ended). A plain decode
    /// step is a round of 0, 0, 0, 1.
    pub fn record(&mut self, drafted: usize, depth: usize, accepted: usize, emitted: usize) {
        self.rounds += 1;
        self.rounds_drafting += u64::from(drafted > 0);
        self.drafted += drafted as u64;
        self.accepted += accepted as u64;
        self.emitted += emitted as u64;
        *slot(&mut self.histogram, accepted) += 1;
        for level in 0..depth.min(accepted + 1) {
            let count = slot(&mut self.depths, level);
            count.reached += 1;
            count.accepted += u64::from(level < accepted);
        }
    }

    /// Passes of the target.
    pub fn rounds(&self) -> u64 {
        self.rounds
    }

    /// Rounds in which anything was drafted.
    pub fn rounds_drafting(&self) -> u64 {
        self.rounds_drafting
    }

    /// Drafted tokens that were verified, all branches of a tree counted.
    pub fn drafted(&self) -> u64 {
        self.drafted
    }

    /// Drafted tokens accepted.
    pub fn accepted(&self) -> u64 {
        self.accepted
    }

    /// Tokens emitted, bonus tokens included.
    pub fn emitted(&self) -> u64 {
        self.emitted
    }

    /// Rounds by the number of drafted tokens accepted.
    pub fn histogram(&self) -> &[u64] {
        &self.histogram
    }

    /// Tokens emitted a round, the bonus token included: 1 without speculation. 0 before the first
    /// round.
    pub fn mean_acceptance_length(&self) -> f64 {
        ratio(self.emitted, self.rounds).unwrap_or(0.0)
    }

    /// Share of drafted tokens accepted; none before anything was drafted.
    pub fn acceptance_rate(&self) -> Option<f64> {
        ratio(self.accepted, self.drafted)
    }

    /// For each depth from 1 on, the share of rounds in which a token of that depth was accepted
    /// among those in which one was drafted and the depth above was accepted.
    pub fn acceptance_by_depth(&self) -> impl ExactSizeIterator<Item = f64> + '_ {
        self.depths.iter().map(|count| ratio(count.accepted, count.reached).unwrap_or(0.0))
    }

    /// Adds the counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        self.rounds += other.rounds;
        self.rounds_drafting += other.rounds_drafting;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
        self.emitted += other.emitted;
        for (accepted, rounds) in other.histogram.iter().enumerate() {
            *slot(&mut self.histogram, accepted) += rounds;
        }
        for (level, count) in other.depths.iter().enumerate() {
            let sum = slot(&mut self.depths, level);
            sum.reached += count.reached;
            sum.accepted += count.accepted;
        }
    }

    /// Starts over, keeping the memory.
    pub fn reset(&mut self) {
        let Self { histogram, depths, .. } = std::mem::take(self);
        (self.histogram, self.depths) = (histogram, depths);
        self.histogram.clear();
        self.depths.clear();
    }
}

fn slot<T: Default + Clone>(list: &mut Vec<T>, index: usize) -> &mut T {
    if list.len() <= index {
        list.resize(index + 1, T::default());
    }
    &mut list[index]
}

fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Statistics {
        let mut statistics = Statistics::default();
        statistics.record(3, 3, 2, 3);
        statistics.record(3, 3, 0, 1);
        statistics.record(3, 3, 3, 4);
        statistics.record(0, 0, 0, 1);
        statistics
    }

    #[test]
    fn counts_rounds_tokens_and_depths() {
        let statistics = sample();
        assert_eq!((statistics.rounds(), statistics.rounds_drafting()), (4, 3));
        assert_eq!((statistics.drafted(), statistics.accepted(), statistics.emitted()), (9, 5, 9));
        assert_eq!(statistics.histogram(), [2, 0, 1, 1]);
        assert_eq!(statistics.mean_acceptance_length(), 2.25);
        assert_eq!(statistics.acceptance_rate(), Some(5.0 / 9.0));
        let by_depth: Vec<f64> = statistics.acceptance_by_depth().collect();
        assert_eq!(by_depth, [2.0 / 3.0, 1.0, 0.5]);
    }

    #[test]
    fn merged_parts_equal_the_whole() {
        let mut parts = sample();
        let mut other = Statistics::default();
        other.record(15, 4, 4, 5);
        parts.merge(&other);
        let mut whole = sample();
        whole.record(15, 4, 4, 5);
        assert_eq!(parts, whole);
        parts.reset();
        assert_eq!(parts, Statistics::default());
        assert_eq!((parts.mean_acceptance_length(), parts.acceptance_rate()), (0.0, None));
    }
}
