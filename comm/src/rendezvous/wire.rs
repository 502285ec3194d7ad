//! The messages of a meeting.
//!
//! A frame is 16 bytes of header (`paceline`, version, kind, length) and a short body. Whatever
//! else arrives is recognised by its first bytes and never interpreted: ports are shared with the
//! rest of the world.

use crate::{CommError, Rank, Unavailable};

const MAGIC: [u8; 8] = *b"paceline";
const VERSION: u16 = 1;
const HEADER_BYTES: usize = 16;
const BODY_BYTES_MAX: usize = 4096;
/// Longest text in a message.
const TEXT_BYTES_MAX: usize = 1024;

/// What a process says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) rank: u64,
    pub(super) world_size: u64,
    pub(super) process: u64,
    pub(super) slot_bytes: u64,
    pub(super) timeout_ms: u64,
    pub(super) backend: String,
    /// Identifies the machine, until it is started again.
    pub(super) boot_id: String,
    pub(super) host: String,
}

/// What is said at a meeting.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Message {
    /// To rank 0: here I am.
    Hello(Hello),
    /// From rank 0: noted, these ranks are still missing.
    Noted { missing_mask: u64 },
    /// From rank 0: all are here; fetch the shared memory at this socket.
    Welcome { socket: Vec<u8>, token: Vec<u8> },
    /// From rank 0: there will be no group, for this reason.
    Refused(CommError),
    /// To rank 0's socket: hand me over what is mine.
    Claim { rank: u64, token: Vec<u8> },
    /// From rank 0, with the file descriptors.
    Grant,
}

/// What the bytes received so far are.
#[derive(Debug, PartialEq)]
pub(super) enum Parsed {
    /// The beginning of a frame.
    Incomplete,
    /// A message and the bytes that it took.
    Message(Box<Message>, usize),
    /// Not a frame of this version of the protocol.
    Foreign(String),
}

impl Message {
    /// The frame to send.
    pub(super) fn frame(&self) -> Vec<u8> {
        let mut body = Writer(Vec::new());
        let kind = self.write(&mut body);
        let mut frame = Vec::with_capacity(HEADER_BYTES + body.0.len());
        frame.extend(MAGIC);
        frame.extend(VERSION.to_le_bytes());
        frame.extend([kind, 0]);
        frame.extend((body.0.len() as u32).to_le_bytes());
        frame.extend(body.0);
        frame
    }

    /// Looks for a message at the start of `bytes`.
    pub(super) fn parse(bytes: &[u8]) -> Parsed {
        let prefix = bytes.len().min(MAGIC.len());
        if bytes[..prefix] != MAGIC[..prefix] {
            let start = String::from_utf8_lossy(&bytes[..bytes.len().min(24)]).into_owned();
            return Parsed::Foreign(format!("it says {start:?}"));
        }
        let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
            return Parsed::Incomplete;
        };
        let version = u16::from_le_bytes([header[8], header[9]]);
        if version != VERSION {
            return Parsed::Foreign(format!("it speaks version {version}, not {VERSION}"));
        }
        let length = u32::from_le_bytes([header[12], header[13], header[14], header[15]]) as usize;
        if length > BODY_BYTES_MAX {
            return Parsed::Foreign(format!("it announces a message of {length} bytes"));
        }
        let Some(body) = rest.get(..length) else { return Parsed::Incomplete };
        match Self::read(header[10], &mut Reader(body)) {
            Some(message) => Parsed::Message(Box::new(message), HEADER_BYTES + length),
            None => Parsed::Foreign("it sent a message that makes no sense".to_owned()),
        }
    }

    fn write(&self, body: &mut Writer) -> u8 {
        match self {
            Self::Hello(hello) => {
                let Hello { rank, world_size, process, slot_bytes, timeout_ms, .. } = hello;
                body.numbers(&[*rank, *world_size, *process, *slot_bytes, *timeout_ms]);
                body.text(&hello.backend);
                body.text(&hello.boot_id);
                body.text(&hello.host);
                1
            }
            Self::Noted { missing_mask } => {
                body.numbers(&[*missing_mask]);
                2
            }
            Self::Welcome { socket, token } => {
                body.bytes(socket);
                body.bytes(token);
                3
            }
            Self::Refused(error) => {
                body.error(error);
                4
            }
            Self::Claim { rank, token } => {
                body.numbers(&[*rank]);
                body.bytes(token);
                5
            }
            Self::Grant => 6,
        }
    }

    fn read(kind: u8, body: &mut Reader<'_>) -> Option<Self> {
        let message = match kind {
            1 => Self::Hello(Hello {
                rank: body.number()?,
                world_size: body.number()?,
                process: body.number()?,
                slot_bytes: body.number()?,
                timeout_ms: body.number()?,
                backend: body.text()?,
                boot_id: body.text()?,
                host: body.text()?,
            }),
            2 => Self::Noted { missing_mask: body.number()? },
            3 => Self::Welcome { socket: body.bytes()?.to_vec(), token: body.bytes()?.to_vec() },
            4 => Self::Refused(body.error()?),
            5 => Self::Claim { rank: body.number()?, token: body.bytes()?.to_vec() },
            6 => Self::Grant,
            _ => return None,
        };
        body.0.is_empty().then_some(message)
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn numbers(&mut self, values: &[u64]) {
        values.iter().for_each(|value| self.0.extend(value.to_le_bytes()));
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.numbers(&[bytes.len() as u64]);
        self.0.extend(bytes);
    }

    /// Writes a text, cut to its limit.
    fn text(&mut self, text: &str) {
        let limit = text.len().min(TEXT_BYTES_MAX);
        let end = (0..=limit).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        self.bytes(&text.as_bytes()[..end]);
    }

    /// Writes an error that ends a meeting. Those that keep their type are the ones that are
    /// about several ranks; of others the text is passed on.
    fn error(&mut self, error: &CommError) {
        match error {
            CommError::SettingMismatch { setting, rank, expected, found } => {
                self.numbers(&[1, rank.0 as u64]);
                [setting, expected, found].into_iter().for_each(|text| self.text(text));
            }
            CommError::DuplicateRank { rank, first, second } => {
                self.numbers(&[2, rank.0 as u64]);
                [first, second].into_iter().for_each(|text| self.text(text));
            }
            CommError::NotMet { missing, address, waited } => {
                let mask = missing.iter().fold(0u64, |mask, rank| mask | 1 << (rank.0 & 63));
                self.numbers(&[3, mask, waited.as_millis() as u64]);
                self.text(address);
            }
            CommError::Unavailable(Unavailable::NotPossible { why, next_step, .. }) => {
                self.numbers(&[4]);
                [why, next_step].into_iter().for_each(|text| self.text(text));
            }
            other => {
                self.numbers(&[5]);
                self.text(&other.to_string());
            }
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn number(&mut self) -> Option<u64> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*bytes))
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = usize::try_from(self.number()?).ok()?;
        let (bytes, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(bytes)
    }

    fn text(&mut self) -> Option<String> {
        String::from_utf8(self.bytes()?.to_vec()).ok()
    }

    fn rank(&mut self) -> Option<Rank> {
        Some(Rank(usize::try_from(self.number()?).ok()?))
    }

    fn error(&mut self) -> Option<CommError> {
        Some(match self.number()? {
            1 => CommError::SettingMismatch {
                rank: self.rank()?,
                setting: self.text()?,
                expected: self.text()?,
                found: self.text()?,
            },
            2 => CommError::DuplicateRank {
                rank: self.rank()?,
                first: self.text()?,
                second: self.text()?,
            },
            3 => {
                let mask = self.number()?;
                CommError::NotMet {
                    missing: ranks_of(mask),
                    waited: std::time::Duration::from_millis(self.number()?),
                    address: self.text()?,
                }
            }
            4 => CommError::Unavailable(Unavailable::NotPossible {
                name: "host",
                why: self.text()?,
                next_step: self.text()?,
            }),
            5 => CommError::System { what: "the meeting at rank 0", reason: self.text()? },
            _ => return None,
        })
    }
}

/// The ranks whose bits are set.
pub(super) fn ranks_of(mask: u64) -> Vec<Rank> {
    (0..64).filter(|rank| mask >> rank & 1 != 0).map(Rank).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn messages() -> Vec<Message> {
        let hello = Hello {
            rank: 3,
            world_size: 8,
            process: 4711,
            slot_bytes: 1 << 18,
            timeout_ms: 5,
            backend: "auto".to_owned(),
            boot_id: "b".to_owned(),
            host: "höst".to_owned(),
        };
        let text = || "text".to_owned();
        let not_possible =
            Unavailable::NotPossible { name: "host", why: text(), next_step: text() };
        vec![
            Message::Hello(hello),
            Message::Noted { missing_mask: u64::MAX },
            Message::Welcome { socket: vec![0, 1, 255], token: vec![7; 16] },
            Message::Claim { rank: 1, token: vec![] },
            Message::Grant,
            Message::Refused(CommError::DuplicateRank {
                rank: Rank(2),
                first: text(),
                second: text(),
            }),
            Message::Refused(CommError::SettingMismatch {
                setting: text(),
                rank: Rank(1),
                expected: text(),
                found: text(),
            }),
            Message::Refused(CommError::NotMet {
                missing: vec![Rank(0), Rank(63)],
                address: text(),
                waited: Duration::from_millis(9),
            }),
            Message::Refused(CommError::Unavailable(not_possible)),
        ]
    }

    #[test]
    fn messages_survive_the_wire() {
        for message in messages() {
            let mut bytes = message.frame();
            let length = bytes.len();
            for cut in 0..length {
                assert_eq!(Message::parse(&bytes[..cut]), Parsed::Incomplete, "{message:?}");
            }
            bytes.extend(b"more");
            assert_eq!(Message::parse(&bytes), Parsed::Message(Box::new(message), length));
        }
    }

    #[test]
    fn noise_is_never_a_message() {
        for noise in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"\0", b"pacelinE", b"SSH-2.0-OpenSSH"] {
            assert!(matches!(Message::parse(noise), Parsed::Foreign(_)), "{noise:?}");
        }
        // Every single wrong byte in a valid frame is survived, whatever it becomes.
        for message in messages() {
            let frame = message.frame();
            for place in 0..frame.len() {
                let mut wrong = frame.clone();
                wrong[place] ^= 0xFF;
                let parsed = Message::parse(&wrong);
                if place < 12 && place != 11 {
                    assert!(matches!(parsed, Parsed::Foreign(_)), "{message:?} {place}");
                }
            }
        }
        let mut long = Message::Grant.frame();
        long[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(matches!(Message::parse(&long), Parsed::Foreign(_)));
    }
}
