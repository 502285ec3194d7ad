//! RMSNorm, and the sum of a residual stream.
//!
//! RMS(x, w) = w ⊙ x / sqrt(mean(x²) + ε), statistics in f32, rounded once.

use crate::{
    DType, Float, Stream, Tensor,
    lanes::{fma, multiversion, tree_sum},
    ops::rows::{RowsMut, for_rows},
};

/// Writes RMS(x, weight) into columns `column..column + width` of `out`.
///
/// `x` and `out` `[rows, …]` in f32, f16 or bf16; `weight` f32 `[width]`.
///
/// # Panics
/// If shapes or types do not fit.
pub fn rms_norm(
    stream: &Stream,
    x: &Tensor,
    weight: &Tensor,
    epsilon: f32,
    out: &mut Tensor,
    column: usize,
) {
    assert_eq!(x.rows(), out.rows());
    assert_eq!(x.dtype(), out.dtype());
    assert!(weight.len() == x.width() && column + x.width() <= out.width());
    match x.dtype() {
        DType::F32 => norm_rows::<f32>(stream, x, weight, epsilon, out, column),
        DType::BF16 => norm_rows::<half::bf16>(stream, x, weight, epsilon, out, column),
        DType::F16 => norm_rows::<half::f16>(stream, x, weight, epsilon, out, column),
        other => panic!("RMSNorm of {other}"),
    }
}

/// residual += delta, in f32, rounded once. Both `[rows, width]` of one type.
///
/// # Panics
/// If shapes or types do not fit.
pub fn add(stream: &Stream, residual: &mut Tensor, delta: &Tensor) {
    assert_eq!(residual.shape(), delta.shape());
    match residual.dtype() {
        DType::F32 => add_rows::<f32>(stream, residual, delta),
        DType::BF16 => add_rows::<half::bf16>(stream, residual, delta),
        DType::F16 => add_rows::<half::f16>(stream, residual, delta),
        other => panic!("sum of {other}"),
    }
}

/// Rows of a width of a few hundred are worth a thread of their own in groups of this many.
const ROWS_A_THREAD: usize = 32;

fn norm_rows<T: Float>(
    stream: &Stream,
    x: &Tensor,
    weight: &Tensor,
    epsilon: f32,
    out: &mut Tensor,
    column: usize,
) {
    let width = x.width();
    let (source, weight) = (x.as_slice::<T>(), weight.as_slice::<f32>());
    for_rows(stream, RowsMut::<T>::new(out), ROWS_A_THREAD, |row, target| {
        let input = &source[row * width..(row + 1) * width];
        norm_row(stream.isa(), input, weight, epsilon, &mut target[column..column + width]);
    });
}

fn add_rows<T: Float>(stream: &Stream, residual: &mut Tensor, delta: &Tensor) {
    let width = delta.width();
    let source = delta.as_slice::<T>();
    for_rows(stream, RowsMut::<T>::new(residual), ROWS_A_THREAD, |row, target| {
        for (value, &more) in target.iter_mut().zip(&source[row * width..]) {
            *value = T::from_f32(value.to_f32() + more.to_f32());
        }
    });
}

multiversion! {
    /// One row of RMSNorm.
    pub(crate) fn norm_row[T: Float](x: &[T], weight: &[f32], epsilon: f32, out: &mut [T])
        = norm_row_body
}

#[inline(always)]
fn norm_row_body<const FMA: bool, const N: usize, T: Float>(
    x: &[T],
    weight: &[f32],
    epsilon: f32,
    out: &mut [T],
) {
    let mut lanes = [0.0f32; N];
    let chunks = x.chunks_exact(N);
    let tail = chunks.remainder();
    for chunk in chunks {
        for lane in 0..N {
            let value = chunk[lane].to_f32();
            lanes[lane] = fma::<FMA>(value, value, lanes[lane]);
        }
    }
    for (lane, value) in tail.iter().enumerate() {
        lanes[lane] = fma::<FMA>(value.to_f32(), value.to_f32(), lanes[lane]);
    }
    let scale = 1.0 / (tree_sum(lanes) / x.len() as f32 + epsilon).sqrt();
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = T::from_f32(x.to_f32() * scale * weight);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;

    fn reference(x: &[f32], weight: &[f32], epsilon: f64) -> Vec<f64> {
        let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (mean + epsilon).sqrt();
        x.iter().zip(weight).map(|(&v, &w)| f64::from(v) * scale * f64::from(w)).collect()
    }

    #[test]
    fn equals_the_formula_on_odd_widths() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let stream = Stream::host(2).unwrap().with_isa(isa);
            for (rows, width) in [(1, 1), (3, 7), (40, 256), (2, 1031)] {
                let x: Vec<f32> =
                    (0..rows * width).map(|i| ((i * 37) % 101) as f32 - 50.0).collect();
                let weight: Vec<f32> = (0..width).map(|i| 0.5 + (i % 5) as f32).collect();
                let mut out = Tensor::zeros(DType::F32, &[rows, width + 3]);
                let input = Tensor::from_slice(&[rows, width], &x);
                let weights = Tensor::from_slice(&[width], &weight);
                rms_norm(&stream, &input, &weights, 1e-6, &mut out, 2);
                for row in 0..rows {
                    let expected = reference(&x[row * width..(row + 1) * width], &weight, 1e-6);
                    let got = &out.as_slice::<f32>()[row * (width + 3) + 2..];
                    for (got, expected) in got.iter().zip(&expected) {
                        assert!(
                            (f64::from(*got) - expected).abs() <= 1e-5 * expected.abs().max(1e-3)
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn residuals_are_added() {
        let stream = Stream::host(1).unwrap();
        let mut residual = Tensor::from_slice(&[2, 2], &[1.0f32, 2.0, 3.0, 4.0]);
        let delta = Tensor::from_slice(&[2, 2], &[2.0f32, 2.0, 1.0, 0.0]);
        add(&stream, &mut residual, &delta);
        assert_eq!(residual.as_slice::<f32>(), [3.0, 4.0, 4.0, 4.0]);
    }
}
