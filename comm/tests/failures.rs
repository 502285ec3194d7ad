//! What goes wrong among ranks gives every rank the same typed error, and leaves nobody waiting.

mod common;

use std::{
    sync::{Arc, Mutex, mpsc},
    time::{Duration, Instant},
};

use common::{stream, threads, threads_with};
use paceline_comm::{
    Abort, Collective, CommError, Communicator, GroupOptions, LossCause, Rank, ReduceOp, Result,
    in_process,
};
use paceline_kernels::{DType, Tensor};

/// What must not need the deadline (of 120 seconds by default) happens within this.
const SOON: Duration = Duration::from_secs(20);

fn sum(comm: &mut Communicator, dtype: DType, length: usize) -> Result<()> {
    comm.all_reduce(&mut Tensor::zeros(dtype, &[1, length]), ReduceOp::Sum, &stream())
}

/// Runs `work` on each rank and returns what each got.
fn results<T: Send>(world: usize, work: impl Fn(&mut Communicator) -> T + Sync) -> Vec<T> {
    let (sender, receiver) = mpsc::channel();
    threads(world, |comm| {
        sender.send((comm.rank(), work(comm))).expect("the receiver outlives the threads");
    });
    drop(sender);
    let mut results: Vec<_> = receiver.iter().collect();
    results.sort_by_key(|(rank, _)| *rank);
    results.into_iter().map(|(_, result)| result).collect()
}

/// Rank 1 does `odd`, the others `usual`; all must get the same mismatch that names rank 1.
fn mismatch(
    world: usize,
    usual: fn(&mut Communicator) -> Result<()>,
    odd: fn(&mut Communicator) -> Result<()>,
) -> String {
    let start = Instant::now();
    let errors = results(world, |comm| {
        let result = if comm.rank() == Rank(1) { odd(comm) } else { usual(comm) };
        // A root that only sends is told at its next call.
        let error = result.and_then(|()| comm.barrier(&stream())).unwrap_err();
        assert_eq!(comm.barrier(&stream()), Err(error.clone()), "the group stays unusable");
        assert_eq!(comm.check(), Err(error.clone()));
        error
    });
    assert!(start.elapsed() < SOON);
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    let CommError::Mismatch { first, second } = &errors[0] else { panic!("{}", errors[0]) };
    assert!([first.rank, second.rank].contains(&Rank(1)), "{}", errors[0]);
    errors[0].to_string()
}

#[test]
fn different_sizes_are_named() {
    let text = mismatch(2, |c| sum(c, DType::F32, 8), |c| sum(c, DType::F32, 9));
    assert!(text.contains("all_reduce(sum, 8 of f32)"), "{text}");
    assert!(text.contains("rank 1 called all_reduce(sum, 9 of f32)"), "{text}");
    // One size needs one step, the other many.
    let text = mismatch(3, |c| sum(c, DType::F32, 8), |c| sum(c, DType::F32, 1 << 20));
    assert!(text.contains("1048576"), "{text}");
}

#[test]
fn different_types_are_named() {
    let text = mismatch(4, |c| sum(c, DType::F16, 8), |c| sum(c, DType::BF16, 8));
    assert!(text.contains("f16") && text.contains("bf16"), "{text}");
}

#[test]
fn different_operations_are_named() {
    fn largest(comm: &mut Communicator) -> Result<()> {
        comm.all_reduce(&mut Tensor::zeros(DType::F32, &[8]), ReduceOp::Max, &stream())
    }
    let text = mismatch(2, |c| sum(c, DType::F32, 8), largest);
    assert!(text.contains("sum") && text.contains("max"), "{text}");
}

#[test]
fn different_collectives_are_named() {
    let text = mismatch(3, |c| sum(c, DType::F32, 8), |c| c.barrier(&stream()));
    assert!(text.contains("all_reduce") && text.contains("barrier"), "{text}");
    fn gather(comm: &mut Communicator) -> Result<()> {
        let x = Tensor::zeros(DType::F32, &[8]);
        let mut out = Tensor::zeros(DType::F32, &[8 * comm.world_size()]);
        comm.all_gather(&x, &mut out, &stream())
    }
    let text = mismatch(3, gather, |c| sum(c, DType::F32, 8));
    assert!(text.contains("all_reduce") && text.contains("all_gather"), "{text}");
    // Some wait for a plan of rank 0, which does something else.
    let text = mismatch(2, |c| sum(c, DType::F32, 8), |c| c.broadcast_bytes(&mut vec![], Rank(0)));
    assert!(text.contains("broadcast_bytes(root 0"), "{text}");
}

#[test]
fn different_roots_are_named() {
    fn from(comm: &mut Communicator, root: usize) -> Result<()> {
        comm.broadcast(&mut Tensor::zeros(DType::U8, &[4]), Rank(root), &stream())
    }
    let text = mismatch(2, |c| from(c, 0), |c| from(c, 1));
    assert!(text.contains("root 0") && text.contains("root 1"), "{text}");
}

#[test]
fn a_rank_that_never_comes_is_named_at_the_deadline() {
    let options = GroupOptions { timeout: Duration::from_millis(300), ..Default::default() };
    let finished = std::sync::Barrier::new(4);
    threads_with(4, &options, |comm| {
        if comm.rank() != Rank(2) {
            let start = Instant::now();
            let error = sum(comm, DType::F32, 5).unwrap_err();
            assert!(start.elapsed() < options.timeout + SOON);
            let CommError::Timeout { collective, waited, missing } = &error else {
                panic!("{error}")
            };
            assert_eq!((*collective, missing), (Collective::AllReduce, &vec![Rank(2)]));
            assert!(*waited >= options.timeout);
            assert_eq!(sum(comm, DType::F32, 5), Err(error));
        }
        finished.wait();
        // The late rank learns why nobody is there any more.
        assert!(matches!(sum(comm, DType::F32, 5), Err(CommError::Timeout { .. })));
    });
}

#[test]
fn a_rank_that_leaves_or_panics_is_named_at_once() {
    for cause in [LossCause::Left, LossCause::Panicked] {
        let start = Instant::now();
        let mut groups = in_process(3, &GroupOptions::default()).unwrap();
        let leaver = groups.remove(1);
        std::thread::scope(|scope| {
            let gone = scope.spawn(move || {
                let mut comm = Communicator::connect(leaver, None).unwrap();
                sum(&mut comm, DType::F32, 5).unwrap();
                assert!(cause != LossCause::Panicked, "this panic is the test");
            });
            for group in groups {
                scope.spawn(move || {
                    let mut comm = Communicator::connect(group, None).unwrap();
                    sum(&mut comm, DType::F32, 5).unwrap();
                    let error = sum(&mut comm, DType::F32, 5).unwrap_err();
                    let collective = Collective::AllReduce;
                    assert_eq!(error, CommError::RankLost { rank: Rank(1), cause, collective });
                });
            }
            assert_eq!(gone.join().is_err(), cause == LossCause::Panicked);
        });
        assert!(start.elapsed() < SOON);
    }
}

#[test]
fn a_rank_may_leave_when_it_has_done_its_part() {
    for _ in 0..50 {
        threads(4, |comm| sum(comm, DType::F32, 3000).unwrap());
    }
}

#[test]
fn another_thread_frees_a_stuck_rank() {
    let start = Instant::now();
    let mut groups = in_process(3, &GroupOptions::default()).unwrap();
    let absent = groups.pop().unwrap();
    let (sender, handles) = mpsc::channel();
    std::thread::scope(|scope| {
        for (index, group) in groups.into_iter().enumerate() {
            let sender = sender.clone();
            scope.spawn(move || {
                // The absent rank never connects, so these wait for it here.
                sender.send((index, group.abort_handle())).unwrap();
                let error = Communicator::connect(group, None).map(|_| ()).unwrap_err();
                let reason = "the user pressed Ctrl-C".to_owned();
                assert_eq!(error, CommError::Aborted { by: Rank(1), reason });
            });
        }
        let handles: Vec<_> = handles.iter().take(2).collect();
        let (_, handle) = handles.iter().find(|(index, _)| *index == 1).unwrap();
        handle.abort("the user pressed Ctrl-C");
        handle.abort("again");
    });
    assert!(start.elapsed() < SOON);
    drop(absent);
}

#[test]
fn an_abort_ends_the_wait_for_a_plan() {
    let (sender, handles) = mpsc::channel();
    let (sender, handles) = (Mutex::new(sender), Mutex::new(handles));
    threads(2, |comm| {
        comm.barrier(&stream()).unwrap();
        if comm.rank() == Rank(1) {
            sender.lock().unwrap().send(comm.abort_handle()).unwrap();
            let error = comm.broadcast_bytes(&mut Vec::new(), Rank(0)).unwrap_err();
            assert!(matches!(error, CommError::Aborted { by: Rank(1), .. }), "{error}");
        } else {
            let handle: Arc<dyn Abort> = handles.lock().unwrap().recv().unwrap();
            handle.abort("shutting down");
            assert!(matches!(comm.check(), Err(CommError::Aborted { .. })));
        }
    });
}

#[test]
fn what_one_rank_can_see_is_wrong_leaves_the_group_usable() {
    threads(2, |comm| {
        let x = Tensor::zeros(DType::F32, &[3, 2]);
        let mut out = Tensor::zeros(DType::F32, &[7, 2]);
        let error = comm.all_gather(&x, &mut out, &stream()).unwrap_err();
        assert!(error.to_string().contains("2 times its elements"), "{error}");
        let mut out = Tensor::zeros(DType::F16, &[6, 2]);
        assert!(matches!(
            comm.all_gather(&x, &mut out, &stream()),
            Err(CommError::Argument { collective: Collective::AllGather, .. })
        ));
        let error = comm.broadcast_bytes(&mut vec![], Rank(2)).unwrap_err();
        assert!(error.to_string().contains("no rank 2"), "{error}");
        let mut counts = Tensor::zeros(DType::I32, &[4]);
        let error = comm.all_reduce(&mut counts, ReduceOp::Sum, &stream()).unwrap_err();
        assert!(error.to_string().contains("host has no all_reduce of i32"), "{error}");
        let gaps = Tensor::zeros(DType::F32, &[4, 4]).into_shared().slice_columns(0..2);
        let mut out = Tensor::zeros(DType::F32, &[16]);
        let error = comm.all_gather(&gaps, &mut out, &stream()).unwrap_err();
        assert!(error.to_string().contains("gaps"), "{error}");
        comm.barrier(&stream()).unwrap();
    });
}

#[test]
fn impossible_groups_are_refused() {
    let refused = |world, options: &GroupOptions| in_process(world, options).unwrap_err();
    let options = GroupOptions::default();
    assert!(refused(0, &options).to_string().contains("1 to 64"));
    assert!(refused(65, &options).to_string().contains("1 to 64"));
    let options = GroupOptions { slot_bytes: 5000, ..GroupOptions::default() };
    assert!(refused(2, &options).to_string().contains("multiple of 4096"));
    let options = GroupOptions { timeout: Duration::ZERO, ..GroupOptions::default() };
    assert!(refused(2, &options).to_string().contains("timeout"));
}

#[test]
fn a_back_end_must_exist() {
    for (name, expected) in [("nccl", "no back end"), ("carrier-pigeon", "no back end")] {
        for group in in_process(2, &GroupOptions::default()).unwrap() {
            let error = Communicator::connect(group, Some(name)).map(|_| ()).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
    std::thread::scope(|scope| {
        for group in in_process(2, &GroupOptions::default()).unwrap() {
            scope.spawn(|| Communicator::connect(group, Some("host")).unwrap());
        }
    });
}
