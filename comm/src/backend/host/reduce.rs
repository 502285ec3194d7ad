//! Sums and maxima of the ranks' inputs: in f32, in the order of ranks, rounded once.
//!
//! Invariant: an output element depends on the same element of the inputs and on the order of
//! ranks, on nothing else; so cutting a tensor into chunks or segments never changes a bit.

use half::{bf16, f16, slice::HalfFloatSliceExt};
use paceline_kernels::Float;

use crate::ReduceOp;

/// Elements that are accumulated at a time, small enough to stay in the first-level cache.
const BLOCK: usize = 512;

/// An element type that ranks can reduce.
pub(crate) trait Reducible: Float {
    /// Widens exactly.
    fn widen(from: &[Self], to: &mut [f32]);
    /// Rounds to nearest, ties to even.
    fn narrow(from: &[f32], to: &mut [Self]);
}

impl Reducible for f32 {
    #[inline(always)]
    fn widen(from: &[Self], to: &mut [f32]) {
        to.copy_from_slice(from);
    }
    #[inline(always)]
    fn narrow(from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }
}

impl Reducible for f16 {
    #[inline(always)]
    fn widen(from: &[Self], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }
    #[inline(always)]
    fn narrow(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }
}

impl Reducible for bf16 {
    #[inline(always)]
    fn widen(from: &[Self], to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = Float::to_f32(*from);
        }
    }
    #[inline(always)]
    fn narrow(from: &[f32], to: &mut [Self]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = rounded(*from);
        }
    }
}

/// The nearest bf16, ties to even: as `bf16::from_f32`, but without a branch, so that the compiler
/// makes SIMD of it.
#[inline(always)]
fn rounded(value: f32) -> bf16 {
    let bits = value.to_bits();
    let nearest = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
    let quiet_nan = (bits >> 16) | 0x40;
    bf16::from_bits(if value.is_nan() { quiet_nan } else { nearest } as u16)
}

/// Writes the combination of `input(0)`, …, `input(world_size - 1)` to `out`, all equally long.
pub(crate) fn reduce<'a, T: Reducible>(
    op: ReduceOp,
    world_size: usize,
    input: impl Fn(usize) -> &'a [T],
    out: &mut [T],
) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: this processor has AVX2.
        unsafe { reduce_avx2(op, world_size, input, out) };
        return;
    }
    reduce_portable(op, world_size, input, out);
}

/// The same arithmetic, compiled for wider registers: Rust neither fuses nor reorders it.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn reduce_avx2<'a, T: Reducible>(
    op: ReduceOp,
    world_size: usize,
    input: impl Fn(usize) -> &'a [T],
    out: &mut [T],
) {
    reduce_portable(op, world_size, input, out);
}

#[inline(always)]
fn reduce_portable<'a, T: Reducible>(
    op: ReduceOp,
    world_size: usize,
    input: impl Fn(usize) -> &'a [T],
    out: &mut [T],
) {
    let mut sums = [0f32; BLOCK];
    let mut terms = [0f32; BLOCK];
    for start in (0..out.len()).step_by(BLOCK) {
        let end = out.len().min(start + BLOCK);
        let (sums, terms) = (&mut sums[..end - start], &mut terms[..end - start]);
        T::widen(&input(0)[start..end], sums);
        for rank in 1..world_size {
            T::widen(&input(rank)[start..end], terms);
            match op {
                ReduceOp::Sum => combine(sums, terms, |sum, term| sum + term),
                ReduceOp::Max => combine(sums, terms, larger),
            }
        }
        T::narrow(sums, &mut out[start..end]);
    }
}

#[inline(always)]
fn combine(sums: &mut [f32], terms: &[f32], with: impl Fn(f32, f32) -> f32) {
    for (sum, term) in sums.iter_mut().zip(terms) {
        *sum = with(*sum, *term);
    }
}

/// The larger; NaN if either is.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a || b.is_nan() { b } else { a }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_rounded_once() {
        // In bf16 steps, 256 + 1 would be lost twice; in f32 the sum is 258.
        let inputs = [256f32, 1.0, 1.0].map(|value| vec![bf16::from_f32(value); BLOCK + 1]);
        let mut out = vec![bf16::ZERO; BLOCK + 1];
        reduce(ReduceOp::Sum, 3, |rank| &inputs[rank][..], &mut out);
        assert!(out.iter().all(|&value| value == bf16::from_f32(258.0)));
    }

    #[test]
    fn rounding_without_a_branch_rounds_alike() {
        for upper in 0..=u16::MAX {
            for lower in [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                let value = f32::from_bits(u32::from(upper) << 16 | lower);
                let (ours, reference) = (rounded(value), bf16::from_f32(value));
                assert_eq!(ours.to_bits(), reference.to_bits(), "{:#x}", value.to_bits());
            }
        }
    }

    #[test]
    fn the_order_of_ranks_decides() {
        let inputs = [[1e8f32], [1.0], [-1e8]];
        let mut out = [0f32];
        reduce(ReduceOp::Sum, 3, |rank| &inputs[rank][..], &mut out);
        assert_eq!(out, [0.0]);
        reduce(ReduceOp::Sum, 3, |rank| &inputs[[0, 2, 1][rank]][..], &mut out);
        assert_eq!(out, [1.0]);
    }

    #[test]
    fn the_largest_of_a_nan_is_nan() {
        for place in 0..3 {
            let mut inputs = [[f16::ONE], [f16::NEG_ONE], [f16::ZERO]];
            let mut out = [f16::ZERO];
            reduce(ReduceOp::Max, 3, |rank| &inputs[rank][..], &mut out);
            assert_eq!(out, [f16::ONE]);
            inputs[place] = [f16::NAN];
            reduce(ReduceOp::Max, 3, |rank| &inputs[rank][..], &mut out);
            assert!(out[0].is_nan());
        }
    }
}
