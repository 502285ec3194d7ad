//! All sets of features that a build can have.

/// Every subset of the features, the empty one first.
pub(super) fn subsets(features: &[String]) -> Vec<Vec<&str>> {
    let mut subsets = vec![Vec::new()];
    for feature in features {
        for index in 0..subsets.len() {
            let mut larger = subsets[index].clone();
            larger.push(feature.as_str());
            subsets.push(larger);
        }
    }
    subsets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_features_there_is_one_build() {
        assert_eq!(subsets(&[]), [Vec::<&str>::new()]);
    }

    #[test]
    fn three_features_make_eight_different_builds() {
        let features = ["a", "b", "c"].map(str::to_owned);
        let subsets = subsets(&features);
        let expected: [&[&str]; 8] =
            [&[], &["a"], &["b"], &["a", "b"], &["c"], &["a", "c"], &["b", "c"], &["a", "b", "c"]];
        assert_eq!(subsets, expected);
    }
}
