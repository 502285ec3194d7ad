//! `paceline generate`: text after a prompt.

use std::{
    io::{IsTerminal, Read},
    ops::ControlFlow,
    path::Path,
    process::ExitCode,
};

use anyhow::{Context, Result, bail};
use paceline_model::chat::Message;
use paceline_runtime::{Engine, Outcome, Request, TokenEvent};

use crate::{
    args::{GenerateArguments, PromptArguments},
    launch::{self, BYTES_PER_POSITION_MAX, Session},
    output::{
        print::{self, AnswerWriter},
        run_report,
    },
};

pub(crate) fn run(arguments: &GenerateArguments) -> Result<ExitCode> {
    let mut options = launch::engine_options(&arguments.run, &arguments.speculation)?;
    // There is no later prompt that could begin alike.
    options.prefix_reuse = false;
    let quiet = arguments.output.quiet;
    let Some(mut session) = launch::launch(&arguments.run, options, 1, quiet)? else {
        return Ok(ExitCode::SUCCESS);
    };
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
        print::note(run_report::summary(outcome, &usage, engine.ranks()));
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
