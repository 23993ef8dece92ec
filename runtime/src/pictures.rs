//! Pictures in requests: what a front end must know of an opened model to make [`Media`](crate::request::Media) of them.

use std::fmt::Display;

use vision::{
    Clip, ContentKey, Expanded, MediaIds, Medium, Patches, Picture, PictureError, Preprocess, VideoSettings,
    expand, picture_patches,
};

use crate::error::Error;
use crate::request::Media;

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

/// A picture or a clip whose pixels are there, for a prompt.
#[derive(Clone, Debug)]
pub enum Decoded {
    /// A still picture.
    Picture(Picture),
    /// A clip, prepared as [`Sight::video`] says.
    Clip(Clip),
}

impl Sight {
    /// Pictures and clips in the places of their placeholders, of which `ids` hold one for each: ids with one for each row,
    /// and what they stand for as the engine takes it. `tokenize` gives the ids of a clip's time stamps.
    ///
    /// # Errors
    /// A picture cannot be prepared: which, and why. Or there are not as many placeholders of a kind as there are of
    /// that kind to show.
    pub fn place<E: Display>(
        &self,
        ids: &[u32],
        shown: &[Decoded],
        tokenize: impl FnMut(&str) -> Result<Vec<u32>, E>,
    ) -> Result<(Vec<u32>, Vec<Media>), Error> {
        let wrong = |why: &dyn Display| Error::Prompt(why.to_string());
        let prepared = shown.iter().enumerate().map(|(number, shown)| {
            self.prepare(shown).map_err(|why| wrong(&format!("picture {number}: {why}")))
        });
        let prepared = prepared.collect::<Result<Vec<_>, Error>>()?;
        let media: Vec<Medium> = prepared.iter().map(|(medium, ..)| medium.clone()).collect();
        let Expanded { ids, spans } =
            expand(ids, &media, self.picture.merge, &self.ids, tokenize).map_err(|why| wrong(&why))?;
        let media = (0..).zip(prepared);
        let media = media.map(|(at, (_, patches, key))| Media::of(at, &spans, patches.into(), key));
        Ok((ids, media.collect()))
    }

    fn prepare(&self, shown: &Decoded) -> Result<(Medium, Patches, ContentKey), PictureError> {
        match shown {
            Decoded::Picture(picture) => {
                let patches = picture_patches(picture, &self.picture)?;
                let key = ContentKey::of_picture(picture, &self.picture);
                Ok((Medium::Picture { grid: patches.grid }, patches, key))
            }
            Decoded::Clip(Clip { patches, stamps, key }) => {
                let medium = Medium::Video { grid: patches.grid, stamps: stamps.clone() };
                Ok((medium, patches.clone(), *key))
            }
        }
    }
}
