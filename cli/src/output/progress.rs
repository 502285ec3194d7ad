//! A bar on standard error while weights load.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Shown if standard error is a terminal.
pub(crate) struct LoadingBar {
    bar: ProgressBar,
}

impl LoadingBar {
    pub(crate) fn new(quiet: bool) -> Self {
        let target = match quiet {
            true => ProgressDrawTarget::hidden(),
            false => ProgressDrawTarget::stderr_with_hz(10),
        };
        let bar = ProgressBar::with_draw_target(None, target);
        let style = ProgressStyle::with_template("loading {wide_bar} {bytes}/{total_bytes} {eta}");
        if let Ok(style) = style {
            bar.set_style(style);
        }
        Self { bar }
    }

    pub(crate) fn set(&mut self, done: u64, total: u64) {
        self.bar.set_length(total);
        self.bar.set_position(done);
    }

    pub(crate) fn finish(self) {
        self.bar.finish_and_clear();
    }
}
