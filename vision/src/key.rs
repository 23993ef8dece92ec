//! Which pictures are the same? A key for everything that the tower's features depend on.

use sha2::{Digest, Sha256};

use crate::{Picture, Preprocess};

/// 128 bits of SHA-256 over pixels, size, times and settings. Pictures of different content have different keys, also for
/// someone who would like them not to: features of one caller's picture are never shown to another's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ContentKey(pub [u8; 16]);

impl ContentKey {
    /// The key of a still picture that is prepared by `settings`.
    pub fn of_picture(picture: &Picture, settings: &Preprocess) -> ContentKey {
        let mut hash = begin(b"picture", settings);
        add(&mut hash, picture);
        end(hash)
    }

    pub(crate) fn of_frames(frames: &[Picture], seconds: &[f64], settings: &Preprocess) -> ContentKey {
        let mut hash = begin(b"video..", settings);
        for (frame, seconds) in frames.iter().zip(seconds) {
            hash.update(seconds.to_bits().to_le_bytes());
            add(&mut hash, frame);
        }
        end(hash)
    }
}

impl std::fmt::Display for ContentKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Everything in front of the pixels has a fixed length, so no two contents give the same bytes.
fn begin(kind: &[u8; 7], settings: &Preprocess) -> Sha256 {
    let Preprocess { patch, merge, frames, min_pixels, max_pixels } = *settings;
    let mut hash = Sha256::new();
    hash.update(kind);
    for number in [patch.into(), merge.into(), frames.into(), min_pixels, max_pixels] {
        hash.update(number.to_le_bytes());
    }
    hash
}

fn add(hash: &mut Sha256, picture: &Picture) {
    hash.update(picture.width().to_le_bytes());
    hash.update(picture.height().to_le_bytes());
    hash.update(picture.rgb());
}

fn end(hash: Sha256) -> ContentKey {
    let digest = hash.finalize();
    let mut key = [0; 16];
    key.copy_from_slice(&digest[..16]);
    ContentKey(key)
}
