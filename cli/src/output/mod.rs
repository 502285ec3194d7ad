//! What people and programs read.

pub(crate) mod print;
pub(crate) mod progress;
pub(crate) mod run_report;
pub(crate) mod units;
