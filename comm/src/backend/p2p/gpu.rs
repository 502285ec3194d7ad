//! Tests on GPUs: ranks as threads that share one, and spread over two where there are two.
//!
//! Freeing memory and uploading graphs may wait for the whole device. So all ranks meet before
//! each: no kernel is then waiting for a rank that waits for the device.

use std::{
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
    time::{Duration, Instant},
};

use half::{bf16, f16};
use paceline_kernels::{
    Element, Float, Stream, Tensor,
    driver::{Device, DeviceStream, Graph, testing::gpus},
};

use crate::{
    AddRmsNorm, CommError, Communicator, GroupOptions, InboxOptions, LossCause, Rank, ReduceOp,
    in_process,
};

const LIMIT: Duration = Duration::from_secs(20);
/// Small slots, so that two shots and several pieces come up with small tensors.
const SMALL: usize = 8192;

/// Where ranks wait for each other on the host. Unlike a barrier it gives up, when one panicked.
struct Meeting {
    world: usize,
    came: AtomicUsize,
}

impl Meeting {
    fn wait(&self) {
        let all = (self.came.fetch_add(1, SeqCst) + 1).next_multiple_of(self.world);
        let start = Instant::now();
        while self.came.load(SeqCst) < all {
            assert!(start.elapsed() < 2 * LIMIT, "another rank did not come");
            std::thread::yield_now();
        }
    }
}

/// One rank of a test.
struct Seat<'a> {
    comm: Communicator,
    stream: Stream,
    device: &'a Device,
    meeting: &'a Meeting,
}

impl Seat<'_> {
    fn rank(&self) -> usize {
        self.comm.rank().index()
    }

    fn world(&self) -> usize {
        self.comm.world_size()
    }

    fn queue(&self) -> &DeviceStream {
        self.stream.device_stream().unwrap()
    }

    fn tensor<T: Element>(&self, shape: &[usize], values: &[T]) -> Tensor {
        let mut tensor = Tensor::zeros_on(self.device, T::DTYPE, shape).unwrap();
        tensor.copy_from_host(&Tensor::from_slice(shape, values), self.queue()).unwrap();
        tensor
    }

    fn read<T: Element>(&self, tensor: &Tensor) -> Vec<T> {
        tensor.to_host(self.queue()).unwrap().as_slice::<T>().to_vec()
    }

    /// Runs `work` when no rank allocates or frees any more, and ends before one does again.
    fn together<R>(&mut self, work: impl FnOnce(&mut Communicator, &Stream) -> R) -> R {
        self.meeting.wait();
        let result = work(&mut self.comm, &self.stream);
        self.comm.synchronize(&self.stream).unwrap();
        self.meeting.wait();
        result
    }

    /// Records `work`, and has the graph on the device before any rank goes on.
    fn capture(
        &mut self,
        work: impl FnOnce(&mut Communicator, &Stream) -> Result<(), CommError>,
    ) -> Graph {
        self.meeting.wait();
        let Self { comm, stream, .. } = self;
        // SAFETY: every test keeps its tensors until the graph's launches have ended.
        let graph = unsafe {
            Graph::capture(stream.device_stream().unwrap(), || work(comm, stream)).unwrap()
        };
        graph.upload(self.queue()).unwrap();
        self.queue().synchronize_within(LIMIT).unwrap();
        self.meeting.wait();
        graph
    }
}

/// Runs `work` on each of `world` ranks, which take the devices in turn.
fn on_each(
    devices: &[Device],
    world: usize,
    timeout: Duration,
    inbox: InboxOptions,
    work: impl Fn(&mut Seat<'_>) + Sync,
) {
    let options = GroupOptions { timeout, inbox, ..GroupOptions::default() };
    let meeting = Meeting { world, came: AtomicUsize::new(0) };
    let (work, meeting) = (&work, &meeting);
    std::thread::scope(|scope| {
        for (rank, group) in in_process(world, &options).unwrap().into_iter().enumerate() {
            let device = &devices[rank % devices.len()];
            scope.spawn(move || {
                let group = group.on_device(device.ordinal());
                let comm = Communicator::connect(group, Some("p2p")).unwrap();
                let stream = Stream::cuda(device).unwrap();
                let mut seat = Seat { comm, stream, device, meeting };
                work(&mut seat);
                meeting.wait();
            });
        }
    });
}

/// Inboxes on the GPU and on the host, with room for everything and for little.
fn inboxes() -> [InboxOptions; 4] {
    let inbox = |slot_bytes, in_host_memory| InboxOptions { slot_bytes, in_host_memory };
    [inbox(2 << 20, false), inbox(SMALL, false), inbox(2 << 20, true), inbox(SMALL, true)]
}

/// A small integer for element `index` of `rank`: sums of them are exact in every type.
fn value(index: usize, rank: usize) -> f32 {
    ((index * 37 + rank * 11) % 15) as f32 - 7.0
}

fn values<T: Float>(count: usize, rank: usize) -> Vec<T> {
    (0..count).map(|index| T::from_f32(value(index, rank))).collect()
}

fn combined(inputs: impl Iterator<Item = f32>, op: ReduceOp) -> f32 {
    inputs
        .reduce(|a, b| match op {
            ReduceOp::Sum => a + b,
            ReduceOp::Max if a.is_nan() || b.is_nan() => f32::NAN,
            ReduceOp::Max => a.max(b),
        })
        .unwrap()
}

fn expected<T: Float>(count: usize, world: usize, op: ReduceOp) -> Vec<T> {
    let one = |index| combined((0..world).map(|rank| value(index, rank)), op);
    (0..count).map(|index| T::from_f32(one(index))).collect()
}

fn all_reduces<T: Float + PartialEq>(seat: &mut Seat<'_>) {
    for count in [0, 1, 7, 8, 9, 4095, 4097, 100_003] {
        for op in [ReduceOp::Sum, ReduceOp::Max] {
            let mut x = seat.tensor(&[1, count], &values::<T>(count, seat.rank()));
            seat.together(|comm, stream| comm.all_reduce(&mut x, op, stream).unwrap());
            let wanted = expected::<T>(count, seat.world(), op);
            assert!(seat.read::<T>(&x) == wanted, "{count} of {}, {op}", T::DTYPE);

            let x = seat.tensor(&[1, count], &values::<T>(count, seat.rank()));
            let mut out = seat.tensor(&[1, count], &vec![T::from_f32(-99.0); count]);
            seat.together(|comm, stream| comm.all_reduce_into(&x, &mut out, op, stream).unwrap());
            assert!(seat.read::<T>(&out) == wanted, "{count} of {}, {op}, into", T::DTYPE);
        }
    }
}

fn all_types(seat: &mut Seat<'_>) {
    all_reduces::<f32>(seat);
    all_reduces::<f16>(seat);
    all_reduces::<bf16>(seat);
}

#[test]
fn sums_and_maxima_are_exact_for_every_world_type_size_and_inbox() {
    let Some(devices) = gpus(1) else { return };
    for world in [2, 3, 4, 5, 8] {
        for inbox in inboxes() {
            on_each(&devices, world, LIMIT, inbox, all_types);
        }
    }
}

#[test]
fn two_gpus_reach_each_other() {
    let Some(devices) = gpus(2) else { return };
    for world in [2, 4] {
        for inbox in inboxes() {
            on_each(&devices, world, LIMIT, inbox, all_types);
        }
    }
}

fn special_values<T: Float>(seat: &mut Seat<'_>) {
    // Two of them make a word of all ones also where elements have 16 bits.
    let ones = f32::from_bits(u32::MAX);
    let first = [f32::INFINITY, f32::INFINITY, f32::NAN, -0.0, ones, ones];
    let other = [1.0, f32::NEG_INFINITY, 1.0, -0.0, 1.0, f32::NAN];
    let own = if seat.rank() == 0 { first } else { other };
    for op in [ReduceOp::Sum, ReduceOp::Max] {
        let mut x = seat.tensor(&[1, 6], &own.map(T::from_f32));
        seat.together(|comm, stream| comm.all_reduce(&mut x, op, stream).unwrap());
        for (index, found) in seat.read::<T>(&x).into_iter().map(T::to_f32).enumerate() {
            let inputs = (0..seat.world()).map(|rank| if rank == 0 { first } else { other }[index]);
            let wanted = combined(inputs, op);
            let same = found.to_bits() == wanted.to_bits() || found.is_nan() && wanted.is_nan();
            assert!(same, "element {index} of {}, {op}: {found}, not {wanted}", T::DTYPE);
        }
    }
}

#[test]
fn infinities_nans_and_negative_zeros_stay_what_they_are() {
    let Some(devices) = gpus(1) else { return };
    for world in [2, 3, 8] {
        for inbox in inboxes() {
            on_each(&devices, world, LIMIT, inbox, |seat| {
                special_values::<f32>(seat);
                special_values::<f16>(seat);
                special_values::<bf16>(seat);
            });
        }
    }
}

#[test]
fn scattered_and_gathered_parts_are_in_order_of_rank() {
    let Some(devices) = gpus(1) else { return };
    for world in [2, 3, 8] {
        for inbox in inboxes() {
            on_each(&devices, world, LIMIT, inbox, |seat| {
                let (rank, world) = (seat.rank(), seat.world());
                for count in [0, 1, 7, 385, 20_011] {
                    let x = seat.tensor(&[1, world * count], &values::<bf16>(world * count, rank));
                    let mut out = seat.tensor(&[1, count], &vec![bf16::ZERO; count]);
                    seat.together(|comm, stream| {
                        comm.reduce_scatter(&x, &mut out, ReduceOp::Sum, stream).unwrap();
                    });
                    let wanted = expected::<bf16>(world * count, world, ReduceOp::Sum);
                    let part = &wanted[rank * count..][..count];
                    assert!(seat.read::<bf16>(&out) == part, "scattered {count}");

                    // The words of all ones are those that the inboxes of sums could not carry.
                    let word = |index: usize, rank: usize| match index % 3 {
                        0 => -1,
                        _ => (index * 16 + rank) as i32,
                    };
                    let own: Vec<_> = (0..count).map(|index| word(index, rank)).collect();
                    let x = seat.tensor(&[1, count], &own);
                    let mut out = seat.tensor(&[1, world * count], &vec![7; world * count]);
                    seat.together(|comm, stream| comm.all_gather(&x, &mut out, stream).unwrap());
                    let all = (0..world).flat_map(|rank| (0..count).map(move |i| word(i, rank)));
                    assert!(seat.read::<i32>(&out).into_iter().eq(all), "gathered {count}");
                }
            });
        }
    }
}

/// The collectives of a step of a model, with their tensors.
struct Step {
    source: Tensor,
    reduced: Vec<Tensor>,
    scattered: Tensor,
    gathered: Tensor,
    count: usize,
}

impl Step {
    fn new(seat: &Seat<'_>, count: usize, calls: usize) -> Self {
        let zeros = |count| seat.tensor(&[1, count], &vec![bf16::ZERO; count]);
        let world = seat.world();
        Self {
            source: zeros(world * count),
            reduced: (0..calls).map(|_| zeros(world * count)).collect(),
            scattered: zeros(count),
            gathered: zeros(world * count),
            count,
        }
    }

    fn record(&mut self, comm: &mut Communicator, stream: &Stream) -> Result<(), CommError> {
        let queue = stream.device_stream().unwrap();
        for x in &mut self.reduced {
            let (from, to) = (self.source.device_pointer(), x.device_pointer_mut());
            // SAFETY: both tensors have as many bytes, and live as long as the graph.
            unsafe { queue.copy(to.unwrap(), from.unwrap(), x.bytes()) }?;
            comm.all_reduce(x, ReduceOp::Sum, stream)?;
        }
        comm.reduce_scatter(&self.source, &mut self.scattered, ReduceOp::Sum, stream)?;
        comm.barrier(stream)?;
        comm.all_gather(&self.scattered, &mut self.gathered, stream)
    }

    /// Gives the source the values of a round.
    fn load(&mut self, seat: &Seat<'_>, round: usize) {
        let count = seat.world() * self.count;
        let own = Tensor::from_slice(&[1, count], &values::<bf16>(count, seat.rank() + round));
        self.source.copy_from_host(&own, seat.queue()).unwrap();
    }

    fn check(&self, seat: &Seat<'_>, round: usize) {
        let world = seat.world();
        let sum = |index| (0..world).map(|rank| value(index, rank + round)).sum::<f32>();
        let wanted: Vec<_> =
            (0..world * self.count).map(|index| bf16::from_f32(sum(index))).collect();
        for (call, x) in self.reduced.iter().enumerate() {
            assert!(seat.read::<bf16>(x) == wanted, "call {call}, {} a rank", self.count);
        }
        assert!(seat.read::<bf16>(&self.gathered) == wanted, "gathered {} a rank", self.count);
    }
}

#[test]
fn a_graph_of_a_step_is_replayed_with_new_data() {
    let Some(devices) = gpus(1) else { return };
    for world in [2, 4, 8] {
        on_each(&devices, world, LIMIT, InboxOptions::default(), |seat| {
            let mut step = Step::new(seat, 7168 / world, 119);
            let graph = seat.capture(|comm, stream| step.record(comm, stream));
            for round in 0..20 {
                step.load(seat, round);
                seat.together(|_, stream| graph.launch(stream.device_stream().unwrap()).unwrap());
                step.check(seat, round);
            }
        });
    }
}

#[test]
fn ten_thousand_mixed_rounds_stay_right() {
    let Some(devices) = gpus(1) else { return };
    for world in [2, 4, 8] {
        for slot_bytes in [2 << 20, SMALL] {
            let inbox = InboxOptions { slot_bytes, in_host_memory: false };
            on_each(&devices, world, LIMIT, inbox, |seat| {
                // One shot, two shots, and where slots are small several pieces; 42 calls a launch.
                let mut steps = [1, 897, 4099].map(|count| Step::new(seat, count, 11));
                let graph = seat.capture(|comm, stream| {
                    steps.iter_mut().try_for_each(|step| step.record(comm, stream))
                });
                for round in 0..3 {
                    steps.iter_mut().for_each(|step| step.load(seat, round));
                    seat.together(|_, stream| {
                        for _ in 0..80 {
                            graph.launch(stream.device_stream().unwrap()).unwrap();
                        }
                    });
                    steps.iter().for_each(|step| step.check(seat, round));
                }
            });
        }
    }
}

#[test]
fn the_fused_form_is_the_three_operators() {
    const EPSILON: f32 = 1e-6;
    let Some(devices) = gpus(1) else { return };
    for world in [2, 3, 4, 8] {
        for inbox in [inboxes()[0], inboxes()[2]] {
            on_each(&devices, world, LIMIT, inbox, |seat| {
                for (rows, width) in [(1, 7168), (4, 7168), (9, 1016), (1, 16_384), (3, 8)] {
                    let count = rows * width;
                    let old: Vec<_> =
                        (0..count).map(|i| bf16::from_f32(i as f32 * 0.01 % 3.0 - 1.0)).collect();
                    let factors: Vec<_> =
                        (0..width).map(|i| bf16::from_f32(0.5 + (i % 7) as f32 / 4.0)).collect();
                    let x = seat.tensor(&[rows, width], &values::<bf16>(count, seat.rank()));
                    let mut residual = seat.tensor(&[rows, width], &old);
                    let weight = seat.tensor(&[width], &factors);
                    let mut out = seat.tensor(&[rows, width], &vec![bf16::ZERO; count]);
                    assert!(seat.comm.fuses(x.dtype(), rows, width));
                    seat.together(|comm, stream| {
                        let call = AddRmsNorm {
                            x: &x,
                            residual: &mut residual,
                            weight: &weight,
                            epsilon: EPSILON,
                            out: &mut out,
                        };
                        comm.all_reduce_add_rms_norm(call, stream).unwrap();
                    });
                    let sum = expected::<bf16>(count, seat.world(), ReduceOp::Sum);
                    let new: Vec<_> = old
                        .iter()
                        .zip(&sum)
                        .map(|(old, sum)| bf16::from_f32(old.to_f32() + sum.to_f32()))
                        .collect();
                    assert!(seat.read::<bf16>(&residual) == new, "{rows} rows of {width}");
                    let found = seat.read::<bf16>(&out);
                    for (row, found) in new.chunks(width).zip(found.chunks(width)) {
                        let squares =
                            row.iter().map(|v| f64::from(v.to_f32()).powi(2)).sum::<f64>();
                        let rms = (squares / width as f64 + f64::from(EPSILON)).sqrt();
                        for ((value, factor), found) in row.iter().zip(&factors).zip(found) {
                            let wanted = value.to_f64() / rms * factor.to_f64();
                            let near = (found.to_f64() - wanted).abs() <= wanted.abs() / 250.0;
                            assert!(near, "{found}, not {wanted}, in {rows} rows of {width}");
                        }
                    }
                }
                for (rows, width) in [(1000, 7168), (1, 1001), (1, 32_768)] {
                    assert!(!seat.comm.fuses(paceline_kernels::DType::BF16, rows, width));
                }
            });
        }
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_in_time() {
    let Some(devices) = gpus(1) else { return };
    let timeout = Duration::from_millis(500);
    on_each(&devices, 3, timeout, InboxOptions::default(), |seat| {
        let mut x = seat.tensor(&[1, 100], &[1f32; 100]);
        seat.meeting.wait();
        if seat.rank() < 2 {
            let start = Instant::now();
            seat.comm.all_reduce(&mut x, ReduceOp::Sum, &seat.stream).unwrap();
            let error = seat.comm.synchronize(&seat.stream).unwrap_err();
            assert!(start.elapsed() < 6 * timeout, "{:?}", start.elapsed());
            assert!(
                matches!(error, CommError::PeerTimeout { peer: Rank(2), index: 1, .. }),
                "{error}"
            );
            assert_eq!(seat.comm.check(), Err(error));
        }
        seat.meeting.wait();
        let error = seat.comm.all_reduce(&mut x, ReduceOp::Sum, &seat.stream).unwrap_err();
        assert!(matches!(error, CommError::PeerTimeout { peer: Rank(2), .. }), "{error}");
        seat.meeting.wait();
    });
}

#[test]
fn a_rank_that_left_is_named_in_time() {
    let Some(devices) = gpus(1) else { return };
    let timeout = Duration::from_millis(500);
    on_each(&devices, 2, timeout, InboxOptions::default(), |seat| {
        let mut x = seat.tensor(&[1, 100], &[1f32; 100]);
        seat.meeting.wait();
        if seat.rank() == 1 {
            seat.comm = Communicator::alone();
            return;
        }
        seat.comm.all_reduce(&mut x, ReduceOp::Sum, &seat.stream).unwrap();
        let error = seat.comm.synchronize(&seat.stream).unwrap_err();
        let gone = matches!(error, CommError::RankLost { rank: Rank(1), cause, .. }
            if cause == LossCause::Left);
        assert!(gone, "{error}");
    });
}

#[test]
fn an_abort_ends_a_replay() {
    let Some(devices) = gpus(1) else { return };
    on_each(&devices, 2, LIMIT, InboxOptions::default(), |seat| {
        let mut step = Step::new(seat, 512, 50);
        let graph = seat.capture(|comm, stream| step.record(comm, stream));
        let start = Instant::now();
        if seat.rank() == 0 {
            // Rank 1 launches nothing, so this waits.
            graph.launch(seat.queue()).unwrap();
            seat.meeting.wait();
        } else {
            seat.meeting.wait();
            seat.comm.abort_handle().abort("enough");
        }
        let error = seat.comm.synchronize(&seat.stream).unwrap_err();
        let wanted = CommError::Aborted { by: Rank(1), reason: "enough".to_owned() };
        assert_eq!(error, wanted);
        seat.queue().synchronize_within(LIMIT / 4).unwrap();
        assert!(start.elapsed() < LIMIT / 2, "{:?}", start.elapsed());
        seat.meeting.wait();
    });
}
