#![doc = include_str!("../README.md")]

mod answer;
mod drafter;
mod engine;
mod error;
mod loading;
mod options;
pub mod pages;
mod request;
mod round;
mod sampling;
pub mod scheduler;
pub mod stop_text;
pub mod worker;

pub use engine::Engine;
pub use error::{Result, RuntimeError};
pub use loading::{Progress, serve};
pub use options::{CONTEXT_DEFAULT_MAX, EngineOptions, Ranks};
pub use request::{
    Event, FinishReason, Flow, Outcome, Request, Sampling, Speculation, Timings, TokenEvent,
    TopLogits,
};
