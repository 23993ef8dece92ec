//! The short digest that stands for a list of token ids in reports.

use sha2::{Digest, Sha256};

/// The first 12 hex digits of SHA-256 over `ids` as little-endian u32. Equal digests mean equal
/// tokens, so two runs are compared by looking at two short words.
pub fn token_sha(ids: &[u32]) -> String {
    let mut hasher = Sha256::new();
    for id in ids {
        hasher.update(id.to_le_bytes());
    }
    hasher.finalize()[..6].iter().map(|byte| format!("{byte:02x}")).collect()
}
