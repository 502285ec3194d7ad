//! How far each sequence drafts in a round.
//!
//! Fixed ways of drafting are cut to what the request has room for. All sequences of a round that
//! leave it to the engine draft alike, as `spec`'s controller says, which learns from the costs of
//! whole rounds: with more sequences a pass of one row each is already well used, so the rows of
//! drafts cost more of it, and where they do not pay, drafting turns itself off. Costs depend on
//! the number of sequences, so there is one controller for each power of two of them. Beside
//! sequences that draft in a fixed way, the others do what was found best before.

use paceline_spec::{Controller, ControllerOptions, Limits, Plan, RoundOutcome, TreeParameters};

use crate::{
    request::Speculation,
    round::{Member, RoundTimes},
    scheduler::Width,
    sequence::Sequence,
};

/// Plans the rounds of an engine.
pub(crate) struct Planner {
    /// For 1, 2, up to 4, up to 8, … sequences.
    controllers: Vec<Controller>,
    /// Most rows of one sequence in a pass.
    rows_max: usize,
    /// Longest sequence that the draft was made for.
    draft_positions: usize,
    /// The controller of the coming round.
    class: usize,
    /// What those have room for in it that leave drafting to the engine.
    limits: Limits,
    /// Whether others draft in it in a way of their own.
    is_mixed: bool,
    /// What they do, as soon as one of them was asked.
    decision: Option<Plan>,
    /// Scratch: what each of them accepted.
    accepted: Vec<usize>,
}

impl Planner {
    /// A planner of rounds of at most `sequences_max` sequences.
    pub(crate) fn new(
        options: &ControllerOptions,
        sequences_max: usize,
        rows_max: usize,
        draft_positions: usize,
    ) -> Self {
        let classes = class(sequences_max) + 1;
        Self {
            controllers: vec![Controller::new(options.clone()); classes],
            rows_max,
            draft_positions,
            class: 0,
            limits: Limits::remaining(0, 0, 0),
            is_mixed: false,
            decision: None,
            accepted: Vec::new(),
        }
    }

    /// Begins to plan a round of those of `sequences` whose answers have begun.
    pub(crate) fn begin<'a>(&mut self, sequences: impl Iterator<Item = &'a Sequence>) {
        let (mut running, mut limits) = (0, Limits::remaining(0, 0, 0));
        self.is_mixed = false;
        for sequence in sequences.filter(|sequence| sequence.is_running()) {
            running += 1;
            match sequence.asked().speculation {
                Speculation::Auto if sequence.can_draft() => {
                    let own = sequence.limits(self.draft_positions, self.rows_max);
                    limits.depth_max = limits.depth_max.max(own.depth_max);
                    limits.width_max = limits.width_max.max(own.width_max);
                }
                Speculation::Chain(_) | Speculation::Tree(_) => {
                    self.is_mixed |= sequence.can_draft();
                }
                Speculation::Off | Speculation::Auto => {}
            }
        }
        self.class = class(running).min(self.controllers.len() - 1);
        self.limits = limits;
        self.decision = None;
    }

    /// Plans for one sequence, and says what that takes.
    pub(crate) fn plan(&mut self, sequence: &mut Sequence) -> Width {
        let limits = sequence.limits(self.draft_positions, self.rows_max);
        let wanted = match sequence.asked().speculation {
            Speculation::Off => Plan::Plain,
            Speculation::Chain(drafted) => Plan::Chain { drafted },
            Speculation::Tree(tree) => Plan::Tree(tree),
            Speculation::Auto => self.decide(),
        };
        sequence.plan = match sequence.can_draft() {
            true => wanted.limited(limits),
            false => Plan::Plain,
        };
        let rows = sequence.plan.width();
        Width { rows, room: rows.max(scratch_rows(sequence.plan)) }
    }

    fn decide(&mut self) -> Plan {
        let controller = &mut self.controllers[self.class];
        *self.decision.get_or_insert_with(|| match self.is_mixed {
            true => controller.settled(self.limits),
            false => controller.decide(self.limits),
        })
    }

    /// Learns from a round. Where pages or rows were short, some sequences did less than was
    /// planned; the round counts for those that did as planned, or else for what the first one
    /// did. Nothing is learnt where others drafted in their own way, or where the scheduler put
    /// together a round of another size: such rounds cost something else than the plan does.
    pub(crate) fn observe(&mut self, members: &[Member], times: &RoundTimes) {
        let Some(decision) = self.decision else { return };
        if self.is_mixed || class(members.len()) != self.class {
            return;
        }
        let automatic = |member: &&Member| member.sequence.asked().speculation == Speculation::Auto;
        let Some(first) = members.iter().find(automatic) else { return };
        let done = |plan: Plan| {
            let members = members.iter().filter(automatic);
            members.filter(move |member| member.sequence.plan == plan)
        };
        let plan = match done(decision).next() {
            Some(_) => decision,
            None => first.sequence.plan,
        };
        self.accepted.clear();
        self.accepted.extend(done(plan).map(|member| member.acceptance.accepted()));
        let outcome = RoundOutcome {
            plan,
            width: done(plan).next().map_or(1, |member| member.sequence.tree.len()),
            accepted: 0,
            draft_seconds: times.draft.as_secs_f64(),
            verify_seconds: times.verify.as_secs_f64(),
            catch_up_seconds: times.catch_up.as_secs_f64(),
            waiting_rows: members.iter().map(|member| member.sequence.waiting_rows()).sum(),
        };
        self.controllers[self.class].observe_batch(&outcome, &self.accepted);
    }
}

/// The shape of what a plan drafts; a chain is a tree of one branch.
pub(crate) fn shape(plan: Plan) -> Option<TreeParameters> {
    match plan {
        Plan::Plain => None,
        Plan::Chain { drafted } => TreeParameters::new(1, drafted, drafted + 1).ok(),
        Plan::Tree(tree) => Some(tree),
    }
}

/// Rows that the draft writes beyond the committed ones when it grows what `plan` says.
pub(crate) fn scratch_rows(plan: Plan) -> usize {
    shape(plan).map_or(0, |tree| tree.topk() * (tree.depth() - 1))
}

/// Controllers by number of sequences: 1, 2, 3 to 4, 5 to 8, …
fn class(sequences: usize) -> usize {
    sequences.next_power_of_two().trailing_zeros() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_power_of_two_has_its_controller() {
        let classes: Vec<usize> = [0, 1, 2, 3, 4, 5, 8, 9, 16].map(class).to_vec();
        assert_eq!(classes, [0, 0, 1, 2, 2, 3, 3, 4, 4]);
    }

    #[test]
    fn scratch_rows_are_the_nodes_that_are_fed() {
        assert_eq!(scratch_rows(Plan::Plain), 0);
        assert_eq!(scratch_rows(Plan::Chain { drafted: 4 }), 3);
        let tree = TreeParameters::new(4, 3, 8).unwrap();
        assert_eq!(scratch_rows(Plan::Tree(tree)), 8);
    }
}
