//! The one error type of this crate.
//!
//! Invariant: every variant holds the facts (file, key, value found), and its text ends with what
//! is supported or what to do next. Start reading at [`ModelError`].

use std::io;
use std::path::PathBuf;

/// Everything that can go wrong between a checkpoint directory and its logits.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A file could not be read.
    #[error("cannot read {}: {source}; check that the path exists and is readable", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },

    /// A file is larger than any file of its kind can reasonably be.
    #[error(
        "{} has {bytes} bytes, more than the {bytes_max} that such a file may have; \
         check that this is the right file",
        path.display()
    )]
    FileTooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The largest size that is read.
        bytes_max: u64,
    },

    /// A text is not valid JSON, or not of the expected outer form.
    #[error("{what} is not usable JSON: {reason}; download the file again or correct it")]
    Json {
        /// What was being read, for example `config.json`.
        what: String,
        /// The parser's message with line and column.
        reason: String,
    },

    /// A configuration key that has no safe default is absent.
    #[error("configuration key `{key}` is missing; it must be {expected}")]
    ConfigMissing {
        /// The key with the path that leads to it, for example `text_config.hidden_size`.
        key: String,
        /// What belongs there.
        expected: String,
    },

    /// A configuration key has a value that is wrong, unsupported or contradicts another key.
    #[error("configuration key `{key}` is {found}; supported: {expected}")]
    ConfigValue {
        /// The key with the path that leads to it.
        key: String,
        /// The value found, as (shortened) JSON.
        found: String,
        /// What is supported there.
        expected: String,
    },

    /// A model cannot be split over the asked number of ranks.
    #[error(
        "{what} = {size} cannot be split over {ranks} ranks: each part must be a multiple of \
         {multiple}; use a smaller tensor-parallel degree"
    )]
    TensorParallel {
        /// The dimension that does not divide.
        what: &'static str,
        /// Its size.
        size: usize,
        /// The tensor-parallel degree asked for.
        ranks: usize,
        /// What each rank's part must be a multiple of.
        multiple: usize,
    },

    /// The capture points of a draft do not fit its target.
    #[error(
        "capture points {points:?} do not fit a target of {layers} layers: {reason}; \
         name them explicitly (ascending, at most {layers})"
    )]
    CapturePoints {
        /// The points, as residual streams entering a layer.
        points: Vec<usize>,
        /// The target's number of layers.
        layers: usize,
        /// What is wrong with them.
        reason: &'static str,
    },

    /// A directory has no tokenizer that can be read.
    #[error(
        "{} has neither tokenizer.json nor tiktoken.model; add the tokenizer files of the checkpoint",
        path.display()
    )]
    TokenizerMissing {
        /// The directory.
        path: PathBuf,
    },

    /// A tokenizer file cannot be used.
    #[error("{what}: {reason}; use the tokenizer files that belong to the checkpoint")]
    TokenizerFile {
        /// The file, or the part of it that is wrong.
        what: String,
        /// What is wrong.
        reason: String,
    },

    /// A text could not be encoded.
    #[error("cannot encode a text of {bytes} bytes: {reason}; shorten or split the text")]
    Encode {
        /// The length of the text.
        bytes: usize,
        /// The tokenizer's message.
        reason: String,
    },

    /// Tokenizer and model do not belong together.
    #[error(
        "the tokenizer has {tokenizer} ids but the model's vocabulary has {model} rows; \
         use the tokenizer files that belong to the checkpoint"
    )]
    VocabularyMismatch {
        /// One more than the tokenizer's highest id.
        tokenizer: usize,
        /// `vocab_size` of the model.
        model: usize,
    },

    /// There is no chat template for a model that has no built-in one.
    #[error(
        "{} has no chat template (chat_template.jinja, or chat_template in \
         tokenizer_config.json); add one, or send a raw prompt",
        path.display()
    )]
    TemplateMissing {
        /// The checkpoint directory.
        path: PathBuf,
    },

    /// A chat template cannot be compiled, or asks for something that does not exist.
    #[error("chat template: {reason}; correct the template or the messages")]
    Template {
        /// The engine's message with the line.
        reason: String,
    },

    /// A chat template refused the conversation through `raise_exception`.
    #[error("the chat template refuses these messages: {reason}")]
    TemplateRaised {
        /// The template's own words.
        reason: String,
    },

    /// A message is not one that a chat format can express.
    #[error("message {index}: {reason}; correct the message")]
    Message {
        /// Index in the conversation.
        index: usize,
        /// What is wrong.
        reason: String,
    },
}
