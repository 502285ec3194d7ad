//! The one error type of this crate.
//!
//! Invariant: every variant holds the facts (file, key, value found), and its text ends with what
//! is supported or what to do next. Start reading at [`ModelError`].

use std::io;
use std::path::{Path, PathBuf};

/// Everything that can go wrong between a checkpoint directory and its logits.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// Another rank failed, or the ranks' connection did.
    #[error(transparent)]
    Comm(#[from] paceline_comm::CommError),

    /// A draft that was made for another target.
    #[error(
        "the draft does not fit the target: its {what} is {draft}, the target's {target}; \
         use the draft that was trained for this model"
    )]
    DraftMismatch {
        /// What differs.
        what: &'static str,
        /// The draft's value.
        draft: usize,
        /// The target's value.
        target: usize,
    },

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
    #[error("{file}: configuration key `{key}` is missing; it must be {expected}")]
    ConfigMissing {
        /// The file.
        file: String,
        /// The key with the path that leads to it, for example `text_config.hidden_size`.
        key: String,
        /// What belongs there.
        expected: String,
    },

    /// A configuration key has a value that is wrong, unsupported or contradicts another key.
    #[error("{file}: configuration key `{key}` is {found}; supported: {expected}")]
    ConfigValue {
        /// The file.
        file: String,
        /// The key with the path that leads to it.
        key: String,
        /// The value found, as (shortened) JSON.
        found: String,
        /// What is supported there.
        expected: String,
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
        "{} has neither tokenizer.json nor tiktoken.model; \
         add the tokenizer files of the checkpoint",
        path.display()
    )]
    TokenizerMissing {
        /// The directory.
        path: PathBuf,
    },

    /// A token that ends answers has no text in the tokenizer.
    #[error(
        "token {id} ends the answers of this model (`eos_token_id`), but the tokenizer has no \
         such token; use the tokenizer files that belong to the checkpoint"
    )]
    SpecialTokenMissing {
        /// The id.
        id: u32,
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
        "the tokenizer has {tokenizer} ids but `vocab_size` of the model's config.json is \
         {model}; use the tokenizer files that belong to the checkpoint"
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

    /// A file could not be written.
    #[error(
        "cannot write {}: {source}; check the directory and the space on its disk",
        path.display()
    )]
    Write {
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },

    /// A directory has no weights that can be read.
    #[error(
        "{} has neither model.safetensors.index.json nor model.safetensors (found: {found}); \
         download the checkpoint again, or convert it to safetensors",
        path.display()
    )]
    CheckpointMissing {
        /// The directory.
        path: PathBuf,
        /// What is there instead.
        found: String,
    },

    /// The index of a sharded checkpoint does not fit its files.
    #[error("{}: {reason}; download the missing or changed files again", path.display())]
    CheckpointIndex {
        /// The index file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },

    /// A weight file is damaged or does not fit the others.
    #[error("{}: {reason}; download the file again", path.display())]
    CheckpointFile {
        /// The weight file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },

    /// Memory that is not there.
    #[error(
        "{what} needs {bytes} bytes of memory, which this machine or a limit (ulimit -v) does \
         not give; {advice}"
    )]
    Memory {
        /// What it is for.
        what: String,
        /// How much.
        bytes: u64,
        /// What to do next.
        advice: &'static str,
    },

    /// The tensors of a checkpoint are not those that its configuration calls for.
    #[error(
        "{name} does not fit its config.json; problems: {count}\n  {}\nuse the configuration \
         and the weights of one and the same checkpoint",
        problems.join("\n  ")
    )]
    CheckpointMismatch {
        /// The checkpoint's directory or name.
        name: String,
        /// The first problems, each naming its tensor.
        problems: Vec<String>,
        /// How many problems there are.
        count: usize,
    },

    /// A model cannot be split over the asked number of ranks.
    #[error(
        "{what} = {size} cannot be split over {ranks} ranks in multiples of {multiple}; \
         numbers of ranks that work: {possible:?}"
    )]
    Split {
        /// The dimension that does not divide.
        what: &'static str,
        /// Its size.
        size: usize,
        /// The number of ranks asked for.
        ranks: usize,
        /// What each rank's part must be a multiple of.
        multiple: usize,
        /// The numbers of ranks, up to 64, that this model can be split over.
        possible: Vec<usize>,
    },

    /// A rank that does not exist.
    #[error("rank {rank} of {ranks} ranks does not exist; ranks count from 0")]
    Rank {
        /// The rank asked for.
        rank: usize,
        /// The number of ranks.
        ranks: usize,
    },

    /// A weight cannot be used as it is stored.
    #[error("{name}: {source}")]
    Weight {
        /// The module.
        name: String,
        /// What is wrong with it.
        source: paceline_kernels::KernelError,
    },

    /// The vocabulary map of a draft is not one.
    #[error("{name}: {reason}; use a draft that was made for this target")]
    DraftVocabulary {
        /// The draft's directory or name.
        name: String,
        /// What is wrong.
        reason: String,
    },
}

impl ModelError {
    /// The same error with the whole path of a file that it only names.
    pub(crate) fn in_directory(mut self, directory: &Path) -> Self {
        let (Self::Json { what: file, .. }
        | Self::ConfigMissing { file, .. }
        | Self::ConfigValue { file, .. }
        | Self::TokenizerFile { what: file, .. }) = &mut self
        else {
            return self;
        };
        *file = directory.join(&*file).display().to_string();
        self
    }
}
