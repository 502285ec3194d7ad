//! The engine: a request in, events out.
//!
//! One request at a time goes through: prompt in chunks, then rounds of draft, verify, commit
//! ([`crate::round`]), whose tokens become text. Start reading at [`Engine::generate`].

use std::{ops::ControlFlow, time::Instant};

use paceline_comm::Usage;
use paceline_model::{ModelError, config::ModelConfig, stop::stop_ids, tokenizer::Tokenizer};
use paceline_spec::{Controller, ControllerOptions, Limits, Plan, RoundOutcome};

use crate::{
    answer::Answer,
    drafter::Drafter,
    error::{Result, RuntimeError},
    loading::{self, Progress, lead},
    options::{EngineOptions, Ranks},
    pages::{PAGE_ROWS, PageAllocator},
    request::{Event, FinishReason, Flow, Outcome, Request, Speculation, Timings},
    round::{Round, Sequence},
    sampling::{self, Sampler},
    worker::leader::Leader,
};

/// A loaded model over its ranks, ready for requests.
pub struct Engine {
    leader: Leader,
    drafter: Option<Drafter>,
    tokenizer: Option<Tokenizer>,
    stop_ids: Vec<u32>,
    pages: PageAllocator,
    options: EngineOptions,
    context_max: usize,
    tree_rows_max: usize,
    next_sequence: u32,
    controller: Controller,
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
        let generation = options.model.text("generation_config.json")?;
        let stop_ids = stop_ids(&plan.config, generation.as_deref())?;
        let pages = PageAllocator::new(plan.slots() / PAGE_ROWS);
        let (context_max, tree_rows_max) = (plan.context_max, plan.tree_rows_max);
        let (leader, drafter) = lead(plan, &options, ranks, progress)?;
        let controller = Controller::new(ControllerOptions {
            chain_drafted_max: options.chain_drafted_max,
            trees: options.trees.clone(),
        });
        Ok(Self {
            leader,
            drafter,
            tokenizer,
            stop_ids,
            pages,
            options,
            context_max,
            tree_rows_max,
            next_sequence: 0,
            controller,
        })
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        self.leader.model().config()
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
        self.context_max
    }

    /// Whether there is a draft network.
    pub fn can_speculate(&self) -> bool {
        self.drafter.is_some()
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.leader.model().communicator().world_size()
    }

    /// Bytes of rank 0's cache.
    pub fn cache_bytes(&self) -> usize {
        self.leader.cache_bytes()
    }

    /// How often each communication back end served, since the engine was loaded.
    pub fn communication(&self) -> Vec<Usage> {
        self.leader.model().communicator().counts()
    }

    /// Runs a request to its end. `on_event` hears of every token and every piece of text, and
    /// can break it off.
    ///
    /// # Errors
    /// [`RuntimeError::Request`] for a request that cannot be served; failures of ranks.
    pub fn generate(
        &mut self,
        request: &Request,
        mut on_event: impl FnMut(Event<'_>) -> Flow,
    ) -> Result<Outcome> {
        self.check(request)?;
        let mut sequence = Sequence::new(self.next_sequence, &request.prompt);
        self.next_sequence = self.next_sequence.wrapping_add(1);
        let outcome = self.run(request, &mut sequence, &mut on_event);
        sequence.release(&mut self.pages);
        // Forgetting reports the same failure again if the ranks are gone.
        let forgotten = self.leader.forget(sequence.id);
        let outcome = outcome?;
        forgotten?;
        Ok(outcome)
    }

    fn run(
        &mut self,
        request: &Request,
        sequence: &mut Sequence,
        on_event: &mut impl FnMut(Event<'_>) -> Flow,
    ) -> Result<Outcome> {
        let started = Instant::now();
        let mut sampler = Sampler::new(request.sampling);
        let tokens_max = request.tokens_max.min(self.context_max - request.prompt.len());
        let stop_ids = self.stop_ids.clone();
        let mut answer = Answer::new(request, tokens_max, self.tokenizer.as_ref(), stop_ids);
        let speculates = request.speculation != Speculation::Off;
        let mut timings = Timings::default();
        let flow = self.prefill(request, sequence, on_event)?;
        if flow.is_break() {
            return Ok(answer.finish(FinishReason::Cancelled, timings, on_event));
        }
        timings.prefill = started.elapsed();
        let first = sequence.first(&self.leader, &mut sampler)?;
        let token = first.bonus();
        let last_row = self.leader.model().taps().rows() as u32 - 1;
        if let (Some(drafter), true) = (&mut self.drafter, speculates) {
            let taps = self.leader.model().taps();
            drafter.commit(taps, &[last_row], &[token], sequence.slots());
        }
        sequence.tokens.push(token);
        timings.first_token = started.elapsed();
        let decoding = Instant::now();
        let mut finish = answer.take(&self.leader, sequence, &first.path, &[token], on_event);
        while finish.is_none() {
            let round = self.round(request, sequence, &mut sampler, &answer)?;
            timings.draft += round.draft + round.catch_up;
            timings.verify += round.verify;
            let emitted = &round.acceptance.emitted;
            let before = answer.tokens().len();
            let path = &round.acceptance.path;
            finish = answer.take(&self.leader, sequence, path, emitted, on_event);
            answer.record(&round, answer.tokens().len() - before);
        }
        timings.decode = decoding.elapsed();
        Ok(answer.finish(finish.unwrap_or(FinishReason::Length), timings, on_event))
    }

    /// Sends the prompt through the model, chunk by chunk.
    fn prefill(
        &mut self,
        request: &Request,
        sequence: &mut Sequence,
        on_event: &mut impl FnMut(Event<'_>) -> Flow,
    ) -> Result<Flow> {
        let total = request.prompt.len();
        if let Some(drafter) = &mut self.drafter {
            drafter.reset();
        }
        while sequence.committed < total {
            let start = sequence.committed;
            let end = start.saturating_add(self.options.prefill_rows).min(total);
            sequence.prefill(&mut self.leader, &mut self.pages, end)?;
            if let (Some(drafter), true) =
                (&mut self.drafter, request.speculation != Speculation::Off)
            {
                // Row i goes with token i + 1; the last row waits for the first sampled token.
                let next = &request.prompt[start + 1..(end + 1).min(total)];
                let rows: Vec<u32> = (0..next.len() as u32).collect();
                drafter.commit(self.leader.model().taps(), &rows, next, sequence.slots());
            }
            let flow = on_event(Event::Prefill { done: end, total });
            if flow.is_break() {
                return Ok(flow);
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// One round, drafting as the request or the controller says.
    fn round(
        &mut self,
        request: &Request,
        sequence: &mut Sequence,
        sampler: &mut Sampler,
        answer: &Answer<'_>,
    ) -> Result<Round> {
        let tokens_left = answer.tokens_max() - answer.tokens().len();
        // Beyond the positions that the draft was trained for, nothing is drafted. The target's
        // own end is in `tokens_max`.
        let draft_positions = self.drafter.as_ref().map_or(usize::MAX, Drafter::positions_max);
        let positions_left = draft_positions.saturating_sub(sequence.committed);
        let limits = Limits::remaining(tokens_left, positions_left, self.tree_rows_max);
        let plan = match request.speculation {
            Speculation::Off => Plan::Plain,
            Speculation::Chain(drafted) => Plan::Chain { drafted }.limited(limits),
            Speculation::Tree(tree) => Plan::Tree(tree).limited(limits),
            Speculation::Auto => self.controller.decide(limits),
        };
        let drafter = match request.speculation {
            Speculation::Off => None,
            _ => self.drafter.as_mut(),
        };
        let round = sequence.round(plan, &mut self.leader, &mut self.pages, drafter, sampler)?;
        if request.speculation == Speculation::Auto {
            self.controller.observe(&RoundOutcome {
                plan: round.plan,
                width: round.width,
                accepted: round.acceptance.accepted(),
                draft_seconds: round.draft.as_secs_f64(),
                verify_seconds: round.verify.as_secs_f64(),
                catch_up_seconds: round.catch_up.as_secs_f64(),
            });
        }
        Ok(round)
    }

    /// Refuses what can never work, before anything is done.
    fn check(&self, request: &Request) -> Result<()> {
        let refuse = |what, got: String, limit: String, advice| {
            Err(RuntimeError::Request { what, got, limit, advice })
        };
        let (length, vocabulary) = (request.prompt.len(), self.config().vocabulary);
        if length == 0 {
            let limit = "a model needs at least one token".to_owned();
            return refuse("the prompt", "empty".to_owned(), limit, "give it some text");
        }
        if let Some(id) = request.prompt.iter().find(|&&id| id as usize >= vocabulary) {
            let limit = format!("this model's ids end at {}", vocabulary - 1);
            return refuse("a token id", id.to_string(), limit, "use this model's tokenizer");
        }
        if length >= self.context_max {
            let limit = format!("the context holds {} with the answer", self.context_max);
            let got = format!("{length} tokens long");
            return refuse("the prompt", got, limit, "shorten it, or load with a larger context");
        }
        if request.tokens_max == 0 {
            let limit = "at least one token is generated".to_owned();
            return refuse("the token limit", "0".to_owned(), limit, "ask for 1 or more");
        }
        sampling::check(&request.sampling)?;
        self.check_speculation(request.speculation)
    }

    fn check_speculation(&self, speculation: Speculation) -> Result<()> {
        let refuse = |what, got: String, limit: String, advice| {
            Err(RuntimeError::Request { what, got, limit, advice })
        };
        if speculation != Speculation::Off && self.drafter.is_none() {
            let limit = "no draft network was loaded".to_owned();
            return refuse("speculation", "on".to_owned(), limit, "give a draft, or turn it off");
        }
        let Some(drafter) = &self.drafter else { return Ok(()) };
        let rows_max = self.tree_rows_max;
        match speculation {
            Speculation::Chain(drafted) if drafted == 0 || drafted >= rows_max => {
                let limit = format!("chains of 1 to {} tokens are possible", rows_max - 1);
                refuse(
                    "the chain",
                    format!("{drafted} tokens long"),
                    limit,
                    "choose another length",
                )
            }
            Speculation::Tree(tree)
                if tree.nodes() > rows_max
                    || tree.topk() * (tree.depth() - 1) > rows_max
                    || tree.topk() > drafter.proposable_tokens() =>
            {
                let limit = format!("{rows_max} rows were set aside for trees");
                refuse("the tree", format!("{tree:?}"), limit, "choose a smaller one")
            }
            _ => Ok(()),
        }
    }
}
