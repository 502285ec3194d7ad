//! Attention of the rows of one sequence over its paged cache.
//!
//! One core serves all forms: multi-head latent attention absorbed (all heads share the latent
//! row as key, its first r values as value), latent attention expanded, and grouped queries.
//! Invariant: keys are taken in the order of their positions, wherever the cache keeps them, so a
//! node of a draft tree gets the same bits as the same token in plain decoding.

use std::{cell::RefCell, ops::Range};

use crate::{
    DType, Float, Stream, Tensor,
    lanes::{exp, fma, multiversion, tree_sum},
    ops::rows::RowsMut,
};

/// What the rows of one sequence see: its committed rows, then some rows of this pass.
#[derive(Clone, Copy, Debug)]
pub struct Visibility<'a> {
    /// Cache slot of each committed row, of each earlier row, then of each row of this pass.
    pub slots: &'a [u32],
    /// Number of committed rows, seen by every row of the pass.
    pub context: usize,
    /// Number of rows after these that earlier passes wrote and that are not committed: nodes
    /// 0..earlier of a tree, of which this pass holds the next ones.
    pub earlier: usize,
    /// Which rows after the committed ones each row sees; `None`: those before it, and itself.
    pub paths: Option<&'a Paths>,
}

/// For each node of a draft tree, the nodes on its path from the root to itself.
#[derive(Clone, Debug, Default)]
pub struct Paths {
    ends: Vec<u32>,
    nodes: Vec<u32>,
}

impl Paths {
    /// Forgets all nodes, keeping the memory.
    pub fn clear(&mut self) {
        self.ends.clear();
        self.nodes.clear();
    }

    /// Appends the next node: child of `parent`, or a root.
    ///
    /// # Panics
    /// If the parent does not come before the node.
    pub fn push(&mut self, parent: Option<usize>) {
        let node = self.ends.len();
        if let Some(parent) = parent {
            assert!(parent < node, "parents come before their children");
            let path = self.range(parent);
            self.nodes.extend_from_within(path);
        }
        self.nodes.push(node as u32);
        self.ends.push(self.nodes.len() as u32);
    }

    /// Number of nodes.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no node.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The path of `node`, root first, itself last.
    pub fn path(&self, node: usize) -> &[u32] {
        &self.nodes[self.range(node)]
    }

    fn range(&self, node: usize) -> Range<usize> {
        let start = if node == 0 { 0 } else { self.ends[node - 1] };
        start as usize..self.ends[node] as usize
    }
}

/// The slices of a cache's rows that are keys or values.
#[derive(Clone, Copy, Debug)]
pub struct CacheHeads<'a> {
    /// `[slots, …]`.
    pub rows: &'a Tensor,
    /// Column of head 0.
    pub offset: usize,
    /// Columns from one head to the next; 0 if all heads share one.
    pub stride: usize,
    /// Columns of a head.
    pub width: usize,
}

/// Arguments of [`attention`], apart from the rows it reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct AttentionParameters<'a> {
    /// Query heads.
    pub heads: usize,
    /// Query heads that share one key and value head (1: none).
    pub heads_per_key: usize,
    /// Keys; `width` is also the width of a query head.
    pub keys: CacheHeads<'a>,
    /// Values.
    pub values: CacheHeads<'a>,
    /// Factor on scores.
    pub scale: f32,
    /// What each row sees.
    pub visibility: Visibility<'a>,
    /// The rows of `query` and `out` that belong to this sequence.
    pub rows: RowRange,
}

/// First row and row after the last (a `Range` that is `Copy`).
#[derive(Clone, Copy, Debug)]
pub struct RowRange {
    /// First row.
    pub start: usize,
    /// Row after the last.
    pub end: usize,
}

/// softmax(scale · q · kᵀ) · v for each row and head, softmax in f32.
///
/// `query` `[rows, heads · key width]`, `out` `[rows, heads · value width]`, both of the cache's
/// type.
///
/// # Panics
/// If shapes or types do not fit.
pub fn attention(
    stream: &Stream,
    query: &Tensor,
    parameters: &AttentionParameters<'_>,
    out: &mut Tensor,
) {
    let AttentionParameters { heads, keys, values, visibility, rows, .. } = parameters;
    assert_eq!(query.width(), heads * keys.width);
    assert_eq!(out.width(), heads * values.width);
    assert!(rows.end <= query.rows() && query.rows() == out.rows());
    let needed = visibility.context + visibility.earlier + (rows.end - rows.start);
    assert!(visibility.slots.len() >= needed, "a slot for every row");
    assert!(query.dtype() == keys.rows.dtype() && query.dtype() == out.dtype());
    match query.dtype() {
        DType::F32 => run::<f32>(stream, query, parameters, out),
        DType::BF16 => run::<half::bf16>(stream, query, parameters, out),
        DType::F16 => run::<half::f16>(stream, query, parameters, out),
        other => panic!("attention of {other}"),
    }
}

/// Memory that a thread keeps from call to call.
#[derive(Default)]
struct Scratch {
    query: Vec<f32>,
    scores: Vec<f32>,
    slots: Vec<u32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Multiply-adds that are worth a thread of their own (about 20 µs).
const WORK_A_THREAD: usize = 100_000;

fn run<T: Float>(
    stream: &Stream,
    query: &Tensor,
    parameters: &AttentionParameters<'_>,
    out: &mut Tensor,
) {
    let AttentionParameters { heads, keys, values, visibility, rows, .. } = *parameters;
    let query = query.as_slice::<T>();
    let (key_rows, value_rows) = (keys.rows.as_slice::<T>(), values.rows.as_slice::<T>());
    let out = RowsMut::<T>::new(out);
    let count = rows.end - rows.start;
    let keys_a_row = visibility.context + count.div_ceil(2);
    let work = keys_a_row * (keys.width + values.width);
    let grain = WORK_A_THREAD.div_ceil(work.max(1));
    // Heads outermost: the keys of one head serve all rows while they are in the cache.
    stream.split(heads * count, grain, |range| {
        SCRATCH.with_borrow_mut(|scratch| {
            for unit in range {
                let (head, row) = (unit / count, unit % count);
                visible_slots(&visibility, row, &mut scratch.slots);
                let key_head = head / parameters.heads_per_key;
                let start = ((rows.start + row) * heads + head) * keys.width;
                scratch.query.clear();
                let head_query = &query[start..start + keys.width];
                scratch.query.extend(head_query.iter().map(|value| value.to_f32()));
                scratch.scores.resize(scratch.slots.len(), 0.0);
                let columns = head * values.width..(head + 1) * values.width;
                // SAFETY: each (row, head) is one unit, and each unit goes to one thread.
                let target = unsafe { out.part(rows.start + row, columns) };
                attend(
                    stream.isa(),
                    &scratch.query,
                    &scratch.slots,
                    Source::new(key_rows, keys, key_head),
                    Source::new(value_rows, values, key_head),
                    parameters.scale,
                    &mut scratch.scores,
                    target,
                );
            }
        });
    });
}

/// The slots that `row` sees, in the order of their positions.
fn visible_slots(visibility: &Visibility<'_>, row: usize, slots: &mut Vec<u32>) {
    let Visibility { slots: all, context, earlier, paths } = *visibility;
    let row = earlier + row;
    slots.clear();
    match paths {
        None => slots.extend_from_slice(&all[..=context + row]),
        Some(paths) => {
            slots.extend_from_slice(&all[..context]);
            slots.extend(paths.path(row).iter().map(|&node| all[context + node as usize]));
        }
    }
}

/// One head's slices of the rows of a cache.
#[derive(Clone, Copy)]
struct Source<'a, T> {
    values: &'a [T],
    pitch: usize,
    column: usize,
    width: usize,
}

impl<'a, T: Float> Source<'a, T> {
    fn new(values: &'a [T], heads: CacheHeads<'_>, head: usize) -> Self {
        let column = heads.offset + head * heads.stride;
        assert!(column + heads.width <= heads.rows.width());
        Self { values, pitch: heads.rows.width(), column, width: heads.width }
    }

    #[inline(always)]
    fn row(&self, slot: u32) -> &'a [T] {
        let start = slot as usize * self.pitch + self.column;
        &self.values[start..start + self.width]
    }
}

multiversion! {
    /// One row of one head.
    fn attend[T: Float](
        query: &[f32],
        slots: &[u32],
        keys: Source<'_, T>,
        values: Source<'_, T>,
        scale: f32,
        scores: &mut [f32],
        out: &mut [T],
    ) = attend_body
}

#[inline(always)]
fn attend_body<const FMA: bool, const N: usize, T: Float>(
    query: &[f32],
    slots: &[u32],
    keys: Source<'_, T>,
    values: Source<'_, T>,
    scale: f32,
    scores: &mut [f32],
    out: &mut [T],
) {
    score::<FMA, N, T>(query, slots, keys, scale, scores);
    let total = softmax_numerators::<FMA, N>(scores);
    weigh::<FMA, N, T>(scores, slots, values, 1.0 / total, out);
}

/// scores\[j\] = scale · query · key j, four keys at a time to hide the latency of the sums.
#[inline(always)]
fn score<const FMA: bool, const N: usize, T: Float>(
    query: &[f32],
    slots: &[u32],
    keys: Source<'_, T>,
    scale: f32,
    scores: &mut [f32],
) {
    let mut quads = slots.chunks_exact(4);
    let mut at = 0;
    for quad in &mut quads {
        let rows = [0, 1, 2, 3].map(|index| keys.row(quad[index]));
        for (score, dot) in scores[at..at + 4].iter_mut().zip(dots::<FMA, N, 4, T>(query, rows)) {
            *score = dot * scale;
        }
        at += 4;
    }
    for &slot in quads.remainder() {
        scores[at] = dots::<FMA, N, 1, T>(query, [keys.row(slot)])[0] * scale;
        at += 1;
    }
}

/// Dot products of `query` with K rows; each is the same whatever K is.
#[inline(always)]
fn dots<const FMA: bool, const N: usize, const K: usize, T: Float>(
    query: &[f32],
    rows: [&[T]; K],
) -> [f32; K] {
    let mut lanes = [[0.0f32; N]; K];
    let whole = query.len() / N * N;
    let rows = rows.map(|row| &row[..query.len()]);
    let mut start = 0;
    while start < whole {
        let chunk: &[f32; N] = query[start..start + N].try_into().expect("N elements");
        for (lanes, row) in lanes.iter_mut().zip(rows) {
            let key: &[T; N] = row[start..start + N].try_into().expect("N elements");
            for lane in 0..N {
                lanes[lane] = fma::<FMA>(chunk[lane], key[lane].to_f32(), lanes[lane]);
            }
        }
        start += N;
    }
    for (lanes, row) in lanes.iter_mut().zip(rows) {
        for (lane, index) in (whole..query.len()).enumerate() {
            lanes[lane] = fma::<FMA>(query[index], row[index].to_f32(), lanes[lane]);
        }
    }
    lanes.map(tree_sum)
}

/// Replaces scores by exp(score − largest) and returns their sum.
#[inline(always)]
fn softmax_numerators<const FMA: bool, const N: usize>(scores: &mut [f32]) -> f32 {
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

/// out = factor · Σ_j weight j · value j, in the order of j, four vectors of columns at a time.
#[inline(always)]
fn weigh<const FMA: bool, const N: usize, T: Float>(
    weights: &[f32],
    slots: &[u32],
    values: Source<'_, T>,
    factor: f32,
    out: &mut [T],
) {
    let mut column = 0;
    while column + 4 * N <= out.len() {
        weigh_columns::<FMA, N, 4, T>(weights, slots, values, factor, column, out);
        column += 4 * N;
    }
    while column + N <= out.len() {
        weigh_columns::<FMA, N, 1, T>(weights, slots, values, factor, column, out);
        column += N;
    }
    while column < out.len() {
        weigh_columns::<FMA, 1, 1, T>(weights, slots, values, factor, column, out);
        column += 1;
    }
}

#[inline(always)]
fn weigh_columns<const FMA: bool, const N: usize, const V: usize, T: Float>(
    weights: &[f32],
    slots: &[u32],
    values: Source<'_, T>,
    factor: f32,
    column: usize,
    out: &mut [T],
) {
    let mut sums = [[0.0f32; N]; V];
    for (&weight, &slot) in weights.iter().zip(slots) {
        let row = &values.row(slot)[column..column + V * N];
        for (vector, sums) in sums.iter_mut().enumerate() {
            for lane in 0..N {
                sums[lane] = fma::<FMA>(weight, row[vector * N + lane].to_f32(), sums[lane]);
            }
        }
    }
    for (vector, sums) in sums.iter().enumerate() {
        for lane in 0..N {
            out[column + vector * N + lane] = T::from_f32(sums[lane] * factor);
        }
    }
}

#[cfg(test)]
mod tests;
