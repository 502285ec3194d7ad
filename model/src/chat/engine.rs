//! The Jinja environment of chat templates, as the usual Python library sets it up.
//!
//! Invariant: a template can neither run without end nor panic: every instruction and every byte it
//! makes costs fuel, what it may call is listed here, and what escapes that stays in its
//! [`sandbox`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, Value};
use minijinja_contrib::pycompat;

use super::list::{LIST_FUNCTION, changeable_list, changes_lists, from_json, with_list_calls};
use super::{clock, python, sandbox};
use crate::ModelError;

/// About one per instruction and one per 64 bytes: many times what a long conversation needs, and
/// less than a second of work.
const FUEL: u64 = 2_000_000;
/// Many times the size of any real template.
const SOURCE_BYTES_MAX: usize = 1 << 20;

/// One compiled template.
pub(super) struct Engine {
    name: String,
    environment: Arc<Environment<'static>>,
    changes_lists: bool,
    /// Whether a rendering was given up. Its thread may go on for ever, so there is no second.
    given_up: AtomicBool,
}

impl Engine {
    /// Compiles a template; messages call it `name`.
    pub(super) fn compile(name: &str, source: &str) -> Result<Self, ModelError> {
        if source.len() > SOURCE_BYTES_MAX {
            let reason = format!("{name} has {} bytes, more than {SOURCE_BYTES_MAX}", source.len());
            return Err(ModelError::Template { reason });
        }
        let (owned_name, source) = (name.to_owned(), source.to_owned());
        sandbox::run(name, move || Self::compile_here(owned_name, &source))?
    }

    fn compile_here(name: String, source: &str) -> Result<Self, ModelError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(model_error)?);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_unknown_method_callback(method);
        environment.set_formatter(print);
        environment.set_fuel(Some(FUEL));
        environment.add_filter("tojson", python::tojson);
        environment.add_filter("string", string);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_function(LIST_FUNCTION, |value: &Value| changeable_list(value));
        let changes_lists = changes_lists(source);
        let source = if changes_lists { with_list_calls(source) } else { source.to_owned() };
        environment.add_template_owned(name.clone(), source).map_err(model_error)?;
        let given_up = AtomicBool::new(false);
        Ok(Self { name, environment: Arc::new(environment), changes_lists, given_up })
    }

    /// Renders with these variables.
    pub(super) fn render(
        &self,
        variables: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<String, ModelError> {
        if self.given_up.load(Ordering::Relaxed) {
            let reason = format!("{} did not end the last time and is not tried again", self.name);
            return Err(ModelError::Template { reason });
        }
        let variable = |value| from_json(value, self.changes_lists);
        let variables = variables.iter().map(|(name, value)| (name.as_str(), variable(value)));
        let context = Value::from_pairs(variables);
        let (name, environment) = (self.name.clone(), Arc::clone(&self.environment));
        let rendered = sandbox::run(&self.name, move || {
            let template = environment.get_template(&name).map_err(model_error)?;
            template.render(context).map_err(model_error)
        });
        if rendered.is_err() {
            self.given_up.store(true, Ordering::Relaxed);
        }
        rendered?
    }
}

/// What `raise_exception` leaves in the error chain.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(reason: String) -> Result<Value, Error> {
    let error = Error::new(ErrorKind::InvalidOperation, reason.clone());
    Err(error.with_source(Raised(reason)))
}

/// Python's methods. Those of lists go over all items.
fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    if value.kind() == ValueKind::Seq {
        state.consume_fuel(value.len().unwrap_or(0) as u64)?;
    }
    pycompat::unknown_method_callback(state, value, name, arguments)
}

fn strftime_now(format: &str) -> Result<String, Error> {
    clock::strftime(format, clock::now_seconds())
        .map_err(|reason| Error::new(ErrorKind::InvalidOperation, reason))
}

/// `value|string`: as it is printed, with the fuel that printing costs.
fn string(state: &mut State<'_, '_>, value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map => python::repr(value, Some(state)),
        _ => Ok(value.to_string()),
    }
}

/// `{{ value }}`: containers as Python prints them.
fn print(output: &mut Output, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map => {
            let text = python::repr(value, Some(state))?;
            state.consume_fuel(text.len() as u64 / 64)?;
            output.write_str(&text).map_err(|_| Error::from(ErrorKind::WriteFailure))
        }
        _ => minijinja::escape_formatter(output, state, value),
    }
}

fn model_error(error: Error) -> ModelError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(found) = cause {
        if let Some(Raised(reason)) = found.downcast_ref() {
            return ModelError::TemplateRaised { reason: reason.clone() };
        }
        cause = found.source();
    }
    ModelError::Template { reason: error.to_string() }
}
