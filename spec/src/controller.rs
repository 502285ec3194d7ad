//! Chooses before each round how far to draft, zero included, so as to emit the most tokens a
//! second. The invariant: the choice is a function of the outcomes observed so far; there is no
//! clock and no random number in here.
//!
//! Two models are learnt: what a target pass of w tokens and a drafting of k levels cost (`cost`:
//! medians, so that noise and rare slow passes do no harm), and how likely each depth is accepted
//! (`rate`). The controller stays with one way of drafting, or with none, and now and then tries
//! another in a *trial*. Trials are paid from a small allowance that grows with the rounds done,
//! and wait twice as long after each failure, so that a useless draft costs next to nothing. Read
//! [`Controller::decide`] and [`Controller::observe`] first.

mod cost;
mod rate;
mod trial;

use crate::{Limits, Plan, TreeParameters};
use cost::CostCurve;
use rate::AcceptanceRates;
use trial::Trial;

/// Plain rounds at the start, so that the cost of a plain pass is known.
const PLAIN_ROUNDS_FIRST: usize = 3;
/// Most drafted tokens of the first chains of a trial: what engines ship as their default for
/// EAGLE-3.
const CHAIN_DRAFTED_FIRST: usize = 3;
/// As much of an early trial while drafting is off.
const CHAIN_DRAFTED_PROBE: usize = 1;
/// Another chain length must promise this much more before it is taken.
const GAIN_LENGTH: f64 = 1.015;
/// Another way of drafting must promise this much more before it is taken.
const GAIN_SWITCH: f64 = 1.02;
/// Drafting stops when it promises less than this share of the plain rate.
const GAIN_KEEP: f64 = 0.99;
/// Rounds without a plain one after which its cost is measured again.
const PLAIN_REFRESH_ROUNDS: u64 = 512;
/// Rounds for which the acceptance of a way of drafting that is not in use counts as known.
const FRESH_ROUNDS: u64 = 512;
/// Draws from which an estimate of acceptance outlasts the use of its draft.
const LASTING_DRAWS: f64 = 64.0;

/// What the controller may choose among. A tree that the engine's usual [`Limits`] leave no room
/// for is never tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControllerOptions {
    /// The longest chain, in drafted tokens; 0 rules chains out.
    pub chain_drafted_max: usize,
    /// Trees to consider besides; may be empty.
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
    /// Seconds of the draft's work for this round in the steady state, its rows for the tokens that
    /// the round before committed included.
    pub draft_seconds: f64,
    /// Seconds of everything else in the round: the target pass, verification, commit.
    pub verify_seconds: f64,
    /// Seconds the draft took for rows that had piled up while it was off.
    pub catch_up_seconds: f64,
    /// Rows of the sequences that the draft has not seen after this round, and would have to catch
    /// up on before it drafts.
    pub waiting_rows: usize,
}

/// Decides how far to draft; one for each request, or one for a stream of like requests.
///
/// ```
/// use paceline_spec::{Controller, ControllerOptions, Limits, Plan, RoundOutcome};
///
/// let options = ControllerOptions { chain_drafted_max: 5, trees: Vec::new() };
/// let mut controller = Controller::new(options);
/// for round in 0..200 {
///     let plan = controller.decide(Limits::remaining(200 - round, 4096, 4096));
///     // Here: draft, verify, measure. This world accepts all, at 5 % a token.
///     controller.observe(&RoundOutcome {
///         plan,
///         width: plan.width(),
///         accepted: plan.depth(),
///         draft_seconds: 1e-4 * plan.depth() as f64,
///         verify_seconds: 1e-2 * (1.0 + 0.05 * plan.depth() as f64),
///         catch_up_seconds: 0.0,
///         waiting_rows: 0,
///     });
/// }
/// assert_eq!(controller.decide(Limits::NONE), Plan::Chain { drafted: 5 });
/// ```
#[derive(Debug, Clone)]
pub struct Controller {
    round: u64,
    passes: CostCurve,
    drafts: Vec<Draft>,
    /// The draft in use; none while drafting is off.
    current: Option<usize>,
    trial: Option<Trial>,
    /// What may be spent on trials, in plain rounds.
    allowance: f64,
    /// Rows that a draft would have to catch up on, and the seconds of one, 0 while unknown.
    waiting_rows: usize,
    waiting_row_seconds: f64,
}

/// One way to draft: chains of any length, or a tree.
#[derive(Debug, Clone)]
struct Draft {
    shape: Shape,
    rates: AcceptanceRates,
    cost: CostCurve,
    /// For chains the length in use; else the tree's depth.
    depth: usize,
    /// The last round that drafted so.
    used_at: Option<u64>,
    adopted_at: u64,
    wait_until: u64,
    wait_rounds: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    Chain { drafted_max: usize },
    Tree(TreeParameters),
}

impl Controller {
    /// A controller that has measured nothing yet.
    pub fn new(options: ControllerOptions) -> Self {
        let ControllerOptions { chain_drafted_max: drafted_max, trees } = options;
        let chain = (drafted_max > 0).then_some(Shape::Chain { drafted_max });
        let shapes = chain.into_iter().chain(trees.into_iter().map(Shape::Tree));
        Self {
            round: 0,
            passes: CostCurve::with_base(),
            drafts: shapes.map(Draft::new).collect(),
            current: None,
            trial: None,
            allowance: trial::ALLOWANCE_FIRST,
            waiting_rows: 0,
            waiting_row_seconds: 0.0,
        }
    }

    /// The plan for the next round, within `limits`. Call [`observe`](Self::observe) after it.
    pub fn decide(&mut self, limits: Limits) -> Plan {
        if self.plain_cost().is_none() || self.passes.samples(1) < PLAIN_ROUNDS_FIRST {
            return Plan::Plain;
        }
        if self.trial.is_none() {
            self.trial = self.next_trial(limits);
        }
        if let Some(plan) = self.trial_within(limits) {
            return plan;
        }
        self.settled(limits)
    }

    /// What is in use, within `limits`: for a round that will not be observed, because something
    /// else is in it that changes what it costs. Trials wait for rounds that teach something.
    pub fn settled(&self, limits: Limits) -> Plan {
        self.current.map_or(Plan::Plain, |draft| self.plan_within(draft, limits))
    }

    /// Learns from a round. Seconds that are negative or not finite are left out, as is a pass that
    /// took no time at all.
    pub fn observe(&mut self, outcome: &RoundOutcome) {
        self.observe_batch(outcome, &[outcome.accepted]);
    }

    /// As [`observe`](Self::observe), for a round in which several sequences went through the same
    /// passes with the same plan: `accepted` has one count for each of them and takes the place of
    /// [`RoundOutcome::accepted`]; [`RoundOutcome::width`] is that of one sequence; the seconds are
    /// those of all. A controller serves batches of about one size, whose costs are alike.
    pub fn observe_batch(&mut self, outcome: &RoundOutcome, accepted: &[usize]) {
        self.round += 1;
        let waited = std::mem::replace(&mut self.waiting_rows, outcome.waiting_rows);
        let valid = |seconds: f64| seconds.is_finite() && seconds >= 0.0;
        if valid(outcome.verify_seconds) && outcome.verify_seconds > 0.0 && outcome.width > 0 {
            self.passes.observe(outcome.width, outcome.verify_seconds, self.round);
        }
        let depth = outcome.plan.depth();
        let used = self.drafts.iter().position(|draft| draft.shape.matches(outcome.plan));
        if let Some(index) = used {
            self.observe_draft(index, outcome, accepted);
        }
        let Some(plain) = self.plain_cost() else {
            return;
        };
        let catch_up = Some(outcome.catch_up_seconds).filter(|&seconds| valid(seconds));
        if let Some(seconds) = catch_up.filter(|&seconds| seconds > 0.0 && waited > 0) {
            self.waiting_row_seconds = seconds / waited as f64;
        }
        let seconds = self.modelled_seconds(outcome, used).unwrap_or(plain);
        self.earn_allowance(seconds / plain);
        match self.trial.take() {
            Some(trial) => {
                let seconds = seconds + catch_up.unwrap_or(0.0);
                let total: usize = accepted.iter().map(|&count| count.min(depth)).sum();
                let mean = total as f64 / accepted.len().max(1) as f64;
                self.trial = self.continue_trial(trial, outcome.plan, mean, seconds);
            }
            None => self.reconsider(),
        }
    }

    /// What a round says about the draft that it used.
    fn observe_draft(&mut self, index: usize, outcome: &RoundOutcome, accepted: &[usize]) {
        let depth = outcome.plan.depth();
        let draft = &mut self.drafts[index];
        if outcome.draft_seconds.is_finite() && outcome.draft_seconds >= 0.0 {
            draft.cost.observe(depth, outcome.draft_seconds, self.round);
        }
        let mut has_fallen = false;
        for &count in accepted {
            has_fallen |= draft.rates.observe(depth, count.min(depth));
        }
        if has_fallen {
            // The text has changed, so what is remembered of other drafts is no longer true.
            self.drafts.iter_mut().for_each(|draft| draft.used_at = None);
        }
        self.drafts[index].used_at = Some(self.round);
    }

    /// Likely seconds of a plain round.
    fn plain_cost(&self) -> Option<f64> {
        self.passes.estimate(1)
    }

    /// What a round costs by the models, free of the noise of this one measurement.
    fn modelled_seconds(&self, outcome: &RoundOutcome, used: Option<usize>) -> Option<f64> {
        let pass = self.passes.estimate(outcome.width)?;
        let drafting =
            used.and_then(|draft| self.drafts[draft].cost.estimate(outcome.plan.depth()));
        Some(pass + drafting.unwrap_or(0.0))
    }

    /// Tokens a second that a draft of `depth` levels promises, with hope about costs that are not
    /// well known.
    fn rate(&self, draft: usize, depth: usize) -> Option<f64> {
        let tokens = self.drafts[draft].rates.tokens(depth);
        Some(tokens / self.hoped_seconds(draft, depth)?)
    }

    /// The least that a round is likely to cost.
    fn hoped_seconds(&self, draft: usize, depth: usize) -> Option<f64> {
        let Draft { shape, cost, .. } = &self.drafts[draft];
        let pass = self.passes.hoped(shape.width(depth), self.round)?;
        Some(pass + cost.hoped(depth, self.round).unwrap_or(0.0))
    }

    /// The rate of what is in use.
    fn current_rate(&self) -> Option<f64> {
        match self.current {
            Some(draft) => self.rate(draft, self.drafts[draft].depth),
            None => self.plain_cost().map(f64::recip),
        }
    }

    /// The depth that promises most, of those up to `depth_max`; the one in use unless another is
    /// clearly better.
    fn best_depth(&self, draft: usize, depth_max: usize) -> usize {
        let Draft { shape, depth: kept, cost, .. } = &self.drafts[draft];
        let Shape::Chain { drafted_max } = *shape else {
            return *kept;
        };
        let longest = drafted_max.min(depth_max);
        if cost.estimate(1).is_none() {
            return CHAIN_DRAFTED_FIRST.min(longest);
        }
        let hope = |depth: usize| self.rate(draft, depth).unwrap_or(0.0);
        let mut best = (*kept).clamp(1, longest);
        let mut bar = GAIN_LENGTH * hope(best);
        for depth in 1..=longest {
            if hope(depth) > bar {
                (best, bar) = (depth, hope(depth));
            }
        }
        best
    }

    /// The draft in use, cut to `limits`: a shorter chain, or for a tree that does not fit the best
    /// chain if chains are known to pay.
    fn plan_within(&self, draft: usize, limits: Limits) -> Plan {
        let plan = self.drafts[draft].plan();
        if fits(plan, limits) {
            return plan;
        }
        let chain = self.drafts.iter().position(|other| matches!(other.shape, Shape::Chain { .. }));
        let room = limits.depth_max.min(limits.width_max.saturating_sub(1));
        let Some(chain) = chain.filter(|_| room > 0) else {
            return Plan::Plain;
        };
        let depth = self.best_depth(chain, room);
        let pays = self.rate(chain, depth).zip(self.plain_cost());
        if pays.is_some_and(|(rate, plain)| rate * plain > 1.0) {
            Plan::Chain { drafted: depth }
        } else {
            Plan::Plain
        }
    }

    /// Outside trials: the length of the chain in use, and whether what is in use still pays.
    fn reconsider(&mut self) {
        let Some(current) = self.current else {
            return;
        };
        self.drafts[current].depth = self.best_depth(current, usize::MAX);
        let (Some(rate), Some(plain)) = (self.current_rate(), self.plain_cost()) else {
            return;
        };
        let others = (0..self.drafts.len()).filter(|&other| other != current);
        let known = others.filter(|&other| self.drafts[other].is_fresh(self.round));
        let known = known.filter_map(|other| {
            let depth = self.drafts[other].depth;
            Some((other, self.rate(other, depth)?))
        });
        let best = known.max_by(|a, b| a.1.total_cmp(&b.1));
        if let Some((other, _)) = best.filter(|best| best.1 > GAIN_SWITCH * rate.max(1.0 / plain)) {
            self.leave(current);
            self.adopt(other);
        } else if rate * plain < GAIN_KEEP {
            self.leave(current);
            self.current = None;
        }
    }

    fn adopt(&mut self, draft: usize) {
        self.current = Some(draft);
        self.drafts[draft].adopted_at = self.round;
    }

    /// What did not last counts as a failed trial; what did may be tried again soon.
    fn leave(&mut self, draft: usize) {
        let round = self.round;
        let draft = &mut self.drafts[draft];
        let lasted = round - draft.adopted_at >= trial::LASTING_ROUNDS;
        if draft.rates.draws() < LASTING_DRAWS {
            // It is left on the first signs of a change, which say little about what comes.
            draft.used_at = None;
        }
        draft.postpone(round, lasted);
    }
}

impl Draft {
    fn new(shape: Shape) -> Self {
        let depth = match shape {
            Shape::Chain { drafted_max } => CHAIN_DRAFTED_FIRST.min(drafted_max),
            Shape::Tree(parameters) => parameters.depth(),
        };
        Self {
            shape,
            rates: AcceptanceRates::default(),
            cost: CostCurve::from_origin(),
            depth,
            used_at: None,
            adopted_at: 0,
            wait_until: 0,
            wait_rounds: trial::WAIT_ROUNDS_MIN,
        }
    }

    fn plan(&self) -> Plan {
        match self.shape {
            Shape::Chain { .. } => Plan::Chain { drafted: self.depth },
            Shape::Tree(parameters) => Plan::Tree(parameters),
        }
    }

    fn is_fresh(&self, round: u64) -> bool {
        self.used_at.is_some_and(|used_at| round - used_at < FRESH_ROUNDS)
    }

    /// Puts off the next trial: twice as long as the last time, or briefly after a success.
    fn postpone(&mut self, round: u64, success: bool) {
        if success {
            self.wait_rounds = trial::WAIT_ROUNDS_MIN;
        }
        self.wait_until = round + self.wait_rounds;
        if !success {
            self.wait_rounds = (self.wait_rounds * 2).min(trial::WAIT_ROUNDS_MAX);
        }
    }
}

impl Shape {
    fn width(&self, depth: usize) -> usize {
        match self {
            Self::Chain { .. } => depth + 1,
            Self::Tree(parameters) => parameters.nodes(),
        }
    }

    fn matches(&self, plan: Plan) -> bool {
        match (self, plan) {
            (Self::Chain { .. }, Plan::Chain { .. }) => true,
            (Self::Tree(own), Plan::Tree(parameters)) => *own == parameters,
            _ => false,
        }
    }
}

fn fits(plan: Plan, limits: Limits) -> bool {
    plan.depth() <= limits.depth_max && plan.width() <= limits.width_max
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_that_are_not_observed_try_nothing() {
        let options = ControllerOptions { chain_drafted_max: 5, trees: Vec::new() };
        let mut controller = Controller::new(options);
        for _ in 0..PLAIN_ROUNDS_FIRST {
            assert_eq!(controller.decide(Limits::NONE), Plan::Plain);
            controller.observe(&RoundOutcome {
                plan: Plan::Plain,
                width: 1,
                accepted: 0,
                draft_seconds: 0.0,
                verify_seconds: 1e-2,
                catch_up_seconds: 0.0,
                waiting_rows: 0,
            });
        }
        assert_eq!(controller.settled(Limits::NONE), Plan::Plain);
        // The trial is still to come.
        let first = Plan::Chain { drafted: CHAIN_DRAFTED_PROBE };
        assert_eq!(controller.decide(Limits::NONE), first);
        assert_eq!(controller.settled(Limits::NONE), Plan::Plain);
    }
}
