//! `paceline generate`: text after a prompt.

use std::{
    io::{ErrorKind, IsTerminal, Read},
    ops::ControlFlow,
    path::Path,
    process::ExitCode,
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use paceline_model::chat::Message;
use paceline_runtime::{Engine, Outcome, Request, TokenEvent};

use crate::{
    args::{GenerateArguments, PromptArguments},
    failure::UsageError,
    launch::{self, BYTES_PER_POSITION_MAX, Session},
    output::{
        print::{self, AnswerWriter},
        run_report,
    },
    warnings,
};

pub(crate) fn run(arguments: &GenerateArguments) -> Result<ExitCode> {
    check_prompt(&arguments.prompt)?;
    let mut options = launch::engine_options(&arguments.run, &arguments.speculation)?;
    // There is no later prompt that could begin alike.
    options.prefix_reuse = false;
    let quiet = arguments.output.quiet;
    let Some(mut session) = launch::launch(&arguments.run, options, 1, quiet)? else {
        return Ok(ExitCode::SUCCESS);
    };
    if !quiet {
        hint_at_file(&arguments.prompt);
        let lines = warnings::of_sampling(&arguments.sampling, &arguments.speculation);
        lines.iter().for_each(print::note);
    }
    let request = request(arguments, &session.engine)?;
    let (outcome, tokens) = generate(arguments, &mut session.engine, &request)?;
    report(arguments, &session, &request, &outcome, &tokens)?;
    session.finish()?;
    Ok(ExitCode::SUCCESS)
}

/// Runs the request; text streams to standard output as it comes.
fn generate(
    arguments: &GenerateArguments,
    engine: &mut Engine,
    request: &Request,
) -> Result<(Outcome, Vec<TokenEvent>)> {
    let mut writer = AnswerWriter::new(arguments.output.json);
    let outcome = engine.generate(request, |event| match writer.hear(&event) {
        true => ControlFlow::Continue(()),
        false => ControlFlow::Break(()),
    })?;
    let (tokens, _) = writer.finish()?;
    Ok((outcome, tokens))
}

fn report(
    arguments: &GenerateArguments,
    session: &Session,
    request: &Request,
    outcome: &Outcome,
    tokens: &[TokenEvent],
) -> Result<()> {
    let Session { engine, load, .. } = session;
    let usage = engine.communication();
    if arguments.output.json {
        return print::line(run_report::json(request, outcome, tokens, &usage, *load));
    }
    print::line("")?;
    if !arguments.output.quiet {
        let context_max = engine.context_max();
        let line =
            run_report::request_summary(request, context_max, outcome, &usage, engine.ranks());
        print::note(line);
    }
    Ok(())
}

fn request(arguments: &GenerateArguments, engine: &Engine) -> Result<Request> {
    let (sampling, output) = (&arguments.sampling, &arguments.output);
    let prompt = prompt_ids(&arguments.prompt, engine)?;
    Ok(Request {
        logprobs: output.logprobs,
        top_logprobs: output.top_logprobs,
        top_logits: output.top_logits,
        ..launch::request(prompt, sampling, &arguments.speculation, engine)?
    })
}

/// Refuses what contradicts itself, before anything is loaded.
fn check_prompt(arguments: &PromptArguments) -> Result<()> {
    let alone = match (&arguments.system, arguments.template_arg.first()) {
        _ if arguments.chat.is_some() => None,
        (Some(_), _) => Some("--system"),
        (None, Some(_)) => Some("--template-arg"),
        (None, None) => None,
    };
    if let Some(option) = alone {
        bail!(UsageError(format!(
            "{option} is part of a chat: write --chat TEXT instead of --prompt TEXT, or add --chat \
             at the end to a prompt from elsewhere"
        )));
    }
    if let Some(Some(text)) = &arguments.chat {
        if arguments.prompt.is_some() || arguments.file.is_some() {
            let text = "--chat has a message of its own: leave out --prompt and FILE, or write \
                        --chat last";
            bail!(UsageError(text.to_owned()));
        }
        check_message(text)?;
    }
    Ok(())
}

/// Chat templates make a prompt even of nothing.
fn check_message(text: &str) -> Result<()> {
    let empty = "the message of --chat is empty; give it some text";
    ensure!(!text.is_empty(), UsageError(empty.to_owned()));
    Ok(())
}

/// A file's name instead of a text is an easy mistake, and no error.
fn hint_at_file(arguments: &PromptArguments) {
    let chat = arguments.chat.as_ref().and_then(|chat| chat.as_deref());
    let texts = [("--chat", chat, " --chat"), ("--prompt", arguments.prompt.as_deref(), "")];
    for (option, text, more) in texts {
        if let Some(text) = text.filter(|text| Path::new(text).is_file()) {
            print::note(format_args!(
                "hint: {option} takes a text, and {text} is also a file; for what is in it: \
                 paceline generate {text}{more}"
            ));
        }
    }
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
        Some(text) => text.clone(),
        None => prompt_text(arguments, engine.context_max())?,
    };
    check_message(&text)?;
    let mut messages = Vec::new();
    if let Some(system) = &arguments.system {
        messages.push(Message::new("system", system));
    }
    messages.push(Message::new("user", text));
    let options = launch::chat_options(&arguments.template_arg)?;
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
            let text = "no prompt: give --prompt TEXT, --chat TEXT, a file, or text on standard \
                        input";
            bail!(UsageError(text.to_owned()));
        }
        stdin.lock().take(bytes_max + 1).read_to_end(&mut bytes)?;
        "standard input".to_owned()
    } else {
        let path = arguments.file.as_deref().unwrap_or_else(|| Path::new("-"));
        let file = std::fs::File::open(path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => anyhow!(UsageError(format!(
                "there is no file {}; for text write --prompt TEXT or --chat TEXT",
                path.display()
            ))),
            _ => anyhow!(error).context(format!("cannot read the prompt from {}", path.display())),
        })?;
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
