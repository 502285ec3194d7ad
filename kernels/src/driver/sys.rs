//! The functions of libcuda that this crate calls, each looked up once.
//!
//! Signatures are checked against cudarc's bindings when this is compiled; calls go through a table
//! of our own for two reasons. A function that the driver lacks must be an error, where cudarc
//! panics; and a status must be a number, since a newer driver may return one that cudarc's `enum`
//! does not list. Invariant: whoever holds a [`Functions`] may call libcuda, `cuInit` done.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void},
    sync::OnceLock,
};

use cudarc::driver::sys;
pub(super) use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction,
    CUfunction_attribute, CUgraph, CUgraphExec, CUlaunchAttribute, CUlaunchAttributeID,
    CUlaunchAttributeValue, CUlaunchConfig, CUmemAccess_flags, CUmemAccessDesc,
    CUmemAllocationGranularity_flags, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationType, CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType, CUmodule,
    CUresult, CUstream, CUstreamCaptureMode, CUuuid,
};

use super::{DriverError, Result};

/// Success of a call.
pub(super) const SUCCESS: c_uint = 0;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub(super) const OUT_OF_MEMORY: c_uint = 2;
/// `CUDA_ERROR_NO_DEVICE`.
pub(super) const NO_DEVICE: c_uint = 100;
/// `CUDA_ERROR_NOT_FOUND`.
pub(super) const NOT_FOUND: c_uint = 500;
/// `CUDA_ERROR_NOT_READY`: not an error, the answer of a query.
pub(super) const NOT_READY: c_uint = 600;
/// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`.
pub(super) const PEER_ACCESS_ALREADY_ENABLED: c_uint = 704;

/// The oldest driver that has every function below (`cuFuncLoad` came last): CUDA 12.4, R550.
pub(super) const VERSION_MIN: c_int = 12_040;

macro_rules! functions {
    ($($name:ident($($type:ty),*);)* ; unchecked $($own:ident($($own_type:ty),*);)*) => {
        /// Function pointers into libcuda, named as there.
        #[allow(non_snake_case, reason = "the driver's own names")]
        #[derive(Debug)]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($type),*) -> c_uint,)*
            $(pub(super) $own: unsafe extern "C" fn($($own_type),*) -> c_uint,)*
        }

        // The bindings confirm each signature; `CUresult` is a C `enum`, an `unsigned int`.
        $(const _: unsafe fn($($type),*) -> CUresult = sys::$name;)*

        impl Functions {
            fn look_up() -> std::result::Result<Self, &'static str> {
                // SAFETY: the library was just found, so that this loads it instead of panicking;
                // its initialisers are the driver's own.
                let library = unsafe { sys::culib() };
                Ok(Self {
                    $($name: {
                        let symbol = concat!(stringify!($name), "\0").as_bytes();
                        // SAFETY: the signature is the one that the bindings confirm; the library
                        // is never unloaded, so the pointer stays valid.
                        let found = unsafe { library.get(symbol) };
                        *found.map_err(|_| stringify!($name))?
                    },)*
                    $($own: {
                        let symbol = concat!(stringify!($own), "\0").as_bytes();
                        // SAFETY: as above; the signature is that of cuda.h.
                        let found = unsafe { library.get(symbol) };
                        *found.map_err(|_| stringify!($own))?
                    },)*
                })
            }
        }
    };
}

functions! {
    cuInit(c_uint);
    cuDriverGetVersion(*mut c_int);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut CUdevice, c_int);
    cuDeviceGetName(*mut c_char, c_int, CUdevice);
    cuDeviceGetUuid_v2(*mut CUuuid, CUdevice);
    cuDeviceGetPCIBusId(*mut c_char, c_int, CUdevice);
    cuDeviceGetAttribute(*mut c_int, CUdevice_attribute, CUdevice);
    cuDeviceCanAccessPeer(*mut c_int, CUdevice, CUdevice);
    cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
    cuDevicePrimaryCtxRelease_v2(CUdevice);
    cuCtxSetCurrent(CUcontext);
    cuCtxEnablePeerAccess(CUcontext, c_uint);
    cuMemGetInfo_v2(*mut usize, *mut usize);
    cuMemAlloc_v2(*mut CUdeviceptr, usize);
    cuMemFree_v2(CUdeviceptr);
    cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    cuMemFreeHost(*mut c_void);
    cuMemHostGetDevicePointer_v2(*mut CUdeviceptr, *mut c_void, c_uint);
    cuMemcpyAsync(CUdeviceptr, CUdeviceptr, usize, CUstream);
    cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
    cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
    cuMemsetD8Async(CUdeviceptr, u8, usize, CUstream);
    cuMemsetD32Async(CUdeviceptr, c_uint, usize, CUstream);
    cuMemGetAllocationGranularity(
        *mut usize, *const CUmemAllocationProp, CUmemAllocationGranularity_flags
    );
    cuMemCreate(
        *mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, c_ulonglong
    );
    cuMemRelease(CUmemGenericAllocationHandle);
    cuMemAddressReserve(*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
    cuMemAddressFree(CUdeviceptr, usize);
    cuMemMap(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong);
    cuMemUnmap(CUdeviceptr, usize);
    cuMemSetAccess(CUdeviceptr, usize, *const CUmemAccessDesc, usize);
    cuMemExportToShareableHandle(
        *mut c_void, CUmemGenericAllocationHandle, CUmemAllocationHandleType, c_ulonglong
    );
    cuMemImportFromShareableHandle(
        *mut CUmemGenericAllocationHandle, *mut c_void, CUmemAllocationHandleType
    );
    cuStreamCreate(*mut CUstream, c_uint);
    cuStreamDestroy_v2(CUstream);
    cuStreamQuery(CUstream);
    cuStreamSynchronize(CUstream);
    cuStreamWaitEvent(CUstream, CUevent, c_uint);
    cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode);
    cuStreamEndCapture(CUstream, *mut CUgraph);
    cuEventCreate(*mut CUevent, c_uint);
    cuEventDestroy_v2(CUevent);
    cuEventRecord(CUevent, CUstream);
    cuEventQuery(CUevent);
    cuGraphInstantiateWithFlags(*mut CUgraphExec, CUgraph, c_ulonglong);
    cuGraphDestroy(CUgraph);
    cuGraphUpload(CUgraphExec, CUstream);
    cuGraphLaunch(CUgraphExec, CUstream);
    cuGraphExecDestroy(CUgraphExec);
    cuModuleLoadData(*mut CUmodule, *const c_void);
    cuModuleUnload(CUmodule);
    cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
    cuFuncLoad(CUfunction);
    cuFuncSetAttribute(CUfunction, CUfunction_attribute, c_int);
    cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, CUfunction, c_int, usize);
    cuLaunchKernelEx(*const CUlaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void);
    ;
    unchecked
    // The bindings take the `enum` that this table avoids.
    cuGetErrorName(c_uint, *mut *const c_char);
    // The bindings of this level know only the second version, which came with CUDA 12.8.
    cuEventElapsedTime(*mut f32, CUevent, CUevent);
}

impl Functions {
    /// The name of a status, or `unknown` for one that the driver does not know.
    pub(super) fn status_name(&self, code: c_uint) -> String {
        let mut name = std::ptr::null();
        // SAFETY: the driver writes a pointer to a static string, or leaves null.
        let status = unsafe { (self.cuGetErrorName)(code, &raw mut name) };
        if status != SUCCESS || name.is_null() {
            return "unknown".into();
        }
        // SAFETY: a static string that ends in a zero, as just said.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    /// Turns a status into a result; `device` is named in the error.
    pub(super) fn check(
        &self,
        call: &'static str,
        code: c_uint,
        device: Option<u32>,
    ) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        Err(DriverError::call(call, code, self.status_name(code), device))
    }
}

/// The table of functions, after `cuInit`; the outcome of the first call holds for the process.
///
/// # Errors
/// Without a driver, with one that is too old, or if it cannot start.
pub(super) fn functions() -> Result<&'static Functions> {
    static FUNCTIONS: OnceLock<Result<Functions>> = OnceLock::new();
    FUNCTIONS.get_or_init(initialise).as_ref().map_err(Clone::clone)
}

fn initialise() -> Result<Functions> {
    // SAFETY: only tries to open libraries of the driver's names.
    if !unsafe { sys::is_culib_present() } {
        return Err(DriverError::NoDriver);
    }
    let functions = Functions::look_up()
        .map_err(|symbol| DriverError::DriverTooOld { found: format!("no {symbol}") })?;
    let mut version = 0;
    // SAFETY: writes one number, and may be called before `cuInit`.
    let status = unsafe { (functions.cuDriverGetVersion)(&raw mut version) };
    functions.check("cuDriverGetVersion", status, None)?;
    if version < VERSION_MIN {
        let (major, minor) = (version / 1000, version % 1000 / 10);
        return Err(DriverError::DriverTooOld { found: format!("CUDA {major}.{minor}") });
    }
    // SAFETY: the flags must be 0.
    match unsafe { (functions.cuInit)(0) } {
        NO_DEVICE => return Err(DriverError::NoDevice),
        status => functions.check("cuInit", status, None)?,
    }
    Ok(functions)
}

/// Calls a function of the driver for a [`Device`](super::Device), and checks the status.
macro_rules! call {
    ($device:expr, $name:ident($($argument:expr),* $(,)?)) => {{
        let device: &$crate::driver::Device = $device;
        let status = (device.functions().$name)($($argument),*);
        device.functions().check(stringify!($name), status, Some(device.ordinal()))
    }};
}
pub(super) use call;
