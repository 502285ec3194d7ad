//! Back end `p2p`: each GPU writes what it has into the memory of the others, and waits for what
//! they write into its own. No library is needed, and no rank ever calls the host to communicate.
//!
//! Ranks are threads of one process; several may share a GPU. Where GPUs do not reach each other's
//! memory they meet in pinned host memory. The protocol is in `docs/all-reduce.md`, its kernels in
//! the crate `paceline-kernels`. Invariant: what a rank writes into stays allocated until all ranks
//! have dropped their connections, and each of these has first waited for its own GPU.
//!
//! Start with [`connect`]; the hot path is in [`connection`], what it decides in [`plan`].

use paceline_kernels::{
    driver,
    ops::all_reduce::{Kernels, RANKS_MAX},
};

use crate::{
    Backend, Connection, Group, Limits, Placement, Result, Topology, Unavailable,
    backend::p2p::connection::LIMITS,
};

mod connect;
mod connection;
#[cfg(test)]
mod gpu;
mod inbox;
mod plan;

/// Its name.
const NAME: &str = "p2p";

/// The back end itself.
pub(super) struct P2p;

impl Backend for P2p {
    fn name(&self) -> &'static str {
        NAME
    }

    fn probe(&self, topology: &Topology) -> Result<Limits, Unavailable> {
        if !topology.on_devices {
            let why = "the tensors of these ranks lie in host memory".to_owned();
            return Err(not_possible(why, "give each rank a GPU, or choose `host`"));
        }
        if topology.placement != Placement::Threads {
            let why = format!("it connects threads of one process, not {topology}");
            return Err(not_possible(why, "start the ranks as threads of one process"));
        }
        if topology.world_size > RANKS_MAX {
            let why = format!("it takes at most {RANKS_MAX} ranks, not {}", topology.world_size);
            return Err(not_possible(why, "start fewer ranks"));
        }
        let not_found = |what: &str, reason: String| Unavailable::NotFound {
            name: NAME,
            what: what.to_owned(),
            next_step: reason,
        };
        driver::available().map_err(|reason| not_found("a GPU", reason.to_string()))?;
        Kernels::available().map_err(|reason| not_found("its kernels", reason.to_string()))?;
        Ok(LIMITS.clone())
    }

    fn connect(&self, group: &mut Group) -> Result<Box<dyn Connection>> {
        Ok(Box::new(connect::connect(group)?))
    }
}

fn not_possible(why: String, next_step: &str) -> Unavailable {
    Unavailable::NotPossible { name: NAME, why, next_step: next_step.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_rules_it_out_is_said_with_the_next_step() {
        let topology =
            |world_size, placement, on_devices| Topology { world_size, placement, on_devices };
        for (topology, expected) in [
            (topology(2, Placement::Threads, false), "host memory"),
            (topology(2, Placement::Processes, true), "threads of one process"),
            (topology(RANKS_MAX + 1, Placement::Threads, true), "at most 16 ranks"),
        ] {
            let reason = P2p.probe(&topology).unwrap_err();
            assert!(matches!(reason, Unavailable::NotPossible { .. }), "{reason:?}");
            assert!(reason.to_string().contains(expected), "{reason}");
        }
    }
}
