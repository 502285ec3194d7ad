//! Tiles: the dot products of a few rows with a few outputs at a time.
//!
//! A tile of R rows and O outputs keeps R · O vectors of partial sums in registers, so that each
//! weight that is loaded and unpacked serves R rows and each activation O outputs. Invariant: the
//! operations on one partial sum are the same, in the same order, for every R and O.
//!
//! Loops here are plain ones: a closure given to `map` is compiled without the instruction set.

use super::lanes::{Kernel, Lanes};

/// Weights in a form that a tile can read: rows of blocks.
pub(super) trait Format<L: Lanes>: Copy {
    /// Where a row of the weight lies.
    type Row: Copy;
    /// Elements of a block.
    const BLOCK: usize;
    /// Bytes of an element, if a row may end inside a block.
    const RAGGED_BYTES: Option<usize>;
    /// Whether a tile needs a second set of partial sums.
    const GROUPED: bool;

    /// Row `index` of the weight.
    ///
    /// # Safety
    /// There is such a row.
    unsafe fn row(&self, index: usize) -> Self::Row;

    /// The row that starts at `from`. Only for ragged formats.
    fn row_at(from: *const u8) -> Self::Row;

    /// Adds the products of block `block` of the `rows` with the activations at `x` (already at
    /// this block) to the partial sums.
    ///
    /// # Safety
    /// The block lies inside the rows, and `x` points to `BLOCK` floats each.
    unsafe fn accumulate<const O: usize, const R: usize>(
        rows: &[Self::Row; O],
        block: usize,
        x: &[*const f32; R],
        sums: &mut [[L::Vector; O]; R],
    );

    /// Bytes from which the row's block `block` is read. Only for ragged formats.
    fn block_at(row: Self::Row, block: usize) -> *const u8;
}

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
        // The tile is as large as 16 registers allow.
        let mut done = 0;
        // SAFETY: the tiles together cover each output once.
        unsafe {
            match (R, F::GROUPED) {
                (1, false) => self.tiles::<L, 8>(&mut done),
                (1, true) | (2, false) | (3, false) => self.tiles::<L, 4>(&mut done),
                _ => self.tiles::<L, 2>(&mut done),
            }
            if R == 1 {
                self.tiles::<L, 2>(&mut done);
            }
            self.tiles::<L, 1>(&mut done);
        }
    }
}

impl<F, const R: usize> Strip<F, R> {
    /// As many tiles of `O` outputs as are left.
    #[inline(always)]
    unsafe fn tiles<L: Lanes, const O: usize>(&self, done: &mut usize)
    where
        F: Format<L>,
    {
        while *done + O <= self.outputs {
            // SAFETY: these outputs exist.
            unsafe { self.tile::<L, O>(*done) };
            *done += O;
        }
    }

    #[inline(always)]
    unsafe fn tile<L: Lanes, const O: usize>(&self, first: usize)
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
            for block in 0..blocks {
                let mut x = self.x;
                for x in &mut x {
                    *x = x.add(block * F::BLOCK);
                }
                F::accumulate(&rows, block, &x, &mut sums);
            }
            if let Some(bytes) = F::RAGGED_BYTES {
                let rest = self.inputs % F::BLOCK;
                if rest > 0 {
                    let mut copies = [[0u8; 64]; O];
                    for (copy, &row) in copies.iter_mut().zip(&rows) {
                        let from = F::block_at(row, blocks);
                        std::ptr::copy_nonoverlapping(from, copy.as_mut_ptr(), rest * bytes);
                    }
                    let rows: [F::Row; O] = std::array::from_fn(|o| F::row_at(copies[o].as_ptr()));
                    let x = self.x.map(|x| x.add(blocks * F::BLOCK));
                    F::accumulate(&rows, 0, &x, &mut sums);
                }
            }
            for (out, sums) in self.out.iter().zip(sums) {
                L::store_sums(out.add(first), sums);
            }
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
    const RAGGED_BYTES: Option<usize> = Some(4);
    const GROUPED: bool = false;

    #[inline(always)]
    unsafe fn row(&self, index: usize) -> *const u8 {
        // SAFETY: the row exists by the caller's promise.
        unsafe { self.first.add(index * self.pitch) }
    }

    #[inline(always)]
    fn row_at(from: *const u8) -> *const u8 {
        from
    }

    #[inline(always)]
    fn block_at(row: *const u8, block: usize) -> *const u8 {
        row.wrapping_add(block * L::COUNT * 4)
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
    const RAGGED_BYTES: Option<usize> = Some(2);
    const GROUPED: bool = false;

    #[inline(always)]
    unsafe fn row(&self, index: usize) -> *const u8 {
        // SAFETY: the row exists by the caller's promise.
        unsafe { self.first.add(index * self.pitch) }
    }

    #[inline(always)]
    fn row_at(from: *const u8) -> *const u8 {
        from
    }

    #[inline(always)]
    fn block_at(row: *const u8, block: usize) -> *const u8 {
        row.wrapping_add(block * L::COUNT * 4)
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
            if R == 1 {
                // Registers hold the activations, and one weight after the other.
                let x = [L::load(x[0]), L::load(x[0].add(L::COUNT))];
                for o in 0..O {
                    let [even, odd] = L::bf16_pairs(rows[o].add(block * L::COUNT * 4));
                    sums[0][o] = L::mul_add(even, x[0], sums[0][o]);
                    sums[0][o] = L::mul_add(odd, x[1], sums[0][o]);
                }
                return;
            }
            let mut weights = [[L::zero(); 2]; O];
            for o in 0..O {
                weights[o] = L::bf16_pairs(rows[o].add(block * L::COUNT * 4));
            }
            for half in 0..2 {
                for r in 0..R {
                    let x = L::load(x[r].add(half * L::COUNT));
                    for o in 0..O {
                        sums[r][o] = L::mul_add(weights[o][half], x, sums[r][o]);
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

/// A row of INT4 codes, packed or unpacked.
#[derive(Clone, Copy)]
pub(super) struct Int4Row {
    codes: *const u8,
    scales: *const f32,
}

impl<L: Lanes> Format<L> for Int4 {
    type Row = Int4Row;
    const BLOCK: usize = 32;
    const RAGGED_BYTES: Option<usize> = None;
    const GROUPED: bool = true;

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

    fn row_at(_from: *const u8) -> Int4Row {
        unreachable!("INT4 rows are whole groups")
    }

    fn block_at(_row: Int4Row, _block: usize) -> *const u8 {
        unreachable!("INT4 rows are whole groups")
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
            for o in 0..O {
                let weights = L::int4(rows[o].codes.add(16 * block));
                let scale = L::splat(rows[o].scales.add(block));
                for r in 0..R {
                    let mut group = L::mul(weights[0], L::load(x[r]));
                    for vector in 1..32 / L::COUNT {
                        let x = L::load(x[r].add(vector * L::COUNT));
                        group = L::mul_add(weights[vector], x, group);
                    }
                    sums[r][o] = L::mul_add(group, scale, sums[r][o]);
                }
            }
        }
    }
}

/// Rows of INT4 codes unpacked to f32 in the order of [`Lanes::INT4_ORDER`], with their scales.
#[derive(Clone, Copy)]
pub(super) struct UnpackedInt4(pub(super) Int4);

impl<L: Lanes> Format<L> for UnpackedInt4 {
    type Row = Int4Row;
    const BLOCK: usize = 32;
    const RAGGED_BYTES: Option<usize> = None;
    const GROUPED: bool = true;

    #[inline(always)]
    unsafe fn row(&self, index: usize) -> Int4Row {
        // SAFETY: the row exists by the caller's promise.
        unsafe { <Int4 as Format<L>>::row(&self.0, index) }
    }

    fn row_at(_from: *const u8) -> Int4Row {
        unreachable!("INT4 rows are whole groups")
    }

    fn block_at(_row: Int4Row, _block: usize) -> *const u8 {
        unreachable!("INT4 rows are whole groups")
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
            let mut groups = [[L::zero(); O]; R];
            for vector in 0..32 / L::COUNT {
                let mut values = [L::zero(); R];
                for r in 0..R {
                    values[r] = L::load(x[r].add(vector * L::COUNT));
                }
                for o in 0..O {
                    let codes: *const f32 = rows[o].codes.cast();
                    let weights = L::load(codes.add(32 * block + vector * L::COUNT));
                    for r in 0..R {
                        groups[r][o] = match vector {
                            0 => L::mul(weights, values[r]),
                            _ => L::mul_add(weights, values[r], groups[r][o]),
                        };
                    }
                }
            }
            for o in 0..O {
                let scale = L::splat(rows[o].scales.add(block));
                for r in 0..R {
                    sums[r][o] = L::mul_add(groups[r][o], scale, sums[r][o]);
                }
            }
        }
    }
}
