//! Messages as bytes: frames of a fixed header and a JSON payload.
//!
//! ```text
//! "RHL" | major u8 | length u32 LE | checksum u32 LE | payload: `length` bytes of JSON
//! ```
//!
//! The first four bytes stay what they are in every version, so that any build can tell any other its version.
//! Within a major version, fields that are missing take defaults and fields that are unknown are ignored. The
//! checksum is the last 32 bits of the payload's digest: a damaged id would otherwise be another prompt.

use std::fmt;

use graph::Digester;

use super::message::Message;

/// Messages of another major version are refused.
pub const MAJOR: u8 = 1;
/// Counts additions within the major version.
pub const MINOR: u16 = 2;
/// Most bytes of a payload.
pub const MAX_PAYLOAD: usize = 64 << 20;
/// Bytes before the payload.
pub const HEADER: usize = 12;

const MAGIC: &[u8; 3] = b"RHL";

/// The frame of a message.
///
/// # Errors
/// [`WireError::TooLong`] if its payload is longer than [`MAX_PAYLOAD`].
pub fn encode(message: &Message) -> Result<Vec<u8>, WireError> {
    let mut frame = vec![0; HEADER];
    serde_json::to_writer(&mut frame, message).expect("messages have text keys and no other way to fail");
    let length = frame.len() - HEADER;
    if length > MAX_PAYLOAD {
        return Err(WireError::TooLong { length: length as u64, limit: MAX_PAYLOAD });
    }
    let sum = checksum(&frame[HEADER..]);
    frame[..3].copy_from_slice(MAGIC);
    frame[3] = MAJOR;
    frame[4..8].copy_from_slice(&(length as u32).to_le_bytes());
    frame[8..HEADER].copy_from_slice(&sum.to_le_bytes());
    Ok(frame)
}

/// The part of a digest that guards a payload.
pub fn checksum(payload: &[u8]) -> u32 {
    Digester::of(payload).0 as u32
}

/// Cuts bytes, as they come, into messages. It holds what came and never more, whatever a header claims.
pub struct Frames {
    bytes: Vec<u8>,
    /// Where the next frame starts.
    start: usize,
    limit: usize,
}

impl Frames {
    /// Frames of at most `limit` bytes of payload.
    pub fn new(limit: usize) -> Frames {
        Frames { bytes: Vec::new(), start: 0, limit }
    }

    /// Adds bytes that came.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.start);
        self.start = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// Whether nothing of a further message has come.
    pub fn is_empty(&self) -> bool {
        self.start == self.bytes.len()
    }

    /// The next message; none if it has not come whole.
    ///
    /// # Errors
    /// What is wrong with it, as soon as the bytes show it. Nothing after it can be read.
    pub fn next_message(&mut self) -> Result<Option<Message>, WireError> {
        let bytes = &self.bytes[self.start..];
        let magic = &bytes[..bytes.len().min(MAGIC.len())];
        if !MAGIC.starts_with(magic) {
            return Err(WireError::Magic { found: bytes[..bytes.len().min(16)].to_vec() });
        }
        if let Some(&major) = bytes.get(3).filter(|major| **major != MAJOR) {
            return Err(WireError::Major { ours: MAJOR, theirs: major });
        }
        let Some(length) = number(bytes, 4) else { return Ok(None) };
        if length as usize > self.limit {
            return Err(WireError::TooLong { length: length.into(), limit: self.limit });
        }
        let end = HEADER + length as usize;
        let (Some(stated), Some(payload)) = (number(bytes, 8), bytes.get(HEADER..end)) else {
            return Ok(None);
        };
        let found = checksum(payload);
        if stated != found {
            return Err(WireError::Checksum { stated, found, length });
        }
        let message = serde_json::from_slice(payload)
            .map_err(|error| WireError::Payload { length, detail: error.to_string() })?;
        self.start += end;
        Ok(Some(message))
    }

    /// Lets frames be longer from here on.
    pub(super) fn raise(&mut self, limit: usize) {
        self.limit = limit;
    }
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at + 4)?;
    Some(u32::from_le_bytes(bytes.try_into().expect("four bytes")))
}

/// Why bytes are not a message.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WireError {
    /// It does not begin as a frame does.
    Magic {
        /// How it begins.
        found: Vec<u8>,
    },
    /// Another major version.
    Major {
        /// That of this build.
        ours: u8,
        /// That of the frame.
        theirs: u8,
    },
    /// The payload is longer than allowed here.
    TooLong {
        /// Its bytes.
        length: u64,
        /// Most bytes.
        limit: usize,
    },
    /// The payload was damaged on its way.
    Checksum {
        /// What the header says.
        stated: u32,
        /// What the payload has.
        found: u32,
        /// Bytes of the payload.
        length: u32,
    },
    /// The payload is no message that this version knows.
    Payload {
        /// Its bytes.
        length: u32,
        /// What is wrong.
        detail: String,
    },
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Magic { found } => {
                write!(f, "it begins with \"{}\", which no frame does", found.escape_ascii())
            }
            Self::Major { ours, theirs } => {
                write!(f, "its wire version is {theirs} and this build speaks {ours}")
            }
            Self::TooLong { length, limit } => {
                write!(f, "its payload has {length} bytes; at most {limit} are allowed")
            }
            Self::Checksum { stated, found, length } => write!(
                f,
                "its {length} bytes of payload have the checksum {found:08x} and its header says {stated:08x}"
            ),
            Self::Payload { length, detail } => {
                write!(f, "its {length} bytes of payload are no message of wire version {MAJOR}: {detail}")
            }
        }
    }
}

impl std::error::Error for WireError {}
