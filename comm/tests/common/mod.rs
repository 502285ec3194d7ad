//! What the tests of this crate share.
#![allow(dead_code, reason = "each test file uses its part")]

use paceline_comm::{Communicator, GroupOptions, in_process};
use paceline_kernels::Stream;

/// Runs `work` on each rank of a group of threads.
pub(crate) fn threads(world: usize, work: impl Fn(&mut Communicator) + Sync) {
    threads_with(world, &GroupOptions::default(), work);
}

/// As [`threads`], with settings.
pub(crate) fn threads_with(
    world: usize,
    options: &GroupOptions,
    work: impl Fn(&mut Communicator) + Sync,
) {
    let work = &work;
    std::thread::scope(|scope| {
        for group in in_process(world, options).unwrap() {
            scope.spawn(move || work(&mut Communicator::connect(group, None).unwrap()));
        }
    });
}

/// A stream of one thread.
pub(crate) fn stream() -> Stream {
    Stream::host(1).unwrap()
}

/// A small generator of pseudo-random numbers, the same on every machine.
pub(crate) struct Lcg(u64);

impl Lcg {
    pub(crate) fn seeded(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (self.0 >> 33) as usize % bound
    }
}
