//! What a pass costs, by its width. The invariant: an estimate is a median of recent measurements
//! or lies between such medians, so that single slow passes cannot move it far.

use std::collections::VecDeque;

/// Measurements kept for each width.
const WINDOW: usize = 15;
/// Measurements from which a median is trusted: one outlier cannot be the middle of three.
const TRUSTED: usize = 3;
/// Rounds after which a measurement is out of date: contexts grow and clocks change.
const STALE_ROUNDS: u64 = 1024;
/// Growth for each further token, as a share of the cost at the one width measured so far. Mixture
/// models on real machines lie around it (1.4 for four tokens instead of one).
const GROWTH_ASSUMED: f64 = 0.12;
/// The least that an unmeasured cost is taken for, as a share of what interpolation gives, and that
/// an outdated one is taken for, as a share of what it was.
const HOPE_UNMEASURED: f64 = 0.75;
const HOPE_STALE: f64 = 0.9;

/// Cost in seconds as a function of a width.
#[derive(Debug, Clone)]
pub(super) struct CostCurve {
    points: Vec<Point>,
    fitted: Vec<(f64, f64)>,
    from_origin: bool,
}

#[derive(Debug, Clone)]
struct Point {
    width: usize,
    recent: VecDeque<f64>,
    median: f64,
    round: u64,
}

impl CostCurve {
    /// For costs that are positive however small the width: a pass of the target.
    pub(super) fn with_base() -> Self {
        Self { points: Vec::new(), fitted: Vec::new(), from_origin: false }
    }

    /// For costs that vanish at width 0: drafting.
    pub(super) fn from_origin() -> Self {
        Self { points: Vec::new(), fitted: Vec::new(), from_origin: true }
    }

    /// Adds a measurement made in `round`.
    pub(super) fn observe(&mut self, width: usize, seconds: f64, round: u64) {
        let place = self.points.partition_point(|point| point.width < width);
        if self.points.get(place).is_none_or(|point| point.width != width) {
            let recent = VecDeque::with_capacity(WINDOW);
            self.points.insert(place, Point { width, recent, median: seconds, round });
        }
        self.points[place].add(seconds, round);
        self.fit();
    }

    /// Measurements in use for exactly this width.
    pub(super) fn samples(&self, width: usize) -> usize {
        self.point(width).map_or(0, |point| point.recent.len())
    }

    /// The round of the last measurement for exactly this width.
    pub(super) fn measured_at(&self, width: usize) -> Option<u64> {
        self.point(width).map(|point| point.round)
    }

    /// The likely cost: measured, else interpolated. None before the first measurement.
    pub(super) fn estimate(&self, width: usize) -> Option<f64> {
        match self.point(width) {
            Some(point) if point.recent.len() >= TRUSTED => Some(point.median),
            _ => self.interpolate(width as f64),
        }
    }

    /// The likely cost if it is well known, else the least that it can reasonably be, so that what
    /// might be cheap is tried.
    pub(super) fn hoped(&self, width: usize, round: u64) -> Option<f64> {
        let estimate = self.estimate(width)?;
        match self.point(width) {
            Some(point) if point.recent.len() >= TRUSTED => {
                let stale = round.saturating_sub(point.round) > STALE_ROUNDS;
                Some(if stale { HOPE_STALE * estimate } else { estimate })
            }
            _ => {
                let below = self.fitted.iter().rev().find(|point| point.0 <= width as f64);
                let floor = below.map_or(0.0, |point| point.1.min(estimate));
                Some(floor.max(HOPE_UNMEASURED * estimate))
            }
        }
    }

    fn point(&self, width: usize) -> Option<&Point> {
        let place = self.points.binary_search_by_key(&width, |point| point.width).ok()?;
        Some(&self.points[place])
    }

    fn interpolate(&self, width: f64) -> Option<f64> {
        let (&first, &last) = (self.fitted.first()?, self.fitted.last()?);
        if width <= first.0 {
            return Some(first.1);
        }
        if width >= last.0 {
            let growth = if last.0 > first.0 {
                (last.1 - first.1) / (last.0 - first.0)
            } else {
                GROWTH_ASSUMED * last.1
            };
            return Some(last.1 + growth * (width - last.0));
        }
        let upper = self.fitted.partition_point(|point| point.0 < width);
        let (a, b) = (self.fitted[upper - 1], self.fitted[upper]);
        Some(a.1 + (b.1 - a.1) * (width - a.0) / (b.0 - a.0))
    }

    /// Isotonic regression of the trusted medians (pool adjacent violators), weighted by the number
    /// of measurements; of all medians while none is trusted.
    fn fit(&mut self) {
        let trusted = self.points.iter().any(|point| point.recent.len() >= TRUSTED);
        let points = self.points.iter().filter(|p| !trusted || p.recent.len() >= TRUSTED);
        // Of each pool: mean, weight, and how many points it holds.
        let mut pools: Vec<(f64, f64, usize)> = Vec::new();
        self.fitted.clear();
        if self.from_origin {
            self.fitted.push((0.0, 0.0));
        }
        let fixed = self.fitted.len();
        for point in points {
            self.fitted.push((point.width as f64, 0.0));
            let mut pool = (point.median, point.recent.len() as f64, 1);
            while let Some(&(mean, weight, count)) = pools.last().filter(|last| last.0 > pool.0) {
                pools.pop();
                let sum = weight + pool.1;
                pool = ((mean * weight + pool.0 * pool.1) / sum, sum, count + pool.2);
            }
            pools.push(pool);
        }
        let values = pools.iter().flat_map(|&(mean, _, count)| std::iter::repeat_n(mean, count));
        for (point, value) in self.fitted[fixed..].iter_mut().zip(values) {
            point.1 = value;
        }
    }
}

impl Point {
    fn add(&mut self, seconds: f64, round: u64) {
        if round.saturating_sub(self.round) > STALE_ROUNDS {
            self.recent.clear();
        }
        if self.recent.len() == WINDOW {
            self.recent.pop_front();
        }
        self.recent.push_back(seconds);
        self.round = round;
        let mut sorted = [0.0; WINDOW];
        let sorted = &mut sorted[..self.recent.len()];
        for (slot, &value) in sorted.iter_mut().zip(&self.recent) {
            *slot = value;
        }
        sorted.sort_unstable_by(f64::total_cmp);
        // The lower middle: slow outliers are common, fast ones are not.
        self.median = sorted[(sorted.len() - 1) / 2];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(points: &[(usize, f64)]) -> CostCurve {
        let mut curve = CostCurve::with_base();
        for &(width, seconds) in points {
            for round in 0..3 {
                curve.observe(width, seconds, round);
            }
        }
        curve
    }

    #[test]
    fn interpolates_and_extrapolates() {
        let curve = curve(&[(1, 1.0), (5, 3.0)]);
        assert_eq!(curve.estimate(1), Some(1.0));
        assert_eq!(curve.estimate(3), Some(2.0));
        assert_eq!(curve.estimate(7), Some(4.0));
        assert_eq!(curve.hoped(3, 3), Some(1.5));
        assert_eq!(curve.hoped(2, 3), Some(0.75 * 1.5));
        assert_eq!(curve.hoped(5, 3), Some(3.0));
        assert_eq!(curve.hoped(5, 2000), Some(2.7));
        assert_eq!(CostCurve::with_base().estimate(1), None);
    }

    #[test]
    fn drafting_is_free_at_width_0() {
        let mut curve = CostCurve::from_origin();
        curve.observe(4, 2.0, 0);
        assert_eq!(curve.estimate(1), Some(0.5));
        assert_eq!(curve.estimate(6), Some(3.0));
    }

    #[test]
    fn a_median_ignores_outliers_and_follows_drift() {
        let mut curve = CostCurve::with_base();
        for (round, seconds) in [1.0, 10.0, 1.2, 1.1, 12.0, 0.9].into_iter().enumerate() {
            curve.observe(1, seconds, round as u64);
        }
        assert_eq!(curve.estimate(1), Some(1.1));
        for round in 10..20 {
            curve.observe(1, 2.0, round);
        }
        assert_eq!(curve.estimate(1), Some(2.0));
        curve.observe(1, 5.0, 5000);
        assert_eq!((curve.samples(1), curve.estimate(1)), (1, Some(5.0)));
    }

    #[test]
    fn interpolation_is_monotone_where_medians_are_not() {
        let curve = curve(&[(1, 1.0), (3, 2.5), (4, 2.0), (6, 4.25)]);
        assert_eq!(curve.estimate(3), Some(2.5), "measured widths keep their own cost");
        assert_eq!(curve.interpolate(3.5), Some(2.25));
        assert_eq!(curve.interpolate(5.0), Some(3.25));
    }
}
