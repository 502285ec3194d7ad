//! One file or folder a command.

pub(crate) mod bench;
pub(crate) mod chat;
pub(crate) mod doctor;
pub(crate) mod generate;
pub(crate) mod inspect;
pub(crate) mod shell;
