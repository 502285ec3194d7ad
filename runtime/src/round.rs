//! One round of a request: propose, verify, commit.
//!
//! Invariant: `tokens` is the prompt and all that was emitted; the cache holds all of it but the
//! last token, the root of the next round.

use std::time::{Duration, Instant};

use paceline_kernels::ops::argmax::argmax;
use paceline_spec::{Acceptance, CommitPlan, DraftTree, Plan, accept_greedy, accept_sampled};

use crate::{
    drafter::Drafter,
    error::{Result, RuntimeError},
    pages::{BlockTable, PAGE_ROWS, PageAllocator},
    sampling::Sampler,
    worker::{
        leader::Leader,
        protocol::{SequenceStep, StepPlan},
    },
};

/// The one sequence that the engine works on.
pub(crate) struct Sequence {
    /// Its name on all ranks.
    pub(crate) id: u32,
    /// Prompt and emitted tokens.
    pub(crate) tokens: Vec<u32>,
    /// Rows in the cache.
    pub(crate) committed: usize,
    /// Its pages; the other ranks hear of them with the pass that needs them.
    table: BlockTable,
    /// Rows to move before the next pass.
    moves: Vec<(u32, u32)>,
    tree: DraftTree,
    choices: Vec<u32>,
    step: StepPlan,
}

/// What a round did and took.
pub(crate) struct Round {
    /// What was drafted: the plan, or what was left of it.
    pub(crate) plan: Plan,
    /// Tokens in the target pass.
    pub(crate) width: usize,
    pub(crate) acceptance: Acceptance,
    pub(crate) draft: Duration,
    pub(crate) catch_up: Duration,
    pub(crate) verify: Duration,
}

impl Sequence {
    pub(crate) fn new(id: u32, prompt: &[u32]) -> Self {
        Self {
            id,
            tokens: prompt.to_vec(),
            committed: 0,
            table: BlockTable::default(),
            moves: Vec::new(),
            tree: DraftTree::root_only(0),
            choices: Vec::new(),
            step: StepPlan::default(),
        }
    }

    /// Sends rows `self.committed..end` of the prompt through the model. With the last of them
    /// its logits are computed.
    pub(crate) fn prefill(
        &mut self,
        leader: &mut Leader,
        pages: &mut PageAllocator,
        end: usize,
    ) -> Result<()> {
        let start = self.committed;
        let new_pages = self.pages_for(end, pages)?;
        self.step.moves.clear();
        self.step.sequences.clear();
        self.step.sequences.push(SequenceStep {
            sequence: self.id,
            new_pages,
            context: start as u32,
            rows: (end - start) as u32,
            parents: Vec::new(),
        });
        self.step.tokens.clear();
        self.step.tokens.extend_from_slice(&self.tokens[start..end]);
        self.step.expanded = true;
        self.step.logit_rows.clear();
        if end == self.tokens.len() {
            self.step.logit_rows.push((end - start - 1) as u32);
        }
        leader.step(&self.step)?;
        self.committed = end;
        Ok(())
    }

    /// The first token, from the prompt's last logits.
    pub(crate) fn first(&mut self, leader: &Leader, sampler: &mut Sampler) -> Result<Acceptance> {
        self.tree.reset(0);
        self.accept(leader, sampler)
    }

    /// One round: drafts as `plan` says, verifies, and appends what was accepted to `tokens`.
    pub(crate) fn round(
        &mut self,
        plan: Plan,
        leader: &mut Leader,
        pages: &mut PageAllocator,
        drafter: Option<&mut Drafter>,
        sampler: &mut Sampler,
    ) -> Result<Round> {
        let root = *self.tokens.last().expect("a sequence has a token");
        let plan = if drafter.is_some() { plan } else { Plan::Plain };
        let rows = plan.width().max(scratch_rows(plan));
        let new_pages = self.pages_for(self.committed + rows, pages)?;
        let started = Instant::now();
        let (mut catch_up, mut draft) = (Duration::ZERO, Duration::ZERO);
        let mut drafter = drafter;
        self.tree.reset(root);
        if let (Some(drafter), true) = (drafter.as_deref_mut(), plan != Plan::Plain) {
            let slots = self.table.slots();
            if drafter.pending() > CATCH_UP_ROWS {
                drafter.catch_up(slots);
                catch_up = started.elapsed();
            }
            drafter.propose(plan, root, slots, &mut self.tree)?;
            draft = started.elapsed() - catch_up;
        }
        let verify = Instant::now();
        self.verify(leader, new_pages)?;
        let acceptance = self.accept(leader, sampler)?;
        self.commit(leader, drafter, &acceptance)?;
        let verify = verify.elapsed();
        let width = self.tree.len();
        Ok(Round { plan, width, acceptance, draft, catch_up, verify })
    }

    /// The target pass over the tree.
    fn verify(&mut self, leader: &mut Leader, new_pages: Vec<u32>) -> Result<()> {
        let tree = &self.tree;
        self.step.moves.clear();
        self.step.moves.append(&mut self.moves);
        self.step.sequences.clear();
        let parents = match tree.is_chain() {
            true => Vec::new(),
            false => tree.parents().map(|parent| parent.unwrap_or(0) as u32).collect(),
        };
        self.step.sequences.push(SequenceStep {
            sequence: self.id,
            new_pages,
            context: self.committed as u32,
            rows: tree.len() as u32,
            parents,
        });
        self.step.tokens.clear();
        self.step.tokens.extend_from_slice(tree.tokens());
        self.step.expanded = false;
        self.step.logit_rows.clear();
        self.step.logit_rows.extend(0..tree.len() as u32);
        leader.step(&self.step)
    }

    /// What the target keeps of the tree, from the last pass's logits.
    fn accept(&mut self, leader: &Leader, sampler: &mut Sampler) -> Result<Acceptance> {
        let logits = leader.logits();
        let position = self.committed;
        if !sampler.is_greedy() {
            let (mut rows, mut coins) = sampler.rows(logits, position);
            return accept_sampled(&self.tree, &mut rows, &mut coins);
        }
        self.choices.resize(self.tree.len(), 0);
        argmax(leader.model().stream(), logits, &mut self.choices);
        let width = logits.width();
        for (row, &choice) in logits.as_slice::<f32>().chunks_exact(width).zip(&self.choices) {
            // NaN is never the largest, so it is looked for.
            if !row[choice as usize].is_finite() || row.iter().any(|logit| logit.is_nan()) {
                return Err(RuntimeError::LogitsNotFinite { position });
            }
        }
        Ok(accept_greedy(&self.tree, &self.choices)?)
    }

    /// Keeps the accepted rows: of the target's cache (before the next pass), of the captured
    /// states, and of the tokens.
    fn commit(
        &mut self,
        leader: &Leader,
        drafter: Option<&mut Drafter>,
        acceptance: &Acceptance,
    ) -> Result<()> {
        let plan = CommitPlan::new(&acceptance.path, self.committed, self.committed)?;
        let slots = self.table.slots();
        self.moves.extend(plan.copies().iter().map(|copy| (slots[copy.from], slots[copy.to])));
        if let Some(drafter) = drafter {
            let rows: Vec<u32> = acceptance.path.iter().map(|&node| node as u32).collect();
            drafter.commit(leader.model().taps(), &rows, &acceptance.emitted, slots);
        }
        self.committed = plan.length();
        self.tokens.extend_from_slice(&acceptance.emitted);
        Ok(())
    }

    /// Takes pages that make room for `positions` positions.
    fn pages_for(&mut self, positions: usize, pages: &mut PageAllocator) -> Result<Vec<u32>> {
        let missing = self.table.missing(positions);
        if missing > pages.free() {
            return Err(RuntimeError::Request {
                what: "the sequence",
                got: format!("{positions} tokens long"),
                limit: format!("the cache has {} pages of {PAGE_ROWS} left", pages.free()),
                advice: "ask for a larger context when the engine starts",
            });
        }
        let taken: Vec<u32> = (0..missing).filter_map(|_| pages.take()).collect();
        taken.iter().for_each(|&page| self.table.push(page));
        Ok(taken)
    }

    /// Cache slot of each position that it has room for.
    pub(crate) fn slots(&self) -> &[u32] {
        self.table.slots()
    }

    /// Gives all pages back.
    pub(crate) fn release(&mut self, pages: &mut PageAllocator) {
        self.table.take_pages().into_iter().for_each(|page| pages.give(page));
    }
}

/// More waiting rows than the deepest round commits are left over from rounds without drafting.
const CATCH_UP_ROWS: usize = 16;

/// Scratch rows that the draft needs to grow what `plan` says.
fn scratch_rows(plan: Plan) -> usize {
    match plan {
        Plan::Plain => 1,
        Plan::Chain { drafted } => drafted,
        Plan::Tree(tree) => tree.topk() * (tree.depth() - 1),
    }
}
