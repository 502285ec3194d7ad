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

/// How long a rank with its own processor only looks: as long as a small collective takes.
const SPIN_TIME: Duration = Duration::from_micros(20);
/// How long it then goes on looking, but lets others run in between: longer than the usual skew
/// between ranks. There are others if ranks have several threads, or the machine other work.
const YIELD_TIME: Duration = Duration::from_micros(200);
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
    is_crowded: bool,
}

impl Patience {
    pub(crate) fn for_world(world_size: usize) -> Self {
        let processors = thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self { is_crowded: world_size > processors }
    }

    /// Looks at `is_done` for a while; returns whether it became true.
    pub(crate) fn spin(self, is_done: impl Fn() -> bool) -> bool {
        if self.is_crowded {
            return (0..YIELDS).any(|_| {
                thread::yield_now();
                is_done()
            });
        }
        let start = Instant::now();
        loop {
            for _ in 0..SPINS {
                if is_done() {
                    return true;
                }
                hint::spin_loop();
            }
            let elapsed = start.elapsed();
            if elapsed >= YIELD_TIME {
                return false;
            }
            if elapsed >= SPIN_TIME {
                thread::yield_now();
            }
        }
    }

    pub(crate) fn first_nap(self) -> Duration {
        FIRST_NAP
    }

    pub(crate) fn longer_nap(self, nap: Duration) -> Duration {
        (2 * nap).min(LONGEST_NAP)
    }
}
