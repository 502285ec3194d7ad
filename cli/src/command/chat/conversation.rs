//! A conversation as data: what was said, and what of it the model still sees.
//!
//! Pure. Turns are only ever dropped from the front, and stay in the record. Start reading at
//! [`Conversation`].

use paceline_model::chat::{Content, Message, kimi_output::KimiOutput};
use serde_json::{Value, json};

/// Turns of a user and a model, after an optional system message.
#[derive(Clone, Debug, Default)]
pub(super) struct Conversation {
    pub(super) system: Option<String>,
    turns: Vec<Turn>,
    /// Oldest turns that the model no longer sees.
    dropped: usize,
}

/// What a user said, and the answer once there is one.
#[derive(Clone, Debug)]
struct Turn {
    message: String,
    answer: Option<Answer>,
}

#[derive(Clone, Debug)]
struct Answer {
    text: String,
    /// Whether the prompt had begun the model's reasoning, so that the text is in the midst of it.
    reasoning_opened: bool,
    /// Whether the user stopped it.
    stopped: bool,
}

impl Conversation {
    pub(super) fn new(system: Option<String>) -> Self {
        Self { system, ..Self::default() }
    }

    /// The user says something.
    pub(super) fn say(&mut self, message: String) {
        self.turns.push(Turn { message, answer: None });
    }

    /// The model has answered the last message. `reasoning_opened` says that the prompt ended in
    /// the beginning of its reasoning.
    pub(super) fn answer(&mut self, text: String, reasoning_opened: bool, stopped: bool) {
        if let Some(turn) = self.turns.last_mut() {
            turn.answer = Some(Answer { text, reasoning_opened, stopped });
        }
    }

    /// Takes the answer to the last message back, if there is one. False without a message.
    pub(super) fn take_answer_back(&mut self) -> bool {
        self.turns.last_mut().map(|turn| turn.answer = None).is_some()
    }

    /// Forgets everything but the system message.
    pub(super) fn clear(&mut self) {
        self.turns.clear();
        self.dropped = 0;
    }

    /// Hides the oldest turn from the model; the last one cannot be hidden.
    pub(super) fn drop_oldest(&mut self) -> bool {
        let can = self.dropped + 1 < self.turns.len();
        self.dropped += usize::from(can);
        can
    }

    /// Number of turns that the model no longer sees.
    pub(super) fn dropped(&self) -> usize {
        self.dropped
    }

    /// What a chat template is given.
    pub(super) fn messages(&self) -> Vec<Message> {
        let system = self.system.iter().map(|text| Message::new("system", text));
        let turns = self.turns[self.dropped..].iter().flat_map(|turn| {
            let user = Message::new("user", &turn.message);
            [Some(user), turn.answer.as_ref().map(Answer::message)].into_iter().flatten()
        });
        system.chain(turns).collect()
    }

    /// The whole record: messages in the form of the usual chat interfaces, with `stopped` where
    /// the user stopped an answer and `dropped` where the model no longer sees one.
    pub(super) fn to_json(&self, model: &str) -> Value {
        let mut messages = Vec::new();
        if let Some(system) = &self.system {
            messages.push(json!({"role": "system", "content": system}));
        }
        for (index, turn) in self.turns.iter().enumerate() {
            let mut user = json!({"role": "user", "content": turn.message});
            let mut assistant = turn.answer.as_ref().map(|answer| {
                let mut message = json!({"role": "assistant", "content": answer.text});
                if answer.stopped {
                    message["stopped"] = true.into();
                }
                message
            });
            if index < self.dropped {
                user["dropped"] = true.into();
                if let Some(assistant) = &mut assistant {
                    assistant["dropped"] = true.into();
                }
            }
            messages.push(user);
            messages.extend(assistant);
        }
        json!({"model": model, "messages": messages})
    }
}

impl Answer {
    /// The answer for a template, with the reasoning apart from what was said: templates leave the
    /// reasoning of earlier turns out.
    fn message(&self) -> Message {
        let parts = KimiOutput::parse(&self.text, self.reasoning_opened);
        match parts.reasoning {
            Some(reasoning) if parts.tool_calls.is_empty() => Message {
                reasoning_content: Some(reasoning),
                content: Some(Content::Text(parts.content)),
                ..Message::new("assistant", "")
            },
            _ => Message::new("assistant", &self.text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(conversation: &Conversation) -> Vec<(String, String)> {
        let text = |message: Message| match message.content {
            Some(Content::Text(text)) => (message.role, text),
            other => panic!("{other:?}"),
        };
        conversation.messages().into_iter().map(text).collect()
    }

    fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
        expected.iter().map(|&(role, text)| (role.to_owned(), text.to_owned())).collect()
    }

    fn two_turns() -> Conversation {
        let mut conversation = Conversation::new(Some("be kind".to_owned()));
        conversation.say("one".to_owned());
        conversation.answer("first".to_owned(), false, false);
        conversation.say("two".to_owned());
        conversation.answer("sec".to_owned(), false, true);
        conversation
    }

    #[test]
    fn messages_alternate_after_the_system_message() {
        let expected = [
            ("system", "be kind"),
            ("user", "one"),
            ("assistant", "first"),
            ("user", "two"),
            ("assistant", "sec"),
        ];
        assert_eq!(texts(&two_turns()), pairs(&expected));
    }

    #[test]
    fn the_oldest_turn_goes_first_and_the_last_stays() {
        let mut conversation = two_turns();
        conversation.say("three".to_owned());
        assert!(conversation.drop_oldest() && conversation.drop_oldest());
        assert!(!conversation.drop_oldest());
        assert_eq!(texts(&conversation), pairs(&[("system", "be kind"), ("user", "three")]));
        assert_eq!(conversation.dropped(), 2);
        // What was dropped stays in the record, marked.
        let record = conversation.to_json("m");
        assert_eq!(record["messages"][2]["content"], "first");
        assert_eq!(record["messages"][2]["dropped"], true);
        assert_eq!(record["messages"][4]["stopped"], true);
        assert!(record["messages"][5]["dropped"].is_null());
        conversation.answer("third".to_owned(), false, false);
        assert!(conversation.take_answer_back());
        assert_eq!(texts(&conversation), pairs(&[("system", "be kind"), ("user", "three")]));
        conversation.clear();
        assert_eq!((texts(&conversation).len(), conversation.dropped()), (1, 0));
        assert!(!conversation.take_answer_back());
    }

    #[test]
    fn reasoning_is_kept_apart() {
        let mut conversation = Conversation::default();
        conversation.say("why?".to_owned());
        conversation.answer("hm</think>because".to_owned(), true, false);
        let message = conversation.messages().pop().unwrap();
        assert_eq!(message.reasoning_content.as_deref(), Some("hm"));
        assert_eq!(message.content, Some(Content::Text("because".to_owned())));
    }
}
