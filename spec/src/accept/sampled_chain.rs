//! The lossless sampling rule for chains whose tokens were sampled from the draft (Leviathan et al.
//! 2023, section 2.3). Its invariant: at each node a token is emitted with exactly its target
//! probability, provided that the proposal given is the one that was sampled from.

use crate::{Acceptance, DraftTree, ProbabilityRows, SpecError};

/// Accepts the token x drafted below a node with probability min(1, p(x)/q(x)), and on rejection
/// samples from the normalised max(p - q, 0).
///
/// `target` gives p and `proposal` gives q after each node that is reached; q is the exact
/// distribution that the drafted token was drawn from, in the target's ids (0 for tokens outside
/// the draft's vocabulary), any draft temperature included. It is not asked for after the last
/// node. `coin` gives independent numbers uniform in [0, 1).
///
/// # Errors
/// [`SpecError::NotAChain`], [`SpecError::ProposalImpossible`] if q(x) is 0,
/// [`SpecError::ProbabilityInvalid`], [`SpecError::NothingToSample`], and whatever the rows return.
pub fn accept_sampled_chain<P, Q>(
    chain: &DraftTree,
    target: &mut P,
    proposal: &mut Q,
    coin: &mut impl FnMut() -> f64,
) -> Result<Acceptance, P::Error>
where
    P: ProbabilityRows,
    Q: ProbabilityRows<Error = P::Error>,
{
    if let Some(node) = chain.branching_node() {
        return Err(SpecError::NotAChain { node }.into());
    }
    let mut path = vec![0];
    for node in 0..chain.len() {
        let p = target.row(node)?;
        p.check(node)?;
        let Some(&token) = chain.tokens().get(node + 1) else {
            let bonus = p.sample(coin()).ok_or(SpecError::NothingToSample { node })?;
            return Ok(Acceptance::new(chain, path, bonus));
        };
        let q = proposal.row(node)?;
        q.check(node)?;
        let proposed = f64::from(q.probability(token));
        if proposed == 0.0 {
            return Err(SpecError::ProposalImpossible { node, token }.into());
        }
        if coin() * proposed < f64::from(p.probability(token)) {
            path.push(node + 1);
            continue;
        }
        // p is below q at `token`, so it is above q elsewhere, unless rounding ate the difference:
        // then p and q are equal to the last digits and p itself is the law.
        let draw = coin();
        let bonus = p.sample_excess(&q, draw).or_else(|| p.sample(draw));
        let bonus = bonus.ok_or(SpecError::NothingToSample { node })?;
        return Ok(Acceptance::new(chain, path, bonus));
    }
    unreachable!("the last node of a chain has no drafted token after it")
}
