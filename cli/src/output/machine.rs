//! What this machine is.

use paceline_kernels::Isa;
use serde::Serialize;

/// What every report says of where it was measured, and with what.
#[derive(Debug, Serialize)]
pub(crate) struct Facts {
    /// The version of this program.
    pub(crate) paceline: &'static str,
    pub(crate) processor: String,
    /// That this process may use.
    pub(crate) cores: usize,
    pub(crate) instruction_set: String,
}

impl Facts {
    /// Of this machine.
    pub(crate) fn find() -> Self {
        Self {
            paceline: env!("CARGO_PKG_VERSION"),
            processor: processor(),
            cores: cores(),
            instruction_set: Isa::detect().to_string(),
        }
    }
}

/// The processor's name.
pub(crate) fn processor() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let mut lines = info.lines();
    let name = lines.find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or("unknown", |(_, name)| name.trim()).to_owned()
}

/// Cores that this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}
