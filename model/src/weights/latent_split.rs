//! Splitting `kv_b_proj` into its key part and its value part.
//!
//! A head's rows are dn rows for its keys, then dv rows for its values, so the two parts of all
//! heads are gathered into new memory: floats in the type of the file, packed weights as f32
//! (DeepSeek-V2, appendix C, multiplies them into the query and the output).

use half::{bf16, f16};
use paceline_kernels::{DType, Float, Tensor, Weight};

/// The parts of `kv_b_proj`; heads one after the other, r columns of the latent.
pub(super) struct Parts {
    /// `[heads * dn, r]`.
    pub(super) key_up: Tensor,
    /// `[heads * r, dn]`: each head of `key_up` transposed.
    pub(super) key_up_transposed: Tensor,
    /// `[heads * dv, r]`.
    pub(super) value_up: Tensor,
}

/// Splits `[heads * (dn + dv), r]`.
pub(super) fn split(weight: &Weight, dn: usize, dv: usize) -> Parts {
    match weight {
        Weight::Float(values) => match values.dtype() {
            DType::BF16 => gather::<bf16>(values, dn, dv),
            DType::F16 => gather::<f16>(values, dn, dv),
            _ => gather::<f32>(values, dn, dv),
        },
        packed => gather::<f32>(&packed.dequantize(), dn, dv),
    }
}

fn gather<T: Float>(values: &Tensor, dn: usize, dv: usize) -> Parts {
    let width = values.width();
    let heads = values.rows() / (dn + dv);
    let mut key_up = Tensor::zeros(T::DTYPE, &[heads * dn, width]);
    let mut key_up_transposed = Tensor::zeros(T::DTYPE, &[heads * width, dn]);
    let mut value_up = Tensor::zeros(T::DTYPE, &[heads * dv, width]);
    // Rows are copied as bytes, since a mapped file need not be aligned for T.
    let copy = |tensor: &mut Tensor, to: usize, from: usize| {
        let row = &mut tensor.as_mut_slice::<T>()[to * width..(to + 1) * width];
        bytemuck::cast_slice_mut::<T, u8>(row).copy_from_slice(values.row_bytes(from));
    };
    for head in 0..heads {
        let first = head * (dn + dv);
        for row in 0..dn {
            copy(&mut key_up, head * dn + row, first + row);
        }
        for row in 0..dv {
            copy(&mut value_up, head * dv + row, first + dn + row);
        }
    }
    let (source, target) = (key_up.as_slice::<T>(), key_up_transposed.as_mut_slice::<T>());
    let per_head = (dn * width).max(1);
    for (from, to) in source.chunks_exact(per_head).zip(target.chunks_exact_mut(per_head)) {
        for (row, values) in from.chunks_exact(width).enumerate() {
            for (column, &value) in values.iter().enumerate() {
                to[column * dn + row] = value;
            }
        }
    }
    Parts {
        key_up: key_up.into_shared(),
        key_up_transposed: key_up_transposed.into_shared(),
        value_up: value_up.into_shared(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two heads, dn = 2, dv = 1, r = 3; the value names head, row and column.
    #[test]
    fn rows_are_gathered_head_by_head() {
        let value =
            |head: usize, row: usize, column: usize| (head * 100 + row * 10 + column) as f32;
        let mut values = Vec::new();
        for head in 0..2 {
            for row in 0..3 {
                values.extend((0..3).map(|column| bf16::from_f32(value(head, row, column))));
            }
        }
        let weight = Weight::float(Tensor::from_slice(&[6, 3], &values)).unwrap();
        let parts = split(&weight, 2, 1);
        assert_eq!(parts.key_up.dtype(), DType::BF16);
        assert_eq!(parts.key_up.shape(), [4, 3]);
        assert_eq!(parts.key_up_transposed.shape(), [6, 2]);
        assert_eq!(parts.value_up.to_f32_vec(), [20.0, 21.0, 22.0, 120.0, 121.0, 122.0]);
        let key = parts.key_up.to_f32_vec();
        let transposed = parts.key_up_transposed.to_f32_vec();
        for head in 0..2 {
            for row in 0..2 {
                for column in 0..3 {
                    let expected = value(head, row, column);
                    assert_eq!(key[(head * 2 + row) * 3 + column], expected);
                    assert_eq!(transposed[(head * 3 + column) * 2 + row], expected);
                }
            }
        }
    }
}
