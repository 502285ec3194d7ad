//! Memory on devices, and host memory that devices reach.

use std::{
    ffi::c_void,
    ops::Range,
    ptr::NonNull,
    sync::atomic::{AtomicU8, AtomicU32, Ordering},
};

use super::{
    Device, DeviceStream, Result, WAIT_LIMIT,
    stream::wait_within,
    sys::{CUdeviceptr, call},
};

/// An address that devices understand. Only they may follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct DevicePointer(pub u64);

impl DevicePointer {
    /// No address.
    pub const NULL: Self = Self(0);

    /// The address `bytes` further on.
    #[must_use]
    pub const fn add(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// Memory of one device that a [`Tensor`](crate::Tensor) may lie in.
pub trait DeviceBytes: Send + Sync {
    /// The device that uses the memory (it may lie on a peer).
    fn device(&self) -> &Device;
    /// The first byte.
    fn pointer(&self) -> DevicePointer;
    /// How many bytes there are.
    fn bytes(&self) -> usize;
}

/// Zeroed memory on one device. Freed when dropped, which waits for the device's work: drop
/// nothing while ranks spin.
#[derive(Debug)]
pub struct DeviceMemory {
    pointer: DevicePointer,
    bytes: usize,
    device: Device,
}

impl DeviceMemory {
    /// Allocates `bytes` zeroed bytes (none: a null pointer), at a multiple of 256.
    ///
    /// # Errors
    /// [`DriverError::OutOfMemory`](super::DriverError::OutOfMemory), or a lost context.
    pub fn zeroed(device: &Device, bytes: usize) -> Result<Self> {
        let mut memory = Self { pointer: DevicePointer::NULL, bytes: 0, device: device.clone() };
        if bytes == 0 {
            return Ok(memory);
        }
        device.bind()?;
        let mut address: CUdeviceptr = 0;
        // SAFETY: writes one address, which is freed once, in `drop`.
        unsafe { call!(device, cuMemAlloc_v2(&raw mut address, bytes)) }
            .map_err(|error| error.allocating(bytes))?;
        (memory.pointer, memory.bytes) = (DevicePointer(address), bytes);
        zero(device, memory.pointer, bytes)?;
        Ok(memory)
    }

    /// The first byte.
    pub fn pointer(&self) -> DevicePointer {
        self.pointer
    }

    /// How many bytes there are.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Copies `from` to byte `offset`, after what `stream` holds, and waits for it.
    ///
    /// # Errors
    /// If the work before does not end within [`WAIT_LIMIT`], or fails.
    ///
    /// # Panics
    /// If the range does not lie inside.
    pub fn copy_from_host(
        &mut self,
        stream: &DeviceStream,
        offset: usize,
        from: &[u8],
    ) -> Result<()> {
        self.assert_holds(offset, from.len());
        // SAFETY: the range lies inside memory that is ours, and is borrowed for writing.
        unsafe { to_device(stream, self.pointer.add(offset), from) }
    }

    /// Copies what is at byte `offset` to `to`, after what `stream` holds, and waits for it.
    ///
    /// # Errors
    /// As [`DeviceMemory::copy_from_host`].
    ///
    /// # Panics
    /// If the range does not lie inside.
    pub fn copy_to_host(&self, stream: &DeviceStream, offset: usize, to: &mut [u8]) -> Result<()> {
        self.assert_holds(offset, to.len());
        // SAFETY: the range lies inside memory that is ours.
        unsafe { to_host(stream, self.pointer.add(offset), to) }
    }

    /// Enqueues on `stream` that every word of 4 bytes becomes `value`; up to 3 bytes at the end
    /// stay as they are.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn fill_u32(&mut self, stream: &DeviceStream, value: u32) -> Result<()> {
        if self.bytes < 4 {
            return Ok(());
        }
        // SAFETY: the words lie inside; freeing the memory waits for the device. Allocations begin
        // at multiples of 256.
        unsafe { stream.fill_u32(self.pointer, value, self.bytes / 4) }
    }

    fn assert_holds(&self, offset: usize, bytes: usize) {
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        assert!(inside, "{bytes} bytes at {offset} do not lie in memory of {}", self.bytes);
    }
}

impl DeviceBytes for DeviceMemory {
    fn device(&self) -> &Device {
        &self.device
    }
    fn pointer(&self) -> DevicePointer {
        self.pointer
    }
    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.pointer == DevicePointer::NULL {
            return;
        }
        // A lost context has freed the memory already.
        let _ = self.device.bind();
        // SAFETY: allocated once; the driver waits for work that uses it.
        unsafe { (self.device.functions().cuMemFree_v2)(self.pointer.0) };
    }
}

/// Zeroes memory and waits; the context must be current.
pub(super) fn zero(device: &Device, pointer: DevicePointer, bytes: usize) -> Result<()> {
    let legacy = std::ptr::null_mut();
    // SAFETY: the caller has just allocated the range.
    unsafe { call!(device, cuMemsetD8Async(pointer.0, 0, bytes, legacy)) }?;
    wait_within(device, legacy, WAIT_LIMIT)
}

/// Copies to a device, after what `stream` holds, and waits.
///
/// # Safety
/// The target must hold `from`, and nothing else may use it meanwhile.
pub(crate) unsafe fn to_device(
    stream: &DeviceStream,
    to: DevicePointer,
    from: &[u8],
) -> Result<()> {
    let device = stream.device();
    // Only work before can wait for others; once it has ended, the copy takes what the bus needs.
    stream.synchronize_within(WAIT_LIMIT)?;
    if from.is_empty() {
        return Ok(());
    }
    let source = from.as_ptr().cast::<c_void>();
    // SAFETY: the source is borrowed until the next line has waited; the caller vouches for the
    // target.
    unsafe { call!(device, cuMemcpyHtoDAsync_v2(to.0, source, from.len(), stream.handle())) }?;
    // SAFETY: the stream is alive.
    unsafe { call!(device, cuStreamSynchronize(stream.handle())) }
}

/// Copies from a device, after what `stream` holds, and waits.
///
/// # Safety
/// The source must hold `to.len()` bytes.
pub(crate) unsafe fn to_host(
    stream: &DeviceStream,
    from: DevicePointer,
    to: &mut [u8],
) -> Result<()> {
    let device = stream.device();
    // As above.
    stream.synchronize_within(WAIT_LIMIT)?;
    if to.is_empty() {
        return Ok(());
    }
    let target = to.as_mut_ptr().cast::<c_void>();
    // SAFETY: the target is borrowed until the next line has waited, without a limit, as the device
    // must not write into memory that was given back; the caller vouches for the source.
    unsafe { call!(device, cuMemcpyDtoHAsync_v2(target, from.0, to.len(), stream.handle())) }?;
    // SAFETY: the stream is alive.
    unsafe { call!(device, cuStreamSynchronize(stream.handle())) }
}

/// Zeroed host memory that stays in place and that every device reaches by its own pointer.
/// Devices may write it at any time, so the host looks through atomics. Freed when dropped.
#[derive(Debug)]
pub struct PinnedMemory {
    pointer: NonNull<u8>,
    bytes: usize,
    device_pointer: DevicePointer,
    device: Device,
}

// SAFETY: plain memory; safe access to it is atomic.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above.
unsafe impl Sync for PinnedMemory {}

/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`: pinned for, and mapped on, all devices.
const PORTABLE_MAPPED: u32 = 0x01 | 0x02;

impl PinnedMemory {
    /// Allocates `bytes` (at least 1) zeroed bytes, page-aligned.
    ///
    /// # Errors
    /// If the system does not let so much memory be locked.
    pub fn zeroed(device: &Device, bytes: usize) -> Result<Self> {
        device.bind()?;
        let mut pointer = std::ptr::null_mut();
        let size = bytes.max(1);
        // SAFETY: writes one address, which is freed once, in `drop`.
        unsafe { call!(device, cuMemHostAlloc(&raw mut pointer, size, PORTABLE_MAPPED)) }
            .map_err(|error| error.pinning(size))?;
        let pointer = NonNull::new(pointer.cast::<u8>()).expect("the call succeeded");
        // SAFETY: `size` bytes were just allocated, and nobody else knows them.
        unsafe { pointer.as_ptr().write_bytes(0, size) };
        let mut memory =
            Self { pointer, bytes, device_pointer: DevicePointer::NULL, device: device.clone() };
        let (target, host) = (&raw mut memory.device_pointer.0, pointer.as_ptr().cast());
        // SAFETY: writes one address; the flags must be 0.
        unsafe { call!(device, cuMemHostGetDevicePointer_v2(target, host, 0)) }?;
        Ok(memory)
    }

    /// The address for devices (with unified addressing the same for all of them).
    pub fn device_pointer(&self) -> DevicePointer {
        self.device_pointer
    }

    /// The address for the host. Reads and writes beside devices must be volatile or atomic.
    pub fn as_ptr(&self) -> *mut u8 {
        self.pointer.as_ptr()
    }

    /// How many bytes there are.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The whole words of 4 bytes, for flags.
    pub fn words(&self) -> &[AtomicU32] {
        // SAFETY: page-aligned, inside the allocation, which lives as long as the borrow; atomics
        // allow that others write.
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr().cast(), self.bytes / 4) }
    }

    /// Reads the bytes from `offset` on, one by one: bytes that a device writes meanwhile may be
    /// old or new.
    ///
    /// # Panics
    /// If they do not lie inside.
    pub fn read(&self, offset: usize, to: &mut [u8]) {
        let from = &self.cells()[range(offset, to.len())];
        for (to, from) in to.iter_mut().zip(from) {
            *to = from.load(Ordering::Relaxed);
        }
    }

    /// Writes the bytes from `offset` on, one by one.
    ///
    /// # Panics
    /// If they do not lie inside.
    pub fn write(&self, offset: usize, from: &[u8]) {
        for (to, from) in self.cells()[range(offset, from.len())].iter().zip(from) {
            to.store(*from, Ordering::Relaxed);
        }
    }

    fn cells(&self) -> &[AtomicU8] {
        // SAFETY: as for `words`.
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr().cast(), self.bytes) }
    }
}

fn range(offset: usize, bytes: usize) -> Range<usize> {
    offset..offset.checked_add(bytes).expect("an offset inside the memory")
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: allocated once.
        unsafe { (self.device.functions().cuMemFreeHost)(self.pointer.as_ptr().cast()) };
    }
}
