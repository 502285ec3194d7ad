//! The operators of a forward pass, one a file.
//!
//! Invariant: the arithmetic of a row of a result depends on that row's inputs only, never on how
//! many rows share the call, how threads split it, or where a cache keeps its rows. So batched,
//! speculative and plain decoding give the same bits.

pub mod all_reduce;
pub mod argmax;
pub mod attention;
pub mod cache;
pub mod embed;
pub mod linear;
pub mod moe;
pub mod norm;
pub mod rope;
pub mod route;
mod rows;
pub mod swiglu;
