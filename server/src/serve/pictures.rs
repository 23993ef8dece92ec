//! Pictures of requests, decoded: few at once, in memory that is counted, and for nobody who has left.

use std::sync::Arc;

use runtime::request::Media;
use tokio::sync::OwnedSemaphorePermit;

use super::asked::{Asked, Prompt};
use super::errors::ApiError;
use super::state::{App, Model};
use crate::pictures::{Decoding, Refused, Step};

/// Memory that the pictures of a request hold, until all of it is dropped.
pub(crate) type Held = Arc<OwnedSemaphorePermit>;

/// Decodes the pictures of a request, file by file. Dropping the future ends it behind the file that is being decoded.
pub(crate) async fn decode(app: &App, model: &Model, asked: &mut Asked) -> Result<(), ApiError> {
    let Some(sight) = &model.sight else { return Ok(()) };
    asked.held = hold(app, &asked.prompts)?;
    let limits = app.settings.pictures().limits;
    for prompt in &mut asked.prompts {
        for (number, planned) in std::mem::take(&mut prompt.planned).into_iter().enumerate() {
            let decoding = Decoding::new(planned, sight.clone(), limits);
            let (patches, key) = whole(app, decoding, asked.held.clone()).await?;
            prompt.media.push(Media::of(number, &prompt.spans, patches, key));
        }
    }
    Ok(())
}

/// Takes memory for the pictures of some prompts, if they have any.
fn hold(app: &App, prompts: &[Prompt]) -> Result<Option<Held>, ApiError> {
    let pictures = || prompts.iter().flat_map(|prompt| &prompt.planned);
    if pictures().next().is_none() {
        return Ok(None);
    }
    let bytes = pictures().fold(0_usize, |sum, picture| sum.saturating_add(picture.held_bytes()));
    let (kib, most) = (bytes.div_ceil(1 << 10), app.settings.picture_memory_kib());
    if kib > most {
        let why = format!(
            "the pictures take {kib} KiB of memory until the model has seen them; {most} KiB are given \
             (--picture-memory); send fewer or smaller ones"
        );
        return Err(app.unseen(Refused::new("messages", why)));
    }
    let permits = u32::try_from(kib).ok().map(|kib| app.picture_memory.clone().try_acquire_many_owned(kib));
    match permits {
        Some(Ok(held)) => Ok(Some(Arc::new(held))),
        _ => Err(ApiError::full(format!(
            "pictures of other requests hold the memory that there is for them ({most} KiB, --picture-memory); try again \
             later"
        ))),
    }
}

/// Decodes a picture or a clip. What is held stays so as long as a thread works for it.
async fn whole(
    app: &App,
    mut decoding: Decoding,
    held: Option<Held>,
) -> Result<(Arc<vision::Patches>, vision::ContentKey), ApiError> {
    let fault = |_| ApiError::failed("internal", "decoding a picture met a fault of our own");
    loop {
        let turn = app.picture_reader.clone().acquire_owned().await.ok();
        let beside = (turn, held.clone());
        let work = move || {
            let step = decoding.step();
            drop(beside);
            (decoding, step)
        };
        let (rest, step) = tokio::task::spawn_blocking(work).await.map_err(fault)?;
        decoding = rest;
        let step = step.map_err(|why| app.unseen(why))?;
        app.metrics.picture(true);
        if let Step::Whole(patches, key) = step {
            return Ok((patches, key));
        }
    }
}

impl App {
    /// Counts a picture that is not taken; what its client is told.
    pub(crate) fn unseen(&self, refused: Refused) -> ApiError {
        self.metrics.picture(false);
        ApiError::field(refused.place, refused.why)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use runtime::pictures::Sight;
    use vision::{MediaIds, Preprocess, VideoSettings};

    use super::*;
    use crate::pictures::{Allowed, Content, Sent, look};
    use crate::serve::Settings;

    /// A clip of `frames` frames whose decoding takes its time.
    fn clip(frames: usize) -> Decoding {
        let mut file = Vec::new();
        let frame = image::RgbImage::from_fn(800, 600, |x, y| image::Rgb([(x * y) as u8, x as u8, y as u8]));
        frame.write_to(&mut std::io::Cursor::new(&mut file), image::ImageFormat::Png).unwrap();
        let content = Content::Clip { frames: vec![file; frames], fps: 2.0 };
        let allowed = Allowed::default();
        let looked = look(vec![Sent { place: "clip".into(), content }], &allowed).unwrap().remove(0);
        let ids = MediaIds { image: 1, video: 2, start: 3, end: 4 };
        let (picture, video) = (Preprocess::PICTURE, VideoSettings::default());
        let sight = Arc::new(Sight { picture, video, ids, most_patches: 1 << 20 });
        Decoding::new(looked.plan(&sight).unwrap(), sight, allowed.limits)
    }

    #[tokio::test]
    async fn nothing_more_is_decoded_for_whoever_has_left() {
        let app = App::new(Settings::default());
        let decoded = || app.metrics.pictures_decoded();
        assert!(whole(&app, clip(3), None).await.is_ok());
        assert_eq!(decoded(), 3);
        // It waits for a thread, and has left before the first file is done.
        let left = tokio::time::timeout(Duration::from_millis(1), whole(&app, clip(40), None)).await;
        assert!(left.is_err());
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(decoded() < 10, "{}", decoded());
        assert_eq!(app.picture_reader.available_permits(), 2, "turns are given back");
    }

    #[tokio::test]
    async fn memory_is_held_while_a_thread_works_and_no_longer() {
        let app = App::new(Settings { picture_memory: 1 << 20, ..Settings::default() });
        let held = app.picture_memory.clone().try_acquire_many_owned(1000).unwrap();
        let left =
            tokio::time::timeout(Duration::from_millis(1), whole(&app, clip(40), Some(held.into()))).await;
        assert!(left.is_err());
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(app.picture_memory.available_permits(), 1024);
    }
}
