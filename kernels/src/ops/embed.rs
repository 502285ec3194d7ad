//! Token embedding: rows of a table.

use crate::{DType, Float, Tensor};

/// Writes the table's row of each token into the rows of `out`, converted to its type.
///
/// `table` `[vocabulary, width]` of any float type (possibly a view of a mapped file); `out`
/// `[tokens, width]`.
///
/// # Panics
/// If a token lies outside the table or shapes do not fit.
pub fn embed(table: &Tensor, tokens: &[u32], out: &mut Tensor) {
    assert_eq!((out.rows(), out.width()), (tokens.len(), table.width()));
    fn copy<T: Float>(table: &Tensor, tokens: &[u32], out: &mut Tensor) {
        let (width, narrow) = (table.width(), table.dtype().bytes());
        for (row, &token) in out.as_mut_slice::<T>().chunks_exact_mut(width).zip(tokens) {
            let bytes = table.row_bytes(token as usize).chunks_exact(narrow);
            for (value, raw) in row.iter_mut().zip(bytes) {
                *value = T::from_f32(match table.dtype() {
                    DType::F32 => bytemuck::pod_read_unaligned(raw),
                    DType::BF16 => bytemuck::pod_read_unaligned::<half::bf16>(raw).to_f32(),
                    DType::F16 => bytemuck::pod_read_unaligned::<half::f16>(raw).to_f32(),
                    other => panic!("embedding of {other}"),
                });
            }
        }
    }
    match out.dtype() {
        DType::F32 => copy::<f32>(table, tokens, out),
        DType::BF16 => copy::<half::bf16>(table, tokens, out),
        DType::F16 => copy::<half::f16>(table, tokens, out),
        other => panic!("embedding into {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_the_table_are_taken() {
        let values: Vec<half::bf16> = (0..6).map(|i| half::bf16::from_f32(i as f32)).collect();
        let table = Tensor::from_slice(&[3, 2], &values);
        let mut out = Tensor::zeros(DType::F32, &[2, 2]);
        embed(&table, &[2, 0], &mut out);
        assert_eq!(out.as_slice::<f32>(), [4.0, 5.0, 0.0, 1.0]);
    }
}
