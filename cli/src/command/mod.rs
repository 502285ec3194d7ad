//! One file a command.

pub(crate) mod doctor;
pub(crate) mod generate;
pub(crate) mod inspect;
