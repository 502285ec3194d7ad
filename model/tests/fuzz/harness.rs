//! Running one target many times.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use crate::random::Random;

/// Runs a target `default` times, or as often as the environment says.
pub(crate) fn run(target: &str, default: u64, mut execute: impl FnMut(&mut Random)) {
    let number = |name: &str| std::env::var(name).ok().map(|value| value.parse::<u64>().unwrap());
    let executions = number("PACELINE_FUZZ_EXECUTIONS").unwrap_or(default);
    let first = number("PACELINE_FUZZ_SEED").unwrap_or(0);
    let begin = Instant::now();
    let mut slowest = (Duration::ZERO, first);
    for seed in first..first.saturating_add(executions) {
        let start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| execute(&mut Random::new(seed))));
        assert!(
            outcome.is_ok(),
            "{target} fails; to repeat it: PACELINE_FUZZ_SEED={seed} PACELINE_FUZZ_EXECUTIONS=1 \
             cargo test -p paceline-model --test fuzz {target}"
        );
        slowest = slowest.max((start.elapsed(), seed));
    }
    println!(
        "{target}: {executions} executions in {:.1} s; the slowest, seed {}, took {:.3} s",
        begin.elapsed().as_secs_f64(),
        slowest.1,
        slowest.0.as_secs_f64()
    );
}

/// What a refusal must look like, whatever was wrong.
pub(crate) fn check_message(error: &impl std::error::Error) {
    const BYTES_MAX: usize = 1 << 20;
    let text = error.to_string();
    assert!(!text.trim().is_empty() && text.len() <= BYTES_MAX, "{} bytes", text.len());
}
