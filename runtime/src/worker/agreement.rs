//! Whether all ranks were started alike.
//!
//! Ranks as processes read their own command lines and files. Where these differ, sums would be
//! wrong without an error, so the facts that a pass depends on are compared once, at the start.

use paceline_comm::Communicator;
use paceline_kernels::{DType, Stream, Tensor};

use crate::error::{Result, RuntimeError};

/// What must be the same on all ranks: names for messages, and values.
pub(crate) struct Settings(Vec<(&'static str, i64)>);

impl Settings {
    /// No facts yet.
    pub(crate) fn new() -> Self {
        Self(Vec::new())
    }

    /// Adds a number.
    pub(crate) fn number(mut self, name: &'static str, value: usize) -> Self {
        self.0.push((name, value as i64));
        self
    }

    /// Adds a text by its hash (FNV-1a, the same in every build).
    pub(crate) fn text(mut self, name: &'static str, text: &str) -> Self {
        let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325, step);
        self.0.push((name, hash as i64));
        self
    }

    /// Compares with all other ranks.
    ///
    /// # Errors
    /// [`RuntimeError::RanksDiffer`] with the first setting that differs, and the failures of the
    /// group.
    pub(crate) fn agree(&self, communicator: &mut Communicator, stream: &Stream) -> Result<()> {
        let ranks = communicator.world_size();
        let own: Vec<i64> = self.0.iter().map(|&(_, value)| value).collect();
        let own = Tensor::from_slice(&[1, own.len()], &own);
        let mut all = Tensor::zeros(DType::I64, &[ranks, self.0.len()]);
        communicator.all_gather(&own, &mut all, stream)?;
        let rows = all.as_slice::<i64>().chunks_exact(self.0.len());
        for (rank, row) in rows.enumerate() {
            let pairs = row.iter().zip(&self.0);
            for (&theirs, &(setting, ours)) in pairs {
                if theirs != ours {
                    let this = communicator.rank().index();
                    return Err(RuntimeError::RanksDiffer { setting, this, other: rank });
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use paceline_comm::{GroupOptions, in_process};

    use super::*;

    #[test]
    fn a_difference_is_named_on_every_rank() {
        let groups = in_process(3, &GroupOptions::default()).unwrap();
        let outcomes: Vec<Result<()>> = std::thread::scope(|scope| {
            let ranks: Vec<_> = groups
                .into_iter()
                .enumerate()
                .map(|(rank, group)| {
                    scope.spawn(move || {
                        let mut communicator = Communicator::connect(group, None).unwrap();
                        let stream = Stream::host(1).unwrap();
                        let settings = Settings::new().text("config.json", "{}");
                        let settings = settings.number("context", 100 + rank / 2);
                        settings.agree(&mut communicator, &stream)
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        for outcome in outcomes {
            let message = outcome.unwrap_err().to_string();
            assert!(message.contains("context") && message.contains("rank 2"), "{message}");
        }
    }
}
