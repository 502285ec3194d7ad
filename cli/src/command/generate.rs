//! `paceline generate`: text after a prompt.

use std::{
    io::{IsTerminal, Read, Write},
    ops::ControlFlow,
    path::Path,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use paceline_kernels::DType;
use paceline_model::{
    chat::{ChatOptions, Message},
    weights::Source,
};
use paceline_runtime::{
    Engine, EngineOptions, Event, Outcome, Request, Sampling, Speculation, TokenEvent, serve,
};
use paceline_spec::TreeParameters;

use crate::{
    args::{
        DTypeArgument, GenerateArguments, ModelArguments, PromptArguments, SpecArgument,
        SpeculationArguments,
    },
    output::{print, progress::LoadingBar, run_report},
    ranks::{Place, place},
};

/// Few tokens stand for more bytes than this, so a prompt of more a position fits no context.
const BYTES_PER_POSITION_MAX: usize = 256;

pub(crate) fn run(arguments: &GenerateArguments) -> Result<ExitCode> {
    let options = engine_options(arguments)?;
    let (ranks, processes) = match place(&arguments.model, &arguments.distributed)? {
        Place::Server(communicator) => {
            let rank = communicator.rank();
            serve(&options, *communicator).with_context(|| format!("rank {rank}"))?;
            return Ok(ExitCode::SUCCESS);
        }
        Place::Leader(ranks, processes) => (ranks, processes),
    };
    let quiet = arguments.output.quiet;
    if !quiet && !processes.ids().is_empty() {
        print::note(format_args!("ranks 1 and up are processes {:?}", processes.ids()));
    }
    let started = Instant::now();
    let mut bar = LoadingBar::new(quiet);
    let mut engine = Engine::load(options, ranks, &mut |done, total| bar.set(done, total))?;
    bar.finish();
    let load = started.elapsed();
    let request = request(arguments, &engine)?;
    let (outcome, tokens) = generate(arguments, &mut engine, &request)?;
    report(arguments, &engine, &request, &outcome, &tokens, load)?;
    drop(engine);
    processes.finish()?;
    Ok(ExitCode::SUCCESS)
}

/// Runs the request; text streams to standard output as it comes.
fn generate(
    arguments: &GenerateArguments,
    engine: &mut Engine,
    request: &Request,
) -> Result<(Outcome, Vec<TokenEvent>)> {
    let json = arguments.output.json;
    let mut stdout = std::io::stdout().lock();
    let (mut tokens, mut failure) = (Vec::new(), None);
    let outcome = engine.generate(request, |event| {
        let written = match event {
            Event::Token(token) if json => {
                tokens.push(token.clone());
                Ok(())
            }
            Event::Text(text) if !json => {
                stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush())
            }
            _ => Ok(()),
        };
        match print::read_away(written) {
            Ok(false) => ControlFlow::Continue(()),
            Ok(true) => ControlFlow::Break(()),
            Err(error) => {
                failure = Some(error);
                ControlFlow::Break(())
            }
        }
    })?;
    match failure {
        Some(error) => Err(error),
        None => Ok((outcome, tokens)),
    }
}

fn report(
    arguments: &GenerateArguments,
    engine: &Engine,
    request: &Request,
    outcome: &Outcome,
    tokens: &[TokenEvent],
    load: Duration,
) -> Result<()> {
    let usage = engine.communication();
    if arguments.output.json {
        return print::line(run_report::json(request, outcome, tokens, &usage, load));
    }
    print::line("")?;
    if !arguments.output.quiet {
        print::note(run_report::summary(outcome, &usage, engine.ranks()));
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

fn engine_options(arguments: &GenerateArguments) -> Result<EngineOptions> {
    let (model, draft) = sources(&arguments.model);
    let draft = draft.filter(|_| arguments.speculation.spec != Some(SpecArgument::Off));
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
    match speculation(&arguments.speculation, options.draft.is_some())? {
        Speculation::Chain(drafted) => {
            options.chain_drafted_max = options.chain_drafted_max.max(drafted);
        }
        Speculation::Tree(tree) => options.trees.push(tree),
        Speculation::Auto => {
            if let Some(most) = arguments.speculation.draft_tokens.map(usize::from) {
                options.chain_drafted_max = most;
                options.trees.retain(|tree| tree.nodes() <= most + 1);
            }
        }
        Speculation::Off => {}
    }
    Ok(options)
}

fn speculation(arguments: &SpeculationArguments, has_draft: bool) -> Result<Speculation> {
    let drafted = arguments.draft_tokens.map(usize::from);
    if drafted.is_some() && matches!(arguments.spec, Some(SpecArgument::Off)) {
        bail!("--draft-tokens says how far to draft, --spec off not to: leave one of them out");
    }
    let is_tree = arguments.spec == Some(SpecArgument::Tree);
    if !is_tree && (arguments.draft_topk.is_some() || arguments.draft_depth.is_some()) {
        bail!("--draft-topk and --draft-depth shape trees: add --spec tree, or leave them out");
    }
    Ok(match arguments.spec {
        Some(SpecArgument::Off) => Speculation::Off,
        Some(_) if !has_draft => {
            bail!("--spec needs a draft: name its directory with --draft, or use --spec off")
        }
        None if !has_draft => Speculation::Off,
        Some(SpecArgument::Chain) => Speculation::Chain(drafted.unwrap_or(4)),
        Some(SpecArgument::Tree) => {
            let topk = arguments.draft_topk.unwrap_or(4).into();
            let depth = arguments.draft_depth.unwrap_or(4).into();
            let most = tree_tokens_max(topk, depth);
            let drafted = drafted.unwrap_or(most.min(15));
            if drafted > most {
                bail!(
                    "--draft-tokens {drafted}: a tree of --draft-topk {topk} and --draft-depth \
                     {depth} has {most} nodes at most; lower the first or raise one of the others"
                );
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

fn request(arguments: &GenerateArguments, engine: &Engine) -> Result<Request> {
    let sampling = &arguments.sampling;
    let prompt = prompt_ids(&arguments.prompt, engine)?;
    Ok(Request {
        tokens_max: sampling.max_tokens,
        ignore_eos: sampling.ignore_eos,
        stop_texts: sampling.stop.clone(),
        sampling: Sampling {
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            seed: sampling.seed,
            ..Sampling::default()
        },
        speculation: speculation(&arguments.speculation, engine.can_speculate())?,
        logprobs: arguments.output.logprobs,
        top_logits: arguments.output.top_logits,
        ..Request::new(prompt, sampling.max_tokens)
    })
}

fn prompt_ids(arguments: &PromptArguments, engine: &Engine) -> Result<Vec<u32>> {
    if let Some(ids) = &arguments.token_ids {
        return Ok(ids.clone());
    }
    let tokenizer = engine
        .tokenizer()
        .context("this checkpoint has no tokenizer: add its files, or give --token-ids")?;
    let Some(chat) = &arguments.chat else {
        return Ok(tokenizer.encode(&prompt_text(arguments, engine.context_max())?)?);
    };
    let text = match chat {
        Some(_) if arguments.prompt.is_some() || arguments.file.is_some() => {
            bail!(
                "--chat has a message of its own: leave out --prompt and FILE, or write --chat last"
            )
        }
        Some(text) => text.clone(),
        None => prompt_text(arguments, engine.context_max())?,
    };
    let mut messages = Vec::new();
    if let Some(system) = &arguments.system {
        messages.push(Message::new("system", system));
    }
    messages.push(Message::new("user", text));
    let mut options = ChatOptions { add_generation_prompt: true, ..ChatOptions::default() };
    for argument in &arguments.template_arg {
        let (name, value) = argument
            .split_once('=')
            .with_context(|| format!("--template-arg {argument}: write NAME=JSON"))?;
        let value = serde_json::from_str(value)
            .with_context(|| format!("--template-arg {argument}: the value is not JSON"))?;
        options.extra.insert(name.to_owned(), value);
    }
    let source = &engine.options().model;
    let template = source.chat_template(engine.config(), tokenizer)?;
    Ok(tokenizer.encode(&template.render(&messages, None, &options)?)?)
}

fn prompt_text(arguments: &PromptArguments, context_max: usize) -> Result<String> {
    let bytes_max = (context_max * BYTES_PER_POSITION_MAX) as u64;
    if let Some(prompt) = &arguments.prompt {
        return Ok(prompt.clone());
    }
    let mut bytes = Vec::new();
    let from_stdin = arguments.file.as_deref().is_none_or(|path| path == Path::new("-"));
    let name = if from_stdin {
        let stdin = std::io::stdin();
        if stdin.is_terminal() && arguments.file.is_none() {
            bail!("no prompt: give --prompt TEXT, --chat TEXT, a file, or text on standard input");
        }
        stdin.lock().take(bytes_max + 1).read_to_end(&mut bytes)?;
        "standard input".to_owned()
    } else {
        let path = arguments.file.as_deref().unwrap_or_else(|| Path::new("-"));
        let file = std::fs::File::open(path)
            .with_context(|| format!("cannot read the prompt from {}", path.display()))?;
        file.take(bytes_max + 1)
            .read_to_end(&mut bytes)
            .with_context(|| format!("cannot read the prompt from {}", path.display()))?;
        path.display().to_string()
    };
    if bytes.len() as u64 > bytes_max {
        bail!(
            "the prompt in {name} is larger than {bytes_max} bytes: {context_max} positions \
               cannot hold it; shorten it"
        );
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        anyhow::anyhow!("the prompt in {name} is not UTF-8 (byte {at}); convert it to UTF-8")
    })
}
