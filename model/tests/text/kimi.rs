//! Kimi's built-in conversation forms, against golden strings of the specification.

use paceline_model::ModelError;
use paceline_model::chat::{ChatOptions, ChatTemplate, KimiFormat, Message};
use paceline_model::config::ModelConfig;
use paceline_model::tokenizer::Tokenizer;
use serde_json::{Value, json};

use crate::published::{deepseek_v3, kimi_k2_instruct, kimi_k25};

fn try_render(
    format: KimiFormat,
    messages: Value,
    tools: Option<&Value>,
    extra: Value,
) -> Result<String, ModelError> {
    let messages: Vec<Message> = serde_json::from_value(messages).unwrap();
    let extra = extra.as_object().unwrap().clone();
    let options = ChatOptions { add_generation_prompt: true, extra };
    ChatTemplate::kimi(format).render(&messages, tools, &options)
}

#[track_caller]
fn render(format: KimiFormat, messages: Value, extra: Value) -> String {
    try_render(format, messages, None, extra).unwrap()
}

fn hi() -> Value {
    json!([{"role": "user", "content": "Hi"}])
}

/// A conversation with a finished answer, a tool call and its result.
fn history() -> Value {
    json!([
        {"role": "system", "content": "S"},
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "a1", "reasoning_content": "r1"},
        {"role": "user", "content": "q2"},
        {"role": "assistant", "content": "", "reasoning_content": "r2", "tool_calls": [{
            "id": "functions.get_weather:0", "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": "北京"}}
        }]},
        {"role": "tool", "tool_call_id": "functions.get_weather:0", "content": "sunny"}
    ])
}

fn weather_tool() -> Value {
    json!([{"type": "function", "function": {
        "name": "get_weather",
        "description": "Get weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"]
        }
    }}])
}

#[test]
fn k25_equals_the_golden_strings() {
    let open = "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|>";
    assert_eq!(render(KimiFormat::K25, hi(), json!({})), format!("{open}<think>"));
    let silent = render(KimiFormat::K25, hi(), json!({"thinking": false}));
    assert_eq!(silent, format!("{open}<think></think>"));
    let expected = "<|im_system|>system<|im_middle|>S<|im_end|>\
        <|im_user|>user<|im_middle|>q1<|im_end|>\
        <|im_assistant|>assistant<|im_middle|><think></think>a1<|im_end|>\
        <|im_user|>user<|im_middle|>q2<|im_end|>\
        <|im_assistant|>assistant<|im_middle|><think>r2</think><|tool_calls_section_begin|>\
        <|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{\"city\": \"北京\"}\
        <|tool_call_end|><|tool_calls_section_end|><|im_end|>\
        <|im_system|>tool<|im_middle|>## Return of functions.get_weather:0\nsunny<|im_end|>\
        <|im_assistant|>assistant<|im_middle|><think>";
    assert_eq!(render(KimiFormat::K25, history(), json!({})), expected);
    let silent = render(KimiFormat::K25, history(), json!({"thinking": false}));
    let without = expected.replace("<think>r2</think>", "<think></think>") + "</think>";
    assert_eq!(silent, without);
    let kept = render(KimiFormat::K25, history(), json!({"preserve_thinking": true}));
    assert_eq!(kept, expected.replace("<think></think>a1", "<think>r1</think>a1"));
}

#[test]
fn k25_declares_tools_as_typescript() {
    let prompt = try_render(KimiFormat::K25, hi(), Some(&weather_tool()), json!({})).unwrap();
    let expected = "<|im_system|>tool_declare<|im_middle|># Tools\n\n## functions\n\
        namespace functions {\n// Get weather\ntype get_weather = (_: {\n  city: string\n}) => any;\
        \n}\n<|im_end|><|im_user|>";
    assert!(prompt.starts_with(expected), "{prompt}");
    // A template that asks for them is given the same declarations.
    let template = ChatTemplate::from_source("{{ tools_ts_str }}", None, None).unwrap();
    let text = template.render(&[], Some(&weather_tool()), &ChatOptions::default()).unwrap();
    assert_eq!(
        format!("{text}\n"),
        prompt[38..prompt.find("<|im_end|>").unwrap()].to_owned() + "\n"
    );
    let none = template.render(&[], None, &ChatOptions::default()).unwrap();
    assert_eq!(none, "");
}

/// Derived by hand from the rules of the specification.
#[test]
fn typescript_covers_the_schema_forms() {
    let parameters = json!({
        "type": "object",
        "required": ["z", "list"],
        "properties": {
            "count": {"type": "integer", "minimum": 1, "maximum": 9, "default": 3},
            "list": {
                "type": "array", "maxItems": 2, "items": {"type": "string", "description": "one"}
            },
            "mode": {"enum": ["a", "b", 1], "description": "first\n\nsecond"},
            "nested": {
                "type": "object",
                "properties": {"x": {"type": ["object", "array", "integer", "null"]}},
                "additionalProperties": false
            },
            "other": {"anyOf": [{"type": "number"}, {"$ref": "#/$defs/Node"}]},
            "plain": {"type": "array", "items": {"type": "boolean"}},
            "z": {"type": "string", "pattern": "^a", "minLength": 1, "default": "é"},
            "any": {}
        },
        "additionalProperties": {"type": "integer"},
        "$defs": {"Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}}
    });
    let tools = json!([
        {"type": "function", "function": {"name": "f", "parameters": parameters}},
        {"type": "function", "function": {"name": "g", "description": "two\nlines"}}
    ]);
    let expected = "# Tools\n\n## functions\nnamespace functions {\n\
        interface Node {\n  next?: Node\n}\n\
        type f = (_: {\n\
        \u{20} // maxItems: 2\n  list: Array<\n    // one\n    string\n  >,\n\
        \u{20} // minLength: 1, pattern: ^a\n  // Default: \"é\"\n  z: string,\n\
        \u{20} any?: any,\n\
        \u{20} // maximum: 9, minimum: 1\n  // Default: 3\n  count?: number,\n\
        \u{20} // first\n\n  // second\n  mode?: \"a\" | \"b\" | 1,\n\
        \u{20} nested?: {\n    x?: {} | Array<any> | number | null,\n    [k: string]: never\n  },\n\
        \u{20} other?: number | Node,\n\
        \u{20} plain?: Array<boolean>,\n\
        \u{20} [k: string]: number\n\
        }) => any;\n\
        // two\n// lines\ntype g = (_: {}) => any;\n}\n";
    let template = ChatTemplate::from_source("{{ tools_ts_str }}", None, None).unwrap();
    let text = template.render(&[], Some(&tools), &ChatOptions::default()).unwrap();
    assert_eq!(text, expected);

    let recursive = json!([{"function": {"name": "h", "parameters": {
        "type": "object", "properties": {"child": {"$ref": "#"}}
    }}}]);
    let text = template.render(&[], Some(&recursive), &ChatOptions::default()).unwrap();
    let interface = "interface parameters {\n  child?: parameters\n}\n\
        type h = (_: parameters) => any;\n";
    assert!(text.contains(interface), "{text}");
    for wrong in [
        json!([{"type": "function"}]),
        json!([{"function": {"name": "f", "parameters": {
            "type": "object", "properties": {"a": {"$ref": "http://x"}}
        }}}]),
    ] {
        assert!(template.render(&[], Some(&wrong), &ChatOptions::default()).is_err());
    }
}

#[test]
fn k2_thinking_equals_its_golden_string() {
    let messages = json!([
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "My name is Qwen2."}
    ]);
    let messages: Vec<Message> = serde_json::from_value(messages).unwrap();
    let template = ChatTemplate::kimi(KimiFormat::K2Thinking);
    let text = template.render(&messages, None, &ChatOptions::default()).unwrap();
    let expected = "<|im_system|>system<|im_middle|>You are a helpful assistant.<|im_end|>\
        <|im_user|>user<|im_middle|>Who are you?<|im_end|>\
        <|im_assistant|>assistant<|im_middle|><think></think>My name is Qwen2.<|im_end|>";
    assert_eq!(text, expected);
    let prompt = render(KimiFormat::K2Thinking, history(), json!({}));
    assert!(prompt.contains("<think></think>a1") && prompt.contains("<think>r2</think>"));
    assert!(prompt.ends_with("<|im_end|><|im_assistant|>assistant<|im_middle|>"));
}

#[test]
fn k2_has_a_default_system_message_and_no_reasoning() {
    let system = "<|im_system|>system<|im_middle|>\
        You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>";
    let turn = "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|>";
    let expected = format!("{system}{turn}");
    assert_eq!(render(KimiFormat::K2Instruct, hi(), json!({})), expected);
    assert_eq!(render(KimiFormat::K2Thinking, hi(), json!({})), expected);
    let prompt = render(KimiFormat::K2Instruct, history(), json!({}));
    assert!(!prompt.contains("think>") && !prompt.contains("You are Kimi"), "{prompt}");
    assert!(prompt.contains("assistant<|im_middle|>a1<|im_end|>"));
    let tools = json!([{"type": "function", "function": {"name": "f", "description": "d"}}]);
    let prompt = try_render(KimiFormat::K2Instruct, hi(), Some(&tools), json!({})).unwrap();
    let declared = "<|im_system|>tool_declare<|im_middle|>\
        [{\"function\": {\"description\": \"d\", \"name\": \"f\"}, \
        \"type\": \"function\"}]<|im_end|>";
    assert_eq!(prompt, format!("{declared}{expected}"));
}

#[test]
fn names_and_call_ids_follow_the_rules() {
    let call = |name: &str, arguments: Value| {
        let function = json!({"name": name, "arguments": arguments});
        json!({"type": "function", "function": function})
    };
    let messages = json!([
        {"role": "user", "name": "Ann", "content": [
            {"type": "text", "text": "a"}, {"type": "text", "text": "b"}
        ]},
        {"role": "assistant", "tool_calls": [call("f", json!("{\"x\":1}")), call("g", json!({}))]},
        {"role": "critic", "content": "hm"},
        {"role": "assistant", "tool_calls": [call("f", json!(null))]}
    ]);
    let prompt = render(KimiFormat::K25, messages, json!({}));
    assert!(prompt.starts_with("<|im_user|>Ann<|im_middle|>ab<|im_end|>"), "{prompt}");
    for part in [
        "functions.f:0<|tool_call_argument_begin|>{\"x\":1}<|tool_call_end|>",
        "functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "<|im_system|>critic<|im_middle|>hm<|im_end|>",
        "functions.f:2<|tool_call_argument_begin|>{}<|tool_call_end|>",
    ] {
        assert!(prompt.contains(part), "{part} in {prompt}");
    }
    let image = json!([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]);
    let error = try_render(KimiFormat::K25, image, None, json!({})).unwrap_err().to_string();
    assert!(error.contains("message 0") && error.contains("image_url"), "{error}");
    let error = try_render(KimiFormat::K25, hi(), None, json!({"thinking": "no"})).unwrap_err();
    assert!(error.to_string().contains("thinking"), "{error}");
}

#[test]
fn the_version_is_told_from_the_checkpoint() {
    let config = |config: &Value| ModelConfig::from_json(&config.to_string()).unwrap();
    // The demo's tokenizer has no token for `<think>`.
    let tokenizer = Tokenizer::from_dir(crate::demo_dir()).unwrap();
    let of = |json: &Value| KimiFormat::of(&config(json), &tokenizer);
    assert_eq!(of(&kimi_k25()), Some(KimiFormat::K25));
    assert_eq!(of(&kimi_k2_instruct()), Some(KimiFormat::K2Instruct));
    assert_eq!(of(&deepseek_v3()), None);
    let path = crate::demo_dir().join("tokenizer.json");
    let mut json: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut think = json["added_tokens"][0].clone();
    think["content"] = json!("<think>");
    think["id"] = json!(4096);
    json["added_tokens"].as_array_mut().unwrap().push(think);
    let thinker = Tokenizer::from_hf_json(json.to_string().as_bytes()).unwrap();
    let found = KimiFormat::of(&config(&kimi_k2_instruct()), &thinker);
    assert_eq!(found, Some(KimiFormat::K2Thinking));

    let empty = tempfile::tempdir().unwrap();
    let template =
        |json: &Value| ChatTemplate::for_checkpoint(empty.path(), &config(json), &tokenizer);
    assert!(template(&kimi_k25()).is_ok());
    assert!(matches!(template(&deepseek_v3()), Err(ModelError::TemplateMissing { .. })));
}
