//! The flag protocol of the shared region: how ranks pass slots to each other.
//!
//! Every collective is a sequence of **steps**; all ranks make the same steps in the same order.
//! Step `s` of rank `r` is:
//!
//! 1. *prepare*: wait until every other rank has published step `s - 1`;
//! 2. write the own slot of parity `s mod 2` (or nothing);
//! 3. *publish*: store the call's descriptor, then store `s` into the own flag (release);
//! 4. for each rank whose data is needed: wait until its flag has reached `s` (acquire), compare
//!    its descriptor with the own, read its slot of parity `s mod 2`.
//!
//! Publishing `s` therefore also says "I have read all that I wanted of the steps before `s`".
//!
//! **Invariant: no slot is written while anybody may read it.** Rank `r` writes a slot in step
//! `s` that others read in step `s - 2`. By 1 they have all published `s - 1`, and so have
//! finished reading step `s - 2`. The same holds for the descriptors, which are written after 1.
//! A rank that reads a peer's slot of step `s` has not published `s + 1`, so the peer cannot get
//! past *prepare* of `s + 2`, the next step that writes the slot. Hence two slots a rank suffice,
//! and no rank is ever more than one step ahead of another. After a step in which everybody
//! waited for everybody, *prepare* finds its condition met and costs one load a rank.
//!
//! Flags are compared modulo 2³², which is right because they differ by at most one.
//! A wait ends with the group's first failure: see [`crate::failure`]. Whoever waits looks for
//! failures, for ranks that left or died, and at the clock. To sleep, a rank counts itself among
//! the sleepers of the flag, looks again, and only then calls the futex; a publisher stores its
//! flag, then reads the count. Both are sequentially consistent, so one of them sees the other.
//!
//! Start with [`Channel::prepare`]; `protocol/tests.rs` explores all interleavings of a small
//! model.

use std::{
    sync::{
        Arc,
        atomic::Ordering::{Acquire, Relaxed, Release, SeqCst},
    },
    time::{Duration, Instant},
};

use crate::{
    Abort, CommError, LossCause, Rank, Result,
    descriptor::Descriptor,
    failure::{Failure, RegionAbort, Reporter},
    liveness::Lifelines,
    region::{Region, STATE_LEFT, STATE_PANICKED, STATE_PRESENT},
    wait::Patience,
};

/// One rank's end of the protocol.
pub(crate) struct Channel {
    region: Arc<Region>,
    rank: usize,
    world_size: usize,
    lifelines: Option<Lifelines>,
    timeout: Duration,
    patience: Patience,
    abort: Arc<RegionAbort>,
    /// The last step that this rank published.
    step: u32,
    /// Whether everybody is known to have published that step, with the same call.
    is_step_complete: bool,
    /// The call that is going on.
    call: Descriptor,
    calls: u32,
    /// When the call first had to wait; its deadline counts from then.
    waits_since: Option<Instant>,
    failed: Option<CommError>,
}

/// Whether a wait has a deadline.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Limit {
    /// The group's timeout.
    Deadline,
    /// Only a failure ends it: for ranks that idle until rank 0 has work.
    Liveness,
}

/// The slots of the last published step, to read.
#[derive(Clone, Copy)]
pub(crate) struct Slots<'a> {
    region: &'a Region,
    step: u32,
}

impl<'a> Slots<'a> {
    /// The first `bytes` of the slot of `rank`.
    #[inline]
    pub(crate) fn of(self, rank: usize, bytes: usize) -> &'a [u8] {
        assert!(bytes <= self.region.layout().slot_bytes);
        // SAFETY: the bytes are inside the slot. `Channel::await_rank` has returned for this
        // rank and step, so that the slot's content is visible, and by the protocol its owner
        // does not write it before this rank publishes again, which needs `&mut Channel`.
        unsafe { std::slice::from_raw_parts(self.region.slot(rank, self.step).as_ptr(), bytes) }
    }
}

impl Channel {
    pub(crate) fn open(
        region: Arc<Region>,
        rank: usize,
        lifelines: Option<Lifelines>,
        timeout: Duration,
    ) -> Self {
        let world_size = region.layout().world_size;
        let abort = Arc::new(RegionAbort::over(region.clone(), rank));
        Self {
            region,
            rank,
            world_size,
            lifelines,
            timeout,
            patience: Patience::for_world(world_size),
            abort,
            step: 0,
            is_step_complete: true,
            call: Descriptor::barrier(),
            calls: 0,
            waits_since: None,
            failed: None,
        }
    }

    /// Sets the deadline of later calls.
    pub(crate) fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn world_size(&self) -> usize {
        self.world_size
    }

    pub(crate) fn slot_bytes(&self) -> usize {
        self.region.layout().slot_bytes
    }

    pub(crate) fn abort_handle(&self) -> Arc<dyn Abort> {
        self.abort.clone()
    }

    /// Starts a call, unless the group has failed.
    pub(crate) fn begin(&mut self, call: Descriptor) -> Result<()> {
        self.waits_since = None;
        self.call = call.numbered(self.calls);
        self.calls = self.calls.wrapping_add(1);
        self.check_failure()
    }

    /// Fails if the group has failed, or a rank is known to be gone.
    pub(crate) fn check(&mut self) -> Result<()> {
        self.check_failure()?;
        let lost = (0..self.world_size).find_map(|peer| Some((peer, self.loss(peer)?)));
        match lost {
            Some((peer, cause)) => self.fail(Failure::Lost { rank: Rank(peer), cause }),
            None => Ok(()),
        }
    }

    /// Makes the next step's slot writable.
    #[inline]
    pub(crate) fn prepare(&mut self) -> Result<()> {
        if self.is_step_complete { Ok(()) } else { self.await_all() }
    }

    /// After [`Channel::prepare`]: the own slot of the next step, and all slots of the last one.
    #[inline]
    pub(crate) fn next_slot(&mut self, bytes: usize) -> (&mut [u8], Slots<'_>) {
        assert!(bytes <= self.slot_bytes());
        let start = self.region.slot(self.rank, self.step.wrapping_add(1));
        // SAFETY: the bytes are inside the own slot of the next step, which no rank reads before
        // it is published (module documentation) and which `Slots` of the last step does not
        // overlap: it has the other parity. `&mut self` keeps it unique here.
        let own = unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), bytes) };
        (own, self.slots())
    }

    /// Publishes the next step.
    #[inline]
    pub(crate) fn publish(&mut self) {
        self.step = self.step.wrapping_add(1);
        let block = self.region.block(self.rank);
        let words = &block.published.descriptors[(self.step & 1) as usize];
        words[0].store(self.call.what, Relaxed);
        words[1].store(self.call.count, Relaxed);
        // Sequentially consistent against the sleeper's count; this includes release.
        block.published.flag.store(self.step, SeqCst);
        if block.sleepers.0.load(SeqCst) != 0 {
            self.region.wake(self.rank);
        }
        self.is_step_complete = false;
    }

    /// Waits until the slot of `peer` of the last published step can be read.
    #[inline]
    pub(crate) fn await_rank(&mut self, peer: usize, limit: Limit) -> Result<()> {
        if peer == self.rank {
            return Ok(());
        }
        self.wait(peer, self.step, limit)?;
        self.verify(peer)
    }

    /// Waits for all slots of the last published step.
    #[inline]
    pub(crate) fn await_all(&mut self) -> Result<()> {
        for peer in 0..self.world_size {
            self.await_rank(peer, Limit::Deadline)?;
        }
        self.is_step_complete = true;
        Ok(())
    }

    /// The slots of the last published step: readable once awaited.
    #[inline]
    pub(crate) fn slots(&self) -> Slots<'_> {
        Slots { region: &self.region, step: self.step }
    }

    /// The call of an awaited rank.
    #[inline]
    pub(crate) fn call_of(&self, peer: usize) -> Descriptor {
        let words = &self.region.block(peer).published.descriptors[(self.step & 1) as usize];
        Descriptor { what: words[0].load(Relaxed), count: words[1].load(Relaxed) }
    }

    #[inline]
    fn verify(&mut self, peer: usize) -> Result<()> {
        let theirs = self.call_of(peer);
        let own = self.call_of(self.rank);
        if theirs.agrees(own) { Ok(()) } else { self.mismatch(peer, [own, theirs]) }
    }

    #[cold]
    fn mismatch(&mut self, peer: usize, calls: [Descriptor; 2]) -> Result<()> {
        self.fail(Failure::Mismatch { ranks: [Rank(self.rank), Rank(peer)], calls })
    }

    #[inline]
    fn wait(&mut self, peer: usize, step: u32, limit: Limit) -> Result<()> {
        if self.has_reached(peer, step) { Ok(()) } else { self.wait_long(peer, step, limit) }
    }

    #[inline]
    fn has_reached(&self, peer: usize, step: u32) -> bool {
        let flag = self.region.block(peer).published.flag.load(Acquire);
        flag.wrapping_sub(step) as i32 >= 0
    }

    #[cold]
    fn wait_long(&mut self, peer: usize, step: u32, limit: Limit) -> Result<()> {
        if self.patience.spin(|| self.has_reached(peer, step)) {
            return Ok(());
        }
        let start = *self.waits_since.get_or_insert_with(Instant::now);
        let mut nap = self.patience.first_nap();
        loop {
            self.check_failure()?;
            self.check_losses(step)?;
            if self.has_reached(peer, step) {
                return Ok(());
            }
            let mut longest = nap;
            if limit == Limit::Deadline {
                let waited = start.elapsed();
                if waited >= self.timeout {
                    let missing_mask = self.missing(step);
                    return self.fail(Failure::Timeout { waited, missing_mask });
                }
                longest = nap.min(self.timeout - waited);
            }
            self.sleep(peer, step, longest);
            nap = self.patience.longer_nap(nap);
        }
    }

    fn sleep(&self, peer: usize, step: u32, longest: Duration) {
        let block = self.region.block(peer);
        block.sleepers.0.fetch_add(1, SeqCst);
        let seen = block.published.flag.load(SeqCst);
        if seen.wrapping_sub(step) as i32 >= 0 {
            block.sleepers.0.fetch_sub(1, SeqCst);
            return;
        }
        self.region.sleep(peer, seen, longest);
        block.sleepers.0.fetch_sub(1, SeqCst);
    }

    fn missing(&self, step: u32) -> u64 {
        (0..self.world_size)
            .filter(|&peer| !self.has_reached(peer, step))
            .fold(0, |mask, peer| mask | 1 << peer)
    }

    /// Fails if a rank is gone that has not published `step`. One that has may be gone: it did
    /// all that this step needs.
    fn check_losses(&mut self, step: u32) -> Result<()> {
        for peer in 0..self.world_size {
            // The loss is looked for first: what the rank published before is then visible.
            if let Some(cause) = self.loss(peer)
                && !self.has_reached(peer, step)
            {
                return self.fail(Failure::Lost { rank: Rank(peer), cause });
            }
        }
        Ok(())
    }

    fn loss(&self, peer: usize) -> Option<LossCause> {
        if peer == self.rank {
            return None;
        }
        let state = &self.region.block(peer).state.0;
        let ended = self.lifelines.as_ref().is_some_and(|lines| lines.has_ended(peer));
        match state.load(Acquire) {
            STATE_PRESENT if ended => Some(LossCause::Died),
            STATE_PRESENT => None,
            STATE_PANICKED => Some(LossCause::Panicked),
            _ => Some(LossCause::Left),
        }
    }

    #[inline]
    pub(crate) fn check_failure(&mut self) -> Result<()> {
        if self.region.first_failure().load(Relaxed) == 0 { Ok(()) } else { self.failure() }
    }

    #[cold]
    fn failure(&mut self) -> Result<()> {
        if self.failed.is_none() {
            self.failed = self.region.failure(self.call.collective());
        }
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Reports a failure, and returns the group's first one, which may be another.
    #[cold]
    pub(crate) fn fail(&mut self, failure: Failure<'_>) -> Result<()> {
        self.region.report(self.rank, Reporter::Rank, failure);
        self.failure()
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        let state = if std::thread::panicking() { STATE_PANICKED } else { STATE_LEFT };
        self.region.block(self.rank).state.0.store(state, Release);
        self.region.wake_all();
    }
}

#[cfg(test)]
mod tests;
