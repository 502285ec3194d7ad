//! Tensors: typed memory with a shape.
//!
//! A tensor either owns its memory (activations, caches: writable, 64-byte aligned) or views
//! shared read-only bytes (weights in a mapped file or in the binary: never copied). A view may
//! skip bytes between rows, so that a shard of a weight is a view too. The memory may also be that
//! of a device, see `device.rs`; accessors that need it on the host then panic.
//! Invariant: the bytes of every row lie inside the storage; this is checked once, when made.

use std::{ops::Range, sync::Arc};

use self::device::DeviceStorage;
use crate::{DType, Element, Float, KernelError, Result};

mod device;

/// Read-only bytes that tensors can share: a mapped file, static data, a frozen buffer.
pub type SharedBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

const DIMENSIONS_MAX: usize = 4;
/// Owned memory begins at a multiple of this: a cache line, the widest SIMD register.
const ALIGNMENT: usize = 64;
const CHUNK_BYTES: usize = 16;

/// A dense tensor of up to four dimensions, row-major.
///
/// "Row" means the last dimension; [`Tensor::rows`] counts all the others together.
///
/// A clone of a host tensor that owns its memory is a copy, a clone of a view is a view. A writable
/// device tensor cannot be cloned: that panics, see [`Tensor::zeros_on`].
#[derive(Clone)]
pub struct Tensor {
    dtype: DType,
    shape: [usize; DIMENSIONS_MAX],
    dimensions: usize,
    /// Bytes from one row to the next.
    pitch: usize,
    storage: Storage,
    /// Bytes before the first element.
    offset: usize,
}

#[derive(Clone)]
enum Storage {
    Owned(Vec<Chunk>),
    Shared(SharedBytes),
    Device(DeviceStorage),
}

/// Unit of allocation. Memory of this alignment comes zeroed from the system without being
/// touched; more alignment would cost a pass over it, so it is made by an offset.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Chunk([u8; CHUNK_BYTES]);

// SAFETY: 16 bytes without padding or invalid values.
unsafe impl bytemuck::Zeroable for Chunk {}
// SAFETY: as above; the alignment equals the size.
unsafe impl bytemuck::Pod for Chunk {}

impl Tensor {
    /// A tensor of zeros that owns its memory.
    ///
    /// # Panics
    /// If `shape` has no or more than four dimensions, or its size overflows.
    pub fn zeros(dtype: DType, shape: &[usize]) -> Self {
        let (dimensions, array) = shape_array(shape);
        let bytes = checked_bytes(dtype, shape).expect("the size of an activation fits in memory");
        let chunks = (bytes + ALIGNMENT - CHUNK_BYTES).div_ceil(CHUNK_BYTES);
        let chunks: Vec<Chunk> = bytemuck::zeroed_vec(chunks);
        let offset = chunks.as_ptr().cast::<u8>().align_offset(ALIGNMENT);
        let storage = Storage::Owned(chunks);
        let pitch = array[dimensions - 1] * dtype.bytes();
        Self { dtype, shape: array, dimensions, pitch, storage, offset }
    }

    /// A tensor that owns a copy of `values`.
    ///
    /// # Panics
    /// If `values` does not hold exactly what `shape` needs.
    pub fn from_slice<T: Element>(shape: &[usize], values: &[T]) -> Self {
        let mut tensor = Self::zeros(T::DTYPE, shape);
        tensor.as_mut_slice::<T>().copy_from_slice(values);
        tensor
    }

    /// A read-only view of `bytes` from byte `offset` on, without a copy.
    ///
    /// # Errors
    /// [`KernelError::OutOfBounds`] if the bytes do not hold the shape.
    pub fn from_shared(
        dtype: DType,
        shape: &[usize],
        bytes: SharedBytes,
        offset: usize,
    ) -> Result<Self> {
        let available = (*bytes).as_ref().len();
        let needed = checked_bytes(dtype, shape).unwrap_or(usize::MAX);
        if offset.checked_add(needed).is_none_or(|end| end > available) || shape.is_empty() {
            let shape = shape.to_vec();
            return Err(KernelError::OutOfBounds { shape, dtype, needed, offset, available });
        }
        let (dimensions, array) = shape_array(shape);
        let pitch = array[dimensions - 1] * dtype.bytes();
        Ok(Self { dtype, shape: array, dimensions, pitch, storage: Storage::Shared(bytes), offset })
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Shape, outermost dimension first.
    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.dimensions]
    }

    /// Length of the last dimension.
    pub fn width(&self) -> usize {
        self.shape[self.dimensions - 1]
    }

    /// Product of all dimensions but the last.
    pub fn rows(&self) -> usize {
        self.shape[..self.dimensions - 1].iter().product()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape().iter().product()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the elements, without gaps between rows.
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype.bytes()
    }

    /// Bytes from one row to the next.
    pub fn pitch_bytes(&self) -> usize {
        self.pitch
    }

    /// Sets the first dimension, within the memory that this tensor already has.
    /// The contents of rows beyond the old size are unspecified (but initialised).
    ///
    /// # Panics
    /// If the memory does not hold that many rows, or the tensor is a view.
    pub fn set_rows(&mut self, rows: usize) {
        let mut shape = self.shape;
        shape[0] = rows;
        self.assert_fits(&shape[..self.dimensions]);
        self.shape = shape;
    }

    /// Sets the whole shape, within the memory that this tensor already has. Contents are
    /// unspecified (but initialised).
    ///
    /// # Panics
    /// If the memory does not hold it, or the tensor is a view.
    pub fn reshape(&mut self, shape: &[usize]) {
        self.assert_fits(shape);
        (self.dimensions, self.shape) = shape_array(shape);
        self.pitch = self.width() * self.dtype.bytes();
    }

    fn assert_fits(&self, shape: &[usize]) {
        let end = match &self.storage {
            Storage::Owned(chunks) => chunks.len() * CHUNK_BYTES,
            Storage::Device(storage) if storage.writable => storage.end,
            _ => panic!("a view cannot be resized"),
        };
        let fits = checked_bytes(self.dtype, shape).is_some_and(|bytes| bytes <= end - self.offset);
        assert!(fits, "a shape of {shape:?} does not fit this tensor's memory");
    }

    /// Sets all elements to zero.
    ///
    /// # Panics
    /// If the tensor is a view or on a device.
    pub fn fill_zero(&mut self) {
        let range = self.offset..self.offset + self.bytes();
        self.owned_bytes_mut()[range].fill(0);
    }

    /// Makes the memory shareable, so that clones and views of it are cheap and read-only.
    #[must_use]
    pub fn into_shared(self) -> Self {
        let storage = match self.storage {
            Storage::Owned(chunks) => Storage::Shared(Arc::new(Frozen(chunks))),
            Storage::Device(storage) => {
                Storage::Device(DeviceStorage { writable: false, ..storage })
            }
            shared @ Storage::Shared(_) => shared,
        };
        Self { storage, ..self }
    }

    /// Rows `range` of a two-dimensional tensor, as a view.
    ///
    /// # Panics
    /// If this is not a shared two-dimensional tensor or the range lies outside.
    #[must_use]
    pub fn slice_rows(&self, range: Range<usize>) -> Self {
        self.assert_viewable();
        assert!(range.start <= range.end && range.end <= self.shape[0], "rows outside the tensor");
        let mut view = self.clone();
        view.offset += range.start * self.pitch;
        view.shape[0] = range.len();
        view
    }

    /// Columns `range` of a two-dimensional tensor, as a view.
    ///
    /// # Panics
    /// If this is not a shared two-dimensional tensor or the range lies outside.
    #[must_use]
    pub fn slice_columns(&self, range: Range<usize>) -> Self {
        self.assert_viewable();
        assert!(range.start <= range.end && range.end <= self.shape[1], "columns outside");
        let mut view = self.clone();
        view.offset += range.start * self.dtype.bytes();
        view.shape[1] = range.len();
        view
    }

    fn assert_viewable(&self) {
        assert!(self.dimensions == 2, "views are taken of matrices");
        let shared = match &self.storage {
            Storage::Owned(_) => false,
            Storage::Shared(_) => true,
            Storage::Device(storage) => !storage.writable,
        };
        assert!(shared, "share the tensor before viewing it");
    }

    /// All elements. Only for tensors without gaps whose memory is aligned for `T` (owned ones
    /// always are).
    ///
    /// # Panics
    /// On another element type, gaps, misaligned memory or memory of a device.
    pub fn as_slice<T: Element>(&self) -> &[T] {
        assert_eq!(T::DTYPE, self.dtype, "tensor holds another element type");
        assert!(self.is_dense(), "tensor has gaps between rows");
        let bytes = self.storage_bytes();
        bytemuck::cast_slice(&bytes[self.offset..self.offset + self.bytes()])
    }

    /// All elements, writable.
    ///
    /// # Panics
    /// On another element type, or if the tensor is a view or on a device.
    pub fn as_mut_slice<T: Element>(&mut self) -> &mut [T] {
        assert_eq!(T::DTYPE, self.dtype, "tensor holds another element type");
        let range = self.offset..self.offset + self.bytes();
        bytemuck::cast_slice_mut(&mut self.owned_bytes_mut()[range])
    }

    /// The bytes of row `index` (over all dimensions but the last).
    ///
    /// # Panics
    /// If there is no such row.
    #[inline]
    pub fn row_bytes(&self, index: usize) -> &[u8] {
        assert!(index < self.rows(), "row {index} of {}", self.rows());
        let start = self.offset + index * self.pitch;
        &self.storage_bytes()[start..start + self.width() * self.dtype.bytes()]
    }

    /// Pointer to the first element; row `i` starts `i *` [`Tensor::pitch_bytes`] further.
    ///
    /// # Panics
    /// If the tensor is on a device, as do all accessors of elements.
    pub fn as_ptr(&self) -> *const u8 {
        self.storage_bytes()[self.offset..].as_ptr()
    }

    /// Copies row `index` into `out`, widened to f32.
    ///
    /// # Panics
    /// If there is no such row, `out` has another length, or the type is no float.
    pub fn read_row_f32(&self, index: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.width());
        widen(self.dtype, self.row_bytes(index), out);
    }

    /// All elements widened to f32, in a new vector.
    ///
    /// # Panics
    /// If the type is no float.
    pub fn to_f32_vec(&self) -> Vec<f32> {
        let width = self.width();
        let mut out = vec![0.0; self.len()];
        if width > 0 {
            for (index, row) in out.chunks_exact_mut(width).enumerate() {
                widen(self.dtype, self.row_bytes(index), row);
            }
        }
        out
    }

    fn is_dense(&self) -> bool {
        self.pitch == self.width() * self.dtype.bytes() || self.rows() <= 1
    }

    fn storage_bytes(&self) -> &[u8] {
        match &self.storage {
            Storage::Owned(chunks) => bytemuck::cast_slice(chunks),
            Storage::Shared(bytes) => (**bytes).as_ref(),
            Storage::Device(storage) => storage.refuse(),
        }
    }

    fn owned_bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.storage {
            Storage::Owned(chunks) => bytemuck::cast_slice_mut(chunks),
            Storage::Shared(_) => panic!("a view is read-only"),
            Storage::Device(storage) => storage.refuse(),
        }
    }
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Tensor({} {:?}", self.dtype, self.shape())?;
        if let Some(device) = self.device() {
            write!(formatter, " on GPU {}", device.ordinal())?;
        }
        formatter.write_str(")")
    }
}

struct Frozen(Vec<Chunk>);

impl AsRef<[u8]> for Frozen {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

fn shape_array(shape: &[usize]) -> (usize, [usize; DIMENSIONS_MAX]) {
    assert!((1..=DIMENSIONS_MAX).contains(&shape.len()), "a tensor has 1 to 4 dimensions");
    let mut array = [1; DIMENSIONS_MAX];
    array[..shape.len()].copy_from_slice(shape);
    (shape.len(), array)
}

fn checked_bytes(dtype: DType, shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(dtype.bytes(), |product, &length| product.checked_mul(length))
}

/// Widens little-endian floats to f32; the bytes may be misaligned, as in a mapped file.
fn widen(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    fn each<T: Float, const N: usize>(bytes: &[u8], out: &mut [f32]) {
        for (value, raw) in out.iter_mut().zip(bytes.chunks_exact(N)) {
            *value = bytemuck::pod_read_unaligned::<T>(raw).to_f32();
        }
    }
    match dtype {
        DType::F32 => each::<f32, 4>(bytes, out),
        DType::F16 => each::<half::f16, 2>(bytes, out),
        DType::BF16 => each::<half::bf16, 2>(bytes, out),
        DType::F8E4M3 => {
            for (value, &code) in out.iter_mut().zip(bytes) {
                *value = crate::f8e4m3_to_f32(code);
            }
        }
        other => panic!("{other} cannot be widened to f32"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_skip_what_lies_between_rows() {
        let values: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let tensor = Tensor::from_slice(&[3, 4], &values).into_shared();
        let view = tensor.slice_rows(1..3).slice_columns(1..3);
        assert_eq!(view.shape(), [2, 2]);
        assert_eq!(view.to_f32_vec(), [5.0, 6.0, 9.0, 10.0]);
    }

    #[test]
    fn shared_bytes_must_hold_the_shape() {
        let bytes: SharedBytes = Arc::new(vec![0u8; 10]);
        assert!(Tensor::from_shared(DType::BF16, &[5], bytes.clone(), 0).is_ok());
        for (shape, offset) in [(&[5][..], 1), (&[6], 0), (&[usize::MAX, 3], 0), (&[1], usize::MAX)]
        {
            let error = Tensor::from_shared(DType::BF16, shape, bytes.clone(), offset).unwrap_err();
            assert!(matches!(error, KernelError::OutOfBounds { .. }));
        }
    }

    #[test]
    fn rows_change_within_capacity() {
        let mut tensor = Tensor::zeros(DType::F32, &[4, 3]);
        tensor.set_rows(2);
        assert_eq!(tensor.as_slice::<f32>().len(), 6);
        tensor.set_rows(4);
        assert_eq!(tensor.rows(), 4);
    }

    #[test]
    #[should_panic(expected = "does not fit")]
    fn rows_beyond_capacity_are_a_bug() {
        Tensor::zeros(DType::F32, &[16, 16]).set_rows(17);
    }
}
