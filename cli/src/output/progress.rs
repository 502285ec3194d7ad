//! Bars on standard error, if it is a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::print;

/// Bytes of weights, while they load.
pub(crate) struct LoadingBar {
    bar: ProgressBar,
}

impl LoadingBar {
    pub(crate) fn new(quiet: bool) -> Self {
        Self { bar: bar(None, quiet, "loading {wide_bar} {bytes}/{total_bytes} {eta}") }
    }

    pub(crate) fn set(&mut self, done: u64, total: u64) {
        self.bar.set_length(total);
        self.bar.set_position(done);
    }

    pub(crate) fn finish(self) {
        self.bar.finish_and_clear();
    }
}

/// Steps of a measurement. Where there is no terminal, its beginning is a line.
pub(crate) struct StepsBar {
    bar: ProgressBar,
}

impl StepsBar {
    pub(crate) fn new(title: &'static str, steps: usize, quiet: bool) -> Self {
        let bar = bar(Some(steps as u64), quiet, "{msg} {wide_bar} {pos}/{len} {eta}");
        bar.set_message(title);
        if !quiet && bar.is_hidden() {
            print::note(format_args!("{title}: {steps} runs"));
        }
        Self { bar }
    }

    pub(crate) fn step(&mut self) {
        self.bar.inc(1);
    }

    pub(crate) fn finish(self) {
        self.bar.finish_and_clear();
    }
}

fn bar(length: Option<u64>, quiet: bool, template: &str) -> ProgressBar {
    let target = match quiet {
        true => ProgressDrawTarget::hidden(),
        false => ProgressDrawTarget::stderr_with_hz(10),
    };
    let bar = ProgressBar::with_draw_target(length, target);
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}
