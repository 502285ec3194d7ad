//! Devices: their facts, their primary context, and access to each other's memory.

use std::{
    ffi::{CStr, c_char, c_int},
    fmt, fs,
    sync::Arc,
};

use super::{
    DriverError, Result,
    sys::{self, CUcontext, CUdevice, CUdevice_attribute as Attribute, Functions, call},
};

/// A GPU with its primary context. Cheap to clone; the context lives as long as any clone, and all
/// memory, streams, modules and graphs made on the device hold one.
#[derive(Clone)]
pub struct Device(Arc<Context>);

struct Context {
    functions: &'static Functions,
    ordinal: u32,
    handle: CUdevice,
    context: CUcontext,
    compute_capability: (u32, u32),
    multiprocessors: u32,
}

// SAFETY: a context may be made current in any thread, in several at once; the rest are numbers.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks what it shares.
unsafe impl Sync for Context {}

impl Device {
    /// The number of devices that the driver shows.
    ///
    /// # Errors
    /// As [`available`](super::available), except that none is no error here.
    pub fn count() -> Result<u32> {
        let functions = match sys::functions() {
            Err(DriverError::NoDevice) => return Ok(0),
            functions => functions?,
        };
        let mut count: c_int = 0;
        // SAFETY: writes one number.
        let status = unsafe { (functions.cuDeviceGetCount)(&raw mut count) };
        functions.check("cuDeviceGetCount", status, None)?;
        Ok(count.unsigned_abs())
    }

    /// Opens device `ordinal` (in the driver's order, from 0) and retains its primary context.
    ///
    /// Kernels may be loaded lazily by the driver, which deadlocks as soon as another kernel spins;
    /// [`Module::function`](super::Module::function) therefore loads each for good (`cuFuncLoad`),
    /// and the variable `CUDA_MODULE_LOADING` stays the user's.
    ///
    /// # Errors
    /// Without a driver or such a device, or if the context cannot be made.
    pub fn open(ordinal: u32) -> Result<Self> {
        let functions = sys::functions()?;
        let count = Self::count()?;
        if count == 0 {
            return Err(DriverError::NoDevice);
        }
        if ordinal >= count {
            return Err(DriverError::NoSuchDevice { ordinal, count });
        }
        let check = |call, status| functions.check(call, status, Some(ordinal));
        let mut handle = 0;
        // SAFETY: writes one number.
        let status = unsafe { (functions.cuDeviceGet)(&raw mut handle, ordinal as c_int) };
        check("cuDeviceGet", status)?;
        let attribute = |attribute| -> Result<u32> {
            let mut value: c_int = 0;
            // SAFETY: writes one number; the handle is that of a device.
            let status =
                unsafe { (functions.cuDeviceGetAttribute)(&raw mut value, attribute, handle) };
            check("cuDeviceGetAttribute", status)?;
            Ok(value.unsigned_abs())
        };
        let compute_capability = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: as above; the context is released once, when the last clone goes.
        let status = unsafe { (functions.cuDevicePrimaryCtxRetain)(&raw mut context, handle) };
        check("cuDevicePrimaryCtxRetain", status)?;
        let context =
            Context { functions, ordinal, handle, context, compute_capability, multiprocessors };
        Ok(Self(Arc::new(context)))
    }

    /// The device's number, from 0.
    pub fn ordinal(&self) -> u32 {
        self.0.ordinal
    }

    /// Compute capability, as (9, 0) for Hopper.
    pub fn compute_capability(&self) -> (u32, u32) {
        self.0.compute_capability
    }

    /// Number of multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        self.0.multiprocessors
    }

    /// Bytes of shared memory that one block may have, if its kernel asks for them.
    ///
    /// # Errors
    /// If the driver does not answer.
    pub fn shared_bytes_max(&self) -> Result<u32> {
        self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
    }

    /// The product's name.
    ///
    /// # Errors
    /// If the driver does not answer.
    pub fn name(&self) -> Result<String> {
        self.text(|text, length| {
            // SAFETY: the driver writes at most `length` bytes, the final zero included.
            unsafe { call!(self, cuDeviceGetName(text, length, self.0.handle)) }
        })
    }

    /// The address on the PCI bus as in sysfs: `0000:17:00.0`.
    ///
    /// # Errors
    /// If the driver does not answer.
    pub fn pci_address(&self) -> Result<String> {
        let address = self.text(|text, length| {
            // SAFETY: as for the name.
            unsafe { call!(self, cuDeviceGetPCIBusId(text, length, self.0.handle)) }
        })?;
        Ok(address.to_ascii_lowercase())
    }

    /// The 16 bytes that name this device on every machine.
    ///
    /// # Errors
    /// If the driver does not answer.
    pub fn uuid(&self) -> Result<[u8; 16]> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: writes 16 bytes.
        unsafe { call!(self, cuDeviceGetUuid_v2(&raw mut uuid, self.0.handle)) }?;
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    /// The NUMA node that the device is attached to; none if the system does not say.
    pub fn numa_node(&self) -> Option<u32> {
        let address = self.pci_address().ok()?;
        let node = fs::read_to_string(format!("/sys/bus/pci/devices/{address}/numa_node")).ok()?;
        // The kernel writes -1 where it knows no node.
        node.trim().parse().ok()
    }

    /// Free and total bytes of memory.
    ///
    /// # Errors
    /// If the driver does not answer.
    pub fn memory(&self) -> Result<(usize, usize)> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers.
        unsafe { call!(self, cuMemGetInfo_v2(&raw mut free, &raw mut total)) }?;
        Ok((free, total))
    }

    /// Whether kernels on this device could use memory of `peer` (itself included).
    ///
    /// # Errors
    /// If the driver does not answer.
    pub fn can_access_peer(&self, peer: &Self) -> Result<bool> {
        if self == peer {
            return Ok(true);
        }
        let mut can: c_int = 0;
        // SAFETY: writes one number; both handles are those of devices.
        unsafe { call!(self, cuDeviceCanAccessPeer(&raw mut can, self.0.handle, peer.0.handle)) }?;
        Ok(can != 0)
    }

    /// Lets kernels on this device use memory that is allocated on `peer`; once is enough. (Memory
    /// of [`vmm`](super::vmm) has its own list of devices.)
    ///
    /// # Errors
    /// If the devices cannot reach each other.
    pub fn enable_peer_access(&self, peer: &Self) -> Result<()> {
        if self == peer {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: the peer's context is alive as long as `peer`; the flags must be 0.
        let status = unsafe { (self.functions().cuCtxEnablePeerAccess)(peer.0.context, 0) };
        match status {
            sys::PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            status => self.functions().check("cuCtxEnablePeerAccess", status, Some(self.ordinal())),
        }
    }

    /// Makes the device's context current for this thread. Every method that needs it does so.
    ///
    /// # Errors
    /// If the context is lost.
    pub fn bind(&self) -> Result<()> {
        // SAFETY: the context is alive.
        unsafe { call!(self, cuCtxSetCurrent(self.0.context)) }
    }

    pub(super) fn attribute(&self, attribute: Attribute) -> Result<u32> {
        let mut value: c_int = 0;
        // SAFETY: writes one number.
        unsafe { call!(self, cuDeviceGetAttribute(&raw mut value, attribute, self.0.handle)) }?;
        Ok(value.unsigned_abs())
    }

    pub(super) fn functions(&self) -> &'static Functions {
        self.0.functions
    }

    fn text(&self, write: impl FnOnce(*mut c_char, c_int) -> Result<()>) -> Result<String> {
        let mut text: [c_char; 256] = [0; 256];
        write(text.as_mut_ptr(), 255)?;
        // SAFETY: at least the last byte is zero, since only 255 were offered.
        Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.ordinal() == other.ordinal()
    }
}

impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Device({})", self.ordinal())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once when this was made. A failure leaves nothing to be done.
        unsafe { (self.functions.cuDevicePrimaryCtxRelease_v2)(self.handle) };
    }
}
