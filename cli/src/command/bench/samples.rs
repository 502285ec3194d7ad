//! Repeated measurements of one quantity. Pure; medians, because a disturbed run must not count.

use serde::{Serialize, Serializer, ser::SerializeStruct};

/// What repeated runs gave, in their order; at least one.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Samples(Vec<f64>);

impl Samples {
    pub(super) fn push(&mut self, sample: f64) {
        self.0.push(sample);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = f64> + '_ {
        self.0.iter().copied()
    }

    pub(super) fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// The sample below which a `share` of them lies, interpolated between neighbours (as numpy
    /// does unless told otherwise).
    pub(super) fn quantile(&self, share: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
        let place = share * last as f64;
        let (below, part) = (place.floor() as usize, place.fract());
        let above = sorted[last.min(below + 1)];
        sorted[below] * (1.0 - part) + above * part
    }

    pub(super) fn least(&self) -> f64 {
        self.0.iter().copied().reduce(f64::min).unwrap_or(0.0)
    }

    pub(super) fn most(&self) -> f64 {
        self.0.iter().copied().reduce(f64::max).unwrap_or(0.0)
    }

    /// The median of what pairs of runs next to each other give: slow drifts of the machine cancel
    /// out.
    pub(super) fn ratio(&self, other: &Self) -> f64 {
        self.ratios(other).median()
    }

    /// This, run by run, divided by another.
    pub(super) fn ratios(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(sample, other)| sample / other).collect())
    }
}

impl FromIterator<f64> for Samples {
    fn from_iter<I: IntoIterator<Item = f64>>(samples: I) -> Self {
        Self(samples.into_iter().collect())
    }
}

impl Serialize for Samples {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_struct("Samples", 6)?;
        object.serialize_field("median", &self.median())?;
        object.serialize_field("p10", &self.quantile(0.1))?;
        object.serialize_field("p90", &self.quantile(0.9))?;
        object.serialize_field("least", &self.least())?;
        object.serialize_field("most", &self.most())?;
        object.serialize_field("samples", &self.0)?;
        object.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(values: &[f64]) -> Samples {
        values.iter().copied().collect()
    }

    #[test]
    fn medians_and_spread() {
        let odd = samples(&[3.0, 1.0, 2.0]);
        assert_eq!((odd.median(), odd.least(), odd.most()), (2.0, 1.0, 3.0));
        assert_eq!(samples(&[4.0, 1.0, 2.0, 3.0]).median(), 2.5);
        assert_eq!(samples(&[7.0]).median(), 7.0);
        let object = serde_json::to_value(&odd).unwrap();
        assert_eq!(object["samples"], serde_json::json!([3.0, 1.0, 2.0]));
        assert_eq!(object["median"], 2.0);
        let ten: Samples = (0..11).rev().map(f64::from).collect();
        assert_eq!((ten.quantile(0.0), ten.quantile(0.1), ten.quantile(0.9)), (0.0, 1.0, 9.0));
        assert_eq!(samples(&[1.0, 2.0]).quantile(0.75), 1.75);
        assert_eq!(samples(&[]).quantile(0.5), 0.0);
    }

    /// Drift that both see leaves the ratio alone.
    #[test]
    fn ratios_are_of_pairs() {
        let (first, second) = (samples(&[2.0, 4.0, 8.0]), samples(&[1.0, 2.0, 4.0]));
        assert_eq!(first.ratio(&second), 2.0);
    }
}
