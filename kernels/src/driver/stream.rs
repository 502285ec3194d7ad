//! Queues of work on a device.

use std::{
    ffi::c_void,
    ptr::NonNull,
    time::{Duration, Instant},
};

use super::{
    Device, DevicePointer, DriverError, Event, Result,
    sys::{self, CUstream, call},
};

/// Longest wait of calls that copy to or from the host, if work before them does not end.
pub const WAIT_LIMIT: Duration = Duration::from_secs(60);
/// Polling is busy for this long, then sleeps between two looks.
const BUSY: Duration = Duration::from_micros(200);
const NAP: Duration = Duration::from_micros(50);
/// `CU_STREAM_NON_BLOCKING`: no order with the legacy default stream.
const NON_BLOCKING: u32 = 1;

/// An ordered queue of work on one device, without order among streams but by events.
#[derive(Debug)]
pub struct DeviceStream {
    handle: CUstream,
    device: Device,
}

// SAFETY: the driver lets any thread use a stream, and locks it itself.
unsafe impl Send for DeviceStream {}
// SAFETY: as above.
unsafe impl Sync for DeviceStream {}

impl DeviceStream {
    /// A new stream on `device`.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn new(device: &Device) -> Result<Self> {
        device.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle, which is destroyed once, in `drop`.
        unsafe { call!(device, cuStreamCreate(&raw mut handle, NON_BLOCKING)) }?;
        Ok(Self { handle, device: device.clone() })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The driver's handle (`CUstream`), for other libraries; valid as long as this stream.
    pub fn as_raw(&self) -> NonNull<c_void> {
        NonNull::new(self.handle.cast()).expect("cuStreamCreate returned a stream")
    }

    pub(super) fn handle(&self) -> CUstream {
        self.handle
    }

    /// Whether all work so far has ended.
    ///
    /// # Errors
    /// If some of it failed (the context is lost then), or the stream is being captured.
    pub fn is_idle(&self) -> Result<bool> {
        self.device.bind()?;
        is_idle(&self.device, self.handle)
    }

    /// Waits until all work so far has ended, at most `limit`.
    ///
    /// # Errors
    /// [`DriverError::Timeout`]; the work goes on. Otherwise as [`DeviceStream::is_idle`].
    pub fn synchronize_within(&self, limit: Duration) -> Result<()> {
        self.device.bind()?;
        wait_within(&self.device, self.handle, limit)
    }

    /// Lets what follows on this stream wait, on the device, for `event`, of any device.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.device.bind()?;
        // SAFETY: both handles are alive; the driver keeps what it needs of the event.
        unsafe { call!(&self.device, cuStreamWaitEvent(self.handle, event.handle(), 0)) }
    }

    /// Enqueues a copy of `bytes` bytes between any two ranges that the device can reach: its own
    /// memory, that of peers, pinned memory by its device pointer.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Safety
    /// Both ranges must stay allocated until the copy has ended, and as long as a graph that it
    /// was captured into is launched. Nothing else may write them meanwhile, nor read the target.
    pub unsafe fn copy(&self, to: DevicePointer, from: DevicePointer, bytes: usize) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the caller vouches for both ranges.
        unsafe { call!(&self.device, cuMemcpyAsync(to.0, from.0, bytes, self.handle)) }
    }

    /// Enqueues that `count` words of 4 bytes from `to` on become `value`.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Safety
    /// `to` is a multiple of 4; otherwise as [`DeviceStream::copy`] for the target.
    pub unsafe fn fill_u32(&self, to: DevicePointer, value: u32, count: usize) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the caller vouches for the range.
        unsafe { call!(&self.device, cuMemsetD32Async(to.0, value, count, self.handle)) }
    }
}

/// Whether the work of `stream` (null: the legacy default stream) has ended.
fn is_idle(device: &Device, stream: CUstream) -> Result<bool> {
    // SAFETY: the stream is alive and of the current context, as callers see to.
    match unsafe { (device.functions().cuStreamQuery)(stream) } {
        sys::SUCCESS => Ok(true),
        sys::NOT_READY => Ok(false),
        status => {
            device.functions().check("cuStreamQuery", status, Some(device.ordinal()))?;
            Ok(true)
        }
    }
}

/// Waits for `stream` of the current context; null means the legacy default stream.
pub(super) fn wait_within(device: &Device, stream: CUstream, limit: Duration) -> Result<()> {
    poll_within(device, limit, || is_idle(device, stream))
}

pub(super) fn poll_within(
    device: &Device,
    limit: Duration,
    mut ended: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let start = Instant::now();
    while !ended()? {
        let waited = start.elapsed();
        if waited >= limit {
            return Err(DriverError::Timeout { device: device.ordinal(), limit });
        }
        if waited < BUSY {
            std::hint::spin_loop();
        } else {
            std::thread::sleep(NAP);
        }
    }
    Ok(())
}

impl Drop for DeviceStream {
    fn drop(&mut self) {
        // A lost context leaves nothing to be done.
        let _ = self.device.bind();
        // SAFETY: made once; the driver frees it when its work has ended.
        unsafe { (self.device.functions().cuStreamDestroy_v2)(self.handle) };
    }
}
