//! Device memory that other processes and devices can map: CUDA's virtual memory management.
//!
//! Physical memory, a range of addresses and the mapping of one at the other are separate things
//! that end in this order: unmap, release, free the addresses. Invariant: physical memory lives
//! while any process maps it, so that a mapping outlives an exporter that dies.

use std::{
    ffi::c_void,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
};

use super::{
    Device, DeviceBytes, DevicePointer, DriverError, Result,
    memory::zero,
    sys::{
        CUdevice_attribute as Attribute, CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc,
        CUmemAllocationGranularity_flags as Granularity, CUmemAllocationHandleType as HandleType,
        CUmemAllocationProp, CUmemAllocationType, CUmemGenericAllocationHandle, CUmemLocation,
        CUmemLocationType, call,
    },
};

const DESCRIPTOR: HandleType = HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Memory that is mapped here and can be mapped elsewhere by way of a file descriptor.
#[derive(Debug)]
pub struct ExportableMemory {
    // Dropped in this order.
    mapping: Mapping,
    physical: Physical,
    reservation: Reservation,
}

impl ExportableMemory {
    /// Allocates at least `bytes` (and at least 1) zeroed bytes on `device`, mapped for itself and
    /// for `peers`.
    ///
    /// # Errors
    /// If the device cannot export memory, has too little of it, or cannot be reached by a peer.
    pub fn zeroed(device: &Device, bytes: usize, peers: &[&Device]) -> Result<Self> {
        assert_supported(device)?;
        device.bind()?;
        let bytes = rounded(device, bytes)?;
        let physical = Physical::new(device, bytes)?;
        let memory = Self::map(device, physical, bytes, peers)?;
        zero(device, memory.pointer(), bytes)?;
        Ok(memory)
    }

    /// Maps memory that another process (or this one) exported, for use by `device` and `peers`.
    /// `bytes` is the exporter's [`DeviceBytes::bytes`]; the descriptor may be closed afterwards.
    ///
    /// # Errors
    /// If the descriptor is not one of exported memory, `bytes` is wrong, or `device` cannot reach
    /// the memory.
    pub fn import(
        device: &Device,
        descriptor: BorrowedFd<'_>,
        bytes: usize,
        peers: &[&Device],
    ) -> Result<Self> {
        assert_supported(device)?;
        device.bind()?;
        let bytes = rounded(device, bytes)?;
        let mut handle = 0;
        let descriptor = descriptor.as_raw_fd() as usize as *mut c_void;
        // SAFETY: the driver takes the descriptor's number in place of a pointer, and keeps its own
        // duplicate; writes one handle, which is released once.
        unsafe {
            call!(device, cuMemImportFromShareableHandle(&raw mut handle, descriptor, DESCRIPTOR))
        }?;
        Self::map(device, Physical { handle, device: device.clone() }, bytes, peers)
    }

    /// A new file descriptor of the physical memory, to be sent to another process.
    ///
    /// # Errors
    /// If the process has too many descriptors.
    pub fn export(&self) -> Result<OwnedFd> {
        let device = self.device();
        device.bind()?;
        let mut descriptor: RawFd = -1;
        let target = (&raw mut descriptor).cast::<c_void>();
        // SAFETY: the handle is alive; the driver writes one descriptor. The flags must be 0.
        unsafe {
            let handle = self.physical.handle;
            call!(device, cuMemExportToShareableHandle(target, handle, DESCRIPTOR, 0))
        }?;
        // SAFETY: just made for us, and owned by nobody else.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    fn map(device: &Device, physical: Physical, bytes: usize, peers: &[&Device]) -> Result<Self> {
        let reservation = Reservation::new(device, bytes)?;
        let address = reservation.address;
        // SAFETY: range and physical memory are alive and `bytes` long; offset and flags must be 0.
        unsafe { call!(device, cuMemMap(address, bytes, 0, physical.handle, 0)) }?;
        let mapping = Mapping { address, bytes, device: device.clone() };
        let access: Vec<CUmemAccessDesc> = std::iter::once(device)
            .chain(peers.iter().copied().filter(|&peer| peer != device))
            .map(|device| CUmemAccessDesc {
                location: location(device),
                flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            })
            .collect();
        // SAFETY: the range is mapped as a whole; the list holds as many entries as are named.
        unsafe { call!(device, cuMemSetAccess(address, bytes, access.as_ptr(), access.len())) }?;
        Ok(Self { mapping, physical, reservation })
    }
}

impl DeviceBytes for ExportableMemory {
    fn device(&self) -> &Device {
        &self.reservation.device
    }
    fn pointer(&self) -> DevicePointer {
        DevicePointer(self.mapping.address)
    }
    fn bytes(&self) -> usize {
        self.mapping.bytes
    }
}

/// The unit, in bytes, in which `device` allocates memory that can be mapped elsewhere.
///
/// # Errors
/// If the driver does not answer.
pub fn granularity(device: &Device) -> Result<usize> {
    device.bind()?;
    let mut bytes = 0;
    let properties = properties(device);
    let least = Granularity::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: writes one number; the properties live until the call returns.
    unsafe {
        call!(device, cuMemGetAllocationGranularity(&raw mut bytes, &raw const properties, least))
    }?;
    Ok(bytes)
}

fn rounded(device: &Device, bytes: usize) -> Result<usize> {
    let unit = granularity(device)?;
    // Nothing so large exists; the driver then says so.
    Ok(bytes.max(1).checked_next_multiple_of(unit).unwrap_or(usize::MAX - usize::MAX % unit))
}

fn assert_supported(device: &Device) -> Result<()> {
    for attribute in [
        Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    ] {
        if device.attribute(attribute)? == 0 {
            return Err(DriverError::Unsupported {
                device: device.ordinal(),
                what: "memory that other processes can map by a file descriptor",
                next: "run the ranks as threads of one process",
            });
        }
    }
    Ok(())
}

fn location(device: &Device) -> CUmemLocation {
    CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: device.ordinal() as i32,
    }
}

fn properties(device: &Device) -> CUmemAllocationProp {
    // SAFETY: a plain C struct whose enums all have a value 0 ("invalid", "none").
    let mut properties: CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = DESCRIPTOR;
    properties.location = location(device);
    properties
}

/// Physical memory, released when dropped.
#[derive(Debug)]
struct Physical {
    handle: CUmemGenericAllocationHandle,
    device: Device,
}

impl Physical {
    fn new(device: &Device, bytes: usize) -> Result<Self> {
        let mut handle = 0;
        let properties = properties(device);
        // SAFETY: writes one handle; the properties live until the call returns; flags must be 0.
        unsafe { call!(device, cuMemCreate(&raw mut handle, bytes, &raw const properties, 0)) }
            .map_err(|error| error.allocating(bytes))?;
        Ok(Self { handle, device: device.clone() })
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: held once. The memory goes when nothing maps it any more.
        unsafe { (self.device.functions().cuMemRelease)(self.handle) };
    }
}

/// A range of addresses, freed when dropped.
#[derive(Debug)]
struct Reservation {
    address: CUdeviceptr,
    bytes: usize,
    device: Device,
}

impl Reservation {
    fn new(device: &Device, bytes: usize) -> Result<Self> {
        let mut address = 0;
        // SAFETY: writes one address. 0: any alignment, no wish for an address; flags must be 0.
        unsafe { call!(device, cuMemAddressReserve(&raw mut address, bytes, 0, 0, 0)) }
            .map_err(|error| error.allocating(bytes))?;
        Ok(Self { address, bytes, device: device.clone() })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: reserved once, and no longer mapped.
        unsafe { (self.device.functions().cuMemAddressFree)(self.address, self.bytes) };
    }
}

/// What is mapped at a range of addresses, unmapped when dropped.
#[derive(Debug)]
struct Mapping {
    address: CUdeviceptr,
    bytes: usize,
    device: Device,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Unlike cuMemFree, cuMemUnmap does not wait for work that uses the range, and the other
        // end may be a peer: owners of exported memory agree on its end before they drop it.
        let _ = self.device.bind();
        // SAFETY: mapped once, as a whole.
        unsafe { (self.device.functions().cuMemUnmap)(self.address, self.bytes) };
    }
}
