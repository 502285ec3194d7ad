//! What must hold of a `tokenizer.json` before the library that encodes with it may see it.
//!
//! The library panics on some files instead of refusing them: on broken JSON, on merges that make
//! no token, and on texts that several of its normalizers change one after the other. Others make
//! it take all memory. Invariant: what passes [`check`] has steps of the kinds that byte-level
//! tokenizers use, a text becomes bytes once, repetitions in its patterns stay few, and each of
//! its merges makes a token of its vocabulary.

use serde_json::{Map, Value};

/// Steps that change a text before it is split. Others lose part of it anyway.
const NORMALIZERS: &[&str] = &["NFC", "NFD", "NFKC", "NFKD"];
/// Steps that split a text.
const PRE_TOKENIZERS: &[&str] = &["ByteLevel", "Split", "Digits", "Punctuation"];
/// Several times what any known tokenizer has.
const STEPS_MAX: usize = 32;
/// What the counts of a pattern, such as the 3 of `\p{N}{1,3}`, may multiply to: each is written
/// out when the pattern is compiled, nested ones within each other.
const REPETITIONS_MAX: usize = 1000;

/// Checks the file's JSON.
///
/// # Errors
/// What is wrong, without the file's name.
pub(super) fn check(file: &Value) -> Result<(), String> {
    check_steps(file, "normalizer", "normalizers", NORMALIZERS)?;
    check_steps(file, "pre_tokenizer", "pretokenizers", PRE_TOKENIZERS)?;
    if file.pointer("/decoder/type").and_then(Value::as_str) != Some("ByteLevel") {
        return Err("its decoder is not ByteLevel, the only supported one".to_owned());
    }
    let model = match file.get("model") {
        Some(Value::Object(model)) => model,
        _ => return Err("it has no object `model`".to_owned()),
    };
    if !matches!(model.get("type"), None | Some(Value::Null)) && model["type"] != "BPE" {
        return Err("its model is not BPE, the only supported one".to_owned());
    }
    for key in ["continuing_subword_prefix", "end_of_word_suffix"] {
        if !matches!(model.get(key), None | Some(Value::Null)) && model[key] != "" {
            return Err(format!("`model.{key}` is no part of byte-level BPE; set it to null"));
        }
    }
    let Some(Value::Object(vocabulary)) = model.get("vocab") else {
        return Err("`model.vocab` is no object of tokens".to_owned());
    };
    match model.get("merges") {
        Some(Value::Array(merges)) => check_merges(merges, vocabulary),
        _ => Err("`model.merges` is no list".to_owned()),
    }
}

/// Takes out what is not used, but would be read.
pub(super) fn reduce(file: &mut Value) {
    if let Value::Object(file) = file {
        for key in ["post_processor", "padding", "truncation"] {
            file.remove(key);
        }
    }
}

/// A step, or a sequence of steps that may be sequences again.
fn check_steps(holder: &Value, key: &str, list: &str, known: &[&str]) -> Result<(), String> {
    let step = match holder.get(key) {
        None | Some(Value::Null) => return Ok(()),
        Some(step) => step,
    };
    let (mut steps, mut count, mut to_bytes) = (vec![step], 0, 0);
    while let Some(step) = steps.pop() {
        let kind = step.get("type").and_then(Value::as_str).unwrap_or_default();
        count += 1;
        // Each turns bytes into characters of up to two bytes: a few dozen fill any memory.
        to_bytes += usize::from(kind == "ByteLevel");
        if count > STEPS_MAX || to_bytes > 1 {
            return Err(format!(
                "`{key}` has more than {STEPS_MAX} steps, or ByteLevel more than once"
            ));
        }
        let pattern = step.pointer("/pattern/Regex").and_then(Value::as_str).unwrap_or_default();
        if repetitions(pattern) > REPETITIONS_MAX {
            return Err(format!(
                "`{key}` has a pattern with repetitions of more than {REPETITIONS_MAX} in all"
            ));
        }
        if kind == "Sequence" {
            steps.extend(step.get(list).and_then(Value::as_array).into_iter().flatten());
        } else if !known.contains(&kind) {
            let known = known.join(", ");
            return Err(format!("`{key}` has a step {kind:?}; supported: {known} and Sequence"));
        }
    }
    Ok(())
}

/// The product of the counts in a pattern, `{2}`, `{2,}` or `{2,5}`.
fn repetitions(pattern: &str) -> usize {
    let counts = pattern.split('{').skip(1).filter_map(|rest| {
        let count = rest.split('}').next()?;
        let bounds = count.split(',').filter(|bound| !bound.trim().is_empty());
        bounds.map(|bound| bound.trim().parse::<usize>().ok()).max()?
    });
    counts.fold(1, |product: usize, count| product.saturating_mul(count.max(1)))
}

/// A merge is a list of two tokens or, in older files, a text of two tokens with a space between.
fn check_merges(merges: &[Value], vocabulary: &Map<String, Value>) -> Result<(), String> {
    let mut joined = String::new();
    for (index, merge) in merges.iter().enumerate() {
        let pair = match merge {
            Value::String(text) => text.split_once(' '),
            Value::Array(pair) => match pair.as_slice() {
                [left, right] => left.as_str().zip(right.as_str()),
                _ => None,
            },
            _ => None,
        };
        let Some((left, right)) = pair else {
            return Err(format!("`model.merges` {index} is no pair of tokens"));
        };
        joined.clear();
        joined.extend([left, right]);
        if let Some(absent) =
            [left, right, &joined].into_iter().find(|token| !vocabulary.contains_key(*token))
        {
            return Err(format!("`model.merges` {index} has {absent:?}, which is no token"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{check, repetitions};

    #[test]
    fn merges_make_tokens_of_the_vocabulary() {
        let file = |merges| {
            json!({"decoder": {"type": "ByteLevel"},
                "model": {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": merges}})
        };
        for merges in [json!([]), json!([["a", "b"]]), json!(["a b"])] {
            check(&file(merges)).unwrap();
        }
        for merges in [json!([["b", "a"]]), json!(["ab c"]), json!([["a"]]), json!([1]), json!({})]
        {
            assert!(check(&file(merges.clone())).unwrap_err().contains("merges"), "{merges}");
        }
        let mut prefixed = file(json!([]));
        prefixed["model"]["continuing_subword_prefix"] = json!("##");
        assert!(check(&prefixed).unwrap_err().contains("continuing_subword_prefix"));
        prefixed["model"]["continuing_subword_prefix"] = json!("");
        check(&prefixed).unwrap();
    }

    #[test]
    fn decoders_are_byte_level() {
        // Each of these would be compiled, and take megabytes, before anybody asked for its kind.
        let replace = json!({"type": "Replace", "pattern": {"Regex": r"\w{100}"}, "content": ""});
        for decoder in [json!(null), json!({"type": "Sequence", "decoders": [replace]})] {
            let file = json!({"decoder": decoder, "model": {"vocab": {}, "merges": []}});
            assert!(check(&file).unwrap_err().contains("decoder"));
        }
    }

    #[test]
    fn repetitions_are_multiplied() {
        for (pattern, expected) in [
            ("", 1),
            (r"\p{N}{1,3}", 3),
            (r"a{2}b{,4}c{5,}", 40),
            (r"(?:a{50}){50}", 2500),
            (r"\x{10FFFF}[{]x}", 1),
            ("a{99999999999999999999}", 1),
            ("a{9223372036854775807}{9}", usize::MAX),
        ] {
            assert_eq!(repetitions(pattern), expected, "{pattern}");
        }
    }

    #[test]
    fn steps_are_of_known_kinds() {
        let file = |normalizer, pre_tokenizer| {
            json!({"normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
                "decoder": {"type": "ByteLevel"}, "model": {"vocab": {}, "merges": []}})
        };
        let split = json!({"type": "Sequence", "pretokenizers": [
            {"type": "Sequence", "pretokenizers": [{"type": "Split"}]}, {"type": "ByteLevel"}]});
        check(&file(json!({"type": "Sequence", "normalizers": []}), split)).unwrap();
        check(&file(json!({"type": "NFC"}), json!(null))).unwrap();
        let nested = json!({"type": "Sequence", "normalizers": [{"type": "Lowercase"}]});
        let byte_level = json!({"type": "ByteLevel"});
        let twice = json!({"type": "Sequence", "pretokenizers": [byte_level, byte_level]});
        let many = vec![json!({"type": "Digits"}); 40];
        let many = json!({"type": "Sequence", "pretokenizers": many});
        let repeated = json!({"type": "Split", "pattern": {"Regex": "(?:(?=a){50}){50}"}});
        for (normalizer, pre_tokenizer, kind) in [
            (json!(null), twice, "more than once"),
            (json!(null), many, "more than 32"),
            (json!(null), repeated, "repetitions"),
            (nested, json!(null), "Lowercase"),
            (json!(null), json!({"type": "Metaspace"}), "Metaspace"),
            (json!("NFC"), json!(null), "\"\""),
        ] {
            assert!(check(&file(normalizer, pre_tokenizer)).unwrap_err().contains(kind), "{kind}");
        }
    }
}
