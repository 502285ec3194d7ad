//! Measuring on a loaded engine.
//!
//! Invariant: what is compared runs in turn, with the same prompts. Start reading at
//! [`Measurement`]; [`Measurement::interleave`] is how everything runs.

use std::{
    ops::ControlFlow,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use paceline_comm::Collective;
use paceline_runtime::{Engine, Event, Request, Speculation};
use paceline_spec::{Statistics, TreeParameters};

use super::{
    prompts,
    report::{Batch, Pass, Prompt, Setting, Workload},
    samples::Samples,
};
use crate::{
    args::{DecodeArguments, Part, SettingArgument},
    output::progress::StepsBar,
};

/// Numbers of --quick.
const QUICK_PROMPTS: usize = 2;
const QUICK_TOKENS: usize = 8;
const QUICK_PROMPT_TOKENS: usize = 64;

/// Passes are measured after this many tokens, and as many times in a row.
const PASS_CONTEXT: usize = 256;
const PASS_REPETITIONS: usize = 10;

/// What is measured, and how often.
pub(super) struct Measurement {
    parts: Vec<Part>,
    settings: Vec<SettingArgument>,
    prompts: Vec<Vec<u32>>,
    tokens: usize,
    prompt_tokens: usize,
    passes: Vec<usize>,
    batches: Vec<usize>,
    repetitions: usize,
    quiet: bool,
}

impl Measurement {
    pub(super) fn new(
        arguments: &DecodeArguments,
        engine: &Engine,
        settings: Vec<SettingArgument>,
    ) -> Result<Self> {
        let measurement = &arguments.measurement;
        let mut prompts = prompts::prompts(engine, measurement.prompt_file.as_deref())?;
        let mut tokens = measurement.tokens;
        let mut prompt_tokens = measurement.prompt_tokens.min(engine.context_max() - 1);
        let mut repetitions = measurement.repetitions.into();
        if measurement.quick {
            prompts.truncate(QUICK_PROMPTS);
            (tokens, repetitions) = (tokens.min(QUICK_TOKENS), 1);
            prompt_tokens = prompt_tokens.min(QUICK_PROMPT_TOKENS);
        }
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let context = engine.context_max();
        ensure!(
            longest + tokens <= context,
            "the longest prompt has {longest} tokens and the answers {tokens}, but the context \
             holds {context}: lower --tokens, or raise --context"
        );
        let measurement = Self {
            parts: measurement.parts.clone(),
            settings,
            prompts,
            tokens,
            prompt_tokens,
            passes: measurement.passes.clone(),
            batches: measurement.batch.clone(),
            repetitions,
            quiet: arguments.report.quiet,
        };
        measurement.check(engine)?;
        Ok(measurement)
    }

    /// Refuses what would fail after other parts have been measured.
    fn check(&self, engine: &Engine) -> Result<()> {
        let context = engine.context_max();
        let room = context - pass_context(engine);
        let widest = self.passes.iter().max().copied().unwrap_or(0);
        ensure!(
            !self.wants(Part::Passes) || widest <= room,
            "passes of {widest} tokens do not fit into a context of {context} after {} others: \
             lower --passes, or raise --context",
            context - room
        );
        let longest = self.prompts.iter().map(Vec::len).max().unwrap_or(0);
        let size = self.batches.iter().max().copied().unwrap_or(0);
        let leads = batch_modes(engine).iter().map(|&mode| self.lead(engine, size, mode));
        let length = longest + self.tokens + leads.max().unwrap_or(0);
        ensure!(
            !self.wants(Part::Batch) || length <= context,
            "{size} sequences that all run for {} tokens after the last has begun get up to \
             {length} tokens long, but the context holds {context}: lower --batch or --tokens, or \
             raise --context",
            self.tokens
        );
        Ok(())
    }

    /// What was asked, for the report.
    pub(super) fn workload(&self) -> Workload {
        let (prompts, tokens) = (self.prompts.len(), self.tokens);
        Workload { prompts, tokens, repetitions: self.repetitions }
    }

    fn wants(&self, part: Part) -> bool {
        self.parts.is_empty() || self.parts.contains(&part)
    }

    /// Runs each of `count` things in turn, once to warm up and then as often as was asked for.
    /// `once` is told the thing's index and whether it counts.
    fn interleave(
        &self,
        title: &'static str,
        count: usize,
        mut once: impl FnMut(usize, bool) -> Result<()>,
    ) -> Result<()> {
        let rounds = self.repetitions + 1;
        let mut bar = StepsBar::new(title, rounds * count, self.quiet);
        for round in 0..rounds {
            for index in 0..count {
                once(index, round > 0)?;
                bar.step();
            }
        }
        bar.finish();
        Ok(())
    }

    /// Tokens a second of each setting.
    pub(super) fn decode(&self, engine: &mut Engine) -> Result<Vec<Setting>> {
        if !self.wants(Part::Decode) {
            return Ok(Vec::new());
        }
        let mut measured: Vec<Measured> =
            self.settings.iter().map(|_| Measured::default()).collect();
        let mut expected: Vec<Vec<u32>> = Vec::new();
        self.interleave("decoding", self.settings.len(), |index, counts| {
            let answers =
                self.answer_all(engine, self.settings[index], &mut measured[index], counts)?;
            if expected.is_empty() {
                expected = answers;
            } else if answers != expected {
                measured[index].differs = true;
            }
            Ok(())
        })?;
        Ok(self.settings.iter().zip(measured).map(|(setting, found)| found.of(*setting)).collect())
    }

    fn request(&self, prompt: &[u32], setting: SettingArgument, tokens: usize) -> Request {
        Request {
            ignore_eos: true,
            speculation: setting.speculation(),
            ..Request::new(prompt.to_vec(), tokens)
        }
    }

    /// The answers to all prompts; into `measured` goes what they took, if it `counts`.
    fn answer_all(
        &self,
        engine: &mut Engine,
        setting: SettingArgument,
        measured: &mut Measured,
        counts: bool,
    ) -> Result<Vec<Vec<u32>>> {
        let mut run = Run::default();
        let reduced = all_reduce_seconds(engine);
        for prompt in &self.prompts {
            let request = self.request(prompt, setting, self.tokens);
            let outcome = engine.generate(&request, |_| ControlFlow::Continue(()))?;
            run.seconds += outcome.timings.decode.as_secs_f64();
            run.whole_seconds +=
                (outcome.timings.first_token + outcome.timings.decode).as_secs_f64();
            run.draft_seconds += outcome.timings.draft.as_secs_f64();
            run.tokens += outcome.tokens.len() - 1;
            run.statistics.merge(&outcome.speculation);
            run.answers.push(outcome.tokens);
        }
        run.reduce_seconds = all_reduce_seconds(engine) - reduced;
        if counts {
            measured.add(&run);
        }
        Ok(run.answers)
    }

    /// Tokens a second of a long prompt.
    pub(super) fn prompt(&self, engine: &mut Engine) -> Result<Option<Prompt>> {
        if !self.wants(Part::Prompt) {
            return Ok(None);
        }
        let request = Request::new(prompts::long(&self.prompts, self.prompt_tokens), 1);
        let mut tokens_per_second = Samples::default();
        self.interleave("prompts", 1, |_, counts| {
            let outcome = engine.generate(&request, |_| ControlFlow::Continue(()))?;
            if counts {
                let seconds = outcome.timings.prefill.as_secs_f64();
                tokens_per_second.push(self.prompt_tokens as f64 / seconds);
            }
            Ok(())
        })?;
        Ok(Some(Prompt { tokens: self.prompt_tokens, tokens_per_second }))
    }
}

impl Measurement {
    /// What passes of several tokens cost.
    pub(super) fn passes(&self, engine: &mut Engine) -> Result<Vec<Pass>> {
        if !self.wants(Part::Passes) {
            return Ok(Vec::new());
        }
        let mut measured: Vec<Pass> =
            self.passes.iter().map(|&tokens| Pass { tokens, ..Pass::default() }).collect();
        let context = pass_context(engine);
        self.interleave("passes", self.passes.len(), |index, counts| {
            let pass = &mut measured[index];
            let times = engine.measure_pass(pass.tokens, context, PASS_REPETITIONS)?;
            let median = |times: &[Duration]| {
                times.iter().map(Duration::as_secs_f64).collect::<Samples>().median()
            };
            if counts {
                pass.context = context;
                pass.seconds.push(median(&times.passes));
                let reduces: Duration = times.all_reduces.iter().sum();
                let passes: Duration = times.passes.iter().sum();
                pass.all_reduce_share.push(reduces.as_secs_f64() / passes.as_secs_f64());
            }
            Ok(())
        })?;
        Ok(measured)
    }

    /// Tokens a second of several sequences together.
    pub(super) fn batch(&self, engine: &mut Engine) -> Result<Vec<Batch>> {
        if !self.wants(Part::Batch) {
            return Ok(Vec::new());
        }
        let modes = batch_modes(engine);
        let pairs =
            self.batches.iter().flat_map(|&size| modes.iter().map(move |&mode| (size, mode)));
        let pairs: Vec<_> = pairs.collect();
        let mut measured: Vec<Batch> = pairs
            .iter()
            .map(|&(sequences, mode)| Batch {
                sequences,
                setting: mode.to_string(),
                tokens_per_second: Samples::default(),
                preemptions: 0,
            })
            .collect();
        self.interleave("batches", pairs.len(), |index, counts| {
            let (size, mode) = pairs[index];
            let (tokens_per_second, preemptions) = self.answer_together(engine, size, mode)?;
            if counts {
                measured[index].tokens_per_second.push(tokens_per_second);
                measured[index].preemptions += preemptions;
            }
            Ok(())
        })?;
        Ok(measured)
    }

    /// Runs `size` requests at the same time. The rate counts the rounds in which all of them take
    /// part, from when the last has its first token until the first has its last one: prompts are
    /// another measurement. The requests are broken off then.
    fn answer_together(
        &self,
        engine: &mut Engine,
        size: usize,
        mode: SettingArgument,
    ) -> Result<(f64, usize)> {
        let mut names = Vec::with_capacity(size);
        for prompt in self.prompts.iter().cycle().take(size) {
            let tokens = self.tokens + self.lead(engine, size, mode);
            names.push(engine.submit(self.request(prompt, mode, tokens))?);
        }
        let mut heard = Heard::default();
        while heard.begun < size && heard.finished == 0 {
            heard.step(engine)?;
        }
        let (started, before) = (Instant::now(), heard.tokens);
        while heard.finished == 0 {
            heard.step(engine)?;
        }
        let (seconds, tokens) = (started.elapsed().as_secs_f64(), heard.tokens - before);
        names.into_iter().for_each(|name| _ = engine.cancel(name));
        while heard.step(engine)? {}
        ensure!(
            heard.begun == size && tokens > 0,
            "of {size} sequences some ended before all had begun: lower --batch, or raise --tokens"
        );
        Ok((tokens as f64 / seconds, heard.preemptions))
    }

    /// Most tokens that the first of `size` requests can have before the last one has its first:
    /// between two chunks of prompts there is one round.
    fn lead(&self, engine: &Engine, size: usize, mode: SettingArgument) -> usize {
        let options = engine.options();
        let prompts = self.prompts.iter().cycle().take(size);
        let chunks: usize = prompts.map(|prompt| prompt.len().div_ceil(options.prefill_rows)).sum();
        let drafted_max = match mode {
            SettingArgument::Off => 0,
            _ => {
                let depths = options.trees.iter().map(TreeParameters::depth);
                depths.chain([options.chain_drafted_max]).max().unwrap_or(0)
            }
        };
        chunks * (drafted_max + 1)
    }
}

/// What requests that run at the same time have told.
#[derive(Default)]
struct Heard {
    begun: usize,
    finished: usize,
    tokens: usize,
    preemptions: usize,
}

impl Heard {
    fn step(&mut self, engine: &mut Engine) -> Result<bool> {
        let more = engine.step(&mut |_, event| {
            match event {
                Event::Token(token) => {
                    self.begun += usize::from(token.index == 0);
                    self.tokens += 1;
                }
                Event::Finished(outcome) => {
                    self.finished += 1;
                    self.preemptions += outcome.preemptions;
                }
                _ => {}
            }
            ControlFlow::Continue(())
        });
        Ok(more?)
    }
}

/// One run over all prompts.
#[derive(Default)]
struct Run {
    answers: Vec<Vec<u32>>,
    tokens: usize,
    seconds: f64,
    whole_seconds: f64,
    draft_seconds: f64,
    reduce_seconds: f64,
    statistics: Statistics,
}

/// All counted runs of a setting.
#[derive(Default)]
struct Measured {
    tokens_per_second: Samples,
    seconds: f64,
    whole_seconds: f64,
    draft_seconds: f64,
    reduce_seconds: f64,
    statistics: Statistics,
    differs: bool,
}

impl Measured {
    fn add(&mut self, run: &Run) {
        self.tokens_per_second.push(run.tokens as f64 / run.seconds);
        self.seconds += run.seconds;
        self.whole_seconds += run.whole_seconds;
        self.draft_seconds += run.draft_seconds;
        self.reduce_seconds += run.reduce_seconds;
        self.statistics.merge(&run.statistics);
    }

    fn of(self, setting: SettingArgument) -> Setting {
        Setting {
            name: setting.to_string(),
            tokens_per_second: self.tokens_per_second,
            tokens_per_round: self.statistics.mean_acceptance_length(),
            rounds: self.statistics.rounds(),
            drafted: self.statistics.drafted(),
            accepted: self.statistics.accepted(),
            draft_share: self.draft_seconds / self.seconds,
            all_reduce_share: self.reduce_seconds / self.whole_seconds,
            same_tokens: !self.differs,
        }
    }
}

/// Tokens before the passes that are measured.
fn pass_context(engine: &Engine) -> usize {
    PASS_CONTEXT.min(engine.context_max() / 2)
}

/// Ways of decoding to compare for several sequences.
fn batch_modes(engine: &Engine) -> &'static [SettingArgument] {
    match engine.can_speculate() {
        true => &[SettingArgument::Off, SettingArgument::Auto],
        false => &[SettingArgument::Off],
    }
}

/// Seconds that rank 0 has spent in all-reduces so far.
fn all_reduce_seconds(engine: &Engine) -> f64 {
    let usage = engine.communication();
    let reduces = usage.iter().filter(|usage| usage.collective == Collective::AllReduce);
    reduces.map(|usage| usage.seconds).sum()
}

impl SettingArgument {
    fn speculation(self) -> Speculation {
        match self {
            Self::Off => Speculation::Off,
            Self::Chain(drafted) => Speculation::Chain(drafted),
            Self::Tree(tree) => Speculation::Tree(tree),
            Self::Auto => Speculation::Auto,
        }
    }
}
