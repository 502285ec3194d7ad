//! Arguments of `paceline chat`.

use clap::Args;

use super::{RunArguments, SamplingArguments, SpeculationArguments};

/// What `paceline chat --help` says after the short description.
pub(super) const LONG_ABOUT: &str = "\
Talk with a model, turn by turn.

On a terminal there is line editing and a history, which is kept in \
$XDG_STATE_HOME/paceline/history (or ~/.local/state/paceline/history). A line that ends with \\ \
goes on in the next one. Ctrl-C stops the answer being written, not the program: what there is of \
it stays in the conversation. Ctrl-D leaves. /help lists what else can be typed.

If standard input is not a terminal, each of its lines is one turn, and standard output gets the \
answers only: a filter. Lines that begin with / are commands there too; write // for a message \
that begins with /.

When the conversation no longer fits into the context, its oldest turns are dropped, and a line on \
standard error says so. The system message always stays.";

#[derive(Debug, Args)]
pub(crate) struct ChatArguments {
    #[command(flatten)]
    pub(crate) conversation: ConversationArguments,
    #[command(flatten)]
    pub(crate) run: RunArguments,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArguments,
    #[command(flatten)]
    pub(crate) sampling: SamplingArguments,
}

/// What the conversation starts with, and how it is shown.
#[derive(Debug, Args)]
#[command(next_help_heading = "Conversation")]
pub(crate) struct ConversationArguments {
    /// System message before the first turn.
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Variable of the chat template, as NAME=JSON (for example thinking=false).
    #[arg(long, value_name = "NAME=JSON")]
    pub(crate) template_arg: Vec<String>,
    /// Print one JSON object a turn instead of the text.
    #[arg(long)]
    pub(crate) json: bool,
    /// No greeting, no progress bar and no summary lines.
    #[arg(long, short)]
    pub(crate) quiet: bool,
}
