//! The arithmetic of attention on one thread: a few queries that share their keys and values.
//!
//! Each key that is loaded serves several queries. Invariant: the operations on one query, and
//! their order, are the same whatever group it is in and whatever tile a key falls into. Lane `l`
//! of a score adds elements l, N + l, 2N + l, … of query and key; values are added in the order
//! of the keys.

#![allow(clippy::needless_range_loop)]

use super::Source;
use crate::{
    DType, Float, Isa,
    lanes::{exp, multiversion, tree_sum},
    ops::linear::{Kernel, LANES_MAX, Lanes, run_on},
};

/// Queries of a group, at most.
pub(super) const GROUP: usize = 4;
/// Keys of a tile: as many sums as are added up together.
const KEYS: usize = 4;

/// Working memory of a group: its queries as f32, and what becomes of them.
#[derive(Default)]
pub(super) struct Group {
    /// Number of queries.
    count: usize,
    /// Keys that each query sees: the first of the list, ascending.
    seen: [usize; GROUP],
    /// `[count, width]`, padded with zeros to whole vectors, times the scale.
    queries: Vec<f32>,
    /// `[count, pitch]`.
    scores: Vec<f32>,
    /// `[count, width]`, padded to whole vectors.
    mixed: Vec<f32>,
}

impl Group {
    /// Forgets all queries.
    pub(super) fn clear(&mut self) {
        self.count = 0;
        self.queries.clear();
    }

    /// Adds a query that sees the first `seen` keys of the list, at least as many as those before.
    pub(super) fn push<T: Float>(&mut self, query: &[T], scale: f32, seen: usize) {
        debug_assert!(self.count < GROUP);
        debug_assert!(self.count == 0 || seen >= self.seen[self.count - 1]);
        self.seen[self.count] = seen;
        self.count += 1;
        self.queries.extend(query.iter().map(|value| value.to_f32() * scale));
        self.queries.resize(self.count * query.len().next_multiple_of(LANES_MAX), 0.0);
    }

    /// softmax(q · kᵀ) · v of each query, f32, in [`Group::result`].
    pub(super) fn attend<T: Float>(
        &mut self,
        isa: Isa,
        slots: &[u32],
        keys: Source<'_, T>,
        values: Source<'_, T>,
    ) {
        let pitch = slots.len().next_multiple_of(LANES_MAX);
        self.scores.resize(self.count * pitch, 0.0);
        let width = values.width.next_multiple_of(LANES_MAX);
        self.mixed.resize(self.count * width, 0.0);
        let queries = Rows { first: self.queries.as_mut_ptr(), pitch: self.query_pitch() };
        let scores = Rows { first: self.scores.as_mut_ptr(), pitch };
        let mixed = Rows { first: self.mixed.as_mut_ptr(), pitch: width };
        let (count, seen) = (self.count, self.seen);
        assert!(seen[..count].iter().all(|&seen| seen <= slots.len()), "a query sees slots beyond");
        assert_eq!(self.query_pitch(), keys.width.next_multiple_of(LANES_MAX), "query width");
        keys.assert_holds(slots);
        values.assert_holds(slots);
        // SAFETY: the rows have these widths, and keys and values exist (asserted above); a stream
        // has an instruction set only if the processor has it.
        unsafe {
            run_on(isa, Scores { queries, count, seen, slots, keys, scores });
            let mut factors = [0.0; GROUP];
            for query in 0..count {
                let row = std::slice::from_raw_parts_mut(scores.row(query), seen[query]);
                factors[query] = 1.0 / softmax_numerators(isa, row);
            }
            run_on(isa, Mix { scores, count, seen, factors, slots, values, mixed });
        }
    }

    /// What came of query `index`, with padding.
    pub(super) fn result(&self, index: usize) -> &[f32] {
        let width = self.mixed.len() / self.count;
        &self.mixed[index * width..(index + 1) * width]
    }

    fn query_pitch(&self) -> usize {
        self.queries.len() / self.count.max(1)
    }
}

/// Rows of f32 in working memory.
#[derive(Clone, Copy)]
struct Rows {
    first: *mut f32,
    /// Floats from row to row.
    pitch: usize,
}

impl Rows {
    #[inline(always)]
    fn row(self, index: usize) -> *mut f32 {
        self.first.wrapping_add(index * self.pitch)
    }
}

/// `L::COUNT` elements as f32, of which only `present` are there; the others are 0.
///
/// # Safety
/// `present` elements can be read, and the processor has the instructions of `L`.
#[inline(always)]
unsafe fn load<L: Lanes, T: Float>(from: *const T, present: usize) -> L::Vector {
    // SAFETY: by the caller's promise; a part is read from a padded copy.
    unsafe {
        if present >= L::COUNT {
            return load_whole::<L, T>(from);
        }
        let mut copy = [T::from_f32(0.0); LANES_MAX];
        std::ptr::copy_nonoverlapping(from, copy.as_mut_ptr(), present);
        load_whole::<L, T>(copy.as_ptr())
    }
}

#[inline(always)]
unsafe fn load_whole<L: Lanes, T: Float>(from: *const T) -> L::Vector {
    // SAFETY: by the caller's promise.
    unsafe {
        match T::DTYPE {
            DType::F32 => L::load(from.cast()),
            DType::BF16 => L::bf16(from.cast()),
            _ => L::f16(from.cast()),
        }
    }
}

/// scores\[q\]\[j\] = query q · key j.
struct Scores<'a, T> {
    queries: Rows,
    count: usize,
    seen: [usize; GROUP],
    slots: &'a [u32],
    keys: Source<'a, T>,
    scores: Rows,
}

impl<L: Lanes, T: Float> Kernel<L> for Scores<'_, T> {
    #[inline(always)]
    unsafe fn run(self) {
        // SAFETY: queries, keys and scores exist by the caller's promise.
        unsafe {
            let common = self.seen[0];
            let mut key = 0;
            while key + KEYS <= common {
                // Two queries and four keys fill 8 of the 16 registers of AVX2 with sums.
                let mut query = 0;
                while query + 2 <= self.count {
                    self.tile::<L, 2, KEYS>(query, key);
                    query += 2;
                }
                if query < self.count {
                    self.tile::<L, 1, KEYS>(query, key);
                }
                key += KEYS;
            }
            for query in 0..self.count {
                for key in key..self.seen[query] {
                    self.tile::<L, 1, 1>(query, key);
                }
            }
        }
    }
}

impl<T: Float> Scores<'_, T> {
    #[inline(always)]
    unsafe fn tile<L: Lanes, const Q: usize, const K: usize>(&self, query: usize, key: usize) {
        // SAFETY: as for `run`.
        unsafe {
            let mut keys = [std::ptr::null::<T>(); K];
            for k in 0..K {
                keys[k] = self.keys.at(self.slots[key + k]);
            }
            let width = self.keys.width;
            let mut sums = [[L::zero(); K]; Q];
            let mut at = 0;
            while at < width {
                let mut vectors = [L::zero(); K];
                for k in 0..K {
                    vectors[k] = load::<L, T>(keys[k].wrapping_add(at), width - at);
                }
                for q in 0..Q {
                    let part = L::load(self.queries.row(query + q).add(at));
                    for k in 0..K {
                        sums[q][k] = L::mul_add(part, vectors[k], sums[q][k]);
                    }
                }
                at += L::COUNT;
            }
            for q in 0..Q {
                L::store_sums(self.scores.row(query + q).add(key), sums[q]);
            }
        }
    }
}

/// mixed\[q\] = factor q · Σ_j scores\[q\]\[j\] · value j.
struct Mix<'a, T> {
    scores: Rows,
    count: usize,
    seen: [usize; GROUP],
    factors: [f32; GROUP],
    slots: &'a [u32],
    values: Source<'a, T>,
    mixed: Rows,
}

impl<L: Lanes, T: Float> Kernel<L> for Mix<'_, T> {
    #[inline(always)]
    unsafe fn run(self) {
        // SAFETY: scores, values and results exist by the caller's promise.
        unsafe {
            match self.count {
                // Sums of four queries and two vectors of columns, or one query and four.
                4 => self.all_columns::<L, 4, 2>(0),
                3 => {
                    self.all_columns::<L, 2, 4>(0);
                    self.all_columns::<L, 1, 4>(2);
                }
                2 => self.all_columns::<L, 2, 4>(0),
                _ => self.all_columns::<L, 1, 4>(0),
            }
        }
    }
}

impl<T: Float> Mix<'_, T> {
    #[inline(always)]
    unsafe fn all_columns<L: Lanes, const Q: usize, const V: usize>(&self, query: usize) {
        // SAFETY: as for `run`.
        unsafe {
            let mut column = 0;
            while column + V * L::COUNT <= self.values.width {
                self.columns::<L, Q, V>(query, column);
                column += V * L::COUNT;
            }
            while column < self.values.width {
                self.columns::<L, Q, 1>(query, column);
                column += L::COUNT;
            }
        }
    }

    #[inline(always)]
    unsafe fn columns<L: Lanes, const Q: usize, const V: usize>(
        &self,
        query: usize,
        column: usize,
    ) {
        // SAFETY: as for `run`.
        unsafe {
            let present = self.values.width - column;
            let mut sums = [[L::zero(); V]; Q];
            let common = self.seen[query];
            for key in 0..common {
                let value = self.values.at(*self.slots.get_unchecked(key)).wrapping_add(column);
                let mut vectors = [L::zero(); V];
                for v in 0..V {
                    let part = value.wrapping_add(v * L::COUNT);
                    vectors[v] = load::<L, T>(part, present - v * L::COUNT);
                }
                for q in 0..Q {
                    let weight = L::splat(self.scores.row(query + q).add(key));
                    for v in 0..V {
                        sums[q][v] = L::mul_add(weight, vectors[v], sums[q][v]);
                    }
                }
            }
            for q in 0..Q {
                for key in common..self.seen[query + q] {
                    let value = self.values.at(self.slots[key]).wrapping_add(column);
                    let weight = L::splat(self.scores.row(query + q).add(key));
                    for v in 0..V {
                        let part = value.wrapping_add(v * L::COUNT);
                        let vector = load::<L, T>(part, present - v * L::COUNT);
                        sums[q][v] = L::mul_add(weight, vector, sums[q][v]);
                    }
                }
                let factor = L::splat(&raw const self.factors[query + q]);
                for v in 0..V {
                    let to = self.mixed.row(query + q).add(column + v * L::COUNT);
                    L::store(to, L::mul(sums[q][v], factor));
                }
            }
        }
    }
}

multiversion! {
    /// Replaces scores by exp(score − largest) and returns their sum.
    fn softmax_numerators[](scores: &mut [f32]) -> f32 = softmax_body
}

#[inline(always)]
fn softmax_body<const FMA: bool, const N: usize>(scores: &mut [f32]) -> f32 {
    let mut largest = [f32::NEG_INFINITY; N];
    let chunks = scores.chunks_exact(N);
    let tail = chunks.remainder();
    for chunk in chunks {
        for lane in 0..N {
            largest[lane] = if chunk[lane] > largest[lane] { chunk[lane] } else { largest[lane] };
        }
    }
    let largest = largest.iter().chain(tail).fold(f32::NEG_INFINITY, |a, &b| a.max(b));
    let mut lanes = [0.0f32; N];
    let mut chunks = scores.chunks_exact_mut(N);
    for chunk in &mut chunks {
        for lane in 0..N {
            chunk[lane] = exp::<FMA>(chunk[lane] - largest);
            lanes[lane] += chunk[lane];
        }
    }
    for (lane, score) in chunks.into_remainder().iter_mut().enumerate() {
        *score = exp::<FMA>(*score - largest);
        lanes[lane] += *score;
    }
    tree_sum(lanes)
}
