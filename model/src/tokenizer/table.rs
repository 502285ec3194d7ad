//! Exact bytes of every token.

use crate::ModelError;

/// Bytes and kind of each id, in one buffer. Ids without a token are absent.
pub(super) struct TokenTable {
    bytes: Vec<u8>,
    /// Begin and end in `bytes`; an absent token has begin after end.
    spans: Vec<(u32, u32)>,
    special: Vec<bool>,
}

/// One token while the table is built.
pub(super) struct Entry {
    pub(super) id: u32,
    pub(super) bytes: Vec<u8>,
    pub(super) special: bool,
}

impl TokenTable {
    /// Collects the entries; a later one replaces an earlier one of the same id.
    pub(super) fn build(entries: Vec<Entry>, what: &str) -> Result<Self, ModelError> {
        let failed = |reason| ModelError::TokenizerFile { what: what.to_owned(), reason };
        let Some(last) = entries.iter().map(|entry| entry.id).max() else {
            return Err(failed("it has no tokens".to_owned()));
        };
        if last >= IDS_MAX {
            return Err(failed(format!("token id {last} is above the supported {IDS_MAX}")));
        }
        let bytes_total: usize = entries.iter().map(|entry| entry.bytes.len()).sum();
        if u32::try_from(bytes_total).is_err() {
            return Err(failed(format!("the tokens have {bytes_total} bytes in total")));
        }
        let count = last as usize + 1;
        let mut table = Self {
            bytes: Vec::with_capacity(bytes_total),
            spans: vec![ABSENT; count],
            special: vec![false; count],
        };
        for Entry { id, bytes, special } in entries {
            let begin = table.bytes.len() as u32;
            table.bytes.extend_from_slice(&bytes);
            table.spans[id as usize] = (begin, table.bytes.len() as u32);
            table.special[id as usize] = special;
        }
        Ok(table)
    }

    /// One more than the highest id.
    pub(super) fn count(&self) -> usize {
        self.spans.len()
    }

    pub(super) fn bytes(&self, id: u32) -> Option<&[u8]> {
        let (begin, end) = *self.spans.get(id as usize)?;
        self.bytes.get(begin as usize..end as usize)
    }

    pub(super) fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }
}

const ABSENT: (u32, u32) = (1, 0);
const IDS_MAX: u32 = 1 << 24;
