//! Splitting, merging and special tokens of the Kimi tokenizer.

use std::collections::BTreeMap;

use serde_json::json;

use super::*;
use crate::tokenizer::{Kind, Tokenizer};

/// GPT-2's pattern, which the demo tokenizer uses.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// Special tokens of the demo tokenizer; its ordinary ones follow in the order of their merges.
const DEMO_SPECIALS: u32 = 8;

fn demo() -> Tokenizer {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/demo/stories-moe");
    Tokenizer::from_dir(path).unwrap()
}

fn base64_of(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let mut padded = [0; 3];
        padded[..group.len()].copy_from_slice(group);
        let bits = u32::from_be_bytes([0, padded[0], padded[1], padded[2]]);
        for place in 0..4 {
            let letter = LETTERS[(bits >> (18 - 6 * place)) as usize & 63];
            text.push(if place <= group.len() { char::from(letter) } else { '=' });
        }
    }
    text
}

fn model_of<'a>(tokens: impl Iterator<Item = &'a [u8]>) -> Vec<u8> {
    let lines = tokens.enumerate().map(|(rank, token)| format!("{} {rank}\n", base64_of(token)));
    lines.collect::<String>().into_bytes()
}

/// The demo's vocabulary as a `tiktoken.model`.
fn demo_model() -> Vec<u8> {
    let demo = demo();
    let ids = DEMO_SPECIALS..demo.vocabulary_size() as u32;
    model_of(ids.map(|id| demo.token_bytes(id).unwrap()))
}

/// A `tokenizer_config.json` with these special tokens at these distances from the first.
fn config_of(first: u32, specials: &[(u32, &str, bool)]) -> String {
    let named: BTreeMap<String, serde_json::Value> = specials
        .iter()
        .map(|(offset, content, special)| {
            let entry = json!({"content": content, "special": special, "lstrip": false});
            ((first + offset).to_string(), entry)
        })
        .collect();
    json!({ "added_tokens_decoder": named }).to_string()
}

fn tokenizer(model: &[u8], config: &str, pattern: &str) -> Tokenizer {
    let (kimi, table) = KimiTokenizer::with_pattern(model, config, pattern).unwrap();
    Tokenizer::new(Kind::Kimi(Box::new(kimi)), table)
}

fn reason(model: &[u8], config: &str) -> String {
    Tokenizer::from_tiktoken(model, config).unwrap_err().to_string()
}

/// The Kimi names of the vocabulary's first special ids.
const NAMES: &[(u32, &str, bool)] = &[
    (0, "[BOS]", true),
    (1, "[EOS]", true),
    (2, "<|im_end|>", true),
    (3, "<|im_user|>", true),
    (4, "<|im_assistant|>", true),
    (10, "<|im_system|>", true),
    (17, "<|im_middle|>", true),
    (22, "<think>", false),
    (23, "</think>", false),
];

#[test]
fn agrees_with_the_byte_level_encoder_under_the_same_pattern() {
    let demo = demo();
    let model = demo_model();
    let kimi = tokenizer(&model, &config_of(4088, NAMES), GPT2);
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../testdata/stories-moe.json");
    let reference: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut tokens = 0;
    for prompt in reference["prompts"].as_array().unwrap() {
        for key in ["text", "greedy_text"] {
            let text = prompt[key].as_str().unwrap();
            let expected: Vec<u32> =
                demo.encode_plain(text).unwrap().iter().map(|id| id - DEMO_SPECIALS).collect();
            let ids = kimi.encode_plain(text).unwrap();
            assert_eq!(ids, expected, "{key} of {}", prompt["name"]);
            assert_eq!(kimi.decode(&ids), text);
            tokens += ids.len();
        }
    }
    assert!(tokens > 1000, "only {tokens} tokens compared");
}

/// Expected pieces were derived from the pattern by hand. The vocabulary has each expected piece,
/// and each pair of neighbours, which is what a missing split would give.
#[track_caller]
fn splits(pieces: &[&str]) {
    let singles: Vec<[u8; 1]> = (0..=u8::MAX).map(|byte| [byte]).collect();
    let mut tokens: Vec<Vec<u8>> = singles.iter().map(|byte| byte.to_vec()).collect();
    let pairs = pieces.windows(2).map(|pair| pair.concat());
    for piece in pieces.iter().map(|piece| (*piece).to_owned()).chain(pairs) {
        if !tokens.contains(&piece.clone().into_bytes()) {
            tokens.push(piece.into_bytes());
        }
    }
    let model = model_of(tokens.iter().map(Vec::as_slice));
    let kimi = tokenizer(&model, &config_of(tokens.len() as u32, NAMES), &PATTERN.join("|"));
    let text = pieces.concat();
    let ids = kimi.encode_plain(&text).unwrap();
    let found: Vec<&str> = ids
        .iter()
        .map(|&id| std::str::from_utf8(kimi.token_bytes(id).unwrap()).unwrap_or("?"))
        .collect();
    assert_eq!(found, pieces);
}

#[test]
fn splits_runs_of_han_from_everything_else() {
    splits(&["你好世界", "abc"]);
    splits(&["abc", "漢字", "def"]);
    splits(&[" ", "你好", "，", "世界"]);
    splits(&["日本語", "です"]);
    splits(&["〇〇七", "123"]);
}

#[test]
fn splits_words_at_the_change_to_upper_case() {
    splits(&["Hello", "World"]);
    splits(&["ABCdef", "Ghi"]);
    splits(&["hello", " world", " WORLD"]);
    splits(&["(hello", ")"]);
    splits(&[" _", "hello"]);
    splits(&["ひらがな", " ǅar", "ÀÉÎ"]);
    splits(&["e\u{301}te\u{301}", " nai\u{308}ve"]);
}

#[test]
fn keeps_contractions_with_their_word() {
    splits(&["don't", " you're", " I'll"]);
    splits(&["DON'T", " WE'VE"]);
    splits(&["x'll", "ama"]);
    splits(&["it", "'q"]);
}

#[test]
fn splits_numbers_in_threes() {
    splits(&["123", "456", "7"]);
    splits(&["v", "12", ".", "345", "6"]);
    splits(&[" ", "12", " apples"]);
    splits(&["²³٣", "४५"]);
}

#[test]
fn splits_punctuation_with_its_line_ends() {
    splits(&["!!!\n\n", "x"]);
    splits(&["end", ".\r\n", "Next"]);
    splits(&["a", " ?!", " b"]);
    splits(&["🙂🙂", " ok"]);
}

#[test]
fn splits_white_space_before_line_ends_and_words() {
    splits(&["a", "  \n\n", " b"]);
    splits(&["a", "  ", " b"]);
    splits(&["a", "   "]);
    splits(&["a", " ", "\t", "1"]);
    splits(&["\n", "    ", " x"]);
    splits(&["a", "\u{a0}b", "\u{3000}c"]);
}

#[test]
fn special_strings_are_tokens_only_where_they_may_be() {
    let kimi = tokenizer(&demo_model(), &config_of(4088, NAMES), &PATTERN.join("|"));
    let text = "<|im_user|>user<|im_middle|><think>Hi<|im_end|>";
    let ids = kimi.encode(text).unwrap();
    let special: Vec<u32> = ids.iter().copied().filter(|&id| id >= 4088).collect();
    assert_eq!(special, [4091, 4105, 4110, 4090]);
    assert_eq!(ids.first(), Some(&4091));
    assert_eq!(kimi.decode(&ids), text);
    // `<think>` steers nothing, so it stays visible.
    assert_eq!(kimi.decode_visible(&ids), "user<think>Hi");
    let plain = kimi.encode_plain(text).unwrap();
    assert!(plain.iter().all(|&id| id < 4088), "{plain:?}");
    assert_eq!(kimi.decode(&plain), text);
}

/// The special ids of a published K2-Thinking prompt, moved to where they are in this vocabulary.
#[test]
fn special_tokens_of_a_prompt_are_the_published_ones() {
    let kimi = tokenizer(&demo_model(), &config_of(4088, NAMES), &PATTERN.join("|"));
    let text = "<|im_system|>system<|im_middle|>You are a helpful assistant.<|im_end|>\
        <|im_user|>user<|im_middle|>Who are you?<|im_end|>\
        <|im_assistant|>assistant<|im_middle|><think></think>My name is Qwen2.<|im_end|>";
    let golden =
        [163594, 163601, 163586, 163587, 163601, 163586, 163588, 163601, 163606, 163607, 163586];
    let ids = kimi.encode(text).unwrap();
    let special: Vec<u32> =
        ids.iter().filter(|&&id| id >= 4088).map(|id| id - 4088 + 163584).collect();
    assert_eq!(special, golden);
    assert_eq!(kimi.decode(&ids), text);
}

#[test]
fn ids_without_a_name_are_reserved() {
    let kimi = tokenizer(&demo_model(), &config_of(4088, NAMES), &PATTERN.join("|"));
    assert_eq!(kimi.vocabulary_size(), 4088 + 256);
    assert_eq!(kimi.token_bytes(4093), Some("<|reserved_token_4093|>".as_bytes()));
    assert_eq!(kimi.encode("<|reserved_token_4343|>").unwrap(), [4343]);
    assert!(kimi.is_special(4343) && !kimi.is_special(4110) && !kimi.is_special(0));
    assert_eq!(kimi.token_bytes(4344), None);
    assert!(kimi.check_vocabulary(4344).is_ok());
    assert!(kimi.check_vocabulary(4343).is_err());
}

/// The published wrapper's cuts, by its rules.
#[test]
fn cuts_long_texts() {
    assert_eq!(parts("", 4, 2), [""]);
    assert_eq!(parts("abcd", 4, 9), ["abcd"]);
    assert_eq!(parts("abcde", 4, 9), ["abcd", "e"]);
    assert_eq!(parts("aaabbb", 99, 2), ["aa", "ab", "bb"]);
    assert_eq!(parts("aa  aa   b", 99, 2), ["aa  aa  ", " b"]);
    assert_eq!(parts("ééééé", 4, 3), ["ééé", "é", "é"]);
    assert_eq!(parts("a\u{1c}\u{1c}\u{1c}", 99, 2), ["a\u{1c}\u{1c}", "\u{1c}"]);
}

#[test]
fn survives_huge_runs() {
    let kimi = tokenizer(&demo_model(), &config_of(4088, NAMES), &PATTERN.join("|"));
    for unit in [" ", "a", "\n", "!", "7", "漢", "\u{301}", "<|im_end|>", "' "] {
        let text = unit.repeat(1_200_000 / unit.len());
        let ids = kimi.encode(&text).unwrap();
        assert_eq!(kimi.decode(&ids), text, "{unit:?}");
    }
}

#[test]
fn refuses_files_that_would_not_work() {
    let good = demo_model();
    let config = config_of(4088, NAMES);
    let bytes: Vec<[u8; 1]> = (0..=u8::MAX).map(|byte| [byte]).collect();
    assert!(reason(b"", &config).contains("0x00"));
    assert!(reason(b"!!!! 0", &config).contains("line 1: the token is not base64"));
    assert!(reason(b"YQ== x", &config).contains("line 1: the rank is not a number"));
    assert!(reason(b"YQ==", &config).contains("line 1: no rank"));
    assert!(reason(b"YQ== 99999999", &config).contains("too large"));
    assert!(reason(b"YQ== 0\nYg== 0", &config).contains("line 2: the rank occurs twice"));
    assert!(reason(b"YQ== 0\nYQ== 1", &config).contains("line 2: the token occurs twice"));
    let model = model_of(bytes[..255].iter().map(<[u8; 1]>::as_slice));
    assert!(reason(&model, &config).contains("0xff"));
    let gap = [model.as_slice(), b"/w== 256\n"].concat();
    assert!(reason(&gap, &config).contains("rank 255 is missing"));

    assert!(reason(&good, "[]").contains("object"));
    assert!(reason(&good, "{}").contains("`added_tokens_decoder` is missing"));
    let far = config_of(9000, &[(0, "x", true)]);
    assert!(reason(&good, &far).contains("`added_tokens_decoder.9000`"));
    let nested = config_of(4088, &[(0, "<a>", true), (1, "<a>b", true)]);
    assert!(reason(&good, &nested).contains("begins"));
    let empty = config_of(4088, &[(0, "", true)]);
    assert!(reason(&good, &empty).contains("begins"));
    let foreign = config_of(4088, &[(0, "｜x", true)]);
    assert!(reason(&good, &foreign).contains("ASCII"));
}
