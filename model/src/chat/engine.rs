//! The Jinja environment of chat templates, as the usual Python library sets it up.
//!
//! Invariant: a template can neither run without end nor panic: every instruction and every byte it
//! makes costs fuel, and what it may call is listed here.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, Value};
use minijinja_contrib::pycompat;

use super::list::{LIST_FUNCTION, changeable_list, changes_lists, from_json, with_list_calls};
use super::{clock, python};
use crate::ModelError;

/// About one per instruction and one per 64 bytes: hundreds of times what a long conversation
/// needs, and a second or two of work.
const FUEL: u64 = 10_000_000;
/// No real template comes near this size.
const SOURCE_BYTES_MAX: usize = 4 << 20;
const NAME: &str = "chat template";

/// One compiled template.
pub(super) struct Engine {
    environment: Environment<'static>,
    changes_lists: bool,
}

impl Engine {
    /// Compiles a template.
    pub(super) fn compile(source: &str) -> Result<Self, ModelError> {
        if source.len() > SOURCE_BYTES_MAX {
            let reason = format!("it has {} bytes, more than {SOURCE_BYTES_MAX}", source.len());
            return Err(ModelError::Template { reason });
        }
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(model_error)?);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_unknown_method_callback(pycompat::unknown_method_callback);
        environment.set_formatter(print);
        environment.set_fuel(Some(FUEL));
        environment.add_filter("tojson", python::tojson);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_function(LIST_FUNCTION, |value: &Value| changeable_list(value));
        let changes_lists = changes_lists(source);
        let source = if changes_lists { with_list_calls(source) } else { source.to_owned() };
        environment.add_template_owned(NAME, source).map_err(model_error)?;
        Ok(Self { environment, changes_lists })
    }

    /// Renders with these variables.
    pub(super) fn render(
        &self,
        variables: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<String, ModelError> {
        let variable = |value| from_json(value, self.changes_lists);
        let variables = variables.iter().map(|(name, value)| (name.as_str(), variable(value)));
        let context = Value::from_pairs(variables);
        let template = self.environment.get_template(NAME).map_err(model_error)?;
        template.render(context).map_err(model_error)
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

fn strftime_now(format: &str) -> Result<String, Error> {
    clock::strftime(format, clock::now_seconds())
        .map_err(|reason| Error::new(ErrorKind::InvalidOperation, reason))
}

/// `{{ value }}`: containers as Python prints them.
fn print(output: &mut Output, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map => {
            let text = python::repr(value)?;
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
