//! Back ends that fail on one rank, and what the group makes of it.

use paceline_kernels::{DType, Stream, Tensor};

use super::*;
use crate::{GroupOptions, Limits, in_process};

/// A back end that works like `host`, except where it is told not to.
struct Picky {
    name: &'static str,
    /// The rank on which connecting fails.
    fails_on: Option<usize>,
    is_possible: bool,
}

impl Backend for Picky {
    fn name(&self) -> &'static str {
        self.name
    }

    fn probe(&self, topology: &Topology) -> Result<Limits, Unavailable> {
        if self.is_possible {
            return backend::find("host")?.probe(topology);
        }
        let (what, next_step) = ("a fast link".to_owned(), "plug one in".to_owned());
        Err(Unavailable::NotFound { name: self.name, what, next_step })
    }

    fn connect(&self, group: &mut Group) -> Result<Box<dyn Connection>> {
        if self.fails_on == Some(group.rank().index()) {
            let reason = "out of windows".to_owned();
            return Err(CommError::System { what: "opening a window", reason });
        }
        backend::find("host")?.connect(group)
    }
}

fn on_each(world: usize, backends: &[&dyn Backend], check: impl Fn(&mut Communicator) + Sync) {
    let check = &check;
    std::thread::scope(|scope| {
        for group in in_process(world, &GroupOptions::default()).unwrap() {
            scope.spawn(move || check(&mut Communicator::connect_to(group, backends).unwrap()));
        }
    });
}

fn sum_works(comm: &mut Communicator) {
    let stream = Stream::host(1).unwrap();
    let mut x = Tensor::from_slice(&[1], &[1f32]);
    comm.all_reduce(&mut x, ReduceOp::Sum, &stream).unwrap();
    assert_eq!(x.as_slice::<f32>(), [comm.world_size() as f32]);
}

#[test]
fn if_one_rank_cannot_connect_none_uses_the_back_end() {
    let broken = Picky { name: "p2p", fails_on: Some(2), is_possible: true };
    let sound = Picky { name: "nccl", fails_on: None, is_possible: true };
    on_each(4, &[&broken, &sound], |comm| {
        sum_works(comm);
        let declined = comm.declined();
        assert_eq!(declined.len(), 1);
        assert_eq!((declined[0].backend, declined[0].rank), ("p2p", Rank(2)));
        assert!(declined[0].reason.contains("out of windows"));
        assert_eq!(comm.counts()[0].backend, "nccl");
        let choice = comm.backend_for(Collective::AllReduce, DType::F32, 4).unwrap();
        assert_eq!((choice.name, choice.reason), ("nccl", Reason::Only));
    });
}

#[test]
fn what_serves_a_call_is_what_is_counted() {
    let first = Picky { name: "p2p", fails_on: None, is_possible: true };
    let second = Picky { name: "nccl", fails_on: None, is_possible: true };
    let absent = Picky { name: "mscclpp", fails_on: None, is_possible: false };
    on_each(2, &[&absent, &first, &second], |comm| {
        sum_works(comm);
        let choice = comm.backend_for(Collective::AllReduce, DType::F32, 4).unwrap();
        assert_eq!((choice.name, choice.reason), ("p2p", Reason::First));
        let used: Vec<_> = comm.counts().iter().map(|usage| (usage.backend, usage.calls)).collect();
        assert_eq!(used, [("p2p", 1)]);
        assert!(comm.declined()[0].reason.contains("plug one in"));
    });
}

#[test]
fn ranks_with_different_back_ends_learn_it() {
    let one = Picky { name: "p2p", fails_on: None, is_possible: true };
    let other = Picky { name: "nccl", fails_on: None, is_possible: true };
    std::thread::scope(|scope| {
        for group in in_process(2, &GroupOptions::default()).unwrap() {
            let backend: &dyn Backend = if group.rank() == Rank(0) { &one } else { &other };
            scope.spawn(move || {
                let error = Communicator::connect_to(group, &[backend]).map(|_| ()).unwrap_err();
                let text = error.to_string();
                assert!(text.contains("rank 0 has p2p, rank 1 has nccl"), "{text}");
            });
        }
    });
}

#[test]
fn nobody_serves_without_back_ends() {
    let absent = Picky { name: "nccl", fails_on: None, is_possible: false };
    on_each(2, &[&absent], |comm| {
        let stream = Stream::host(1).unwrap();
        let error = comm.barrier(&stream).unwrap_err();
        assert!(matches!(error, CommError::NotServed { .. }), "{error}");
    });
}
