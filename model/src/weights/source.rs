//! Where a model comes from: a checkpoint directory or files embedded in the binary.
//!
//! Invariant: both kinds give the same things in the same way. Start reading at [`Source`].

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use super::Checkpoint;
use crate::chat::ChatTemplate;
use crate::config::ModelConfig;
use crate::config::file::{CONFIG_BYTES_MAX, is_there, read_bytes};
use crate::eagle3::config::DraftConfig;
use crate::stop::stop_ids;
use crate::tokenizer::Tokenizer;
use crate::{ModelError, demo};

/// A model's or draft's files.
#[derive(Clone, Debug)]
pub enum Source {
    /// A directory with `config.json`, weights and, for a target, tokenizer files.
    Directory(PathBuf),
    /// Files in the binary.
    Embedded(&'static EmbeddedFiles),
}

/// The files of a checkpoint directory as static data.
#[derive(Debug)]
pub struct EmbeddedFiles {
    /// Name for messages.
    pub name: &'static str,
    /// Name and contents of each text file.
    pub texts: &'static [(&'static str, &'static str)],
    /// Contents of `model.safetensors`.
    pub weights: &'static [u8],
}

impl Source {
    /// The demo model that is part of the binary.
    pub const DEMO: Self = Self::Embedded(&demo::MODEL);
    /// The demo model's draft.
    pub const DEMO_DRAFT: Self = Self::Embedded(&demo::DRAFT);

    /// The directory, or the name of the embedded files, for messages.
    pub fn name(&self) -> Cow<'_, str> {
        match self {
            Self::Directory(path) => path.to_string_lossy(),
            Self::Embedded(files) => Cow::Borrowed(files.name),
        }
    }

    /// The contents of the file `name`, of at most `bytes_max` bytes; `None` if there is none.
    ///
    /// # Errors
    /// [`ModelError::Read`] and [`ModelError::FileTooLarge`].
    pub fn bytes(
        &self,
        name: &str,
        bytes_max: u64,
    ) -> Result<Option<Cow<'static, [u8]>>, ModelError> {
        match self {
            Self::Directory(directory) => {
                let path = directory.join(name);
                if !is_there(&path) && directory.is_dir() {
                    return Ok(None);
                }
                read_bytes(&path, bytes_max).map(|bytes| Some(Cow::Owned(bytes)))
            }
            Self::Embedded(files) => Ok(files.text(name).map(|text| text.as_bytes().into())),
        }
    }

    /// The contents of the text file `name`, of at most 16 MiB; `None` if there is none.
    ///
    /// # Errors
    /// As [`Source::bytes`], and [`ModelError::Json`] if the file is not UTF-8.
    pub fn text(&self, name: &str) -> Result<Option<Cow<'static, str>>, ModelError> {
        let not_utf8 = |error: std::string::FromUtf8Error| ModelError::Json {
            what: Path::new(&*self.name()).join(name).display().to_string(),
            reason: format!("it is not UTF-8 ({error})"),
        };
        match self.bytes(name, CONFIG_BYTES_MAX)? {
            None => Ok(None),
            Some(bytes) => {
                let text = String::from_utf8(bytes.into_owned()).map_err(not_utf8)?;
                Ok(Some(Cow::Owned(text)))
            }
        }
    }

    /// The contents of `config.json`.
    ///
    /// # Errors
    /// As [`Source::text`]; a missing file is [`ModelError::Read`].
    pub fn config(&self) -> Result<Cow<'static, str>, ModelError> {
        const NAME: &str = "config.json";
        self.text(NAME)?.ok_or_else(|| ModelError::Read {
            path: PathBuf::from(self.name().as_ref()).join(NAME),
            source: std::io::ErrorKind::NotFound.into(),
        })
    }

    /// The configuration of a target.
    ///
    /// # Errors
    /// As [`Source::config`] and [`ModelConfig::from_json`], with the file's whole path.
    pub fn model_config(&self) -> Result<ModelConfig, ModelError> {
        ModelConfig::from_json(&self.config()?).map_err(|error| self.locate(error))
    }

    /// The configuration of a draft.
    ///
    /// # Errors
    /// As [`Source::config`] and [`DraftConfig::from_json`], with the file's whole path.
    pub fn draft_config(&self) -> Result<DraftConfig, ModelError> {
        DraftConfig::from_json(&self.config()?).map_err(|error| self.locate(error))
    }

    /// The tokens that end an answer, by `config.json` and `generation_config.json`.
    ///
    /// # Errors
    /// As [`Source::text`] and [`stop_ids`], with the file's whole path.
    pub fn stop_ids(&self, config: &ModelConfig) -> Result<Vec<u32>, ModelError> {
        let text = self.text("generation_config.json")?;
        stop_ids(config, text.as_deref()).map_err(|error| self.locate(error))
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// As [`Tokenizer::from_dir`].
    pub fn tokenizer(&self) -> Result<Tokenizer, ModelError> {
        match self {
            Self::Directory(directory) => Tokenizer::from_dir(directory),
            Self::Embedded(files) => match files.text("tokenizer.json") {
                Some(json) => Tokenizer::from_hf_json(json.as_bytes()),
                None => Err(ModelError::TokenizerMissing { path: files.name.into() }),
            },
        }
    }

    /// The chat template; Kimi's own forms where a Kimi checkpoint holds none.
    ///
    /// # Errors
    /// As [`ChatTemplate::for_checkpoint`].
    pub fn chat_template(
        &self,
        config: &ModelConfig,
        tokenizer: &Tokenizer,
    ) -> Result<ChatTemplate, ModelError> {
        match self {
            Self::Directory(directory) => {
                ChatTemplate::for_checkpoint(directory, config, tokenizer)
            }
            Self::Embedded(files) => {
                let template = files.text("chat_template.jinja");
                ChatTemplate::from_texts(template, files.text("tokenizer_config.json"))?
                    .ok_or_else(|| ModelError::TemplateMissing { path: files.name.into() })
            }
        }
    }

    /// Maps the weights.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn checkpoint(&self) -> Result<Checkpoint, ModelError> {
        match self {
            Self::Directory(directory) => Checkpoint::open(directory),
            Self::Embedded(files) => Checkpoint::from_static(files.name, files.weights),
        }
    }

    /// Says that the weights were loaded, so that what is embedded need not stay in memory a
    /// second time. Everything that views it stays valid.
    pub fn release(&self) {
        if let Self::Embedded(files) = self {
            demo::release(files);
        }
    }
}

impl Source {
    /// The error with the whole path of its file.
    fn locate(&self, error: ModelError) -> ModelError {
        error.in_directory(Path::new(&*self.name()))
    }
}

impl EmbeddedFiles {
    /// The contents of the text file `name`, if there is one.
    pub fn text(&self, name: &str) -> Option<&'static str> {
        self.texts.iter().find(|(found, _)| *found == name).map(|&(_, text)| text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_and_embedded_files_look_alike() {
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/demo/stories-moe");
        let directory = Source::Directory(directory.into());
        for name in ["config.json", "tokenizer.json", "chat_template.jinja"] {
            assert_eq!(directory.text(name).unwrap(), Source::DEMO.text(name).unwrap(), "{name}");
        }
        assert!(Source::Directory("does/not/exist".into()).text("config.json").is_err());
        let empty = tempfile::tempdir().unwrap();
        let error = Source::Directory(empty.path().into()).config().unwrap_err();
        assert!(error.to_string().contains("config.json"), "{error}");
    }
}
