#![doc = include_str!("../README.md")]

pub mod driver;
mod dtype;
mod error;
pub mod fatbin;
mod isa;
mod lanes;
pub mod ops;
mod stream;
mod tensor;
mod weight;

pub use dtype::{DType, Element, Float, f8e4m3_to_f32};
pub use error::{KernelError, Result};
pub use isa::Isa;
pub use stream::Stream;
pub use tensor::{SharedBytes, Tensor};
pub use weight::{Fp8Weight, INT4_GROUP, Int4Weight, Weight};
