//! How long to spin, yield and sleep while another rank is awaited.
//!
//! A rank that has a processor for itself spins, because the others are then microseconds away.
//! If there are more ranks than processors, spinning keeps the awaited rank from running, so
//! ranks yield a few times and then sleep until they are woken. Sleeps are bounded: a sleeper
//! must see the death of a process, which wakes nobody.

use std::{
    hint, thread,
    time::{Duration, Instant},
};

/// How long a rank with its own processor spins: longer than the usual skew between ranks.
const SPIN_TIME: Duration = Duration::from_micros(200);
/// Looks between two looks at the clock.
const SPINS: u32 = 64;
/// Turns given to others before sleeping, if ranks share processors.
const YIELDS: u32 = 4;
const FIRST_NAP: Duration = Duration::from_millis(1);
/// Bounds how late the death of a process is noticed.
const LONGEST_NAP: Duration = Duration::from_millis(16);

/// How a rank waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    spin_time: Duration,
    yields: u32,
}

impl Patience {
    pub(crate) fn for_world(world_size: usize) -> Self {
        let processors = thread::available_parallelism().map_or(1, std::num::NonZero::get);
        if world_size <= processors {
            Self { spin_time: SPIN_TIME, yields: 0 }
        } else {
            Self { spin_time: Duration::ZERO, yields: YIELDS }
        }
    }

    /// Looks at `is_done` for a while; returns whether it became true.
    pub(crate) fn spin(self, is_done: impl Fn() -> bool) -> bool {
        if self.spin_time > Duration::ZERO {
            let start = Instant::now();
            loop {
                for _ in 0..SPINS {
                    if is_done() {
                        return true;
                    }
                    hint::spin_loop();
                }
                if start.elapsed() >= self.spin_time {
                    break;
                }
            }
        }
        (0..self.yields).any(|_| {
            thread::yield_now();
            is_done()
        })
    }

    pub(crate) fn first_nap(self) -> Duration {
        FIRST_NAP
    }

    pub(crate) fn longer_nap(self, nap: Duration) -> Duration {
        (2 * nap).min(LONGEST_NAP)
    }
}
