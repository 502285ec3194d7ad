//! Activations as tiles want them: f32, padded with zeros, in the order of a weight's format.

use super::{
    lanes::{Kernel, LANES_MAX, Lanes, int4_floats, run_on},
    product::{Order, row_pitch},
    scratch::Scratch,
};
use crate::{DType, Float, Isa, Stream, Tensor};

/// Elements that a thread should get to prepare, at least.
const GRAIN_ELEMENTS: usize = 1 << 16;

/// Rows of prepared activations, or some of them.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    first: *const f32,
    /// Floats from row to row.
    pitch: usize,
    /// The rows meant; `None`: all.
    picks: Option<&'a [u32]>,
}

// SAFETY: only read while it lives.
unsafe impl Sync for Inputs<'_> {}

impl<'a> Inputs<'a> {
    /// Rows that start at `first`, `pitch` floats apart.
    pub(crate) fn new(first: *const f32, pitch: usize) -> Self {
        Self { first, pitch, picks: None }
    }

    /// The rows `picks` only.
    pub(crate) fn pick(self, picks: &'a [u32]) -> Self {
        Self { picks: Some(picks), ..self }
    }

    /// Pointer to row `index`.
    pub(super) fn row(&self, index: usize) -> *const f32 {
        let row = self.picks.map_or(index, |picks| picks[index] as usize);
        self.first.wrapping_add(row * self.pitch)
    }
}

/// All rows of a tensor, or slices of them, prepared in the orders that some weights need.
pub(crate) struct Prepared {
    buffers: [Option<Scratch>; Order::ALL.len()],
    slices: Slices,
}

/// Slices of equal width of a row.
#[derive(Clone, Copy)]
pub(crate) struct Slices {
    /// Number of slices.
    pub(crate) count: usize,
    /// Elements of a slice.
    pub(crate) width: usize,
    /// Element at which the first starts.
    pub(crate) offset: usize,
    /// Elements from one start to the next.
    pub(crate) stride: usize,
}

impl Slices {
    /// The whole row.
    pub(crate) fn whole(width: usize) -> Self {
        Self { count: 1, width, offset: 0, stride: 0 }
    }

    /// Floats of a prepared slice, and from one prepared row to the next.
    fn prepared(self, order: Order) -> (usize, usize) {
        let slice = order.floats(self.width);
        (slice, row_pitch(self.count * slice))
    }
}

impl Prepared {
    /// Prepares `slices` of each row of `x` in each of the `orders`.
    ///
    /// # Panics
    /// If slices reach beyond the rows or `x` holds no floats.
    pub(crate) fn new(
        stream: &Stream,
        x: &Tensor,
        slices: Slices,
        orders: impl IntoIterator<Item = Order>,
    ) -> Self {
        let last = slices.offset + slices.count.saturating_sub(1) * slices.stride;
        assert!(last + slices.width <= x.width(), "heads reach beyond the rows of the input");
        assert!(x.dtype().is_float(), "activations of type {}", x.dtype());
        let mut prepared = Self { buffers: [None, None, None], slices };
        for order in orders {
            let buffer = &mut prepared.buffers[order as usize];
            if buffer.is_none() {
                *buffer = Some(fill(stream, x, slices, order));
            }
        }
        prepared
    }

    /// Slice `index` of all rows in `order`.
    ///
    /// # Panics
    /// If it was not prepared.
    pub(crate) fn slice(&self, order: Order, index: usize) -> Inputs<'_> {
        let buffer = self.buffers[order as usize].as_ref().expect("prepared for this order");
        debug_assert!(index < self.slices.count);
        let (slice, pitch) = self.slices.prepared(order);
        Inputs::new(buffer.as_ptr().wrapping_add(index * slice), pitch)
    }
}

fn fill(stream: &Stream, x: &Tensor, slices: Slices, order: Order) -> Scratch {
    let (slice, pitch) = slices.prepared(order);
    let mut buffer = Scratch::take(x.rows() * pitch);
    let to = Destination(buffer.as_mut_ptr());
    let from = Source { first: x.as_ptr(), pitch: x.pitch_bytes(), dtype: x.dtype() };
    stream.split(x.rows(), GRAIN_ELEMENTS.div_ceil(pitch.max(1)), |rows| {
        for row in rows {
            for index in 0..slices.count {
                let at = slices.offset + index * slices.stride;
                // SAFETY: the slice lies inside the row (checked by the caller); each row of the
                // buffer is written by one thread.
                unsafe {
                    let to = to.row(row * pitch + index * slice);
                    prepare(stream.isa(), order, from.dtype, from.at(row, at), slices.width, to);
                }
            }
        }
    });
    buffer
}

/// Rows of activations that threads read.
struct Source {
    first: *const u8,
    pitch: usize,
    dtype: DType,
}

// SAFETY: only read while it lives.
unsafe impl Sync for Source {}

impl Source {
    fn at(&self, row: usize, element: usize) -> *const u8 {
        self.first.wrapping_add(row * self.pitch + element * self.dtype.bytes())
    }
}

/// A buffer whose parts different threads write.
struct Destination(*mut f32);

// SAFETY: each part is written by one thread.
unsafe impl Sync for Destination {}

impl Destination {
    fn row(&self, floats: usize) -> *mut f32 {
        self.0.wrapping_add(floats)
    }
}

/// Writes `width` activations from `from` to `to` in `order`, padded with zeros. `from` and `to`
/// may be the same.
///
/// # Safety
/// `from` holds `width` elements of `dtype`, `to` has room for `order.floats(width)` floats; the
/// processor has `isa`.
pub(crate) unsafe fn prepare(
    isa: Isa,
    order: Order,
    dtype: DType,
    from: *const u8,
    width: usize,
    to: *mut f32,
) {
    let row = Row { order, dtype, from, width, to };
    // SAFETY: by the caller's promise.
    unsafe {
        run_on(isa, row);
    }
}

struct Row {
    order: Order,
    dtype: DType,
    from: *const u8,
    width: usize,
    to: *mut f32,
}

impl<L: Lanes> Kernel<L> for Row {
    #[inline(always)]
    unsafe fn run(self) {
        let Self { order, dtype, from, width, to } = self;
        // SAFETY: by the caller's promise.
        unsafe {
            if to.cast_const().cast() != from {
                widen::<L>(dtype, from, width, to);
            }
            let row = std::slice::from_raw_parts_mut(to, order.floats(width));
            row[width..].fill(0.0);
            match order {
                Order::Natural => {}
                Order::Bf16Pairs => reorder(row, const { &bf16_order(L::COUNT) }),
                Order::Int4 => spread::<L>(row, width),
            }
        }
    }
}

#[inline(always)]
fn reorder(row: &mut [f32], order: &[u8; 32]) {
    for group in row.as_chunks_mut::<32>().0 {
        let old = *group;
        for (value, &element) in group.iter_mut().zip(order) {
            *value = old[usize::from(element & 31)];
        }
    }
}

/// What activations are multiplied with since [`Lanes::int4`] leaves codes where they are.
const CODE_FACTORS: [f32; 8] = {
    let mut factors = [1.0; 8];
    let mut code = 1;
    while code < 7 {
        factors[code] = factors[code - 1] / 16.0;
        code += 1;
    }
    factors
};

/// Puts `width` activations, padded with zeros, as tiles of INT4 weights want them: for each
/// 8 · `COUNT` of them 8 vectors, whose lane `l` of vector v belongs to code v of word l and is
/// divided by what [`Lanes::int4`] multiplies the code with; then a vector of −8 times the sum of
/// each lane, since a weight is its code minus 8.
#[inline(always)]
fn spread<L: Lanes>(row: &mut [f32], width: usize) {
    let block = 8 * L::COUNT;
    // From the end: a block moves behind where it was.
    for index in (0..width.div_ceil(block)).rev() {
        let mut old = [0.0f32; 8 * LANES_MAX];
        old[..block].copy_from_slice(&row[index * block..(index + 1) * block]);
        let start = index * int4_floats(L::COUNT);
        let vectors = &mut row[start..start + int4_floats(L::COUNT)];
        let (vectors, sums) = vectors.split_at_mut(block);
        sums.fill(0.0);
        for (code, vector) in vectors.chunks_exact_mut(L::COUNT).enumerate() {
            let factor = CODE_FACTORS[code];
            for (lane, value) in vector.iter_mut().enumerate() {
                let old = old[8 * lane + code];
                *value = old * factor;
                sums[lane] -= 8.0 * old;
            }
        }
    }
}

/// Element at each place of a group of 32, if bf16 values are unpacked in pairs into vectors of
/// `lanes` lanes.
const fn bf16_order(lanes: usize) -> [u8; 32] {
    let mut order = [0; 32];
    let mut place = 0;
    while place < 32 {
        let (block, rest) = (place / (2 * lanes), place % (2 * lanes));
        order[place] = (2 * lanes * block + 2 * (rest % lanes) + rest / lanes) as u8;
        place += 1;
    }
    order
}

/// Widens `count` floats of type `dtype`.
///
/// # Safety
/// `from` holds them, `to` has room for them; the processor has the instruction set.
#[inline(always)]
pub(super) unsafe fn widen<L: Lanes>(dtype: DType, from: *const u8, count: usize, to: *mut f32) {
    let whole = count / L::COUNT * L::COUNT;
    // SAFETY: by the caller's promise.
    unsafe {
        match dtype {
            DType::F32 => std::ptr::copy_nonoverlapping(from, to.cast(), count * 4),
            DType::BF16 => {
                for at in (0..whole).step_by(L::COUNT) {
                    L::store(to.add(at), L::bf16(from.add(2 * at)));
                }
                widen_rest::<half::bf16>(from, whole, count, to);
            }
            DType::F16 => {
                for at in (0..whole).step_by(L::COUNT) {
                    L::store(to.add(at), L::f16(from.add(2 * at)));
                }
                widen_rest::<half::f16>(from, whole, count, to);
            }
            other => unreachable!("{other} was refused before"),
        }
    }
}

#[inline(always)]
unsafe fn widen_rest<T: Float>(from: *const u8, first: usize, count: usize, to: *mut f32) {
    for at in first..count {
        // SAFETY: by the caller's promise.
        unsafe { to.add(at).write(from.cast::<T>().add(at).read_unaligned().to_f32()) };
    }
}
