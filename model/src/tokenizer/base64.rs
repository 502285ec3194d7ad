//! Standard base64 (RFC 4648, section 4) of the token bytes in a `tiktoken.model`.

/// Decodes one line's first column; `None` for anything but canonical base64.
pub(super) fn decode(text: &[u8]) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(4) {
        return None;
    }
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let last = text.len() / 4;
    for (index, quartet) in text.chunks_exact(4).enumerate() {
        let padding = quartet.iter().rev().take_while(|&&letter| letter == b'=').count();
        if padding > 2 || (padding > 0 && index + 1 != last) {
            return None;
        }
        let mut bits = 0u32;
        for &letter in &quartet[..4 - padding] {
            bits = bits << 6 | sextet(letter)?;
        }
        bits <<= 6 * padding;
        let [_, group @ ..] = bits.to_be_bytes();
        let (kept, dropped) = group.split_at(3 - padding);
        if dropped.iter().any(|&byte| byte != 0) {
            return None;
        }
        bytes.extend_from_slice(kept);
    }
    Some(bytes)
}

fn sextet(letter: u8) -> Option<u32> {
    let value = match letter {
        b'A'..=b'Z' => letter - b'A',
        b'a'..=b'z' => letter - b'a' + 26,
        b'0'..=b'9' => letter - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    };
    Some(value.into())
}

#[cfg(test)]
mod tests {
    use super::decode;

    /// The test vectors of RFC 4648, section 10.
    #[test]
    fn decodes_the_vectors_of_the_standard() {
        for (text, expected) in [
            ("", ""),
            ("Zg==", "f"),
            ("Zm8=", "fo"),
            ("Zm9v", "foo"),
            ("Zm9vYg==", "foob"),
            ("Zm9vYmE=", "fooba"),
            ("Zm9vYmFy", "foobar"),
        ] {
            assert_eq!(decode(text.as_bytes()).as_deref(), Some(expected.as_bytes()), "{text}");
        }
        assert_eq!(decode(b"/+8="), Some(vec![0xff, 0xef]));
    }

    #[test]
    fn refuses_what_is_not_canonical() {
        for text in ["Z", "Zg", "Zg=", "Zh==", "Zm9=", "====", "Z===", "Zg==Zg==", "Zm 9", "Zm9-"] {
            assert_eq!(decode(text.as_bytes()), None, "{text}");
        }
    }
}
