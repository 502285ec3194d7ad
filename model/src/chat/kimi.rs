//! Kimi's conversation form, for checkpoints that ship no template.
//!
//! One message is its tag, its role or name, `<|im_middle|>`, the body and `<|im_end|>`; nothing
//! stands between messages. The versions differ in the default system message, in what remains of
//! past reasoning, and in how tools are declared.

use serde_json::Value;

use super::python::{JsonStyle, json_text};
use super::{ChatOptions, Content, Message, ToolCall, typescript};
use crate::ModelError;
use crate::config::{Family, ModelConfig};
use crate::tokenizer::Tokenizer;

/// Version of the form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KimiFormat {
    /// Kimi-K2-Instruct: no reasoning.
    K2Instruct,
    /// Kimi-K2-Thinking: reasoning since the last answer is kept.
    K2Thinking,
    /// Kimi-K2.5: as K2-Thinking, but the prompt opens the reasoning, and there is no default
    /// system message. Variables `thinking` (default true) and `preserve_thinking` (default
    /// false).
    K25,
}

const DEFAULT_SYSTEM: &str = "You are Kimi, an AI assistant created by Moonshot AI.";

impl KimiFormat {
    /// The form of a checkpoint; `None` if its family is not Kimi's. K2-Thinking is told from
    /// K2-Instruct by its token `<think>`.
    pub fn of(config: &ModelConfig, tokenizer: &Tokenizer) -> Option<Self> {
        match config.family {
            Family::KimiK25 => Some(Self::K25),
            Family::KimiK2 => {
                let thinks = tokenizer.encode("<think>").is_ok_and(|ids| ids.len() == 1);
                Some(if thinks { Self::K2Thinking } else { Self::K2Instruct })
            }
            Family::DeepseekV2 | Family::DeepseekV3 => None,
        }
    }

    pub(super) fn render(
        self,
        messages: &[Message],
        tools: Option<&Value>,
        options: &ChatOptions,
    ) -> Result<String, ModelError> {
        let thinking = flag(options, "thinking", true)?;
        let keep_all = self == Self::K25 && flag(options, "preserve_thinking", false)?;
        // Reasoning up to the last finished answer is history.
        let is_answer =
            |message: &Message| message.role == "assistant" && message.tool_calls.is_empty();
        let history = messages.iter().rposition(is_answer).map_or(0, |last| last + 1);
        let mut prompt = String::new();
        if let Some(tools) = tools {
            push_message(&mut prompt, "system", "tool_declare", &self.declare(tools)?);
        }
        let has_default = self != Self::K25;
        if has_default && messages.first().is_some_and(|message| message.role != "system") {
            push_message(&mut prompt, "system", "system", DEFAULT_SYSTEM);
        }
        let mut calls_before = 0;
        for (index, message) in messages.iter().enumerate() {
            let keeps = self != Self::K25 || thinking;
            let keeps = keep_all || (keeps && index >= history);
            let body = self.body(message, index, keeps, calls_before)?;
            calls_before += message.tool_calls.len();
            let name = message.name.as_deref().unwrap_or(&message.role);
            push_message(&mut prompt, &message.role, name, &body);
        }
        if options.add_generation_prompt {
            prompt.push_str("<|im_assistant|>assistant<|im_middle|>");
            if self == Self::K25 {
                prompt.push_str(if thinking { "<think>" } else { "<think></think>" });
            }
        }
        Ok(prompt)
    }

    fn declare(self, tools: &Value) -> Result<String, ModelError> {
        match self {
            Self::K25 => typescript::declarations(tools),
            _ => to_json(&typescript::sorted(tools)),
        }
    }

    fn body(
        self,
        message: &Message,
        index: usize,
        keeps_reasoning: bool,
        calls_before: usize,
    ) -> Result<String, ModelError> {
        let content = text_of(message, index)?;
        match message.role.as_str() {
            "tool" => {
                let id = message.tool_call_id.as_deref().unwrap_or_default();
                Ok(format!("## Return of {id}\n{content}"))
            }
            "assistant" => {
                let mut body = String::new();
                if self != Self::K2Instruct {
                    let reasoning = message.reasoning_content.as_deref().unwrap_or_default();
                    let reasoning = if keeps_reasoning { reasoning } else { "" };
                    body.push_str("<think>");
                    body.push_str(reasoning);
                    body.push_str("</think>");
                }
                body.push_str(&content);
                push_calls(&mut body, &message.tool_calls, calls_before)?;
                Ok(body)
            }
            _ => Ok(content),
        }
    }
}

fn push_message(prompt: &mut String, role: &str, name: &str, body: &str) {
    prompt.push_str(match role {
        "user" => "<|im_user|>",
        "assistant" => "<|im_assistant|>",
        _ => "<|im_system|>",
    });
    prompt.push_str(name);
    prompt.push_str("<|im_middle|>");
    prompt.push_str(body);
    prompt.push_str("<|im_end|>");
}

fn push_calls(
    body: &mut String,
    calls: &[ToolCall],
    calls_before: usize,
) -> Result<(), ModelError> {
    if calls.is_empty() {
        return Ok(());
    }
    body.push_str("<|tool_calls_section_begin|>");
    for (offset, call) in calls.iter().enumerate() {
        let function = &call.function;
        body.push_str("<|tool_call_begin|>");
        match &call.id {
            Some(id) => body.push_str(id),
            None => {
                body.push_str(&format!("functions.{}:{}", function.name, calls_before + offset));
            }
        }
        body.push_str("<|tool_call_argument_begin|>");
        match &function.arguments {
            Value::String(arguments) => body.push_str(arguments),
            Value::Null => body.push_str("{}"),
            arguments => body.push_str(&to_json(arguments)?),
        }
        body.push_str("<|tool_call_end|>");
    }
    body.push_str("<|tool_calls_section_end|>");
    Ok(())
}

fn text_of(message: &Message, index: usize) -> Result<String, ModelError> {
    let parts = match &message.content {
        None => return Ok(String::new()),
        Some(Content::Text(text)) => return Ok(text.clone()),
        Some(Content::Parts(parts)) => parts,
    };
    let texts = parts.iter().map(|part| match (part["type"].as_str(), part["text"].as_str()) {
        (Some("text"), Some(text)) => Ok(text),
        (kind, _) => {
            let kind = kind.unwrap_or("unknown");
            let reason = format!("content of type {kind:?} is not supported, only \"text\" is");
            Err(ModelError::Message { index, reason })
        }
    });
    texts.collect()
}

fn to_json(value: &Value) -> Result<String, ModelError> {
    json_text(value, &JsonStyle::default())
        .map_err(|error| ModelError::Template { reason: error.to_string() })
}

fn flag(options: &ChatOptions, name: &str, default: bool) -> Result<bool, ModelError> {
    match options.extra.get(name) {
        None | Some(Value::Null) => Ok(default),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(other) => {
            let reason = format!("the variable {name} is {other}, not true or false");
            Err(ModelError::Template { reason })
        }
    }
}
