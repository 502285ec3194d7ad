//! Attention of the rows of one sequence over its paged cache.
//!
//! One core serves all forms: multi-head latent attention absorbed (all heads share the latent
//! row as key, its first r values as value), latent attention expanded, and grouped queries.
//! Invariant: keys are taken in the order of their positions, wherever the cache keeps them, so a
//! node of a draft tree gets the same bits as the same token in plain decoding.

mod group;

use std::{cell::RefCell, ops::Range};

use self::group::{GROUP, Group};
use crate::{DType, Float, Stream, Tensor, ops::rows::RowsMut};

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
    group: Group,
    slots: Vec<u32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Multiply-adds that are worth a thread of their own.
const WORK_A_THREAD: usize = 200_000;

/// How queries are put into groups that see the same keys: heads of one row that share a key head,
/// or else rows of one head.
#[derive(Clone, Copy)]
struct Grouping {
    rows: usize,
    /// Rows of a group.
    group_rows: usize,
    /// Query heads of a key head.
    heads_per_key: usize,
    /// Heads of a group.
    group_heads: usize,
}

impl Grouping {
    fn new(rows: usize, heads_per_key: usize, has_paths: bool) -> Self {
        let group_heads = heads_per_key.min(GROUP);
        // Rows of a tree differ in more than their last keys.
        let group_rows = if group_heads > 1 || has_paths { 1 } else { rows.clamp(1, GROUP) };
        Self { rows, group_rows, heads_per_key, group_heads }
    }

    fn row_groups(self) -> usize {
        self.rows.div_ceil(self.group_rows)
    }

    fn head_groups(self) -> usize {
        self.heads_per_key.div_ceil(self.group_heads)
    }

    /// Key head, heads and rows of a unit of work. Heads are outermost: the keys of one serve all
    /// rows while they are in the cache.
    fn unit(self, unit: usize) -> (usize, Range<usize>, Range<usize>) {
        let (row_group, unit) = (unit % self.row_groups(), unit / self.row_groups());
        let (head_group, key_head) = (unit % self.head_groups(), unit / self.head_groups());
        let end = (key_head + 1) * self.heads_per_key;
        let head = key_head * self.heads_per_key + head_group * self.group_heads;
        let row = row_group * self.group_rows;
        let heads = head..end.min(head + self.group_heads);
        (key_head, heads, row..self.rows.min(row + self.group_rows))
    }
}

fn run<T: Float>(
    stream: &Stream,
    query: &Tensor,
    parameters: &AttentionParameters<'_>,
    out: &mut Tensor,
) {
    let AttentionParameters { heads, heads_per_key, keys, values, visibility, rows, scale } =
        *parameters;
    let query = query.as_slice::<T>();
    let (key_rows, value_rows) = (keys.rows.as_slice::<T>(), values.rows.as_slice::<T>());
    let out = RowsMut::<T>::new(out);
    let count = rows.end - rows.start;
    let grouping = Grouping::new(count, heads_per_key, visibility.paths.is_some());
    let units = heads / heads_per_key * grouping.head_groups() * grouping.row_groups();
    let keys_a_row = visibility.context + count.div_ceil(2);
    let work = (keys.width + values.width) * keys_a_row * heads * count;
    let grain = (WORK_A_THREAD * units).div_ceil(work.max(1));
    stream.split(units, grain, |range| {
        SCRATCH.with_borrow_mut(|Scratch { group, slots }| {
            for unit in range {
                let (key_head, heads_here, rows_here) = grouping.unit(unit);
                visible_slots(&visibility, rows_here.end - 1, slots);
                group.clear();
                for row in rows_here.clone() {
                    let seen = slots.len() - (rows_here.end - 1 - row);
                    for head in heads_here.clone() {
                        let start = ((rows.start + row) * heads + head) * keys.width;
                        group.push(&query[start..start + keys.width], scale, seen);
                    }
                }
                let sources = [(key_rows, keys), (value_rows, values)];
                let [keys, values] = sources.map(|(all, part)| Source::new(all, part, key_head));
                group.attend(stream.isa(), slots, keys, values);
                for (index, row) in rows_here.enumerate() {
                    for head in heads_here.clone() {
                        let result =
                            group.result(index * heads_here.len() + head - heads_here.start);
                        let columns = head * values.width..(head + 1) * values.width;
                        // SAFETY: each (row, head) is in one unit, each unit goes to one thread.
                        let target = unsafe { out.part(rows.start + row, columns) };
                        for (to, &value) in target.iter_mut().zip(result) {
                            *to = T::from_f32(value);
                        }
                    }
                }
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

    /// Pointer to the head's part of the row in `slot`.
    #[inline(always)]
    fn at(&self, slot: u32) -> *const T {
        self.values.as_ptr().wrapping_add(slot as usize * self.pitch + self.column)
    }

    /// Asserts that there are rows in all `slots`.
    fn assert_holds(&self, slots: &[u32]) {
        let last = slots.iter().max().map_or(0, |&slot| slot as usize);
        assert!((last * self.pitch + self.column + self.width) <= self.values.len(), "slots");
    }
}

#[cfg(test)]
mod tests;
