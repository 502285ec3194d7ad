//! The demo's tokenizer, against reference values.

use paceline_model::ModelError;
use paceline_model::tokenizer::Tokenizer;
use serde_json::{Value, json};

fn demo() -> Tokenizer {
    Tokenizer::from_dir(crate::demo_dir()).unwrap()
}

fn ids_of(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn demo_json() -> Value {
    let path = crate::demo_dir().join("tokenizer.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Numbers without a pattern, the same in every run (splitmix64).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }
}

#[test]
fn equals_the_reference() {
    let tokenizer = demo();
    let reference = crate::reference("stories-moe.json");
    let prompts = reference["prompts"].as_array().unwrap();
    assert_eq!(prompts.len(), 10);
    for prompt in prompts {
        let (text, ids) = (prompt["text"].as_str().unwrap(), ids_of(&prompt["ids"]));
        assert_eq!(tokenizer.encode(text).unwrap(), ids, "{}", prompt["name"]);
        assert_eq!(tokenizer.decode(&ids), text);
        let greedy = ids_of(&prompt["greedy_ids"]);
        assert_eq!(tokenizer.decode(&greedy), prompt["greedy_text"].as_str().unwrap());
    }
    assert_eq!(tokenizer.vocabulary_size(), 4096);
    tokenizer.check_vocabulary(4096).unwrap();
}

#[test]
fn user_text_has_no_special_tokens() {
    let tokenizer = demo();
    let text = "[BOS]<|im_user|>user<|im_end|> said: \u{1f642} [EOS]";
    let ids = tokenizer.encode_plain(text).unwrap();
    assert!(ids.iter().all(|&id| !tokenizer.is_special(id)), "{ids:?}");
    assert_eq!(tokenizer.decode(&ids), text);
    let with_specials = tokenizer.encode(text).unwrap();
    let special: Vec<u32> =
        with_specials.iter().copied().filter(|&id| tokenizer.is_special(id)).collect();
    assert_eq!(special, [0, 3, 6, 1]);
    assert_eq!(tokenizer.decode_visible(&with_specials), "user said: \u{1f642} ");
    let plain = "Once upon a time";
    assert_eq!(tokenizer.encode_plain(plain).unwrap(), tokenizer.encode(plain).unwrap());
    assert_eq!(tokenizer.encode("").unwrap(), Vec::<u32>::new());
    assert_eq!(tokenizer.encode_plain("").unwrap(), Vec::<u32>::new());
}

#[test]
fn every_byte_has_its_token() {
    let tokenizer = demo();
    let singles: Vec<u8> = (8..264)
        .map(|id| tokenizer.token_bytes(id).unwrap())
        .map(|bytes| {
            assert_eq!(bytes.len(), 1);
            bytes[0]
        })
        .collect();
    let mut sorted = singles.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..=u8::MAX).collect::<Vec<_>>());
    // GPT-2's alphabet begins with the printable characters.
    assert_eq!(singles[..3], *b"!\"#");
    assert_eq!(tokenizer.token_bytes(264), Some(b" a".as_slice()));
    assert_eq!(tokenizer.token_bytes(3), Some(b"<|im_user|>".as_slice()));
    assert_eq!(tokenizer.token_bytes(4096), None);
    assert_eq!(tokenizer.token_bytes(u32::MAX), None);
}

/// Random ids are mostly broken UTF-8; random characters are spread over several tokens.
#[test]
fn a_stream_equals_decoding_at_once() {
    let tokenizer = demo();
    let mut numbers = Numbers(7);
    for round in 0..300 {
        let count = numbers.below(60);
        // Half of the rounds only use single bytes and special tokens.
        let bound = if round % 2 == 0 { 4200 } else { 264 };
        let ids: Vec<u32> = (0..count).map(|_| numbers.below(bound) as u32).collect();
        check_stream(&tokenizer, &ids);
    }
    for round in 0..100 {
        let characters = (0..numbers.below(30)).map(|_| {
            let end = [0x80, 0x800, 0x1_0000, 0x11_0000][numbers.below(4)];
            char::from_u32(numbers.below(end) as u32).unwrap_or('\u{fffd}')
        });
        let text: String = characters.collect();
        let ids = tokenizer.encode_plain(&text).unwrap();
        assert_eq!(tokenizer.decode(&ids), text, "round {round}");
        check_stream(&tokenizer, &ids);
    }
}

#[track_caller]
fn check_stream(tokenizer: &Tokenizer, ids: &[u32]) {
    for with_special in [false, true] {
        let mut stream = tokenizer.stream().with_special(with_special);
        let mut text = String::new();
        for &id in ids {
            let piece = stream.push(id);
            assert_ne!(piece.as_deref(), Some(""));
            text.push_str(&piece.unwrap_or_default());
        }
        text.push_str(&stream.flush().unwrap_or_default());
        assert_eq!(stream.flush(), None);
        let expected =
            if with_special { tokenizer.decode(ids) } else { tokenizer.decode_visible(ids) };
        assert_eq!(text, expected, "{ids:?}");
    }
}

#[test]
fn a_stream_never_splits_a_character() {
    let tokenizer = demo();
    let ids = tokenizer.encode_plain("a🙂é").unwrap();
    let mut stream = tokenizer.stream();
    let pieces: Vec<String> = ids.iter().filter_map(|&id| stream.push(id)).collect();
    assert_eq!(pieces.concat(), "a🙂é");
    assert!(pieces.len() < ids.len(), "the emoji is one token here: {ids:?}");
    let first = ids[1];
    assert!(tokenizer.token_bytes(first).unwrap()[0] == 0xf0);
    assert_eq!(stream.push(first), None);
    assert_eq!(stream.flush().as_deref(), Some("\u{fffd}"));
    // A special token in between neither completes nor breaks the character.
    stream.push(ids[1]);
    stream.push(0);
    let rest: Vec<String> = ids[2..].iter().filter_map(|&id| stream.push(id)).collect();
    assert_eq!(rest.concat(), "🙂é");
}

#[test]
fn survives_huge_runs() {
    let tokenizer = demo();
    for unit in [" ", "a", "\n", "!", "7", "漢", "[EOS]", "' "] {
        let text = unit.repeat(300_000 / unit.len());
        let ids = tokenizer.encode(&text).unwrap();
        assert_eq!(tokenizer.decode(&ids), text, "{unit:?}");
        let ids = tokenizer.encode_plain(&text).unwrap();
        assert_eq!(tokenizer.decode(&ids), text, "{unit:?}");
    }
}

#[test]
fn refuses_a_vocabulary_of_another_model() {
    let tokenizer = demo();
    for vocabulary in [4095, 512, 129_280] {
        let error = tokenizer.check_vocabulary(vocabulary).unwrap_err();
        assert!(error.to_string().contains(&vocabulary.to_string()), "{error}");
    }
    tokenizer.check_vocabulary(4200).unwrap();
}

#[test]
fn refuses_files_that_are_no_tokenizer() {
    let reason = |json: &Value| {
        Tokenizer::from_hf_json(json.to_string().as_bytes()).unwrap_err().to_string()
    };
    for bytes in [b"".as_slice(), b"{", b"[]", b"null", b"{\"model\": 1}", b"\xff\xfe"] {
        let error = Tokenizer::from_hf_json(bytes).unwrap_err();
        assert!(matches!(error, ModelError::TokenizerFile { .. }), "{error}");
    }
    let mut dropout = demo_json();
    dropout["model"]["dropout"] = json!(0.1);
    assert!(reason(&dropout).contains("dropout"));
    let mut decoder = demo_json();
    decoder["decoder"] = json!({"type": "Fuse"});
    assert!(reason(&decoder).contains("ByteLevel"));
    let mut huge = demo_json();
    huge["model"]["vocab"]["unheard"] = json!(u32::MAX);
    assert!(reason(&huge).contains("4294967295"));
    let mut words = demo_json();
    words["model"] = json!({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"});
    assert!(reason(&words).contains("BPE"));
    let error = Tokenizer::from_dir("/nonexistent").unwrap_err();
    assert!(matches!(error, ModelError::TokenizerMissing { .. }), "{error}");
}

/// Padding and truncation in the file belong to training batches.
#[test]
fn ignores_truncation_and_padding() {
    let mut json = demo_json();
    let strategy = json!({"direction": "Right", "max_length": 2, "stride": 0});
    json["truncation"] = with_strategy(strategy, "LongestFirst");
    json["padding"] = json!({
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 2, "pad_type_id": 0, "pad_token": "[PAD]"
    });
    let tokenizer = Tokenizer::from_hf_json(json.to_string().as_bytes()).unwrap();
    let text = "Once upon a time";
    assert_eq!(tokenizer.encode(text).unwrap(), demo().encode(text).unwrap());
}

fn with_strategy(mut truncation: Value, strategy: &str) -> Value {
    truncation["strategy"] = json!(strategy);
    truncation
}

/// Merges that the library would panic on, and a prefix with which it would cut characters.
#[test]
fn refuses_what_the_library_would_panic_on() {
    let reason = |json: &Value| {
        Tokenizer::from_hf_json(json.to_string().as_bytes()).unwrap_err().to_string()
    };
    let mut merge = demo_json();
    let tokens = merge["model"]["vocab"].as_object().unwrap().keys();
    let longest = tokens.max_by_key(|token| token.len()).unwrap().clone();
    merge["model"]["merges"][0] = json!([longest, "a"]);
    assert!(reason(&merge).contains("`model.merges` 0"));
    let mut prefix = demo_json();
    prefix["model"]["continuing_subword_prefix"] = json!("##########");
    assert!(reason(&prefix).contains("continuing_subword_prefix"));
    let mut lossy = demo_json();
    lossy["normalizer"] = json!({"type": "Lowercase"});
    assert!(reason(&lossy).contains("Lowercase"));
    let broken = demo_json().to_string().replace("\"ByteLevel\"", "\"\\ud800\"");
    assert!(Tokenizer::from_hf_json(broken.as_bytes()).is_err());
}

#[test]
fn answers_must_be_able_to_end() {
    demo().check_stop_ids(&[1, 6]).unwrap();
    let error = demo().check_stop_ids(&[1, 4096]).unwrap_err();
    assert!(error.to_string().contains("token 4096"), "{error}");
}
