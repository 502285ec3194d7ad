//! The `paceline` program: arguments in [`args`], one file or folder a command in [`command`].

mod allocator;
mod args;
mod bus_error;
mod command;
mod failure;
mod interrupt;
mod launch;
mod output;
mod ranks;
mod warnings;

use std::process::ExitCode;

use clap::Parser;

use args::{Arguments, Command};

fn main() -> ExitCode {
    bus_error::explain();
    let arguments = Arguments::parse();
    let outcome = match arguments.command {
        Command::Generate(arguments) => command::generate::run(&arguments),
        Command::Chat(arguments) => command::chat::run(&arguments),
        Command::Bench(arguments) => command::bench::run(&arguments),
        Command::Inspect(arguments) => command::inspect::run(&arguments),
        Command::Doctor(arguments) => command::doctor::run(&arguments),
        Command::Completions(arguments) => command::shell::completions(&arguments),
        Command::Man(arguments) => command::shell::man(&arguments),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => failure::report(&error),
    }
}
