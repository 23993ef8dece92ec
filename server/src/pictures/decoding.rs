//! Pixels: a picture or a clip is decoded file by file, so that whoever waits for it can stop between two.

use std::sync::Arc;

use runtime::pictures::Sight;
use vision::{Clip, ClipBuilder, ContentKey, Limits, Medium, Patches, PictureError, decode, picture_patches};

use super::{Content, Planned, Refused};

/// A picture or a clip being decoded.
pub(crate) struct Decoding {
    planned: Planned,
    sight: Arc<Sight>,
    limits: Limits,
    /// The next file.
    next: usize,
    clip: Option<ClipBuilder>,
}

/// What one file brought.
pub(crate) enum Step {
    /// Another file is to be decoded.
    More,
    /// It is whole.
    Whole(Arc<Patches>, ContentKey),
}

impl Decoding {
    pub(crate) fn new(planned: Planned, sight: Arc<Sight>, limits: Limits) -> Decoding {
        Decoding { planned, sight, limits, next: 0, clip: None }
    }

    /// Decodes one file, and forgets its bytes.
    pub(crate) fn step(&mut self) -> Result<Step, Refused> {
        let (at, place) = (self.next, self.planned.sent.file_place(self.next));
        self.next += 1;
        self.file(at).map_err(|why| Refused::new(place, why))
    }

    /// Decodes all files that are left.
    pub(crate) fn whole(mut self) -> Result<(Arc<Patches>, ContentKey), Refused> {
        loop {
            if let Step::Whole(patches, key) = self.step()? {
                return Ok((patches, key));
            }
        }
    }

    fn file(&mut self, at: usize) -> Result<Step, PictureError> {
        let Planned { sent, size, medium, seconds, .. } = &mut self.planned;
        let (patches, key) = match &mut sent.content {
            Content::Picture(file) => {
                let picture = decode(&std::mem::take(file), &self.limits)?;
                let key = ContentKey::of_picture(&picture, &self.sight.picture);
                (picture_patches(&picture, &self.sight.picture)?, key)
            }
            Content::Clip { frames, .. } => {
                let picture = decode(&std::mem::take(&mut frames[at]), &self.limits)?;
                let clip = match &mut self.clip {
                    Some(clip) => clip,
                    none => none.insert(ClipBuilder::new(*size, seconds.clone(), &self.sight.video)?),
                };
                clip.push(&picture)?;
                let Some(clip) = self.clip.take_if(|_| at + 1 == frames.len()) else { return Ok(Step::More) };
                let Clip { patches, key, .. } = clip.finish()?;
                (patches, key)
            }
        };
        let (Medium::Picture { grid } | Medium::Video { grid, .. }) = medium;
        assert_eq!(patches.grid, *grid, "a picture is as large as its header says, or it was refused");
        Ok(Step::Whole(Arc::new(patches), key))
    }
}
