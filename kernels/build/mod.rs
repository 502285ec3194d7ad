//! Compiling CUDA sources to fatbins: the code that build.rs and `cargo xtask kernels` share.
//!
//! Both include this folder by path, so that what they call fresh, and what they give to nvcc, is
//! the same. It lies in this crate because a crate from a registry has no xtask beside it, and
//! uses nothing but std. Its tests run with those of xtask. Start reading in `sources.rs`.

pub(crate) mod compile;
pub(crate) mod nvcc;
pub(crate) mod sources;
pub(crate) mod store;
pub(crate) mod toml;

/// Result whose error is a message for a person: there is no one else to read it at build time.
pub(crate) type Result<T> = std::result::Result<T, String>;

/// Adds what was being done to an error of the system.
pub(crate) fn because<T>(result: std::io::Result<T>, what: impl FnOnce() -> String) -> Result<T> {
    result.map_err(|error| format!("{}: {error}", what()))
}
