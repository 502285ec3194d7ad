//! Command-line arguments: the commands, and the groups of options that several of them share. What
//! belongs to one command only is in the files below.

mod all_reduce;
mod bench;
mod chat;
mod shell;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

pub(crate) use all_reduce::{
    AllReduceArguments, CallsArguments, DeviceArgument, FormArgument, ModeArgument, PlaceArguments,
};
pub(crate) use bench::{
    BenchArguments, BenchCommand, DecodeArguments, MeasurementArguments, Part, SettingArgument,
};
pub(crate) use chat::ChatArguments;
pub(crate) use shell::{CompletionsArguments, ManArguments};

/// Runs large mixture-of-experts models with EAGLE-3 speculation over the ranks of one box.
#[derive(Debug, Parser)]
#[command(name = "paceline", version, max_term_width = 100)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Write text after a prompt.
    #[command(after_help = GENERATE_EXAMPLES)]
    Generate(Box<GenerateArguments>),
    /// Talk with a model, turn by turn.
    #[command(long_about = chat::LONG_ABOUT)]
    Chat(Box<ChatArguments>),
    /// Measure how fast a model runs on this machine, or its ranks exchange.
    Bench(BenchArguments),
    /// Say what a checkpoint is, what memory it takes, and what would not load and why.
    Inspect(InspectArguments),
    /// Say what this machine offers, and why what cannot be used cannot.
    Doctor(DoctorArguments),
    /// Print what makes a shell complete this program's commands and options.
    Completions(CompletionsArguments),
    /// Print the manual page, or write one for each command.
    Man(ManArguments),
}

/// What `paceline generate --help` ends with.
const GENERATE_EXAMPLES: &str = "\
Examples:
  paceline generate --prompt 'Once upon a time'
  paceline generate --chat 'What is a bridge?' --temperature 0.7 --seed 1
  paceline generate question.txt --chat --max-tokens 500
  paceline generate --model DIR --draft DIR --dtype bf16 --tp 2 --chat 'What is a bridge?'
  paceline generate --token-ids 0,3,622 --json --top-logprobs 5";

/// Which model, and over which ranks.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model and ranks")]
pub(crate) struct ModelArguments {
    /// Checkpoint directory; without it, the demo model inside this program.
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
    /// Directory of the model's EAGLE-3 draft.
    #[arg(long, value_name = "DIR")]
    pub(crate) draft: Option<PathBuf>,
    /// Residual streams of the target that the draft reads, if its configuration is wrong.
    #[arg(long, value_name = "L,L,L", value_delimiter = ',', num_args = 1)]
    pub(crate) capture_points: Option<Vec<usize>>,
    /// Tensor-parallel ranks.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) tp: Option<u16>,
    /// Deal experts out whole over the ranks instead of splitting each.
    #[arg(long)]
    pub(crate) expert_parallel: bool,
}

/// Everything that loading a model takes.
#[derive(Debug, Args)]
pub(crate) struct RunArguments {
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    #[command(flatten)]
    pub(crate) engine: EngineArguments,
    #[command(flatten)]
    pub(crate) distributed: DistributedArguments,
}

#[derive(Debug, Args)]
pub(crate) struct GenerateArguments {
    #[command(flatten)]
    pub(crate) prompt: PromptArguments,
    #[command(flatten)]
    pub(crate) run: RunArguments,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArguments,
    #[command(flatten)]
    pub(crate) sampling: SamplingArguments,
    #[command(flatten)]
    pub(crate) output: OutputArguments,
}

/// Where the prompt comes from; standard input if nothing is given.
#[derive(Debug, Args)]
#[command(next_help_heading = "Prompt (standard input if none is given)")]
pub(crate) struct PromptArguments {
    /// File with the prompt; - for standard input.
    #[arg(value_name = "FILE", conflicts_with_all = ["prompt", "token_ids"])]
    pub(crate) file: Option<PathBuf>,
    /// The prompt.
    #[arg(long, value_name = "TEXT", conflicts_with = "token_ids", allow_hyphen_values = true)]
    pub(crate) prompt: Option<String>,
    /// Put the prompt into the model's chat template, as a user's message. TEXT is the message;
    /// without it, the prompt from elsewhere is.
    #[arg(long, value_name = "TEXT", num_args = 0..=1, conflicts_with = "token_ids")]
    pub(crate) chat: Option<Option<String>>,
    /// System message before the user's; with --chat.
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Variable of the chat template, as NAME=JSON (for example thinking=false); with --chat.
    #[arg(long, value_name = "NAME=JSON")]
    pub(crate) template_arg: Vec<String>,
    /// The prompt as token ids.
    #[arg(long, value_name = "ID,…", value_delimiter = ',', num_args = 1)]
    pub(crate) token_ids: Option<Vec<u32>>,
}

/// How the engine computes.
#[derive(Debug, Args)]
#[command(next_help_heading = "Engine")]
pub(crate) struct EngineArguments {
    /// Type of activations and cache.
    #[arg(long, value_enum, default_value_t = DTypeArgument::F32)]
    pub(crate) dtype: DTypeArgument,
    /// Threads of each rank [default: the machine's cores, shared among the ranks]. Small models
    /// may be faster with fewer; measure with `paceline bench decode --threads 1`.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
    /// Longest sequence, prompt and answer together [default: the model's, at most 8192].
    #[arg(long, value_name = "TOKENS")]
    pub(crate) context: Option<usize>,
    /// Rows of the prompt that go through the model at a time.
    #[arg(long, value_name = "ROWS", default_value_t = 256,
          value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=65_536))]
    pub(crate) prefill_rows: usize,
}

/// How ranks are started and meet.
#[derive(Debug, Args)]
#[command(next_help_heading = "Ranks as processes")]
pub(crate) struct DistributedArguments {
    /// Start ranks as processes instead of threads.
    #[arg(long, conflicts_with = "init")]
    pub(crate) processes: bool,
    /// This process is one rank of a group that something else started: env:// (torchrun, srun),
    /// tcp://HOST:PORT or file://PATH.
    #[arg(long, value_name = "METHOD")]
    pub(crate) init: Option<String>,
    /// The group was started by paceline itself, whatever the environment says.
    #[arg(long, hide = true, requires = "init")]
    pub(crate) own_group: bool,
    /// This process's rank, if the environment does not say.
    #[arg(long, value_name = "R", requires = "init")]
    pub(crate) rank: Option<usize>,
    /// Number of ranks, if neither --tp nor the environment says.
    #[arg(long, value_name = "N", requires = "init")]
    pub(crate) world_size: Option<usize>,
    /// Seconds after which a rank that does not come, or stalls, is given up.
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub(crate) timeout: u32,
}

/// How far ahead to draft.
#[derive(Debug, Args)]
#[command(next_help_heading = "Speculation")]
pub(crate) struct SpeculationArguments {
    /// How to draft [default: auto with a draft, else off].
    #[arg(long, value_enum)]
    pub(crate) spec: Option<SpecArgument>,
    /// Drafted tokens: length of a chain [default: 4], nodes of a tree [default: 15], or the most
    /// that auto may draft [default: 15].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) draft_tokens: Option<u16>,
    /// Children of a tree's nodes [default: 4].
    #[arg(long, value_name = "K",
          value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) draft_topk: Option<u16>,
    /// Levels of a tree [default: 4].
    #[arg(long, value_name = "D",
          value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) draft_depth: Option<u16>,
}

/// How tokens are chosen and when to end.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArguments {
    /// Most tokens to write.
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub(crate) max_tokens: usize,
    /// No stop token before this many tokens.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) min_tokens: usize,
    /// Go on after stop tokens.
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// End at this text (repeatable).
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
    /// Divisor of the logits; 0 always takes the likeliest token.
    #[arg(long, value_name = "T", default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) temperature: f32,
    /// Keep this many likeliest tokens; 0 keeps all.
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub(crate) top_k: usize,
    /// Keep the likeliest tokens up to this probability together.
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    pub(crate) top_p: f32,
    /// Keep tokens with at least this share of the likeliest one's probability.
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    pub(crate) min_p: f32,
    /// Divides positive logits of tokens that occur in the prompt or the answer, and multiplies
    /// their negative ones; 1 changes nothing.
    #[arg(long, value_name = "R", default_value_t = 1.0, allow_negative_numbers = true)]
    pub(crate) repetition_penalty: f32,
    /// Subtracted from the logits of tokens that occur in the answer.
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) presence_penalty: f32,
    /// Subtracted from the logits of tokens in the answer, once for each time that they occur.
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) frequency_penalty: f32,
    /// Start of the random numbers: with a temperature it repeats a run. Unless --spec says how to
    /// draft, chains are drafted then, since auto follows the clock.
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
}

/// What to print.
#[derive(Debug, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct OutputArguments {
    /// Print one JSON object instead of the text.
    #[arg(long)]
    pub(crate) json: bool,
    /// With --json, the log-probability of each token.
    #[arg(long, requires = "json")]
    pub(crate) logprobs: bool,
    /// With --json, the K most probable tokens at each place, with their log-probabilities.
    #[arg(long, value_name = "K", default_value_t = 0, requires = "json")]
    pub(crate) top_logprobs: usize,
    /// With --json, the K largest logits that each token was chosen from.
    #[arg(long, value_name = "K", default_value_t = 0, requires = "json")]
    pub(crate) top_logits: usize,
    /// No progress bar, no warnings and no summary line.
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArguments {
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    /// Longest sequence to count the cache for [default: the model's, at most 8192].
    #[arg(long, value_name = "TOKENS")]
    pub(crate) context: Option<usize>,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArguments {
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Type of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DTypeArgument {
    /// 32-bit floats.
    F32,
    /// bfloat16.
    Bf16,
    /// 16-bit floats; large models overflow in it.
    F16,
}

/// How to draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SpecArgument {
    /// Not at all.
    Off,
    /// Chains of --draft-tokens tokens.
    Chain,
    /// Trees of --draft-tokens nodes.
    Tree,
    /// Whatever promises the most tokens a second, chosen anew before each round.
    Auto,
}
