//! Trees, masks, acceptance, the commit plan and the confidence cut, on random trees.

use paceline_spec::{
    CommitPlan, DenseRows, DraftTree, Limits, Plan, SpecError, TokenId, TreeParameters,
    accept_greedy, accept_sampled, accept_sampled_chain, cut_by_confidence,
};
use proptest::prelude::*;

const VOCABULARY: usize = 8;

/// A random tree of up to `nodes` nodes over [`VOCABULARY`] tokens.
fn trees(nodes: usize) -> impl Strategy<Value = DraftTree> {
    let steps = proptest::collection::vec((any::<prop::sample::Index>(), 0..VOCABULARY), 0..nodes);
    steps.prop_map(|steps| {
        let mut tree = DraftTree::root_only(0);
        for (parent, token) in steps {
            // A token that the parent has as a child already is refused.
            let _ = tree.push(parent.index(tree.len()), token as TokenId);
        }
        tree
    })
}

/// A tree, and for each node a row of probabilities, some of them 0.
fn trees_with_rows() -> impl Strategy<Value = (DraftTree, Vec<f32>)> {
    trees(20).prop_flat_map(|tree| {
        let row = proptest::collection::vec(0..4_u8, VOCABULARY).prop_map(|mut weights| {
            if weights.iter().all(|&weight| weight == 0) {
                weights[0] = 1;
            }
            let sum: f32 = weights.iter().map(|&weight| f32::from(weight)).sum();
            weights.into_iter().map(|weight| f32::from(weight) / sum).collect::<Vec<f32>>()
        });
        let rows = proptest::collection::vec(row, tree.len()).prop_map(|rows| rows.concat());
        (Just(tree), rows)
    })
}

proptest! {
    #[test]
    fn a_tree_is_what_its_parents_say(tree in trees(150)) {
        let parents: Vec<Option<usize>> = tree.parents().collect();
        let again = DraftTree::from_parents(tree.tokens().to_vec(), parents.clone()).unwrap();
        prop_assert_eq!(&again, &tree);
        let positions: Vec<u32> = tree.positions(1000).collect();
        let mut children = vec![Vec::new(); tree.len()];
        for node in 0..tree.len() {
            let depth = parents[node].map_or(0, |parent| tree.depth(parent) + 1);
            prop_assert_eq!(tree.depth(node), depth);
            prop_assert_eq!(positions[node] as usize, 1000 + depth);
            if let Some(parent) = parents[node] {
                children[parent].push(node);
                prop_assert_eq!(tree.child_with_token(parent, tree.tokens()[node]), Some(node));
            }
        }
        for (node, expected) in children.iter().enumerate() {
            prop_assert_eq!(&tree.children(node).collect::<Vec<_>>(), expected);
        }
        let chain = (1..tree.len()).all(|node| parents[node] == Some(node - 1));
        prop_assert_eq!(tree.is_chain(), chain);
        prop_assert_eq!(tree.depth_max() as u32, *tree.depths().iter().max().unwrap());
    }

    #[test]
    fn a_node_sees_its_ancestors_and_itself(tree in trees(150)) {
        let mask = tree.mask();
        prop_assert_eq!(mask.rows(), tree.len());
        for node in 0..tree.len() {
            let path = tree.ancestors(node);
            prop_assert_eq!(&mask.visible(node).collect::<Vec<_>>(), &path);
            prop_assert_eq!(path.len(), tree.depth(node) + 1);
            for other in 0..tree.len() {
                prop_assert_eq!(mask.sees(node, other), path.contains(&other));
            }
        }
        // A mask that held something else before is the same.
        let mut used = DraftTree::chain(1, &[2; 200]).mask();
        tree.mask_into(&mut used);
        prop_assert_eq!(used, mask);
    }

    #[test]
    fn greedy_acceptance_emits_what_plain_greedy_would(
        tree in trees(60), salt in 0..VOCABULARY as TokenId,
    ) {
        // A target whose choice depends on all tokens of the path.
        let choice = |node: usize| {
            let path = tree.ancestors(node);
            let sum: TokenId = path.iter().map(|&node| tree.tokens()[node] * 3 + 1).sum();
            (sum + salt) % VOCABULARY as TokenId
        };
        let choices: Vec<TokenId> = (0..tree.len()).map(choice).collect();
        let acceptance = accept_greedy(&tree, &choices).unwrap();
        let mut sum = 1;
        for &token in &acceptance.emitted {
            let plain = (sum + salt) % VOCABULARY as TokenId;
            prop_assert_eq!(token, plain);
            sum += token * 3 + 1;
        }
        let last = *acceptance.path.last().unwrap();
        prop_assert_eq!(&tree.ancestors(last), &acceptance.path);
        prop_assert_eq!(acceptance.emitted.len(), acceptance.accepted() + 1);
        prop_assert_eq!(tree.child_with_token(last, acceptance.bonus()), None);
    }

    #[test]
    fn sampled_acceptance_is_a_path_of_possible_tokens(
        (tree, rows) in trees_with_rows(),
        coins in proptest::collection::vec(prop_oneof![Just(0.0), Just(1.0 - 1e-16), 0.0..1.0], 64),
    ) {
        let mut coins = coins.into_iter().cycle();
        let mut target = DenseRows::new(&rows, VOCABULARY).unwrap();
        let mut coin = || coins.next().unwrap();
        let acceptance = accept_sampled(&tree, &mut target, &mut coin).unwrap();
        let last = *acceptance.path.last().unwrap();
        prop_assert_eq!(&tree.ancestors(last), &acceptance.path);
        for (&node, &token) in acceptance.path.iter().zip(&acceptance.emitted) {
            prop_assert!(rows[node * VOCABULARY + token as usize] > 0.0);
        }
        prop_assert_eq!(tree.child_with_token(last, acceptance.bonus()), None);
    }

    #[test]
    fn a_proposal_equal_to_the_target_is_always_accepted(
        (tree, rows) in trees_with_rows(), coins in proptest::collection::vec(0.0..1.0, 64),
    ) {
        let mut chain = DraftTree::root_only(0);
        for node in 0..tree.len() - 1 {
            let row = &rows[node * VOCABULARY..(node + 1) * VOCABULARY];
            let token = row.iter().position(|&probability| probability > 0.0).unwrap();
            chain.push(node, token as TokenId).unwrap();
        }
        let mut coins = coins.into_iter().cycle();
        let mut p = DenseRows::new(&rows, VOCABULARY).unwrap();
        let mut q = p;
        let mut coin = || coins.next().unwrap();
        let acceptance = accept_sampled_chain(&chain, &mut p, &mut q, &mut coin).unwrap();
        prop_assert_eq!(acceptance.accepted(), chain.drafted());
    }

    #[test]
    fn the_commit_plan_compacts_in_place(
        tree in trees(60), end in any::<prop::sample::Index>(), root in 0..50_usize,
        gap in 0..20_usize,
    ) {
        let path = tree.ancestors(end.index(tree.len()));
        let scratch = root + gap;
        let plan = CommitPlan::new(&path, root, scratch).unwrap();
        // Slots hold the name of the row that was written there: committed rows, then nodes.
        let mut slots: Vec<String> = (0..root).map(|slot| format!("committed {slot}")).collect();
        slots.resize(scratch, "free".to_string());
        slots.extend((0..tree.len()).map(|node| format!("node {node}")));
        for copy in plan.copies() {
            prop_assert!(copy.from != copy.to);
            slots[copy.to] = slots[copy.from].clone();
        }
        prop_assert_eq!(plan.length(), root + path.len());
        for (slot, found) in slots[..plan.length()].iter().enumerate() {
            let expected = match slot.checked_sub(root) {
                None => format!("committed {slot}"),
                Some(step) => format!("node {}", path[step]),
            };
            prop_assert_eq!(found, &expected);
        }
        if tree.is_chain() && gap == 0 {
            prop_assert!(plan.copies().is_empty(), "a chain's rows are in place");
        }
    }

    #[test]
    fn truncation_leaves_a_round_that_ended_there(tree in trees(60), keep in 0..10_usize) {
        let choices: Vec<TokenId> = (0..tree.len())
            .map(|node| tree.children(node).next().map_or(0, |child| tree.tokens()[child]))
            .collect();
        let whole = accept_greedy(&tree, &choices).unwrap();
        let mut cut = whole.clone();
        cut.truncate(keep);
        let kept = keep.clamp(1, whole.emitted.len());
        prop_assert_eq!(&cut.emitted[..], &whole.emitted[..kept]);
        prop_assert_eq!(cut.path.len(), cut.emitted.len());
        for (&node, &token) in cut.path[1..].iter().zip(&cut.emitted) {
            prop_assert_eq!(tree.tokens()[node], token);
        }
    }

    #[test]
    fn the_confidence_cut_keeps_the_best_part(
        tree in trees(11), steps in proptest::collection::vec(0.0..3.0_f32, 12),
        price in 0.01..1.0_f64,
    ) {
        let mut scores = vec![0.0_f32];
        for node in 1..tree.len() {
            scores.push(scores[tree.parent(node).unwrap()] - steps[node]);
        }
        let cost = |width: usize| 1.0 + price * (width as f64 - 1.0);
        let cut = cut_by_confidence(&tree, &scores, cost).unwrap();
        let value = |nodes: &[usize]| {
            let tokens: f64 = nodes.iter().map(|&node| f64::from(scores[node]).exp()).sum();
            tokens / cost(nodes.len())
        };
        // Every path of the cut is one of the tree: find the nodes.
        let mut nodes = vec![0];
        for node in 1..cut.len() {
            let parent = nodes[cut.parent(node).unwrap()];
            nodes.push(tree.child_with_token(parent, cut.tokens()[node]).unwrap());
        }
        prop_assert!(nodes.windows(2).all(|pair| pair[0] < pair[1]));
        // No part of the tree that holds its nodes' parents is worth more.
        for set in 0..1_u32 << (tree.len() - 1) {
            let part: Vec<usize> =
                (0..tree.len()).filter(|&node| node == 0 || set >> (node - 1) & 1 == 1).collect();
            let closed = part[1..].iter().all(|&node| part.contains(&tree.parent(node).unwrap()));
            if closed {
                prop_assert!(value(&part) <= value(&nodes) * (1.0 + 1e-6));
            }
        }
    }

    #[test]
    fn limited_plans_fit(
        topk in 1..5_usize, depth in 1..5_usize, nodes in 2..20_usize,
        depth_max in 0..7_usize, width_max in 0..24_usize,
    ) {
        let limits = Limits { depth_max, width_max };
        let tree = TreeParameters::new(topk, depth, nodes).map(Plan::Tree);
        for plan in [Plan::Plain, Plan::Chain { drafted: depth }].into_iter().chain(tree) {
            let limited = plan.limited(limits);
            if limited != Plan::Plain {
                prop_assert!(limited.depth() <= depth_max && limited.width() <= width_max);
            }
            if plan.depth() <= depth_max && plan.width() <= width_max {
                prop_assert_eq!(limited, plan);
            }
            if let Plan::Tree(tree) = limited {
                prop_assert!(TreeParameters::new(tree.topk(), tree.depth(), tree.nodes()).is_ok());
            }
        }
    }
}

#[test]
fn trees_that_are_none_are_refused() {
    use SpecError::{LengthMismatch, ParentInvalid, SiblingTwice, TreeEmpty};
    let build = |tokens: &[TokenId], parents: &[Option<usize>]| {
        DraftTree::from_parents(tokens.to_vec(), parents.to_vec()).expect_err("not a tree")
    };
    assert_eq!(build(&[], &[]), TreeEmpty);
    assert!(matches!(build(&[1, 2], &[None]), LengthMismatch { expected: 2, got: 1, .. }));
    assert_eq!(build(&[1], &[Some(0)]), ParentInvalid { node: 0, parent: Some(0) });
    assert_eq!(build(&[1, 2], &[None, None]), ParentInvalid { node: 1, parent: None });
    assert_eq!(build(&[1, 2], &[None, Some(1)]), ParentInvalid { node: 1, parent: Some(1) });
    let twice = build(&[1, 2, 2], &[None, Some(0), Some(0)]);
    assert_eq!(twice, SiblingTwice { parent: 0, token: 2 });
    let mut full = DraftTree::chain(0, &vec![1; paceline_spec::NODES_MAX - 1]);
    assert!(matches!(full.push(0, 2), Err(SpecError::TreeTooLarge { .. })));
}

#[test]
fn wrong_rows_are_refused() {
    let tree = DraftTree::chain(0, &[1]);
    let rows = |values: [f32; 4]| {
        let mut target = DenseRows::new(&values, 2).expect("two rows of two");
        accept_sampled(&tree, &mut target, &mut || 0.5)
    };
    assert!(rows([0.5, 0.5, 0.5, 0.5]).is_ok());
    assert_eq!(
        rows([0.0, 1.0, 0.0, 0.0]),
        Err(SpecError::NothingToSample { node: 1 }),
        "after the accepted token nothing is possible"
    );
    for value in [f32::NAN, -0.5, f32::INFINITY] {
        let error = rows([0.5, value, 0.5, 0.5]).expect_err("not a probability");
        assert!(
            matches!(error, SpecError::ProbabilityInvalid { node: 0, token: 1, .. }),
            "{error}"
        );
    }
    let branching = DraftTree::from_parents(vec![0, 1, 2], vec![None, Some(0), Some(0)]);
    let branching = branching.expect("a tree");
    let uniform = [0.5; 6];
    let mut p = DenseRows::new(&uniform, 2).expect("three rows of two");
    let mut q = p;
    let error = accept_sampled_chain(&branching, &mut p, &mut q, &mut || 0.5);
    assert_eq!(error, Err(SpecError::NotAChain { node: 2 }));
    let impossible = [1.0, 0.0, 1.0, 0.0];
    let mut q = DenseRows::new(&impossible, 2).expect("two rows of two");
    let error = accept_sampled_chain(&tree, &mut p, &mut q, &mut || 0.5);
    assert_eq!(error, Err(SpecError::ProposalImpossible { node: 0, token: 1 }));
    let short =
        accept_sampled(&tree, &mut DenseRows::new(&[0.0, 1.0], 2).expect("a row"), &mut || 0.5);
    assert!(matches!(short, Err(SpecError::LengthMismatch { expected: 2, got: 1, .. })));
    assert!(DenseRows::new(&[1.0; 3], 2).is_err() && DenseRows::new(&[], 0).is_ok());
}

#[test]
fn rounding_never_emits_the_impossible() {
    // The children hold all the mass, but in f32 it adds up to less than 1.
    let third = 0.333_333_3_f32;
    let row = [third, third, third, 0.0];
    let rows = [row, row, row, row].concat();
    let tree = DraftTree::from_parents(vec![0, 0, 1, 2], vec![None, Some(0), Some(0), Some(0)])
        .expect("a tree");
    let mut target = DenseRows::new(&rows, 4).expect("four rows of four");
    let acceptance = accept_sampled(&tree, &mut target, &mut || 1.0 - 1e-12).expect("valid rows");
    assert_eq!(acceptance.path, [0, 3]);
    assert_eq!(acceptance.bonus(), 2);
}

#[test]
fn wrong_paths_are_refused() {
    let plan = |path: &[usize]| CommitPlan::new(path, 5, 5).expect_err("not a path");
    assert_eq!(plan(&[1]), SpecError::PathInvalid { index: 0, node: 1 });
    assert_eq!(plan(&[0, 2, 2]), SpecError::PathInvalid { index: 2, node: 2 });
    let error = CommitPlan::new(&[0], 5, 4).expect_err("scratch below the root");
    assert_eq!(error, SpecError::ScratchBeforeRoot { scratch: 4, root: 5 });
}
