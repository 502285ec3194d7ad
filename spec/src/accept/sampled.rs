//! The lossless sampling rule for deterministic drafts, trees and chains alike. Its invariant: at
//! each node a token is emitted with exactly its target probability.
//!
//! At a node with distribution p the children x_1, x_2, … are accepted with p(x_1), p(x_2), … by
//! one coin. The rest of the coin's range, 1 - Σ p(x_i), belongs to all other tokens, which an
//! independent coin chooses among in proportion to p. (SpecInfer, section 4.3, gives the sequential
//! form of the same law.)

use crate::{Acceptance, DraftTree, ProbabilityRows, SpecError};

/// Samples from the target down the tree, taking drafted tokens where the sample falls on one.
///
/// The draft must be deterministic: which tokens are in the tree, and in which order, may depend on
/// the draft's probabilities but not on draws from them (see [`accept_sampled_chain`] for such
/// drafts). `target` gives the distribution after each node that is reached, after temperature,
/// penalties and filters; `coin` gives independent numbers uniform in [0, 1), one or two a node.
///
/// [`accept_sampled_chain`]: crate::accept_sampled_chain
///
/// # Errors
/// [`SpecError::ProbabilityInvalid`], [`SpecError::NothingToSample`], and whatever `target`
/// returns.
pub fn accept_sampled<R: ProbabilityRows>(
    tree: &DraftTree,
    target: &mut R,
    coin: &mut impl FnMut() -> f64,
) -> Result<Acceptance, R::Error> {
    let mut path = vec![0];
    let mut node = 0;
    let mut siblings = Vec::new();
    loop {
        let row = target.row(node)?;
        row.check(node)?;
        siblings.clear();
        let mut accepted = None;
        let mut possible = None;
        if tree.children(node).next().is_some() {
            let draw = coin();
            let mut below = 0.0;
            for child in tree.children(node) {
                let token = tree.tokens()[child];
                let probability = row.probability(token);
                below += f64::from(probability);
                if probability > 0.0 {
                    possible = Some(child);
                    if draw < below {
                        accepted = possible;
                        break;
                    }
                }
                siblings.push(token);
            }
        }
        if accepted.is_none() {
            if let Some(bonus) = row.sample_without(&siblings, coin()) {
                return Ok(Acceptance::new(tree, path, bonus));
            }
            // The children hold all the mass, and the draw fell into the gap that rounding left
            // between their sum and 1.
            accepted = possible;
        }
        node = accepted.ok_or(SpecError::NothingToSample { node })?;
        path.push(node);
    }
}
