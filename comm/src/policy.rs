//! Which back end serves which call, and why: pure functions of facts.
//!
//! Invariant: the answer depends on the arguments only. Ranks that pass the same facts therefore
//! choose alike, which they must, or they would wait for each other in different back ends.
//! Start with [`choose`]; [`Table`] is the same answer for all sizes, looked up without allocation.

use std::ops::RangeInclusive;

use paceline_kernels::DType;

use crate::{Collective, Limits};

/// A back end that could serve calls. Lists of them are in order of preference.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// The back end.
    pub name: &'static str,
    /// What it can do.
    pub limits: &'a Limits,
}

/// What is to be served, but for its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Purpose {
    /// The collective.
    pub collective: Collective,
    /// Its element type.
    pub dtype: DType,
    /// Number of ranks.
    pub world_size: usize,
}

/// The time that a back end took, the maximum over ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Measurement {
    /// The back end.
    pub backend: &'static str,
    /// The collective.
    pub collective: Collective,
    /// Size of the call.
    pub bytes: usize,
    /// Time of one call.
    pub microseconds: f64,
}

/// The chosen back end.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// Its place in the list of candidates.
    pub index: usize,
    /// Its name.
    pub name: &'static str,
    /// Why it was chosen.
    pub reason: Reason,
    /// Back ends that do not serve the call, each with its reason.
    pub rejected: Vec<Rejection>,
}

/// A back end that does not serve a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// Its name.
    pub name: &'static str,
    /// Why not, as a phrase: "has no all_gather".
    pub why: String,
}

/// Why a back end was chosen.
#[derive(Clone, Debug, PartialEq)]
pub enum Reason {
    /// There is one rank, so nothing is sent.
    Alone,
    /// No other back end serves the call.
    Only,
    /// It took the least time when measured.
    Fastest {
        /// Its time, interpolated between measured sizes.
        microseconds: f64,
        /// The next best, if another was measured.
        next: Option<(&'static str, f64)>,
    },
    /// None that serves the call was measured, and it comes first in the order of preference.
    First,
}

impl std::fmt::Display for Choice {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}: {}", self.name, self.reason)?;
        if !self.rejected.is_empty() {
            write!(formatter, " ({})", listed(&self.rejected))?;
        }
        Ok(())
    }
}

impl std::fmt::Display for Reason {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Alone => formatter.write_str("there is one rank, nothing is sent"),
            Self::Only => formatter.write_str("the only back end that serves this"),
            Self::First => formatter.write_str("the preferred one, nothing was measured"),
            Self::Fastest { microseconds, next } => {
                write!(formatter, "measured fastest, {microseconds:.1} us")?;
                next.map_or(Ok(()), |(name, us)| write!(formatter, " ({name} {us:.1} us)"))
            }
        }
    }
}

/// Rejections as one phrase.
pub(crate) fn listed(rejected: &[Rejection]) -> String {
    let one = |rejection: &Rejection| format!("{} {}", rejection.name, rejection.why);
    rejected.iter().map(one).collect::<Vec<_>>().join("; ")
}

/// Chooses the back end for a call of `bytes`: of those that serve it the one that measured
/// fastest, or if none of them was measured the first.
///
/// # Errors
/// Each candidate's reason, if none serves the call.
pub fn choose(
    candidates: &[Candidate<'_>],
    purpose: Purpose,
    bytes: usize,
    measured: &[Measurement],
) -> Result<Choice, Vec<Rejection>> {
    let Purpose { collective, dtype, world_size } = purpose;
    let mut serving = Vec::new();
    let mut rejected = Vec::new();
    for (index, candidate) in candidates.iter().enumerate() {
        match candidate.limits.objection(collective, dtype, bytes, world_size) {
            None => serving.push((index, candidate.name)),
            Some(why) => rejected.push(Rejection { name: candidate.name, why }),
        }
    }
    let Some(&first) = serving.first() else { return Err(rejected) };
    let mut timed: Vec<_> = serving
        .iter()
        .filter_map(|&(index, name)| {
            Some((estimate(measured, name, collective, bytes)?, index, name))
        })
        .collect();
    timed.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (index, name, reason) = match (timed.first(), serving.len()) {
        (_, 1) => (first.0, first.1, Reason::Only),
        (None, _) => (first.0, first.1, Reason::First),
        (Some(&(microseconds, index, name)), _) => {
            let next = timed.get(1).map(|&(us, _, name)| (name, us));
            (index, name, Reason::Fastest { microseconds, next })
        }
    };
    Ok(Choice { index, name, reason, rejected })
}

/// The time that `backend` would take, from its measurements: linear between two sizes, constant
/// below the smallest, in proportion above the largest.
fn estimate(
    measured: &[Measurement],
    backend: &str,
    collective: Collective,
    bytes: usize,
) -> Option<f64> {
    let mut below: Option<&Measurement> = None;
    let mut above: Option<&Measurement> = None;
    let own = measured.iter().filter(|m| m.backend == backend && m.collective == collective);
    for point in own {
        if point.bytes <= bytes && below.is_none_or(|best| best.bytes < point.bytes) {
            below = Some(point);
        }
        if point.bytes >= bytes && above.is_none_or(|best| best.bytes > point.bytes) {
            above = Some(point);
        }
    }
    match (below, above) {
        (Some(low), Some(high)) if low.bytes < high.bytes => {
            let share = (bytes - low.bytes) as f64 / (high.bytes - low.bytes) as f64;
            Some(low.microseconds + share * (high.microseconds - low.microseconds))
        }
        (Some(low), None) => Some(low.microseconds * bytes as f64 / low.bytes.max(1) as f64),
        (_, Some(high)) => Some(high.microseconds),
        (None, None) => None,
    }
}

/// The choices for all sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    ranges: Vec<SizeRange>,
}

/// Sizes with one choice.
#[derive(Clone, Debug, PartialEq)]
pub struct SizeRange {
    /// The sizes.
    pub bytes: RangeInclusive<usize>,
    /// Who serves them, or why nobody does.
    pub choice: Result<Choice, Vec<Rejection>>,
}

impl Table {
    /// Asks [`choose`] at every bound of the candidates' limits, at every measured size and at
    /// (powers of two) times 1 and 1.5; each answer holds up to the next such size.
    pub fn new(candidates: &[Candidate<'_>], purpose: Purpose, measured: &[Measurement]) -> Self {
        let mut starts = vec![0];
        for limits in candidates.iter().map(|candidate| candidate.limits) {
            starts.push(*limits.bytes.start());
            starts.extend(limits.bytes.end().checked_add(1));
        }
        if !measured.is_empty() {
            starts.extend(measured.iter().map(|measurement| measurement.bytes));
            starts.extend((4..34).flat_map(|bit| [1usize << bit, 3usize << (bit - 1)]));
        }
        starts.sort_unstable();
        starts.dedup();
        let mut ranges: Vec<SizeRange> = Vec::new();
        for (place, &start) in starts.iter().enumerate() {
            let end = starts.get(place + 1).map_or(usize::MAX, |next| next - 1);
            let choice = choose(candidates, purpose, start, measured);
            match ranges.last_mut() {
                Some(last) if is_same(&last.choice, &choice) => {
                    last.bytes = *last.bytes.start()..=end;
                }
                _ => ranges.push(SizeRange { bytes: start..=end, choice }),
            }
        }
        Self { ranges }
    }

    /// The choice for calls of `bytes`.
    #[inline]
    pub fn at(&self, bytes: usize) -> &Result<Choice, Vec<Rejection>> {
        let place = self.ranges.partition_point(|range| *range.bytes.end() < bytes);
        &self.ranges[place].choice
    }

    /// The ranges of sizes, smallest first; together they hold every size.
    pub fn ranges(&self) -> &[SizeRange] {
        &self.ranges
    }
}

fn is_same(a: &Result<Choice, Vec<Rejection>>, b: &Result<Choice, Vec<Rejection>>) -> bool {
    match (a, b) {
        (Ok(a), Ok(b)) => {
            a.index == b.index
                && a.rejected == b.rejected
                && std::mem::discriminant(&a.reason) == std::mem::discriminant(&b.reason)
        }
        (Err(a), Err(b)) => a == b,
        _ => false,
    }
}

impl std::fmt::Display for Table {
    /// One line a range: `0 to 65535 bytes  p2p: measured fastest, 4.1 us (nccl 9.0 us)`.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for SizeRange { bytes, choice } in &self.ranges {
            match *bytes.end() {
                usize::MAX => write!(formatter, "from {} bytes  ", bytes.start())?,
                end => write!(formatter, "{} to {end} bytes  ", bytes.start())?,
            }
            match choice {
                Ok(choice) => writeln!(formatter, "{choice}")?,
                Err(rejected) => writeln!(formatter, "nobody: {}", listed(rejected))?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL_REDUCE: Purpose =
        Purpose { collective: Collective::AllReduce, dtype: DType::BF16, world_size: 4 };

    fn limits(bytes: RangeInclusive<usize>) -> Limits {
        Limits {
            collectives: &[Collective::AllReduce],
            dtypes_reduced: &[DType::BF16],
            dtypes_moved: &[],
            bytes,
            world_sizes: 2..=8,
            in_place: true,
            graph_capture: false,
        }
    }

    fn measured(backend: &'static str, bytes: usize, microseconds: f64) -> Measurement {
        Measurement { backend, collective: Collective::AllReduce, bytes, microseconds }
    }

    #[test]
    fn a_measured_time_beats_the_order_of_preference() {
        let (fast, slow) = (limits(0..=1 << 20), limits(0..=usize::MAX));
        let candidates =
            [Candidate { name: "p2p", limits: &fast }, Candidate { name: "nccl", limits: &slow }];
        let times = [
            measured("p2p", 1024, 5.0),
            measured("p2p", 65536, 60.0),
            measured("nccl", 1024, 20.0),
            measured("nccl", 65536, 30.0),
        ];
        let at = |bytes| choose(&candidates, ALL_REDUCE, bytes, &times).unwrap();
        assert_eq!(at(0).to_string(), "p2p: measured fastest, 5.0 us (nccl 20.0 us)");
        assert_eq!(at(65536).to_string(), "nccl: measured fastest, 30.0 us (p2p 60.0 us)");
        assert_eq!(at(131_072).to_string(), "nccl: measured fastest, 60.0 us (p2p 120.0 us)");
        assert_eq!(
            at(2 << 20).to_string(),
            "nccl: the only back end that serves this (p2p takes 0 to 1048576 bytes, not 2097152)"
        );
        assert_eq!(
            choose(&candidates, ALL_REDUCE, 8, &[]).unwrap().to_string(),
            "p2p: the preferred one, nothing was measured"
        );
    }

    #[test]
    fn the_table_answers_like_the_function() {
        let (small, large) = (limits(16..=4096), limits(1024..=1 << 22));
        let candidates =
            [Candidate { name: "p2p", limits: &small }, Candidate { name: "nccl", limits: &large }];
        let times = [measured("p2p", 2048, 9.0), measured("nccl", 2048, 7.0)];
        for measured in [&times[..], &[]] {
            let table = Table::new(&candidates, ALL_REDUCE, measured);
            assert_eq!(table.ranges().last().map(|range| *range.bytes.end()), Some(usize::MAX));
            for bytes in [0, 15, 16, 17, 1023, 1024, 4096, 4097, 1 << 22, (1 << 22) + 1, usize::MAX]
            {
                let name = |choice: &Result<Choice, _>| choice.as_ref().ok().map(|c| c.name);
                let expected = choose(&candidates, ALL_REDUCE, bytes, measured);
                assert_eq!(name(table.at(bytes)), name(&expected), "{bytes} bytes\n{table}");
            }
        }
    }

    #[test]
    fn what_nobody_serves_has_reasons() {
        let limits = limits(0..=1024);
        let candidates = [Candidate { name: "p2p", limits: &limits }];
        let reasons = |purpose| listed(&choose(&candidates, purpose, 8, &[]).unwrap_err());
        let purpose = Purpose { world_size: 16, ..ALL_REDUCE };
        assert_eq!(reasons(purpose), "p2p takes 2 to 8 ranks, not 16");
        let purpose = Purpose { dtype: DType::F32, ..ALL_REDUCE };
        assert_eq!(reasons(purpose), "p2p has no all_reduce of f32");
        let purpose = Purpose { collective: Collective::Barrier, ..ALL_REDUCE };
        assert_eq!(reasons(purpose), "p2p has no barrier");
    }
}
