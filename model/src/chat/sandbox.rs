//! Work on a template, in a thread of its own that nobody has to wait for.
//!
//! Fuel bounds what a template does, step by step. It does not see inside one step: comparing or
//! printing a list whose items are shared doubles with every level of nesting, and a deeply nested
//! one takes stack where it is compared, printed and even dropped. Invariant: neither a template
//! nor a fault in its engine can hold up, overflow or end the caller.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use crate::ModelError;

/// Far more than any template needs, and as long as anyone likes to wait.
const TIME_MAX: Duration = Duration::from_secs(2);
/// The deepest value that the fuel allows fits. Address space only, until it is used.
const STACK_BYTES: usize = 256 << 20;

/// Does the work, or gives it up after a time. What was given up goes on in its thread, to its end
/// or to that of the process, since a thread cannot be ended from outside.
pub(super) fn run<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ModelError> {
    let failed = |reason: String| ModelError::Template { reason: format!("{reason} (in {name})") };
    let (sender, receiver) = mpsc::sync_channel(1);
    // The receiver may have given up.
    let work = move || drop(sender.send(work()));
    let builder = thread::Builder::new().name("chat template".to_owned()).stack_size(STACK_BYTES);
    builder.spawn(work).map_err(|_| ModelError::Memory {
        what: format!("the stack of the thread that reads {name}"),
        bytes: STACK_BYTES as u64,
        advice: "raise the limit, or give a prompt without a chat template",
    })?;
    receiver.recv_timeout(TIME_MAX).map_err(|error| match error {
        RecvTimeoutError::Timeout => {
            failed(format!("it did not end within {} seconds", TIME_MAX.as_secs()))
        }
        RecvTimeoutError::Disconnected => failed("the template engine panicked on it".to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_panics_or_never_ends_is_an_error() {
        assert_eq!(run("x", || 7).unwrap(), 7);
        let (_keep, never) = mpsc::channel::<()>();
        let error = run("x", move || never.recv()).unwrap_err().to_string();
        assert!(error.contains("did not end within 2 seconds (in x)"), "{error}");
        let error = run("x", || panic!("on purpose")).map(|()| 0).unwrap_err().to_string();
        assert!(error.contains("panicked"), "{error}");
    }
}
