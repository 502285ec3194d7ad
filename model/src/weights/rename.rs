//! Problems of a checkpoint as texts, with a guess at renamed tensors.
//!
//! Pure. A tensor that is missing and one that nobody knows often are the same one under another
//! name; the closest pair is then named in one line.

use super::resolution::Problem;

/// Comparing all pairs is quadratic; a checkpoint with more strangers than this is simply another
/// model.
const COMPARED_MAX: usize = 64;

/// One line per problem. `stored` gives the name in the file of a normalised name.
pub(super) fn describe(problems: &[Problem], stored: impl Fn(&str) -> String) -> Vec<String> {
    let missing = problems.iter().filter_map(|problem| match problem {
        Problem::Missing { tensor, .. } => Some(tensor.as_str()),
        _ => None,
    });
    let missing: Vec<&str> = missing.take(COMPARED_MAX + 1).collect();
    let mut compared = 0;
    let lines = problems.iter().map(|problem| match problem {
        Problem::Missing { tensor, expected } => {
            format!("{} is missing (expected {expected})", stored(tensor))
        }
        Problem::Wrong(text) => text.clone(),
        Problem::Unknown { tensor } => {
            compared += 1;
            let few = compared <= COMPARED_MAX && missing.len() <= COMPARED_MAX;
            let guess = if few { closest(tensor, &missing) } else { None };
            match guess {
                Some(guess) => format!(
                    "{} is not part of this model: is it the renamed {}?",
                    stored(tensor),
                    stored(guess)
                ),
                None => format!("{} is not part of this model", stored(tensor)),
            }
        }
    });
    lines.collect()
}

/// The candidate closest to a name, if it is close enough to be a renaming.
fn closest<'a>(name: &str, candidates: &[&'a str]) -> Option<&'a str> {
    let distances = candidates.iter().map(|candidate| (distance(name, candidate), *candidate));
    let (distance, candidate) = distances.min_by_key(|(distance, _)| *distance)?;
    (distance <= name.len() / 3).then_some(candidate)
}

/// Levenshtein's edit distance over bytes.
fn distance(left: &str, right: &str) -> usize {
    let right = right.as_bytes();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, a) in left.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in right.iter().enumerate() {
            let substituted = diagonal + usize::from(a != *b);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[right.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_levenshteins() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("o_proj", "o_proj"), 0);
        assert_eq!(distance("o_proj", "out_proj"), 2);
    }

    #[test]
    fn only_similar_names_are_paired() {
        let missing = |tensor: &str| Problem::Missing {
            tensor: tensor.to_owned(),
            expected: "bf16 [2]".to_owned(),
        };
        let unknown = |tensor: &str| Problem::Unknown { tensor: tensor.to_owned() };
        let problems = [
            missing("model.layers.1.self_attn.o_proj.weight"),
            missing("model.norm.weight"),
            unknown("model.layers.1.self_attn.out_proj.weight"),
            unknown("visual.tower"),
        ];
        let lines = describe(&problems, |name| format!("x.{name}"));
        assert!(lines[1].contains("x.model.norm.weight is missing (expected bf16 [2])"));
        assert!(lines[2].contains("renamed x.model.layers.1.self_attn.o_proj.weight?"));
        assert_eq!(lines[3], "x.visual.tower is not part of this model");
    }
}
