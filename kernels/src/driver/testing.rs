//! Which devices a test may use.

use super::{Device, DriverError};

/// Says of how many GPUs the machine is; tests that need no more must then run.
const REQUIRE: &str = "PACELINE_REQUIRE_GPUS";

/// The first `count` devices, or a line `SKIP: …` and none.
///
/// # Panics
/// If `PACELINE_REQUIRE_GPUS` promises that many and they are not there.
pub fn gpus(count: u32) -> Option<Vec<Device>> {
    let devices = || -> Result<Vec<Device>, DriverError> {
        super::available()?;
        (0..count).map(Device::open).collect()
    };
    let reason = match devices() {
        Ok(devices) => return Some(devices),
        Err(reason) => reason,
    };
    let promised = std::env::var(REQUIRE).map_or(0, |text| {
        text.parse::<u32>().unwrap_or_else(|_| panic!("{REQUIRE}={text} is no number"))
    });
    assert!(promised < count, "{REQUIRE}={promised}, but this test cannot have {count}: {reason}");
    println!("SKIP: needs {count} GPU(s): {reason}");
    None
}
