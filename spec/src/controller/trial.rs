//! Trials: a few rounds with another way of drafting, to see whether it is better. The invariant:
//! what trials lose stays within an allowance that grows with the rounds done.

use super::{
    CHAIN_DRAFTED_FIRST, CHAIN_DRAFTED_PROBE, Controller, Draft, GAIN_SWITCH, PLAIN_REFRESH_ROUNDS,
    Shape, fits,
};
use crate::{Limits, Plan};

/// Share of all rounds that trials may cost, what may be spent at the start, and the most that can
/// be saved up, the last two in plain rounds. So in 2,000 rounds a useless draft costs 23 plain
/// rounds or 1.2 %, and in the first 200 of a controller 5 or 2.5 %, but for what the last trial
/// overdraws. A useful draft costs that too until it is found: over the first 256 tokens the choice
/// reached 0.95 of the best fixed way (docs/results/2026-12-01-xeon-2-cores).
const ALLOWANCE_EARNED: f64 = 0.01;
pub(super) const ALLOWANCE_FIRST: f64 = 3.0;
const ALLOWANCE_MAX: f64 = 8.0;
/// What a trial may overdraw before it ends.
const OVERDRAFT_MAX: f64 = 2.0;
/// Rounds after which a trial may fail, may succeed, and ends.
const ROUNDS_MIN: u32 = 4;
const ROUNDS_ADOPT: u32 = 8;
const ROUNDS_MAX: u32 = 24;
/// Plain rounds in a trial that measures the cost of a plain pass again.
const ROUNDS_PLAIN: u32 = 2;
/// A draft that would not pay with this acceptance at each depth is not tried.
const RATE_BEST: f64 = 0.95;
/// Of the tokens that chains miss, the most that a tree may find: what it is taken to do, at best,
/// once chains are known. By the demo's reference lengths (2.67 tokens a round with chains of 4,
/// 3.54 with the tree of as many levels) its tree finds about 0.4 of them.
const FOUND_BEST: f64 = 0.75;
/// Rounds of a controller in which trials must be as cheap as can be: those of a short answer.
const EARLY_ROUNDS: u64 = 256;
/// Rounds after which a trial ends if the fastest of them leaves no hope.
const ROUNDS_COST: u32 = 2;
/// Rounds between a failed trial and the next one: the first wait, doubled with each failure.
pub(super) const WAIT_ROUNDS_MIN: u64 = 32;
pub(super) const WAIT_ROUNDS_MAX: u64 = 512;
/// Rounds before a trial that found no clear difference goes on.
const WAIT_ROUNDS_UNDECIDED: u64 = 128;
/// Rounds in use after which a way of drafting did not fail.
pub(super) const LASTING_ROUNDS: u64 = 128;
/// Draws of the past that count in a trial, if they are recent and another draft is in use. While
/// drafting is off, the past is what drafting was switched off for, and none count.
const MEMORY_DRAWS: f64 = 64.0;

/// A trial that is under way.
#[derive(Debug, Clone)]
pub(super) struct Trial {
    /// The draft under trial; none for plain rounds.
    draft: Option<usize>,
    /// What the next round does.
    pub(super) plan: Plan,
    rounds: u32,
    /// Of its fastest round.
    seconds_least: f64,
    /// The allowance when it began.
    allowance_before: f64,
}

impl Controller {
    /// The trial that is due, if any.
    pub(super) fn next_trial(&mut self, limits: Limits) -> Option<Trial> {
        let measured_at = self.passes.measured_at(1).unwrap_or(0);
        if self.current.is_some() && self.round - measured_at >= PLAIN_REFRESH_ROUNDS {
            return Some(self.begin_trial(None, Plan::Plain));
        }
        for draft in 0..self.drafts.len() {
            let round = self.round;
            if self.is_due(draft, limits) && !self.could_pay(draft) {
                self.drafts[draft].postpone(round, false);
            }
        }
        // The one that failed least; of several, the one that has waited longest. What cannot be
        // afforded yet does not hold up the rest.
        let due = (0..self.drafts.len())
            .filter(|&draft| self.is_due(draft, limits) && self.affords(draft));
        let draft = due.min_by_key(|&draft| {
            let Draft { wait_rounds, wait_until, .. } = self.drafts[draft];
            (wait_rounds, wait_until)
        })?;
        let remembered = self.current.is_some() && self.drafts[draft].is_fresh(self.round);
        let memory = if remembered { MEMORY_DRAWS } else { 0.0 };
        self.drafts[draft].rates.limit_memory(memory);
        let mut depth_max = self.drafts[draft].trial_plan(limits)?.depth();
        if self.current.is_none() && self.round < EARLY_ROUNDS {
            // Whether anything is accepted at all is told by the cheapest rounds. Later trials are
            // rare, and longer chains decide them sooner.
            depth_max = depth_max.min(CHAIN_DRAFTED_PROBE);
        }
        self.drafts[draft].depth = self.best_depth(draft, depth_max);
        Some(self.begin_trial(Some(draft), self.drafts[draft].plan()))
    }

    fn begin_trial(&self, draft: Option<usize>, plan: Plan) -> Trial {
        let allowance_before = self.allowance;
        Trial { draft, plan, rounds: 0, seconds_least: f64::INFINITY, allowance_before }
    }

    /// The plan of the trial that is under way: a shorter chain where there is little room, and the
    /// end of a tree's trial where the tree does not fit.
    pub(super) fn trial_within(&mut self, limits: Limits) -> Option<Plan> {
        let trial = self.trial.as_mut()?;
        if !fits(trial.plan, limits) {
            match (trial.plan, trial.plan.limited(limits)) {
                (Plan::Chain { .. }, shorter @ Plan::Chain { .. }) => trial.plan = shorter,
                _ => {
                    let draft = trial.draft;
                    self.trial = None;
                    if let Some(draft) = draft {
                        self.drafts[draft].wait_until = self.round + WAIT_ROUNDS_MIN;
                    }
                    return None;
                }
            }
        }
        self.trial.as_ref().map(|trial| trial.plan)
    }

    /// Counts a round of `trial` that took `seconds`, and says whether it goes on.
    pub(super) fn continue_trial(
        &mut self,
        mut trial: Trial,
        plan: Plan,
        accepted_mean: f64,
        seconds: f64,
    ) -> Option<Trial> {
        let (Some(bar), Some(plain)) = (self.current_rate(), self.plain_cost()) else {
            return None;
        };
        if plan != trial.plan {
            // The engine did something else, which says nothing about the trial.
            return Some(trial);
        }
        let lost_seconds = seconds - (accepted_mean + 1.0) / bar;
        // A lucky trial earns back what it lost, no more: luck must not pay for dearer trials.
        self.allowance = (self.allowance - lost_seconds / plain).min(trial.allowance_before);
        trial.rounds += 1;
        trial.seconds_least = trial.seconds_least.min(seconds);
        let Some(draft) = trial.draft else {
            return (trial.rounds < ROUNDS_PLAIN).then_some(trial);
        };
        if trial.rounds < ROUNDS_MIN {
            let tokens_best = self.tokens_best(draft, plan.depth());
            if trial.rounds >= ROUNDS_COST && tokens_best < bar * trial.seconds_least {
                self.drafts[draft].postpone(self.round, false);
                return None;
            }
            return Some(trial);
        }
        let depth = self.best_depth(draft, usize::MAX);
        self.drafts[draft].depth = depth;
        trial.plan = self.drafts[draft].plan();
        let rate = self.rate(draft, depth).unwrap_or(0.0);
        let rates = &self.drafts[draft].rates;
        let hoped = rate * rates.tokens_hoped(depth) / rates.tokens(depth);
        if trial.rounds >= ROUNDS_ADOPT && rate > GAIN_SWITCH * bar {
            if let Some(current) = self.current {
                self.leave(current);
            }
            self.adopt(draft);
            return None;
        }
        let round = self.round;
        if hoped < bar || self.allowance < -OVERDRAFT_MAX {
            self.drafts[draft].postpone(round, false);
            return None;
        }
        if trial.rounds >= ROUNDS_MAX {
            self.drafts[draft].wait_until = round + WAIT_ROUNDS_UNDECIDED;
            return None;
        }
        Some(trial)
    }

    /// Adds the share of a round that cost `plain_rounds` plain ones.
    pub(super) fn earn_allowance(&mut self, plain_rounds: f64) {
        let earned = ALLOWANCE_EARNED * plain_rounds;
        self.allowance = (self.allowance + earned).min(ALLOWANCE_MAX);
    }

    fn is_due(&self, draft: usize, limits: Limits) -> bool {
        let Draft { wait_until, .. } = self.drafts[draft];
        self.current != Some(draft)
            && self.round >= wait_until
            && self.drafts[draft].trial_plan(limits).is_some()
    }

    /// Whether the best imaginable acceptance would make the draft better than what is in use.
    fn could_pay(&self, draft: usize) -> bool {
        let Some(bar) = self.current_rate() else {
            return false;
        };
        let depths = match self.drafts[draft].shape {
            Shape::Chain { drafted_max } => 1..=drafted_max,
            Shape::Tree(parameters) => parameters.depth()..=parameters.depth(),
        };
        depths.into_iter().any(|depth| {
            let seconds = self.hoped_seconds(draft, depth).unwrap_or(0.0);
            self.tokens_best(draft, depth) > bar * seconds
        })
    }

    /// Tokens a round with the best imaginable acceptance at each depth.
    fn tokens_best(&self, draft: usize, depth: usize) -> f64 {
        let chain = self.drafts.iter().find(|other| matches!(other.shape, Shape::Chain { .. }));
        let rate = match (self.drafts[draft].shape, chain) {
            (Shape::Tree(_), Some(chain)) if chain.rates.draws() >= f64::from(ROUNDS_MIN) => {
                let rate = chain.rates.tokens_hoped(1) - 1.0;
                RATE_BEST.min(rate + FOUND_BEST * (1.0 - rate))
            }
            _ => RATE_BEST,
        };
        (0..=depth).map(|level| rate.powi(level as i32)).sum()
    }

    /// Whether the allowance covers the shortest trial should nothing be accepted, with what the
    /// draft has to catch up on before. A trial dearer than can be saved up waits until all is
    /// saved up.
    fn affords(&self, draft: usize) -> bool {
        let (Some(bar), Some(plain)) = (self.current_rate(), self.plain_cost()) else {
            return false;
        };
        let depth = self.drafts[draft].trial_plan(Limits::NONE).map_or(0, |plan| plan.depth());
        let seconds = self.hoped_seconds(draft, depth).unwrap_or(0.0);
        let catch_up = self.waiting_rows as f64 * self.waiting_row_seconds;
        let loss = catch_up + f64::from(ROUNDS_MIN) * (seconds - 1.0 / bar).max(0.0);
        self.allowance >= (loss / plain).min(ALLOWANCE_MAX)
    }
}

impl Draft {
    /// The longest plan that a trial can start with; none if there is no room.
    fn trial_plan(&self, limits: Limits) -> Option<Plan> {
        let plan = match self.shape {
            Shape::Chain { drafted_max } => {
                Plan::Chain { drafted: CHAIN_DRAFTED_FIRST.min(drafted_max) }.limited(limits)
            }
            Shape::Tree(parameters) => Plan::Tree(parameters),
        };
        (plan != Plan::Plain && fits(plan, limits)).then_some(plan)
    }
}
