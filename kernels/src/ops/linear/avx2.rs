//! Vectors of eight lanes with AVX2, FMA and F16C.

use std::arch::x86_64::*;

use super::lanes::{Kernel, Lanes};

/// Eight lanes.
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

/// Sums of the lanes of four vectors.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub(super) unsafe fn four_sums(v: [__m256; 4]) -> __m128 {
    // SAFETY: AVX2 by the caller's promise.
    unsafe {
        let pairs = [_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3])];
        let fours = _mm256_hadd_ps(pairs[0], pairs[1]);
        _mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps::<1>(fours))
    }
}

/// Stores the sums of the lanes of up to four vectors a time.
///
/// # Safety
/// The processor has AVX2; `to` is valid for writes of `N` floats.
#[inline(always)]
pub(super) unsafe fn store_sums<const N: usize>(to: *mut f32, vectors: [__m256; N]) {
    // SAFETY: by the caller's promise; only the first `N` sums are stored.
    unsafe {
        let mut index = 0;
        while index < N {
            let mut four = [_mm256_setzero_ps(); 4];
            let mut i = 0;
            while i < 4 && index + i < N {
                four[i] = vectors[index + i];
                i += 1;
            }
            let sums = four_sums(four);
            if N - index >= 4 {
                _mm_storeu_ps(to.add(index), sums);
            } else {
                let mut values = [0.0; 4];
                _mm_storeu_ps(values.as_mut_ptr(), sums);
                for (i, &value) in values[..N - index].iter().enumerate() {
                    to.add(index + i).write(value);
                }
            }
            index += 4;
        }
    }
}

impl Lanes for Avx2 {
    type Vector = __m256;
    type Pairs = __m256i;
    const COUNT: usize = 8;

    #[inline(always)]
    unsafe fn run<K: Kernel<Self>>(kernel: K) {
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn run<K: Kernel<Avx2>>(kernel: K) {
            // SAFETY: by the caller's promise.
            unsafe { kernel.run() }
        }
        // SAFETY: the processor has AVX2 by the caller's promise.
        unsafe { run(kernel) }
    }

    #[inline(always)]
    unsafe fn zero() -> __m256 {
        // SAFETY: AVX2 by the caller's promise.
        unsafe { _mm256_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn splat(from: *const f32) -> __m256 {
        // SAFETY: AVX2 and a valid pointer by the caller's promise.
        unsafe { _mm256_broadcast_ss(&*from) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m256 {
        // SAFETY: as above.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, vector: __m256) {
        // SAFETY: as above.
        unsafe { _mm256_storeu_ps(to, vector) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        // SAFETY: AVX2 by the caller's promise.
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul_add(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: as above.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn store_sums<const N: usize>(to: *mut f32, vectors: [__m256; N]) {
        // SAFETY: by the caller's promise.
        unsafe { store_sums(to, vectors) }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        // SAFETY: a prefetch of any address is harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }

    #[inline(always)]
    unsafe fn load_pairs(from: *const u8) -> __m256i {
        // SAFETY: AVX2 and 32 readable bytes by the caller's promise.
        unsafe { _mm256_loadu_si256(from.cast()) }
    }

    #[inline(always)]
    unsafe fn even(pairs: __m256i) -> __m256 {
        // SAFETY: AVX2 by the caller's promise.
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)) }
    }

    #[inline(always)]
    unsafe fn odd(pairs: __m256i) -> __m256 {
        // SAFETY: as above.
        unsafe {
            let mask = _mm256_set1_epi32(0xFFFF_0000_u32 as i32);
            _mm256_castsi256_ps(_mm256_and_si256(pairs, mask))
        }
    }

    #[inline(always)]
    unsafe fn bf16(from: *const u8) -> __m256 {
        // SAFETY: AVX2 and 16 readable bytes by the caller's promise.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    unsafe fn f16(from: *const u8) -> __m256 {
        // SAFETY: F16C and 16 readable bytes by the caller's promise.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }

    /// Sign, exponent and mantissa are moved to their places in an f16, whose exponent is then too
    /// small by 15 − 7; a product with 2⁸ mends that. F16C is as fast for subnormal values, which
    /// arithmetic is not.
    #[inline(always)]
    unsafe fn f8e4m3(from: *const u8) -> __m256 {
        // SAFETY: AVX2, F16C and 8 readable bytes by the caller's promise.
        unsafe {
            let codes = _mm_slli_epi16::<8>(_mm_cvtepu8_epi16(_mm_loadl_epi64(from.cast())));
            let halves =
                _mm_and_si128(_mm_srai_epi16::<1>(codes), _mm_set1_epi16(0xBFFF_u16 as i16));
            let nan = _mm_set1_epi16(0x3F80);
            let is_nan = _mm_cmpeq_epi16(_mm_and_si128(halves, nan), nan);
            let values = _mm256_cvtph_ps(_mm_or_si128(halves, is_nan));
            _mm256_mul_ps(values, _mm256_set1_ps(256.0))
        }
    }

    #[inline(always)]
    unsafe fn int4<const NIBBLE: u32>(words: __m256i) -> __m256 {
        // SAFETY: AVX2 by the caller's promise.
        unsafe {
            if NIBBLE == 7 {
                // Left in place, the highest bit would be a sign.
                return _mm256_cvtepi32_ps(_mm256_srli_epi32::<28>(words));
            }
            let mask = _mm256_set1_epi32(0xF << (4 * NIBBLE));
            _mm256_cvtepi32_ps(_mm256_and_si256(words, mask))
        }
    }

    #[inline(always)]
    unsafe fn quads(from: *const f32) -> __m256 {
        // SAFETY: AVX2 and 2 readable floats by the caller's promise.
        unsafe {
            let (low, high) = (_mm256_broadcast_ss(&*from), _mm256_broadcast_ss(&*from.add(1)));
            _mm256_blend_ps::<0xF0>(low, high)
        }
    }
}
