//! Vectors as arrays, for any processor.

use half::f16;

use super::lanes::{Kernel, Lanes};
use crate::f8e4m3_to_f32;

/// Eight lanes in plain Rust; a product and a sum are rounded separately.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

const COUNT: usize = 8;

/// Bytes from `from`.
///
/// # Safety
/// `from` is valid for reads of `N` bytes.
#[inline(always)]
unsafe fn bytes<const N: usize>(from: *const u8) -> [u8; N] {
    // SAFETY: by the caller's promise; an array of bytes has no alignment.
    unsafe { from.cast::<[u8; N]>().read() }
}

fn widen_bf16(low: u8, high: u8) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes([low, high])) << 16)
}

impl Lanes for Portable {
    type Vector = [f32; COUNT];
    type Pairs = [u32; COUNT];
    const COUNT: usize = COUNT;

    #[inline(always)]
    unsafe fn run<K: Kernel<Self>>(kernel: K) {
        // SAFETY: plain Rust runs everywhere; the pointers are the caller's.
        unsafe { kernel.run() }
    }

    #[inline(always)]
    unsafe fn zero() -> Self::Vector {
        [0.0; COUNT]
    }

    #[inline(always)]
    unsafe fn splat(from: *const f32) -> Self::Vector {
        // SAFETY: by the caller's promise.
        [unsafe { from.read_unaligned() }; COUNT]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::Vector {
        // SAFETY: by the caller's promise.
        unsafe { from.cast::<Self::Vector>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, vector: Self::Vector) {
        // SAFETY: by the caller's promise.
        unsafe { to.cast::<Self::Vector>().write_unaligned(vector) }
    }

    #[inline(always)]
    unsafe fn mul(a: Self::Vector, b: Self::Vector) -> Self::Vector {
        std::array::from_fn(|lane| a[lane] * b[lane])
    }

    #[inline(always)]
    unsafe fn mul_add(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
        std::array::from_fn(|lane| a[lane] * b[lane] + c[lane])
    }

    #[inline(always)]
    unsafe fn store_sums<const N: usize>(to: *mut f32, vectors: [Self::Vector; N]) {
        for (index, v) in vectors.into_iter().enumerate() {
            let sum = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
            // SAFETY: by the caller's promise.
            unsafe { to.add(index).write(sum) };
        }
    }

    #[inline(always)]
    unsafe fn prefetch(_at: *const u8) {}

    #[inline(always)]
    unsafe fn load_pairs(from: *const u8) -> [u32; COUNT] {
        // SAFETY: by the caller's promise.
        unsafe { from.cast::<[u32; COUNT]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn even(pairs: [u32; COUNT]) -> Self::Vector {
        pairs.map(|pair| f32::from_bits(u32::from_le(pair) << 16))
    }

    #[inline(always)]
    unsafe fn odd(pairs: [u32; COUNT]) -> Self::Vector {
        pairs.map(|pair| f32::from_bits(u32::from_le(pair) & 0xFFFF_0000))
    }

    #[inline(always)]
    unsafe fn bf16(from: *const u8) -> Self::Vector {
        // SAFETY: by the caller's promise.
        let raw = unsafe { bytes::<16>(from) };
        std::array::from_fn(|lane| widen_bf16(raw[2 * lane], raw[2 * lane + 1]))
    }

    #[inline(always)]
    unsafe fn f16(from: *const u8) -> Self::Vector {
        // SAFETY: by the caller's promise.
        let raw = unsafe { bytes::<16>(from) };
        std::array::from_fn(|lane| f16::from_le_bytes([raw[2 * lane], raw[2 * lane + 1]]).to_f32())
    }

    #[inline(always)]
    unsafe fn f8e4m3(from: *const u8) -> Self::Vector {
        // SAFETY: by the caller's promise.
        unsafe { bytes::<COUNT>(from) }.map(f8e4m3_to_f32)
    }

    #[inline(always)]
    unsafe fn int4<const NIBBLE: u32>(words: [u32; COUNT]) -> Self::Vector {
        words.map(|word| {
            let word = u32::from_le(word);
            (if NIBBLE == 7 { word >> 28 } else { word & (0xF << (4 * NIBBLE)) }) as f32
        })
    }

    #[inline(always)]
    unsafe fn quads(from: *const f32) -> Self::Vector {
        // SAFETY: by the caller's promise.
        let pair = unsafe { [from.read_unaligned(), from.add(1).read_unaligned()] };
        std::array::from_fn(|lane| pair[lane / 4])
    }
}
