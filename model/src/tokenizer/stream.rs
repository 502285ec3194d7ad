//! Token by token decoding that never splits a character.

use super::Tokenizer;

/// Turns a stream of ids into text. The texts of all [`StreamDecoder::push`] calls and of
/// [`StreamDecoder::flush`], one after the other, equal the text of all ids decoded at once.
///
/// A character that is spread over tokens appears when its last byte arrives. Bytes that no later
/// byte can complete appear as U+FFFD at once. Special tokens are left out unless asked for.
pub struct StreamDecoder {
    tokenizer: Tokenizer,
    with_special: bool,
    /// The beginning of a character, at most three bytes between calls.
    pending: Vec<u8>,
}

impl StreamDecoder {
    pub(super) fn new(tokenizer: Tokenizer) -> Self {
        Self { tokenizer, with_special: false, pending: Vec::new() }
    }

    /// Whether special tokens appear in the text.
    pub fn with_special(mut self, with_special: bool) -> Self {
        self.with_special = with_special;
        self
    }

    /// Adds a token and returns the text that it completes, if any. Ids that the tokenizer does
    /// not have (a model's embedding may have padding rows) add nothing.
    pub fn push(&mut self, id: u32) -> Option<String> {
        if !self.with_special && self.tokenizer.is_special(id) {
            return None;
        }
        self.pending.extend_from_slice(self.tokenizer.token_bytes(id)?);
        let (text, used) = complete_text(&self.pending);
        self.pending.drain(..used);
        (!text.is_empty()).then_some(text)
    }

    /// Ends the stream: what is left of an unfinished character, as U+FFFD. The decoder is then
    /// ready for a new stream.
    pub fn flush(&mut self) -> Option<String> {
        let rest = std::mem::take(&mut self.pending);
        (!rest.is_empty()).then(|| String::from_utf8_lossy(&rest).into_owned())
    }
}

/// Text up to an unfinished character at the end, and the number of bytes that it stands for.
fn complete_text(bytes: &[u8]) -> (String, usize) {
    let mut text = String::new();
    let mut used = 0;
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        used += chunk.valid().len();
        let invalid = chunk.invalid();
        let at_end = used + invalid.len() == bytes.len();
        if invalid.is_empty() || (at_end && is_unfinished(invalid)) {
            break;
        }
        text.push(char::REPLACEMENT_CHARACTER);
        used += invalid.len();
    }
    (text, used)
}

/// Whether further bytes could make this a character.
fn is_unfinished(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
