//! `paceline completions` and `paceline man`: what sets this program up in a shell.
//!
//! Both are made from the same description of the arguments that is parsed with.

use std::{io::Write, path::Path, process::ExitCode};

use anyhow::{Context, Result};
use clap::CommandFactory;
use clap_mangen::Man;

use crate::{
    args::{Arguments, CompletionsArguments, ManArguments},
    failure::UsageError,
    output::{file, print},
};

pub(crate) fn completions(arguments: &CompletionsArguments) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut Arguments::command(), "paceline", &mut script);
    write(&script)
}

pub(crate) fn man(arguments: &ManArguments) -> Result<ExitCode> {
    // There is no page about asking for help.
    let mut command = Arguments::command().disable_help_subcommand(true);
    // Gives the commands below their whole names.
    command.build();
    match &arguments.dir {
        None => write(&page(find(&command, &arguments.command)?.clone())?),
        Some(folder) => {
            std::fs::create_dir_all(folder)
                .with_context(|| format!("cannot make the folder {}", folder.display()))?;
            write_pages(&command, folder)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// The command of that name, below `command`.
fn find<'a>(command: &'a clap::Command, names: &[String]) -> Result<&'a clap::Command> {
    names.iter().try_fold(command, |command, name| {
        command.find_subcommand(name).ok_or_else(|| {
            let known: Vec<&str> = command.get_subcommands().map(clap::Command::get_name).collect();
            let text = match known.is_empty() {
                true => format!("{} has no commands below it", command.get_name()),
                false => format!("commands: {}", known.join(", ")),
            };
            UsageError(format!("there is no command {name} to have a page: {text}")).into()
        })
    })
}

/// The page of a command and those of the commands below it.
fn write_pages(command: &clap::Command, folder: &Path) -> Result<()> {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    file::write(&folder.join(format!("{name}.1")), &page(command.clone())?)?;
    let visible = |below: &&clap::Command| !below.is_hide_set();
    command.get_subcommands().filter(visible).try_for_each(|below| write_pages(below, folder))
}

fn page(command: clap::Command) -> Result<Vec<u8>> {
    let mut page = Vec::new();
    let manual = Man::new(command).manual("paceline").date("");
    manual.render(&mut page).context("cannot make the manual page")?;
    Ok(page)
}

fn write(bytes: &[u8]) -> Result<ExitCode> {
    let mut stdout = std::io::stdout().lock();
    print::read_away(stdout.write_all(bytes).and_then(|()| stdout.flush()))?;
    Ok(ExitCode::SUCCESS)
}
