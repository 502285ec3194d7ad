//! Marks in a stream, with the time at which the device passed them.

use std::time::Duration;

use super::{
    Device, DeviceStream, Result,
    stream::poll_within,
    sys::{self, CUevent, call},
};

/// A mark that a stream passes.
#[derive(Debug)]
pub struct Event {
    handle: CUevent,
    device: Device,
}

// SAFETY: the driver lets any thread use an event, and locks it itself.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// A new event, not yet recorded.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn new(device: &Device) -> Result<Self> {
        device.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle, which is destroyed once, in `drop`. Flags 0: with timing.
        unsafe { call!(device, cuEventCreate(&raw mut handle, 0)) }?;
        Ok(Self { handle, device: device.clone() })
    }

    pub(super) fn handle(&self) -> CUevent {
        self.handle
    }

    /// Marks the end of what `stream` holds so far; an earlier mark is forgotten.
    ///
    /// # Errors
    /// If the stream is of another device.
    pub fn record(&self, stream: &DeviceStream) -> Result<()> {
        self.device.bind()?;
        // SAFETY: both handles are alive.
        unsafe { call!(&self.device, cuEventRecord(self.handle, stream.handle())) }
    }

    /// Whether the device has passed the mark (or there is none).
    ///
    /// # Errors
    /// If work before it failed.
    pub fn is_complete(&self) -> Result<bool> {
        self.device.bind()?;
        // SAFETY: the handle is alive.
        match unsafe { (self.device.functions().cuEventQuery)(self.handle) } {
            sys::NOT_READY => Ok(false),
            status => {
                let device = &self.device;
                device.functions().check("cuEventQuery", status, Some(device.ordinal()))?;
                Ok(true)
            }
        }
    }

    /// Waits until the device has passed the mark, at most `limit`.
    ///
    /// # Errors
    /// [`DriverError::Timeout`](super::DriverError::Timeout), or if work before the mark failed.
    pub fn synchronize_within(&self, limit: Duration) -> Result<()> {
        poll_within(&self.device, limit, || self.is_complete())
    }

    /// Seconds between two passed marks of one device, to about half a microsecond.
    ///
    /// # Errors
    /// If one of them was not recorded or not yet passed.
    pub fn seconds_since(&self, earlier: &Self) -> Result<f64> {
        self.device.bind()?;
        let mut milliseconds = 0f32;
        // SAFETY: writes one number; both handles are alive.
        unsafe {
            call!(
                &self.device,
                cuEventElapsedTime(&raw mut milliseconds, earlier.handle, self.handle)
            )
        }?;
        Ok(f64::from(milliseconds) * 1e-3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: made once; the driver frees it when no stream needs it.
        unsafe { (self.device.functions().cuEventDestroy_v2)(self.handle) };
    }
}
