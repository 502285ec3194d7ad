//! What people and programs read.

pub(crate) mod chart;
pub(crate) mod file;
pub(crate) mod machine;
pub(crate) mod print;
pub(crate) mod progress;
pub(crate) mod run_report;
pub(crate) mod units;
