//! Results on their way from f32 to a tensor.

use half::{bf16, f16};

use super::{
    lanes::{Kernel, Lanes, run_on},
    product::Results,
};
use crate::{DType, Float, Isa, Tensor};

/// The rows of a tensor, whose parts different threads write.
pub(crate) struct Outputs {
    first: *mut u8,
    dtype: DType,
    rows: usize,
    width: usize,
}

// SAFETY: the unsafe functions demand that each part is written by one thread.
unsafe impl Sync for Outputs {}

impl Outputs {
    /// All of `tensor`, which must stay borrowed while this is used.
    ///
    /// # Panics
    /// If it is a view or holds no floats.
    pub(crate) fn new(tensor: &mut Tensor) -> Self {
        let (dtype, rows, width) = (tensor.dtype(), tensor.rows(), tensor.width());
        let first = match dtype {
            DType::F32 => tensor.as_mut_slice::<f32>().as_mut_ptr().cast(),
            DType::BF16 => tensor.as_mut_slice::<bf16>().as_mut_ptr().cast(),
            DType::F16 => tensor.as_mut_slice::<f16>().as_mut_ptr().cast(),
            other => panic!("activations of type {other}"),
        };
        Self { first, dtype, rows, width }
    }

    /// Where results go that need no rounding, if this holds f32.
    pub(crate) fn direct(&self, row: usize, column: usize) -> Option<Results> {
        let first = self.at(row, column).cast();
        (self.dtype == DType::F32).then_some(Results { first, pitch: self.width })
    }

    /// Rounds `count` f32 values from `from` to row `row`, from `column` on.
    ///
    /// # Safety
    /// `from` holds them; no other thread uses these elements; the processor has `isa`.
    pub(crate) unsafe fn round(
        &self,
        isa: Isa,
        row: usize,
        column: usize,
        from: *const f32,
        count: usize,
    ) {
        debug_assert!(row < self.rows && column + count <= self.width);
        let round = Round { from, count, dtype: self.dtype, to: self.at(row, column) };
        // SAFETY: by the caller's promise; the elements lie inside the tensor.
        unsafe {
            run_on(isa, round);
        }
    }

    /// Adds `count` f32 values from `from` to row `row`, from `column` on, and rounds the sums.
    ///
    /// # Safety
    /// That of [`Outputs::round`].
    pub(crate) unsafe fn add(
        &self,
        isa: Isa,
        row: usize,
        column: usize,
        from: *const f32,
        count: usize,
    ) {
        debug_assert!(row < self.rows && column + count <= self.width);
        let add = Add(Round { from, count, dtype: self.dtype, to: self.at(row, column) });
        // SAFETY: by the caller's promise; the elements lie inside the tensor.
        unsafe {
            run_on(isa, add);
        }
    }

    fn at(&self, row: usize, column: usize) -> *mut u8 {
        self.first.wrapping_add((row * self.width + column) * self.dtype.bytes())
    }
}

struct Round {
    from: *const f32,
    count: usize,
    dtype: DType,
    to: *mut u8,
}

impl<L: Lanes> Kernel<L> for Round {
    #[inline(always)]
    unsafe fn run(self) {
        // SAFETY: by the caller's promise.
        unsafe {
            let from = std::slice::from_raw_parts(self.from, self.count);
            match self.dtype {
                DType::F32 => each(from, self.to.cast(), |value, _| value),
                DType::F16 => each(from, self.to.cast(), |value, _| f16::from_f32(value)),
                _ => each(from, self.to.cast(), |value, _| round_bf16(value)),
            }
        }
    }
}

struct Add(Round);

impl<L: Lanes> Kernel<L> for Add {
    #[inline(always)]
    unsafe fn run(self) {
        let Self(Round { from, count, dtype, to }) = self;
        // SAFETY: by the caller's promise.
        unsafe {
            let from = std::slice::from_raw_parts(from, count);
            match dtype {
                DType::F32 => each(from, to.cast(), |value, old: f32| old + value),
                DType::F16 => {
                    each(from, to.cast(), |value, old: f16| f16::from_f32(old.to_f32() + value));
                }
                _ => {
                    each(from, to.cast(), |value, old: bf16| round_bf16(Float::to_f32(old) + value))
                }
            }
        }
    }
}

/// Calls `round(from, to)` for each element and writes the result to `to`.
///
/// # Safety
/// `to` has as many elements as `from`.
#[inline(always)]
unsafe fn each<T: Float>(from: &[f32], to: *mut T, round: impl Fn(f32, T) -> T) {
    // SAFETY: by the caller's promise.
    let to = unsafe { std::slice::from_raw_parts_mut(to, from.len()) };
    for (to, &from) in to.iter_mut().zip(from) {
        *to = round(from, *to);
    }
}

/// Round to nearest, ties to even, without a branch so that it runs in lanes.
#[inline(always)]
fn round_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
    let nan = (bits >> 16) | 0x40;
    bf16::from_bits(if value.is_nan() { nan } else { rounded } as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_is_rounded_to_even() {
        for bits in (0..=u32::MAX).step_by(9973).chain([0x7F7F_FFFF, 0x7F80_0001, 0xFFFF_FFFF]) {
            let value = f32::from_bits(bits);
            assert_eq!(round_bf16(value).to_bits(), bf16::from_f32(value).to_bits(), "{bits:#x}");
        }
    }
}
