//! Decides what the engine does next: which sequences go through the model together, with how many
//! rows, and in which pages of the cache.
//!
//! A state machine without clocks, threads or a model: submissions, results and endings go in, the
//! next [`Step`] comes out, and the same calls give the same steps. Sequences join and leave
//! between passes. A pass is either a chunk of one prompt or one round of all answers; the two take
//! turns.
//!
//! Invariant: each page is free, or private to one sequence, or in the prefix cache, where any
//! number of sequences read it and nobody writes. Start reading at [`Scheduler::next`].
//!
//! Nothing starves: the queue is first come, first served, and the oldest running sequence is never
//! preempted, so each decoding pass brings it one token nearer to its end at least.

mod audit;
mod forms;
mod prefix;
mod sequence;
mod step;
mod store;
mod submission;

use std::collections::HashMap;

use self::{
    sequence::{Place, Queue, Sequence},
    store::PageStore,
};
pub use self::{
    step::{Action, Part, SequenceId, Step, Width},
    submission::{Accepted, PrefixReuse, Refusal, Submission},
};
use crate::{
    error::{Result, RuntimeError},
    pages::PAGE_ROWS,
};

/// What a scheduler may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerLimits {
    /// Pages of the cache, of [`PAGE_ROWS`] rows.
    pub pages: usize,
    /// Longest sequence, prompt and answer together, in tokens.
    pub context_max: usize,
    /// Rows of a chunk of a prompt.
    pub prefill_rows_max: usize,
    /// Rows of a decoding pass over all its sequences; at least `sequences_max`.
    pub decode_rows_max: usize,
    /// Sequences that have pages at the same time.
    pub sequences_max: usize,
    /// Requests that wait for their first pass.
    pub waiting_max: usize,
}

/// How many sequences and pages are in which state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Occupancy {
    /// Requests before their first pass.
    pub waiting: usize,
    /// Sequences that lost their pages.
    pub preempted: usize,
    /// Sequences with part of their prompt to come: 0 or 1.
    pub prefilling: usize,
    /// Sequences that generate.
    pub running: usize,
    /// Pages that hold nothing.
    pub pages_free: usize,
    /// Pages that sequences use, shared ones counted once.
    pub pages_held: usize,
    /// Pages that only the prefix cache keeps. They are given up when pages are short.
    pub pages_cached: usize,
}

/// The scheduler.
#[derive(Debug)]
pub struct Scheduler {
    limits: SchedulerLimits,
    store: PageStore,
    sequences: HashMap<SequenceId, Sequence>,
    queue: Queue,
    prefilling: Option<SequenceId>,
    /// Oldest first. Everything here is older than what is prefilling, and that than the queue.
    running: Vec<SequenceId>,
    /// Sequences of the last step's pass.
    in_flight: Vec<SequenceId>,
    /// What the next step tells the ranks to forget.
    forget: Vec<SequenceId>,
    /// Whether the last pass was a chunk.
    was_prefill: bool,
    /// Whether the queue's head had too few pages, and none were given back since.
    is_head_blocked: bool,
    next_name: u32,
}

impl Scheduler {
    /// A scheduler over an empty cache.
    ///
    /// # Errors
    /// [`RuntimeError::Request`] for limits that nothing can run within.
    pub fn new(limits: SchedulerLimits) -> Result<Self> {
        limits.check()?;
        Ok(Self {
            limits,
            store: PageStore::new(limits.pages),
            sequences: HashMap::new(),
            queue: Queue::default(),
            prefilling: None,
            running: Vec::new(),
            in_flight: Vec::new(),
            forget: Vec::new(),
            was_prefill: false,
            is_head_blocked: false,
            next_name: 0,
        })
    }

    /// Takes a request into the queue.
    ///
    /// # Errors
    /// A [`Refusal`].
    pub fn submit(&mut self, submission: Submission) -> std::result::Result<Accepted, Refusal> {
        let prompt = submission.prompt.len();
        if prompt == 0 || submission.tokens_max == 0 {
            return Err(Refusal::Empty);
        }
        let length_max = self.limits.length_max();
        if prompt >= length_max {
            let SchedulerLimits { context_max, pages, .. } = self.limits;
            return Err(Refusal::NeverFits { prompt, context_max, cache_rows: pages * PAGE_ROWS });
        }
        if self.queue.fresh() >= self.limits.waiting_max {
            return Err(Refusal::Busy { waiting: self.queue.fresh() });
        }
        let tokens_max = submission.tokens_max.min(length_max - prompt);
        let sequence = self.name();
        self.sequences.insert(sequence, Sequence::new(submission, prompt + tokens_max));
        self.queue.push(sequence);
        Ok(Accepted { sequence, tokens_max })
    }

    /// What to do now. `width` is asked for each sequence of a decoding pass, oldest first, but for
    /// one that comes back with all its rows reused: it gets one row.
    ///
    /// # Panics
    /// Between two calls every sequence of the first one's pass is committed or ended, and those
    /// that have all their tokens are ended.
    pub fn next(&mut self, width: impl FnMut(SequenceId) -> Width) -> Step {
        self.assert_landed();
        let mut step = Step { forget: std::mem::take(&mut self.forget), ..Step::default() };
        let may_prefill = self.running.is_empty() || !self.was_prefill;
        let chunk = if may_prefill { self.plan_prefill(&mut step) } else { None };
        self.was_prefill = chunk.is_some();
        step.action = match chunk {
            Some(chunk) => chunk,
            None if self.running.is_empty() => Action::Idle,
            None => self.plan_decode(width, &mut step),
        };
        step
    }

    /// The pass has computed this sequence's rows. `emitted` are its new tokens: none for a chunk
    /// unless it `gives_token`; when decoding, one after each row that is kept: 1 to the number of
    /// rows. The caller moves kept rows to where they belong before the next pass, even if the
    /// sequence has ended by then. `draft_rows` of its committed rows have draft rows in the cache;
    /// it matters only if the sequence speculates.
    ///
    /// # Panics
    /// If the sequence is not in the pass or the numbers are impossible.
    pub fn commit(&mut self, id: SequenceId, emitted: &[u32], draft_rows: usize) {
        let sequence = self.sequences.get_mut(&id).expect("only living sequences are committed");
        let draft_rows_before = sequence.draft_rows;
        sequence.land(emitted, draft_rows);
        self.store.publish(sequence, draft_rows_before);
        if sequence.place == Place::Prefill && sequence.committed == sequence.prefill_rows() {
            sequence.place = Place::Running;
            self.prefilling = None;
            self.running.push(id);
        }
    }

    /// Ends a sequence in any state: finished, cancelled or failed. Its committed rows stay in the
    /// prefix cache unless it was submitted without reuse. If it is in a pass and not committed,
    /// that pass's rows are dropped. Unknown names are ignored.
    pub fn end(&mut self, id: SequenceId) {
        let Some(mut sequence) = self.sequences.remove(&id) else { return };
        match sequence.place {
            Place::Queue => self.queue.remove(id, sequence.was_admitted),
            Place::Prefill => self.prefilling = None,
            Place::Running => self.running.retain(|&other| other != id),
        }
        if sequence.announced > 0 {
            self.forget.push(id);
        }
        self.store.detach(&mut sequence);
        self.is_head_blocked = false;
    }

    /// Prompt and emitted tokens; `None` for an unknown sequence.
    pub fn tokens(&self, id: SequenceId) -> Option<&[u32]> {
        self.sequences.get(&id).map(|sequence| &sequence.tokens[..])
    }

    /// Gives up all cached prefixes that no sequence uses.
    pub fn clear_cache(&mut self) {
        self.store.clear();
    }

    /// What is in which state.
    pub fn occupancy(&self) -> Occupancy {
        Occupancy {
            waiting: self.queue.fresh(),
            preempted: self.queue.preempted(),
            prefilling: usize::from(self.prefilling.is_some()),
            running: self.running.len(),
            pages_free: self.store.free(),
            pages_held: self.limits.pages - self.store.available(),
            pages_cached: self.store.cached(),
        }
    }

    /// What this scheduler may use.
    pub fn limits(&self) -> &SchedulerLimits {
        &self.limits
    }

    /// A chunk of what is prefilling, or else of the queue's head.
    fn plan_prefill(&mut self, step: &mut Step) -> Option<Action> {
        let id = match self.prefilling {
            Some(id) => id,
            None => self.admit(step)?,
        };
        let sequence = self.sequences.get_mut(&id).expect("what is prefilling lives");
        if sequence.committed == sequence.prefill_rows() {
            // All rows of a replay were still in the cache: it takes part in the next round.
            sequence.place = Place::Running;
            self.prefilling = None;
            self.running.push(id);
            return None;
        }
        let SchedulerLimits { prefill_rows_max, decode_rows_max, .. } = self.limits;
        let (form, end) = sequence.chunk(prefill_rows_max, decode_rows_max);
        let end = self.store.grow(sequence, end);
        let rows = end.saturating_sub(sequence.committed);
        if rows == 0 {
            return None;
        }
        let gives_token = !sequence.has_emitted() && end == sequence.prompt;
        let part = sequence.launch(id, rows);
        self.in_flight.push(id);
        Some(Action::Prefill { part, form, gives_token })
    }

    /// Gives pages to the queue's head, if there are enough.
    fn admit(&mut self, step: &mut Step) -> Option<SequenceId> {
        let id = self.queue.head()?;
        if self.is_head_blocked || self.running.len() >= self.limits.sequences_max {
            return None;
        }
        let sequence = self.sequences.get_mut(&id).expect("what waits lives");
        let found = self.store.lookup(sequence);
        // A page more for each running sequence, or it would soon be preempted again.
        let needed = self.store.cost(sequence, &found) + self.running.len();
        if needed > self.store.available() {
            self.is_head_blocked = !self.running.is_empty();
            if self.is_head_blocked {
                return None;
            }
        }
        self.queue.pop(sequence.was_admitted);
        sequence.was_admitted = true;
        sequence.place = Place::Prefill;
        self.store.attach(sequence, found, &mut step.moves);
        self.prefilling = Some(id);
        Some(id)
    }

    /// A round of all running sequences.
    fn plan_decode(
        &mut self,
        mut width: impl FnMut(SequenceId) -> Width,
        step: &mut Step,
    ) -> Action {
        let mut needed = self.pages_to_go_on();
        while needed > self.store.available() {
            self.preempt_youngest(step);
            needed = self.pages_to_go_on();
        }
        let mut spare_pages = self.store.available() - needed;
        let mut spare_rows = self.limits.decode_rows_max - self.running.len();
        let mut parts = Vec::with_capacity(self.running.len());
        for &id in &self.running {
            let sequence = self.sequences.get_mut(&id).expect("what runs lives");
            assert!(
                sequence.tokens.len() < sequence.length_max,
                "a sequence with all its tokens is ended"
            );
            // The draft has no state to start from when all rows were reused.
            let Width { rows, room } = if sequence.starts { Width::PLAIN } else { width(id) };
            assert!(0 < rows && rows <= room, "a width has a row and room for all its rows");
            let room = if rows == 1 { 1 } else { room };
            let first = sequence.missing(sequence.committed + 1);
            let pages = sequence.missing(sequence.committed + room) - first;
            let (rows, room) = match rows - 1 <= spare_rows && pages <= spare_pages {
                true => {
                    spare_rows -= rows - 1;
                    spare_pages -= pages;
                    (rows, room)
                }
                false => (Width::PLAIN.rows, Width::PLAIN.room),
            };
            let positions = sequence.committed + room;
            let grown = self.store.grow(sequence, positions);
            debug_assert_eq!(grown, positions, "pages were counted before");
            parts.push(sequence.launch(id, rows));
            self.in_flight.push(id);
        }
        Action::Decode { parts }
    }

    /// Pages that the running sequences lack for one row each.
    fn pages_to_go_on(&self) -> usize {
        let lacking = |id| {
            let sequence: &Sequence = &self.sequences[id];
            sequence.missing(sequence.committed + 1)
        };
        self.running.iter().map(lacking).sum()
    }

    /// Takes the pages of the sequence that was admitted last. It comes back before all others.
    fn preempt_youngest(&mut self, step: &mut Step) {
        let id = match self.prefilling.take() {
            Some(id) => id,
            None => {
                assert!(self.running.len() > 1, "one sequence fits into the cache");
                self.running.pop().expect("two are running")
            }
        };
        let sequence = self.sequences.get_mut(&id).expect("what has pages lives");
        if sequence.announced > 0 {
            step.forget.push(id);
            step.preempted.push(id);
        }
        self.store.detach(sequence);
        self.queue.put_back(id);
        self.is_head_blocked = false;
    }

    fn assert_landed(&mut self) {
        for id in self.in_flight.drain(..) {
            let sequence = self.sequences.get(&id);
            let is_missing = sequence.is_some_and(|sequence| sequence.rows_in_flight.is_some());
            assert!(!is_missing, "{id:?} is neither committed nor ended after its pass");
        }
    }

    /// A name that no sequence has.
    fn name(&mut self) -> SequenceId {
        loop {
            let name = SequenceId(self.next_name);
            self.next_name = self.next_name.wrapping_add(1);
            // Ranks that were not told to forget a name yet would mix up two tables.
            if !self.sequences.contains_key(&name) && !self.forget.contains(&name) {
                return name;
            }
        }
    }
}

impl SchedulerLimits {
    /// Longest sequence that context and cache hold, in tokens.
    pub fn length_max(&self) -> usize {
        self.context_max.min(self.pages.saturating_mul(PAGE_ROWS))
    }

    fn check(&self) -> Result<()> {
        let refuse = |what, got: usize, limit: String, advice| {
            Err(RuntimeError::Request { what, got: got.to_string(), limit, advice })
        };
        let counts = [
            ("the chunk of a prompt", self.prefill_rows_max),
            ("the number of sequences at once", self.sequences_max),
            ("the number of waiting requests", self.waiting_max),
        ];
        for (what, count) in counts {
            if count == 0 {
                return refuse(what, 0, "nothing could run".to_owned(), "take at least 1");
            }
        }
        if self.length_max() < 2 {
            let limit = "a prompt and its answer take 2 tokens at least".to_owned();
            let what = "the longest sequence";
            return refuse(what, self.length_max(), limit, "take a larger context or cache");
        }
        if self.pages > MAX_PAGES {
            let limit = format!("slots are counted to {} pages", MAX_PAGES);
            return refuse("the cache", self.pages, limit, "take a smaller one");
        }
        if self.decode_rows_max < self.sequences_max {
            let limit = format!("each of {} sequences takes one", self.sequences_max);
            let what = "the number of rows of a decoding pass";
            return refuse(what, self.decode_rows_max, limit, "take more rows or fewer sequences");
        }
        Ok(())
    }
}

/// More pages have no slots in 32 bits.
const MAX_PAGES: usize = u32::MAX as usize / PAGE_ROWS;
