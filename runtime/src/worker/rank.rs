//! What every rank does with a message of rank 0: its shard of the pass.

use std::collections::HashMap;

use paceline_kernels::ops::attention::Paths;
use paceline_model::{
    forward::{KvCache, Model},
    pass::{Pass, Segment},
};

use crate::{
    error::{Result, RuntimeError},
    pages::BlockTable,
    worker::protocol::{Command, SequenceStep, StepPlan},
};

/// The rank that decides.
pub(crate) const LEADER: paceline_comm::Rank = paceline_comm::Rank(0);

/// One rank: its model shard, its cache, and where each sequence is in it.
pub(crate) struct Rank {
    model: Model,
    cache: KvCache,
    tables: HashMap<u32, BlockTable>,
    positions: Vec<u32>,
    paths: Vec<Paths>,
}

impl Rank {
    /// A rank with a cache of `slots` rows.
    pub(crate) fn new(model: Model, slots: usize) -> Self {
        let cache = model.cache(slots);
        Self { model, cache, tables: HashMap::new(), positions: Vec::new(), paths: Vec::new() }
    }

    /// The rank's model, with the results of the last pass.
    pub(crate) fn model(&self) -> &Model {
        &self.model
    }

    /// The same, for its communicator.
    pub(crate) fn model_mut(&mut self) -> &mut Model {
        &mut self.model
    }

    /// Bytes of the cache.
    pub(crate) fn cache_bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// Receives and obeys messages until rank 0 says stop. Between requests a rank waits as long
    /// as rank 0 lives; within one, rank 0 has the group's timeout to come with the next pass.
    pub(crate) fn serve(mut self) -> Result<()> {
        let mut message = Vec::new();
        loop {
            let is_idle = self.tables.is_empty();
            let communicator = self.model.communicator_mut();
            match is_idle {
                true => communicator.broadcast_bytes(&mut message, LEADER)?,
                false => communicator.broadcast_bytes_in_time(&mut message, LEADER)?,
            }
            match Command::decode(&message)? {
                Command::Step(plan) => self.step(&plan)?,
                Command::Forget { sequence } => self.forget(sequence),
                Command::Stop => return Ok(()),
            }
        }
    }

    /// Sequences that the rank has a table of; all ranks have the same between two passes.
    pub(crate) fn sequences(&self) -> Vec<u32> {
        self.tables.keys().copied().collect()
    }

    /// Drops a sequence's table.
    pub(crate) fn forget(&mut self, sequence: u32) {
        self.tables.remove(&sequence);
    }

    /// Runs one pass.
    pub(crate) fn step(&mut self, plan: &StepPlan) -> Result<()> {
        self.cache.move_slots(&plan.moves);
        self.positions.clear();
        self.paths.resize_with(plan.sequences.len(), Paths::default);
        for (step, paths) in plan.sequences.iter().zip(&mut self.paths) {
            let table = self.tables.entry(step.sequence).or_default();
            step.new_pages.iter().for_each(|&page| table.push(page));
            if table.slots().len() < (step.context + step.rows) as usize {
                return Err(RuntimeError::Protocol { what: "rows without a page" });
            }
            place_rows(step, paths, &mut self.positions)?;
        }
        let mut first_row = 0;
        let segments: Vec<Segment<'_>> = plan
            .sequences
            .iter()
            .zip(&self.paths)
            .map(|(step, paths)| {
                let (rows, context) = (step.rows as usize, step.context as usize);
                let slots = self.tables[&step.sequence].slots();
                let paths = (!step.parents.is_empty()).then_some(paths);
                let segment = Segment { first_row, rows, context, earlier: 0, slots, paths };
                first_row += rows;
                segment
            })
            .collect();
        if first_row != plan.tokens.len() {
            return Err(RuntimeError::Protocol { what: "rows and tokens differ" });
        }
        let pass = Pass {
            tokens: &plan.tokens,
            positions: &self.positions,
            segments: &segments,
            form: plan.form(),
            logit_rows: &plan.logit_rows,
        };
        Ok(self.model.forward(&pass, &mut self.cache)?)
    }
}

/// Appends the positions of a sequence's rows, and makes the paths of its tree.
fn place_rows(step: &SequenceStep, paths: &mut Paths, positions: &mut Vec<u32>) -> Result<()> {
    paths.clear();
    if step.parents.is_empty() {
        positions.extend(step.context..step.context + step.rows);
        return Ok(());
    }
    if step.parents.len() != step.rows as usize {
        return Err(RuntimeError::Protocol { what: "rows and parents differ" });
    }
    for (node, &parent) in step.parents.iter().enumerate() {
        if parent as usize > node || (parent as usize == node && node > 0) {
            return Err(RuntimeError::Protocol { what: "a parent comes after its child" });
        }
        paths.push((node > 0).then_some(parent as usize));
        positions.push(step.context + paths.path(node).len() as u32 - 1);
    }
    Ok(())
}
