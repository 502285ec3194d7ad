#![doc = include_str!("../README.md")]

pub mod backend;
mod collective;
mod communicator;
mod descriptor;
mod error;
mod failure;
mod group;
mod init;
mod limits;
mod liveness;
pub mod policy;
mod protocol;
mod rank;
mod region;
mod rendezvous;
mod settings;
mod topology;
mod wait;

pub use backend::{Backend, COMPILED, KNOWN};
pub use collective::{Abort, AddRmsNorm, Call, Collective, Connection, FusedAllReduce, ReduceOp};
pub use communicator::{Communicator, Declined, Usage};
pub use error::{CallFacts, CommError, LossCause, Result};
pub use group::{Group, GroupOptions, InboxOptions, in_process};
pub use init::{InitMethod, InitOptions, init_distributed};
pub use limits::{Limits, Unavailable};
pub use rank::Rank;
pub use topology::{Placement, Topology};
