//! CUDA devices over the driver's API: memory, streams, graphs, kernels.
//!
//! The driver's library is loaded when the program runs, if it is there; without it everything here
//! returns a typed [`DriverError`] that says why and what to do. Invariant: whoever holds a
//! [`Device`] may call the driver, and all that lives on a device keeps it open. Set-up (everything
//! that opens, allocates or loads) may wait for the whole device, so it must be over before the
//! first kernel spins. Start reading at [`Device`], then [`DeviceStream`] and [`Function`].

mod device;
mod error;
mod event;
mod graph;
mod memory;
mod module;
mod stream;
mod sys;
#[doc(hidden)]
pub mod testing;
#[cfg(test)]
mod tests;
pub mod vmm;

pub use device::Device;
pub use error::{DriverError, Result};
pub use event::Event;
pub use graph::Graph;
pub use memory::{DeviceBytes, DeviceMemory, DevicePointer, PinnedMemory};
pub(crate) use memory::{to_device, to_host};
pub use module::{Function, Launch, Module};
pub use stream::{DeviceStream, WAIT_LIMIT};
pub use vmm::ExportableMemory;

/// Whether there is a driver, new enough, with at least one device.
///
/// # Errors
/// [`DriverError::NoDriver`], [`DriverError::DriverTooOld`], [`DriverError::NoDevice`], or the
/// driver's own error where it cannot start.
pub fn available() -> Result<()> {
    match Device::count()? {
        0 => Err(DriverError::NoDevice),
        _ => Ok(()),
    }
}
