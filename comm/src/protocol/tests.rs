//! The flag protocol, explored: every interleaving of a few ranks over a few steps.
//!
//! The model has the same actions as [`super::Channel`], one at a time, on a memory that is
//! sequentially consistent; that flags are stored with release and loaded with acquire is what
//! makes the real memory look so to the slots.

use std::collections::HashSet;

/// Steps that every rank makes.
const STEPS: u8 = 5;

/// Where a rank is in its step.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum At {
    /// Waits for this rank to have published the step before.
    Prepare(u8),
    /// Is writing its slot: others must not read it until it is published.
    Write,
    Publish,
    /// Waits for this rank's slot.
    Await(u8),
    /// Is reading this rank's slot: its owner must not write it.
    Read(u8),
    Finished,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct State {
    at: Vec<At>,
    /// Published steps.
    flags: Vec<u8>,
    /// The step whose data is in each slot.
    slots: Vec<Vec<u8>>,
}

/// A protocol to explore.
#[derive(Clone, Copy)]
struct Model {
    world: u8,
    /// Slots a rank.
    slots: u8,
    /// Whether *prepare* waits at all.
    prepares: bool,
    /// In such steps only rank 0's slot is read, and rank 0 reads nothing (a broadcast).
    is_rooted: fn(u8) -> bool,
}

impl Model {
    fn needs(self, rank: u8, step: u8) -> Vec<u8> {
        match (self.is_rooted)(step) {
            true if rank == 0 => Vec::new(),
            true => vec![0],
            false => (0..self.world).filter(|&peer| peer != rank).collect(),
        }
    }

    fn after_read(self, rank: u8, step: u8, read: Option<u8>) -> At {
        let next = self.needs(rank, step).into_iter().find(|&peer| read.is_none_or(|r| peer > r));
        match next {
            Some(peer) => At::Await(peer),
            None if step == STEPS => At::Finished,
            None => At::Prepare(0),
        }
    }

    /// The state after `rank` makes its next move; none if it has to wait.
    fn advance(self, state: &State, rank: u8) -> Result<Option<State>, String> {
        let own = usize::from(rank);
        let mut next = state.clone();
        let published = state.flags[own];
        let slot = |step: u8| usize::from(step % self.slots);
        next.at[own] = match state.at[own] {
            At::Finished => return Ok(None),
            At::Prepare(peer) if peer == self.world => At::Write,
            At::Prepare(peer) if self.prepares && state.flags[usize::from(peer)] < published => {
                return Ok(None);
            }
            At::Prepare(peer) => At::Prepare(peer + 1),
            At::Write => {
                let step = published + 1;
                for (other, at) in state.at.iter().enumerate() {
                    let is_reading = *at == At::Read(rank);
                    if is_reading && slot(state.flags[other]) == slot(step) {
                        return Err(format!(
                            "rank {rank} overwrites what {other} reads: {state:?}"
                        ));
                    }
                }
                next.slots[own][slot(step)] = step;
                At::Publish
            }
            At::Publish => {
                next.flags[own] = published + 1;
                self.after_read(rank, published + 1, None)
            }
            At::Await(peer) if state.flags[usize::from(peer)] < published => return Ok(None),
            At::Await(peer) => At::Read(peer),
            At::Read(peer) => {
                let found = state.slots[usize::from(peer)][slot(published)];
                if found != published {
                    return Err(format!("rank {rank} reads step {found} of {peer}: {state:?}"));
                }
                self.after_read(rank, published, Some(peer))
            }
        };
        Ok(Some(next))
    }

    /// Visits every state that can be reached; returns how many, or what went wrong.
    fn explore(self) -> Result<usize, String> {
        let world = usize::from(self.world);
        let start = State {
            at: vec![At::Prepare(0); world],
            flags: vec![0; world],
            slots: vec![vec![0; usize::from(self.slots)]; world],
        };
        let mut seen = HashSet::from([start.clone()]);
        let mut open = vec![start];
        while let Some(state) = open.pop() {
            let mut is_stuck = true;
            for rank in 0..self.world {
                if let Some(next) = self.advance(&state, rank)? {
                    is_stuck = false;
                    let spread = next.flags.iter().max().zip(next.flags.iter().min());
                    if self.prepares && spread.is_some_and(|(max, min)| max - min > 1) {
                        return Err(format!("a rank is two steps ahead: {next:?}"));
                    }
                    if seen.insert(next.clone()) {
                        open.push(next);
                    }
                }
            }
            if is_stuck && state.at.iter().any(|at| *at != At::Finished) {
                return Err(format!("nobody can go on: {state:?}"));
            }
        }
        Ok(seen.len())
    }
}

const ALL_TO_ALL: fn(u8) -> bool = |_| false;
const BROADCASTS: fn(u8) -> bool = |_| true;
const MIXED: fn(u8) -> bool = |step| step % 3 != 0;

#[test]
fn no_interleaving_overwrites_a_slot_that_is_read() {
    for is_rooted in [ALL_TO_ALL, BROADCASTS, MIXED] {
        for world in [2, 3] {
            let model = Model { world, slots: 2, prepares: true, is_rooted };
            let states = model.explore().unwrap();
            assert!(states > 100, "{states} states are too few to have explored anything");
        }
    }
}

#[test]
fn the_exploration_finds_faults() {
    let model = Model { world: 2, slots: 2, prepares: true, is_rooted: ALL_TO_ALL };
    let one_slot = Model { slots: 1, ..model };
    assert!(one_slot.explore().is_err());
    let unprepared = Model { prepares: false, is_rooted: BROADCASTS, ..model };
    assert!(unprepared.explore().is_err());
}
