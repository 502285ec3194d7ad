//! Values written as Python writes them: `json.dumps` and `repr`.

use std::fmt::Write;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

use super::list::from_json;

/// Arguments of `json.dumps` that templates use.
pub(super) struct JsonStyle {
    ensure_ascii: bool,
    /// What one level of indentation is, if lines are broken.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

impl Default for JsonStyle {
    fn default() -> Self {
        Self {
            ensure_ascii: false,
            indent: None,
            item_separator: ", ".to_owned(),
            key_separator: ": ".to_owned(),
            sort_keys: false,
        }
    }
}

/// The filter `tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`: no HTML
/// escapes, insertion order kept.
pub(super) fn tojson(
    state: &State<'_, '_>,
    value: &Value,
    positional: Rest<Value>,
    named: Kwargs,
) -> Result<String, Error> {
    const NAMES: [&str; 4] = ["ensure_ascii", "indent", "separators", "sort_keys"];
    if positional.len() > NAMES.len() {
        return Err(invalid("tojson takes at most four arguments".to_owned()));
    }
    let argument = |index: usize| -> Result<Option<Value>, Error> {
        let named: Option<Value> = named.get(NAMES[index])?;
        let value = positional.get(index).cloned().or(named);
        Ok(value.filter(|value| !value.is_none() && !value.is_undefined()))
    };
    let mut style = JsonStyle {
        ensure_ascii: argument(0)?.is_some_and(|flag| flag.is_true()),
        sort_keys: argument(3)?.is_some_and(|flag| flag.is_true()),
        ..JsonStyle::default()
    };
    if let Some(indent) = argument(1)? {
        style.indent = Some(indent_of(&indent)?);
        style.item_separator = ",".to_owned();
    }
    if let Some(separators) = argument(2)? {
        let strings: Vec<String> =
            separators.try_iter()?.filter_map(|part| part.as_str().map(str::to_owned)).collect();
        let Ok([item, key]) = <[String; 2]>::try_from(strings) else {
            return Err(invalid("separators must be two strings".to_owned()));
        };
        (style.item_separator, style.key_separator) = (item, key);
    }
    named.assert_all_used()?;
    json_dumps(value, &style, Work(Some(state)))
}

/// `json.dumps` of a template's value.
fn json_dumps(value: &Value, style: &JsonStyle, work: Work<'_, '_, '_>) -> Result<String, Error> {
    let mut text = String::new();
    write_json(&mut text, value, style, 0, work)?;
    Ok(text)
}

/// `json.dumps` of a JSON value.
pub(super) fn json_text(value: &serde_json::Value, style: &JsonStyle) -> Result<String, Error> {
    json_dumps(&from_json(value, false), style, Work(None))
}

/// `repr`, as `{{ value }}` prints lists and dictionaries. Inside a template it costs fuel.
pub(super) fn repr(value: &Value, state: Option<&State<'_, '_>>) -> Result<String, Error> {
    let mut text = String::new();
    write_repr(&mut text, value, 0, Work(state))?;
    Ok(text)
}

fn write_repr(
    text: &mut String,
    value: &Value,
    depth: usize,
    work: Work<'_, '_, '_>,
) -> Result<(), Error> {
    work.check(depth, text.len())?;
    match value.kind() {
        ValueKind::String => text.push_str(&repr_text(value.as_str().unwrap_or_default())),
        ValueKind::Number => text.push_str(&number(value)?),
        ValueKind::Seq | ValueKind::Iterable => {
            text.push('[');
            for (index, item) in value.try_iter()?.enumerate() {
                text.push_str(if index == 0 { "" } else { ", " });
                write_repr(text, &item, depth + 1, work)?;
            }
            text.push(']');
        }
        ValueKind::Map => {
            text.push('{');
            for (index, key) in value.try_iter()?.enumerate() {
                text.push_str(if index == 0 { "" } else { ", " });
                write_repr(text, &key, depth + 1, work)?;
                text.push_str(": ");
                write_repr(text, &value.get_item(&key)?, depth + 1, work)?;
            }
            text.push('}');
        }
        _ => text.push_str(&value.to_string()),
    }
    Ok(())
}

fn indent_of(indent: &Value) -> Result<String, Error> {
    const WIDTH_MAX: usize = 64;
    match (indent.as_str(), indent.as_usize()) {
        (Some(text), _) if text.len() <= WIDTH_MAX => Ok(text.to_owned()),
        (None, Some(width)) if width <= WIDTH_MAX => Ok(" ".repeat(width)),
        _ => Err(invalid(format!("indent must be at most {WIDTH_MAX} wide"))),
    }
}

fn write_json(
    text: &mut String,
    value: &Value,
    style: &JsonStyle,
    depth: usize,
    work: Work<'_, '_, '_>,
) -> Result<(), Error> {
    work.check(depth, text.len())?;
    match value.kind() {
        ValueKind::None => text.push_str("null"),
        ValueKind::Bool => text.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => text.push_str(&number(value)?),
        ValueKind::String => {
            write_json_text(text, value.as_str().unwrap_or_default(), style.ensure_ascii);
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            write_items(text, ('[', ']'), &items, style, depth, |text, item| {
                write_json(text, item, style, depth + 1, work)
            })?;
        }
        ValueKind::Map => {
            let mut items = Vec::new();
            for key in value.try_iter()? {
                items.push((json_key(&key)?, value.get_item(&key)?));
            }
            if style.sort_keys {
                items.sort_by(|(one, _), (other, _)| one.cmp(other));
            }
            write_items(text, ('{', '}'), &items, style, depth, |text, (key, item)| {
                write_json_text(text, key, style.ensure_ascii);
                text.push_str(&style.key_separator);
                write_json(text, item, style, depth + 1, work)
            })?;
        }
        kind => return Err(invalid(format!("a value of kind {kind} is not JSON"))),
    }
    Ok(())
}

fn write_items<T>(
    text: &mut String,
    (open, close): (char, char),
    items: &[T],
    style: &JsonStyle,
    depth: usize,
    mut write: impl FnMut(&mut String, &T) -> Result<(), Error>,
) -> Result<(), Error> {
    let new_line = |text: &mut String, depth: usize| {
        if let Some(indent) = &style.indent {
            text.push('\n');
            text.push_str(&indent.repeat(depth));
        }
    };
    text.push(open);
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            text.push_str(&style.item_separator);
        }
        new_line(text, depth + 1);
        write(text, item)?;
    }
    if !items.is_empty() {
        new_line(text, depth);
    }
    text.push(close);
    Ok(())
}

/// Keys become strings as in Python.
fn json_key(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::None => Ok("null".to_owned()),
        ValueKind::Bool => Ok(key.is_true().to_string()),
        ValueKind::Number => number(key),
        kind => Err(invalid(format!("a key of kind {kind} is not JSON"))),
    }
}

fn write_json_text(text: &mut String, content: &str, ensure_ascii: bool) {
    text.push('"');
    for character in content.chars() {
        match character {
            '"' => text.push_str("\\\""),
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\u{8}' => text.push_str("\\b"),
            '\u{c}' => text.push_str("\\f"),
            _ if character < ' ' || (ensure_ascii && !character.is_ascii()) => {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    let _ = write!(text, "\\u{unit:04x}");
                }
            }
            _ => text.push(character),
        }
    }
    text.push('"');
}

/// An integer, or Python's shortest form of a float.
fn number(value: &Value) -> Result<String, Error> {
    if value.is_integer() {
        return Ok(value.to_string());
    }
    let number = f64::try_from(value.clone())?;
    if number.is_nan() {
        return Ok("NaN".to_owned());
    }
    if number.is_infinite() {
        return Ok(if number > 0.0 { "Infinity" } else { "-Infinity" }.to_owned());
    }
    let text = format!("{number:?}");
    let Some((mantissa, exponent)) = text.split_once('e') else { return Ok(text) };
    let (sign, digits) = match exponent.strip_prefix('-') {
        Some(digits) => ('-', digits),
        None => ('+', exponent),
    };
    let mantissa = mantissa.strip_suffix(".0").unwrap_or(mantissa);
    Ok(format!("{mantissa}e{sign}{digits:0>2}"))
}

/// Python's `repr` of a string: single quotes unless only they occur.
fn repr_text(content: &str) -> String {
    let quote = if content.contains('\'') && !content.contains('"') { '"' } else { '\'' };
    let mut text = String::from(quote);
    for character in content.chars() {
        match character {
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            _ if character == quote => {
                text.push('\\');
                text.push(quote);
            }
            _ if character < ' ' || ('\u{7f}'..='\u{a0}').contains(&character) => {
                let _ = write!(text, "\\x{:02x}", u32::from(character));
            }
            _ => text.push(character),
        }
    }
    text.push(quote);
    text
}

/// The template that a value is written for and that pays for it, if there is one.
#[derive(Clone, Copy)]
struct Work<'a, 'b, 'c>(Option<&'a State<'b, 'c>>);

impl Work<'_, '_, '_> {
    /// Called for each value within a value. Shared lists can be far larger than the work that
    /// made them, so depth, size and work all have a limit.
    fn check(self, depth: usize, bytes: usize) -> Result<(), Error> {
        const DEPTH_MAX: usize = 200;
        const BYTES_MAX: usize = 16 << 20;
        if depth > DEPTH_MAX {
            return Err(invalid(format!("a value is nested more than {DEPTH_MAX} deep")));
        }
        if bytes > BYTES_MAX {
            return Err(invalid(format!("a value has more than {BYTES_MAX} bytes as text")));
        }
        self.0.map_or(Ok(()), |state| state.consume_fuel(VALUE_FUEL))
    }
}

/// Writing a value takes about as long as so many instructions.
const VALUE_FUEL: u64 = 2;

fn invalid(reason: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn dumps(value: serde_json::Value, style: &JsonStyle) -> String {
        json_text(&value, style).unwrap()
    }

    /// Expected strings are what CPython's `json.dumps(value, ensure_ascii=False)` prints.
    #[test]
    fn writes_json_as_python_does() {
        let style = JsonStyle::default();
        let value = json!({"b": [1, 2.0, 1e16, 1e-5, 0.0001, -0.5], "a": {"x": null, "y": true}});
        let expected =
            r#"{"b": [1, 2.0, 1e+16, 1e-05, 0.0001, -0.5], "a": {"x": null, "y": true}}"#;
        assert_eq!(dumps(value, &style), expected);
        let text = json!("é<&>'\"\\/\n\r\t\u{8}\u{c}\u{1}\u{7f}🙂");
        assert_eq!(dumps(text, &style), "\"é<&>'\\\"\\\\/\\n\\r\\t\\b\\f\\u0001\u{7f}🙂\"");
        assert_eq!(dumps(json!([{}, []]), &style), "[{}, []]");
        let separators = (",".to_owned(), ":".to_owned());
        let compact = JsonStyle {
            item_separator: separators.0,
            key_separator: separators.1,
            ..JsonStyle::default()
        };
        assert_eq!(dumps(json!({"a": [1, 2]}), &compact), r#"{"a":[1,2]}"#);
        let ascii = JsonStyle { ensure_ascii: true, ..JsonStyle::default() };
        assert_eq!(dumps(json!("é🙂"), &ascii), "\"\\u00e9\\ud83d\\ude42\"");
    }

    #[test]
    fn breaks_lines_and_sorts_keys() {
        let indent = Some("  ".to_owned());
        let style = JsonStyle {
            indent,
            item_separator: ",".to_owned(),
            sort_keys: true,
            ..JsonStyle::default()
        };
        let text = dumps(json!({"b": [1, []], "a": {}}), &style);
        assert_eq!(text, "{\n  \"a\": {},\n  \"b\": [\n    1,\n    []\n  ]\n}");
    }

    #[test]
    fn prints_containers_as_python_does() {
        let value = from_json(&json!({"a": ["it's", "\"'", 1.0, null, true], "é": "\n"}), false);
        let expected = r#"{'a': ["it's", '"\'', 1.0, None, True], 'é': '\n'}"#;
        assert_eq!(repr(&value, None).unwrap(), expected);
    }
}
