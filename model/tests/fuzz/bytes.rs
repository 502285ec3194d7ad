//! Mutations of bytes that know nothing of their meaning.

use crate::random::Random;

/// Numbers that lie at an edge.
const EDGES: &[u64] =
    &[0, 1, 0x7f, 0x80, 0xff, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff, i64::MAX as u64, 1 << 63, !0];

/// Changes a few things; `words` are put in now and then.
pub(crate) fn mutate(random: &mut Random, bytes: &mut Vec<u8>, words: &[&str]) {
    for _ in 0..=random.below(4) {
        change(random, bytes, words);
    }
}

fn change(random: &mut Random, bytes: &mut Vec<u8>, words: &[&str]) {
    const LENGTH_MAX: usize = 64;
    if bytes.is_empty() {
        bytes.push(random.next() as u8);
        return;
    }
    let at = random.below(bytes.len());
    let end = (at + 1 + random.below(LENGTH_MAX)).min(bytes.len());
    match random.below(10) {
        0 => bytes[at] ^= 1 << random.below(8),
        1 => bytes[at] = random.next() as u8,
        2 => bytes.insert(at, random.next() as u8),
        3 => drop(bytes.drain(at..end)),
        4 => bytes.truncate(at),
        5 => {
            let piece = bytes[at..end].to_vec();
            let to = random.below(bytes.len());
            bytes.splice(to..to, piece);
        }
        6 => {
            let edge = random.of(EDGES).to_le_bytes();
            for (byte, value) in bytes[at..].iter_mut().zip(edge) {
                *byte = value;
            }
        }
        7 => {
            let to = random.below(bytes.len());
            bytes.swap(at, to);
        }
        _ if words.is_empty() => bytes[at] = !bytes[at],
        8 => drop(bytes.splice(at..at, random.of(words).bytes())),
        _ => drop(bytes.splice(at..end, random.of(words).bytes())),
    }
}

/// As [`mutate`], and what is no UTF-8 any more becomes U+FFFD.
pub(crate) fn mutate_text(random: &mut Random, text: &str, words: &[&str]) -> String {
    let mut bytes = text.as_bytes().to_vec();
    mutate(random, &mut bytes, words);
    String::from_utf8_lossy(&bytes).into_owned()
}
