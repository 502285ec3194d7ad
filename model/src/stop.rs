//! The tokens that end a generation.
//!
//! Invariant: the set holds what `config.json` and `generation_config.json` name, and for Kimi chat
//! models the end of a turn, which their `config.json` does not name. Sorted, without duplicates.

use std::path::Path;

use crate::ModelError;
use crate::config::ModelConfig;
use crate::config::file::{CONFIG_BYTES_MAX, is_there, read_text};
use crate::config::section::{Section, parse_object};

/// `<|im_end|>` of Kimi's vocabulary: turns end with it, though `config.json` says 163585.
pub const KIMI_TURN_END: u32 = 163_586;

const FILE: &str = "generation_config.json";

/// Stop ids of a model. `generation_config` is the text of `generation_config.json`, if there is
/// one; its `eos_token_id` is an integer or a list.
///
/// # Errors
/// [`ModelError::Json`] and [`ModelError::ConfigValue`] for a file that cannot be used.
pub fn stop_ids(
    config: &ModelConfig,
    generation_config: Option<&str>,
) -> Result<Vec<u32>, ModelError> {
    let mut ids = config.eos.clone();
    if let Some(text) = generation_config {
        let map = parse_object(text, FILE)?;
        let section = Section::root(&map, FILE);
        let named = section.integers("eos_token_id", 0..=config.vocabulary - 1)?;
        let id = |id| u32::try_from(id).expect("ids are below the bounded vocabulary");
        ids.extend(named.into_iter().map(id));
    }
    if config.has_kimi_vocabulary() && (KIMI_TURN_END as usize) < config.vocabulary {
        ids.push(KIMI_TURN_END);
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

/// As [`stop_ids`], with the `generation_config.json` of a checkpoint directory, if it has one.
///
/// # Errors
/// As [`stop_ids`], and [`ModelError::Read`].
pub fn stop_ids_from_dir(
    config: &ModelConfig,
    directory: impl AsRef<Path>,
) -> Result<Vec<u32>, ModelError> {
    let path = directory.as_ref().join(FILE);
    let text = match is_there(&path) {
        true => Some(read_text(&path, CONFIG_BYTES_MAX)?),
        false => None,
    };
    stop_ids(config, text.as_deref()).map_err(|error| error.in_directory(directory.as_ref()))
}
