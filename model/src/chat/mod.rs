//! Conversations to prompts, and Kimi's answers back to their parts.
//!
//! Invariant: a prompt is what the checkpoint's own template makes of the messages, or what the
//! built-in form of its family makes of them; nothing is added. Start reading at [`ChatTemplate`].

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

mod clock;
mod engine;
mod kimi;
pub mod kimi_output;
mod list;
mod python;
mod sandbox;
mod template;
mod typescript;

pub use kimi::KimiFormat;
pub use template::ChatTemplate;

/// One message of a conversation, in the form of the usual chat interfaces.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, `tool`, or what the template knows.
    pub role: String,
    /// What was said; nothing in a message that only calls tools. Templates then see `none`.
    #[serde(default)]
    pub content: Option<Content>,
    /// Name of the speaker, in place of the role.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What an assistant thought before it answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Tools that an assistant calls.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The call that a `tool` message answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
}

/// Content of a message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// Plain text.
    Text(String),
    /// Parts such as `{"type": "text", "text": "…"}`.
    Parts(Vec<Value>),
}

/// A call of a tool by an assistant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// Name of the call, which the answer repeats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Always `function`.
    #[serde(default = "function_kind", rename = "type")]
    pub kind: String,
    /// What is called.
    pub function: FunctionCall,
}

/// Name and arguments of a tool call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FunctionCall {
    /// Name of the function.
    pub name: String,
    /// Arguments: a string of JSON, taken as it is, or a JSON object.
    #[serde(default)]
    pub arguments: Value,
}

/// What a template may know besides messages and tools.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatOptions {
    /// Whether the prompt ends with the beginning of an assistant's turn.
    pub add_generation_prompt: bool,
    /// Further variables by name, for example `thinking`.
    pub extra: Map<String, Value>,
}

impl Message {
    /// A message with a text.
    pub fn new(role: impl Into<String>, text: impl Into<String>) -> Self {
        let content = Some(Content::Text(text.into()));
        Self { role: role.into(), content, ..Self::default() }
    }
}

fn function_kind() -> String {
    "function".to_owned()
}
