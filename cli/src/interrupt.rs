//! Ctrl-C as something that can be asked for.
//!
//! Until one of these functions is called, Ctrl-C ends the program, as it does by default.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use anyhow::{Context, Result};
use signal_hook::consts::SIGINT;

/// Whether Ctrl-C was pressed since the last look.
pub(crate) struct Interrupt {
    pressed: Arc<AtomicBool>,
}

impl Interrupt {
    /// From now on Ctrl-C only leaves a mark.
    pub(crate) fn watch() -> Result<Self> {
        let pressed = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(SIGINT, Arc::clone(&pressed))
            .context("cannot watch for Ctrl-C")?;
        Ok(Self { pressed })
    }

    /// Whether it was pressed; it does not count again.
    pub(crate) fn take(&self) -> bool {
        self.pressed.swap(false, Ordering::Relaxed)
    }
}

/// From now on Ctrl-C does nothing.
pub(crate) fn ignore() -> Result<()> {
    Interrupt::watch().map(|_| ())
}
