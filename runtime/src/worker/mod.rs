//! What ranks do together: rank 0 decides, all ranks compute.
//!
//! [`protocol`] is what rank 0 says, `rank.rs` what every rank does with it, `leader.rs` how rank 0
//! drives the others, be they threads of this process or processes of their own.

pub(crate) mod agreement;
pub(crate) mod leader;
pub mod protocol;
pub(crate) mod rank;
