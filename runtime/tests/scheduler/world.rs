//! An engine around a scheduler, with ranks' tables and caches, that believes nothing: it computes
//! every row itself and compares what it finds in the cache before each pass.

use std::collections::BTreeMap;

use paceline_model::pass::AttentionForm;
use paceline_runtime::{
    pages::{BlockTable, PAGE_ROWS},
    scheduler::{
        Accepted, Action, Occupancy, Part, PrefixReuse, Refusal, Scheduler, SchedulerLimits,
        SequenceId, Step, Submission, Width,
    },
};

use crate::model::{Dice, GARBAGE, STOP, draft_row, next_token, target_row};

/// A sequence as the engine knows it.
pub(crate) struct Life {
    submission: Submission,
    tokens: Vec<u32>,
    tokens_max: usize,
    stage: Stage,
    /// All rows that it ever had, and how they were made. A replay must give them again.
    rows: Vec<(u64, AttentionForm)>,
    pub(crate) committed: usize,
    draft_rows: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Waiting,
    Prefill,
    Running,
    Preempted,
}

/// A prompt whose answer has ended by itself.
pub(crate) struct Finished {
    pub(crate) prompt: Vec<u32>,
    pub(crate) answer: Vec<u32>,
    pub(crate) tokens_max: usize,
    pub(crate) reuse: PrefixReuse,
}

/// The engine, its ranks and everything that happened.
pub(crate) struct World {
    pub(crate) scheduler: Scheduler,
    pub(crate) limits: SchedulerLimits,
    target: Vec<u64>,
    draft: Vec<u64>,
    pub(crate) tables: BTreeMap<SequenceId, (Vec<u32>, BlockTable)>,
    pub(crate) lives: BTreeMap<SequenceId, Life>,
    /// What the last results leave to do before the next pass.
    moves: Vec<(u32, u32)>,
    /// Sequences that generate, oldest first.
    pub(crate) running: Vec<SequenceId>,
    /// Sequences that lost their pages, oldest first.
    preempted: Vec<SequenceId>,
    /// Requests before their first pass, in order.
    pub(crate) waiting: Vec<SequenceId>,
    was_prefill: bool,
    /// All steps, for comparison.
    pub(crate) steps: Vec<Step>,
    pub(crate) finished: Vec<Finished>,
    /// Tokens of sequences that ended.
    pub(crate) history: Vec<Vec<u32>>,
    pub(crate) seen: Seen,
}

/// How often rare things happened.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) preempted: usize,
    /// Rows of answers that were computed again.
    pub(crate) replayed_rows: usize,
    /// Sequences that came back with all their rows reused.
    pub(crate) resumed: usize,
    pub(crate) shared_rows: usize,
    pub(crate) copied_rows: usize,
    /// Reused rows of answers.
    pub(crate) absorbed_rows_reused: usize,
    /// Drafts that there was no room for.
    pub(crate) shrunk: usize,
}

impl Seen {
    pub(crate) fn add(&mut self, other: &Self) {
        self.preempted += other.preempted;
        self.replayed_rows += other.replayed_rows;
        self.resumed += other.resumed;
        self.shared_rows += other.shared_rows;
        self.copied_rows += other.copied_rows;
        self.absorbed_rows_reused += other.absorbed_rows_reused;
        self.shrunk += other.shrunk;
    }
}

impl World {
    pub(crate) fn new(limits: SchedulerLimits) -> Self {
        let slots = limits.pages * PAGE_ROWS;
        Self {
            scheduler: Scheduler::new(limits).expect("the limits are possible"),
            limits,
            target: vec![GARBAGE; slots],
            draft: vec![GARBAGE; slots],
            tables: BTreeMap::new(),
            lives: BTreeMap::new(),
            moves: Vec::new(),
            running: Vec::new(),
            preempted: Vec::new(),
            waiting: Vec::new(),
            was_prefill: false,
            steps: Vec::new(),
            finished: Vec::new(),
            history: Vec::new(),
            seen: Seen::default(),
        }
    }

    /// Number of sequences that have not ended.
    pub(crate) fn living(&self) -> usize {
        self.lives.len()
    }

    /// The living sequence in place `index` of them.
    pub(crate) fn nth(&self, index: usize) -> Option<SequenceId> {
        let count = self.lives.len().max(1);
        self.lives.keys().nth(index % count).copied()
    }

    /// Submits, and compares the answer with what it must be.
    pub(crate) fn submit(&mut self, submission: Submission) {
        let prompt = submission.prompt.len();
        let length_max = self.limits.context_max.min(self.limits.pages * PAGE_ROWS);
        let answer = self.scheduler.submit(submission.clone());
        if prompt + 1 > length_max {
            assert!(matches!(answer, Err(Refusal::NeverFits { .. })), "{answer:?}");
        } else if self.waiting.len() == self.limits.waiting_max {
            assert_eq!(answer, Err(Refusal::Busy { waiting: self.waiting.len() }));
        } else {
            let Accepted { sequence, tokens_max } = answer.expect("there is room");
            assert_eq!(tokens_max, submission.tokens_max.min(length_max - prompt));
            let life = Life {
                tokens: submission.prompt.clone(),
                submission,
                tokens_max,
                stage: Stage::Waiting,
                rows: Vec::new(),
                committed: 0,
                draft_rows: 0,
            };
            assert!(self.lives.insert(sequence, life).is_none(), "the name is new");
            self.waiting.push(sequence);
        }
        self.scheduler.assert_consistent();
    }

    /// Ends a sequence, whatever it does.
    pub(crate) fn end(&mut self, id: SequenceId) {
        let life = self.lives.remove(&id).expect("it lives");
        self.running.retain(|&other| other != id);
        self.waiting.retain(|&other| other != id);
        self.preempted.retain(|&other| other != id);
        self.history.push(life.tokens);
        self.scheduler.end(id);
        assert_eq!(self.scheduler.tokens(id), None);
        self.scheduler.assert_consistent();
    }

    /// One step of the engine. False if there was nothing to do.
    pub(crate) fn step(&mut self, seed: u64) -> bool {
        let mut dice = Dice::new(seed);
        let before = self.scheduler.occupancy();
        let lacking = self.running.iter().filter(|&&id| self.lacks(id, 1) > 0).count();
        let mut asked = Vec::new();
        let step = self.scheduler.next(|id| {
            let rows = 1 + if dice.one_in(2) { dice.below(9) } else { 0 };
            let width = Width { rows, room: rows + dice.below(3) };
            asked.push((id, width));
            width
        });
        self.scheduler.assert_consistent();
        self.forget(&step, lacking, before);
        self.do_moves(&step);
        let is_prefill = matches!(step.action, Action::Prefill { .. });
        assert!(
            !(is_prefill && self.was_prefill) || self.running.is_empty(),
            "a prompt stops running answers for one chunk at most"
        );
        self.was_prefill = is_prefill;
        match &step.action {
            Action::Idle => {
                assert!(self.lives.is_empty() && self.tables.is_empty(), "there was work");
                self.steps.push(step);
                return false;
            }
            Action::Prefill { part, form, gives_token } => {
                self.prefill(part, *form, *gives_token, &mut dice);
            }
            Action::Decode { parts } => self.decode(parts, &asked, &mut dice),
        }
        self.steps.push(step);
        self.count_pages();
        true
    }

    fn forget(&mut self, step: &Step, lacking: usize, before: Occupancy) {
        for id in &step.forget {
            assert!(self.tables.remove(id).is_some(), "ranks know what they are to forget");
        }
        for id in &step.preempted {
            assert!(step.forget.contains(id));
            self.seen.preempted += 1;
            self.preempted.insert(0, *id);
            let life = self.lives.get_mut(id).expect("only living sequences are preempted");
            let is_youngest = self.running.last() == Some(id) || life.stage == Stage::Prefill;
            assert!(is_youngest, "others were admitted after {id:?}");
            self.running.retain(|other| other != id);
            life.stage = Stage::Preempted;
            (life.committed, life.draft_rows) = (0, 0);
            if life.tokens.len() == life.submission.prompt.len() {
                life.rows.clear();
            }
        }
        if !step.preempted.is_empty() {
            assert!(!self.running.is_empty(), "the oldest goes on");
            let admits = starts(&step.action);
            let available = before.pages_free + before.pages_cached;
            assert!(admits || lacking > available, "it was preempted without need");
        }
        for id in self.lives.keys().filter(|id| !step.forget.contains(id)) {
            let has_table = !matches!(self.lives[id].stage, Stage::Waiting | Stage::Preempted);
            assert_eq!(has_table, self.tables.contains_key(id));
        }
    }

    fn do_moves(&mut self, step: &Step) {
        for (from, to) in self.moves.drain(..) {
            self.target[to as usize] = self.target[from as usize];
        }
        for &(from, to) in &step.moves {
            let (from, to) = (from as usize, to as usize);
            for (pages, _) in self.tables.values() {
                assert!(!pages.contains(&((to / PAGE_ROWS) as u32)), "a copy into a used page");
            }
            self.target[to] = self.target[from];
            self.draft[to] = self.draft[from];
        }
        self.seen.copied_rows += step.moves.len();
    }

    fn prefill(&mut self, part: &Part, form: AttentionForm, gives_token: bool, dice: &mut Dice) {
        let id = part.sequence;
        self.begin(part);
        let others =
            self.lives.iter().filter(|(other, life)| **other != id && life.stage == Stage::Prefill);
        assert_eq!(others.count(), 0, "one prompt at a time");
        assert_eq!(self.lives[&id].stage, Stage::Prefill);
        let end = part.context + part.rows;
        let rows_max = match form {
            AttentionForm::Expanded => self.limits.prefill_rows_max,
            AttentionForm::Absorbed => self.limits.decode_rows_max,
        };
        assert!(0 < part.rows && part.rows <= rows_max);
        self.seen.replayed_rows += if form == AttentionForm::Absorbed { part.rows } else { 0 };
        self.assert_private(id, part.context..end);
        let life = self.lives.get_mut(&id).expect("it lives");
        let slots = &self.tables[&id].1.slots()[..end];
        for (row, &slot) in slots.iter().enumerate().skip(part.context) {
            let previous = row.checked_sub(1).map(|row| life.rows[row].0);
            let made = (target_row(previous, life.tokens[row], form), form);
            match life.rows.get(row) {
                Some(&known) => assert_eq!(known, made, "a replay computes the same rows"),
                None => {
                    assert_eq!(form, AttentionForm::Expanded, "prompts are expanded");
                    life.rows.push(made);
                }
            }
            self.target[slot as usize] = made.0;
        }
        if dice.one_in(100) {
            return self.end(id);
        }
        life.committed = end;
        let prompt = life.submission.prompt.len();
        let is_fresh = life.tokens.len() == prompt;
        assert_eq!(gives_token, is_fresh && end == prompt, "a token is emitted once");
        let emitted = gives_token.then(|| next_token(life.rows[end - 1].0));
        life.tokens.extend(emitted);
        if end == life.tokens.len() - 1 && (gives_token || !is_fresh) {
            life.stage = Stage::Running;
            self.running.push(id);
        }
        if dice.one_in(2) {
            self.catch_up(id);
        }
        self.commit(id, emitted.as_slice());
    }

    fn decode(&mut self, parts: &[Part], asked: &[(SequenceId, Width)], dice: &mut Dice) {
        for part in parts {
            self.begin(part);
            let life = self.lives.get_mut(&part.sequence).expect("it lives");
            if life.stage == Stage::Prefill {
                // A replay whose rows were all in the cache.
                assert!(part.starts && part.context + 1 == life.tokens.len());
                self.seen.resumed += 1;
                life.stage = Stage::Running;
                self.running.push(part.sequence);
            }
        }
        let ids: Vec<SequenceId> = parts.iter().map(|part| part.sequence).collect();
        assert_eq!(ids, self.running, "all go on, the oldest first");
        let mut asked_next = asked.iter();
        let widths = parts.iter().map(|part| match part.starts {
            true => Width::PLAIN,
            false => {
                let &(id, width) = asked_next.next().expect("each is asked for");
                assert_eq!(id, part.sequence);
                width
            }
        });
        let widths: Vec<Width> = widths.collect();
        assert!(asked_next.next().is_none());
        self.assert_widths(parts, &widths);
        // All rows are computed before anything is kept.
        let mut results = Vec::new();
        for (part, &width) in parts.iter().zip(&widths) {
            results.push(self.verify(part, width, dice));
        }
        for (part, (path, emitted)) in parts.iter().zip(results) {
            if dice.one_in(150) {
                self.end(part.sequence);
                continue;
            }
            self.keep(part, &path, &emitted);
            if dice.one_in(150) && self.lives.contains_key(&part.sequence) {
                self.end(part.sequence);
            }
        }
    }

    /// Computes a round's rows: a random path through the draft is right, the rest is garbage.
    fn verify(&mut self, part: &Part, width: Width, dice: &mut Dice) -> (Vec<usize>, Vec<u32>) {
        let id = part.sequence;
        self.seen.shrunk += usize::from(part.rows < width.rows);
        let room = if part.rows > 1 { width.room } else { 1 };
        let written = part.context..part.context + room;
        self.assert_private(id, written.clone());
        if part.rows > 1 {
            self.catch_up(id);
        }
        let life = &self.lives[&id];
        let slots = &self.tables[&id].1.slots()[written];
        for &slot in slots {
            self.target[slot as usize] = GARBAGE;
            if part.rows > 1 {
                self.draft[slot as usize] = GARBAGE;
            }
        }
        let left = life.tokens_max - (life.tokens.len() - life.submission.prompt.len());
        let (mut path, mut emitted) = (vec![0], Vec::new());
        let mut previous = Some(life.rows[part.context - 1].0);
        let mut token = life.tokens[part.context];
        loop {
            let node = path[path.len() - 1];
            let row = target_row(previous, token, AttentionForm::Absorbed);
            self.target[slots[node] as usize] = row;
            token = next_token(row);
            emitted.push(token);
            previous = Some(row);
            let next = node + 1 + if dice.one_in(3) { 1 } else { 0 };
            if next >= part.rows || emitted.len() == left || token == STOP || dice.one_in(4) {
                return (path, emitted);
            }
            path.push(next);
        }
    }

    /// Keeps a round's path, and ends the sequence if it has all its tokens.
    fn keep(&mut self, part: &Part, path: &[usize], emitted: &[u32]) {
        let id = part.sequence;
        let slots = &self.tables[&id].1.slots()[part.context..];
        let life = self.lives.get_mut(&id).expect("it lives");
        for (place, &node) in path.iter().enumerate() {
            let row = (self.target[slots[node] as usize], AttentionForm::Absorbed);
            assert_eq!(life.rows.len(), part.context + place);
            life.rows.push(row);
            if node != place {
                self.moves.push((slots[node], slots[place]));
            }
        }
        life.committed += path.len();
        life.tokens.extend_from_slice(emitted);
        self.commit(id, emitted);
    }

    fn commit(&mut self, id: SequenceId, emitted: &[u32]) {
        let life = &self.lives[&id];
        self.scheduler.commit(id, emitted, life.draft_rows);
        self.scheduler.assert_consistent();
        assert_eq!(self.scheduler.tokens(id), Some(&life.tokens[..]));
        let prompt = life.submission.prompt.len();
        let answer = &life.tokens[prompt..];
        if answer.len() == life.tokens_max || answer.last() == Some(&STOP) {
            self.finished.push(Finished {
                prompt: life.submission.prompt.clone(),
                answer: answer.to_vec(),
                tokens_max: life.tokens_max,
                reuse: life.submission.reuse,
            });
            self.end(id);
        }
    }

    /// Gives a sequence its pages, and checks all rows that it has.
    fn begin(&mut self, part: &Part) {
        let id = part.sequence;
        let (pages, table) = self.tables.entry(id).or_default();
        assert_eq!(part.starts, pages.is_empty());
        for &page in &part.new_pages {
            assert!((page as usize) < self.limits.pages && !pages.contains(&page));
            pages.push(page);
            table.push(page);
        }
        let slots = table.slots();
        assert!(slots.len() >= part.context + part.rows, "each row has a slot");
        let life = self.lives.get_mut(&id).expect("only living sequences run");
        if part.starts {
            let queue =
                if self.preempted.is_empty() { &mut self.waiting } else { &mut self.preempted };
            assert_eq!(queue.first(), Some(&id), "first come, first served");
            queue.remove(0);
            adopt(life, part, slots, &self.target);
            self.seen.shared_rows += part.context / PAGE_ROWS * PAGE_ROWS;
            let absorbed = life.rows.iter().filter(|(_, form)| *form == AttentionForm::Absorbed);
            self.seen.absorbed_rows_reused += absorbed.take(part.context).count();
        }
        assert_eq!(part.context, life.committed);
        for (row, &slot) in slots[..part.context].iter().enumerate() {
            assert_eq!(self.target[slot as usize], life.rows[row].0, "row {row} of {id:?}");
        }
        for (row, &slot) in slots[..life.draft_rows].iter().enumerate() {
            let expected = draft_row(life.rows[row].0, life.tokens[row + 1]);
            assert_eq!(self.draft[slot as usize], expected, "draft row {row} of {id:?}");
        }
    }

    /// Computes all draft rows that can be.
    fn catch_up(&mut self, id: SequenceId) {
        let life = self.lives.get_mut(&id).expect("it lives");
        if !life.submission.speculates {
            return;
        }
        let end = life.committed.min(life.tokens.len() - 1);
        let slots = &self.tables[&id].1.slots()[..end];
        for (row, &slot) in slots.iter().enumerate().skip(life.draft_rows) {
            self.draft[slot as usize] = draft_row(life.rows[row].0, life.tokens[row + 1]);
        }
        life.draft_rows = end;
    }
}

/// Takes over the rows that a sequence starts with, if it may have them.
fn adopt(life: &mut Life, part: &Part, slots: &[u32], target: &[u64]) {
    assert!(part.context < life.tokens.len(), "the last row is computed");
    assert!(life.submission.reuse != PrefixReuse::Off || part.context == 0);
    for row in 0..part.context {
        let found = target[slots[row] as usize];
        if let Some(&(known, _)) = life.rows.get(row) {
            assert_eq!(found, known, "a replay reuses the same rows only");
            continue;
        }
        let previous = row.checked_sub(1).map(|row| life.rows[row].0);
        let make = |form| (target_row(previous, life.tokens[row], form), form);
        let mut forms = vec![AttentionForm::Expanded];
        if life.submission.reuse == PrefixReuse::SameTokens {
            forms.push(AttentionForm::Absorbed);
        }
        let made = forms.into_iter().map(make).find(|&(made, _)| made == found);
        life.rows.push(made.expect("a reused row has the right tokens and form"));
    }
    life.stage = Stage::Prefill;
    life.committed = part.context;
    life.draft_rows = if life.submission.speculates { part.context } else { 0 };
}

fn starts(action: &Action) -> bool {
    match action {
        Action::Prefill { part, .. } => part.starts,
        Action::Decode { parts } => parts.iter().any(|part| part.starts),
        Action::Idle => false,
    }
}
