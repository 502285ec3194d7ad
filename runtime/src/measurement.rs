//! What passes cost: measurements for whoever wants to know how fast this machine is.

use std::time::{Duration, Instant};

use paceline_comm::Collective;
use paceline_model::pass::AttentionForm;
use paceline_spec::{DraftTree, Plan};

use crate::{
    drafter::Growth,
    engine::Engine,
    error::{Result, RuntimeError},
    pages::{BlockTable, PAGE_ROWS},
    planning::{scratch_rows, shape},
    worker::protocol::StepPlan,
};

/// Name of the sequence that is measured with; no request gets it while the engine is idle.
const MEASURED: u32 = u32::MAX;

/// Times of passes of the model.
#[derive(Clone, Debug, Default)]
pub struct PassTimes {
    /// Each pass, on rank 0.
    pub passes: Vec<Duration>,
    /// The part of it that rank 0 spent in all-reduces, waiting for the others included.
    pub all_reduces: Vec<Duration>,
}

impl Engine {
    /// Times passes of `rows` tokens after `context` others, as rounds verify drafts: absorbed
    /// attention, and logits for each row. Empties the prefix cache.
    ///
    /// # Errors
    /// [`RuntimeError::InUse`] if requests are unfinished, [`RuntimeError::Request`] if no pass
    /// has so many rows or no sequence is so long, and failures of ranks as in [`Engine::step`].
    pub fn measure_pass(
        &mut self,
        rows: usize,
        context: usize,
        repetitions: usize,
    ) -> Result<PassTimes> {
        let table = self.measured_table("Engine::measure_pass", rows, context)?;
        let mut times = PassTimes::default();
        let outcome = self.measure(&table, rows, context, repetitions, &mut times);
        if let Err(error) = outcome {
            self.fail(&error);
            return Err(error);
        }
        Ok(times)
    }

    /// Times the drafting of what `plan` says after `context` tokens: one row of the token before,
    /// then the levels. Nothing for [`Plan::Plain`], or without a draft. Empties the prefix cache.
    ///
    /// # Errors
    /// As [`Engine::measure_pass`], whose failures of ranks end the engine here too;
    /// [`RuntimeError::Speculation`] if the draft's logits are not finite, after which the engine
    /// goes on.
    pub fn measure_draft(
        &mut self,
        plan: Plan,
        context: usize,
        repetitions: usize,
    ) -> Result<Vec<Duration>> {
        let rows = plan.width().max(scratch_rows(plan)).max(1);
        let table = self.measured_table("Engine::measure_draft", rows, context + 1)?;
        let Some(shape) = shape(plan).filter(|_| self.can_speculate()) else {
            return Ok(Vec::new());
        };
        // The states that the draft starts from must be those of some pass.
        let mut times = PassTimes::default();
        self.measure(&table, 1, context, 1, &mut times).inspect_err(|error| self.fail(error))?;
        let taps = self.passes.leader.model().taps();
        let Some(drafter) = &mut self.passes.drafter else { return Ok(Vec::new()) };
        let (root, mut tree, slots) = (0, DraftTree::root_only(0), table.slots());
        let mut durations = Vec::with_capacity(repetitions);
        for _ in 0..repetitions {
            let mut drafting = drafter.start(context);
            drafter.commit(&mut drafting, taps, &[0], &[root], slots);
            if !drafting.can_grow() {
                drafter.release(drafting);
                break;
            }
            let started = Instant::now();
            let growth = Growth::new(&mut drafting, shape, root, slots, &mut tree);
            let outcome = drafter.propose(&mut [growth]);
            durations.push(started.elapsed());
            drafter.release(drafting);
            outcome?;
        }
        Ok(durations)
    }

    /// Pages of a sequence that has the cache to itself.
    fn measured_table(
        &mut self,
        what: &'static str,
        rows: usize,
        context: usize,
    ) -> Result<BlockTable> {
        self.check_idle(what)?;
        let limits = *self.scheduler.limits();
        let refuse = |what, got: usize, limit: String| {
            let advice = "measure something smaller";
            Err(RuntimeError::Request { what, got: got.to_string(), limit, advice })
        };
        if rows == 0 || rows > limits.decode_rows_max {
            let limit = format!("passes have 1 to {} rows", limits.decode_rows_max);
            return refuse("the number of rows", rows, limit);
        }
        let length = context.saturating_add(rows);
        let length_max = limits.context_max.min(limits.pages * PAGE_ROWS);
        if length > length_max {
            return refuse("the length", length, format!("{length_max} tokens are the most"));
        }
        self.scheduler.clear_cache();
        let mut table = BlockTable::default();
        (0..length.div_ceil(PAGE_ROWS)).for_each(|page| table.push(page as u32));
        Ok(table)
    }

    fn measure(
        &mut self,
        table: &BlockTable,
        rows: usize,
        context: usize,
        repetitions: usize,
        times: &mut PassTimes,
    ) -> Result<()> {
        let mut step = StepPlan::default();
        step.clear(AttentionForm::Absorbed);
        // Tokens that differ, so that experts are chosen as in a text.
        let vocabulary = self.config().vocabulary;
        let tokens: Vec<u32> = (1..=rows).map(|row| (row * 7919 % vocabulary) as u32).collect();
        let pages: Vec<u32> = (0..(table.slots().len() / PAGE_ROWS) as u32).collect();
        step.add(MEASURED, &pages, context, &tokens);
        step.logit_rows.extend(0..rows as u32);
        // The first pass touches memory for the first time and does not count.
        for repetition in 0..=repetitions {
            let (before, started) = (self.all_reduce_time(), Instant::now());
            self.passes.leader.step(&step)?;
            let pass = started.elapsed();
            if repetition > 0 {
                times.passes.push(pass);
                times.all_reduces.push(self.all_reduce_time().saturating_sub(before));
            }
            step.sequences[0].new_pages.clear();
        }
        self.passes.leader.forget(MEASURED)
    }

    /// Time in all-reduces since the engine was loaded.
    fn all_reduce_time(&self) -> Duration {
        let usage = self.communication();
        let reduces = usage.iter().filter(|usage| usage.collective == Collective::AllReduce);
        Duration::from_secs_f64(reduces.map(|usage| usage.seconds).sum())
    }
}
