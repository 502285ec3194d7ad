#![doc = include_str!("../README.md")]

mod admission;
mod answer;
mod drafter;
mod engine;
mod error;
mod loading;
mod logprobs;
mod measurement;
mod options;
pub mod pages;
mod planning;
mod request;
mod round;
mod sampling;
pub mod scheduler;
mod sequence;
mod service;
pub mod stop_text;
pub mod worker;

pub use engine::Engine;
pub use error::{Result, RuntimeError};
pub use loading::{Progress, serve};
pub use measurement::PassTimes;
pub use options::{CACHE_DEFAULT_BYTES_MAX, CONTEXT_DEFAULT_MAX, EngineOptions, Ranks};
pub use request::{
    Event, FinishReason, Flow, Outcome, Request, RequestId, Sampling, Speculation, Timings,
    TokenEvent, TopLogits,
};
pub use service::{Answer, AnswerEvent, Service};
