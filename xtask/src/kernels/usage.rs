//! What the kernels of a source use, read from what `ptxas -v` prints.

use std::fmt;

/// Registers and spills of one kernel on one architecture.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Usage {
    /// Bytes stored to and loaded from local memory for want of registers.
    spilled_bytes: u64,
    /// Registers a thread.
    registers: u64,
    kernel: String,
    target: String,
}

/// The kernel that spills most; among equals, the one with the most registers.
pub(super) fn worst(log: &str) -> Option<Usage> {
    let mut worst: Option<Usage> = None;
    let mut current = Usage::of(String::new(), String::new());
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let mut quoted = rest.split('\'');
            let kernel = quoted.next().unwrap_or_default().to_owned();
            current = Usage::of(kernel, quoted.nth(1).unwrap_or_default().to_owned());
        } else if line.contains("bytes spill stores") {
            let before = |what| number_before(line, what).unwrap_or(0);
            current.spilled_bytes = before(" bytes spill stores") + before(" bytes spill loads");
        } else if let Some(registers) = number_before(line, " registers") {
            current.registers = registers;
            worst = worst.max(Some(current.clone()));
        }
    }
    worst
}

impl Usage {
    fn of(kernel: String, target: String) -> Self {
        Self { spilled_bytes: 0, registers: 0, kernel, target }
    }
}

impl fmt::Display for Usage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { spilled_bytes, registers, kernel, target } = self;
        write!(formatter, "{registers} registers, {spilled_bytes} B spilled ({kernel}, {target})")
    }
}

fn number_before(line: &str, what: &str) -> Option<u64> {
    line.split_once(what)?.0.rsplit([' ', ',']).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    // Printed by nvcc 13.0.88; the numbers of the second kernel's spills were changed.
    const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_120'
ptxas info    : Function properties for first
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 48 registers, used 0 barriers
ptxas info    : Compile time = 7.504 ms
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 360 bytes cmem[0]
";

    #[test]
    fn spills_count_before_registers() {
        let worst = worst(LOG).expect("there are two kernels");
        assert_eq!(worst.to_string(), "32 registers, 20 B spilled (second, sm_90a)");
    }

    #[test]
    fn registers_count_among_equals() {
        let log = LOG.replace("8 bytes spill stores, 12", "0 bytes spill stores, 0");
        let worst = worst(&log).expect("there are two kernels");
        assert_eq!(worst.to_string(), "48 registers, 0 B spilled (first, sm_120)");
    }

    #[test]
    fn no_kernel_no_usage() {
        assert_eq!(worst("ptxas info    : 0 bytes gmem\n"), None);
    }
}
