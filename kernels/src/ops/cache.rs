//! Writing rows into paged caches, reading them back, and moving them.
//!
//! A cache is a tensor `[slots, width]`; a block table (kept by the caller) says which slot holds
//! which position. Invariant: a slot's contents depend on the row written only.

use std::ops::Range;

use crate::{
    DType, Float, Stream, Tensor,
    ops::{norm::norm_row, rope::RopeAngles, rows::RowsMut},
};

/// Stores latent rows of multi-head latent attention: `latent` `[rows, r + dr]` is the output of
/// `kv_a_proj_with_mqa`; its first r values are normalised (RMS, `norm` f32 `[r]`), its last dr
/// values are turned, and both go to the slot of their row (DeepSeek-V2, section 2.1).
///
/// # Panics
/// If shapes or types do not fit, or a slot lies outside the cache.
pub fn store_latent(
    stream: &Stream,
    latent: &Tensor,
    norm: &Tensor,
    epsilon: f32,
    angles: &RopeAngles,
    slots: &[u32],
    cache: &mut Tensor,
) {
    assert_eq!(latent.rows(), slots.len());
    assert!(latent.width() == cache.width() && latent.dtype() == cache.dtype());
    assert_eq!(norm.len() + angles.dim(), cache.width());
    match cache.dtype() {
        DType::F32 => store::<f32>(stream, latent, norm, epsilon, angles, slots, cache),
        DType::BF16 => store::<half::bf16>(stream, latent, norm, epsilon, angles, slots, cache),
        DType::F16 => store::<half::f16>(stream, latent, norm, epsilon, angles, slots, cache),
        other => panic!("latent cache of {other}"),
    }
}

fn store<T: Float>(
    stream: &Stream,
    latent: &Tensor,
    norm: &Tensor,
    epsilon: f32,
    angles: &RopeAngles,
    slots: &[u32],
    cache: &mut Tensor,
) {
    let (width, rank) = (cache.width(), norm.len());
    let source = latent.as_slice::<T>();
    let cache = RowsMut::<T>::new(cache);
    for (row, &slot) in slots.iter().enumerate() {
        // SAFETY: one slice is alive at a time.
        let target = unsafe { cache.part(slot as usize, 0..width) };
        let input = &source[row * width..(row + 1) * width];
        norm_row(stream.isa(), &input[..rank], norm.as_slice(), epsilon, &mut target[..rank]);
        target[rank..].copy_from_slice(&input[rank..]);
        angles.rotate(row, &mut target[rank..]);
    }
}

/// Copies row i of `x` `[rows, width]` to columns `column..` of slot `slots[i]`.
///
/// # Panics
/// If shapes or types do not fit, or a slot lies outside the cache.
pub fn scatter_rows(x: &Tensor, slots: &[u32], cache: &mut Tensor, column: usize) {
    assert_eq!((x.rows(), x.dtype()), (slots.len(), cache.dtype()));
    fn scatter<T: Float>(x: &Tensor, slots: &[u32], cache: &mut Tensor, column: usize) {
        let (width, wide) = (x.width(), cache.width());
        assert!(column + width <= wide);
        let cache = cache.as_mut_slice::<T>();
        for (row, &slot) in x.as_slice::<T>().chunks_exact(width).zip(slots) {
            let start = slot as usize * wide + column;
            cache[start..start + width].copy_from_slice(row);
        }
    }
    match x.dtype() {
        DType::F32 => scatter::<f32>(x, slots, cache, column),
        DType::BF16 => scatter::<half::bf16>(x, slots, cache, column),
        DType::F16 => scatter::<half::f16>(x, slots, cache, column),
        other => panic!("cache of {other}"),
    }
}

/// Copies columns `column..column + out.width()` of the slots into the rows of `out`.
///
/// # Panics
/// If shapes or types do not fit, or a slot lies outside the cache.
pub fn gather_rows(cache: &Tensor, slots: &[u32], column: usize, out: &mut Tensor) {
    assert_eq!((out.rows(), out.dtype()), (slots.len(), cache.dtype()));
    fn gather<T: Float>(cache: &Tensor, slots: &[u32], column: usize, out: &mut Tensor) {
        let (width, wide) = (out.width(), cache.width());
        let cache = cache.as_slice::<T>();
        for (row, &slot) in out.as_mut_slice::<T>().chunks_exact_mut(width).zip(slots) {
            let start = slot as usize * wide + column;
            row.copy_from_slice(&cache[start..start + width]);
        }
    }
    match out.dtype() {
        DType::F32 => gather::<f32>(cache, slots, column, out),
        DType::BF16 => gather::<half::bf16>(cache, slots, column, out),
        DType::F16 => gather::<half::f16>(cache, slots, column, out),
        other => panic!("cache of {other}"),
    }
}

/// Copies row `rows[i]` of `x` to row `places.start + i` of `out`, of the same width and type.
///
/// # Panics
/// If shapes or types do not fit, or a row lies outside.
pub fn copy_rows(x: &Tensor, rows: &[u32], out: &mut Tensor, places: Range<u32>) {
    assert_eq!((x.width(), x.dtype()), (out.width(), out.dtype()));
    assert_eq!(rows.len(), places.len());
    fn copy<T: Float>(x: &Tensor, rows: &[u32], out: &mut Tensor, places: Range<u32>) {
        let width = x.width();
        let x = x.as_slice::<T>();
        let out = &mut out.as_mut_slice::<T>()[places.start as usize * width..];
        for (&row, target) in rows.iter().zip(out.chunks_exact_mut(width)) {
            target.copy_from_slice(&x[row as usize * width..(row as usize + 1) * width]);
        }
    }
    match x.dtype() {
        DType::F32 => copy::<f32>(x, rows, out, places),
        DType::BF16 => copy::<half::bf16>(x, rows, out, places),
        DType::F16 => copy::<half::f16>(x, rows, out, places),
        other => panic!("copy of {other}"),
    }
}

/// Copies whole slots, one after the other in the order given: after an accepted tree path, the
/// rows of the path move to where a chain would have put them.
///
/// # Panics
/// If a slot lies outside the cache.
pub fn move_slots(cache: &mut Tensor, moves: &[(u32, u32)]) {
    fn apply<T: Float>(cache: &mut Tensor, moves: &[(u32, u32)]) {
        let width = cache.width();
        let values = cache.as_mut_slice::<T>();
        for &(from, to) in moves {
            let start = from as usize * width;
            values.copy_within(start..start + width, to as usize * width);
        }
    }
    match cache.dtype() {
        DType::F32 => apply::<f32>(cache, moves),
        DType::BF16 => apply::<half::bf16>(cache, moves),
        DType::F16 => apply::<half::f16>(cache, moves),
        other => panic!("cache of {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::rope::Pairing;

    #[test]
    fn latent_rows_are_normalised_turned_and_placed() {
        let stream = Stream::host(1).unwrap();
        let latent = Tensor::from_slice(&[2, 4], &[3.0f32, 4.0, 1.0, 0.0, 6.0, 8.0, 0.0, 1.0]);
        let norm = Tensor::from_slice(&[2], &[1.0f32, 2.0]);
        let mut angles =
            RopeAngles::new(vec![std::f32::consts::FRAC_PI_2], 1.0, Pairing::Interleaved, 2);
        angles.set_positions(&[1, 2]);
        let mut cache = Tensor::zeros(DType::F32, &[5, 4]);
        store_latent(&stream, &latent, &norm, 0.0, &angles, &[4, 1], &mut cache);
        let root = 12.5f32.sqrt();
        let expected = [3.0 / root, 8.0 / root, 0.0, 1.0];
        for (row, turned) in [(4, [0.0, 1.0]), (1, [0.0, -1.0])] {
            let got = &cache.as_slice::<f32>()[row * 4..row * 4 + 4];
            for (got, expected) in got.iter().zip([expected[0], expected[1], turned[0], turned[1]])
            {
                assert!((got - expected).abs() < 1e-6, "{got} {expected}");
            }
        }
        assert!(cache.as_slice::<f32>()[..4].iter().all(|&value| value == 0.0));
    }

    #[test]
    fn rows_scatter_gather_and_move() {
        let x = Tensor::from_slice(&[2, 1], &[7.0f32, 9.0]);
        let mut cache = Tensor::zeros(DType::F32, &[4, 2]);
        scatter_rows(&x, &[3, 1], &mut cache, 1);
        assert_eq!(cache.as_slice::<f32>(), [0.0, 0.0, 0.0, 9.0, 0.0, 0.0, 0.0, 7.0]);
        move_slots(&mut cache, &[(3, 0), (0, 2)]);
        let mut out = Tensor::zeros(DType::F32, &[3, 1]);
        gather_rows(&cache, &[0, 1, 2], 1, &mut out);
        assert_eq!(out.as_slice::<f32>(), [7.0, 9.0, 7.0]);
    }
}
