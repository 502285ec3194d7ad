//! Fuzz targets: mutated files of every kind that this crate reads. Nothing may panic, and every
//! refusal must be a message that a person can read.
//!
//! `PACELINE_FUZZ_EXECUTIONS` sets the number of executions of each target, `PACELINE_FUZZ_SEED`
//! the first seed. Execution n has the seed first + n and depends on nothing else, so a failure,
//! which prints its seed, is repeated with that seed and one execution.

mod bytes;
mod checkpoint;
mod config;
mod harness;
mod json;
#[path = "../text/published.rs"]
mod published;
mod random;
mod template;
mod tokenizer;
