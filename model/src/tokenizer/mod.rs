//! Text to token ids and back, for both kinds of tokenizer of the family.
//!
//! Invariant: the bytes of every token are known exactly, so the decoded text is the lossy UTF-8 of
//! the tokens' bytes one after the other, whether decoded at once or as a stream. Start reading at
//! [`Tokenizer`].

use std::path::Path;
use std::sync::Arc;

use crate::ModelError;
use crate::config::file::{CONFIG_BYTES_MAX, is_there, read_bytes, read_text};
use hugging_face::HuggingFaceTokenizer;
use kimi::KimiTokenizer;
use table::TokenTable;

mod base64;
mod hugging_face;
mod kimi;
mod outline;
mod stream;
mod table;

pub use stream::StreamDecoder;

/// A checkpoint's tokenizer. Clones share the vocabulary.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

struct Inner {
    kind: Kind,
    table: TokenTable,
}

enum Kind {
    HuggingFace(Box<HuggingFaceTokenizer>),
    Kimi(Box<KimiTokenizer>),
}

impl Tokenizer {
    /// Reads the tokenizer of a checkpoint directory: `tiktoken.model` with
    /// `tokenizer_config.json`, else `tokenizer.json`.
    ///
    /// # Errors
    /// [`ModelError::TokenizerMissing`], [`ModelError::Read`], and as the other constructors.
    pub fn from_dir(directory: impl AsRef<Path>) -> Result<Self, ModelError> {
        let directory = directory.as_ref();
        let locate = |error: ModelError| error.in_directory(directory);
        let (ranks, json) = (directory.join("tiktoken.model"), directory.join("tokenizer.json"));
        if is_there(&ranks) {
            let config = read_text(&directory.join("tokenizer_config.json"), CONFIG_BYTES_MAX)?;
            Self::from_tiktoken(&read_bytes(&ranks, VOCABULARY_BYTES_MAX)?, &config).map_err(locate)
        } else if is_there(&json) {
            Self::from_hf_json(&read_bytes(&json, VOCABULARY_BYTES_MAX)?).map_err(locate)
        } else {
            Err(ModelError::TokenizerMissing { path: directory.to_owned() })
        }
    }

    /// Reads the bytes of a `tokenizer.json` with a byte-level BPE.
    ///
    /// # Errors
    /// [`ModelError::TokenizerFile`].
    pub fn from_hf_json(json: &[u8]) -> Result<Self, ModelError> {
        let (tokenizer, table) = HuggingFaceTokenizer::read(json)?;
        Ok(Self::new(Kind::HuggingFace(Box::new(tokenizer)), table))
    }

    /// Reads the bytes of a Kimi `tiktoken.model` and the text of its `tokenizer_config.json`.
    ///
    /// # Errors
    /// [`ModelError::TokenizerFile`], and the configuration errors for the second file.
    pub fn from_tiktoken(model: &[u8], tokenizer_config: &str) -> Result<Self, ModelError> {
        let (tokenizer, table) = KimiTokenizer::read(model, tokenizer_config)?;
        Ok(Self::new(Kind::Kimi(Box::new(tokenizer)), table))
    }

    /// Encodes a text in which the strings of special tokens stand for these tokens, such as a
    /// rendered chat template. Nothing is added in front or behind.
    ///
    /// # Errors
    /// [`ModelError::Encode`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        match &self.inner.kind {
            Kind::HuggingFace(tokenizer) => tokenizer.encode(text),
            Kind::Kimi(tokenizer) => tokenizer.encode(text, true),
        }
    }

    /// Encodes a text that has no special tokens whatever it says, such as a user's words.
    ///
    /// # Errors
    /// [`ModelError::Encode`].
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        match &self.inner.kind {
            Kind::HuggingFace(tokenizer) => tokenizer.encode_plain(text),
            Kind::Kimi(tokenizer) => tokenizer.encode(text, false),
        }
    }

    /// Text of the ids, special tokens included; bytes that are not UTF-8 become U+FFFD. Ids
    /// without a token add nothing.
    pub fn decode(&self, ids: &[u32]) -> String {
        self.decode_where(ids, |_| true)
    }

    /// As [`Tokenizer::decode`], without special tokens.
    pub fn decode_visible(&self, ids: &[u32]) -> String {
        self.decode_where(ids, |id| !self.is_special(id))
    }

    /// A decoder of one stream of ids.
    pub fn stream(&self) -> StreamDecoder {
        StreamDecoder::new(self.clone())
    }

    /// Exact bytes of a token; `None` for an id without one.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.inner.table.bytes(id)
    }

    /// Whether a token steers the conversation and is not part of the visible text.
    pub fn is_special(&self, id: u32) -> bool {
        self.inner.table.is_special(id)
    }

    /// One more than the highest id.
    pub fn vocabulary_size(&self) -> usize {
        self.inner.table.count()
    }

    /// Checks that tokenizer and model belong together. The model may have some more rows than
    /// there are tokens (DeepSeek-V3 has 465, V2-Lite 2398), never fewer.
    ///
    /// # Errors
    /// [`ModelError::VocabularyMismatch`].
    pub fn check_vocabulary(&self, config_vocabulary: usize) -> Result<(), ModelError> {
        let tokenizer = self.vocabulary_size();
        let padding_max = config_vocabulary / 4;
        if tokenizer > config_vocabulary || config_vocabulary - tokenizer > padding_max {
            return Err(ModelError::VocabularyMismatch { tokenizer, model: config_vocabulary });
        }
        Ok(())
    }

    /// Checks that the tokens that end an answer exist, so that an answer can end.
    ///
    /// # Errors
    /// [`ModelError::SpecialTokenMissing`].
    pub fn check_stop_ids(&self, stop_ids: &[u32]) -> Result<(), ModelError> {
        match stop_ids.iter().find(|&&id| self.token_bytes(id).is_none()) {
            None => Ok(()),
            Some(&id) => Err(ModelError::SpecialTokenMissing { id }),
        }
    }

    fn new(kind: Kind, table: TokenTable) -> Self {
        Self { inner: Arc::new(Inner { kind, table }) }
    }

    fn decode_where(&self, ids: &[u32], wanted: impl Fn(u32) -> bool) -> String {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for &id in ids.iter().filter(|&&id| wanted(id)) {
            bytes.extend_from_slice(self.token_bytes(id).unwrap_or_default());
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = match self.inner.kind {
            Kind::HuggingFace(_) => "tokenizer.json",
            Kind::Kimi(_) => "tiktoken.model",
        };
        formatter
            .debug_struct("Tokenizer")
            .field("kind", &kind)
            .field("vocabulary_size", &self.vocabulary_size())
            .finish()
    }
}

/// Several times the largest known vocabulary file (about 20 MB).
const VOCABULARY_BYTES_MAX: u64 = 256 << 20;
