//! Why a safetensors header was refused.

use std::fmt;

/// What is wrong in a safetensors header.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum HeaderError {
    /// The file is too short to hold the header it announces.
    Short {
        /// Bytes that the header needs.
        needs: u64,
        /// Bytes that the file has.
        file_bytes: u64,
    },
    /// The announced header is larger than any real one.
    Huge {
        /// Bytes announced.
        bytes: u64,
        /// The most this build accepts.
        limit: u64,
    },
    /// Not the JSON that a header must be.
    Json {
        /// The parser's complaint.
        detail: String,
    },
    /// A tensor's byte range does not fit its type and shape.
    Size {
        /// The tensor.
        tensor: String,
        /// Its type and shape.
        what: String,
        /// The range.
        range: (usize, usize),
    },
    /// A tensor does not begin where the one before it ended.
    Offset {
        /// The tensor.
        tensor: String,
        /// Where it begins.
        begins: usize,
        /// Where it should.
        expected: usize,
    },
    /// The file is longer or shorter than its header says.
    Length {
        /// Bytes by the header.
        expected: u64,
        /// Bytes that the file has.
        found: u64,
    },
}

impl std::error::Error for HeaderError {}

impl fmt::Display for HeaderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short { needs, file_bytes } => {
                write!(
                    f,
                    "the header needs {needs} bytes and the file has {file_bytes}; it is truncated or no safetensors"
                )
            }
            Self::Huge { bytes, limit } => {
                write!(
                    f,
                    "the header would be {bytes} bytes long, beyond the limit of {limit}; this is no safetensors file"
                )
            }
            Self::Json { detail } => write!(f, "the header is damaged: {detail}"),
            Self::Size { tensor, what, range: (begin, end) } => {
                write!(f, "tensor {tensor} is {what} but its byte range is {begin}..{end}")
            }
            Self::Offset { tensor, begins, expected } => write!(
                f,
                "tensor {tensor} begins at byte {begins} of the data, {} {expected} where the one before it ends",
                if begins > expected { "leaving a gap after" } else { "overlapping" }
            ),
            Self::Length { expected, found } => write!(
                f,
                "the file has {found} bytes and its header describes {expected}; it is {}",
                if found < expected { "truncated: fetch it again" } else { "damaged or was written over" }
            ),
        }
    }
}
