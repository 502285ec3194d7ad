//! Tensors in device memory.
//!
//! Invariant: as on the host, the bytes of every row lie inside the storage, and what can be
//! written has one owner: a device tensor is cloned only after [`Tensor::into_shared`] has made it
//! read-only.

use std::sync::Arc;

use super::{Storage, Tensor, checked_bytes, shape_array};
use crate::{
    DType, KernelError, Result,
    driver::{Device, DeviceBytes, DeviceMemory, DevicePointer, DeviceStream, to_device, to_host},
};

/// Where a device tensor lies.
pub(super) struct DeviceStorage {
    pub(super) memory: Arc<dyn DeviceBytes>,
    /// Byte of `memory` after the last that the tensor may use.
    pub(super) end: usize,
    pub(super) writable: bool,
}

impl DeviceStorage {
    /// For accessors that would follow the address on the host.
    #[cold]
    pub(super) fn refuse(&self) -> ! {
        let ordinal = self.memory.device().ordinal();
        panic!("this tensor lies on GPU {ordinal}: copy it with `to_host` before looking at it")
    }
}

impl Clone for DeviceStorage {
    fn clone(&self) -> Self {
        assert!(!self.writable, "share a device tensor before cloning it: two would be writable");
        Self { memory: Arc::clone(&self.memory), end: self.end, writable: false }
    }
}

impl Tensor {
    /// A tensor of zeros in memory of its own on `device`.
    ///
    /// It is written through `&mut` or by kernels, and cannot be cloned (cloning panics) before
    /// [`Tensor::into_shared`] has made it read-only: so no two tensors can write the same memory.
    ///
    /// # Errors
    /// If the device has too little memory.
    ///
    /// # Panics
    /// As [`Tensor::zeros`].
    pub fn zeros_on(device: &Device, dtype: DType, shape: &[usize]) -> Result<Self> {
        let bytes = checked_bytes(dtype, shape).expect("the size of an activation fits in memory");
        let memory = Arc::new(DeviceMemory::zeroed(device, bytes)?);
        // SAFETY: nobody else knows the memory.
        unsafe { Self::from_device_memory(dtype, shape, memory, 0) }
    }

    /// A writable tensor in memory that someone else allocated, from byte `offset` on: a part of a
    /// symmetric heap, for instance. The memory lives as long as the tensor.
    ///
    /// # Errors
    /// [`KernelError::OutOfBounds`] if the memory does not hold the shape.
    ///
    /// # Panics
    /// If `shape` has no or more than four dimensions.
    ///
    /// # Safety
    /// The memory holds initialised elements, and no other tensor or owner writes these bytes but
    /// in an agreed order (streams, flags), as long as this tensor or one made of it lives.
    pub unsafe fn from_device_memory(
        dtype: DType,
        shape: &[usize],
        memory: Arc<dyn DeviceBytes>,
        offset: usize,
    ) -> Result<Self> {
        let available = memory.bytes();
        let needed = checked_bytes(dtype, shape).unwrap_or(usize::MAX);
        let Some(end) = offset.checked_add(needed).filter(|&end| end <= available) else {
            let shape = shape.to_vec();
            return Err(KernelError::OutOfBounds { shape, dtype, needed, offset, available });
        };
        let (dimensions, array) = shape_array(shape);
        let pitch = array[dimensions - 1] * dtype.bytes();
        let storage = Storage::Device(DeviceStorage { memory, end, writable: true });
        Ok(Self { dtype, shape: array, dimensions, pitch, storage, offset })
    }

    /// The device that the tensor lies on; none for the host.
    pub fn device(&self) -> Option<&Device> {
        match &self.storage {
            Storage::Device(storage) => Some(storage.memory.device()),
            _ => None,
        }
    }

    /// The address of the first element, to be read by kernels; none for a tensor on the host.
    pub fn device_pointer(&self) -> Option<DevicePointer> {
        match &self.storage {
            Storage::Device(storage) => Some(storage.memory.pointer().add(self.offset)),
            _ => None,
        }
    }

    /// The address of the first element, to be written by kernels; none for a tensor on the host.
    ///
    /// # Panics
    /// If the tensor is a view.
    pub fn device_pointer_mut(&mut self) -> Option<DevicePointer> {
        if let Storage::Device(storage) = &self.storage {
            assert!(storage.writable, "a view is read-only");
        }
        self.device_pointer()
    }

    /// Copies the elements of `from`, a host tensor, into this device tensor, after what `stream`
    /// holds, and waits for it.
    ///
    /// # Errors
    /// If the device fails or the work before does not end in time.
    ///
    /// # Panics
    /// If shapes or types differ, `from` has gaps, a tensor lies on the wrong side, the stream is
    /// of another device, or this one is a view.
    pub fn copy_from_host(&mut self, from: &Self, stream: &DeviceStream) -> Result<()> {
        assert_eq!((self.dtype, self.shape()), (from.dtype, from.shape()), "tensors differ");
        assert!(from.is_dense(), "tensor has gaps between rows");
        self.assert_reachable(stream);
        let target = self.device_pointer_mut().expect("a device tensor, as was just asserted");
        let bytes = &from.storage_bytes()[from.offset..from.offset + from.bytes()];
        // SAFETY: a writable tensor has no gaps, so the target holds as many bytes, and is borrowed
        // for writing.
        Ok(unsafe { to_device(stream, target, bytes) }?)
    }

    /// A copy on the host of this device tensor, made after what `stream` holds.
    ///
    /// # Errors
    /// As [`Tensor::copy_from_host`].
    ///
    /// # Panics
    /// If this is a host tensor, or the stream is of another device.
    pub fn to_host(&self, stream: &DeviceStream) -> Result<Self> {
        self.assert_reachable(stream);
        let source = self.device_pointer().expect("a device tensor, as was just asserted");
        let mut host = Self::zeros(self.dtype, self.shape());
        let rows = if self.is_dense() { 1 } else { self.rows() };
        let (offset, bytes) = (host.offset, self.bytes() / rows.max(1));
        let target = host.owned_bytes_mut();
        for row in 0..rows {
            let start = offset + row * bytes;
            // SAFETY: the row lies inside the storage, which `self` keeps alive.
            let copied = unsafe {
                let from = source.add(row * self.pitch);
                to_host(stream, from, &mut target[start..start + bytes])
            };
            copied?;
        }
        Ok(host)
    }

    fn assert_reachable(&self, stream: &DeviceStream) {
        let device = self.device().expect("this tensor lies on the host");
        assert_eq!(device, stream.device(), "tensor and stream are of different devices");
    }
}
