//! From arguments to a loaded engine and its requests: what all commands that run a model share.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use paceline_kernels::DType;
use paceline_model::{chat::ChatOptions, weights::Source};
use paceline_runtime::{Engine, EngineOptions, Ranks, Request, Sampling, Speculation, serve};
use paceline_spec::TreeParameters;

use crate::{
    args::{
        DTypeArgument, ModelArguments, RunArguments, SamplingArguments, SpecArgument,
        SpeculationArguments,
    },
    failure::{ToldByAnotherRank, UsageError},
    output::{machine, print, progress::LoadingBar},
    ranks::{Place, RankProcesses, is_told_by_another, place},
    warnings,
};

/// Few tokens stand for more bytes than this, so a text of more a position fits no context.
pub(crate) const BYTES_PER_POSITION_MAX: usize = 256;

/// Length of a chain unless another is asked for.
const CHAIN_TOKENS: usize = 4;

/// A loaded engine and what was started for it.
pub(crate) struct Session {
    pub(crate) engine: Engine,
    processes: RankProcesses,
    /// How long loading took.
    pub(crate) load: Duration,
}

impl Session {
    /// Ends the other ranks.
    pub(crate) fn finish(self) -> Result<()> {
        drop(self.engine);
        self.processes.finish()
    }
}

/// Loads the engine. `None` if this process was another rank than 0, and has served to the end.
/// `command_words` is the length of the command's name in words.
pub(crate) fn launch(
    arguments: &RunArguments,
    options: EngineOptions,
    command_words: usize,
    quiet: bool,
) -> Result<Option<Session>> {
    check_directories(&arguments.model)?;
    let place = place(&arguments.model, &arguments.distributed, command_words)?;
    let (ranks, processes) = match place {
        Place::Server(communicator) => {
            let rank = communicator.rank();
            let own_group = arguments.distributed.own_group;
            return match serve(&options, *communicator) {
                Ok(()) => Ok(None),
                Err(error) if own_group && is_told_by_another(rank, &error) => {
                    Err(ToldByAnotherRank.into())
                }
                Err(error) => Err(error).with_context(|| format!("rank {rank}")),
            };
        }
        Place::Leader(ranks, processes) => (ranks, processes),
    };
    if !quiet {
        let count = match &ranks {
            Ranks::Threads { count, .. } => *count,
            Ranks::Process(communicator) => communicator.world_size(),
        };
        warnings::of_machine(arguments, count, machine::cores()).iter().for_each(print::note);
    }
    if !quiet && !processes.ids().is_empty() {
        print::note(format_args!("ranks 1 and up are processes {:?}", processes.ids()));
    }
    let started = Instant::now();
    let mut bar = LoadingBar::new(quiet);
    let engine = Engine::load(options, ranks, &mut |done, total| bar.set(done, total))?;
    bar.finish();
    Ok(Some(Session { engine, processes, load: started.elapsed() }))
}

/// Refuses names of models that are no directories of checkpoints here.
pub(crate) fn check_directories(arguments: &ModelArguments) -> Result<()> {
    for (option, path) in [("--model", &arguments.model), ("--draft", &arguments.draft)] {
        // A link that leads nowhere is there, and reading it says what is wrong with it.
        let is_there = |path: &&Path| path.join("config.json").symlink_metadata().is_ok();
        if let Some(path) = path.as_deref().filter(|path| !is_there(path)) {
            let path = path.display();
            bail!(UsageError(format!(
                "{option} takes a local directory with config.json, which {path} is not; \
                 nothing is downloaded"
            )));
        }
    }
    Ok(())
}

/// The model and draft that the arguments name.
pub(crate) fn sources(arguments: &ModelArguments) -> (Source, Option<Source>) {
    let directory = |path: &Path| Source::Directory(path.to_owned());
    match (&arguments.model, &arguments.draft) {
        (None, None) => (Source::DEMO, Some(Source::DEMO_DRAFT)),
        (None, Some(draft)) => (Source::DEMO, Some(directory(draft))),
        (Some(model), draft) => (directory(model), draft.as_deref().map(directory)),
    }
}

/// How to set the engine up, whatever will be asked of it.
pub(crate) fn base_options(arguments: &RunArguments) -> EngineOptions {
    let (model, draft) = sources(&arguments.model);
    let mut options = EngineOptions::new(model, draft);
    let engine = &arguments.engine;
    options.dtype = match engine.dtype {
        DTypeArgument::F32 => DType::F32,
        DTypeArgument::Bf16 => DType::BF16,
        DTypeArgument::F16 => DType::F16,
    };
    options.expert_parallel = arguments.model.expert_parallel;
    options.threads = engine.threads.map_or(0, usize::from);
    options.context_max = engine.context.unwrap_or(0);
    options.prefill_rows = engine.prefill_rows;
    options.capture_points = arguments.model.capture_points.clone();
    options
}

/// How to set the engine up for one request at a time, with one way of drafting.
pub(crate) fn engine_options(
    arguments: &RunArguments,
    drafting: &SpeculationArguments,
) -> Result<EngineOptions> {
    let mut options = base_options(arguments);
    options.sequences_max = 1;
    if drafting.spec == Some(SpecArgument::Off) {
        options.draft = None;
    }
    match speculation(drafting, options.draft.is_some())? {
        Speculation::Chain(drafted) => {
            options.chain_drafted_max = options.chain_drafted_max.max(drafted);
        }
        Speculation::Tree(tree) => options.trees.push(tree),
        Speculation::Auto => {
            if let Some(most) = drafting.draft_tokens.map(usize::from) {
                options.chain_drafted_max = most;
                options.trees.retain(|tree| tree.nodes() <= most + 1);
            }
        }
        Speculation::Off => {}
    }
    Ok(options)
}

/// How requests draft.
fn speculation(arguments: &SpeculationArguments, has_draft: bool) -> Result<Speculation> {
    let drafted = arguments.draft_tokens.map(usize::from);
    if drafted.is_some() && matches!(arguments.spec, Some(SpecArgument::Off)) {
        let text = "--draft-tokens says how far to draft, --spec off not to: leave one of them out";
        bail!(UsageError(text.to_owned()));
    }
    let is_tree = arguments.spec == Some(SpecArgument::Tree);
    if !is_tree && (arguments.draft_topk.is_some() || arguments.draft_depth.is_some()) {
        let text = "--draft-topk and --draft-depth shape trees: add --spec tree, or leave them out";
        bail!(UsageError(text.to_owned()));
    }
    Ok(match arguments.spec {
        Some(SpecArgument::Off) => Speculation::Off,
        Some(_) if !has_draft => {
            let text = "--spec needs a draft: name its directory with --draft, or use --spec off";
            bail!(UsageError(text.to_owned()))
        }
        None if !has_draft => Speculation::Off,
        Some(SpecArgument::Chain) => Speculation::Chain(drafted.unwrap_or(CHAIN_TOKENS)),
        Some(SpecArgument::Tree) => {
            let topk = arguments.draft_topk.unwrap_or(4).into();
            let depth = arguments.draft_depth.unwrap_or(4).into();
            let most = tree_tokens_max(topk, depth);
            let drafted = drafted.unwrap_or(most.min(15));
            if drafted > most {
                bail!(UsageError(format!(
                    "--draft-tokens {drafted}: a tree of --draft-topk {topk} and --draft-depth \
                     {depth} has {most} nodes at most; lower the first or raise one of the others"
                )));
            }
            Speculation::Tree(TreeParameters::new(topk, depth, drafted + 1)?)
        }
        Some(SpecArgument::Auto) | None => Speculation::Auto,
    })
}

/// Nodes that the levels of a tree yield: topk, and topk² for each further level.
fn tree_tokens_max(topk: usize, depth: usize) -> usize {
    topk + (depth - 1) * topk * topk
}

/// How tokens are chosen.
fn sampling(arguments: &SamplingArguments) -> Sampling {
    Sampling {
        temperature: arguments.temperature,
        top_k: arguments.top_k,
        top_p: arguments.top_p,
        min_p: arguments.min_p,
        seed: arguments.seed,
        repetition_penalty: arguments.repetition_penalty,
        presence_penalty: arguments.presence_penalty,
        frequency_penalty: arguments.frequency_penalty,
        ..Sampling::default()
    }
}

/// How a request drafts. Where a seed is to repeat what is drawn and nothing was said of drafting,
/// chains are drafted: what auto does follows the clock.
fn request_speculation(
    arguments: &SpeculationArguments,
    sampling: &SamplingArguments,
    has_draft: bool,
) -> Result<Speculation> {
    let repeats = sampling.seed.is_some() && sampling.temperature > 0.0;
    Ok(match speculation(arguments, has_draft)? {
        Speculation::Auto if repeats && arguments.spec.is_none() => {
            Speculation::Chain(arguments.draft_tokens.map_or(CHAIN_TOKENS, usize::from))
        }
        chosen => chosen,
    })
}

/// A request of a user's prompt.
pub(crate) fn request(
    prompt: Vec<u32>,
    arguments: &SamplingArguments,
    drafting: &SpeculationArguments,
    engine: &Engine,
) -> Result<Request> {
    Ok(Request {
        tokens_min: arguments.min_tokens,
        ignore_eos: arguments.ignore_eos,
        stop_texts: arguments.stop.clone(),
        sampling: sampling(arguments),
        speculation: request_speculation(drafting, arguments, engine.can_speculate())?,
        ..Request::new(prompt, arguments.max_tokens)
    })
}

/// What a chat template is told besides the messages: the beginning of an answer is wanted, and the
/// variables of --template-arg.
pub(crate) fn chat_options(template_arguments: &[String]) -> Result<ChatOptions> {
    let mut options = ChatOptions { add_generation_prompt: true, ..ChatOptions::default() };
    for argument in template_arguments {
        let (name, value) = argument
            .split_once('=')
            .ok_or_else(|| UsageError(format!("--template-arg {argument}: write NAME=JSON")))?;
        let parsed = serde_json::from_str(value).map_err(|error| {
            let text = if value.len() <= 40 { value } else { "text" };
            UsageError(format!(
                "--template-arg {argument}: the value is not JSON ({error}); text needs quotes, as \
                 in --template-arg '{name}=\"{text}\"'"
            ))
        })?;
        options.extra.insert(name.to_owned(), parsed);
    }
    Ok(options)
}
