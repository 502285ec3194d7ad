//! Disjoint mutable rows of a tensor, handed out to threads.

use std::{marker::PhantomData, ops::Range};

use crate::{Element, Stream, Tensor};

/// The rows of a tensor, from which threads take disjoint ones.
pub(crate) struct RowsMut<'tensor, T> {
    first: *mut T,
    width: usize,
    count: usize,
    tensor: PhantomData<&'tensor mut [T]>,
}

// SAFETY: rows are disjoint, and `row` demands that no row is taken twice at a time.
unsafe impl<T: Send> Sync for RowsMut<'_, T> {}

impl<'tensor, T: Element> RowsMut<'tensor, T> {
    /// All rows of `tensor`.
    pub(crate) fn new(tensor: &'tensor mut Tensor) -> Self {
        let (width, count) = (tensor.width(), tensor.rows());
        let first = tensor.as_mut_slice::<T>().as_mut_ptr();
        Self { first, width, count, tensor: PhantomData }
    }

    /// Number of rows.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Columns `columns` of row `index`.
    ///
    /// # Safety
    /// No two of the slices alive at a time may overlap.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, index: usize, columns: Range<usize>) -> &mut [T] {
        assert!(index < self.count && columns.start <= columns.end && columns.end <= self.width);
        // SAFETY: inside the tensor (checked above); disjoint by the caller's promise.
        unsafe {
            let start = self.first.add(index * self.width + columns.start);
            std::slice::from_raw_parts_mut(start, columns.len())
        }
    }
}

/// Calls `work(row, its elements)` for each row, on all threads of `stream`, in groups of at least
/// `grain` rows.
pub(crate) fn for_rows<T: Element>(
    stream: &Stream,
    rows: RowsMut<'_, T>,
    grain: usize,
    work: impl Fn(usize, &mut [T]) + Sync,
) {
    stream.split(rows.count(), grain, |range| {
        for row in range {
            // SAFETY: `split` gives each index to one thread only.
            work(row, unsafe { rows.part(row, 0..rows.width) });
        }
    });
}
