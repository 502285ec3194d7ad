//! What must hold of a `tokenizer.json` before the library that encodes with it may see it.
//!
//! The library panics on some files instead of refusing them, and where a merge cuts into a
//! character it makes text that is none. Invariant: what passes [`check`] is whole JSON, and each
//! of its merges makes a token of its vocabulary.

use serde_json::{Map, Value};

/// Checks the file's JSON.
///
/// # Errors
/// What is wrong, without the file's name.
pub(super) fn check(file: &Value) -> Result<(), String> {
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

    use super::check;

    #[test]
    fn merges_make_tokens_of_the_vocabulary() {
        let file =
            |merges| json!({"model": {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": merges}});
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
}
