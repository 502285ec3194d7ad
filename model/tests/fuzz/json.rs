//! Mutations of JSON texts that keep them JSON, and some that do not.

use serde_json::{Map, Value, json};

use crate::bytes;
use crate::random::Random;

/// Changes a few values, keys or characters.
pub(crate) fn mutate(random: &mut Random, value: &Value, words: &[&str]) -> String {
    let mut value = value.clone();
    for _ in 0..=random.below(3) {
        change(random, &mut value, words);
    }
    let mut text = value.to_string();
    match random.below(12) {
        0 => bytes::mutate_text(random, &text, &["{", "}", "[", "\"", "\\u0000", "1e999", ","]),
        1 => {
            repeat_key(random, &mut text, &value);
            text
        }
        2 => nest(random, &text),
        _ => text,
    }
}

/// Replaces, removes, renames or repeats something at a random place.
fn change(random: &mut Random, value: &mut Value, words: &[&str]) {
    let stops = random.once_in(3);
    match value {
        Value::Object(map) if !map.is_empty() && !stops => change_object(random, map, words),
        Value::Array(items) if !items.is_empty() && !stops => {
            let at = random.below(items.len());
            match random.below(8) {
                0 => drop(items.remove(at)),
                1 => {
                    let copies = vec![items[at].clone(); 1 + random.below(40)];
                    items.splice(at..at, copies);
                }
                2 => items.insert(at, other(random, words)),
                3 => items.reverse(),
                _ => change(random, &mut items[at], words),
            }
        }
        Value::String(text) if !stops => *text = bytes::mutate_text(random, text, words),
        Value::Number(number) if !stops => {
            let number = number.as_i64().unwrap_or(1);
            *value = match random.below(4) {
                0 => json!(number.wrapping_neg()),
                1 => json!(number.wrapping_add(1)),
                2 => json!(number.wrapping_mul(2)),
                _ => json!(number as f64 + 0.5),
            };
        }
        _ => *value = other(random, words),
    }
}

fn change_object(random: &mut Random, map: &mut Map<String, Value>, words: &[&str]) {
    let key = map.keys().nth(random.below(map.len())).cloned().unwrap_or_default();
    match random.below(8) {
        0 => drop(map.shift_remove(&key)),
        1 => {
            let value = map.shift_remove(&key).unwrap_or_default();
            map.insert(bytes::mutate_text(random, &key, words), value);
        }
        2 => {
            let to = map.keys().nth(random.below(map.len())).cloned().unwrap_or_default();
            let value = map[&key].clone();
            map.insert(to, value);
        }
        3 => drop(map.insert((*random.of(words)).to_owned(), other(random, words))),
        _ => change(random, map.get_mut(&key).expect("the key was just taken from it"), words),
    }
}

/// A value of any type, at an edge.
fn other(random: &mut Random, words: &[&str]) -> Value {
    match random.below(18) {
        0 => Value::Null,
        1 => json!(true),
        2 => json!(false),
        3 => json!(0),
        4 => json!(-1),
        5 => json!(u64::MAX),
        6 => json!(i64::MIN),
        7 => json!(1u64 << 63),
        8 => json!(u32::MAX),
        9 => json!(1e308),
        10 => json!(1e-308),
        11 => json!(""),
        12 => json!([]),
        13 => json!({}),
        14 => json!("x".repeat(1 << random.below(12))),
        15 => json!([[[[[0, 1]]]]]),
        16 => json!(random.next() >> random.below(64)),
        _ => json!(random.of(words)),
    }
}

/// The same key twice in one object, which a `Value` cannot hold.
fn repeat_key(random: &mut Random, text: &mut String, value: &Value) {
    let key = match value {
        Value::Object(map) if !map.is_empty() => map.keys().nth(random.below(map.len())),
        _ => None,
    };
    let key = json!(key.map_or("x", String::as_str)).to_string();
    let opens: Vec<usize> = text.match_indices('{').map(|(at, _)| at).collect();
    if !opens.is_empty() {
        let at = *random.of(&opens) + 1;
        text.insert_str(at, &format!("{key}:{},", other(random, &["x"])));
    }
}

/// A value behind many brackets.
fn nest(random: &mut Random, text: &str) -> String {
    let deep = 1 << random.below(14);
    let brackets = "[".repeat(deep) + &"]".repeat(deep);
    match text.find(':') {
        Some(at) => format!("{}{brackets},{}", &text[..=at], text[at + 1..].trim_start()),
        None => brackets,
    }
}
