//! The engine against an independent implementation (testdata/stories-moe.json): greedy tokens,
//! and how many drafted tokens each round accepts.

mod common;

use common::{demo, greedy, prompts};
use paceline_runtime::Speculation;
use paceline_spec::TreeParameters;

/// Where another order of summation may draft another token (see testdata/README.md).
const DRAFT_GAP_MIN: f64 = 1e-4;

#[test]
fn plain_greedy_equals_the_reference() {
    let mut engine = demo(1);
    for prompt in prompts() {
        let run = greedy(&mut engine, &prompt.ids, 64, Speculation::Off);
        assert_eq!(run.tokens, prompt.greedy_ids, "{}", prompt.name);
    }
}

/// Drafting never changes the text, and accepts in each round what the reference accepts.
#[test]
fn chains_and_trees_accept_what_the_reference_accepts() {
    let mut engine = demo(1);
    let tree = Speculation::Tree(TreeParameters::new(4, 4, 16).unwrap());
    let chains = (1..=5).map(|drafted| (format!("chain_{drafted}"), Speculation::Chain(drafted)));
    for (mode, speculation) in chains.chain([("tree".to_owned(), tree)]) {
        let (mut emitted, mut rounds) = (0, 0);
        for prompt in prompts() {
            let expected = &prompt.eagle[&mode];
            let accepted: Vec<usize> = expected["accepted"]
                .as_array()
                .unwrap()
                .iter()
                .map(|count| count.as_u64().unwrap() as usize)
                .collect();
            // The reference's last round may run past 64 tokens; ask for enough to finish it.
            let total = 1 + accepted.iter().map(|count| count + 1).sum::<usize>();
            let run = greedy(&mut engine, &prompt.ids, total + 8, speculation);
            assert_eq!(run.tokens[..64], prompt.greedy_ids, "{} {mode}", prompt.name);
            let gap = expected["smallest_draft_gap"].as_f64().unwrap();
            let got = &run.accepted[..accepted.len()];
            if gap < DRAFT_GAP_MIN {
                println!("{} {mode}: draft gap {gap:e}; accepted {got:?}", prompt.name);
                let difference = got.iter().zip(&accepted).filter(|(a, b)| a != b).count();
                println!("{difference} of {} rounds differ", accepted.len());
            } else {
                assert_eq!(got, accepted, "{} {mode}", prompt.name);
            }
            emitted += got.iter().map(|count| count + 1).sum::<usize>();
            rounds += got.len();
        }
        println!("{mode}: {:.4} tokens a round", emitted as f64 / rounds as f64);
    }
}

/// Every mode, sizes that end in the middle of a round, and prompts of the reference again: the
/// same tokens as plain decoding.
#[test]
fn speculation_never_changes_greedy_output() {
    let mut engine = demo(1);
    for (index, prompt) in prompts().into_iter().enumerate() {
        for tokens_max in [1, 2, 7, if index.is_multiple_of(2) { 150 } else { 20 }] {
            let plain = greedy(&mut engine, &prompt.ids, tokens_max, Speculation::Off);
            let shapes = [(1, 1, 2), (2, 3, 5), (4, 4, 16), (3, 2, 7)];
            let trees = shapes.map(|(topk, depth, nodes)| {
                Speculation::Tree(TreeParameters::new(topk, depth, nodes).unwrap())
            });
            let chains = [1, 2, 4, 8].map(Speculation::Chain);
            for speculation in trees.into_iter().chain(chains).chain([Speculation::Auto]) {
                let run = greedy(&mut engine, &prompt.ids, tokens_max, speculation);
                assert_eq!(run.tokens, plain.tokens, "{} {speculation:?}", prompt.name);
                assert_eq!(run.text, plain.text, "{} {speculation:?}", prompt.name);
            }
        }
    }
}
