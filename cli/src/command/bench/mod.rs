//! `paceline bench`: how fast a model runs on this machine, and how fast its ranks exchange.
//!
//! Decoding: the way from arguments to a report is in [`decode`], what is measured in
//! [`measurement`], what it found in [`report`], and how that is shown in [`table`] and [`plot`].
//! All-reduces have the same parts in [`all_reduce`].

mod all_reduce;
mod decode;
mod measurement;
mod plot;
mod prompts;
mod random_draft;
mod report;
mod samples;
mod table;

use std::process::ExitCode;

use anyhow::Result;

use crate::args::{BenchArguments, BenchCommand};

pub(crate) fn run(arguments: &BenchArguments) -> Result<ExitCode> {
    match &arguments.command {
        BenchCommand::Decode(arguments) => decode::run(arguments),
        BenchCommand::AllReduce(arguments) => all_reduce::run(arguments),
    }
}
