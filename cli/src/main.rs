//! The `paceline` program: arguments in [`args`], one file a command in [`command`].

mod args;
mod command;
mod output;
mod ranks;

use std::process::ExitCode;

use clap::Parser;

use args::{Arguments, Command};

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let outcome = match arguments.command {
        Command::Generate(arguments) => command::generate::run(&arguments),
        Command::Inspect(arguments) => command::inspect::run(&arguments),
        Command::Doctor(arguments) => command::doctor::run(&arguments),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            output::print::note(format_args!("paceline: {error:#}"));
            ExitCode::FAILURE
        }
    }
}
