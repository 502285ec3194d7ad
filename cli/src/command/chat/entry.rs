//! What a user types: messages, and commands that begin with a slash. Pure; start at
//! [`Entry::parse`].

use std::path::PathBuf;

/// Something that was typed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// For the model.
    Message(String),
    /// Nothing.
    Empty,
    /// List the commands.
    Help,
    /// Begin a new conversation.
    Clear,
    /// Set the system message, or remove it.
    System(Option<String>),
    /// Answer the last message anew.
    Retry,
    /// Write the conversation to a file.
    Save(PathBuf),
    /// Leave.
    Exit,
    /// A command that there is not, or that lacks something; the text says what.
    Mistake(String),
}

/// What /help prints.
pub(super) const HELP: &str = "\
/clear        begin a new conversation; the system message stays
/system TEXT  set the system message; without TEXT, remove it
/retry        answer the last message anew
/save FILE    write the conversation to a file, as JSON
/exit         leave, as Ctrl-D does
//TEXT        a message that begins with a slash
A line that ends with \\ goes on in the next. Ctrl-C stops an answer.";

impl Entry {
    /// Reads what was typed.
    pub(super) fn parse(text: &str) -> Self {
        let trimmed = text.trim();
        if trimmed.is_empty() {
            return Self::Empty;
        }
        let Some(command) = trimmed.strip_prefix('/') else {
            return Self::Message(text.to_owned());
        };
        if command.starts_with('/') {
            return Self::Message(command.to_owned());
        }
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let rest = rest.trim();
        match (name, rest) {
            ("help" | "?", "") => Self::Help,
            ("clear", "") => Self::Clear,
            ("system", "") => Self::System(None),
            ("system", text) => Self::System(Some(text.to_owned())),
            ("retry", "") => Self::Retry,
            ("save", "") => Self::Mistake("/save needs the name of a file".to_owned()),
            ("save", file) => Self::Save(file.into()),
            ("exit" | "quit", "") => Self::Exit,
            ("help" | "?" | "clear" | "retry" | "exit" | "quit", _) => {
                Self::Mistake(format!("/{name} takes nothing after it"))
            }
            _ => Self::Mistake(format!(
                "there is no command /{name}; /help lists them, and // begins a message with a \
                 slash"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_and_commands_are_told_apart() {
        let message = |text: &str| Entry::Message(text.to_owned());
        assert_eq!(Entry::parse("hello"), message("hello"));
        assert_eq!(Entry::parse(" a\nb"), message(" a\nb"));
        assert_eq!(Entry::parse("//help"), message("/help"));
        assert_eq!(Entry::parse(" \t"), Entry::Empty);
        assert_eq!(Entry::parse("/clear "), Entry::Clear);
        assert_eq!(Entry::parse("/system  be kind "), Entry::System(Some("be kind".to_owned())));
        assert_eq!(Entry::parse("/system"), Entry::System(None));
        assert_eq!(Entry::parse("/save a b.json"), Entry::Save("a b.json".into()));
        for mistake in ["/save", "/clear all", "/nonsense", "/"] {
            assert!(matches!(Entry::parse(mistake), Entry::Mistake(_)), "{mistake}");
        }
    }
}
