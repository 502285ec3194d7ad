//! Faults that other systems had, as small inputs: docs/faults.md says which.

mod common;

use common::{Lcg, stream, threads};
use half::bf16;
use paceline_comm::{
    Collective, Limits, ReduceOp,
    policy::{Candidate, Measurement, Purpose, choose},
};
use paceline_kernels::{DType, Tensor};

/// Integers of at most 8 in size, whose sums over 8 ranks are exact in bf16.
fn payload(rank: usize, round: usize, length: usize) -> Vec<bf16> {
    let mut random = Lcg::seeded((round * 64 + rank) as u64);
    (0..length).map(|_| bf16::from_f32(random.below(17) as f32 - 8.0)).collect()
}

fn sum(world: usize, round: usize, length: usize) -> Vec<bf16> {
    let parts: Vec<_> = (0..world).map(|rank| payload(rank, round, length)).collect();
    let at = |index: usize| parts.iter().map(|part| part[index].to_f32()).sum::<f32>();
    (0..length).map(|index| bf16::from_f32(at(index))).collect()
}

/// Wastes up to a few hundred microseconds, another amount on every rank and in every round.
fn skew(rank: usize, round: usize) {
    let mut random = Lcg::seeded((round * 64 + rank) as u64);
    let steps = if random.below(4) == 0 { random.below(20_000) } else { 0 };
    for _ in 0..steps {
        std::hint::spin_loop();
    }
}

/// Every round has other values in the same memory, so that a rank that reads too early or too late
/// adds what is no longer, or not yet, there. More ranks than cores are no exception.
#[test]
fn fresh_payloads_never_show_stale_data() {
    const ROUNDS: usize = 200;
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    for world in [2, 3, 4, 8, (cores + 1).clamp(9, 16)] {
        threads(world, |comm| {
            let rank = comm.rank().index();
            for round in 0..ROUNDS {
                let length = [1, 64, 2560, 7168][round % 4];
                skew(rank, round);
                let mut x = Tensor::from_slice(&[1, length], &payload(rank, round, length));
                comm.all_reduce(&mut x, ReduceOp::Sum, &stream()).unwrap();
                let expected = sum(world, round, length);
                assert!(x.as_slice::<bf16>() == expected, "rank {rank}, round {round}");
            }
        });
    }
}

/// The payload is the number of the call: a call that overtakes another one adds different numbers.
#[test]
fn back_to_back_calls_under_skew_keep_their_order() {
    const ROUNDS: usize = 500;
    for world in [2, 4, 7] {
        threads(world, |comm| {
            let (rank, stream) = (comm.rank().index(), stream());
            let mut x = Tensor::zeros(DType::F32, &[4, 1024]);
            for round in 0..ROUNDS {
                let rows = 1 + round % 4;
                x.set_rows(rows);
                x.as_mut_slice::<f32>().fill((round * (rank + 1)) as f32);
                skew(rank, round);
                comm.all_reduce(&mut x, ReduceOp::Sum, &stream).unwrap();
                let expected = (round * world * (world + 1) / 2) as f32;
                assert!(x.as_slice::<f32>().iter().all(|&value| value == expected), "{round}");
            }
        });
    }
}

/// No width of a model falls out of the table: each has a back end and a reason.
#[test]
fn every_width_has_a_back_end_and_a_reason() {
    for world in [2, 4, 8] {
        threads(world, |comm| {
            for hidden in [256, 2048, 2880, 4096, 5120, 6144, 7168, 7680] {
                for rows in [1, 5, 16, 256] {
                    for dtype in [DType::F32, DType::BF16, DType::F16] {
                        let bytes = rows * hidden * dtype.bytes();
                        let choice = comm.backend_for(Collective::AllReduce, dtype, bytes);
                        let line = choice.unwrap().to_string();
                        assert_eq!(line, "host: the only back end that serves this");
                    }
                }
            }
            // Those for GPUs stay out, and say that these tensors are not on any.
            for declined in comm.declined() {
                assert_ne!(declined.backend, "host");
                assert!(declined.reason.contains("lie in host memory"), "{declined:?}");
            }
        });
    }
}

/// Whatever was measured: of the back ends that serve a size, the fastest does.
#[test]
fn the_fastest_measured_back_end_serves_every_size() {
    let names = ["p2p", "nccl", "mscclpp"];
    let limits = |bytes| Limits {
        collectives: &[Collective::AllReduce],
        dtypes_reduced: &[DType::BF16],
        dtypes_moved: &[],
        bytes,
        world_sizes: 2..=8,
        in_place: true,
        graph_capture: false,
    };
    let limits = [limits(0..=1 << 18), limits(0..=usize::MAX), limits(4096..=1 << 19)];
    let candidates: Vec<_> =
        names.iter().zip(&limits).map(|(&name, limits)| Candidate { name, limits }).collect();
    let mut sizes = vec![1024usize];
    while let Some(&size) = sizes.last().filter(|&&size| size < 1 << 20) {
        sizes.push(size * 3 / 2);
    }
    for seed in 0..200 {
        let mut random = Lcg::seeded(seed);
        let mut measured = Vec::new();
        for &backend in &names {
            for &bytes in &sizes {
                let microseconds = 1.0 + random.below(1000) as f64;
                let collective = Collective::AllReduce;
                measured.push(Measurement { backend, collective, bytes, microseconds });
            }
        }
        for world_size in [2, 4, 8] {
            let dtype = DType::BF16;
            let purpose = Purpose { collective: Collective::AllReduce, dtype, world_size };
            for &bytes in &sizes {
                let serves = |name: &str| {
                    let index = names.iter().position(|&other| other == name).unwrap();
                    limits[index].bytes.contains(&bytes)
                };
                let times = measured.iter().filter(|time| time.bytes == bytes);
                let best = times.filter(|time| serves(time.backend));
                let best = best.min_by(|a, b| a.microseconds.total_cmp(&b.microseconds)).unwrap();
                let choice = choose(&candidates, purpose, bytes, &measured).unwrap();
                let chosen =
                    measured.iter().find(|time| time.backend == choice.name && time.bytes == bytes);
                assert_eq!(chosen.unwrap().microseconds, best.microseconds, "{bytes}: {choice}");
            }
        }
    }
}
