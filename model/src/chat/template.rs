//! Which template a checkpoint uses, and what it is given.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::engine::Engine;
use super::kimi::KimiFormat;
use super::{ChatOptions, Message, typescript};
use crate::ModelError;
use crate::config::ModelConfig;
use crate::config::file::{CONFIG_BYTES_MAX, is_there, read_text};
use crate::config::section::{Section, parse_object};
use crate::tokenizer::Tokenizer;

/// Makes the prompt of a conversation.
pub struct ChatTemplate {
    kind: Kind,
}

enum Kind {
    Jinja(Box<Jinja>),
    Kimi(KimiFormat),
}

struct Jinja {
    general: Engine,
    /// Used instead when there are tools.
    with_tools: Option<Engine>,
    /// Whether the template wants the tools as TypeScript, as Kimi-K2.5's does.
    wants_typescript: bool,
    /// Strings of special tokens, such as `bos_token`.
    specials: Map<String, Value>,
}

impl ChatTemplate {
    /// Compiles a Jinja template. `bos` and `eos` are what it calls `bos_token` and `eos_token`.
    ///
    /// # Errors
    /// [`ModelError::Template`] with the line of a syntax error.
    pub fn from_source(
        source: &str,
        bos: Option<&str>,
        eos: Option<&str>,
    ) -> Result<Self, ModelError> {
        let tokens = [("bos_token", bos), ("eos_token", eos)];
        let named = tokens.into_iter().filter_map(|(name, token)| Some((name, token?)));
        let specials = named.map(|(name, token)| (name.to_owned(), json!(token))).collect();
        Self::jinja("chat template", source, None, specials)
    }

    /// Takes the template of a checkpoint directory: `chat_template.jinja`, else `chat_template` in
    /// `tokenizer_config.json`, which is a string or a list of named templates.
    ///
    /// # Errors
    /// [`ModelError::TemplateMissing`] if there is none, [`ModelError::Read`], the JSON and
    /// configuration errors, and [`ModelError::Template`].
    pub fn from_dir(directory: impl AsRef<Path>) -> Result<Self, ModelError> {
        let directory = directory.as_ref();
        let text = |name: &str| {
            let path = directory.join(name);
            is_there(&path).then(|| read_text(&path, CONFIG_BYTES_MAX)).transpose()
        };
        let (template, config) = (text(TEMPLATE)?, text(CONFIG)?);
        Self::read(directory, template.as_deref(), config.as_deref())?
            .ok_or_else(|| ModelError::TemplateMissing { path: directory.to_owned() })
    }

    /// Takes the template of the contents of `chat_template.jinja` and `tokenizer_config.json`,
    /// where there are such files; `None` if there is no template in them.
    ///
    /// # Errors
    /// The JSON and configuration errors, and [`ModelError::Template`].
    pub fn from_texts(
        template: Option<&str>,
        tokenizer_config: Option<&str>,
    ) -> Result<Option<Self>, ModelError> {
        Self::read(Path::new(""), template, tokenizer_config)
    }

    /// The built-in form of a Kimi model.
    pub fn kimi(format: KimiFormat) -> Self {
        Self { kind: Kind::Kimi(format) }
    }

    /// As [`ChatTemplate::from_dir`]; a Kimi checkpoint without a template gets the built-in form
    /// of its version.
    ///
    /// # Errors
    /// As [`ChatTemplate::from_dir`].
    pub fn for_checkpoint(
        directory: impl AsRef<Path>,
        config: &ModelConfig,
        tokenizer: &Tokenizer,
    ) -> Result<Self, ModelError> {
        match Self::from_dir(directory) {
            Err(ModelError::TemplateMissing { path }) => {
                let format = KimiFormat::of(config, tokenizer);
                format.map(Self::kimi).ok_or(ModelError::TemplateMissing { path })
            }
            found => found,
        }
    }

    /// The prompt. `tools` is a list of `{"type": "function", "function": {…}}`.
    ///
    /// # Errors
    /// [`ModelError::TemplateRaised`] if the template refuses the messages,
    /// [`ModelError::Template`] if it fails or works without end, [`ModelError::Message`] for a
    /// message that a built-in form cannot express.
    pub fn render(
        &self,
        messages: &[Message],
        tools: Option<&Value>,
        options: &ChatOptions,
    ) -> Result<String, ModelError> {
        let tools = match tools {
            None | Some(Value::Null) => None,
            Some(Value::Array(list)) if list.is_empty() => None,
            Some(list @ Value::Array(_)) => Some(list),
            Some(_) => {
                let reason = "tools must be a list of functions".to_owned();
                return Err(ModelError::Template { reason });
            }
        };
        match &self.kind {
            Kind::Kimi(format) => format.render(messages, tools, options),
            Kind::Jinja(jinja) => jinja.render(messages, tools, options),
        }
    }

    /// As [`ChatTemplate::from_texts`], for files that lie in `directory`.
    fn read(
        directory: &Path,
        template: Option<&str>,
        tokenizer_config: Option<&str>,
    ) -> Result<Option<Self>, ModelError> {
        let name = |file: &str| directory.join(file).display().to_string();
        let config = match tokenizer_config {
            Some(text) => parse_object(text, &name(CONFIG))?,
            None => Map::new(),
        };
        let specials = read_specials(&config);
        if let Some(template) = template {
            return Self::jinja(&name(TEMPLATE), template, None, specials).map(Some);
        }
        let config_name = name(CONFIG);
        let templates = read_templates(&Section::root(&config, &config_name))?;
        let Some((general, with_tools)) = templates else { return Ok(None) };
        Self::jinja(&config_name, &general, with_tools.as_deref(), specials).map(Some)
    }

    /// `name` is that of the file, for messages.
    fn jinja(
        name: &str,
        general: &str,
        with_tools: Option<&str>,
        specials: Map<String, Value>,
    ) -> Result<Self, ModelError> {
        let wants_typescript = general.contains("tools_ts_str");
        let general = Engine::compile(name, general)?;
        let with_tools = with_tools.map(|template| Engine::compile(name, template)).transpose()?;
        let jinja = Jinja { general, with_tools, wants_typescript, specials };
        Ok(Self { kind: Kind::Jinja(Box::new(jinja)) })
    }
}

impl Jinja {
    fn render(
        &self,
        messages: &[Message],
        tools: Option<&Value>,
        options: &ChatOptions,
    ) -> Result<String, ModelError> {
        let failed = |error: serde_json::Error| ModelError::Template { reason: error.to_string() };
        let mut variables = self.specials.clone();
        variables.insert("messages".into(), serde_json::to_value(messages).map_err(failed)?);
        variables.insert("tools".into(), tools.cloned().unwrap_or_default());
        variables.insert("documents".into(), Value::Null);
        variables.insert("add_generation_prompt".into(), json!(options.add_generation_prompt));
        if let (true, Some(tools)) = (self.wants_typescript, tools) {
            variables.insert("tools_ts_str".into(), json!(typescript::declarations(tools)?));
        }
        variables.extend(options.extra.clone());
        match &self.with_tools {
            Some(engine) if tools.is_some() => engine.render(&variables),
            _ => self.general.render(&variables),
        }
    }
}

const TEMPLATE: &str = "chat_template.jinja";
const CONFIG: &str = "tokenizer_config.json";

/// The general template and the one for tools, if the file has templates.
fn read_templates(section: &Section<'_>) -> Result<Option<(String, Option<String>)>, ModelError> {
    let templates = match section.value("chat_template") {
        None => return Ok(None),
        Some(Value::String(source)) => return Ok(Some((source.clone(), None))),
        Some(Value::Array(templates)) => templates,
        Some(_) => {
            let expected = "a template, or a list of {name, template}";
            return Err(section.invalid("chat_template", expected));
        }
    };
    let named = |name: &str| {
        let found = templates.iter().find(|template| template["name"] == name);
        found.and_then(|template| template["template"].as_str()).map(str::to_owned)
    };
    match named("default") {
        Some(general) => Ok(Some((general, named("tool_use")))),
        None => Err(section.invalid("chat_template", "a list with a template named \"default\"")),
    }
}

/// Special tokens are strings, or objects with their content.
fn read_specials(config: &Map<String, Value>) -> Map<String, Value> {
    const NAMES: [&str; 4] = ["bos_token", "eos_token", "pad_token", "unk_token"];
    let special = |name: &str| {
        let value = config.get(name)?;
        let content = value.as_str().or_else(|| value["content"].as_str())?;
        Some((name.to_owned(), json!(content)))
    };
    NAMES.into_iter().filter_map(special).collect()
}
