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
        let mut key = KeyBuilder::new(b"picture", settings);
        key.add(picture);
        key.finish()
    }
}

impl std::fmt::Display for ContentKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Takes content piece by piece. Everything but pixels has a fixed length, and sizes come before pixels, so no two contents
/// give the same bytes.
pub(crate) struct KeyBuilder {
    hash: Sha256,
}

impl KeyBuilder {
    /// For the frames of a video.
    pub(crate) fn video(settings: &Preprocess) -> Self {
        Self::new(b"video..", settings)
    }

    fn new(kind: &[u8; 7], settings: &Preprocess) -> Self {
        let Preprocess { patch, merge, frames, min_pixels, max_pixels } = *settings;
        let mut hash = Sha256::new();
        hash.update(kind);
        for number in [patch.into(), merge.into(), frames.into(), min_pixels, max_pixels] {
            hash.update(number.to_le_bytes());
        }
        Self { hash }
    }

    pub(crate) fn add_frame(&mut self, frame: &Picture, seconds: f64) {
        self.hash.update(seconds.to_bits().to_le_bytes());
        self.add(frame);
    }

    fn add(&mut self, picture: &Picture) {
        self.hash.update(picture.width().to_le_bytes());
        self.hash.update(picture.height().to_le_bytes());
        self.hash.update(picture.rgb());
    }

    pub(crate) fn finish(self) -> ContentKey {
        let digest = self.hash.finalize();
        let mut key = [0; 16];
        key.copy_from_slice(&digest[..16]);
        ContentKey(key)
    }
}
