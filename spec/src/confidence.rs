//! Cuts a drafted tree down to the nodes that pay for their verification (the idea of EVICT, arXiv
//! 2605.00342, and Cascade, arXiv 2506.20675). The invariant: what remains is a draft tree, so
//! verification stays lossless.

use crate::{DraftTree, SpecError};

/// The part of `tree` that makes the most expected tokens a unit of cost.
///
/// `scores` holds each node's cumulative log-probability under the draft, the root's 0 first (see
/// [`TreeBuilder::scores`](crate::TreeBuilder::scores)); exp(score) is taken as the probability
/// that the node is accepted. `cost(w)` is the cost of a round whose target pass has w tokens, in
/// any unit, for w = 1 to the tree's nodes: include what the round has cost before, such as the
/// drafting that is already done. Equal gains go to the smaller tree; the root always stays.
///
/// The draft must be deterministic. Cutting a *sampled* chain by the probability of the very tokens
/// that were sampled would change the proposal distribution, and verification would no longer be
/// lossless.
///
/// # Errors
/// [`SpecError::LengthMismatch`], [`SpecError::CandidateNotANumber`] and
/// [`SpecError::CostInvalid`].
pub fn cut_by_confidence(
    tree: &DraftTree,
    scores: &[f32],
    mut cost: impl FnMut(usize) -> f64,
) -> Result<DraftTree, SpecError> {
    if scores.len() != tree.len() {
        return Err(SpecError::LengthMismatch {
            what: "the list of scores",
            expected: tree.len(),
            got: scores.len(),
        });
    }
    if let Some(index) = scores.iter().position(|score| score.is_nan()) {
        return Err(SpecError::CandidateNotANumber { index });
    }
    let order = order_by_score(tree, scores);
    let mut best = (0.0, 1);
    let mut tokens = 0.0;
    for (index, &(score, _)) in order.iter().enumerate() {
        let width = index + 1;
        tokens += f64::from(score).exp();
        let cost = cost(width);
        if !(cost > 0.0 && cost.is_finite()) {
            return Err(SpecError::CostInvalid { width, cost });
        }
        if tokens / cost > best.0 {
            best = (tokens / cost, width);
        }
    }
    let mut kept: Vec<usize> = order[..best.1].iter().map(|&(_, node)| node).collect();
    kept.sort_unstable();
    let mut place = vec![0; tree.len()];
    let mut cut = DraftTree::root_only(tree.root());
    for &node in &kept[1..] {
        let parent = tree.parent(node).expect("only the root has no parent, and it comes first");
        place[node] = cut.push(place[parent], tree.tokens()[node])?;
    }
    Ok(cut)
}

/// Nodes by falling score, ties by index. A score above its parent's counts as its parent's, so
/// that every prefix of the order holds its nodes' parents; the root's counts as 0.
fn order_by_score(tree: &DraftTree, scores: &[f32]) -> Vec<(f32, usize)> {
    let mut order: Vec<(f32, usize)> = Vec::with_capacity(tree.len());
    for (node, &score) in scores.iter().enumerate() {
        let bound = tree.parent(node).map(|parent| order[parent].0);
        order.push((bound.map_or(0.0, |bound| score.min(bound)), node));
    }
    order.sort_by(|a, b| b.0.partial_cmp(&a.0).expect("no score is NaN").then(a.1.cmp(&b.1)));
    order
}
