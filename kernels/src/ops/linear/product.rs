//! The product of some rows with some outputs of a weight of any format, on one thread.
//!
//! Tiles unpack INT4 codes, and bf16 for few rows, as they read them. Else a panel of the weight
//! that fits the first-level cache is unpacked to f32 first. Both do the same arithmetic.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::{avx2::Avx2, avx512::Avx512};
use super::{
    inputs::Inputs,
    lanes::{Kernel, LANES_MAX, Lanes, int4_floats},
    portable::Portable,
    scratch::Scratch,
    tile::{Bf16, Format, Int4, Plain, Strip},
};
use crate::{DType, Fp8Weight, INT4_GROUP, Int4Weight, Isa, Tensor, Weight};

/// Weights of a piece that tiles read packed: up to an eighth of a second-level cache of 512 KiB.
const PACKED_WEIGHTS: usize = 16384;
/// Floats of an unpacked panel: half of a first-level cache of 32 KiB.
const PANEL_FLOATS: usize = 4096;
/// Floats of the rows that pass over a piece: a quarter of a second-level cache.
const BLOCK_FLOATS: usize = 32768;

/// How activations must be ordered for a weight's format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// As they are.
    Natural,
    /// In blocks of two vectors: `Lanes::even`, `Lanes::odd`.
    Bf16Pairs,
    /// In blocks of 8 vectors, as `Lanes::int4` unpacks them, each followed by its sums.
    Int4,
}

impl Order {
    /// All.
    pub(crate) const ALL: [Self; 3] = [Self::Natural, Self::Bf16Pairs, Self::Int4];

    /// The order that `weight` needs.
    pub(crate) fn of(weight: &Weight) -> Self {
        match weight {
            Weight::Float(values) if values.dtype() == DType::BF16 => Self::Bf16Pairs,
            Weight::Float(_) | Weight::Fp8(_) => Self::Natural,
            Weight::Int4(_) => Self::Int4,
        }
    }

    /// Floats that `inputs` activations take, padding included, whatever the instruction set.
    pub(crate) fn floats(self, inputs: usize) -> usize {
        match self {
            Self::Natural | Self::Bf16Pairs => padded(inputs),
            Self::Int4 => inputs.div_ceil(8 * LANES_MAX) * int4_floats(LANES_MAX),
        }
    }

    /// The most floats that `inputs` activations take in any order.
    pub(crate) fn floats_max(inputs: usize) -> usize {
        Self::ALL.map(|order| order.floats(inputs)).into_iter().max().unwrap_or(0)
    }
}

/// Sizes of the pieces in which a large product is taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pieces {
    /// Rows of a piece, at most.
    pub(crate) rows: usize,
    /// Outputs of a piece, at most.
    pub(crate) outputs: usize,
    /// Floats of working memory that [`product`] needs for a piece.
    pub(crate) work: usize,
}

impl Pieces {
    /// Pieces of a product of `rows` rows with `weight`.
    pub(crate) fn of(rows: usize, weight: &Weight) -> Self {
        let width = padded(weight.in_features()).max(1);
        let panel = match weight {
            Weight::Float(values) => values.dtype() == DType::F16,
            Weight::Int4(_) => false,
            Weight::Fp8(_) => true,
        };
        let weights = if panel { PANEL_FLOATS } else { PACKED_WEIGHTS };
        let outputs = (weights / width).clamp(8, 64) / 8 * 8;
        let work = match weight {
            Weight::Int4(_) => outputs * width.next_multiple_of(8 * LANES_MAX) / INT4_GROUP,
            _ if panel => outputs * width,
            _ => 0,
        };
        // Whole tiles of 3, 5 or 8 rows.
        let rows = rows.min((BLOCK_FLOATS / width).clamp(120, 240) / 120 * 120);
        Self { rows, outputs, work }
    }

    /// Pieces that suit two products of the same rows.
    pub(crate) fn of_both(rows: usize, weights: [&Weight; 2]) -> Self {
        let [one, other] = weights.map(|weight| Self::of(rows, weight));
        Self {
            rows: one.rows.min(other.rows),
            outputs: one.outputs.min(other.outputs),
            work: one.work.max(other.work),
        }
    }

    /// The pieces of `rows` × `outputs`.
    pub(crate) fn each(
        self,
        rows: usize,
        outputs: Range<usize>,
        mut work: impl FnMut(Range<usize>, Range<usize>),
    ) {
        for row in (0..rows).step_by(self.rows.max(1)) {
            for output in outputs.clone().step_by(self.outputs) {
                work(
                    row..rows.min(row + self.rows),
                    output..outputs.end.min(output + self.outputs),
                );
            }
        }
    }
}

/// Length to which a row of `inputs` activations is padded with zeros.
pub(crate) fn padded(inputs: usize) -> usize {
    inputs.next_multiple_of(32)
}

/// Floats from row to row of prepared activations of `width` floats: a cache line more, so that
/// the rows of a tile do not compete for the same sets of the cache.
pub(crate) fn row_pitch(width: usize) -> usize {
    width + 16
}

/// Where results go: f32 rows.
#[derive(Clone, Copy)]
pub(crate) struct Results {
    /// The first output of the first row.
    pub(crate) first: *mut f32,
    /// Floats from row to row.
    pub(crate) pitch: usize,
}

/// Writes the products of `rows` of `x` with `outputs` of `weight` to `results`, whose first
/// element belongs to the first of these rows and outputs.
///
/// # Safety
/// Rows and outputs exist; `x` is in the order of the weight and as wide as its inputs, padded;
/// `results` is valid for writes of that many rows and outputs, and no one else uses it now; rows
/// and outputs are no more than `Pieces::of` says, and `work` has the size that
/// it says. The processor has `isa`.
#[allow(clippy::too_many_arguments)]
pub(crate) unsafe fn product(
    isa: Isa,
    weight: &Weight,
    outputs: Range<usize>,
    x: &Inputs<'_>,
    rows: Range<usize>,
    results: Results,
    work: &mut Scratch,
) {
    weight.assert_consistent();
    assert!(outputs.end <= weight.out_features());
    let job = Job { weight, outputs, x, rows, results, work: work.as_mut_ptr() };
    // SAFETY: by the caller's promise.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => job.run::<Avx512>(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => job.run::<Avx2>(),
            _ => job.run::<Portable>(),
        }
    }
}

struct Job<'a> {
    weight: &'a Weight,
    outputs: Range<usize>,
    x: &'a Inputs<'a>,
    rows: Range<usize>,
    results: Results,
    work: *mut f32,
}

impl Job<'_> {
    /// # Safety
    /// That of [`product`].
    unsafe fn run<L: Lanes>(self) {
        let inputs = self.weight.in_features();
        // SAFETY: by the caller's promise; the first output of these exists.
        unsafe {
            match self.weight {
                Weight::Float(values) if values.dtype() == DType::F32 => {
                    let (first, pitch) = self.first_row(values);
                    self.strips::<L, _>(Plain { first, pitch }, inputs);
                }
                Weight::Float(values) if values.dtype() == DType::BF16 => {
                    let (first, pitch) = self.first_row(values);
                    self.strips::<L, _>(Bf16 { first, pitch }, inputs);
                }
                Weight::Float(values) => {
                    let (first, pitch) = self.first_row(values);
                    self.unpacked::<L, UnpackF16>(first, pitch, inputs);
                }
                Weight::Fp8(weight) => {
                    let (first, pitch) = self.first_row(&weight.codes);
                    self.unpack::<L, UnpackF8>(first, pitch, inputs);
                    self.scale_blocks::<L>(weight, inputs);
                    self.panel::<L>(inputs);
                }
                Weight::Int4(weight) => self.int4::<L>(weight, inputs),
            }
        }
    }

    /// Pointer to the first of the outputs in `values`, and bytes from row to row.
    fn first_row(&self, values: &Tensor) -> (*const u8, usize) {
        let pitch = values.pitch_bytes();
        (values.as_ptr().wrapping_add(self.outputs.start * pitch), pitch)
    }

    /// The products with rows of some format.
    ///
    /// # Safety
    /// `weight` has `self.outputs.len()` rows of `inputs` elements.
    unsafe fn strips<L: Lanes, F: Format<L>>(&self, weight: F, inputs: usize) {
        for row in self.rows.clone().step_by(F::TILE_OUTPUTS.len()) {
            // SAFETY: these rows exist.
            unsafe {
                match (self.rows.end - row).min(F::TILE_OUTPUTS.len()) {
                    1 => self.strip::<L, F, 1>(weight, inputs, row),
                    2 => self.strip::<L, F, 2>(weight, inputs, row),
                    3 => self.strip::<L, F, 3>(weight, inputs, row),
                    4 => self.strip::<L, F, 4>(weight, inputs, row),
                    5 => self.strip::<L, F, 5>(weight, inputs, row),
                    6 => self.strip::<L, F, 6>(weight, inputs, row),
                    7 => self.strip::<L, F, 7>(weight, inputs, row),
                    8 => self.strip::<L, F, 8>(weight, inputs, row),
                    more => unreachable!("{more} rows are no tile"),
                }
            }
        }
    }

    /// # Safety
    /// Rows `row..row + R` exist; otherwise as for `strips`.
    #[inline(always)]
    unsafe fn strip<L: Lanes, F: Format<L>, const R: usize>(
        &self,
        weight: F,
        inputs: usize,
        row: usize,
    ) {
        let x = std::array::from_fn(|r| self.x.row(row + r));
        let out = std::array::from_fn(|r| {
            let index = row - self.rows.start + r;
            self.results.first.wrapping_add(index * self.results.pitch)
        });
        let outputs = self.outputs.len();
        // SAFETY: by the caller's promise.
        unsafe { L::run(Strip::<F, R> { weight, outputs, inputs, x, out }) }
    }

    /// The products with rows of packed floats, by way of an unpacked panel.
    unsafe fn unpacked<L: Lanes, U: Unpack<L>>(
        &self,
        first: *const u8,
        pitch: usize,
        inputs: usize,
    ) {
        // SAFETY: by the caller's promise.
        unsafe {
            self.unpack::<L, U>(first, pitch, inputs);
            self.panel::<L>(inputs);
        }
    }

    unsafe fn unpack<L: Lanes, U: Unpack<L>>(&self, first: *const u8, pitch: usize, inputs: usize) {
        let (rows, to) = (self.outputs.len(), self.work);
        // SAFETY: by the caller's promise; `work` holds a panel.
        unsafe {
            L::run(Panel { first, pitch, rows, inputs, to, unpack: std::marker::PhantomData::<U> });
        }
    }

    /// The products with the panel that `unpack` made.
    unsafe fn panel<L: Lanes>(&self, inputs: usize) {
        let panel = Plain { first: self.work.cast(), pitch: padded(inputs) * 4 };
        // SAFETY: the panel was written to that size.
        unsafe { self.strips::<L, _>(panel, padded(inputs)) }
    }

    /// Multiplies the codes in the panel with the scales of their blocks.
    unsafe fn scale_blocks<L: Lanes>(&self, weight: &Fp8Weight, inputs: usize) {
        let [block_rows, block_columns] = weight.block;
        let [start_row, start_column] = weight.start;
        for (index, output) in self.outputs.clone().enumerate() {
            let scales = weight.scale.row_bytes((start_row + output) / block_rows);
            let scales: *const f32 = scales.as_ptr().cast();
            let mut column = 0;
            while column < inputs {
                let block = (start_column + column) / block_columns;
                let end = inputs.min((block + 1) * block_columns - start_column);
                // SAFETY: the panel has this row and column; the scale exists (checked when the
                // weight was made).
                unsafe {
                    let first = self.work.add(index * padded(inputs) + column);
                    let values = std::slice::from_raw_parts_mut(first, end - column);
                    L::run(Scale { values, factor: scales.add(block).read_unaligned() });
                }
                column = end;
            }
        }
    }

    unsafe fn int4<L: Lanes>(&self, weight: &Int4Weight, inputs: usize) {
        let (codes, pitch) = self.first_row(&weight.packed);
        let (first, scale_pitch) = self.first_row(&weight.scale);
        let (rows, groups, to) = (self.outputs.len(), inputs / INT4_GROUP, self.work);
        // The last block of a row reads scales for all its lanes.
        let scales = groups.next_multiple_of(L::COUNT / 4);
        // SAFETY: codes and scales of these outputs exist; `work` holds their scales, padded.
        unsafe {
            let dtype = weight.scale.dtype();
            L::run(Scales { first, pitch: scale_pitch, dtype, rows, groups, to, to_pitch: scales });
            self.strips::<L, _>(Int4 { codes, pitch, scales: to, groups: scales }, inputs);
        }
    }
}

/// How a block of packed weights becomes f32.
trait Unpack<L: Lanes> {
    /// Elements of a block: divides 32.
    const BLOCK: usize;
    /// Bytes of `elements` elements.
    fn bytes(elements: usize) -> usize;
    /// Unpacks a block.
    ///
    /// # Safety
    /// A block can be read and `BLOCK` floats written.
    unsafe fn block(from: *const u8, to: *mut f32);
}

/// Unpacks rows, padded with zeros.
struct Panel<U> {
    first: *const u8,
    pitch: usize,
    rows: usize,
    inputs: usize,
    to: *mut f32,
    unpack: std::marker::PhantomData<U>,
}

impl<L: Lanes, U: Unpack<L>> Kernel<L> for Panel<U> {
    #[inline(always)]
    unsafe fn run(self) {
        let width = padded(self.inputs);
        let whole = self.inputs / U::BLOCK * U::BLOCK;
        for row in 0..self.rows {
            // SAFETY: rows and the space for them exist by the caller's promise; the last, ragged
            // block is read from a padded copy.
            unsafe {
                let from = self.first.add(row * self.pitch);
                let to = self.to.add(row * width);
                for at in (0..whole).step_by(U::BLOCK) {
                    U::block(from.add(U::bytes(at)), to.add(at));
                }
                let mut end = whole;
                if whole < self.inputs {
                    let mut copy = [0u8; 64];
                    let bytes = U::bytes(self.inputs - whole);
                    std::ptr::copy_nonoverlapping(
                        from.add(U::bytes(whole)),
                        copy.as_mut_ptr(),
                        bytes,
                    );
                    U::block(copy.as_ptr(), to.add(whole));
                    end += U::BLOCK;
                }
                std::slice::from_raw_parts_mut(to.add(end), width - end).fill(0.0);
            }
        }
    }
}

struct UnpackF16;
struct UnpackF8;

impl<L: Lanes> Unpack<L> for UnpackF16 {
    const BLOCK: usize = L::COUNT;

    #[inline(always)]
    fn bytes(elements: usize) -> usize {
        2 * elements
    }

    #[inline(always)]
    unsafe fn block(from: *const u8, to: *mut f32) {
        // SAFETY: by the caller's promise.
        unsafe { L::store(to, L::f16(from)) }
    }
}

impl<L: Lanes> Unpack<L> for UnpackF8 {
    const BLOCK: usize = L::COUNT;

    #[inline(always)]
    fn bytes(elements: usize) -> usize {
        elements
    }

    #[inline(always)]
    unsafe fn block(from: *const u8, to: *mut f32) {
        // SAFETY: by the caller's promise.
        unsafe { L::store(to, L::f8e4m3(from)) }
    }
}

/// Multiplies values by a factor.
struct Scale<'a> {
    values: &'a mut [f32],
    factor: f32,
}

impl<L: Lanes> Kernel<L> for Scale<'_> {
    #[inline(always)]
    unsafe fn run(self) {
        for value in self.values {
            *value *= self.factor;
        }
    }
}

/// Widens the scales of INT4 rows, padded with zeros.
struct Scales {
    first: *const u8,
    pitch: usize,
    dtype: DType,
    rows: usize,
    groups: usize,
    to: *mut f32,
    to_pitch: usize,
}

impl<L: Lanes> Kernel<L> for Scales {
    #[inline(always)]
    unsafe fn run(self) {
        let Self { first, pitch, dtype, rows, groups, to, to_pitch } = self;
        // SAFETY: rows of scales and the space for them exist by the caller's promise.
        unsafe {
            if pitch == groups * dtype.bytes() && to_pitch == groups {
                super::inputs::widen::<L>(dtype, first, rows * groups, to);
                return;
            }
            for row in 0..rows {
                let to = to.add(row * to_pitch);
                super::inputs::widen::<L>(dtype, first.add(row * pitch), groups, to);
                std::slice::from_raw_parts_mut(to.add(groups), to_pitch - groups).fill(0.0);
            }
        }
    }
}
