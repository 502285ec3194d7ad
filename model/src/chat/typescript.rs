//! Tools as the TypeScript declarations that Kimi-K2.5 was trained on.

use serde_json::{Map, Value};

use super::list::from_json;
use super::python::{JsonStyle, json_text, repr};
use crate::ModelError;

const STEP: &str = "  ";

/// Declarations of a list of `{"type": "function", "function": {…}}`.
pub(super) fn declarations(tools: &Value) -> Result<String, ModelError> {
    let tools = sorted(tools);
    let functions: Result<Vec<String>, ModelError> =
        tools.as_array().into_iter().flatten().map(function).collect();
    let functions = functions?.join("\n");
    Ok(format!("# Tools\n\n## functions\nnamespace functions {{\n{functions}\n}}\n"))
}

/// The value with the keys of all objects in order.
pub(super) fn sorted(value: &Value) -> Value {
    match value {
        Value::Array(items) => items.iter().map(sorted).collect(),
        Value::Object(map) => {
            let mut pairs: Vec<_> = map.iter().collect();
            pairs.sort_by_key(|(key, _)| key.as_str());
            pairs.into_iter().map(|(key, item)| (key.clone(), sorted(item))).collect()
        }
        plain => plain.clone(),
    }
}

fn function(tool: &Value) -> Result<String, ModelError> {
    let function = &tool["function"];
    let name = function["name"].as_str().ok_or_else(|| failed("a tool has no function name"))?;
    let empty = Value::Object(Map::new());
    let parameters = match &function["parameters"] {
        Value::Null => &empty,
        parameters => parameters,
    };
    let mut writer = Writer::default();
    let object = writer.object(parameters, "")?;
    let mut interfaces = Vec::new();
    for (name, schema) in parameters["$defs"].as_object().into_iter().flatten() {
        interfaces.push(format!("interface {name} {}", writer.type_of(schema, "")?));
    }
    let argument = match writer.refers_to_root {
        true => {
            interfaces.insert(0, format!("interface parameters {object}"));
            "parameters".to_owned()
        }
        false => object,
    };
    let mut lines = interfaces;
    if let Some(description) = function["description"].as_str().filter(|text| !text.is_empty()) {
        lines.push(comment(description, ""));
    }
    lines.push(format!("type {name} = (_: {argument}) => any;"));
    Ok(lines.join("\n"))
}

/// Writes the types of one function's schema.
#[derive(Default)]
struct Writer {
    refers_to_root: bool,
}

impl Writer {
    fn type_of(&mut self, schema: &Value, indent: &str) -> Result<String, ModelError> {
        if let Some(reference) = schema["$ref"].as_str() {
            return self.reference(reference);
        }
        if let Some(options) = schema["anyOf"].as_array() {
            let options: Result<Vec<String>, ModelError> =
                options.iter().map(|option| self.type_of(option, indent)).collect();
            return Ok(options?.join(" | "));
        }
        if let Some(values) = schema["enum"].as_array() {
            let values: Result<Vec<String>, ModelError> = values.iter().map(literal).collect();
            return Ok(values?.join(" | "));
        }
        match &schema["type"] {
            Value::String(name) => match name.as_str() {
                "object" => self.object(schema, indent),
                "array" => self.array(&schema["items"], indent),
                name => Ok(scalar(name).to_owned()),
            },
            Value::Array(names) => {
                let names = names.iter().filter_map(Value::as_str).map(|name| match name {
                    "object" => "{}",
                    "array" => "Array<any>",
                    name => scalar(name),
                });
                Ok(names.collect::<Vec<_>>().join(" | "))
            }
            _ => Ok("any".to_owned()),
        }
    }

    fn reference(&mut self, reference: &str) -> Result<String, ModelError> {
        if reference == "#" {
            self.refers_to_root = true;
            return Ok("parameters".to_owned());
        }
        match reference.strip_prefix("#/$defs/") {
            Some(name) => Ok(name.to_owned()),
            None => Err(failed(&format!("tool schema reference {reference:?} is not supported"))),
        }
    }

    fn array(&mut self, item: &Value, indent: &str) -> Result<String, ModelError> {
        let deeper = format!("{indent}{STEP}");
        let docs = docs(item, &deeper)?;
        if docs.is_empty() {
            return Ok(format!("Array<{}>", self.type_of(item, indent)?));
        }
        let item = self.type_of(item, &deeper)?;
        Ok(format!("Array<\n{docs}{deeper}{item}\n{indent}>"))
    }

    fn object(&mut self, schema: &Value, indent: &str) -> Result<String, ModelError> {
        let deeper = format!("{indent}{STEP}");
        let required: Vec<&str> =
            schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let mut properties: Vec<(&String, &Value)> =
            schema["properties"].as_object().into_iter().flatten().collect();
        properties.sort_by_key(|(name, _)| (!required.contains(&name.as_str()), name.as_str()));
        let mut fields = Vec::new();
        for (name, property) in properties {
            let mut field = docs(property, &deeper)?;
            if let Some(default) = property.get("default").filter(|default| !default.is_null()) {
                let default = json_text(default, &JsonStyle::default()).map_err(engine_failed)?;
                field.push_str(&format!("{deeper}// Default: {default}\n"));
            }
            let mark = if required.contains(&name.as_str()) { "" } else { "?" };
            let kind = self.type_of(property, &deeper)?;
            fields.push(format!("{field}{deeper}{name}{mark}: {kind}"));
        }
        let others = match &schema["additionalProperties"] {
            Value::Bool(true) => Some("any".to_owned()),
            Value::Bool(false) => Some("never".to_owned()),
            Value::Object(_) => Some(self.type_of(&schema["additionalProperties"], &deeper)?),
            _ => None,
        };
        fields.extend(others.map(|kind| format!("{deeper}[k: string]: {kind}")));
        match fields.is_empty() {
            true => Ok("{}".to_owned()),
            false => Ok(format!("{{\n{}\n{indent}}}", fields.join(",\n"))),
        }
    }
}

/// Comment lines in front of a field: its description, then its constraints in order.
fn docs(schema: &Value, indent: &str) -> Result<String, ModelError> {
    let mut lines = String::new();
    if let Some(description) = schema["description"].as_str().filter(|text| !text.is_empty()) {
        lines.push_str(&comment(description, indent));
        lines.push('\n');
    }
    let names: &[&str] = match schema["type"].as_str() {
        Some("string") => &["maxLength", "minLength", "pattern"],
        Some("number" | "integer") => &["maximum", "minimum"],
        Some("array") => &["maxItems", "minItems"],
        _ => &[],
    };
    let mut constraints = Vec::new();
    for name in names {
        match schema.get(*name) {
            None | Some(Value::Null) => {}
            Some(Value::String(text)) => constraints.push(format!("{name}: {text}")),
            Some(value) => constraints.push(format!("{name}: {}", python_text(value)?)),
        }
    }
    if !constraints.is_empty() {
        lines.push_str(&format!("{indent}// {}\n", constraints.join(", ")));
    }
    Ok(lines)
}

/// Each line as a comment; an empty line stays empty.
fn comment(text: &str, indent: &str) -> String {
    let line = |line: &str| match line.is_empty() {
        true => String::new(),
        false => format!("{indent}// {line}"),
    };
    text.split('\n').map(line).collect::<Vec<_>>().join("\n")
}

fn scalar(name: &str) -> &str {
    if name == "integer" { "number" } else { name }
}

fn literal(value: &Value) -> Result<String, ModelError> {
    match value {
        Value::String(text) => Ok(format!("\"{text}\"")),
        value => python_text(value),
    }
}

/// The declarations are made by Python, so numbers and constants look like Python's.
fn python_text(value: &Value) -> Result<String, ModelError> {
    repr(&from_json(value, false), None).map_err(engine_failed)
}

fn engine_failed(error: minijinja::Error) -> ModelError {
    failed(&error.to_string())
}

fn failed(reason: &str) -> ModelError {
    ModelError::Template { reason: reason.to_owned() }
}
