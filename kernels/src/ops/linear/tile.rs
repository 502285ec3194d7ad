//! Tiles: the dot products of a few rows with a few outputs at a time.
//!
//! A tile of R rows and O outputs keeps R · O vectors of partial sums in registers, so that each
//! weight that is loaded and unpacked serves R rows and each activation O outputs. Invariant: the
//! operations on one partial sum are the same, in the same order, for every R and O.
//!
//! Loops here are plain ones: a closure given to `map` is compiled without the instruction set.

#![allow(clippy::needless_range_loop)]

use std::{hint::black_box, mem::MaybeUninit};

use super::lanes::{Kernel, Lanes, int4_floats};

/// Weights in a form that a tile can read: rows of blocks.
pub(super) trait Format<L: Lanes>: Copy {
    /// Where a row of the weight lies.
    type Row: Copy;
    /// Elements of a block.
    const BLOCK: usize;
    /// Bytes of a block.
    const BLOCK_BYTES: usize;
    /// Activations of a block, as prepared.
    const BLOCK_FLOATS: usize;
    /// Bits of an element.
    const ELEMENT_BITS: usize;
    /// Outputs of a tile of 1, 2, … rows: 1, 2, 4 or 8, as the 16 registers of AVX2 allow.
    const TILE_OUTPUTS: &[usize];

    /// Row `index` of the weight.
    ///
    /// # Safety
    /// There is such a row.
    unsafe fn row(&self, index: usize) -> Self::Row;

    /// The row whose block 0 is a copy, at `copy`, of block `block` of `row`.
    fn row_at(row: Self::Row, block: usize, copy: *const u8) -> Self::Row;

    /// Adds the products of block `block` of the `rows` with the activations at `x` (already at
    /// this block) to the partial sums.
    ///
    /// # Safety
    /// The block lies inside the rows, and `x` points to `BLOCK_FLOATS` floats each.
    unsafe fn accumulate<const O: usize, const R: usize>(
        rows: &[Self::Row; O],
        block: usize,
        x: &[*const f32; R],
        sums: &mut [[L::Vector; O]; R],
    );

    /// Bytes from which the row's block `block` is read.
    fn block_at(row: Self::Row, block: usize) -> *const u8;

    /// Where the row's weights begin, if they are read from where the checkpoint keeps them:
    /// memory that is not in a cache yet. `None` for unpacked copies.
    fn stored_at(row: Self::Row) -> Option<*const u8>;
}

/// How far ahead of the weights in use others are asked for, in bytes. A tile reads several rows
/// at a time in short strides, which the processor's own prefetcher does not follow.
const AHEAD_BYTES: usize = 4096;
const LINE_BYTES: usize = 64;

/// The products of `R` rows with the first `outputs` rows of a weight.
pub(super) struct Strip<F, const R: usize> {
    /// The weight.
    pub(super) weight: F,
    /// Outputs.
    pub(super) outputs: usize,
    /// Elements of a dot product.
    pub(super) inputs: usize,
    /// The rows: activations in the order of the format, padded with zeros to whole blocks.
    pub(super) x: [*const f32; R],
    /// Where the first output of each row goes.
    pub(super) out: [*mut f32; R],
}

impl<L: Lanes, F: Format<L>, const R: usize> Kernel<L> for Strip<F, R> {
    #[inline(always)]
    unsafe fn run(self) {
        let mut done = 0;
        // SAFETY: the tiles together cover each output once.
        unsafe {
            match F::TILE_OUTPUTS[R - 1] {
                8 => self.tiles::<L, 8, 8>(&mut done),
                4 => self.tiles::<L, 4, 4>(&mut done),
                2 => self.tiles::<L, 2, 4>(&mut done),
                _ => self.tiles::<L, 1, 4>(&mut done),
            }
            self.tiles::<L, 1, 1>(&mut done);
        }
    }
}

impl<F, const R: usize> Strip<F, R> {
    /// Tiles of `O` outputs, as long as `N` outputs are left, whose lanes are added together.
    #[inline(always)]
    unsafe fn tiles<L: Lanes, const O: usize, const N: usize>(&self, done: &mut usize)
    where
        F: Format<L>,
    {
        // SAFETY: these outputs exist, and so does the space for them.
        unsafe {
            while *done + N <= self.outputs {
                // Finished sums are put into memory that the compiler cannot see through: it would
                // keep them in registers, and in exchange those of the next tile in memory.
                let mut sums = MaybeUninit::<[[L::Vector; N]; R]>::uninit();
                let vectors: *mut L::Vector = black_box(sums.as_mut_ptr()).cast();
                for first in (0..N).step_by(O) {
                    let tile = self.tile::<L, O>(*done + first);
                    for r in 0..R {
                        for o in 0..O {
                            vectors.add(r * N + first + o).write(tile[r][o]);
                        }
                    }
                }
                let sums = sums.assume_init();
                for r in 0..R {
                    L::store_sums(self.out[r].add(*done), sums[r]);
                }
                *done += N;
            }
        }
    }

    /// The partial sums of `O` outputs.
    #[inline(always)]
    unsafe fn tile<L: Lanes, const O: usize>(&self, first: usize) -> [[L::Vector; O]; R]
    where
        F: Format<L>,
    {
        // SAFETY: rows, blocks and activations exist as `Strip` says; a ragged last block is read
        // from a copy padded with zeros.
        unsafe {
            let mut rows = [self.weight.row(first); O];
            for (o, row) in rows.iter_mut().enumerate() {
                *row = self.weight.row(first + o);
            }
            let mut sums = [[L::zero(); O]; R];
            let blocks = self.inputs / F::BLOCK;
            let ahead = F::stored_at(rows[0]).map(|at| at.wrapping_add(AHEAD_BYTES));
            for block in 0..blocks {
                if let Some(ahead) = ahead {
                    // Rows follow each other, so a tile's blocks together are a stretch of memory.
                    let step = O * F::BLOCK_BYTES;
                    for line in (0..step).step_by(LINE_BYTES) {
                        L::prefetch(ahead.wrapping_add(block * step + line));
                    }
                }
                let mut x = self.x;
                for x in &mut x {
                    *x = x.add(block * F::BLOCK_FLOATS);
                }
                F::accumulate(&rows, block, &x, &mut sums);
            }
            let rest = self.inputs % F::BLOCK;
            if rest > 0 {
                let mut copies = [[0u8; 64]; O];
                for (row, copy) in rows.iter_mut().zip(&mut copies) {
                    let (from, bytes) = (F::block_at(*row, blocks), rest * F::ELEMENT_BITS / 8);
                    std::ptr::copy_nonoverlapping(from, copy.as_mut_ptr(), bytes);
                    *row = F::row_at(*row, blocks, copy.as_ptr());
                }
                let mut x = self.x;
                for x in &mut x {
                    *x = x.add(blocks * F::BLOCK_FLOATS);
                }
                F::accumulate(&rows, 0, &x, &mut sums);
            }
            sums
        }
    }
}

/// Rows of f32, or of anything unpacked to f32.
#[derive(Clone, Copy)]
pub(super) struct Plain {
    /// First row.
    pub(super) first: *const u8,
    /// Bytes from row to row.
    pub(super) pitch: usize,
}

impl<L: Lanes> Format<L> for Plain {
    type Row = *const u8;
    const BLOCK: usize = L::COUNT;
    const BLOCK_BYTES: usize = 4 * L::COUNT;
    const BLOCK_FLOATS: usize = L::COUNT;
    const ELEMENT_BITS: usize = 32;
    const TILE_OUTPUTS: &[usize] = &[8, 4, 4];

    #[inline(always)]
    unsafe fn row(&self, index: usize) -> *const u8 {
        // SAFETY: the row exists by the caller's promise.
        unsafe { self.first.add(index * self.pitch) }
    }

    #[inline(always)]
    fn row_at(_row: *const u8, _block: usize, copy: *const u8) -> *const u8 {
        copy
    }

    #[inline(always)]
    fn block_at(row: *const u8, block: usize) -> *const u8 {
        row.wrapping_add(block * L::COUNT * 4)
    }

    #[inline(always)]
    fn stored_at(_row: *const u8) -> Option<*const u8> {
        None
    }

    #[inline(always)]
    unsafe fn accumulate<const O: usize, const R: usize>(
        rows: &[*const u8; O],
        block: usize,
        x: &[*const f32; R],
        sums: &mut [[L::Vector; O]; R],
    ) {
        // SAFETY: the block and the activations exist by the caller's promise.
        unsafe {
            let mut values = [L::zero(); R];
            for r in 0..R {
                values[r] = L::load(x[r]);
            }
            for o in 0..O {
                let weights = L::load(rows[o].add(block * L::COUNT * 4).cast());
                for r in 0..R {
                    sums[r][o] = L::mul_add(weights, values[r], sums[r][o]);
                }
            }
        }
    }
}

/// Rows of bf16.
#[derive(Clone, Copy)]
pub(super) struct Bf16 {
    /// First row.
    pub(super) first: *const u8,
    /// Bytes from row to row.
    pub(super) pitch: usize,
}

impl<L: Lanes> Format<L> for Bf16 {
    type Row = *const u8;
    const BLOCK: usize = 2 * L::COUNT;
    const BLOCK_BYTES: usize = 4 * L::COUNT;
    const BLOCK_FLOATS: usize = 2 * L::COUNT;
    const ELEMENT_BITS: usize = 16;
    const TILE_OUTPUTS: &[usize] = &[8, 4, 2, 2, 2];

    #[inline(always)]
    unsafe fn row(&self, index: usize) -> *const u8 {
        // SAFETY: the row exists by the caller's promise.
        unsafe { self.first.add(index * self.pitch) }
    }

    #[inline(always)]
    fn row_at(_row: *const u8, _block: usize, copy: *const u8) -> *const u8 {
        copy
    }

    #[inline(always)]
    fn block_at(row: *const u8, block: usize) -> *const u8 {
        row.wrapping_add(block * L::COUNT * 4)
    }

    #[inline(always)]
    fn stored_at(row: *const u8) -> Option<*const u8> {
        Some(row)
    }

    #[inline(always)]
    unsafe fn accumulate<const O: usize, const R: usize>(
        rows: &[*const u8; O],
        block: usize,
        x: &[*const f32; R],
        sums: &mut [[L::Vector; O]; R],
    ) {
        // SAFETY: the block and the activations exist by the caller's promise.
        unsafe {
            // Registers are few: either the activations are held, or the weights.
            if R == 1 {
                let values = [L::load(x[0]), L::load(x[0].add(L::COUNT))];
                for o in 0..O {
                    let pairs = L::load_pairs(rows[o].add(block * L::COUNT * 4));
                    sums[0][o] = L::mul_add(L::even(pairs), values[0], sums[0][o]);
                    sums[0][o] = L::mul_add(L::odd(pairs), values[1], sums[0][o]);
                }
                return;
            }
            let mut pairs = [L::load_pairs(rows[0].add(block * L::COUNT * 4)); O];
            for o in 1..O {
                pairs[o] = L::load_pairs(rows[o].add(block * L::COUNT * 4));
            }
            for half in 0..2 {
                if R == 2 {
                    let mut values = [L::zero(); R];
                    for r in 0..R {
                        values[r] = L::load(x[r].add(half * L::COUNT));
                    }
                    for o in 0..O {
                        let weights = if half == 0 { L::even(pairs[o]) } else { L::odd(pairs[o]) };
                        for r in 0..R {
                            sums[r][o] = L::mul_add(weights, values[r], sums[r][o]);
                        }
                    }
                } else {
                    let mut weights = [L::zero(); O];
                    for o in 0..O {
                        weights[o] = if half == 0 { L::even(pairs[o]) } else { L::odd(pairs[o]) };
                    }
                    for r in 0..R {
                        let value = L::load(x[r].add(half * L::COUNT));
                        for o in 0..O {
                            sums[r][o] = L::mul_add(weights[o], value, sums[r][o]);
                        }
                    }
                }
            }
        }
    }
}

/// Rows of packed INT4 codes, with their scales as f32.
#[derive(Clone, Copy)]
pub(super) struct Int4 {
    /// First row of codes.
    pub(super) codes: *const u8,
    /// Bytes from row to row.
    pub(super) pitch: usize,
    /// First row of scales.
    pub(super) scales: *const f32,
    /// Scales of a row.
    pub(super) groups: usize,
}

/// A row of packed INT4 codes.
#[derive(Clone, Copy)]
pub(super) struct Int4Row {
    codes: *const u8,
    scales: *const f32,
}

impl<L: Lanes> Format<L> for Int4 {
    type Row = Int4Row;
    const BLOCK: usize = 8 * L::COUNT;
    const BLOCK_BYTES: usize = 4 * L::COUNT;
    const BLOCK_FLOATS: usize = int4_floats(L::COUNT);
    const ELEMENT_BITS: usize = 4;
    const TILE_OUTPUTS: &[usize] = &[4, 1, 1, 1, 1];

    #[inline(always)]
    unsafe fn row(&self, index: usize) -> Int4Row {
        // SAFETY: the row exists by the caller's promise.
        unsafe {
            Int4Row {
                codes: self.codes.add(index * self.pitch),
                scales: self.scales.add(index * self.groups),
            }
        }
    }

    #[inline(always)]
    fn row_at(row: Int4Row, block: usize, copy: *const u8) -> Int4Row {
        Int4Row { codes: copy, scales: row.scales.wrapping_add(block * (L::COUNT / 4)) }
    }

    #[inline(always)]
    fn block_at(row: Int4Row, block: usize) -> *const u8 {
        row.codes.wrapping_add(block * L::COUNT * 4)
    }

    #[inline(always)]
    fn stored_at(row: Int4Row) -> Option<*const u8> {
        Some(row.codes)
    }

    #[inline(always)]
    unsafe fn accumulate<const O: usize, const R: usize>(
        rows: &[Int4Row; O],
        block: usize,
        x: &[*const f32; R],
        sums: &mut [[L::Vector; O]; R],
    ) {
        // SAFETY: the block and the activations exist by the caller's promise.
        unsafe {
            let mut words = [L::load_pairs(rows[0].codes.add(block * L::COUNT * 4)); O];
            for o in 1..O {
                words[o] = L::load_pairs(rows[o].codes.add(block * L::COUNT * 4));
            }
            let mut block_sums = [[L::zero(); O]; R];
            for r in 0..R {
                block_sums[r] = [L::load(x[r].add(8 * L::COUNT)); O];
            }
            // A nibble's place is a constant of the instructions.
            Self::add_codes::<L, 0, O, R>(&words, x, &mut block_sums);
            Self::add_codes::<L, 1, O, R>(&words, x, &mut block_sums);
            Self::add_codes::<L, 2, O, R>(&words, x, &mut block_sums);
            Self::add_codes::<L, 3, O, R>(&words, x, &mut block_sums);
            Self::add_codes::<L, 4, O, R>(&words, x, &mut block_sums);
            Self::add_codes::<L, 5, O, R>(&words, x, &mut block_sums);
            Self::add_codes::<L, 6, O, R>(&words, x, &mut block_sums);
            Self::add_codes::<L, 7, O, R>(&words, x, &mut block_sums);
            for o in 0..O {
                let scale = L::quads(rows[o].scales.add(block * (L::COUNT / 4)));
                for r in 0..R {
                    sums[r][o] = L::mul_add(block_sums[r][o], scale, sums[r][o]);
                }
            }
        }
    }
}

impl Int4 {
    /// Adds the products of code `NIBBLE` of all words to the sums of a block.
    #[inline(always)]
    unsafe fn add_codes<L: Lanes, const NIBBLE: u32, const O: usize, const R: usize>(
        words: &[L::Pairs; O],
        x: &[*const f32; R],
        sums: &mut [[L::Vector; O]; R],
    ) {
        // SAFETY: the activations exist by the caller's promise.
        unsafe {
            let mut codes = [L::zero(); O];
            for o in 0..O {
                codes[o] = L::int4::<NIBBLE>(words[o]);
            }
            for r in 0..R {
                let value = L::load(x[r].add(NIBBLE as usize * L::COUNT));
                for o in 0..O {
                    sums[r][o] = L::mul_add(codes[o], value, sums[r][o]);
                }
            }
        }
    }
}
