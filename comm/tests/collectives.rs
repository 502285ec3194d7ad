//! Collectives of ranks that are threads, compared with plain sums of the same inputs.

mod common;

use common::{Lcg, stream, threads, threads_with};
use half::{bf16, f16};
use paceline_comm::{Collective, GroupOptions, Rank, ReduceOp};
use paceline_kernels::{DType, Float, Tensor};

const WORLDS: [usize; 5] = [1, 2, 3, 4, 8];

/// Sizes around the bounds of a slot of 4096 bytes, and primes.
const LENGTHS: [usize; 10] = [0, 1, 2, 7, 509, 1024, 1025, 2048, 2053, 9973];

fn small_slots() -> GroupOptions {
    GroupOptions { slot_bytes: 4096, ..GroupOptions::default() }
}

/// Values of very different sizes, so that the order of a sum shows in its bits.
fn input<T: Float>(rank: usize, length: usize) -> Vec<T> {
    let mut random = Lcg::seeded((rank * 1_000_003 + length) as u64);
    (0..length)
        .map(|_| {
            let magnitude = [1.0, 64.0, 1e-3, 3e4][random.below(4)];
            T::from_f32((random.below(2001) as f32 - 1000.0) / 1000.0 * magnitude)
        })
        .collect()
}

/// The sum in order of ranks in f32, rounded once, element by element.
fn reduced<T: Float>(op: ReduceOp, world: usize, length: usize) -> Vec<T> {
    let inputs: Vec<Vec<T>> = (0..world).map(|rank| input(rank, length)).collect();
    (0..length)
        .map(|index| {
            let terms = inputs.iter().map(|input| input[index].to_f32());
            let value = match op {
                ReduceOp::Sum => terms.reduce(|sum, term| sum + term),
                ReduceOp::Max => terms.reduce(f32::max),
            };
            T::from_f32(value.unwrap_or(0.0))
        })
        .collect()
}

fn all_reduce_is_exact<T: Float + PartialEq + std::fmt::Debug>(options: GroupOptions) {
    for world in WORLDS {
        threads_with(world, &options, |comm| {
            for length in LENGTHS {
                for op in [ReduceOp::Sum, ReduceOp::Max] {
                    let mine = input::<T>(comm.rank().index(), length);
                    let mut x = Tensor::from_slice(&[1, length], &mine);
                    comm.all_reduce(&mut x, op, &stream()).unwrap();
                    let expected = reduced::<T>(op, world, length);
                    assert!(x.as_slice::<T>() == expected, "{op} of {length}, {world} ranks");

                    let x = Tensor::from_slice(&[1, length], &mine);
                    let mut out = Tensor::zeros(T::DTYPE, &[1, length]);
                    comm.all_reduce_into(&x, &mut out, op, &stream()).unwrap();
                    assert!(out.as_slice::<T>() == expected, "{op} of {length} into another");
                    assert!(x.as_slice::<T>() == mine, "the input stays");
                }
            }
        });
    }
}

#[test]
fn all_reduce_of_f32_is_exact() {
    all_reduce_is_exact::<f32>(small_slots());
    all_reduce_is_exact::<f32>(GroupOptions::default());
}

#[test]
fn all_reduce_of_f16_is_exact() {
    all_reduce_is_exact::<f16>(small_slots());
    all_reduce_is_exact::<f16>(GroupOptions::default());
}

#[test]
fn all_reduce_of_bf16_is_exact() {
    all_reduce_is_exact::<bf16>(small_slots());
    all_reduce_is_exact::<bf16>(GroupOptions::default());
}

#[test]
fn all_reduce_is_near_the_sum_in_f64() {
    let (world, length) = (8, 4099);
    let inputs: Vec<Vec<f32>> = (0..world).map(|rank| input(rank, length)).collect();
    threads(world, |comm| {
        let mut x = Tensor::from_slice(&[1, length], &inputs[comm.rank().index()]);
        comm.all_reduce(&mut x, ReduceOp::Sum, &stream()).unwrap();
        for (index, &value) in x.as_slice::<f32>().iter().enumerate() {
            let terms = inputs.iter().map(|input| f64::from(input[index]));
            let bound = terms.clone().map(f64::abs).sum::<f64>() * 8.0 * f64::from(f32::EPSILON);
            assert!((f64::from(value) - terms.sum::<f64>()).abs() <= bound);
        }
    });
}

fn reduce_scatter_is_exact<T: Float + PartialEq>(options: GroupOptions) {
    for world in WORLDS {
        threads_with(world, &options, |comm| {
            for part in LENGTHS {
                let length = part * world;
                let x = Tensor::from_slice(&[1, length], &input::<T>(comm.rank().index(), length));
                let mut out = Tensor::zeros(T::DTYPE, &[1, part]);
                comm.reduce_scatter(&x, &mut out, ReduceOp::Sum, &stream()).unwrap();
                let expected = reduced::<T>(ReduceOp::Sum, world, length);
                let start = comm.rank().index() * part;
                assert!(out.as_slice::<T>() == &expected[start..start + part], "{part} x {world}");
            }
        });
    }
}

#[test]
fn reduce_scatter_is_exact_in_all_types() {
    reduce_scatter_is_exact::<f32>(small_slots());
    reduce_scatter_is_exact::<f16>(GroupOptions::default());
    reduce_scatter_is_exact::<bf16>(small_slots());
}

#[test]
fn all_gather_keeps_the_order_of_ranks() {
    for world in WORLDS {
        threads_with(world, &small_slots(), |comm| {
            for length in LENGTHS {
                let values = |rank| (0..length as i64).map(move |i| rank as i64 * 1_000_000 + i);
                let mine: Vec<i64> = values(comm.rank().index()).collect();
                let x = Tensor::from_slice(&[1, length], &mine);
                let mut out = Tensor::zeros(DType::I64, &[world, length]);
                comm.all_gather(&x, &mut out, &stream()).unwrap();
                let expected: Vec<i64> = (0..world).flat_map(values).collect();
                assert_eq!(out.as_slice::<i64>(), expected);
            }
        });
    }
}

#[test]
fn broadcast_comes_from_any_root() {
    for world in WORLDS {
        threads_with(world, &small_slots(), |comm| {
            for (length, root) in LENGTHS.into_iter().zip((0..world).cycle()) {
                let sent = input::<bf16>(root, length);
                let is_root = comm.rank() == Rank(root);
                let before = if is_root { sent.clone() } else { vec![bf16::NAN; length] };
                let mut x = Tensor::from_slice(&[length, 1], &before);
                comm.broadcast(&mut x, Rank(root), &stream()).unwrap();
                assert!(x.as_slice::<bf16>() == sent, "{length} from {root} of {world}");
            }
        });
    }
}

#[test]
fn all_types_can_be_moved() {
    threads(3, |comm| {
        let rank = comm.rank().index();
        macro_rules! check {
            ($($type:ty),*) => {$(
                let mut x = Tensor::from_slice(&[2], &[rank as $type, 7 as $type]);
                let mut out = Tensor::zeros(x.dtype(), &[6]);
                comm.all_gather(&x, &mut out, &stream()).unwrap();
                let seven = 7 as $type;
                let expected = [0 as $type, seven, 1 as $type, seven, 2 as $type, seven];
                assert_eq!(out.as_slice::<$type>(), expected);
                comm.broadcast(&mut x, Rank(2), &stream()).unwrap();
                assert_eq!(x.as_slice::<$type>(), [2 as $type, seven]);
            )*};
        }
        check!(f32, i64, i32, u8, i8);
    });
}

#[test]
fn messages_of_unknown_length_arrive_from_any_root() {
    for world in WORLDS {
        threads_with(world, &small_slots(), |comm| {
            let lengths = [0, 1, 4095, 4096, 4097, 20_011, 3];
            for (length, root) in lengths.into_iter().zip((0..world).cycle()) {
                let sent: Vec<u8> = (0..length).map(|i| (i * 31 + root) as u8).collect();
                let is_root = comm.rank() == Rank(root);
                let mut message = if is_root { sent.clone() } else { b"before".to_vec() };
                comm.broadcast_bytes(&mut message, Rank(root)).unwrap();
                assert_eq!(message, sent);
            }
        });
    }
}

#[test]
fn no_rank_leaves_a_barrier_before_all_have_come() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let arrived = AtomicUsize::new(0);
    threads(4, |comm| {
        for round in 1..=200 {
            arrived.fetch_add(1, Ordering::Relaxed);
            comm.barrier(&stream()).unwrap();
            assert_eq!(arrived.load(Ordering::Relaxed), 4 * round);
            comm.barrier(&stream()).unwrap();
        }
    });
}

#[test]
fn counts_say_what_was_used() {
    threads(2, |comm| {
        let mut x = Tensor::zeros(DType::F16, &[3, 5]);
        for _ in 0..4 {
            comm.all_reduce(&mut x, ReduceOp::Max, &stream()).unwrap();
        }
        comm.barrier(&stream()).unwrap();
        comm.broadcast_bytes(&mut vec![1, 2, 3], Rank(0)).unwrap();
        let counts: Vec<_> = comm
            .counts()
            .iter()
            .map(|usage| (usage.backend, usage.collective, usage.calls, usage.bytes))
            .collect();
        assert_eq!(
            counts,
            [
                ("host", Collective::AllReduce, 4, 120),
                ("host", Collective::Barrier, 1, 0),
                ("host", Collective::BroadcastBytes, 1, 3),
            ]
        );
        let choice = comm.backend_for(Collective::AllReduce, DType::F16, 30).unwrap();
        assert_eq!(choice.to_string(), "host: the only back end that serves this");
    });
}

#[test]
fn one_rank_needs_nobody() {
    threads(1, |comm| {
        let x = Tensor::from_slice(&[3], &[1f32, 2.0, 3.0]);
        let mut out = Tensor::zeros(DType::F32, &[3]);
        comm.reduce_scatter(&x, &mut out, ReduceOp::Sum, &stream()).unwrap();
        assert_eq!(out.as_slice::<f32>(), [1.0, 2.0, 3.0]);
        let mut message = b"plan".to_vec();
        comm.broadcast_bytes(&mut message, Rank(0)).unwrap();
        assert_eq!(message, b"plan");
        assert_eq!(comm.counts(), []);
        let choice = comm.backend_for(Collective::Barrier, DType::U8, 0).unwrap();
        assert_eq!(choice.to_string(), "none: there is one rank, nothing is sent");
    });
}
