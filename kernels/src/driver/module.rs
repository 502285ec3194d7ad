//! Programs for a device: modules, their kernels, launches.

use std::{
    ffi::{CString, c_int, c_void},
    mem::MaybeUninit,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use super::{
    Device, DeviceStream, DriverError, Result,
    sys::{
        self, CUfunction, CUfunction_attribute as FunctionAttribute, CUlaunchAttribute,
        CUlaunchAttributeID as AttributeId, CUlaunchAttributeValue, CUlaunchConfig, CUmodule, call,
    },
};

/// Shared memory that a kernel may have without asking (CUDA programming guide, 4.2.6).
const SHARED_BYTES_DEFAULT: u32 = 48 * 1024;
/// First bytes of a fatbin: magic, version, bytes of this header, then bytes of what follows.
const FATBIN_MAGIC: u32 = 0xBA55_ED50;
const FATBIN_HEADER: usize = 16;

/// A program that is loaded on a device. Cheap to clone; unloaded with its last function.
#[derive(Clone, Debug)]
pub struct Module(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    handle: CUmodule,
    device: Device,
}

// SAFETY: the driver lets any thread use a module, and locks it itself.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl Module {
    /// Loads a fatbin, or the text of a PTX program that ends in a zero.
    ///
    /// # Errors
    /// [`DriverError::BadImage`] if it is neither, or cut off; otherwise the driver's error, for
    /// instance because the program was built for other devices.
    pub fn load(device: &Device, image: &[u8]) -> Result<Self> {
        check_image(image)
            .map_err(|reason| DriverError::BadImage { device: device.ordinal(), reason })?;
        device.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the image's end is where its header or its zero says, inside the slice, as was
        // just checked; the driver keeps no pointer to it.
        unsafe { call!(device, cuModuleLoadData(&raw mut handle, image.as_ptr().cast())) }?;
        Ok(Self(Arc::new(Loaded { handle, device: device.clone() })))
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// The kernel `name` (unmangled: `extern "C"`), loaded for good.
    ///
    /// # Errors
    /// [`DriverError::NoFunction`], or the driver's error.
    pub fn function(&self, name: &str) -> Result<Function> {
        let device = &self.0.device;
        let missing =
            || DriverError::NoFunction { device: device.ordinal(), name: name.to_owned() };
        let text = CString::new(name).map_err(|_| missing())?;
        device.bind()?;
        let mut handle = std::ptr::null_mut();
        let module = self.0.handle;
        // SAFETY: the module is alive; the name ends in a zero; writes one handle.
        unsafe { call!(device, cuModuleGetFunction(&raw mut handle, module, text.as_ptr())) }
            .map_err(|error| match error {
                DriverError::Call { code: sys::NOT_FOUND, .. } => missing(),
                other => other,
            })?;
        // Loading at the first launch could wait for a kernel that spins, for ever.
        // SAFETY: the function belongs to a module that is alive.
        unsafe { call!(device, cuFuncLoad(handle)) }?;
        Ok(Function(Arc::new(Kernel {
            handle,
            module: self.clone(),
            shared_bytes_allowed: AtomicU32::new(SHARED_BYTES_DEFAULT),
        })))
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: loaded once, and no function of it is left.
        unsafe { (self.device.functions().cuModuleUnload)(self.handle) };
    }
}

/// Tells why `image` is no fatbin or PTX text.
fn check_image(image: &[u8]) -> std::result::Result<(), &'static str> {
    if image.is_empty() {
        return Err("this build has no kernels embedded; build it where nvcc is found");
    }
    let Some(header) = image.first_chunk::<FATBIN_HEADER>() else {
        return Err("it is too short; build the kernels again");
    };
    let (magic, rest) = header.split_first_chunk::<4>().expect("16 bytes hold 4");
    if u32::from_le_bytes(*magic) == FATBIN_MAGIC {
        let own = u16::from_le_bytes([rest[2], rest[3]]);
        let content = u64::from_le_bytes(*rest.last_chunk().expect("12 bytes hold 8"));
        let whole = content.checked_add(u64::from(own)).is_some_and(|b| b <= image.len() as u64);
        return if whole { Ok(()) } else { Err("the fatbin is cut off; build the kernels again") };
    }
    match image.split_last() {
        Some((0, text)) if !text.contains(&0) => Ok(()),
        _ => Err("it is neither a fatbin nor PTX text that ends in a zero"),
    }
}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y and z.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// Lets the kernel start before the one before it in the stream has ended (programmatic
    /// dependent launch; CUDA programming guide, 11.6). Without effect below compute capability 9.
    pub dependent: bool,
    /// All blocks run at once or the launch fails, so that they may wait for each other.
    pub cooperative: bool,
}

impl Launch {
    /// `grid` blocks of `block` threads, in one dimension, nothing else.
    pub const fn new(grid: u32, block: u32) -> Self {
        Self {
            grid: [grid, 1, 1],
            block: [block, 1, 1],
            shared_bytes: 0,
            dependent: false,
            cooperative: false,
        }
    }
}

/// A kernel. Cheap to clone; keeps its module loaded.
#[derive(Clone, Debug)]
pub struct Function(Arc<Kernel>);

#[derive(Debug)]
struct Kernel {
    handle: CUfunction,
    module: Module,
    /// Dynamic shared memory that the driver was told to allow.
    shared_bytes_allowed: AtomicU32,
}

// SAFETY: the driver lets any thread launch a function.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Function {
    /// The device.
    pub fn device(&self) -> &Device {
        self.0.module.device()
    }

    /// Enqueues the kernel on `stream`, with `params` as its one parameter, by value.
    ///
    /// # Errors
    /// If shape or shared memory exceed what the device has, or the stream is of another device.
    ///
    /// # Safety
    /// - The kernel takes exactly one parameter, laid out as `P` (`#[repr(C)]`).
    /// - Every address in it is valid for what the kernel does until the kernel has ended, and as
    ///   long as a graph that the launch was captured into is launched; nothing else uses that
    ///   memory in a conflicting way.
    /// - With [`Launch::dependent`], the kernel waits (`griddepcontrol.wait`) before it touches
    ///   what kernels before it touch.
    pub unsafe fn launch<P: Copy>(
        &self,
        stream: &DeviceStream,
        launch: Launch,
        params: &P,
    ) -> Result<()> {
        let device = self.device();
        device.bind()?;
        self.allow_shared_bytes(launch.shared_bytes)?;
        let dependent = launch.dependent && device.compute_capability() >= (9, 0);
        let mut attributes = [
            attribute(
                AttributeId::CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
                CUlaunchAttributeValue { cooperative: launch.cooperative.into() },
            ),
            attribute(
                AttributeId::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                CUlaunchAttributeValue { programmaticStreamSerializationAllowed: dependent.into() },
            ),
        ];
        let wanted = match (launch.cooperative, dependent) {
            (true, true) => &mut attributes[..],
            (true, false) => &mut attributes[..1],
            (false, true) => &mut attributes[1..],
            (false, false) => &mut [],
        };
        let config = CUlaunchConfig {
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.block[0],
            blockDimY: launch.block[1],
            blockDimZ: launch.block[2],
            sharedMemBytes: launch.shared_bytes,
            hStream: stream.handle(),
            attrs: wanted.as_mut_ptr(),
            numAttrs: wanted.len() as u32,
        };
        let mut parameters = [std::ptr::from_ref(params).cast_mut().cast::<c_void>()];
        let (parameters, extra) = (parameters.as_mut_ptr(), std::ptr::null_mut());
        // SAFETY: function and stream are alive; the driver copies configuration, attributes and
        // parameter before it returns; the caller vouches for what the kernel does.
        unsafe {
            call!(device, cuLaunchKernelEx(&raw const config, self.0.handle, parameters, extra))
        }
    }

    /// How many blocks of `block` threads with `shared_bytes` of dynamic shared memory fit on one
    /// multiprocessor at once.
    ///
    /// # Errors
    /// If a block does not fit at all.
    pub fn blocks_per_multiprocessor(&self, block: u32, shared_bytes: u32) -> Result<u32> {
        let device = self.device();
        device.bind()?;
        self.allow_shared_bytes(shared_bytes)?;
        let mut blocks: c_int = 0;
        let threads = c_int::try_from(block).unwrap_or(c_int::MAX);
        // SAFETY: writes one number; the function is alive.
        unsafe {
            call!(
                device,
                cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    &raw mut blocks,
                    self.0.handle,
                    threads,
                    shared_bytes as usize,
                )
            )
        }?;
        Ok(blocks.unsigned_abs())
    }

    /// Lets launches have up to `bytes` of dynamic shared memory; asks the driver only for more
    /// than ever before.
    fn allow_shared_bytes(&self, bytes: u32) -> Result<()> {
        if bytes <= self.0.shared_bytes_allowed.load(Ordering::Acquire) {
            return Ok(());
        }
        let most = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let value = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        // SAFETY: the function is alive.
        unsafe { call!(self.device(), cuFuncSetAttribute(self.0.handle, most, value)) }?;
        self.0.shared_bytes_allowed.fetch_max(bytes, Ordering::Release);
        Ok(())
    }
}

fn attribute(id: AttributeId, value: CUlaunchAttributeValue) -> CUlaunchAttribute {
    // The driver looks at the member that the number names; the rest of the union is padding.
    let mut whole = MaybeUninit::<CUlaunchAttribute>::zeroed();
    let target = whole.as_mut_ptr();
    // SAFETY: both members are written in place; the padding, chars, is zero.
    unsafe {
        (&raw mut (*target).id).write(id);
        (&raw mut (*target).value).write(value);
        whole.assume_init()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_that_would_be_read_beyond_their_end_are_refused() {
        let mut fatbin = vec![0x50, 0xED, 0x55, 0xBA, 1, 0, 16, 0, 8, 0, 0, 0, 0, 0, 0, 0];
        assert!(check_image(&fatbin).is_err());
        fatbin.extend([0; 8]);
        assert_eq!(check_image(&fatbin), Ok(()));
        assert_eq!(check_image(b".version 7.0 .target sm_80\0"), Ok(()));
        for bad in
            [&b""[..], b"short", b".version 7.0 .target sm_80", b"\x7FELF\0\0 a cubin's text\0"]
        {
            assert!(check_image(bad).is_err());
        }
    }
}
