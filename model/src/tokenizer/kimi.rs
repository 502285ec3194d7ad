//! Kimi's vocabulary: a `tiktoken.model` of byte ranks, with special tokens after the ranks.
//!
//! Used by Moonlight, Kimi-K2, K2-Thinking and K2.5. Nothing is normalised, no token is added, and
//! there is no prefix space. Invariant: the byte-pair encoder is only built from ranks on which it
//! cannot fail (unique, dense, with every single byte).

use std::collections::{HashMap, HashSet};

use serde_json::Value;
use tiktoken_rs::CoreBPE;

use super::base64;
use super::table::{Entry, TokenTable};
use crate::ModelError;
use crate::config::section::{Section, parse_object};

/// Splits a text before byte-pair encoding; the published pattern, alternative by alternative.
pub(super) const PATTERN: &[&str] = &[
    r"[\p{Han}]+",
    concat!(
        r"[^\r\n\p{L}\p{N}]?",
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    ),
    concat!(
        r"[^\r\n\p{L}\p{N}]?",
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    ),
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
];

/// Ids after the ranks; those without a name in `tokenizer_config.json` are reserved tokens.
const SPECIAL_COUNT: u32 = 256;
const RANKS_MAX: usize = 1 << 23;
/// The published wrapper encodes a long text in parts: at most so many characters, and at most so
/// long a run of only spaces or of no spaces. The second also bounds the work of the pattern.
const PART_CHARACTERS_MAX: usize = 400_000;
const RUN_CHARACTERS_MAX: usize = 25_000;
const MODEL: &str = "tiktoken.model";
const CONFIG: &str = "tokenizer_config.json";

/// Encoder of a `tiktoken.model`.
pub(super) struct KimiTokenizer {
    encoder: CoreBPE,
    specials: Vec<String>,
}

impl KimiTokenizer {
    /// Reads ranks and special tokens.
    pub(super) fn read(
        model: &[u8],
        tokenizer_config: &str,
    ) -> Result<(Self, TokenTable), ModelError> {
        Self::with_pattern(model, tokenizer_config, &PATTERN.join("|"))
    }

    pub(super) fn with_pattern(
        model: &[u8],
        tokenizer_config: &str,
        pattern: &str,
    ) -> Result<(Self, TokenTable), ModelError> {
        let ranks = read_ranks(model)?;
        let specials = read_specials(tokenizer_config, ranks.len() as u32)?;
        let mut entries: Vec<Entry> = Vec::with_capacity(ranks.len() + specials.len());
        entries.extend(ranks.iter().map(|(bytes, &id)| Entry {
            id,
            bytes: bytes.clone(),
            special: false,
        }));
        entries.extend(specials.iter().map(|special| Entry {
            id: special.id,
            bytes: special.content.clone().into_bytes(),
            special: special.hidden,
        }));
        let table = TokenTable::build(entries, MODEL)?;
        let ids = specials.iter().map(|special| (special.content.clone(), special.id)).collect();
        let encoder = CoreBPE::new(ranks.into_iter().collect(), ids, pattern)
            .map_err(|error| failed(error.to_string()))?;
        let specials = specials.into_iter().map(|special| special.content).collect();
        Ok((Self { encoder, specials }, table))
    }

    /// Encodes with special strings as their tokens, or as ordinary text.
    pub(super) fn encode(&self, text: &str, with_specials: bool) -> Result<Vec<u32>, ModelError> {
        let allowed: HashSet<&str> = match with_specials {
            true => self.specials.iter().map(String::as_str).collect(),
            false => HashSet::new(),
        };
        let mut ids = Vec::with_capacity(text.len() / 3);
        for part in parts(text, PART_CHARACTERS_MAX, RUN_CHARACTERS_MAX) {
            let (part_ids, _) = self.encoder.encode(part, &allowed).map_err(|error| {
                ModelError::Encode { bytes: text.len(), reason: error.to_string() }
            })?;
            ids.extend(part_ids);
        }
        Ok(ids)
    }
}

fn failed(reason: String) -> ModelError {
    ModelError::TokenizerFile { what: MODEL.to_owned(), reason }
}

fn read_ranks(model: &[u8]) -> Result<HashMap<Vec<u8>, u32>, ModelError> {
    let mut ranks = HashMap::new();
    let mut seen = Vec::new();
    for (index, line) in model.split(|&byte| byte == b'\n').enumerate() {
        let line = line.trim_ascii();
        if line.is_empty() {
            continue;
        }
        let wrong = |reason: &str| failed(format!("line {}: {reason}", index + 1));
        let space = line.iter().position(|&byte| byte == b' ');
        let (token, rank) = line.split_at(space.ok_or_else(|| wrong("no rank"))?);
        let token = base64::decode(token).filter(|token| !token.is_empty());
        let token = token.ok_or_else(|| wrong("the token is not base64"))?;
        let rank = std::str::from_utf8(rank).ok().and_then(|rank| rank.trim().parse().ok());
        let rank: u32 = rank.ok_or_else(|| wrong("the rank is not a number"))?;
        if rank as usize >= RANKS_MAX {
            return Err(wrong("the rank is too large"));
        }
        seen.resize(seen.len().max(rank as usize + 1), false);
        if std::mem::replace(&mut seen[rank as usize], true) {
            return Err(wrong("the rank occurs twice"));
        }
        if ranks.insert(token, rank).is_some() {
            return Err(wrong("the token occurs twice"));
        }
    }
    if let Some(rank) = seen.iter().position(|&seen| !seen) {
        return Err(failed(format!("rank {rank} is missing")));
    }
    if let Some(byte) = (0..=u8::MAX).find(|byte| !ranks.contains_key([*byte].as_slice())) {
        return Err(failed(format!("the single byte {byte:#04x} has no rank")));
    }
    Ok(ranks)
}

struct Special {
    id: u32,
    content: String,
    /// Left out of decoded text.
    hidden: bool,
}

fn read_specials(tokenizer_config: &str, first: u32) -> Result<Vec<Special>, ModelError> {
    let map = parse_object(tokenizer_config, CONFIG)?;
    let root = Section::root(&map, CONFIG);
    let last = first + SPECIAL_COUNT - 1;
    let reserved = |id| Special { id, content: format!("<|reserved_token_{id}|>"), hidden: true };
    let mut specials: Vec<Special> = (first..=last).map(reserved).collect();
    let named = match root.value("added_tokens_decoder") {
        None => return Err(root.missing("added_tokens_decoder", "the special tokens by id")),
        Some(Value::Object(named)) => named,
        Some(_) => return Err(root.invalid("added_tokens_decoder", "an object")),
    };
    let entries = root.section("added_tokens_decoder")?;
    let entries = entries.ok_or_else(|| root.missing("added_tokens_decoder", "an object"))?;
    for key in named.keys() {
        let id = key.parse().ok().filter(|id| (first..=last).contains(id));
        let id: u32 = id.ok_or_else(|| {
            entries.invalid(key, format!("ids from {first} to {last}, after the ranks"))
        })?;
        let entry = entries.section(key)?.ok_or_else(|| entries.missing(key, "an object"))?;
        let content = entry.text("content")?.ok_or_else(|| entry.missing("content", "a string"))?;
        let hidden = entry.flag("special", true)?;
        specials[(id - first) as usize] = Special { id, content: content.to_owned(), hidden };
    }
    check_specials(&specials)?;
    Ok(specials)
}

/// The encoder looks for all special strings at once, in no particular order, and skips unwanted
/// ones by one byte. So none may begin another, and each begins with an ASCII character.
fn check_specials(specials: &[Special]) -> Result<(), ModelError> {
    let mut contents: Vec<&str> = specials.iter().map(|special| &*special.content).collect();
    contents.sort_unstable();
    for pair in contents.windows(2) {
        if pair[1].starts_with(pair[0]) {
            let reason = format!("special token {:?} begins {:?}", pair[0], pair[1]);
            return Err(ModelError::TokenizerFile { what: CONFIG.to_owned(), reason });
        }
    }
    match contents.iter().find(|content| !content.starts_with(|first: char| first.is_ascii())) {
        None => Ok(()),
        Some(content) => Err(ModelError::TokenizerFile {
            what: CONFIG.to_owned(),
            reason: format!("special token {content:?} does not begin with an ASCII character"),
        }),
    }
}

/// Cuts a text into parts of at most `part_max` characters without runs of more than `run_max`
/// characters that are all white space or all not. One part, possibly empty, at least.
fn parts(text: &str, part_max: usize, run_max: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let (mut begin, mut part, mut run, mut in_space) = (0, 0, 0, None);
    for (at, character) in text.char_indices() {
        let is_space = is_python_space(character);
        if part == part_max {
            parts.push(&text[begin..at]);
            (begin, part, run, in_space) = (at, 0, 0, None);
        }
        if in_space == Some(is_space) && run == run_max {
            parts.push(&text[begin..at]);
            (begin, run) = (at, 0);
        } else if in_space != Some(is_space) {
            (run, in_space) = (0, Some(is_space));
        }
        part += 1;
        run += 1;
    }
    parts.push(&text[begin..]);
    parts
}

/// Python's `str.isspace` of one character: White_Space and the four information separators.
fn is_python_space(character: char) -> bool {
    character.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&character)
}

#[cfg(test)]
mod tests;
