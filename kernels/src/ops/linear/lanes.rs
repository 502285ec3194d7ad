//! What matrix products and attention ask of an instruction set.
//!
//! A dot product is taken lane by lane: lane `l` of N adds elements l, N + l, 2N + l, … of the
//! row, in the order in which the weight's format unpacks them, with one fused (or not) multiply
//! and add each; in the end the lanes are added as a fixed tree. Every tile of rows and outputs
//! does exactly this for each of its elements, so tiles never change a result.

use super::portable::Portable;
#[cfg(target_arch = "x86_64")]
use super::{avx2::Avx2, avx512::Avx512};
use crate::Isa;

/// Vectors of one instruction set.
///
/// All functions are meant to be inlined into [`Lanes::run`], which compiles them with the
/// instruction set enabled.
///
/// # Safety
/// For every function: the processor has the instruction set, and pointers are valid for what the
/// function says it reads or writes (without any alignment).
pub(crate) trait Lanes: Copy + 'static {
    /// `COUNT` f32 values.
    type Vector: Copy;
    /// `COUNT` pairs of bf16 values.
    type Pairs: Copy;
    /// Lanes of a vector: 8 or 16.
    const COUNT: usize;

    /// Runs `kernel`, compiled for this instruction set.
    unsafe fn run<K: Kernel<Self>>(kernel: K);

    /// All lanes 0.
    unsafe fn zero() -> Self::Vector;
    /// All lanes `*from`.
    unsafe fn splat(from: *const f32) -> Self::Vector;
    /// `COUNT` floats from `from`.
    unsafe fn load(from: *const f32) -> Self::Vector;
    /// `COUNT` floats to `to`.
    unsafe fn store(to: *mut f32, vector: Self::Vector);
    /// a · b.
    unsafe fn mul(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// a · b + c.
    unsafe fn mul_add(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// Stores the sum of the lanes of each vector: lanes 2i and 2i + 1 are added, then
    /// neighbouring sums, and so on. (With 16 lanes, first the upper half to the lower.)
    unsafe fn store_sums<const N: usize>(to: *mut f32, vectors: [Self::Vector; N]);

    /// Asks for the cache line at `at`, which need not exist.
    unsafe fn prefetch(at: *const u8);
    /// 2 · `COUNT` bf16 values, or `COUNT` words of INT4 codes, from `from`.
    unsafe fn load_pairs(from: *const u8) -> Self::Pairs;
    /// The bf16 values at even places.
    unsafe fn even(pairs: Self::Pairs) -> Self::Vector;
    /// The bf16 values at odd places.
    unsafe fn odd(pairs: Self::Pairs) -> Self::Vector;
    /// `COUNT` bf16 values from `from`, in order.
    unsafe fn bf16(from: *const u8) -> Self::Vector;
    /// `COUNT` f16 values from `from`, in order.
    unsafe fn f16(from: *const u8) -> Self::Vector;
    /// `COUNT` FP8 E4M3 values from `from`, in order.
    unsafe fn f8e4m3(from: *const u8) -> Self::Vector;
    /// Code `NIBBLE` of each of `COUNT` words as a number, times 16^`NIBBLE`, but not the last
    /// one (7): then no bit has to be moved.
    unsafe fn int4<const NIBBLE: u32>(words: Self::Pairs) -> Self::Vector;
    /// `COUNT` / 4 floats from `from`, each in four lanes.
    unsafe fn quads(from: *const f32) -> Self::Vector;
}

/// Lanes of the widest vector.
pub(crate) const LANES_MAX: usize = 16;

/// Prepared activations for 8 · `lanes` INT4 weights.
pub(super) const fn int4_floats(lanes: usize) -> usize {
    9 * lanes
}

/// A piece of work that is compiled for an instruction set.
pub(crate) trait Kernel<L: Lanes> {
    /// Does it. Implementations are `#[inline(always)]`.
    ///
    /// # Safety
    /// The processor has the instruction set; the kernel's pointers are valid.
    unsafe fn run(self);
}

/// Runs `kernel` with the instruction set `isa`.
///
/// # Safety
/// The processor has `isa`; the kernel's pointers are valid.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn run_on<K>(isa: Isa, kernel: K)
where
    K: Kernel<Portable> + Kernel<Avx2> + Kernel<Avx512>,
{
    // SAFETY: by the caller's promise.
    unsafe {
        match isa {
            Isa::Avx512 => Avx512::run(kernel),
            Isa::Avx2 => Avx2::run(kernel),
            Isa::Portable => Portable::run(kernel),
        }
    }
}

/// Runs `kernel` in plain Rust.
///
/// # Safety
/// The kernel's pointers are valid.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) unsafe fn run_on<K: Kernel<Portable>>(_isa: Isa, kernel: K) {
    // SAFETY: by the caller's promise.
    unsafe { Portable::run(kernel) }
}
