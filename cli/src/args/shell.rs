//! Arguments of what sets this program up in a shell.

use std::path::PathBuf;

use clap::Args;
use clap_complete::Shell;

#[derive(Debug, Args)]
#[command(after_help = COMPLETIONS_EXAMPLES)]
pub(crate) struct CompletionsArguments {
    /// The shell.
    #[arg(value_enum)]
    pub(crate) shell: Shell,
}

/// One block a shell, to be copied as it is.
const COMPLETIONS_EXAMPLES: &str = "\
For bash:
  mkdir -p ~/.local/share/bash-completion/completions
  paceline completions bash > ~/.local/share/bash-completion/completions/paceline

For zsh, with the folder in fpath before compinit runs (fpath+=(~/.zfunc) in ~/.zshrc):
  mkdir -p ~/.zfunc
  paceline completions zsh > ~/.zfunc/_paceline

For fish:
  mkdir -p ~/.config/fish/completions
  paceline completions fish > ~/.config/fish/completions/paceline.fish";

#[derive(Debug, Args)]
#[command(after_help = "To read it: paceline man generate | man -l -")]
pub(crate) struct ManArguments {
    /// The command whose page to print, as in bench decode; without it, the program's.
    #[arg(value_name = "COMMAND", conflicts_with = "dir")]
    pub(crate) command: Vec<String>,
    /// Write the pages of the program and of all its commands here, as paceline.1,
    /// paceline-generate.1 and so on.
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
}
