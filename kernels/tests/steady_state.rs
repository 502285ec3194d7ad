//! The matrix products do not allocate once their working memory has grown.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

use paceline_kernels::{
    DType, Stream, Tensor, Weight,
    ops::{
        linear::{HeadLayout, linear, linear_heads},
        moe::{Expert, MoeScratch, Routing, moe},
        swiglu::swiglu,
    },
};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: all work is left to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: by the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: by the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn bf16_weight(outputs: usize, inputs: usize) -> Weight {
    Weight::float(Tensor::zeros(DType::BF16, &[outputs, inputs])).unwrap()
}

fn int4_weight(outputs: usize, inputs: usize) -> Weight {
    let packed = Tensor::zeros(DType::I32, &[outputs, inputs / 8]);
    Weight::int4(packed, Tensor::zeros(DType::BF16, &[outputs, inputs / 32])).unwrap()
}

#[test]
fn passes_after_the_first_do_not_allocate() {
    const ROWS: usize = 9;
    let stream = Stream::host(1).unwrap();
    let weight = bf16_weight(128, 64);
    let experts: Vec<Expert> = (0..4)
        .map(|_| Expert {
            gate: int4_weight(96, 64),
            up: int4_weight(96, 64),
            down: int4_weight(64, 96),
        })
        .collect();
    let mut scratch = MoeScratch::for_rows(ROWS, 2, 4, 64, 96);
    let mut routing = Routing::with_capacity(ROWS, 2);
    for dtype in [DType::F32, DType::BF16] {
        let mut x = Tensor::zeros(dtype, &[ROWS, 64]);
        let mut wide = Tensor::zeros(dtype, &[ROWS, 128]);
        let mut other = wide.clone();
        let mut out = Tensor::zeros(dtype, &[ROWS, 64]);
        let mut pass = |rows: usize| {
            for tensor in [&mut x, &mut wide, &mut other, &mut out] {
                tensor.set_rows(rows);
            }
            routing.set_rows(rows);
            linear(&stream, &x, &weight, &mut wide);
            let heads = HeadLayout { offset: 0, stride: 64 };
            linear_heads(&stream, &wide, heads, &weight, 2, &mut other, heads);
            swiglu(&stream, &x, &weight, &weight, &mut wide);
            moe(&stream, &x, &experts, 0, &routing, &mut scratch, &mut out);
        };
        pass(ROWS);
        pass(1);
        let before = ALLOCATIONS.get();
        for rows in [1, 2, 5, ROWS, 4] {
            pass(rows);
        }
        assert_eq!(ALLOCATIONS.get(), before, "{dtype}");
    }
}
