//! Arguments of `paceline bench`.

use std::{fmt, path::PathBuf, str::FromStr};

use clap::{Args, Subcommand, ValueEnum};
use paceline_spec::TreeParameters;

use super::{
    RunArguments,
    all_reduce::{self, AllReduceArguments},
};

#[derive(Debug, Args)]
pub(crate) struct BenchArguments {
    #[command(subcommand)]
    pub(crate) command: BenchCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Measure decoding with and without speculation, prompts, passes and batches.
    #[command(long_about = LONG_ABOUT)]
    Decode(Box<DecodeArguments>),
    /// Measure all-reduces: the time of a call by size, for each back end.
    #[command(long_about = all_reduce::LONG_ABOUT)]
    AllReduce(Box<AllReduceArguments>),
}

/// What `paceline bench decode --help` says after the short description.
const LONG_ABOUT: &str = "\
Measure decoding with and without speculation, prompts, passes and batches.

All answers are greedy and of the same length. What is compared is run in turn (A B C A B C …) as \
often as --repetitions says, after one round that only warms up; the table shows medians, and the \
least and the most. --json has every sample.";

#[derive(Debug, Args)]
pub(crate) struct DecodeArguments {
    #[command(flatten)]
    pub(crate) run: RunArguments,
    #[command(flatten)]
    pub(crate) measurement: MeasurementArguments,
    #[command(flatten)]
    pub(crate) report: ReportArguments,
}

/// What to measure.
#[derive(Debug, Args)]
#[command(next_help_heading = "Measurement")]
pub(crate) struct MeasurementArguments {
    /// What to measure [default: all of it].
    #[arg(long, value_enum, value_name = "PART,…", value_delimiter = ',', num_args = 1)]
    pub(crate) parts: Vec<Part>,
    /// Ways of decoding to compare: off, auto, chain-N (N drafted tokens) and tree-KxDxN (K
    /// children, D levels, N drafted tokens) [default: off, chains of 1, 2, 3, 4 and 6,
    /// tree-2x4x7, tree-4x4x15 and auto].
    #[arg(long, value_name = "SETTING,…", value_delimiter = ',', num_args = 1)]
    pub(crate) settings: Vec<SettingArgument>,
    /// File with one prompt a line, each a user's message [default: ten short prompts].
    #[arg(long, value_name = "FILE")]
    pub(crate) prompt_file: Option<PathBuf>,
    /// Tokens of each answer.
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(2..=1_048_576))]
    pub(crate) tokens: usize,
    /// Tokens of the prompt whose processing is measured.
    #[arg(long, value_name = "N", default_value_t = 512,
          value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1_048_576))]
    pub(crate) prompt_tokens: usize,
    /// Tokens of the passes whose cost is measured.
    #[arg(long, value_name = "N,…", value_delimiter = ',', num_args = 1,
          default_values_t = [1, 2, 4, 8, 16],
          value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1024))]
    pub(crate) passes: Vec<usize>,
    /// Numbers of sequences that are decoded at the same time.
    #[arg(long, value_name = "N,…", value_delimiter = ',', num_args = 1,
          default_values_t = [1, 2, 4, 8],
          value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1024))]
    pub(crate) batch: Vec<usize>,
    /// Runs of each setting.
    #[arg(long, value_name = "N", default_value_t = 5,
          value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub(crate) repetitions: u16,
    /// Replace the draft's weights by random ones, to see what a useless draft costs.
    #[arg(long)]
    pub(crate) random_draft: bool,
    /// Two prompts, eight tokens, one repetition: to see that all works. The numbers mean little.
    #[arg(long)]
    pub(crate) quick: bool,
}

/// What to print.
#[derive(Debug, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct ReportArguments {
    /// Print one JSON object, with all samples, instead of the table.
    #[arg(long)]
    pub(crate) json: bool,
    /// Draw the results into this SVG file.
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// No progress on standard error.
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

/// A part of the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// Tokens a second of each setting.
    Decode,
    /// Tokens a second of a long prompt.
    Prompt,
    /// Seconds that a pass of several tokens takes.
    Passes,
    /// Tokens a second of several sequences together, without a draft and with auto.
    Batch,
}

/// A way of decoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SettingArgument {
    /// One token a pass.
    Off,
    /// A chain of this many drafted tokens.
    Chain(usize),
    /// A tree.
    Tree(TreeParameters),
    /// What the controller chooses.
    Auto,
}

/// More than any engine sets aside room for.
const DRAFTED_MAX: usize = 1024;

impl FromStr for SettingArgument {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = || {
            format!(
                "{text} is no setting; write off, auto, chain-N (chain-4) or tree-KxDxN \
                     (tree-4x4x15)"
            )
        };
        let number = |text: &str| match text.parse() {
            Ok(number) if (1..=DRAFTED_MAX).contains(&number) => Ok(number),
            _ => Err(unknown()),
        };
        if let Some(drafted) = text.strip_prefix("chain-") {
            return number(drafted).map(Self::Chain);
        }
        if let Some(shape) = text.strip_prefix("tree-") {
            let shape: Vec<usize> = shape.split('x').map(number).collect::<Result<_, _>>()?;
            let [topk, depth, drafted] = shape[..] else { return Err(unknown()) };
            let tree = TreeParameters::new(topk, depth, drafted + 1);
            return tree.map(Self::Tree).map_err(|error| error.to_string());
        }
        match text {
            "off" => Ok(Self::Off),
            "auto" => Ok(Self::Auto),
            _ => Err(unknown()),
        }
    }
}

impl fmt::Display for SettingArgument {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => formatter.write_str("off"),
            Self::Chain(drafted) => write!(formatter, "chain-{drafted}"),
            Self::Tree(tree) => {
                write!(formatter, "tree-{}x{}x{}", tree.topk(), tree.depth(), tree.nodes() - 1)
            }
            Self::Auto => formatter.write_str("auto"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_and_written_alike() {
        for text in ["off", "auto", "chain-1", "chain-12", "tree-4x4x15", "tree-1x1x1"] {
            assert_eq!(text.parse::<SettingArgument>().unwrap().to_string(), text);
        }
        for text in
            ["", "chain-", "chain-0", "chain-9999", "tree-4x4", "tree-4x4x15x1", "tree-2x1x9"]
        {
            assert!(text.parse::<SettingArgument>().is_err(), "{text}");
        }
    }
}
