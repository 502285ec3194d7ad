//! Memory that is asked for before anything is done with it.
//!
//! An allocation that fails ends the program, so what can be planned is tried first: invariant:
//! [`require`] takes nothing and leaves nothing behind.

use memmap2::MmapMut;

use crate::ModelError;

/// Fails if the system would not give so many bytes now: because of a limit on the process, or
/// because no machine of this size could ever hold them. Memory that the system promises to
/// several at once is promised here too.
///
/// # Errors
/// [`ModelError::Memory`] with `what` it is for and `advice` on what to do.
pub fn require(what: &str, bytes: u64, advice: &'static str) -> Result<(), ModelError> {
    let failed = || ModelError::Memory { what: what.to_owned(), bytes, advice };
    let length = usize::try_from(bytes).map_err(|_| failed())?;
    // An anonymous mapping is what a large allocation is made of, and costs nothing untouched.
    if length > 0 {
        MmapMut::map_anon(length).map_err(|_| failed())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_amounts_are_refused_with_their_size() {
        require("nothing", 0, "").unwrap();
        require("a page", 4096, "").unwrap();
        for bytes in [1 << 60, u64::MAX] {
            let error = require("the cache", bytes, "ask for less").unwrap_err().to_string();
            let parts = ["the cache", &bytes.to_string(), "ask for less"];
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }
}
