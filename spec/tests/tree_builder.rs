//! Dynamic trees: the published ones, and agreement with a slow, obvious construction.

mod golden;

use golden::{ROUNDS, Round};
use paceline_spec::{
    Candidate, DraftTree, SpecError, TokenId, TreeBuilder, TreeParameters, accept_greedy,
};
use proptest::prelude::*;

/// The continuations that the draft of a golden round must have given to the nodes of one level:
/// the known ones, best first, and hopeless ones to make up the number. `node` is none for nodes
/// that are not in the golden tree.
fn continuations(round: &Round, node: Option<usize>) -> Vec<Candidate> {
    let score = |node: usize| if node == 0 { 0.0 } else { round.scores[node - 1] };
    let mut list = Vec::new();
    for child in (1..round.tokens.len()).filter(|_| node.is_some()) {
        if round.parents[child] == node.map_or(-1, |node| node as i32) {
            let log_probability = score(child) - node.map_or(0.0, score);
            list.push(Candidate { token: round.tokens[child], log_probability });
        }
    }
    for filler in list.len()..round.topk {
        let token = TokenId::MAX - filler as TokenId;
        list.push(Candidate { token, log_probability: -50.0 });
    }
    list
}

#[test]
fn published_trees_are_rebuilt_from_their_scores() {
    for round in ROUNDS {
        let parameters = TreeParameters::new(round.topk, round.depth, round.tokens.len());
        let parameters = parameters.expect("the golden trees exist");
        let start = continuations(round, Some(0));
        let mut builder = TreeBuilder::start(parameters, round.tokens[0], &start).expect("level 1");
        // For each fed node the golden node of the same path.
        let mut known: Vec<Option<usize>> = Vec::new();
        while !builder.frontier().is_empty() {
            let mut children = Vec::new();
            for fed in builder.frontier() {
                let parent = fed.parent.map_or(Some(0), |parent| known[parent]);
                let same = |&node: &usize| {
                    round.tokens[node] == fed.token
                        && parent.is_some_and(|parent| round.parents[node] == parent as i32)
                };
                let node = (1..round.tokens.len()).find(same);
                known.push(node);
                children.extend(continuations(round, node));
            }
            builder.expand(&children).expect("a level fits");
        }
        let tree = builder.finish();
        assert_eq!(tree.tokens(), round.tokens, "{}", round.name);
        let parents: Vec<i32> =
            tree.parents().map(|parent| parent.map_or(-1, |parent| parent as i32)).collect();
        assert_eq!(parents, round.parents, "{}", round.name);
        assert_eq!(builder.scores()[0], 0.0);
        for (score, expected) in builder.scores()[1..].iter().zip(round.scores) {
            assert!((score - expected).abs() < 1e-5, "{}: {score} {expected}", round.name);
        }
        let acceptance = accept_greedy(&tree, round.choices).expect("a choice for each node");
        assert_eq!(acceptance.accepted(), round.accepted, "{}", round.name);
        let last = *acceptance.path.last().expect("the root is there");
        assert_eq!(acceptance.bonus(), round.choices[last], "{}", round.name);
    }
}

/// A draft made up of a table: the continuations of a path depend on its tokens.
fn draft(path: &[TokenId], topk: usize, salt: u64) -> Vec<Candidate> {
    let mut hash = salt;
    for &token in path {
        hash = (hash ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23);
    }
    let mut list: Vec<Candidate> = (0..topk)
        .map(|rank| {
            hash = hash.wrapping_mul(0xBF58_476D_1CE4_E5B9).rotate_left(29) ^ 0x5555;
            let token = (hash % 50) as TokenId * 100 + rank as TokenId;
            // Coarse steps, so that ties are common; 0 is a probability of 1.
            let log_probability = -0.25 * ((hash >> 40) % 6) as f32;
            Candidate { token, log_probability }
        })
        .collect();
    list.sort_by(|a, b| b.log_probability.total_cmp(&a.log_probability));
    list
}

/// What the obvious construction keeps of a candidate.
#[derive(Clone)]
struct Path {
    tokens: Vec<TokenId>,
    score: f32,
}

/// The dynamic tree by whole paths and full sorts: tokens of each selected path, by candidate
/// index.
fn obvious(parameters: TreeParameters, salt: u64) -> Vec<Path> {
    let topk = parameters.topk();
    let grow = |path: &Path| -> Vec<Path> {
        let children = draft(&path.tokens, topk, salt).into_iter();
        let grown = children.map(|child| {
            let tokens = [&path.tokens[..], &[child.token]].concat();
            Path { tokens, score: path.score + child.log_probability }
        });
        grown.collect()
    };
    let best = |list: &[Path], count: usize| -> Vec<usize> {
        let mut order: Vec<usize> = (0..list.len()).collect();
        // A stable sort leaves equal scores by index.
        order.sort_by(|&a, &b| list[b].score.partial_cmp(&list[a].score).expect("no NaN"));
        order.truncate(count);
        order
    };
    let mut frontier = grow(&Path { tokens: Vec::new(), score: 0.0 });
    let mut all = frontier.clone();
    frontier = best(&frontier, topk).into_iter().map(|index| frontier[index].clone()).collect();
    for _ in 1..parameters.depth() {
        let level: Vec<Path> = frontier.iter().flat_map(grow).collect();
        frontier = best(&level, topk).into_iter().map(|index| level[index].clone()).collect();
        all.extend(level);
    }
    let mut selected = best(&all, parameters.nodes() - 1);
    selected.sort_unstable();
    selected.into_iter().map(|index| all[index].clone()).collect()
}

/// The tokens on the way to a fed node, without the root.
fn fed_path(builder: &TreeBuilder, index: usize) -> Vec<TokenId> {
    let parent = builder.fed()[index].parent;
    let mut path = parent.map_or(Vec::new(), |parent| fed_path(builder, parent));
    path.push(builder.fed()[index].token);
    path
}

fn run(builder: &mut TreeBuilder, salt: u64) {
    while !builder.frontier().is_empty() {
        let topk = builder.frontier().len();
        let start = builder.frontier_start();
        let children: Vec<Candidate> = (start..start + topk)
            .flat_map(|index| draft(&fed_path(builder, index), topk, salt))
            .collect();
        builder.expand(&children).expect("a level fits");
    }
}

fn parameters() -> impl Strategy<Value = TreeParameters> {
    (1..6_usize, 1..6_usize).prop_flat_map(|(topk, depth)| {
        let candidates = topk + (depth - 1) * topk * topk;
        (2..=candidates + 1)
            .prop_map(move |nodes| TreeParameters::new(topk, depth, nodes).expect("it fits"))
    })
}

proptest! {
    #[test]
    fn the_tree_equals_the_obvious_one(
        parameters in parameters(), other in parameters(), salt: u64,
    ) {
        // A builder that was used before must not remember.
        let mut builder = TreeBuilder::start(other, 3, &draft(&[], other.topk(), !salt)).unwrap();
        run(&mut builder, !salt);
        let mut tree = builder.finish();
        builder.restart(parameters, 7, &draft(&[], parameters.topk(), salt)).unwrap();
        run(&mut builder, salt);
        builder.finish_into(&mut tree);
        let expected = obvious(parameters, salt);
        prop_assert_eq!(tree.len(), expected.len() + 1);
        prop_assert_eq!(builder.scores().len(), tree.len());
        prop_assert_eq!(tree.root(), 7);
        for (node, path) in expected.iter().enumerate() {
            let node = node + 1;
            let tokens: Vec<TokenId> =
                tree.ancestors(node)[1..].iter().map(|&node| tree.tokens()[node]).collect();
            prop_assert_eq!(&tokens, &path.tokens);
            prop_assert_eq!(builder.scores()[node], path.score);
            prop_assert_eq!(tree.depth(node), path.tokens.len());
        }
    }

    #[test]
    fn the_fed_nodes_describe_their_ancestors(parameters in parameters(), salt: u64) {
        let level = draft(&[], parameters.topk(), salt);
        let mut builder = TreeBuilder::start(parameters, 7, &level).unwrap();
        run(&mut builder, salt);
        prop_assert_eq!(builder.fed().len(), parameters.topk() * (parameters.depth() - 1));
        prop_assert_eq!(builder.fed_mask().rows(), builder.fed().len());
        for (index, fed) in builder.fed().iter().enumerate() {
            let visible: Vec<usize> = builder.fed_mask().visible(index).collect();
            prop_assert_eq!(visible.len(), fed.depth as usize);
            prop_assert_eq!(visible.iter().rev().nth(1).copied(), fed.parent);
        }
    }
}

#[test]
fn a_certain_path_keeps_its_parents() {
    // Probability 1 all the way, as -0 and 0: equal scores, which only the index tells apart.
    let parameters = TreeParameters::new(2, 4, 5).expect("valid");
    let sure = |log_probability| {
        [(1, log_probability), (2, -30.0)].map(|(token, l)| Candidate { token, log_probability: l })
    };
    let mut builder = TreeBuilder::start(parameters, 0, &sure(-0.0)).expect("level 1");
    while !builder.frontier().is_empty() {
        let level = [sure(0.0), sure(1e-7)].concat();
        builder.expand(&level).expect("a level fits");
    }
    assert_eq!(builder.finish(), DraftTree::chain(0, &[1, 1, 1, 1]));
}

#[test]
fn a_tree_may_be_finished_early() {
    let parameters = TreeParameters::new(2, 4, 9).expect("valid");
    let mut builder = TreeBuilder::start(parameters, 7, &draft(&[], 2, 1)).expect("level 1");
    assert_eq!(builder.finish().len(), 3);
    let children = [draft(&[1], 2, 1), draft(&[2], 2, 1)].concat();
    builder.expand(&children).expect("a level fits");
    assert_eq!((builder.candidates(), builder.finish().len()), (6, 7));
}

#[test]
fn wrong_levels_are_refused_and_change_nothing() {
    let parameters = TreeParameters::new(2, 2, 4).expect("valid");
    let candidate = |token, log_probability| Candidate { token, log_probability };
    let good = [candidate(1, -0.5), candidate(2, -1.0)];
    let short = TreeBuilder::start(parameters, 0, &good[..1]);
    assert!(matches!(short, Err(SpecError::LengthMismatch { expected: 2, got: 1, .. })));
    let mut builder = TreeBuilder::start(parameters, 0, &good).expect("level 1");
    let before = builder.frontier().to_vec();
    let twice = [good[0], good[1], good[0], good[0]];
    let error = builder.expand(&twice).expect_err("token 1 comes twice");
    assert_eq!(error, SpecError::SiblingTwice { parent: 1, token: 1 });
    let nan = [good[0], candidate(2, f32::NAN), good[0], good[1]];
    let error = builder.expand(&nan).expect_err("NaN");
    assert_eq!(error, SpecError::CandidateNotANumber { index: 1 });
    assert_eq!(builder.frontier(), before);
    builder.expand(&[good, good].concat()).expect("a good level");
    let error = builder.expand(&[good, good].concat()).expect_err("all levels are there");
    assert_eq!(error, SpecError::NothingToExpand { depth: 2 });
}

#[test]
fn tree_parameters_are_checked() {
    for (topk, depth, nodes) in [(0, 1, 2), (1, 0, 2), (2, 1, 1), (2, 1, 4), (3, 2, 14)] {
        let error = TreeParameters::new(topk, depth, nodes).expect_err("contradictory");
        assert!(matches!(error, SpecError::TreeParametersInvalid { .. }), "{error}");
    }
    for (topk, depth, nodes) in [(1, 1, 2), (2, 1, 3), (3, 2, 13), (10, 8, 60)] {
        TreeParameters::new(topk, depth, nodes).expect("possible");
    }
    TreeParameters::new(60000, 60000, 65535).expect("no overflow");
}
