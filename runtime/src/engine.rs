//! The engine: requests in, events out.
//!
//! Requests that were submitted share the passes of the model. Each [`Engine::step`] does what the
//! [scheduler](crate::scheduler) says next: a chunk of a prompt, or a round of all answers
//! ([`crate::round`]). Invariant: a failure ends all requests, and the engine serves none after it.
//! Start reading at [`Engine::step`].

use std::{collections::HashMap, sync::Arc};

use paceline_comm::Usage;
use paceline_model::{ModelError, config::ModelConfig, pass::AttentionForm, tokenizer::Tokenizer};
use paceline_spec::{Acceptance, ControllerOptions};

use crate::{
    admission::Admission,
    answer::Answer,
    drafter::Drafter,
    error::{Result, RuntimeError},
    loading::{self, Progress, lead},
    options::{EngineOptions, Ranks},
    pages::PAGE_ROWS,
    planning::Planner,
    request::{Event, FinishReason, Flow, Outcome, Request, RequestId, Speculation},
    round::{Member, Passes},
    sampling::Sampler,
    scheduler::{
        Action, Occupancy, Part, PrefixReuse, Scheduler, SchedulerLimits, SequenceId, Step,
        Submission,
    },
    sequence::{Listener, Sequence},
};

/// A loaded model over its ranks, ready for requests.
pub struct Engine {
    pub(crate) passes: Passes,
    pub(crate) scheduler: Scheduler,
    planner: Planner,
    sequences: HashMap<SequenceId, Box<Sequence>>,
    /// Requests to end at the next step.
    cancelled: Vec<SequenceId>,
    admission: Admission,
    tokenizer: Option<Tokenizer>,
    stop_ids: Arc<[u32]>,
    options: EngineOptions,
    next_request: u64,
    state: State,
}

/// Whether the engine can go on.
enum State {
    Ready,
    /// Within a step, or after one that was cut short by a panic.
    Working,
    Failed {
        cause: String,
    },
}

impl Engine {
    /// Loads a model over `ranks`. In a group of processes this is rank 0; the others call
    /// [`serve`](crate::serve). `progress` is told bytes done and bytes in all of this rank's
    /// shard.
    ///
    /// # Errors
    /// Everything that can be wrong with files, settings, machine and ranks.
    pub fn load(options: EngineOptions, ranks: Ranks, progress: Progress<'_>) -> Result<Self> {
        let plan = loading::Plan::new(&options)?;
        let tokenizer = match options.model.tokenizer() {
            // Prompts and answers are then token ids only.
            Err(ModelError::TokenizerMissing { .. }) => None,
            found => Some(found?),
        };
        if let Some(tokenizer) = &tokenizer {
            tokenizer.check_vocabulary(plan.config.vocabulary)?;
        }
        let stop_ids = options.model.stop_ids(&plan.config)?;
        if let Some(tokenizer) = &tokenizer {
            tokenizer.check_stop_ids(&stop_ids)?;
        }
        let limits = SchedulerLimits {
            pages: plan.slots / PAGE_ROWS,
            context_max: plan.context_max,
            prefill_rows_max: options.prefill_rows,
            decode_rows_max: plan.decode_rows_max,
            sequences_max: options.sequences_max,
            waiting_max: options.waiting_max,
        };
        let scheduler = Scheduler::new(limits)?;
        let tree_rows_max = plan.tree_rows_max;
        let vocabulary = plan.config.vocabulary;
        let (leader, drafter) = lead(plan, &options, ranks, progress)?;
        let controller = ControllerOptions {
            chain_drafted_max: options.chain_drafted_max,
            trees: options.trees.clone(),
        };
        let draft_positions = drafter.as_ref().map_or(0, Drafter::positions_max);
        let proposable_tokens = drafter.as_ref().map(Drafter::proposable_tokens);
        let sequences_max = options.sequences_max;
        Ok(Self {
            planner: Planner::new(&controller, sequences_max, tree_rows_max, draft_positions),
            passes: Passes::new(leader, drafter)?,
            scheduler,
            sequences: HashMap::new(),
            cancelled: Vec::new(),
            admission: Admission::new(limits, vocabulary, tree_rows_max, proposable_tokens),
            tokenizer,
            stop_ids: stop_ids.into(),
            options,
            next_request: 0,
            state: State::Ready,
        })
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        self.passes.leader.model().config()
    }

    /// How the engine was set up.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// The model's tokenizer; `None` if its files hold none, and only token ids can be used.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// Tokens that end an answer.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// Longest sequence.
    pub fn context_max(&self) -> usize {
        self.scheduler.limits().context_max
    }

    /// Tokens that the cache holds, of all sequences together.
    pub fn cache_tokens(&self) -> usize {
        self.scheduler.limits().pages * PAGE_ROWS
    }

    /// Whether there is a draft network.
    pub fn can_speculate(&self) -> bool {
        self.passes.drafter.is_some()
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.passes.leader.model().communicator().world_size()
    }

    /// Bytes of rank 0's caches, the draft's included.
    pub fn cache_bytes(&self) -> usize {
        let draft = self.passes.drafter.as_ref().map_or(0, Drafter::cache_bytes);
        self.passes.leader.cache_bytes() + draft
    }

    /// How often each communication back end served, since the engine was loaded, and how long
    /// that took.
    pub fn communication(&self) -> Vec<Usage> {
        self.passes.leader.model().communicator().counts()
    }

    /// How many requests and pages are in which state.
    pub fn occupancy(&self) -> Occupancy {
        self.scheduler.occupancy()
    }

    /// Which requests this engine takes; a copy can check them elsewhere.
    pub(crate) fn admission(&self) -> &Admission {
        &self.admission
    }

    /// Whether another request may wait.
    pub fn has_room(&self) -> bool {
        self.scheduler.occupancy().waiting < self.scheduler.limits().waiting_max
    }

    /// Whether no request is unfinished.
    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Takes a request into the queue. It goes on with each [`Engine::step`]; over ranks that are
    /// processes or threads of their own, these wait between steps for no longer than the group's
    /// timeout.
    ///
    /// # Errors
    /// [`RuntimeError::Request`] for a request that can never be served, [`RuntimeError::Busy`]
    /// if too many wait, [`RuntimeError::Stopped`] after a failure.
    pub fn submit(&mut self, request: Request) -> Result<RequestId> {
        self.check_state()?;
        self.admission.check(&request)?;
        let reuse = match (self.options.prefix_reuse, self.options.prefix_reuse_of_answers) {
            (false, _) => PrefixReuse::Off,
            (true, false) => PrefixReuse::SameBits,
            (true, true) => PrefixReuse::SameTokens,
        };
        let submission = Submission {
            prompt: request.prompt.clone(),
            tokens_max: request.tokens_max,
            speculates: request.speculation != Speculation::Off,
            reuse,
        };
        let accepted = self.scheduler.submit(submission);
        let accepted = accepted.map_err(|refusal| self.admission.refusal(&request, refusal))?;
        let name = RequestId(self.next_request);
        self.next_request += 1;
        let sampler = Sampler::new(&request, &self.stop_ids);
        let stop_ids = Arc::clone(&self.stop_ids);
        let answer = Answer::new(request, accepted.tokens_max, self.tokenizer.as_ref(), stop_ids);
        let sequence = Sequence::new(accepted.sequence, name, answer, sampler);
        self.sequences.insert(accepted.sequence, Box::new(sequence));
        Ok(name)
    }

    /// Ends a request: the next step tells so. False if it is finished already, or unknown.
    pub fn cancel(&mut self, request: RequestId) -> bool {
        let found = self.sequences.values().find(|sequence| sequence.request == request);
        let id = found.map(|sequence| sequence.id);
        match id {
            Some(id) if !self.cancelled.contains(&id) => {
                self.cancelled.push(id);
                true
            }
            _ => false,
        }
    }

    /// Does what is to be done next: a chunk of a prompt, or a round of all answers that have
    /// begun. `on_event` hears of every token and every piece of text, and can break its request
    /// off; the others go on. False when all requests are finished.
    ///
    /// # Errors
    /// Failures of ranks and [`RuntimeError::LogitsNotFinite`]. They end all requests, and the
    /// engine is of no use after them: [`RuntimeError::Stopped`].
    pub fn step(&mut self, on_event: &mut dyn FnMut(RequestId, Event<'_>) -> Flow) -> Result<bool> {
        self.check_state()?;
        self.state = State::Working;
        match self.advance(on_event) {
            Ok(more) => {
                self.state = State::Ready;
                Ok(more)
            }
            Err(error) => {
                self.fail(&error);
                Err(error)
            }
        }
    }

    /// Runs one request to its end. `on_event` hears of every token and every piece of text, and
    /// can break it off.
    ///
    /// # Errors
    /// As [`Engine::submit`] and [`Engine::step`]; [`RuntimeError::InUse`] if other requests are
    /// unfinished, whose events nobody would hear.
    pub fn generate(
        &mut self,
        request: &Request,
        mut on_event: impl FnMut(Event<'_>) -> Flow,
    ) -> Result<Outcome> {
        self.check_idle("Engine::generate")?;
        self.submit(request.clone())?;
        let mut outcome = None;
        let mut listen = |_, event: Event<'_>| {
            if let Event::Finished(finished) = event {
                outcome = Some(finished.clone());
            }
            on_event(event)
        };
        while self.step(&mut listen)? {}
        Ok(outcome.expect("an engine is idle when its request is finished"))
    }

    /// Refuses what needs the engine to itself while it works.
    pub(crate) fn check_idle(&self, what: &'static str) -> Result<()> {
        self.check_state()?;
        match self.sequences.len() {
            0 => Ok(()),
            requests => Err(RuntimeError::InUse { what, requests }),
        }
    }

    fn check_state(&self) -> Result<()> {
        match &self.state {
            State::Ready => Ok(()),
            State::Working => {
                Err(RuntimeError::Stopped { cause: "a panic cut a step short".to_owned() })
            }
            State::Failed { cause } => Err(RuntimeError::Stopped { cause: cause.clone() }),
        }
    }

    /// Ends everything after a failure.
    pub(crate) fn fail(&mut self, error: &RuntimeError) {
        self.state = State::Failed { cause: error.to_string() };
        self.cancelled.clear();
        self.sequences.clear();
        // Ranks that still live wait for the engine's end from now on, not for the next pass. If
        // they are gone, this fails as the step did.
        let _ = self.passes.leader.forget_all();
    }

    fn advance(&mut self, on_event: Listener<'_>) -> Result<bool> {
        for id in std::mem::take(&mut self.cancelled) {
            if let Some(mut sequence) = self.sequences.remove(&id) {
                sequence.finish(FinishReason::Cancelled, on_event);
                self.end(&mut sequence);
            }
        }
        match self.next_action()? {
            Action::Idle => {}
            Action::Prefill { part, form, gives_token } => {
                self.prefill(&part, form, gives_token, on_event)?;
            }
            Action::Decode { parts } => self.decode(&parts, on_event)?,
        }
        if self.sequences.is_empty() {
            // Ranks that know of no sequence may wait for any time.
            self.next_action()?;
        }
        Ok(!self.sequences.is_empty())
    }

    /// Asks the scheduler what to do, and does what comes before the pass.
    fn next_action(&mut self) -> Result<Action> {
        let Step { forget, preempted, moves, action } = self.schedule();
        for id in forget {
            self.passes.leader.forget(id.0)?;
        }
        for id in preempted {
            if let Some(sequence) = self.sequences.get_mut(&id) {
                self.passes.close(sequence);
                sequence.preempt();
            }
        }
        self.passes.copy_rows(&moves);
        Ok(action)
    }

    /// The next step, with a plan for each sequence of a round.
    fn schedule(&mut self) -> Step {
        let Self { scheduler, planner, sequences, .. } = self;
        planner.begin(sequences.values().map(Box::as_ref));
        scheduler.next(|id| {
            let sequence = sequences.get_mut(&id).expect("the scheduler knows the same sequences");
            planner.plan(sequence)
        })
    }

    fn prefill(
        &mut self,
        part: &Part,
        form: AttentionForm,
        gives_token: bool,
        on_event: Listener<'_>,
    ) -> Result<()> {
        let mut sequence = self.take(part.sequence);
        let name = sequence.request;
        let tokens = self.scheduler.tokens(part.sequence).expect("it is in the pass");
        let started = std::time::Instant::now();
        self.passes.open(&mut sequence, part);
        let first = self.passes.prefill(&mut sequence, part, form, gives_token, tokens)?;
        sequence.timings.prefill += started.elapsed();
        // An answer that is replayed ends with the root of the next round.
        let total = tokens.len() - usize::from(sequence.has_answer());
        let done = part.context + part.rows;
        let mut finish = match on_event(name, Event::Prefill { done, total }) {
            Flow::Continue(()) => None,
            Flow::Break(()) => Some(FinishReason::Cancelled),
        };
        if let Some(acceptance) = first.as_ref().filter(|_| finish.is_none()) {
            sequence.begin_answer();
            let nodes = self.passes.nodes(0, done - 1);
            let listen = &mut |event: Event<'_>| on_event(name, event);
            finish = sequence.answer.take(acceptance, nodes, listen).1;
        }
        let emitted = first.map_or(Vec::new(), |acceptance| acceptance.emitted);
        self.settle(sequence, &emitted, finish, on_event);
        Ok(())
    }

    fn decode(&mut self, parts: &[Part], on_event: Listener<'_>) -> Result<()> {
        let mut members = Vec::with_capacity(parts.len());
        for part in parts {
            let mut sequence = self.take(part.sequence);
            self.passes.open(&mut sequence, part);
            let tokens = self.scheduler.tokens(part.sequence).expect("it is in the pass");
            let root = *tokens.last().expect("a sequence has a token");
            members.push(Member::new(sequence, root, part));
        }
        let times = self.passes.round(&mut members, parts)?;
        self.planner.observe(&members, &times);
        for Member { mut sequence, first_row, position, acceptance, .. } in members {
            sequence.timings.draft += times.draft + times.catch_up;
            sequence.timings.verify += times.verify;
            let name = sequence.request;
            let nodes = self.passes.nodes(first_row, position);
            let listen = &mut |event: Event<'_>| on_event(name, event);
            let (taken, finish) = sequence.answer.take(&acceptance, nodes, listen);
            let (drafted, depth) = (sequence.tree.drafted(), sequence.plan.depth());
            sequence.answer.record(drafted, depth, acceptance.accepted(), taken);
            let Acceptance { emitted, .. } = acceptance;
            self.settle(sequence, &emitted, finish, on_event);
        }
        Ok(())
    }

    /// Tells the scheduler what a pass did for a sequence, and puts it back or ends it.
    fn settle(
        &mut self,
        mut sequence: Box<Sequence>,
        emitted: &[u32],
        finish: Option<FinishReason>,
        on_event: Listener<'_>,
    ) {
        if let Some(reason) = finish {
            sequence.finish(reason, on_event);
            if self.options.prefix_reuse && reason != FinishReason::Cancelled {
                // Later prompts that begin alike and speculate need the draft's rows as well.
                // Whoever broke off waits for the end, so then they are left out.
                self.passes.complete_draft(&mut sequence);
            }
        }
        self.scheduler.commit(sequence.id, emitted, sequence.draft_rows());
        match finish {
            Some(_) => self.end(&mut sequence),
            None => _ = self.sequences.insert(sequence.id, sequence),
        }
    }

    /// Takes back what a finished sequence uses.
    fn end(&mut self, sequence: &mut Sequence) {
        self.passes.close(sequence);
        self.scheduler.end(sequence.id);
    }

    /// Takes a sequence out for a pass; what a failed pass does not put back is gone.
    fn take(&mut self, id: SequenceId) -> Box<Sequence> {
        self.sequences.remove(&id).expect("the scheduler knows the same sequences")
    }
}
