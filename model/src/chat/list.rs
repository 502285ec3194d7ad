//! Lists that a template can change in place, as in Python.
//!
//! The template engine's lists are values, so `{% set _ = names.append(x) %}` would be lost. For a
//! source that uses such methods, list literals are wrapped in a call that makes a changeable list.
//! Invariant: a list never contains itself, since what is put in is copied; and whatever moves many
//! items costs fuel for them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use minijinja::value::{Enumerator, Object, ObjectRepr, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

/// Name of the function around list literals; no template can have chosen it by accident.
pub(super) const LIST_FUNCTION: &str = "__changeable_list";
const TAGS: [&str; 3] = ["{%", "{{", "{#"];
/// Items that are moved in memory in the time of an instruction.
const MOVES_PER_FUEL: usize = 64;
const METHODS: [&str; 4] = [".append(", ".extend(", ".insert(", ".pop("];

/// A list with Python's methods that change it.
#[derive(Debug)]
struct List {
    /// Shared with the loops over this list, which go on over what it was when they began.
    items: Mutex<Arc<Vec<Value>>>,
}

impl List {
    fn of(items: Vec<Value>) -> Value {
        Value::from_object(Self { items: Mutex::new(Arc::new(items)) })
    }

    fn lock(&self) -> MutexGuard<'_, Arc<Vec<Value>>> {
        // A panic elsewhere leaves whole values behind.
        self.items.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the items. Pays for copying them if a loop still holds them, and for moving `moved`
    /// of them.
    fn change<T>(
        &self,
        state: &State<'_, '_>,
        moved: impl Fn(usize) -> usize,
        change: impl FnOnce(&mut Vec<Value>) -> T,
    ) -> Result<T, Error> {
        let mut items = self.lock();
        if Arc::strong_count(&items) > 1 {
            state.consume_fuel(items.len() as u64)?;
        }
        state.consume_fuel((moved(items.len()) / MOVES_PER_FUEL) as u64)?;
        Ok(change(Arc::make_mut(&mut items)))
    }

    fn pop(&self, state: &State<'_, '_>, index: i64) -> Result<Value, Error> {
        let length = self.lock().len();
        let at = if index < 0 { index.saturating_add_unsigned(length as u64) } else { index };
        match usize::try_from(at).ok().filter(|&at| at < length) {
            Some(at) => self.change(state, |length| length - at, |items| items.remove(at)),
            None => Err(Error::new(ErrorKind::InvalidOperation, "pop index out of range")),
        }
    }

    fn insert(&self, state: &State<'_, '_>, index: i64, value: Value) -> Result<(), Error> {
        let length = self.lock().len();
        let at =
            if index < 0 { index.saturating_add_unsigned(length as u64).max(0) } else { index };
        let at = usize::try_from(at).unwrap_or(usize::MAX).min(length);
        self.change(state, |length| length - at, |items| items.insert(at, value))
    }
}

impl Object for List {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.lock().get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let items = Arc::clone(&self.lock());
        // With its length: the engine prints what has none as an iterator.
        Enumerator::Iter(Box::new((0..items.len()).map(move |index| items[index].clone())))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.lock().len())
    }

    fn call_method(
        self: &Arc<Self>,
        state: &mut State<'_, '_>,
        method: &str,
        args: &[Value],
    ) -> Result<Value, Error> {
        match method {
            "append" => {
                let (value,): (&Value,) = from_args(args)?;
                let value = copy(state, value, 0)?;
                self.change(state, |_| 0, |items| items.push(value))?;
            }
            "extend" => {
                let (values,): (&Value,) = from_args(args)?;
                let values: Result<Vec<Value>, Error> =
                    values.try_iter()?.map(|value| copy(state, &value, 0)).collect();
                let values = values?;
                self.change(state, |_| 0, |items| items.extend(values))?;
            }
            "insert" => {
                let (index, value): (i64, &Value) = from_args(args)?;
                let value = copy(state, value, 0)?;
                self.insert(state, index, value)?;
            }
            "pop" => {
                let (index,): (Option<i64>,) = from_args(args)?;
                return self.pop(state, index.unwrap_or(-1));
            }
            _ => return Err(Error::from(ErrorKind::UnknownMethod)),
        }
        Ok(Value::from(()))
    }
}

/// A changeable list of a value's items.
pub(super) fn changeable_list(value: &Value) -> Result<Value, Error> {
    Ok(List::of(value.try_iter()?.collect()))
}

/// A JSON value as a template's value; with `changeable`, every list in it can be changed.
pub(super) fn from_json(value: &serde_json::Value, changeable: bool) -> Value {
    match value {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(flag) => Value::from(*flag),
        serde_json::Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => Value::from(number),
            (None, Some(number)) => Value::from(number),
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        serde_json::Value::String(text) => Value::from(text.as_str()),
        serde_json::Value::Array(items) => {
            let items: Vec<Value> = items.iter().map(|item| from_json(item, changeable)).collect();
            match changeable {
                true => List::of(items),
                false => Value::from(items),
            }
        }
        serde_json::Value::Object(map) => {
            let pairs = map.iter().map(|(key, item)| (key.as_str(), from_json(item, changeable)));
            Value::from_pairs(pairs)
        }
    }
}

/// Whether a template changes lists.
pub(super) fn changes_lists(source: &str) -> bool {
    METHODS.iter().any(|method| source.contains(method))
}

/// The source with its list literals made changeable.
pub(super) fn with_list_calls(source: &str) -> String {
    let mut rewritten = String::with_capacity(source.len() + 64);
    let mut rest = source;
    while let Some(begin) = tag_begin(rest) {
        let (text, tag) = rest.split_at(begin);
        rewritten.push_str(text);
        let is_comment = tag.starts_with("{#");
        let end = match is_comment {
            true => tag.find("#}").map_or(tag.len(), |end| end + 2),
            false => tag_end(tag),
        };
        let (tag, after) = tag.split_at(end);
        if is_comment {
            rewritten.push_str(tag);
        } else {
            rewrite_tag(tag, &mut rewritten);
        }
        rest = after;
        // What stands between these two is text whatever it looks like.
        if tag.trim_matches(['{', '%', '-', '+', ' ', '}']) == "raw" {
            let (raw, after) = rest.split_at(rest.find("endraw").unwrap_or(rest.len()));
            rewritten.push_str(raw);
            rest = after;
        }
    }
    rewritten.push_str(rest);
    rewritten
}

/// Where the next tag begins. One search for all kinds: a kind that does not occur again would be
/// searched to the end of the text before every tag.
fn tag_begin(text: &str) -> Option<usize> {
    let tag = |pair: &[u8]| TAGS.iter().any(|tag| tag.as_bytes() == pair);
    text.as_bytes().windows(2).position(tag)
}

/// A copied value takes about as long as so many instructions.
const VALUE_FUEL: u64 = 16;

/// A copy without changeable lists; every value copied costs fuel.
fn copy(state: &State<'_, '_>, value: &Value, depth: usize) -> Result<Value, Error> {
    const DEPTH_MAX: usize = 100;
    if depth > DEPTH_MAX {
        return Err(Error::new(ErrorKind::InvalidOperation, "lists are nested too deep"));
    }
    state.consume_fuel(VALUE_FUEL)?;
    match value.kind() {
        ValueKind::Seq => value.try_iter()?.map(|item| copy(state, &item, depth + 1)).collect(),
        ValueKind::Map => {
            let pairs = value.try_iter()?.map(|key| {
                let item = copy(state, &value.get_item(&key)?, depth + 1)?;
                Ok((key, item))
            });
            let pairs: Result<Vec<(Value, Value)>, Error> = pairs.collect();
            Ok(Value::from_pairs(pairs?))
        }
        _ => Ok(value.clone()),
    }
}

/// Length of the tag at the beginning, its closing mark outside of strings included.
fn tag_end(tag: &str) -> usize {
    let close = if tag.starts_with("{%") { "%}" } else { "}}" };
    let mut quote = None;
    let mut escaped = false;
    for (at, character) in tag.char_indices().skip(2) {
        match quote {
            Some(open) => {
                if !escaped && character == open {
                    quote = None;
                }
                escaped = !escaped && character == '\\';
            }
            None if matches!(character, '\'' | '"') => quote = Some(character),
            None if tag[at..].starts_with(close) => return at + close.len(),
            None => {}
        }
    }
    tag.len()
}

/// Wraps `[…]` where it stands for a list: not behind a value, where it is a subscript.
fn rewrite_tag(tag: &str, rewritten: &mut String) {
    let mut open = Vec::new();
    let mut quote: Option<char> = None;
    let mut escaped = false;
    let mut word = String::new();
    let mut after_value = false;
    for character in tag.chars() {
        if let Some(end) = quote {
            rewritten.push(character);
            if !escaped && character == end {
                (quote, after_value) = (None, true);
            }
            escaped = !escaped && character == '\\';
            continue;
        }
        if character.is_alphanumeric() || character == '_' {
            word.push(character);
            rewritten.push(character);
            continue;
        }
        if !word.is_empty() {
            after_value = !KEYWORDS.contains(&word.as_str());
            word.clear();
        }
        match character {
            '[' if !after_value => {
                rewritten.push_str(LIST_FUNCTION);
                rewritten.push_str("([");
                open.push(true);
            }
            '[' => {
                rewritten.push('[');
                open.push(false);
            }
            ']' => {
                rewritten.push_str(if open.pop() == Some(true) { "])" } else { "]" });
            }
            _ => rewritten.push(character),
        }
        match character {
            '\'' | '"' => quote = Some(character),
            ']' | ')' | '}' => after_value = true,
            _ if character.is_whitespace() => {}
            _ => after_value = false,
        }
    }
}

/// Words behind which a value begins.
const KEYWORDS: [&str; 16] = [
    "and",
    "call",
    "elif",
    "else",
    "filter",
    "for",
    "if",
    "in",
    "is",
    "not",
    "or",
    "print",
    "return",
    "set",
    "do",
    "recursive",
];
