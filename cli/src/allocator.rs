//! The program's allocator: the system's, and a last word where that has no more memory.
//!
//! The standard library aborts when an allocation fails. Invariant: this program ends with an
//! exit code and a message that says how much was asked for, without allocating anything itself.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{Cursor, Write};

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

struct Allocator;

// SAFETY: every call goes to the system's allocator as it is, or does not return.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are the same.
        or_end(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are the same.
        or_end(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promises are the same.
        or_end(unsafe { System.realloc(pointer, layout, size) }, size)
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are the same.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[inline]
fn or_end(pointer: *mut u8, size: usize) -> *mut u8 {
    if pointer.is_null() {
        end(size);
    }
    pointer
}

#[cold]
fn end(size: usize) -> ! {
    let mut text = Cursor::new([0; 256]);
    // It is long enough, and a shorter message would do too.
    let _ = writeln!(
        text,
        "error: out of memory: {size} bytes more are needed, which this machine or a limit \
         (ulimit -v) does not give; take a smaller --context or --prefill-rows, or raise the limit"
    );
    let length = text.position() as usize;
    crate::bus_error::end(&text.get_ref()[..length]);
}
