//! The greedy rule: accept what the target would have chosen. Its invariant: the tokens emitted are
//! those of plain greedy decoding, one by one.

use crate::{Acceptance, DraftTree, SpecError, TokenId};

/// Follows the target's choices down the tree. `choices` holds, for each node, the target's argmax
/// after it.
///
/// # Errors
/// [`SpecError::LengthMismatch`] unless there is one choice for each node.
pub fn accept_greedy(tree: &DraftTree, choices: &[TokenId]) -> Result<Acceptance, SpecError> {
    if choices.len() != tree.len() {
        return Err(SpecError::LengthMismatch {
            what: "the list of the target's choices",
            expected: tree.len(),
            got: choices.len(),
        });
    }
    let mut path = vec![0];
    let mut node = 0;
    while let Some(child) = tree.child_with_token(node, choices[node]) {
        path.push(child);
        node = child;
    }
    Ok(Acceptance::new(tree, path, choices[node]))
}
