//! The guard around one capture: it ends the capture however the body leaves.

use crate::arena::Arena;
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::stream::Stream;

/// A capture in progress on one stream. [`Recording::finish`] makes the exec; dropping it instead throws
/// the half-made capture away and leaves the stream usable.
#[must_use = "a recording that is dropped captures nothing"]
pub struct Recording<'s> {
    stream: &'s Stream,
}

impl<'s> Recording<'s> {
    /// Begins capturing `stream`: what is run on it is recorded instead of queued.
    ///
    /// # Errors
    /// Another capture of this device is in progress.
    pub fn begin(stream: &'s Stream, label: impl Into<String>) -> Result<Recording<'s>> {
        stream.device().state().healthy()?;
        stream.device().state().begin(stream.id(), label.into())?;
        Ok(Recording { stream })
    }

    /// Ends the capture. The exec holds `keeps`, the arenas that the recorded addresses point into, and
    /// those that [`Stream::run`] was given meanwhile.
    ///
    /// # Errors
    /// Something refused was called during the capture, or the device could not make a graph of it; it is
    /// lost, and nothing else is.
    pub fn finish(self, mut keeps: Vec<Arena>) -> Result<Exec> {
        let device = self.stream.device();
        let capture = device.state().end().expect("a recording owns the capture");
        let stream = self.stream;
        // From here on another thread may capture, and dropping `self` would end its capture.
        std::mem::forget(self);
        if let Some(why) = capture.broken {
            return Err(Error::CaptureFailed { capture: capture.label, why });
        }
        device.state().healthy()?;
        keeps.extend(capture.keeps);
        keeps.sort_by_key(Arena::epoch);
        keeps.dedup_by_key(|arena| arena.epoch());
        device.refuse_foreign("finishing a capture", &keeps)?;
        let form = stream.instantiate(&capture.label, &capture.emission)?;
        Ok(Exec::new(device.clone(), capture.label, capture.emission, keeps, form))
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        // Only an unfinished recording is dropped, and no other can have begun while it was alive.
        self.stream.device().state().end();
    }
}
