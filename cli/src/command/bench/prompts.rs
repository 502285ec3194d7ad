//! What the measured models are asked.

use std::{io::Read, path::Path};

use anyhow::{Context, Result, bail, ensure};
use paceline_model::{
    ModelError,
    chat::{ChatOptions, Message},
};
use paceline_runtime::Engine;

use crate::launch::BYTES_PER_POSITION_MAX;

/// Ten short messages of the kinds that the demo model knows.
const MESSAGES: [&str; 10] = [
    "Tell a bedtime story about Nora, who finds a small drum under the bridge.",
    "What is a river? Answer in simple words.",
    "Explain in simple words why leaves fall in autumn.",
    "What can you do with an old box? Give three short ideas.",
    "Write a short simple story for young children about a shy cloud who wants to sing.",
    "Tell a child why bees like flowers, in a few short sentences.",
    "Tell a very short story in simple words about Ben and a golden key.",
    "What is a lighthouse? Answer in simple words.",
    "Write a short story with a happy ending about two friends who build a boat.",
    "Give a short piece of advice to a child who cannot sleep.",
];

/// Ids of each prompt: lines of `file`, or those of this program.
pub(super) fn prompts(engine: &Engine, file: Option<&Path>) -> Result<Vec<Vec<u32>>> {
    let messages = match file {
        Some(path) => read(path, engine.context_max())
            .with_context(|| format!("the prompts in {}", path.display()))?,
        None => MESSAGES.map(str::to_owned).to_vec(),
    };
    let Some(tokenizer) = engine.tokenizer() else {
        ensure!(file.is_none(), "this checkpoint has no tokenizer, so --prompt-file is of no use");
        return Ok((0..MESSAGES.len()).map(|index| made_up(engine, index)).collect());
    };
    let template = match engine.options().model.chat_template(engine.config(), tokenizer) {
        Err(ModelError::TemplateMissing { .. }) => None,
        found => Some(found?),
    };
    let options = ChatOptions { add_generation_prompt: true, ..ChatOptions::default() };
    let encode = |message: String| match &template {
        Some(template) => {
            let text = template.render(&[Message::new("user", message)], None, &options)?;
            Ok(tokenizer.encode(&text)?)
        }
        None => Ok(tokenizer.encode(&message)?),
    };
    messages.into_iter().map(encode).collect()
}

/// A prompt of `length` ids, of the beginnings of others.
pub(super) fn long(prompts: &[Vec<u32>], length: usize) -> Vec<u32> {
    prompts.iter().flatten().copied().cycle().take(length).collect()
}

/// Tokens of a prompt for a model without a tokenizer.
const MADE_UP_TOKENS: usize = 24;

/// Ids all over the vocabulary.
fn made_up(engine: &Engine, index: usize) -> Vec<u32> {
    let vocabulary = engine.config().vocabulary;
    let id = |position| ((index * MADE_UP_TOKENS + position) * 7919 + 1) % vocabulary;
    (0..MADE_UP_TOKENS).map(|position| id(position) as u32).collect()
}

/// The lines of a file that hold something.
fn read(path: &Path, context_max: usize) -> Result<Vec<String>> {
    let bytes_max = (context_max * BYTES_PER_POSITION_MAX * MESSAGES.len()) as u64;
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).context("cannot be read")?;
    file.take(bytes_max + 1).read_to_end(&mut bytes).context("cannot be read")?;
    if bytes.len() as u64 > bytes_max {
        bail!("are larger than {bytes_max} bytes; take fewer or shorter ones");
    }
    let text = String::from_utf8(bytes).context("are not UTF-8; convert the file to UTF-8")?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let lines: Vec<String> = lines.map(str::to_owned).collect();
    ensure!(!lines.is_empty(), "are none: the file has no line with text");
    Ok(lines)
}

#[cfg(test)]
mod tests {
    #[test]
    fn long_prompts_repeat_short_ones() {
        assert_eq!(super::long(&[vec![1, 2], vec![3]], 7), [1, 2, 3, 1, 2, 3, 1]);
    }
}
