//! Pictures in requests: what a front end must know of an opened model to make [`Media`](crate::request::Media) of them.

use std::fmt::Display;

use vision::{
    ContentKey, Expanded, MediaIds, Medium, Picture, Preprocess, VideoSettings, expand, picture_patches,
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

impl Sight {
    /// Pictures in the places of their placeholders, of which `ids` hold one for each: ids with one for each row, and
    /// the pictures as the engine takes them.
    ///
    /// # Errors
    /// A picture cannot be prepared: which, and why. Or there are not as many placeholders as pictures.
    pub fn place(&self, ids: &[u32], pictures: &[Picture]) -> Result<(Vec<u32>, Vec<Media>), Error> {
        let wrong = |why: &dyn Display| Error::Prompt(why.to_string());
        let patches = pictures.iter().enumerate().map(|(number, picture)| {
            picture_patches(picture, &self.picture).map_err(|why| wrong(&format!("picture {number}: {why}")))
        });
        let patches = patches.collect::<Result<Vec<_>, Error>>()?;
        let media: Vec<Medium> =
            patches.iter().map(|patches| Medium::Picture { grid: patches.grid }).collect();
        let stamp = |_: &str| Err("a picture has no time");
        let Expanded { ids, spans } =
            expand(ids, &media, self.picture.merge, &self.ids, stamp).map_err(|why| wrong(&why))?;
        let key = |picture| ContentKey::of_picture(picture, &self.picture);
        let all = (0..).zip(pictures).zip(patches);
        let media = all.map(|((at, picture), patches)| Media::of(at, &spans, patches.into(), key(picture)));
        Ok((ids, media.collect()))
    }
}
