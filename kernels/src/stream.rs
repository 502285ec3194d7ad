//! Where and in which order operators run.
//!
//! On the CPU a stream is a pool of threads; operators run to their end before they return. On a
//! device it is a queue that operators enter their kernels into, without waiting for them.
//! Invariant: how work is split over threads never changes a result, only who computes it.

use std::{ops::Range, sync::Arc, time::Duration};

use crate::{
    Isa, KernelError, Result,
    driver::{Device, DeviceStream},
};

/// An ordered queue of operators. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Stream {
    pool: Option<Arc<rayon::ThreadPool>>,
    threads: usize,
    isa: Isa,
    device: Option<Arc<DeviceStream>>,
}

impl Stream {
    /// A stream on the CPU with its own `threads` threads (0: one for each core).
    ///
    /// # Errors
    /// [`KernelError::Threads`] if the system refuses to start them.
    pub fn host(threads: usize) -> Result<Self> {
        let threads = match threads {
            0 => std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            given => given,
        };
        let pool = if threads == 1 {
            None
        } else {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .thread_name(|index| format!("paceline-{index}"))
                .build()
                .map_err(|error| KernelError::Threads { threads, reason: error.to_string() })?;
            Some(Arc::new(pool))
        };
        Ok(Self { pool, threads, isa: Isa::detect(), device: None })
    }

    /// A new stream on `device`. Operators that exist only on the CPU panic when given one.
    ///
    /// # Errors
    /// [`KernelError::Driver`] if the driver refuses.
    pub fn cuda(device: &Device) -> Result<Self> {
        let stream = Arc::new(DeviceStream::new(device)?);
        Ok(Self { pool: None, threads: 1, isa: Isa::detect(), device: Some(stream) })
    }

    /// The device; none for the CPU.
    pub fn device(&self) -> Option<&Device> {
        self.device.as_deref().map(DeviceStream::device)
    }

    /// The device's queue; none for the CPU.
    pub fn device_stream(&self) -> Option<&DeviceStream> {
        self.device.as_deref()
    }

    /// Waits until all operators so far have ended, at most `limit`. On the CPU they have.
    ///
    /// # Errors
    /// [`KernelError::Driver`] if they fail or take longer.
    pub fn synchronize_within(&self, limit: Duration) -> Result<()> {
        match &self.device {
            Some(stream) => Ok(stream.synchronize_within(limit)?),
            None => Ok(()),
        }
    }

    /// Catches operators that run on the CPU, and would not see what the device has yet to do.
    #[inline]
    fn assert_host(&self) {
        if let Some(device) = self.device() {
            panic!("a CPU operator was given a stream of GPU {}", device.ordinal());
        }
    }

    /// The same stream restricted to `isa`, to compare implementations.
    ///
    /// # Panics
    /// If this processor lacks `isa`, or the stream is a device's.
    #[must_use]
    pub fn with_isa(mut self, isa: Isa) -> Self {
        self.assert_host();
        assert!(isa.is_available(), "this processor has no {isa}");
        self.isa = isa;
        self
    }

    /// Number of threads; 1 for a device.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// The instruction set that operators use.
    ///
    /// # Panics
    /// If the stream is a device's.
    pub fn isa(&self) -> Isa {
        self.assert_host();
        self.isa
    }

    /// Runs `work` on one of the stream's threads, so that the operators inside start without
    /// waking the pool; for a device, on this thread. Wrap a whole pass in it, not each operator.
    pub fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match &self.pool {
            Some(pool) => pool.install(work),
            None => work(),
        }
    }

    /// Splits `0..count` into at most one range a thread, none shorter than `grain` (but the
    /// last), and calls `work` on each, on all threads. Does not allocate.
    ///
    /// # Panics
    /// If the stream is a device's.
    pub fn split(&self, count: usize, grain: usize, work: impl Fn(Range<usize>) + Sync) {
        self.assert_host();
        if count == 0 {
            return;
        }
        let pieces = (count / grain.max(1)).clamp(1, self.threads);
        match &self.pool {
            Some(pool) if pieces > 1 => {
                if pool.current_thread_index().is_some() {
                    halve(0..pieces, count, pieces, &work);
                } else {
                    pool.install(|| halve(0..pieces, count, pieces, &work));
                }
            }
            _ => work(0..count),
        }
    }
}

/// Runs pieces `which` of `pieces`, forking in halves.
fn halve(which: Range<usize>, count: usize, pieces: usize, work: &(impl Fn(Range<usize>) + Sync)) {
    if which.len() == 1 {
        let piece = which.start;
        work(piece * count / pieces..(piece + 1) * count / pieces);
        return;
    }
    let middle = which.start + which.len() / 2;
    rayon::join(
        || halve(which.start..middle, count, pieces, work),
        || halve(middle..which.end, count, pieces, work),
    );
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn split_covers_each_index_once() {
        for threads in [1, 2, 3] {
            let stream = Stream::host(threads).unwrap();
            for count in [0, 1, 2, 7, 64, 101] {
                for grain in [1, 8, 1000] {
                    let hits: Vec<_> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                    stream.split(count, grain, |range| {
                        for index in range {
                            hits[index].fetch_add(1, Ordering::Relaxed);
                        }
                    });
                    assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == 1));
                }
            }
        }
    }
}
