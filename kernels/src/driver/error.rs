//! What can go wrong between this process and the CUDA driver.

use std::time::Duration;

/// Errors of the CUDA driver and of devices.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// The driver's library is not there.
    #[error(
        "no NVIDIA driver was found (libcuda.so.1): install the driver, in a container pass the \
         GPUs through, or run on the CPU"
    )]
    NoDriver,
    /// The driver lacks a function that is needed, or says that it is too old.
    #[error(
        "the NVIDIA driver is too old ({found}): install version 550 or newer (CUDA 12.4), or run \
         on the CPU"
    )]
    DriverTooOld {
        /// What gave it away: its CUDA version, or the first function that it lacks.
        found: String,
    },
    /// The driver runs, but shows no device.
    #[error(
        "the NVIDIA driver shows no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES, or run on \
         the CPU"
    )]
    NoDevice,
    /// There are fewer devices than were asked for.
    #[error("there is no GPU {ordinal}, only {count} (numbered from 0): choose another")]
    NoSuchDevice {
        /// The device that was asked for.
        ordinal: u32,
        /// The devices that there are.
        count: u32,
    },
    /// The device has too little free memory.
    #[error(
        "GPU {device} cannot allocate {bytes} bytes ({call}): end other programs on it, or shorten \
         the context"
    )]
    OutOfMemory {
        /// The device.
        device: u32,
        /// Bytes that were asked for.
        bytes: usize,
        /// The driver's function.
        call: &'static str,
    },
    /// The system does not pin so much host memory.
    #[error(
        "cannot pin {bytes} bytes of host memory ({call}): free some, or raise the limit of locked \
         memory (ulimit -l)"
    )]
    OutOfHostMemory {
        /// Bytes that were asked for.
        bytes: usize,
        /// The driver's function.
        call: &'static str,
    },
    /// The device or the driver lacks an ability.
    #[error("GPU {device} does not support {what}: {next}")]
    Unsupported {
        /// The device.
        device: u32,
        /// The ability.
        what: &'static str,
        /// What to do instead.
        next: &'static str,
    },
    /// A program for the device is empty, cut off or of another kind.
    #[error("these bytes are no program for GPU {device}: {reason}")]
    BadImage {
        /// The device.
        device: u32,
        /// What is wrong, and what to do.
        reason: &'static str,
    },
    /// A module has no function of this name.
    #[error("the module on GPU {device} has no kernel {name:?}: build its kernels again")]
    NoFunction {
        /// The device.
        device: u32,
        /// The kernel's name.
        name: String,
    },
    /// The work before did not end in time.
    #[error(
        "GPU {device} has not finished after {} ms: it hangs or waits for another GPU; end this \
         process if that goes on", .limit.as_millis()
    )]
    Timeout {
        /// The device.
        device: u32,
        /// How long was waited.
        limit: Duration,
    },
    /// Any other failed call.
    #[error("{call} failed with {name} ({code}){}: {}", on(*.device), next(*.code))]
    Call {
        /// The driver's function.
        call: &'static str,
        /// The status, a `CUresult`.
        code: u32,
        /// The status's name.
        name: String,
        /// The device, if one is known.
        device: Option<u32>,
    },
}

impl DriverError {
    pub(super) fn call(call: &'static str, code: u32, name: String, device: Option<u32>) -> Self {
        Self::Call { call, code, name, device }
    }

    /// The same error, or [`DriverError::OutOfMemory`] if that is what the status says.
    pub(super) fn allocating(self, bytes: usize) -> Self {
        match self {
            Self::Call { call, code: super::sys::OUT_OF_MEMORY, device: Some(device), .. } => {
                Self::OutOfMemory { device, bytes, call }
            }
            other => other,
        }
    }

    /// As [`DriverError::allocating`], for host memory.
    pub(super) fn pinning(self, bytes: usize) -> Self {
        match self {
            Self::Call { call, code: super::sys::OUT_OF_MEMORY, .. } => {
                Self::OutOfHostMemory { bytes, call }
            }
            other => other,
        }
    }
}

fn on(device: Option<u32>) -> String {
    device.map_or_else(String::new, |device| format!(" on GPU {device}"))
}

/// What to do about a status; numbers and causes are those of cuda.h.
fn next(code: u32) -> &'static str {
    match code {
        1 | 400 => "a size, address, stream or descriptor does not fit this device",
        2 => "end other programs on the GPU",
        34 => "a stub library was found before the driver: take it out of LD_LIBRARY_PATH",
        46 => "the GPU is held by another process: look at nvidia-smi",
        200 | 209 | 222 => {
            "the kernels were built for another GPU or a newer driver: build them for this one, or \
             update the driver"
        }
        201 | 709 => "the context is gone: start this process again",
        208 | 217 => "these GPUs cannot reach each other's memory: use the host-staged path",
        214 | 310 => "the GPU reports a hardware error: look at nvidia-smi and the system's log",
        304 => "the operating system refused: look at limits for locked memory and open files",
        700 | 714..=719 => "a kernel failed and the context is lost: start this process again",
        701 => "the launch asks for too many registers, threads or bytes of shared memory",
        720 => "the grid does not fit on the GPU at once: launch fewer blocks",
        802 => "the fabric manager is not ready: look at nvidia-fabricmanager",
        803 | 804 => "driver and kernel module differ: restart the machine after the update",
        900..=908 => "this cannot be done while a graph is captured",
        _ => "look at nvidia-smi and the system's log",
    }
}

/// Result with a driver's error.
pub type Result<T> = std::result::Result<T, DriverError>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_call_names_function_status_device_and_next_step() {
        let error = DriverError::call("cuMemCreate", 2, "CUDA_ERROR_OUT_OF_MEMORY".into(), Some(1));
        let text = error.to_string();
        for part in ["cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY (2)", "GPU 1", "end other programs"] {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(
            error.allocating(64),
            DriverError::OutOfMemory { device: 1, bytes: 64, call: "cuMemCreate" }
        );
    }
}
