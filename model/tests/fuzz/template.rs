//! Chat templates in `chat_template.jinja` and `tokenizer_config.json`, rendered; and the built-in
//! forms with arbitrary messages and tools.

use paceline_model::chat::{ChatOptions, ChatTemplate, KimiFormat, Message};
use paceline_model::weights::Source;
use serde_json::{Map, Value, json};

use crate::harness::{check_message, run};
use crate::random::Random;
use crate::{bytes, json};

/// Templates in the manner of published ones.
const TEMPLATES: &[&str] = &[
    "{{ bos_token }}{% for m in messages %}{{ '<|im_' + m['role'] + '|>' }}{{ m['content'] }}\
     {% endfor %}{% if add_generation_prompt %}<|im_assistant|>{% endif %}",
    "{%- set ns = namespace(first=true, texts=[]) -%}{% for m in messages %}{% if m.role == \
     'system' and ns.first %}{% set ns.first = false %}{% set _ = ns.texts.append(m.content) %}\
     {% elif m.tool_calls is defined and m.tool_calls %}{% for call in m.tool_calls %}\
     {{ call.function.name }}{{ call.function.arguments|tojson(indent=2) }}{% endfor %}{% else %}\
     {{ m.content|trim|replace('a', 'b') }}{% endif %}{% endfor %}{{ ns.texts|join('\\n') }}",
    "{% macro text(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}{{ p.text }}\
     {% endfor %}{% endif %}{% endmacro %}{% if messages[0]['role'] not in ['system', 'user'] %}\
     {{ raise_exception('no') }}{% endif %}{% for m in messages[::-1] %}{{ loop.index0 }}\
     {{ text(m.content) }}{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% endfor %}",
    "{% if tools %}{{ tools|tojson(separators=(',', ':')) }}{{ tools_ts_str }}{% endif %}\
     {{ strftime_now('%Y-%m-%d') }}{{ messages|length }}{{ {'a': [1, 2.5, none]} }}{% set x = \
     [3, 1, 2] %}{{ x|sort|first }}{{ x[-1] }}{{ x[1:] }}{{ 'abc'.upper()[::2] }}{{ 7 // 2 }}",
];

const WORDS: &[&str] = &[
    "{% ",
    " %}",
    "{{ ",
    " }}",
    "{#",
    "#}",
    "{%-",
    "-%}",
    "{% for x in messages %}",
    "{% endfor %}",
    "{% if x %}",
    "{% else %}",
    "{% endif %}",
    "{% set x = ",
    "{% raw %}",
    "{% endraw %}",
    "{% macro f() %}",
    "{% endmacro %}",
    "f()",
    "range(99)",
    "|tojson",
    "|length",
    "|list",
    "|sort",
    "|reverse",
    "|string",
    ".append(",
    ".pop(",
    ".insert(0, ",
    ".items()",
    ".split(",
    "messages",
    "loop.index",
    "namespace(",
    "[",
    "]",
    "(",
    ")",
    "'",
    "\"",
    " ~ ",
    " * ",
    " - ",
    " / ",
    " % ",
    " ** ",
    "9999999999",
    "-1",
    "0",
    "none",
    "1e308",
    "[::-1]",
    "[:0]",
    "is defined",
    "is string",
    "not ",
    " in ",
    "{",
    "}",
    ":",
    ",",
    "\\",
    "é",
    "{% break %}",
    "{% continue %}",
    "{% block a %}",
    "{% include 'a' %}",
    "{% extends 'a' %}",
    "{% call f() %}",
    "{% filter upper %}",
    "{% with x = 1 %}",
    "{% autoescape true %}",
    "loop(",
    "recursive",
    "caller()",
    "self.",
    "super()",
    "dict(",
    "debug()",
    "cycler(",
    "joiner(",
];

fn conversation(random: &mut Random) -> Vec<Message> {
    let plain = json!([
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Tell <|im_end|> me"},
        {"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [
            {"id": "f:0", "function": {"name": "f", "arguments": {"x": [1, 2.0, "é"]}}}]},
        {"role": "tool", "content": [{"type": "text", "text": "</think>7"}], "tool_call_id": "f:0"},
    ]);
    let changed = match random.once_in(3) {
        true => serde_json::from_str(&json::mutate(random, &plain, WORDS)).ok(),
        false => None,
    };
    serde_json::from_value(plain).map(|plain| changed.unwrap_or(plain)).unwrap()
}

fn tools(random: &mut Random) -> Option<Value> {
    let tools = json!([{"type": "function", "function": {"name": "f", "description": "a\n\nb",
        "parameters": {"type": "object", "required": ["x"], "$defs": {"t": {"type": "integer"}},
            "properties": {
                "x": {"type": "array", "items": {"$ref": "#/$defs/t", "description": "i"}},
                "y": {"anyOf": [{"type": "string", "maxLength": 3}, {"enum": ["a", 1, null]}],
                    "default": {"a": 1}},
                "z": {"type": ["object", "null"], "additionalProperties": {"$ref": "#"}}}}}}]);
    match random.below(3) {
        0 => None,
        1 => Some(tools),
        _ => serde_json::from_str(&json::mutate(random, &tools, WORDS)).ok(),
    }
}

fn options(random: &mut Random) -> ChatOptions {
    let extra = json!({"thinking": random.once_in(2), "preserve_thinking": 1});
    let extra = if random.once_in(2) { extra.as_object().cloned() } else { None };
    let add_generation_prompt = random.once_in(2);
    ChatOptions { add_generation_prompt, extra: extra.unwrap_or_else(Map::new) }
}

fn render(random: &mut Random, template: &ChatTemplate) {
    let (messages, tools, options) = (conversation(random), tools(random), options(random));
    match template.render(&messages, tools.as_ref(), &options) {
        Ok(_) => {}
        Err(error) => {
            assert!(!error.to_string().contains("panicked"), "{error}");
            check_message(&error);
        }
    }
}

#[test]
fn chat_template() {
    run("chat_template", 5_000, |random| {
        let mut source = (*random.of(TEMPLATES)).to_owned();
        for _ in 0..=random.below(3) {
            source = bytes::mutate_text(random, &source, WORDS);
        }
        match ChatTemplate::from_source(&source, Some("<s>"), Some("</s>")) {
            Ok(template) => render(random, &template),
            Err(error) => {
                assert!(!error.to_string().contains("panicked"), "{error}");
                check_message(&error);
            }
        }
    });
}

#[test]
fn tokenizer_config() {
    let demo = Source::DEMO.text("tokenizer_config.json").unwrap().unwrap();
    let named = json!({"bos_token": {"content": "<s>"}, "eos_token": null, "chat_template": [
        {"name": "default", "template": "{{ messages[0].content }}"},
        {"name": "tool_use", "template": "{{ tools|tojson }}"}]});
    let files = [serde_json::from_str(&demo).unwrap(), named];
    run("tokenizer_config", 5_000, |random| {
        let file = random.below(files.len());
        let text = json::mutate(random, &files[file], WORDS);
        match ChatTemplate::from_texts(None, Some(&text)) {
            Ok(Some(template)) => render(random, &template),
            Ok(None) => {}
            Err(error) => check_message(&error),
        }
    });
}

#[test]
fn built_in_forms() {
    let forms = [KimiFormat::K2Instruct, KimiFormat::K2Thinking, KimiFormat::K25];
    run("built_in_forms", 20_000, |random| {
        let form = *random.of(&forms);
        render(random, &ChatTemplate::kimi(form));
    });
}
