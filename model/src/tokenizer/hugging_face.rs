//! `tokenizer.json` of the DeepSeek family: byte-level byte-pair encoding (Radford et al.,
//! "Language Models are Unsupervised Multitask Learners", section 2.2).
//!
//! Invariant: only byte-level tokenizers are accepted, so that the bytes of every token are known.

use std::collections::HashMap;

use tokenizers::tokenizer::{OffsetReferential, OffsetType};
use tokenizers::{
    Model, ModelWrapper, Normalizer, PostProcessorWrapper, PreTokenizedString, PreTokenizer,
};

use super::outline;
use super::table::{Entry, TokenTable};
use crate::ModelError;

/// Encoder of a `tokenizer.json`.
pub(super) struct HuggingFaceTokenizer {
    tokenizer: tokenizers::Tokenizer,
}

impl HuggingFaceTokenizer {
    /// Reads the file.
    pub(super) fn read(json: &[u8]) -> Result<(Self, TokenTable), ModelError> {
        let mut file = serde_json::from_slice(json).map_err(|error| failed(error.to_string()))?;
        outline::check(&file).map_err(failed)?;
        outline::reduce(&mut file);
        // Not the bytes read: of equal keys in them the check sees the last, the library each.
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(file.to_string())
            .map_err(|error| failed(error.to_string()))?;
        // Nothing is added to a text; padding and truncation belong to training batches.
        tokenizer.with_post_processor(None::<PostProcessorWrapper>);
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|error| failed(error.to_string()))?;
        match tokenizer.get_model() {
            ModelWrapper::BPE(model) if model.dropout.is_none() => {}
            ModelWrapper::BPE(_) => {
                return Err(failed(
                    "its model drops merges at random; set dropout to null".to_owned(),
                ));
            }
            _ => return Err(failed("its model is not BPE, the only supported one".to_owned())),
        }
        let table = TokenTable::build(entries(&tokenizer)?, FILE)?;
        Ok((Self { tokenizer }, table))
    }

    /// Encodes with added tokens as their ids.
    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        let encoding = self.tokenizer.encode_fast(text, false);
        Ok(encoding.map_err(|error| cannot_encode(text, &*error))?.get_ids().to_vec())
    }

    /// Encodes everything as ordinary text: the pipeline without its first step, the search for
    /// added tokens.
    pub(super) fn encode_plain(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        let mut pieces = PreTokenizedString::from(text);
        self.split_plain(&mut pieces).map_err(|error| cannot_encode(text, &*error))?;
        let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::None);
        let tokens = splits.iter().filter_map(|(_, _, tokens)| tokens.as_ref()).flatten();
        Ok(tokens.map(|token| token.id).collect())
    }

    fn split_plain(&self, pieces: &mut PreTokenizedString) -> tokenizers::Result<()> {
        if let Some(normalizer) = self.tokenizer.get_normalizer() {
            pieces.normalize(|piece| normalizer.normalize(piece))?;
        }
        if let Some(pre_tokenizer) = self.tokenizer.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(pieces)?;
        }
        pieces.tokenize(|piece| self.tokenizer.get_model().tokenize(piece.get()))
    }
}

const FILE: &str = "tokenizer.json";

fn failed(reason: String) -> ModelError {
    ModelError::TokenizerFile { what: FILE.to_owned(), reason }
}

fn cannot_encode(text: &str, error: &(dyn std::error::Error + Send + Sync)) -> ModelError {
    ModelError::Encode { bytes: text.len(), reason: error.to_string() }
}

fn entries(tokenizer: &tokenizers::Tokenizer) -> Result<Vec<Entry>, ModelError> {
    let alphabet: HashMap<char, u8> = (0..=u8::MAX).map(|byte| (letter(byte), byte)).collect();
    let vocabulary = tokenizer.get_model().get_vocab();
    // Without them the encoder would silently drop text.
    let missing =
        |byte: &u8| !vocabulary.contains_key(letter(*byte).encode_utf8(&mut [0; 4]) as &str);
    if let Some(byte) = (0..=0xf4).filter(|byte| !matches!(byte, 0xc0 | 0xc1)).find(missing) {
        return Err(failed(format!("the single byte {byte:#04x} is not in the vocabulary")));
    }
    let ordinary = vocabulary.into_iter().map(|(token, id)| {
        let bytes: Option<Vec<u8>> = token.chars().map(|c| alphabet.get(&c).copied()).collect();
        Entry { id, bytes: bytes.unwrap_or_else(|| token.into_bytes()), special: false }
    });
    let added = tokenizer.get_added_tokens_decoder().into_iter();
    let added = added.map(|(id, token)| Entry {
        id,
        bytes: token.content.into_bytes(),
        special: token.special,
    });
    Ok(ordinary.chain(added).collect())
}

/// The printable character that stands for a byte: itself where it is one, else one of U+0100
/// onwards in order.
fn letter(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return char::from(byte);
    }
    let earlier = (0..byte).filter(|&other| !printable(other)).count() as u32;
    char::from_u32(0x100 + earlier).expect("U+0100 to U+0143 are characters")
}
