//! Pictures in requests: what a front end must know of an opened model to make [`Media`](crate::request::Media) of them.

use vision::{MediaIds, Preprocess, VideoSettings};

/// How an opened model sees.
#[derive(Clone, Debug)]
pub struct Sight {
    /// How a picture becomes patches.
    pub picture: Preprocess,
    /// How a clip does.
    pub video: VideoSettings,
    /// The ids that stand for them in a prompt.
    pub ids: MediaIds,
    /// Patches that the tower takes at once: of one picture, or of one clip.
    pub most_patches: usize,
}
