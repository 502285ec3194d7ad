//! A JSON object that is read key by key, with checked types and ranges.
//!
//! Invariant: every error names the file, the full path of the key, the value found and what is
//! supported. A section remembers which keys were read, so that the rest can be reported.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::ModelError;

/// Parses a text whose outermost value must be an object.
pub(crate) fn parse_object(text: &str, what: &str) -> Result<Map<String, Value>, ModelError> {
    let failed = |reason: String| ModelError::Json { what: what.to_owned(), reason };
    match serde_json::from_str(text).map_err(|error| failed(error.to_string()))? {
        Value::Object(map) => Ok(map),
        other => Err(failed(format!("expected an object, found {}", shorten(&other)))),
    }
}

/// One JSON object of a configuration. Absent and `null` are the same unless a method says
/// otherwise, as they are in the Python configurations.
pub(crate) struct Section<'a> {
    file: &'a str,
    path: String,
    map: &'a Map<String, Value>,
    read: RefCell<BTreeSet<&'a str>>,
}

impl<'a> Section<'a> {
    /// The outermost object of a file.
    pub(crate) fn root(map: &'a Map<String, Value>, file: &'a str) -> Self {
        Self { file, path: String::new(), map, read: RefCell::default() }
    }

    /// The value of a key; `None` if absent or null.
    pub(crate) fn value(&self, key: &str) -> Option<&'a Value> {
        let (key, value) = self.map.get_key_value(key)?;
        self.read.borrow_mut().insert(key);
        (!value.is_null()).then_some(value)
    }

    /// Whether the key is present, even as null.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// An object below a key.
    pub(crate) fn section(&self, key: &str) -> Result<Option<Section<'a>>, ModelError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Object(map)) => {
                let (file, path) = (self.file, self.full(key));
                Ok(Some(Section { file, path, map, read: RefCell::default() }))
            }
            Some(_) => Err(self.invalid(key, "an object or null")),
        }
    }

    /// An integer in a range; `None` if absent or null.
    pub(crate) fn integer(
        &self,
        key: &str,
        range: RangeInclusive<usize>,
    ) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let found = value.as_u64().and_then(|number| usize::try_from(number).ok());
        match found.filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => {
                let expected = format!("an integer from {} to {}", range.start(), range.end());
                Err(self.invalid(key, expected))
            }
        }
    }

    /// A size that must be given: an integer from 1 to `maximum`.
    pub(crate) fn size(&self, key: &str, maximum: usize) -> Result<usize, ModelError> {
        let found = self.integer(key, 1..=maximum)?;
        found.ok_or_else(|| self.missing(key, format!("an integer from 1 to {maximum}")))
    }

    /// A finite number in a range; `None` if absent or null. Integers count as numbers.
    pub(crate) fn number(
        &self,
        key: &str,
        range: RangeInclusive<f64>,
    ) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match value.as_f64().filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => {
                let expected = format!("a number from {} to {}", range.start(), range.end());
                Err(self.invalid(key, expected))
            }
        }
    }

    /// A boolean, or the default if absent or null.
    pub(crate) fn flag(&self, key: &str, default: bool) -> Result<bool, ModelError> {
        match self.value(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(self.invalid(key, "true or false")),
        }
    }

    /// A string; `None` if absent or null.
    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.invalid(key, "a string")),
        }
    }

    /// A list of integers in a range, or one integer; empty if absent or null.
    pub(crate) fn integers(
        &self,
        key: &str,
        range: RangeInclusive<usize>,
    ) -> Result<Vec<usize>, ModelError> {
        let values = match self.value(key) {
            None => return Ok(Vec::new()),
            Some(Value::Array(values)) => values.as_slice(),
            Some(one) => std::slice::from_ref(one),
        };
        let number = |value: &Value| {
            let number = value.as_u64().and_then(|number| usize::try_from(number).ok());
            number.filter(|number| range.contains(number)).ok_or_else(|| {
                let (first, last) = (range.start(), range.end());
                self.invalid(key, format!("integers from {first} to {last} (one, or a list)"))
            })
        };
        values.iter().map(number).collect()
    }

    /// Fails unless the key is absent, null or equal to the one supported value.
    pub(crate) fn only(&self, key: &str, supported: &Value) -> Result<(), ModelError> {
        match self.value(key) {
            Some(found) if found != supported => Err(self.invalid(key, supported.to_string())),
            _ => Ok(()),
        }
    }

    /// The error of a key with a wrong value.
    pub(crate) fn invalid(&self, key: &str, expected: impl Into<String>) -> ModelError {
        let found = self.map.get(key).map_or_else(|| "absent".to_owned(), shorten);
        let (file, key) = (self.file.to_owned(), self.full(key));
        ModelError::ConfigValue { file, key, found, expected: expected.into() }
    }

    /// The error of a key that must be given.
    pub(crate) fn missing(&self, key: &str, expected: impl Into<String>) -> ModelError {
        let (file, key) = (self.file.to_owned(), self.full(key));
        ModelError::ConfigMissing { file, key, expected: expected.into() }
    }

    /// The keys that nobody has read, with their path, in the order of the file.
    pub(crate) fn unread(&self, ignored: &[&str]) -> Vec<String> {
        let read = self.read.borrow();
        let rest = self.map.keys().filter(|key| {
            !read.contains(key.as_str())
                && !ignored.contains(&key.as_str())
                && !key.starts_with('_')
        });
        rest.map(|key| self.full(key)).collect()
    }

    /// The file that this is a part of.
    pub(crate) fn file(&self) -> &'a str {
        self.file
    }

    /// The path of a key from the outermost object.
    pub(crate) fn full(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }
}

/// JSON text of a value, cut to what fits an error line.
pub(crate) fn shorten(value: &Value) -> String {
    const CHARACTERS_MAX: usize = 80;
    let text = value.to_string();
    match text.char_indices().nth(CHARACTERS_MAX) {
        None => text,
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}
