#![doc = include_str!("../README.md")]

pub mod chat;
pub mod config;
pub mod demo;
pub mod eagle3;
pub mod error;
pub mod forward;
mod layers;
pub mod memory;
pub mod pass;
pub mod shard;
pub mod stop;
pub mod synthetic;
pub mod tokenizer;
pub mod weights;

pub use error::ModelError;
