//! The sum of the results that `cargo test` prints, one line for each test binary.

use std::fmt;

/// Counted tests.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Count {
    pub(super) passed: usize,
    failed: usize,
    skipped: usize,
}

impl Count {
    /// Adds what a line of output says, if it is a line of results.
    pub(super) fn add_line(&mut self, line: &str) {
        let Some(results) = line.trim().strip_prefix("test result: ") else { return };
        let (_, results) = results.split_once(". ").unwrap_or_default();
        for result in results.split("; ") {
            let Some((number, what)) = result.split_once(' ') else { continue };
            let Ok(number) = number.parse::<usize>() else { continue };
            match what {
                "passed" => self.passed += number,
                "failed" => self.failed += number,
                "ignored" => self.skipped += number,
                _ => {}
            }
        }
    }
}

impl fmt::Display for Count {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "total: {} passed, {} failed, {} skipped",
            self.passed, self.failed, self.skipped
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_all_binaries_are_added() {
        let output = "\
running 3 tests
test a ... ok
test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.05s
test result: FAILED. 10 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1s
";
        let mut count = Count::default();
        output.lines().for_each(|line| count.add_line(line));
        assert_eq!(count, Count { passed: 13, failed: 2, skipped: 1 });
        assert_eq!(count.to_string(), "total: 13 passed, 2 failed, 1 skipped");
    }

    #[test]
    fn other_lines_count_nothing() {
        let mut count = Count::default();
        count.add_line("test result: strange");
        count.add_line("5 passed; 1 failed");
        count.add_line("");
        assert_eq!(count, Count::default());
    }
}
