//! Weights of linear layers, used in the form in which checkpoints store them.
//!
//! A [`Weight`] is a matrix W of shape `[out, in]` (y = x · Wᵀ), plain or quantised. Rows and
//! columns can be cut out as views, so that a tensor-parallel shard costs no copy.
//! Invariant: the parts of a quantised weight fit each other; this is checked when it is made.

use std::ops::Range;

use crate::{DType, KernelError, Result, Tensor};

/// Values that one INT4 scale belongs to, along the input dimension.
pub const INT4_GROUP: usize = 32;

/// A weight matrix `[out, in]`, row-major.
#[derive(Clone, Debug)]
pub enum Weight {
    /// Plain floats: F32, F16 or BF16.
    Float(Tensor),
    /// compressed-tensors "pack-quantized" INT4, symmetric, groups of 32 inputs.
    Int4(Int4Weight),
    /// FP8 E4M3 with one f32 multiplier for each block of the matrix.
    Fp8(Fp8Weight),
}

/// INT4 codes and their scales: W\[o, j\] = (nibble − 8) · scale\[o, j / 32\].
#[derive(Clone, Debug)]
pub struct Int4Weight {
    /// I32 `[out, in / 8]`; element j of a row is in word j / 8 at bits 4 · (j mod 8).
    pub packed: Tensor,
    /// BF16, F16 or F32 `[out, in / 32]`.
    pub scale: Tensor,
}

/// FP8 codes and their block multipliers: W\[o, j\] = code · scale\[o / 128, j / 128\].
#[derive(Clone, Debug)]
pub struct Fp8Weight {
    /// F8E4M3 `[out, in]`.
    pub codes: Tensor,
    /// F32, of all blocks that the codes touch.
    pub scale: Tensor,
    /// Rows and columns of a block.
    pub block: [usize; 2],
    /// Row and column inside the first block at which the codes start (a shard may start in the
    /// middle of a block).
    pub start: [usize; 2],
}

impl Weight {
    /// A plain weight.
    ///
    /// # Errors
    /// If the tensor is no matrix of floats.
    pub fn float(values: Tensor) -> Result<Self> {
        matrix("weight", &values)?;
        if !values.dtype().is_float() {
            let found = values.dtype();
            return Err(KernelError::WeightType {
                what: "weight",
                found,
                supported: "f32, f16, bf16",
            });
        }
        Ok(Self::Float(values.into_shared()))
    }

    /// An INT4 weight of packed words and scales.
    ///
    /// # Errors
    /// If types or shapes do not fit each other.
    pub fn int4(packed: Tensor, scale: Tensor) -> Result<Self> {
        matrix("weight_packed", &packed)?;
        matrix("weight_scale", &scale)?;
        if packed.dtype() != DType::I32 {
            let found = packed.dtype();
            return Err(KernelError::WeightType { what: "weight_packed", found, supported: "i32" });
        }
        if !scale.dtype().is_float() {
            let found = scale.dtype();
            let what = "weight_scale";
            return Err(KernelError::WeightType { what, found, supported: "f32, f16, bf16" });
        }
        let expected = vec![packed.rows(), packed.width() * 8 / INT4_GROUP];
        if scale.shape() != expected || !(packed.width() * 8).is_multiple_of(INT4_GROUP) {
            let found = scale.shape().to_vec();
            return Err(KernelError::WeightShape { what: "weight_scale", expected, found });
        }
        Ok(Self::Int4(Int4Weight { packed: packed.into_shared(), scale: scale.into_shared() }))
    }

    /// An FP8 weight of codes and block multipliers (`weight_scale_inv`).
    ///
    /// # Errors
    /// If types or shapes do not fit each other.
    pub fn fp8(codes: Tensor, scale: Tensor, block: [usize; 2]) -> Result<Self> {
        matrix("weight", &codes)?;
        matrix("weight_scale_inv", &scale)?;
        if codes.dtype() != DType::F8E4M3 {
            let found = codes.dtype();
            return Err(KernelError::WeightType { what: "weight", found, supported: "f8_e4m3" });
        }
        if scale.dtype() != DType::F32 {
            let what = "weight_scale_inv";
            let found = scale.dtype();
            return Err(KernelError::WeightType { what, found, supported: "f32" });
        }
        let expected = vec![codes.rows().div_ceil(block[0]), codes.width().div_ceil(block[1])];
        if scale.shape() != expected {
            let found = scale.shape().to_vec();
            return Err(KernelError::WeightShape { what: "weight_scale_inv", expected, found });
        }
        let (codes, scale) = (codes.into_shared(), scale.into_shared());
        Ok(Self::Fp8(Fp8Weight { codes, scale, block, start: [0, 0] }))
    }

    /// Asserts what the constructors check. Parts can be put together without them, and matrix
    /// products read through pointers.
    #[inline]
    pub(crate) fn assert_consistent(&self) {
        match self {
            Self::Float(values) => assert!(values.dtype().is_float() && values.shape().len() == 2),
            Self::Int4(Int4Weight { packed, scale }) => {
                assert!(packed.dtype() == DType::I32 && scale.dtype().is_float());
                let groups = packed.width() * 8 / INT4_GROUP;
                assert!(scale.rows() == packed.rows() && scale.width() == groups);
                assert!(packed.width().is_multiple_of(INT4_GROUP / 8));
            }
            Self::Fp8(Fp8Weight { codes, scale, block, start }) => {
                assert!(codes.dtype() == DType::F8E4M3 && scale.dtype() == DType::F32);
                let blocks = |length: usize, axis: usize| {
                    assert!(start[axis] < block[axis]);
                    (start[axis] + length).div_ceil(block[axis])
                };
                assert!(scale.rows() >= blocks(codes.rows(), 0));
                assert!(scale.width() >= blocks(codes.width(), 1));
            }
        }
    }

    /// Number of outputs (rows).
    pub fn out_features(&self) -> usize {
        match self {
            Self::Float(values) => values.rows(),
            Self::Int4(weight) => weight.packed.rows(),
            Self::Fp8(weight) => weight.codes.rows(),
        }
    }

    /// Number of inputs (columns).
    pub fn in_features(&self) -> usize {
        match self {
            Self::Float(values) => values.width(),
            Self::Int4(weight) => weight.packed.width() * 8,
            Self::Fp8(weight) => weight.codes.width(),
        }
    }

    /// Bytes that a pass over this weight reads.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Float(values) => values.bytes(),
            Self::Int4(weight) => weight.packed.bytes() + weight.scale.bytes(),
            Self::Fp8(weight) => weight.codes.bytes() + weight.scale.bytes(),
        }
    }

    /// Rows `range` as a view.
    ///
    /// # Panics
    /// If the range lies outside.
    #[must_use]
    pub fn slice_rows(&self, range: Range<usize>) -> Self {
        match self {
            Self::Float(values) => Self::Float(values.slice_rows(range)),
            Self::Int4(weight) => Self::Int4(Int4Weight {
                packed: weight.packed.slice_rows(range.clone()),
                scale: weight.scale.slice_rows(range),
            }),
            Self::Fp8(weight) => {
                let first = weight.start[0] + range.start;
                let last = weight.start[0] + range.end;
                let blocks = first / weight.block[0]..last.div_ceil(weight.block[0]);
                Self::Fp8(Fp8Weight {
                    codes: weight.codes.slice_rows(range),
                    scale: weight.scale.slice_rows(blocks),
                    block: weight.block,
                    start: [first % weight.block[0], weight.start[1]],
                })
            }
        }
    }

    /// Columns `range` as a view.
    ///
    /// # Errors
    /// [`KernelError::Unaligned`] if INT4 groups would be cut apart.
    ///
    /// # Panics
    /// If the range lies outside.
    pub fn slice_columns(&self, range: Range<usize>) -> Result<Self> {
        Ok(match self {
            Self::Float(values) => Self::Float(values.slice_columns(range)),
            Self::Int4(weight) => {
                let Range { start, end } = range;
                if start % INT4_GROUP != 0 || end % INT4_GROUP != 0 {
                    return Err(KernelError::Unaligned { start, end, multiple: INT4_GROUP });
                }
                Self::Int4(Int4Weight {
                    packed: weight.packed.slice_columns(start / 8..end / 8),
                    scale: weight.scale.slice_columns(start / INT4_GROUP..end / INT4_GROUP),
                })
            }
            Self::Fp8(weight) => {
                let first = weight.start[1] + range.start;
                let last = weight.start[1] + range.end;
                let blocks = first / weight.block[1]..last.div_ceil(weight.block[1]);
                Self::Fp8(Fp8Weight {
                    codes: weight.codes.slice_columns(range),
                    scale: weight.scale.slice_columns(blocks),
                    block: weight.block,
                    start: [weight.start[0], first % weight.block[1]],
                })
            }
        })
    }

    /// Writes row `index` as f32: code times scale, each in f32, rounded once.
    ///
    /// # Panics
    /// If there is no such row or `out` has another length than [`Weight::in_features`].
    pub fn read_row_f32(&self, index: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.in_features());
        match self {
            Self::Float(values) => values.read_row_f32(index, out),
            Self::Int4(weight) => {
                let bytes = weight.packed.row_bytes(index);
                let mut scales = vec![0.0; weight.scale.width()];
                weight.scale.read_row_f32(index, &mut scales);
                for (column, value) in out.iter_mut().enumerate() {
                    let nibble = (bytes[column / 2] >> (4 * (column % 2))) & 0xF;
                    *value = (f32::from(nibble) - 8.0) * scales[column / INT4_GROUP];
                }
            }
            Self::Fp8(weight) => {
                let mut scales = vec![0.0; weight.scale.width()];
                let block_row = (weight.start[0] + index) / weight.block[0];
                weight.scale.read_row_f32(block_row, &mut scales);
                weight.codes.read_row_f32(index, out);
                for (column, value) in out.iter_mut().enumerate() {
                    *value *= scales[(weight.start[1] + column) / weight.block[1]];
                }
            }
        }
    }

    /// The whole matrix as f32 `[out, in]`, in new memory.
    pub fn dequantize(&self) -> Tensor {
        let width = self.in_features();
        let mut tensor = Tensor::zeros(DType::F32, &[self.out_features(), width]);
        for (index, row) in tensor.as_mut_slice::<f32>().chunks_exact_mut(width.max(1)).enumerate()
        {
            self.read_row_f32(index, row);
        }
        tensor
    }
}

fn matrix(what: &'static str, tensor: &Tensor) -> Result<()> {
    if tensor.shape().len() == 2 {
        return Ok(());
    }
    let found = tensor.shape().to_vec();
    Err(KernelError::WeightShape { what, expected: vec![0, 0], found })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of the format's description: q = [4, 7, −3, −8, −5, 3, −5, −1].
    #[test]
    fn int4_unpacks_as_the_format_says() {
        let words = [0x73B3_05FCu32 as i32, 0, 0, 0];
        let scale = Tensor::from_slice(&[1, 1], &[half::bf16::from_f32(0.5)]);
        let weight = Weight::int4(Tensor::from_slice(&[1, 4], &words), scale).unwrap();
        let values = weight.dequantize().to_f32_vec();
        assert_eq!(values[..8], [2.0, 3.5, -1.5, -4.0, -2.5, 1.5, -2.5, -0.5]);
        assert!(values[8..].iter().all(|&value| value == -4.0));
    }

    /// Ragged blocks: 96 × 200 codes have one row of two blocks.
    #[test]
    fn fp8_shards_keep_their_blocks() {
        let codes: Vec<u8> = (0..96 * 200).map(|i| (i % 0x77) as u8).collect();
        let bytes: crate::SharedBytes = std::sync::Arc::new(codes);
        let codes = Tensor::from_shared(DType::F8E4M3, &[96, 200], bytes, 0).unwrap();
        let scale = Tensor::from_slice(&[1, 2], &[2.0f32, 4.0]);
        let weight = Weight::fp8(codes, scale, [128, 128]).unwrap();
        let whole = weight.dequantize().to_f32_vec();
        let shard = weight.slice_rows(5..70).slice_columns(100..180).unwrap();
        let cut = shard.slice_rows(3..9).slice_columns(20..60).unwrap();
        for (view, row, column) in [(&shard, 5, 100), (&cut, 8, 120)] {
            let values = view.dequantize().to_f32_vec();
            for o in 0..view.out_features() {
                for j in 0..view.in_features() {
                    let expected = whole[(row + o) * 200 + column + j];
                    assert_eq!(values[o * view.in_features() + j], expected);
                }
            }
        }
    }

    #[test]
    fn int4_groups_are_not_cut() {
        let packed = Tensor::from_slice(&[2, 8], &[0i32; 16]);
        let scale = Tensor::from_slice(&[2, 2], &[1.0f32; 4]);
        let weight = Weight::int4(packed, scale).unwrap();
        assert!(matches!(weight.slice_columns(0..16), Err(KernelError::Unaligned { .. })));
        assert_eq!(weight.slice_columns(32..64).unwrap().in_features(), 32);
    }
}
