//! Passes of the model: chunks of prompts, and rounds of draft, verify, commit over several
//! sequences.
//!
//! Invariant: a row's arithmetic depends on its own sequence only, so what is served at the same
//! time changes no answer. Start reading at [`Passes::round`].

use std::time::{Duration, Instant};

use paceline_kernels::ops::argmax::argmax;
use paceline_model::pass::AttentionForm;
use paceline_spec::{Acceptance, CommitPlan, Plan};

use crate::{
    drafter::{Drafter, Growth},
    error::Result,
    planning::shape,
    sampling::NodeLogits,
    scheduler::Part,
    sequence::Sequence,
    worker::{leader::Leader, protocol::StepPlan},
};

/// The ranks, the draft, and the working memory of passes.
pub(crate) struct Passes {
    pub(crate) leader: Leader,
    pub(crate) drafter: Option<Drafter>,
    step: StepPlan,
    /// Rows of the target's cache to move before the next pass.
    moves: Vec<(u32, u32)>,
    /// The largest logit's token of each row of the last pass, if anybody needs it.
    choices: Vec<u32>,
    commit: CommitPlan,
    rows: Vec<u32>,
}

/// A sequence in a round.
pub(crate) struct Member {
    pub(crate) sequence: Box<Sequence>,
    /// Last emitted token.
    pub(crate) root: u32,
    /// Its first row in the pass.
    pub(crate) first_row: usize,
    /// The root's position.
    pub(crate) position: usize,
    pub(crate) acceptance: Acceptance,
}

/// Where the time of a round went.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RoundTimes {
    pub(crate) draft: Duration,
    /// The draft's work for rows left over from rounds without drafting.
    pub(crate) catch_up: Duration,
    pub(crate) verify: Duration,
}

impl Member {
    /// `sequence` with the pages of `part`, its last token being `root`.
    pub(crate) fn new(mut sequence: Box<Sequence>, root: u32, part: &Part) -> Self {
        if part.rows < sequence.plan.width() {
            sequence.plan = Plan::Plain;
        }
        let (position, path, emitted) = (sequence.committed, Vec::new(), Vec::new());
        let acceptance = Acceptance { path, emitted };
        Self { sequence, root, first_row: 0, position, acceptance }
    }
}

impl Passes {
    pub(crate) fn new(leader: Leader, drafter: Option<Drafter>) -> Result<Self> {
        Ok(Self {
            leader,
            drafter,
            step: StepPlan::default(),
            moves: Vec::new(),
            choices: Vec::new(),
            commit: CommitPlan::new(&[0], 0, 0)?,
            rows: Vec::new(),
        })
    }

    /// Copies rows in the caches of draft and target before the next pass, after the moves that
    /// the last one left.
    pub(crate) fn copy_rows(&mut self, moves: &[(u32, u32)]) {
        self.moves.extend_from_slice(moves);
        if let Some(drafter) = &mut self.drafter {
            drafter.move_rows(moves);
        }
    }

    /// Gives a sequence the pages of its next pass.
    pub(crate) fn open(&mut self, sequence: &mut Sequence, part: &Part) {
        sequence.open(part);
        if let (Some(drafter), true, true) = (&mut self.drafter, part.starts, sequence.speculates())
        {
            sequence.drafting = Some(drafter.start(part.context));
        }
    }

    /// Takes back what a sequence uses besides its pages.
    pub(crate) fn close(&mut self, sequence: &mut Sequence) {
        if let (Some(drafter), Some(drafting)) = (&mut self.drafter, sequence.drafting.take()) {
            drafter.release(drafting);
        }
    }

    /// Sends a chunk of a sequence's `tokens` through the model. If it `gives_token`, returns that.
    pub(crate) fn prefill(
        &mut self,
        sequence: &mut Sequence,
        part: &Part,
        form: AttentionForm,
        gives_token: bool,
        tokens: &[u32],
    ) -> Result<Option<Acceptance>> {
        let (start, end) = (part.context, part.context + part.rows);
        self.begin(form);
        self.step.add(part.sequence.0, &part.new_pages, start, &tokens[start..end]);
        if gives_token {
            self.step.logit_rows.push(part.rows as u32 - 1);
        }
        self.leader.step(&self.step)?;
        sequence.committed = end;
        // Row i goes with token i + 1; the last row may have to wait for the first token.
        self.rows.clear();
        self.rows.extend(0..part.rows as u32);
        let known = (tokens.len() - 1 - start).min(part.rows);
        let next = &tokens[start + 1..start + 1 + known];
        self.commit_draft(sequence, 0..known, next);
        if !gives_token {
            return Ok(None);
        }
        self.choose(sequence.sampler.is_plainly_greedy());
        sequence.tree.reset(0);
        let nodes = self.nodes(0, end - 1);
        let acceptance = sequence.sampler.accept(&sequence.tree, nodes)?;
        self.commit_draft(sequence, known..part.rows, &acceptance.emitted);
        Ok(Some(acceptance))
    }

    /// One round: drafts as each sequence plans, verifies all drafts in one pass, and keeps what
    /// was accepted.
    pub(crate) fn round(&mut self, members: &mut [Member], parts: &[Part]) -> Result<RoundTimes> {
        let started = Instant::now();
        let catch_up = self.draft(members)?;
        let draft = started.elapsed() - catch_up;
        let verify = Instant::now();
        self.verify(members, parts)?;
        let mut greedy = members.iter().map(|member| &member.sequence.sampler);
        self.choose(greedy.any(|sampler| sampler.is_plainly_greedy()));
        for member in members {
            let nodes = self.nodes(member.first_row, member.position);
            let Sequence { sampler, tree, .. } = &mut *member.sequence;
            member.acceptance = sampler.accept(tree, nodes)?;
            self.commit(member)?;
        }
        Ok(RoundTimes { draft, catch_up, verify: verify.elapsed() })
    }

    /// Logits of the last pass from `first_row` on, the row of a token at `position`.
    pub(crate) fn nodes(&self, first_row: usize, position: usize) -> NodeLogits<'_> {
        let (stream, logits) = (self.leader.model().stream(), self.leader.logits());
        NodeLogits { stream, logits, choices: &self.choices, first_row, position }
    }

    /// Works off what waits for the draft, so that the rows of a finished sequence have draft rows:
    /// all of them if it drafted lately, else those of one pass.
    pub(crate) fn complete_draft(&mut self, sequence: &mut Sequence) {
        if let (Some(drafter), Some(drafting)) = (&mut self.drafter, &mut sequence.drafting) {
            drafter.complete(drafting, sequence.table.slots());
        }
    }

    /// Begins a step with the moves that wait.
    fn begin(&mut self, form: AttentionForm) {
        self.step.clear(form);
        std::mem::swap(&mut self.step.moves, &mut self.moves);
    }

    /// Fills the sequences' trees. Returns the time spent on rows left over.
    fn draft(&mut self, members: &mut [Member]) -> Result<Duration> {
        let mut growths = Vec::new();
        for member in members {
            let root = member.root;
            let Sequence { tree, drafting, plan, table, .. } = &mut *member.sequence;
            tree.reset(root);
            if let (Some(drafting), Some(shape)) = (drafting, shape(*plan)) {
                growths.push(Growth::new(drafting, shape, root, table.slots(), tree));
            }
        }
        match &mut self.drafter {
            Some(drafter) if !growths.is_empty() => drafter.propose(&mut growths),
            _ => Ok(Duration::ZERO),
        }
    }

    /// The target's pass over all trees.
    fn verify(&mut self, members: &mut [Member], parts: &[Part]) -> Result<()> {
        self.begin(AttentionForm::Absorbed);
        for (member, part) in members.iter_mut().zip(parts) {
            let tree = &member.sequence.tree;
            member.first_row = self.step.tokens.len();
            self.step.add(part.sequence.0, &part.new_pages, member.position, tree.tokens());
            if !tree.is_chain() {
                self.step.branch(tree.parents().map(|parent| parent.unwrap_or(0) as u32));
            }
        }
        let rows = self.step.tokens.len() as u32;
        self.step.logit_rows.extend(0..rows);
        self.leader.step(&self.step)
    }

    /// Makes the greedy choice of each row of the last pass, if it is needed.
    fn choose(&mut self, is_needed: bool) {
        self.choices.clear();
        if is_needed {
            let logits = self.leader.logits();
            self.choices.resize(logits.rows(), 0);
            argmax(self.leader.model().stream(), logits, &mut self.choices);
        }
    }

    /// Keeps the accepted rows: of the target's cache (before the next pass), and of the captured
    /// states.
    fn commit(&mut self, member: &mut Member) -> Result<()> {
        let Member { sequence, acceptance, first_row, position, .. } = member;
        self.commit.rebuild(&acceptance.path, *position, *position)?;
        let slots = sequence.table.slots();
        let moves = self.commit.copies().iter().map(|copy| (slots[copy.from], slots[copy.to]));
        self.moves.extend(moves);
        sequence.committed = self.commit.length();
        self.rows.clear();
        self.rows.extend(acceptance.path.iter().map(|&node| (*first_row + node) as u32));
        self.commit_draft(sequence, 0..acceptance.path.len(), &acceptance.emitted);
        Ok(())
    }

    /// Hands the captured states of `rows[which]` of the last pass to the draft, with the token
    /// after each.
    fn commit_draft(
        &mut self,
        sequence: &mut Sequence,
        which: std::ops::Range<usize>,
        next: &[u32],
    ) {
        let Some(drafter) = &mut self.drafter else { return };
        let Sequence { drafting: Some(drafting), table, .. } = sequence else { return };
        let taps = self.leader.model().taps();
        drafter.commit(drafting, taps, &self.rows[which], next, table.slots());
    }
}
