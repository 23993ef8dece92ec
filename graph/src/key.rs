//! The round key: what a captured graph froze. Equal keys may share a graph.

use std::fmt;

use smallvec::SmallVec;

use crate::digest::Digest;

/// Everything that the launches of a captured body depend on. Whatever varies under one key is staged or
/// resident; a property test emits rounds of equal keys and compares their emission digests.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// What the body is, such as "decode": everything of its shape that the fields below do not say.
    pub kind: &'static str,
    /// The buffers of consecutive rows, in order.
    pub buffers: SmallVec<[Buffers; 4]>,
    /// Version of the layout of what is staged.
    pub layout: u32,
    /// Epoch of the working buffers.
    pub scratch: u64,
    /// Epoch of the weights.
    pub weights: u64,
    /// Epoch of the communicator; 0 without one.
    pub communicator: u64,
    /// How work is split over ranks; 0 on one rank.
    pub split: u32,
}

/// Consecutive rows that share a buffer digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Buffers {
    /// The digest of the buffers: every address, stride, capacity and type that is baked for these rows.
    pub digest: Digest,
    /// How many rows.
    pub rows: u32,
}

impl Key {
    /// Rows in all: no field of its own, because those of the buffers say it.
    pub fn rows(&self) -> u32 {
        self.buffers.iter().map(|buffers| buffers.rows).sum()
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} rows", self.kind, self.rows())?;
        for buffers in &self.buffers {
            write!(f, ", {} on {:.12}", buffers.rows, buffers.digest)?;
        }
        Ok(())
    }
}
