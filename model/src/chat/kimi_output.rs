//! The parts of a Kimi answer: reasoning, content and tool calls.
//!
//! Invariant: parsing never fails and never panics. What is cut off by the end of the text is kept
//! where it is text, and dropped where it is an unfinished tool call.

/// A Kimi answer taken apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KimiOutput {
    /// What the model thought; `None` if it did not.
    pub reasoning: Option<String>,
    /// What it said.
    pub content: String,
    /// What it wants called, in order. Not empty means the finish reason `tool_calls`.
    pub tool_calls: Vec<KimiToolCall>,
}

/// One tool call of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KimiToolCall {
    /// The model's name of the call, such as `functions.get_weather:0`.
    pub id: String,
    /// The function; `None` if the model wrote a bare counter.
    pub function: Option<String>,
    /// Arguments as the model wrote them; JSON, if it made no mistake.
    pub arguments: String,
}

const THINK: &str = "<think>";
const THINK_END: &str = "</think>";
// Models also write the singular.
const SECTION: [&str; 2] = ["<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"];
const SECTION_END: [&str; 2] = ["<|tool_calls_section_end|>", "<|tool_call_section_end|>"];
const CALL: &str = "<|tool_call_begin|>";
const ARGUMENTS: &str = "<|tool_call_argument_begin|>";
const CALL_END: &str = "<|tool_call_end|>";
const TURN_END: [&str; 3] = ["<|im_end|>", "[EOS]", "[EOT]"];

impl KimiOutput {
    /// Takes an answer apart. `text` is decoded with special tokens. `opened` says that the prompt
    /// ended with `<think>`, as Kimi-K2.5's does; otherwise reasoning only is what follows a
    /// `<think>` at the beginning.
    pub fn parse(text: &str, opened: bool) -> Self {
        let text = TURN_END.iter().fold(text, |text, mark| text.strip_suffix(mark).unwrap_or(text));
        let thought = text.trim_start().strip_prefix(THINK);
        let (reasoning, answer) = match thought.or(opened.then_some(text)) {
            None => (None, text),
            Some(thought) => {
                let (reasoning, answer) = split_reasoning(thought);
                (Some(reasoning.to_owned()), answer)
            }
        };
        let mut output = Self { reasoning, ..Self::default() };
        let mut rest = answer;
        while let Some((said, section)) = split_at_first(rest, &SECTION) {
            output.content.push_str(said);
            let (calls, after) = split_at_first(section, &SECTION_END).unwrap_or((section, ""));
            output.tool_calls.extend(read_calls(calls));
            rest = after;
        }
        output.content.push_str(rest);
        output
    }
}

/// Reasoning ends at its mark, or where a tool section begins without it.
fn split_reasoning(thought: &str) -> (&str, &str) {
    let section = SECTION.iter().filter_map(|mark| thought.find(mark)).min();
    match (thought.find(THINK_END), section) {
        (Some(end), section) if section.is_none_or(|section| end < section) => {
            (&thought[..end], &thought[end + THINK_END.len()..])
        }
        (_, Some(section)) => thought.split_at(section),
        (_, None) => (thought, ""),
    }
}

/// Text before and behind the first of the marks.
fn split_at_first<'a>(text: &'a str, marks: &[&str]) -> Option<(&'a str, &'a str)> {
    let found = marks.iter().filter_map(|mark| Some((text.find(mark)?, mark.len())));
    let (at, length) = found.min()?;
    Some((&text[..at], &text[at + length..]))
}

fn read_calls(section: &str) -> impl Iterator<Item = KimiToolCall> {
    section.split(CALL).skip(1).filter_map(|call| {
        let (call, _) = call.split_once(CALL_END)?;
        let (id, arguments) = call.split_once(ARGUMENTS)?;
        let (id, arguments) = (id.trim(), arguments.trim());
        let function = function_of(id).map(str::to_owned);
        Some(KimiToolCall { id: id.to_owned(), function, arguments: arguments.to_owned() })
    })
}

/// The name in `functions.NAME:N` or `NAME:N`.
fn function_of(id: &str) -> Option<&str> {
    let name = id.strip_prefix("functions.").unwrap_or(id);
    let name = match name.rsplit_once(':') {
        Some((name, count)) if is_count(count) => name,
        _ => name,
    };
    (!name.is_empty() && !is_count(name)).then_some(name)
}

fn is_count(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(id: &str, function: Option<&str>, arguments: &str) -> KimiToolCall {
        let function = function.map(str::to_owned);
        KimiToolCall { id: id.to_owned(), function, arguments: arguments.to_owned() }
    }

    #[test]
    fn separates_reasoning_from_content() {
        let output = KimiOutput::parse("r</think>a<|im_end|>", true);
        assert_eq!(output.reasoning.as_deref(), Some("r"));
        assert_eq!(output.content, "a");
        assert_eq!(KimiOutput::parse("<think>r</think>a", false), output);
        assert_eq!(KimiOutput::parse("plain </think>", false).content, "plain </think>");
        let unfinished = KimiOutput::parse("still thinking", true);
        assert_eq!(unfinished.reasoning.as_deref(), Some("still thinking"));
        assert_eq!(unfinished.content, "");
    }

    #[test]
    fn reads_tool_calls_of_all_id_forms() {
        let text = "Let me see.<|tool_calls_section_begin|>\
            <|tool_call_begin|> functions.get_weather:0 <|tool_call_argument_begin|> {\"city\": \
            \"北京\"} <|tool_call_end|>\
            <|tool_call_begin|>a.b:12<|tool_call_argument_begin|>{}<|tool_call_end|>\
            <|tool_call_begin|>2<|tool_call_argument_begin|>{}<|tool_call_end|>\
            <|tool_calls_section_end|> Done.";
        let output = KimiOutput::parse(text, false);
        assert_eq!(output.reasoning, None);
        assert_eq!(output.content, "Let me see. Done.");
        let expected = [
            call("functions.get_weather:0", Some("get_weather"), "{\"city\": \"北京\"}"),
            call("a.b:12", Some("a.b"), "{}"),
            call("2", None, "{}"),
        ];
        assert_eq!(output.tool_calls, expected);
    }

    #[test]
    fn a_tool_section_ends_reasoning() {
        let text = "hm<|tool_call_section_begin|><|tool_call_begin|>f:0\
            <|tool_call_argument_begin|>{\"x\":\"</think>\"}<|tool_call_end|>";
        let output = KimiOutput::parse(text, true);
        assert_eq!(output.reasoning.as_deref(), Some("hm"));
        assert_eq!(output.tool_calls, [call("f:0", Some("f"), "{\"x\":\"</think>\"}")]);
        assert_eq!(output.content, "");
    }

    #[test]
    fn a_cut_answer_keeps_its_finished_calls() {
        let text = "<|tool_calls_section_begin|><|tool_call_begin|>f:0\
            <|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_begin|>g:1\
            <|tool_call_argument_begin|>{\"x";
        assert_eq!(KimiOutput::parse(text, false).tool_calls, [call("f:0", Some("f"), "{}")]);
        for end in (0..text.len()).filter(|&end| text.is_char_boundary(end)) {
            KimiOutput::parse(&text[..end], end % 2 == 0);
        }
    }
}
