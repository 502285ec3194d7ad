//! Rank 0: starts the other ranks, tells them each pass, and computes its own share.

use paceline_kernels::Tensor;
use paceline_model::forward::Model;

use crate::{
    error::{Result, RuntimeError},
    loading::RankThreads,
    worker::{
        protocol::{Command, StepPlan, encode_step},
        rank::{LEADER, Rank},
    },
};

/// Rank 0 of a group, with the threads of the others if they are threads.
pub(crate) struct Leader {
    // Dropped first: leaving the group frees ranks that did not hear of the end.
    rank: Rank,
    message: Vec<u8>,
    threads: RankThreads,
}

impl Leader {
    /// Leads a group. `threads` serve the other ranks of this process.
    pub(crate) fn new(rank: Rank, threads: RankThreads) -> Self {
        Self { rank, message: Vec::new(), threads }
    }

    /// This rank's model, with the logits and captured states of the last pass.
    pub(crate) fn model(&self) -> &Model {
        self.rank.model()
    }

    /// Bytes of this rank's cache.
    pub(crate) fn cache_bytes(&self) -> usize {
        self.rank.cache_bytes()
    }

    /// Logits of the last pass.
    pub(crate) fn logits(&self) -> &Tensor {
        self.rank.model().logits()
    }

    /// Runs a pass on all ranks.
    ///
    /// # Errors
    /// The first failure of any rank.
    pub(crate) fn step(&mut self, plan: &StepPlan) -> Result<()> {
        if self.is_group() {
            encode_step(plan, &mut self.message);
            self.send()?;
        }
        let outcome = self.rank.step(plan);
        outcome.map_err(|error| self.explain(error))
    }

    /// Lets all ranks forget a sequence.
    ///
    /// # Errors
    /// As [`Leader::step`].
    pub(crate) fn forget(&mut self, sequence: u32) -> Result<()> {
        if self.is_group() {
            Command::Forget { sequence }.encode(&mut self.message);
            self.send()?;
        }
        self.rank.forget(sequence);
        Ok(())
    }

    /// Lets all ranks forget every sequence that they know of: those of a pass that failed and
    /// ended ones too.
    ///
    /// # Errors
    /// As [`Leader::step`].
    pub(crate) fn forget_all(&mut self) -> Result<()> {
        self.rank.sequences().into_iter().try_for_each(|sequence| self.forget(sequence))
    }

    fn is_group(&self) -> bool {
        self.rank.model().communicator().world_size() > 1
    }

    fn send(&mut self) -> Result<()> {
        let communicator = self.rank.model_mut().communicator_mut();
        let outcome = communicator.broadcast_bytes(&mut self.message, LEADER);
        outcome.map_err(|error| self.explain(error.into()))
    }

    /// A rank that is a thread of ours may know better what went wrong.
    fn explain(&mut self, error: RuntimeError) -> RuntimeError {
        self.threads.explain(error)
    }
}

impl Drop for Leader {
    /// Tells the others to stop; then their threads are joined. If telling fails, the group is
    /// broken and they stop by themselves.
    fn drop(&mut self) {
        if self.is_group() {
            Command::Stop.encode(&mut self.message);
            let communicator = self.rank.model_mut().communicator_mut();
            let _ = communicator.broadcast_bytes(&mut self.message, LEADER);
        }
    }
}
