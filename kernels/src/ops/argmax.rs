//! The largest element of each row.

use crate::{Stream, Tensor, lanes::multiversion};

/// Index of the largest element of each row of f32 `logits` `[rows, vocabulary]`; the first one
/// on ties. NaN never wins; a row of nothing but NaN gives 0.
///
/// # Panics
/// If `out` has another length than there are rows.
pub fn argmax(stream: &Stream, logits: &Tensor, out: &mut [u32]) {
    assert_eq!(out.len(), logits.rows());
    let width = logits.width();
    for (row, index) in logits.as_slice::<f32>().chunks_exact(width).zip(out) {
        *index = argmax_row(stream.isa(), row);
    }
}

multiversion! {
    /// Index of the first largest element.
    pub(crate) fn argmax_row[](values: &[f32]) -> u32 = argmax_row_body
}

#[inline(always)]
fn argmax_row_body<const FMA: bool, const N: usize>(values: &[f32]) -> u32 {
    let mut lanes = [f32::NEG_INFINITY; N];
    let chunks = values.chunks_exact(N);
    let tail = chunks.remainder();
    for chunk in chunks {
        for lane in 0..N {
            lanes[lane] = if chunk[lane] > lanes[lane] { chunk[lane] } else { lanes[lane] };
        }
    }
    let largest =
        lanes.iter().chain(tail).fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
    values.iter().position(|&value| value == largest).unwrap_or(0) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;

    #[test]
    fn first_of_the_largest() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for length in [1, 2, 17, 64, 1001] {
                for at in [0, length / 2, length - 1] {
                    let mut values = vec![-1.0f32; length];
                    values[at] = 2.0;
                    values[length - 1] = 2.0;
                    assert_eq!(argmax_row(isa, &values), at as u32);
                }
            }
            assert_eq!(argmax_row(isa, &[f32::NAN, 1.0, f32::NAN]), 1);
            assert_eq!(argmax_row(isa, &[f32::NAN]), 0);
            assert_eq!(argmax_row(isa, &[f32::NEG_INFINITY; 3]), 0);
        }
    }
}
