//! 128-bit digests of buffers, emissions and state: equal digests stand for equal bytes.
//!
//! The hash is XXH3-128: fast, and strong against accident; nothing here defends against an adversary.

use std::fmt;

use xxhash_rust::xxh3::Xxh3;

/// A 128-bit digest. Prints as 32 hex digits, or as its first 12 with `{:.12}`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Digest(pub u128);

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{:032x}", self.0))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:.12}")
    }
}

/// Builds a [`Digest`] from fields. Runs of bytes are framed by their length and numbers have one width, so
/// two lists with the same kinds of fields in the same order feed the hash the same bytes only if they are
/// equal. Where the kinds vary, a number that says which comes first.
#[derive(Clone, Default)]
pub struct Digester {
    hash: Xxh3,
}

impl Digester {
    /// An empty digester.
    pub fn new() -> Self {
        Self::default()
    }

    /// The digest of one run of bytes.
    pub fn of(bytes: &[u8]) -> Digest {
        Self::new().bytes(bytes).finish()
    }

    /// Adds a run of bytes.
    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.hash.update(&(bytes.len() as u64).to_le_bytes());
        self.hash.update(bytes);
        self
    }

    /// Adds a text.
    pub fn text(&mut self, text: &str) -> &mut Self {
        self.bytes(text.as_bytes())
    }

    /// Adds a number.
    pub fn number(&mut self, number: u64) -> &mut Self {
        self.hash.update(&number.to_le_bytes());
        self
    }

    /// Adds another digest.
    pub fn digest(&mut self, digest: Digest) -> &mut Self {
        self.hash.update(&digest.0.to_le_bytes());
        self
    }

    /// The digest of everything added so far.
    pub fn finish(&self) -> Digest {
        Digest(self.hash.digest128())
    }
}
