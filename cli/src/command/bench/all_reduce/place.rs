//! The seam between the measurement and what it measures on: where a rank's tensors lie, and which
//! clock times its calls. See [`super::host`] and [`super::device`].

use anyhow::Result;
use paceline_comm::Communicator;

use super::plan::Case;

/// One rank's tensors and clock, in the rank's own thread.
///
/// For each case the ranks call [`Place::prepare`], then [`Place::time_producers`] and
/// [`Place::time_calls`] in turn, then [`Place::wrong`]; they meet between any two of these, and
/// no rank then has work under way. So what waits for a whole device is done only in `prepare`.
pub(super) trait Place {
    /// The GPU that this rank computes on, if any.
    fn gpu(&self) -> Option<u32>;

    /// Makes the tensors of a case, and what else its calls need.
    fn prepare(&mut self, case: &Case, communicator: &mut Communicator) -> Result<()>;

    /// Seconds that making all inputs of the dependent form takes, without the calls.
    fn time_producers(&mut self) -> Result<f64>;

    /// Gives the tensors their first contents. Seconds that all calls then take, in the dependent
    /// form the making of their inputs included.
    fn time_calls(&mut self, communicator: &mut Communicator) -> Result<f64>;

    /// Elements of the outputs of the last calls that are not exactly the sum.
    fn wrong(&mut self) -> Result<u64>;
}
