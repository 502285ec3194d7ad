//! `tokenizer.json`, `tiktoken.model` and `tokenizer_config.json`, up to encoded and decoded text.

use paceline_model::tokenizer::Tokenizer;
use paceline_model::weights::Source;
use serde_json::{Value, json};

use crate::harness::{check_message, run};
use crate::random::Random;
use crate::{bytes, json};

const TEXTS: &[&str] =
    &["", "Once upon a time", "<|im_user|>user é漢🙂\n\t 12 'll", "[BOS] a\u{301}"];

/// Encodes and decodes, whatever comes out.
fn use_it(tokenizer: &Tokenizer, random: &mut Random) {
    let text = random.of(TEXTS);
    for ids in [tokenizer.encode(text), tokenizer.encode_plain(text)] {
        match ids {
            Ok(ids) => {
                let mut stream = tokenizer.stream();
                let mut streamed: String = ids.iter().filter_map(|&id| stream.push(id)).collect();
                streamed.extend(stream.flush());
                assert_eq!(streamed, tokenizer.decode_visible(&ids));
            }
            Err(error) => check_message(&error),
        }
    }
    if let Err(error) = tokenizer.check_vocabulary(1 << random.below(16)) {
        check_message(&error);
    }
    if let Err(error) = tokenizer.check_stop_ids(&[random.below(500) as u32]) {
        check_message(&error);
    }
}

/// The demo's tokenizer with its single bytes and its first merges only.
fn small_json() -> Value {
    const MERGES: usize = 40;
    let text = Source::DEMO.text("tokenizer.json").unwrap().unwrap();
    let mut file: Value = serde_json::from_str(&text).unwrap();
    let merges = file["model"]["merges"].as_array_mut().unwrap();
    merges.truncate(MERGES);
    // Special tokens and single bytes come first, then the merges' results in their order.
    let kept = (8 + 256 + MERGES) as u64;
    let vocabulary = file["model"]["vocab"].as_object_mut().unwrap();
    vocabulary.retain(|_, id| id.as_u64().unwrap() < kept);
    Tokenizer::from_hf_json(file.to_string().as_bytes()).unwrap();
    file
}

#[test]
fn tokenizer_json() {
    let plain = small_json();
    let mut split = plain.clone();
    split["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}"}, "behavior": "Isolated",
         "invert": false},
        {"type": "Digits", "individual_digits": true},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
    ]});
    split["normalizer"] = json!({"type": "Sequence", "normalizers": [
        {"type": "NFC"}, {"type": "Sequence", "normalizers": [{"type": "NFKD"}]},
    ]});
    split["truncation"] = json!({"direction": "Right", "max_length": 2, "stride": 0,
        "strategy": "LongestFirst"});
    let files = [plain, split];
    let words = [
        "BPE",
        "WordPiece",
        "Unigram",
        "WordLevel",
        "ByteLevel",
        "Metaspace",
        "Sequence",
        "Split",
        "Punctuation",
        "NFD",
        "Lowercase",
        "Replace",
        "Whitespace",
        "NFKC",
        "Precompiled",
        "Strip",
        "Regex",
        "String",
        "Isolated",
        "MergedWithNext",
        "(a|aa)+$",
        "(?:a{50}){50}",
        "(?=(",
        "[BOS]",
        "Ġ",
        "model",
        "vocab",
        "byte_fallback",
        "unk_token",
        "ignore_merges",
        "continuing_subword_prefix",
    ];
    run("tokenizer_json", 2_000, |random| {
        let file = random.below(files.len());
        let text = match random.below(4) {
            0 => {
                let mut text = files[file].to_string().into_bytes();
                bytes::mutate(random, &mut text, &words);
                text
            }
            _ => json::mutate(random, &files[file], &words).into_bytes(),
        };
        match Tokenizer::from_hf_json(&text) {
            Ok(tokenizer) => use_it(&tokenizer, random),
            Err(error) => check_message(&error),
        }
    });
}

/// Single bytes and a few words as base64 with ranks.
fn small_ranks() -> String {
    let text = include_str!("ranks.txt");
    Tokenizer::from_tiktoken(text.as_bytes(), &special_tokens(text).to_string()).unwrap();
    text.to_owned()
}

fn special_tokens(ranks: &str) -> Value {
    let first = ranks.lines().count();
    let named =
        [("[BOS]", 0), ("[EOS]", 1), ("<|im_end|>", 2), ("<|im_user|>", 3), ("<think>", 22)];
    let entry = |&(name, offset): &(&str, usize)| {
        ((first + offset).to_string(), json!({"content": name, "special": offset < 22}))
    };
    let named: serde_json::Map<String, Value> = named.iter().map(entry).collect();
    json!({"added_tokens_decoder": named, "bos_token": "[BOS]", "eos_token": "[EOS]"})
}

#[test]
fn tiktoken_model() {
    let ranks = small_ranks();
    let config = special_tokens(&ranks);
    let words =
        ["\n", " ", "==", "=", "YQ== 0\n", "4294967295", "8388607", "-1", "\u{0}", "\r\n", "/w=="];
    let config_words = ["added_tokens_decoder", "content", "special", "<|", "261", "99999", "é"];
    run("tiktoken_model", 2_000, |random| {
        let mut model = ranks.clone().into_bytes();
        let mut text = config.to_string();
        // Making an encoder takes 20 ms, so most mutants are of the kinds that are refused before.
        match random.below(16) {
            0 => text = json::mutate(random, &config, &config_words),
            1..=7 => bytes::mutate(random, &mut model, &words),
            _ => {
                let mut lines: Vec<&str> = ranks.lines().collect();
                let (one, other) = (random.below(lines.len()), random.below(lines.len()));
                match random.below(8) {
                    0 => lines.swap(one, other),
                    1..=3 => lines[one] = lines[other],
                    4 => lines.insert(one, words[random.below(words.len())]),
                    _ => drop(lines.remove(one)),
                }
                model = lines.join("\n").into_bytes();
            }
        }
        match Tokenizer::from_tiktoken(&model, &text) {
            Ok(tokenizer) => use_it(&tokenizer, random),
            Err(error) => check_message(&error),
        }
    });
}
