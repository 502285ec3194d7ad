//! The hot path allocates nothing: not on the first call, not on any size, not when it waits.

mod common;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

use common::{stream, threads};
use paceline_comm::{Rank, ReduceOp};
use paceline_kernels::{DType, Tensor};

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, which counts the calls of each thread.
struct Counting;

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller keeps the same promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn collectives_do_not_allocate() {
    for world in [1, 2, 4] {
        threads(world, |comm| {
            let stream = stream();
            let mut sums: Vec<_> =
                [1, 1000, 300_000].map(|length| Tensor::zeros(DType::BF16, &[1, length])).into();
            let part = Tensor::zeros(DType::F16, &[3, 40]);
            let mut whole = Tensor::zeros(DType::F16, &[3 * world, 40]);
            let mut share = Tensor::zeros(DType::F16, &[3, 40]);
            let before = ALLOCATIONS.with(Cell::get);
            for x in &mut sums {
                for _ in 0..20 {
                    comm.all_reduce(x, ReduceOp::Sum, &stream).unwrap();
                    comm.broadcast(x, Rank(0), &stream).unwrap();
                }
            }
            comm.all_gather(&part, &mut whole, &stream).unwrap();
            comm.reduce_scatter(&whole, &mut share, ReduceOp::Max, &stream).unwrap();
            comm.barrier(&stream).unwrap();
            assert_eq!(ALLOCATIONS.with(Cell::get), before, "{world} ranks");
        });
    }
}
