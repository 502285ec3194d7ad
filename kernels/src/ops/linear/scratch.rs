//! Working memory of operators, kept by each thread between calls.

use std::cell::RefCell;

/// Floats of a cache line, the unit of allocation.
const LINE: usize = 16;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; LINE]);

thread_local! {
    /// Buffers not in use. A list, since a thread that waits for others may meanwhile run
    /// another operator.
    static FREE: RefCell<Vec<Vec<Line>>> = const { RefCell::new(Vec::new()) };
}

/// A buffer of f32 that goes back to its thread when dropped. Its memory grows only when more is
/// asked for than ever before.
pub(crate) struct Scratch(Vec<Line>);

impl Scratch {
    /// A buffer of `floats` f32 with arbitrary contents, aligned to a cache line.
    ///
    /// It is the smallest free one that is large enough, or else the largest, which then grows.
    pub(crate) fn take(floats: usize) -> Self {
        let needed = floats.div_ceil(LINE);
        let mut lines = FREE.with_borrow_mut(|free| {
            let large = free.iter().enumerate().filter(|(_, lines)| lines.len() >= needed);
            let best = large
                .min_by_key(|(_, lines)| lines.len())
                .or_else(|| free.iter().enumerate().max_by_key(|(_, lines)| lines.len()))
                .map(|(index, _)| index);
            best.map(|index| free.swap_remove(index)).unwrap_or_default()
        });
        if lines.len() < needed {
            lines.resize(needed.next_power_of_two(), Line([0.0; LINE]));
        }
        Self(lines)
    }

    /// Pointer to the first float, for reading.
    pub(crate) fn as_ptr(&self) -> *const f32 {
        self.0.as_ptr().cast()
    }

    /// Pointer to the first float.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut f32 {
        self.0.as_mut_ptr().cast()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let lines = std::mem::take(&mut self.0);
        // The list itself is gone only while the thread ends.
        let _ = FREE.try_with(|free| free.borrow_mut().push(lines));
    }
}
