//! Vectors of sixteen lanes with AVX-512 F, BW, VL and DQ.

use std::arch::x86_64::*;

use super::{
    avx2,
    lanes::{Kernel, Lanes},
};

/// Sixteen lanes.
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

impl Lanes for Avx512 {
    type Vector = __m512;
    type Pairs = __m512i;
    const COUNT: usize = 16;

    #[inline(always)]
    unsafe fn run<K: Kernel<Self>>(kernel: K) {
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
        unsafe fn run<K: Kernel<Avx512>>(kernel: K) {
            // SAFETY: by the caller's promise.
            unsafe { kernel.run() }
        }
        // SAFETY: the processor has AVX-512 by the caller's promise.
        unsafe { run(kernel) }
    }

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        // SAFETY: AVX-512 by the caller's promise.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn splat(from: *const f32) -> __m512 {
        // SAFETY: AVX-512 and a valid pointer by the caller's promise.
        unsafe { _mm512_set1_ps(from.read()) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, vector: __m512) {
        // SAFETY: as above.
        unsafe { _mm512_storeu_ps(to, vector) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: AVX-512 by the caller's promise.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn store_sums<const N: usize>(to: *mut f32, vectors: [__m512; N]) {
        // SAFETY: AVX-512 and room for `N` floats by the caller's promise.
        unsafe {
            let mut halves = [_mm256_setzero_ps(); N];
            for (half, vector) in halves.iter_mut().zip(vectors) {
                let (low, high) =
                    (_mm512_castps512_ps256(vector), _mm512_extractf32x8_ps::<1>(vector));
                *half = _mm256_add_ps(low, high);
            }
            avx2::store_sums(to, halves);
        }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        // SAFETY: a prefetch of any address is harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }

    #[inline(always)]
    unsafe fn load_pairs(from: *const u8) -> __m512i {
        // SAFETY: AVX-512 and 64 readable bytes by the caller's promise.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    unsafe fn even(pairs: __m512i) -> __m512 {
        // SAFETY: AVX-512 by the caller's promise.
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)) }
    }

    #[inline(always)]
    unsafe fn odd(pairs: __m512i) -> __m512 {
        // SAFETY: as above.
        unsafe {
            let mask = _mm512_set1_epi32(0xFFFF_0000_u32 as i32);
            _mm512_castsi512_ps(_mm512_and_si512(pairs, mask))
        }
    }

    #[inline(always)]
    unsafe fn bf16(from: *const u8) -> __m512 {
        // SAFETY: AVX-512 and 32 readable bytes by the caller's promise.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    unsafe fn f16(from: *const u8) -> __m512 {
        // SAFETY: AVX-512 and 32 readable bytes by the caller's promise.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    /// As with AVX2.
    #[inline(always)]
    unsafe fn f8e4m3(from: *const u8) -> __m512 {
        // SAFETY: AVX-512 and 16 readable bytes by the caller's promise.
        unsafe {
            let wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(from.cast()));
            let moved = _mm256_srai_epi16::<1>(_mm256_slli_epi16::<8>(wide));
            let halves = _mm256_and_si256(moved, _mm256_set1_epi16(0xBFFF_u16 as i16));
            let nan = _mm256_set1_epi16(0x3F80);
            let is_nan = _mm256_cmpeq_epi16(_mm256_and_si256(halves, nan), nan);
            let values = _mm512_cvtph_ps(_mm256_or_si256(halves, is_nan));
            _mm512_mul_ps(values, _mm512_set1_ps(256.0))
        }
    }

    #[inline(always)]
    unsafe fn int4<const NIBBLE: u32>(words: __m512i) -> __m512 {
        // SAFETY: AVX-512 by the caller's promise.
        unsafe {
            if NIBBLE == 7 {
                // Left in place, the highest bit would be a sign.
                return _mm512_cvtepi32_ps(_mm512_srli_epi32::<28>(words));
            }
            let mask = _mm512_set1_epi32(0xF << (4 * NIBBLE));
            _mm512_cvtepi32_ps(_mm512_and_si512(words, mask))
        }
    }

    #[inline(always)]
    unsafe fn quads(from: *const f32) -> __m512 {
        // SAFETY: AVX-512 and 4 readable floats by the caller's promise.
        unsafe {
            let four = _mm512_castps128_ps512(_mm_loadu_ps(from));
            let places = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
            _mm512_permutexvar_ps(places, four)
        }
    }
}
