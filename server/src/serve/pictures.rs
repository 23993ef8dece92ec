//! Pictures of requests, decoded: few at once, in memory that is counted, and for nobody who has left.

use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;

use super::asked::{Asked, Prompt};
use super::errors::ApiError;
use super::state::{App, Model};
use crate::pictures::{Decoding, Refused, Step, media};

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
            prompt.media.push(media(number, &prompt.spans, patches, key));
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
