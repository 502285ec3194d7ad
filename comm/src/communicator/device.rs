//! What a communicator does only where ranks compute on GPUs.

use std::{
    thread,
    time::{Duration, Instant},
};

use paceline_kernels::{DType, Stream};

use super::Communicator;
use crate::{AddRmsNorm, Collective, CommError, Result};

/// How much longer than the group's timeout a stream is waited for: its kernels have the timeout,
/// and know whom they waited for.
const GRACE: Duration = Duration::from_secs(1);
/// Looks are close together for this long, as long as a few collectives take.
const BUSY: Duration = Duration::from_micros(200);
const NAP: Duration = Duration::from_micros(50);

impl Communicator {
    /// Waits until `stream` has done all that it holds, at most a second longer than the group's
    /// timeout, and looks for failures meanwhile. This is how an error of a collective on a GPU
    /// comes to light; calls in between see it too.
    ///
    /// # Errors
    /// The group's first failure: [`CommError::PeerTimeout`] or [`CommError::RankLost`] if a rank
    /// did not come, [`CommError::Aborted`] also if the stream takes longer. The results of the
    /// collectives are then worthless; the kernels end by themselves.
    pub fn synchronize(&mut self, stream: &Stream) -> Result<()> {
        let Some(queue) = stream.device_stream() else { return self.check() };
        let start = Instant::now();
        let limit = self.group.timeout() + GRACE;
        loop {
            // Before the look for failures: those of kernels that have ended are then seen.
            let is_idle = queue.is_idle()?;
            self.check_connections()?;
            if is_idle {
                return Ok(());
            }
            let waited = start.elapsed();
            if waited >= limit {
                self.abort_handle().abort(&format!("its GPU was still busy after {waited:?}"));
                return self.check();
            }
            if waited < BUSY {
                std::hint::spin_loop();
            } else {
                thread::sleep(NAP);
            }
        }
    }

    /// Whether [`Communicator::all_reduce_add_rms_norm`] takes such tensors, and saves time with
    /// them. The same on all ranks.
    pub fn fuses(&mut self, dtype: DType, rows: usize, width: usize) -> bool {
        self.connected.iter_mut().any(|connected| {
            connected.connection.fused().is_some_and(|fused| fused.serves(dtype, rows, width))
        })
    }

    /// All-reduce (a sum), residual addition and RMSNorm in one kernel, where a back end has it.
    ///
    /// # Errors
    /// [`CommError::NotServed`] where [`Communicator::fuses`] says no: do the three one after the
    /// other. Otherwise as [`Communicator::all_reduce`].
    ///
    /// # Panics
    /// If `residual` or `out` is a view, and so read-only.
    pub fn all_reduce_add_rms_norm(&mut self, call: AddRmsNorm<'_>, stream: &Stream) -> Result<()> {
        let (bytes, dtype) = (call.x.bytes(), call.x.dtype());
        let (rows, width) = (call.x.rows(), call.x.width());
        let started = Instant::now();
        for connected in &mut self.connected {
            let Some(fused) = connected.connection.fused() else { continue };
            if !fused.serves(dtype, rows, width) {
                continue;
            }
            // SAFETY: the tensors are borrowed for the call; that device memory outlives what is on
            // the stream is what dropping it waits for.
            unsafe { fused.add_rms_norm(&mut self.group, call, stream)? };
            connected.counts[Collective::AllReduce as usize].add(bytes, started);
            return Ok(());
        }
        Err(CommError::NotServed {
            collective: Collective::AllReduce,
            bytes,
            dtype,
            reasons: "none adds and normalises such rows in the same kernel".to_owned(),
        })
    }

    pub(super) fn check_connections(&mut self) -> Result<()> {
        for connected in &mut self.connected {
            connected.connection.check(&mut self.group)?;
        }
        self.group.failure()
    }
}
