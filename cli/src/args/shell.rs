//! Arguments of what sets this program up in a shell.

use std::path::PathBuf;

use clap::Args;
use clap_complete::Shell;

#[derive(Debug, Args)]
#[command(after_help = "For bash, for example: \
    paceline completions bash > ~/.local/share/bash-completion/completions/paceline")]
pub(crate) struct CompletionsArguments {
    /// The shell.
    #[arg(value_enum)]
    pub(crate) shell: Shell,
}

#[derive(Debug, Args)]
#[command(after_help = "Without --dir: paceline man | man -l -")]
pub(crate) struct ManArguments {
    /// Write the pages of the program and of all its commands here, as paceline.1,
    /// paceline-generate.1 and so on.
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
}
