//! Chooses before each round how far to draft, from measured costs and recent acceptance.

use crate::{Limits, Plan, TreeParameters};

/// What the controller may choose among.
#[derive(Debug, Clone, PartialEq)]
pub struct ControllerOptions {
    /// The longest chain, in drafted tokens; 0 rules chains out.
    pub chain_drafted_max: usize,
    /// Trees to consider; may be empty.
    pub trees: Vec<TreeParameters>,
}

/// What a round did and took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RoundOutcome {
    /// What the round did: the plan decided, or what was left of it.
    pub plan: Plan,
    /// Tokens in the target pass, the root included.
    pub width: usize,
    /// Drafted tokens accepted, before any cut by stop tokens.
    pub accepted: usize,
    /// Seconds of the draft's work for this round in the steady state, its rows for newly committed
    /// tokens included.
    pub draft_seconds: f64,
    /// Seconds of the target pass, verification and commit.
    pub verify_seconds: f64,
    /// Seconds the draft took for rows that had piled up while it was off.
    pub catch_up_seconds: f64,
}

/// The controller.
#[derive(Debug, Clone)]
pub struct Controller {
    options: ControllerOptions,
}

impl Controller {
    /// A controller that has measured nothing yet.
    pub fn new(options: ControllerOptions) -> Self {
        Self { options }
    }

    /// The plan for the next round, within `limits`.
    pub fn decide(&mut self, limits: Limits) -> Plan {
        Plan::Chain { drafted: self.options.chain_drafted_max }.limited(limits)
    }

    /// Learns from a round.
    pub fn observe(&mut self, _outcome: &RoundOutcome) {}
}
