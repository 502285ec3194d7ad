//! Attention against the formula in f64, and trees against chains, bit for bit.

use super::*;
use crate::Isa;

fn values(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7919 + seed * 104_729) % 1000) as f32 / 500.0 - 1.0).collect()
}

struct Case {
    heads: usize,
    heads_per_key: usize,
    key_width: usize,
    value_width: usize,
    context: usize,
    rows: usize,
}

/// The formula in f64, over an explicit list of the keys each row sees.
fn reference(case: &Case, query: &[f32], cache: &[f32], seen: &[Vec<u32>]) -> Vec<f64> {
    let Case { heads, heads_per_key, key_width, value_width, .. } = *case;
    let width = heads / heads_per_key * (key_width + value_width);
    let value_offset = heads / heads_per_key * key_width;
    let mut out = Vec::new();
    for (row, slots) in seen.iter().enumerate() {
        for head in 0..heads {
            let q = &query[(row * heads + head) * key_width..][..key_width];
            let group = head / heads_per_key;
            let part = |slot: u32, start: usize, width_part: usize| {
                &cache[slot as usize * width + start + group * width_part..][..width_part]
            };
            let dot = |slot: u32| -> f64 {
                let key = part(slot, 0, key_width);
                q.iter().zip(key).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
            };
            let weights: Vec<f64> = slots.iter().map(|&slot| (0.3 * dot(slot)).exp()).collect();
            let total: f64 = weights.iter().sum();
            for column in 0..value_width {
                let sum: f64 = slots
                    .iter()
                    .zip(&weights)
                    .map(|(&slot, weight)| {
                        weight * f64::from(part(slot, value_offset, value_width)[column])
                    })
                    .sum();
                out.push(sum / total);
            }
        }
    }
    out
}

fn compute(stream: &Stream, case: &Case, slots: &[u32], paths: Option<&Paths>) -> Vec<f32> {
    let Case { heads, heads_per_key, key_width, value_width, context, rows } = *case;
    let groups = heads / heads_per_key;
    let width = groups * (key_width + value_width);
    let count = 1 + *slots.iter().max().unwrap() as usize;
    let cache = Tensor::from_slice(&[count, width], &values(count * width, 1));
    let shape = [rows, heads * key_width];
    let query = Tensor::from_slice(&shape, &values(shape[0] * shape[1], 2));
    let mut out = Tensor::zeros(DType::F32, &[rows, heads * value_width]);
    let keys = CacheHeads { rows: &cache, offset: 0, stride: key_width, width: key_width };
    let offset = groups * key_width;
    let values = CacheHeads { rows: &cache, offset, stride: value_width, width: value_width };
    let parameters = AttentionParameters {
        heads,
        heads_per_key,
        keys,
        values,
        scale: 0.3,
        visibility: Visibility { slots, context, earlier: 0, paths },
        rows: RowRange { start: 0, end: rows },
    };
    attention(stream, &query, &parameters, &mut out);
    out.as_slice::<f32>().to_vec()
}

#[test]
fn equals_the_formula_for_chains_and_trees() {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let stream = Stream::host(2).unwrap().with_isa(isa);
        for (heads, heads_per_key, key_width, value_width, context, rows) in [
            (1, 1, 1, 1, 0, 1),
            (4, 2, 31, 17, 5, 7),
            (8, 8, 80, 64, 61, 16),
            (2, 1, 8, 33, 200, 3),
        ] {
            let case = Case { heads, heads_per_key, key_width, value_width, context, rows };
            let total = context + rows;
            // Slots in an order unlike that of positions.
            let slots: Vec<u32> = (0..total).map(|i| ((i * 7 + 3) % (7 * total)) as u32).collect();
            let mut paths = Paths::default();
            for node in 0..rows {
                paths.push((node > 0).then(|| (node - 1) / 2));
            }
            for paths in [None, Some(&paths)] {
                let seen: Vec<Vec<u32>> = (0..rows)
                    .map(|row| {
                        let mut seen = Vec::new();
                        visible_slots(
                            &Visibility { slots: &slots, context, earlier: 0, paths },
                            row,
                            &mut seen,
                        );
                        seen
                    })
                    .collect();
                let got = compute(&stream, &case, &slots, paths);
                let count = 1 + *slots.iter().max().unwrap() as usize;
                let width = heads / heads_per_key * (key_width + value_width);
                let query = values(rows * heads * key_width, 2);
                let expected = reference(&case, &query, &values(count * width, 1), &seen);
                for (got, expected) in got.iter().zip(expected) {
                    assert!((f64::from(*got) - expected).abs() < 2e-6, "{got} {expected}");
                }
            }
        }
    }
}

/// A path of a tree gives the bits of the same tokens as a chain, wherever rows are kept.
#[test]
fn a_path_equals_a_chain_bit_for_bit() {
    let stream = Stream::host(1).unwrap();
    let case = |rows| Case {
        heads: 2,
        heads_per_key: 2,
        key_width: 24,
        value_width: 16,
        context: 9,
        rows,
    };
    let mut paths = Paths::default();
    for parent in [None, Some(0), Some(0), Some(2)] {
        paths.push(parent);
    }
    assert_eq!(paths.path(3), [0, 2, 3]);
    let slots: Vec<u32> = (0..13).collect();
    let tree = compute(&stream, &case(4), &slots, Some(&paths));
    // The chain holds nodes 0, 2, 3 as its rows: row 2 sees what node 3 sees.
    let mut chain_slots: Vec<u32> = (0..13).collect();
    chain_slots[9..].copy_from_slice(&[9, 11, 12, 10]);
    let chain = compute(&stream, &case(4), &chain_slots, None);
    let width = 2 * 16;
    // Row 0 of both is the same query over the same keys.
    assert_eq!(tree[..width], chain[..width]);
    let seen = |paths, slots: &[u32], row| {
        let mut seen = Vec::new();
        visible_slots(&Visibility { slots, context: 9, earlier: 0, paths }, row, &mut seen);
        seen
    };
    assert_eq!(seen(Some(&paths), &slots, 3), seen(None, &chain_slots, 2));
}

/// Groups are only a way of reading keys once for several queries: whatever else is in a call, a
/// row's result has the same bits.
#[test]
fn a_row_alone_equals_the_same_row_among_others() {
    fn check<T: Float>(stream: &Stream) {
        for heads_per_key in [1, 3, 5] {
            let (groups, key_width, value_width, context) = (2, 20, 12, 37);
            let heads = groups * heads_per_key;
            let width = groups * (key_width + value_width);
            let narrow =
                |values: Vec<f32>| -> Vec<T> { values.into_iter().map(T::from_f32).collect() };
            let cache = Tensor::from_slice(&[64, width], &narrow(values(64 * width, 3)));
            let slots: Vec<u32> = (0..context as u32 + 9).map(|slot| slot * 7 % 64).collect();
            for rows in 1..=9 {
                let query = narrow(values(rows * heads * key_width, 4));
                let run = |from: usize, rows: usize| {
                    let range = from * heads * key_width..(from + rows) * heads * key_width;
                    let query = Tensor::from_slice(&[rows, heads * key_width], &query[range]);
                    let mut out = Tensor::zeros(T::DTYPE, &[rows, heads * value_width]);
                    let heads_at =
                        |offset, stride, width| CacheHeads { rows: &cache, offset, stride, width };
                    let parameters = AttentionParameters {
                        heads,
                        heads_per_key,
                        keys: heads_at(0, key_width, key_width),
                        values: heads_at(groups * key_width, value_width, value_width),
                        scale: 0.3,
                        visibility: Visibility {
                            slots: &slots,
                            context: context + from,
                            earlier: 0,
                            paths: None,
                        },
                        rows: RowRange { start: 0, end: rows },
                    };
                    attention(stream, &query, &parameters, &mut out);
                    out
                };
                let together = run(0, rows);
                for row in 0..rows {
                    assert_eq!(together.row_bytes(row), run(row, 1).row_bytes(0), "row {row}");
                }
            }
        }
    }
    let stream = Stream::host(2).unwrap();
    check::<f32>(&stream);
    check::<half::bf16>(&stream);
    check::<half::f16>(&stream);
}

#[test]
fn no_rows_are_no_work() {
    let stream = Stream::host(1).unwrap();
    let case =
        Case { heads: 2, heads_per_key: 1, key_width: 8, value_width: 8, context: 3, rows: 0 };
    assert!(compute(&stream, &case, &[0, 1, 2], None).is_empty());
}
