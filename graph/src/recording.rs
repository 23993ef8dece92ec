//! The guard around one capture: it ends the capture however the body leaves.

use crate::arena::Arena;
use crate::emission::Emission;
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::host::Capture;
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
        stream.host.refuse_in_capture("beginning another capture")?;
        stream.host.healthy()?;
        let (label, queue) = (label.into(), stream.queue.clone());
        *stream.host.capture.lock() = Some(Capture { label, emission: Emission::new(), queue, broken: None });
        Ok(Recording { stream })
    }

    /// Ends the capture. The exec holds `keeps`: the arenas that the recorded addresses point into.
    ///
    /// # Errors
    /// Something refused was called during the capture; it is lost, and nothing else is.
    pub fn finish(self, keeps: Vec<Arena>) -> Result<Exec> {
        let capture = self.stream.host.capture.lock().take().expect("a recording owns the capture");
        match capture.broken {
            Some(why) => Err(Error::CaptureFailed { capture: capture.label, why }),
            None => Ok(Exec::new(capture.label, capture.emission, keeps)),
        }
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        // `finish` has already taken it; no other capture can have begun while `self` was alive.
        self.stream.host.capture.lock().take();
    }
}
