//! `paceline chat`: a conversation, turn by turn, on a terminal or through pipes.
//!
//! Invariant: whatever a turn does, the conversation stays one that the template can render.
//! Start reading at [`run`]; a turn is [`Chat::take_turn`].

mod conversation;
mod entry;
mod input;

use std::{
    collections::HashSet,
    io::IsTerminal,
    ops::ControlFlow,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result, bail};
use paceline_comm::Usage;
use paceline_model::{
    chat::{ChatOptions, ChatTemplate},
    tokenizer::Tokenizer,
};
use paceline_runtime::{FinishReason, Outcome, Request, RuntimeError, TokenEvent};

use crate::{
    args::ChatArguments,
    interrupt::Interrupt,
    launch::{self, BYTES_PER_POSITION_MAX, Session},
    output::{
        file,
        print::{self, AnswerWriter},
        run_report,
    },
};
use conversation::Conversation;
use entry::Entry;
use input::{Input, Lines, Terminal, Typed};

/// Of the context, at least one part in this many is kept free for the next answer, unless that may
/// not become so long.
const ANSWER_SHARE: usize = 4;

pub(crate) fn run(arguments: &ChatArguments) -> Result<ExitCode> {
    let options = launch::engine_options(&arguments.run, &arguments.speculation)?;
    let template_options = launch::chat_options(&arguments.conversation.template_arg)?;
    let quiet = arguments.conversation.quiet;
    let Some(session) = launch::launch(&arguments.run, options, 1, quiet)? else {
        return Ok(ExitCode::SUCCESS);
    };
    let mut chat = Chat::new(arguments, session, template_options)?;
    chat.talk()?;
    chat.session.finish()?;
    Ok(ExitCode::SUCCESS)
}

/// A running conversation.
struct Chat<'a> {
    arguments: &'a ChatArguments,
    session: Session,
    template: ChatTemplate,
    template_options: ChatOptions,
    conversation: Conversation,
    /// `None` where Ctrl-C ends the program: in a filter.
    interrupt: Option<Interrupt>,
    /// Answers so far, stopped ones and those of /retry included.
    answers: u64,
    /// Files that /save wrote; it overwrites no others.
    saved: HashSet<PathBuf>,
}

/// How a turn ended.
enum Turn {
    /// The next one may come.
    Done,
    /// So too, but the answer was stopped before it began.
    Unanswered,
    /// Nobody reads the answers any more.
    ReaderGone,
}

impl<'a> Chat<'a> {
    fn new(
        arguments: &'a ChatArguments,
        session: Session,
        template_options: ChatOptions,
    ) -> Result<Self> {
        let engine = &session.engine;
        let tokenizer = engine.tokenizer().context(
            "this checkpoint has no tokenizer, so there is no way to talk with it: add its \
             tokenizer files, or use paceline generate --token-ids",
        )?;
        let template = engine.options().model.chat_template(engine.config(), tokenizer)?;
        Ok(Self {
            arguments,
            session,
            template,
            template_options,
            conversation: Conversation::new(arguments.conversation.system.clone()),
            interrupt: None,
            answers: 0,
            saved: HashSet::new(),
        })
    }

    /// Takes turns until there are no more.
    fn talk(&mut self) -> Result<()> {
        let mut input = match std::io::stdin().is_terminal() {
            true => {
                self.interrupt = Some(Interrupt::watch()?);
                self.greet();
                Input::Terminal(Box::new(Terminal::open()?))
            }
            false => {
                let bytes_max = self.session.engine.context_max() * BYTES_PER_POSITION_MAX;
                Input::Lines(Lines::new(bytes_max))
            }
        };
        loop {
            let entry = match input.next()? {
                Typed::Text(text) => Entry::parse(&text),
                Typed::Interrupted => {
                    print::note("Ctrl-D or /exit leaves; /help lists the commands");
                    continue;
                }
                Typed::End => return Ok(()),
            };
            if matches!(entry, Entry::Exit) {
                return Ok(());
            }
            match (self.follow(entry), &input) {
                (Ok(Turn::Done | Turn::Unanswered), _) => {}
                (Ok(Turn::ReaderGone), _) => return Ok(()),
                // A person reads what was wrong and goes on; a program needs to know.
                (Err(Problem::Turn(error)), Input::Terminal(_)) => {
                    print::note(format_args!("{error:#}"));
                }
                (Err(Problem::Turn(error)), Input::Lines(lines)) => {
                    let number = lines.number();
                    return Err(error.context(format!("line {number} of standard input")));
                }
                (Err(Problem::Fatal(error)), _) => return Err(error),
            }
        }
    }

    fn greet(&self) {
        if self.arguments.conversation.quiet {
            return;
        }
        let engine = &self.session.engine;
        let (name, context) = (engine.options().model.name(), engine.context_max());
        print::note(format_args!(
            "{name}, {context} tokens of context. /help lists the commands, Ctrl-D leaves."
        ));
    }

    /// Does what was typed.
    fn follow(&mut self, entry: Entry) -> Result<Turn, Problem> {
        match entry {
            Entry::Message(message) => {
                let before = self.conversation.clone();
                self.conversation.say(message);
                return self.take_turn(before);
            }
            Entry::Retry => {
                let before = self.conversation.clone();
                if !self.conversation.take_answer_back() {
                    return Err(Problem::turn("there is nothing to answer anew"));
                }
                return self.take_turn(before);
            }
            Entry::Mistake(what) => return Err(Problem::turn(what)),
            Entry::Help => print::note(entry::HELP),
            Entry::Clear => {
                self.conversation.clear();
                self.remark("a new conversation begins");
            }
            Entry::System(text) => {
                self.remark(if text.is_some() {
                    "the system message is set"
                } else {
                    "no system message"
                });
                self.conversation.system = text;
            }
            Entry::Save(path) => self.save(&path).map_err(Problem::Turn)?,
            Entry::Empty | Entry::Exit => {}
        }
        Ok(Turn::Done)
    }

    /// Says something that a filter's user need not know.
    fn remark(&self, text: &str) {
        if self.interrupt.is_some() {
            print::note(text);
        }
    }

    /// Answers the last message. If no answer comes about, the conversation is `before` again: what
    /// was said, the answer that was to be replaced, and what of it the model sees.
    fn take_turn(&mut self, before: Conversation) -> Result<Turn, Problem> {
        let turn = self.answer_last();
        if !matches!(turn, Ok(Turn::Done)) {
            self.conversation = before;
        }
        turn
    }

    fn answer_last(&mut self) -> Result<Turn, Problem> {
        let prompt = self.prompt().map_err(Problem::Turn)?;
        let request = self.request(prompt.ids).map_err(Problem::Fatal)?;
        let answered = self.answer(&request)?;
        if answered.reader_gone {
            return Ok(Turn::ReaderGone);
        }
        let outcome = &answered.outcome;
        let stopped = outcome.finish_reason == FinishReason::Cancelled;
        if stopped && outcome.text.is_empty() {
            print::note("[stopped before the answer began; the conversation is as it was before]");
            return Ok(Turn::Unanswered);
        }
        self.conversation.answer(outcome.text.clone(), prompt.reasoning_opened, stopped);
        match self.report(&request, &answered, stopped).map_err(Problem::Fatal)? {
            true => Ok(Turn::ReaderGone),
            false => Ok(Turn::Done),
        }
    }

    /// The prompt of the conversation as it stands. Drops the oldest turns until it fits.
    fn prompt(&mut self) -> Result<Prompt> {
        let engine = &self.session.engine;
        let tokenizer = engine.tokenizer().context("the tokenizer is gone")?;
        let context = engine.context_max();
        let room = self.arguments.sampling.max_tokens.min(context / ANSWER_SHARE).max(1);
        let before = self.conversation.dropped();
        let prompt = loop {
            let prompt =
                Prompt::new(&self.template, &self.template_options, &self.conversation, tokenizer)?;
            if prompt.ids.len() + room <= context || !self.conversation.drop_oldest() {
                break prompt;
            }
        };
        let dropped = self.conversation.dropped() - before;
        if prompt.ids.len() >= context {
            bail!(
                "this message takes {} tokens, with the system message, but the context holds \
                 {context} with the answer: shorten it, or start with a larger --context",
                prompt.ids.len()
            );
        }
        if dropped > 0 {
            print::note(format_args!(
                "the conversation no longer fits into {context} tokens: the oldest {dropped} \
                 of its turns {} dropped (/clear begins a new one)",
                if dropped == 1 { "was" } else { "were" }
            ));
        }
        Ok(prompt)
    }

    fn request(&mut self, ids: Vec<u32>) -> Result<Request> {
        let ChatArguments { sampling, speculation, .. } = self.arguments;
        let mut request = launch::request(ids, sampling, speculation, &self.session.engine)?;
        // Else every answer would be drawn with the same numbers, and /retry be of no use.
        let seed = &mut request.sampling.seed;
        *seed = seed.map(|seed| seed.wrapping_add(self.answers));
        self.answers += 1;
        Ok(request)
    }

    /// Runs the request. Text streams to standard output; Ctrl-C ends it.
    fn answer(&mut self, request: &Request) -> Result<Answered, Problem> {
        let json = self.arguments.conversation.json;
        let interrupt = self.interrupt.as_ref();
        // Pressed between two answers, it is about neither.
        interrupt.map(Interrupt::take);
        let before = self.session.engine.communication();
        let mut writer = AnswerWriter::new(json);
        let outcome = self.session.engine.generate(request, |event| {
            match writer.hear(&event) && !interrupt.is_some_and(Interrupt::take) {
                true => ControlFlow::Continue(()),
                false => ControlFlow::Break(()),
            }
        });
        let (tokens, reader_gone) = writer.finish().map_err(Problem::Fatal)?;
        match outcome {
            Ok(outcome) => {
                let usage = run_report::usage_since(&before, &self.session.engine.communication());
                Ok(Answered { outcome, tokens, usage, reader_gone })
            }
            Err(error @ RuntimeError::Request { .. }) => Err(Problem::Turn(error.into())),
            Err(error) => Err(Problem::Fatal(error.into())),
        }
    }

    /// Ends the answer's line, or writes its object. Says whether the reader has gone away.
    fn report(&self, request: &Request, answered: &Answered, stopped: bool) -> Result<bool> {
        let Answered { outcome, tokens, usage, .. } = answered;
        if self.arguments.conversation.json {
            let load = self.session.load;
            let mut object = run_report::json(request, outcome, tokens, usage, load);
            object["dropped_turns"] = self.conversation.dropped().into();
            return print::line_to_reader(object);
        }
        let reader_gone = print::line_to_reader("")?;
        if stopped {
            print::note("[stopped]");
        }
        if !self.arguments.conversation.quiet {
            print::note(run_report::summary(outcome, usage, self.session.engine.ranks()));
        }
        Ok(reader_gone)
    }

    fn save(&mut self, path: &Path) -> Result<()> {
        if path.exists() && !self.saved.contains(path) {
            bail!("{} exists already; choose another name, or delete it", path.display());
        }
        let model = self.session.engine.options().model.name();
        let record = self.conversation.to_json(&model);
        file::write(path, format!("{record:#}\n").as_bytes())?;
        self.saved.insert(path.to_owned());
        self.remark(&format!("saved to {}", path.display()));
        Ok(())
    }
}

/// What the model is given.
struct Prompt {
    ids: Vec<u32>,
    /// Whether it ends with the beginning of the model's reasoning.
    reasoning_opened: bool,
}

impl Prompt {
    fn new(
        template: &ChatTemplate,
        options: &ChatOptions,
        conversation: &Conversation,
        tokenizer: &Tokenizer,
    ) -> Result<Self> {
        let text = template.render(&conversation.messages(), None, options)?;
        let reasoning_opened = text.trim_end().ends_with("<think>");
        Ok(Self { ids: tokenizer.encode(&text)?, reasoning_opened })
    }
}

/// An answer, whole or stopped.
struct Answered {
    outcome: Outcome,
    tokens: Vec<TokenEvent>,
    /// Of the communication back ends, for this answer.
    usage: Vec<Usage>,
    reader_gone: bool,
}

/// What went wrong in a turn.
enum Problem {
    /// This turn cannot be; others can.
    Turn(anyhow::Error),
    /// Nothing can be any more.
    Fatal(anyhow::Error),
}

impl Problem {
    fn turn(what: impl Into<String>) -> Self {
        Self::Turn(anyhow::Error::msg(what.into()))
    }
}
