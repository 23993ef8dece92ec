//! What every device keeps beside memory and queues: the capture in progress and the first fault. Both
//! devices refuse the same calls in the same words because both ask here.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::arena::Arena;
use crate::emission::Emission;
use crate::error::{Error, Fault, Result};

/// The state that every handle to one device shares.
#[derive(Default)]
pub(crate) struct State {
    capture: Mutex<Option<Capture>>,
    fault: Mutex<Option<Fault>>,
    planted: PlantedFault,
}

/// A fault to plant, for the suites that prove what follows from one.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// Every capture fails at this entry, if it has so many.
    Capture(usize),
    /// After so many entries the next one fails when it is launched, once. To a CUDA device a replay is one entry.
    Launch(usize),
}

/// Where the next fault is: none if [`NOWHERE`].
struct PlantedFault {
    capture: AtomicU64,
    launch: AtomicU64,
}

const NOWHERE: u64 = u64::MAX;

impl Default for PlantedFault {
    fn default() -> Self {
        PlantedFault { capture: AtomicU64::new(NOWHERE), launch: AtomicU64::new(NOWHERE) }
    }
}

/// A stream of a device, by the address of its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamId(usize);

impl StreamId {
    pub(crate) fn of<T>(queue: &Arc<T>) -> StreamId {
        StreamId(Arc::as_ptr(queue) as usize)
    }
}

/// A capture in progress.
pub(crate) struct Capture {
    pub(crate) label: String,
    pub(crate) emission: Emission,
    /// The arenas that the recorded work was run with.
    pub(crate) keeps: Vec<Arena>,
    /// The first thing that broke the capture.
    pub(crate) broken: Option<String>,
    /// The stream being captured.
    stream: StreamId,
}

impl State {
    /// Begins the capture of `stream`.
    pub(crate) fn begin(&self, stream: StreamId, label: String) -> Result<()> {
        // One lock for the check and the start, or two threads could both begin.
        let mut current = self.capture.lock();
        refuse(&mut current, "beginning another capture")?;
        let (emission, keeps) = (Emission::new(), Vec::new());
        *current = Some(Capture { label, emission, keeps, broken: None, stream });
        Ok(())
    }

    /// Ends the capture in progress.
    pub(crate) fn end(&self) -> Option<Capture> {
        self.capture.lock().take()
    }

    /// Records `emission` if `stream` is being captured; whether it is.
    pub(crate) fn record(&self, stream: StreamId, emission: &Emission, keeps: &[Arena]) -> bool {
        match self.capture.lock().as_mut() {
            Some(capture) if capture.stream == stream => {
                capture.emission.append(emission);
                capture.keeps.extend_from_slice(keeps);
                true
            }
            _ => false,
        }
    }

    /// Refuses `call` during a capture, and breaks the capture, as CUDA does.
    pub(crate) fn refuse_in_capture(&self, call: &'static str) -> Result<()> {
        refuse(&mut self.capture.lock(), call)
    }

    /// Refuses `call` on `stream` while that stream is being captured, and breaks the capture.
    pub(crate) fn refuse_in_own_capture(&self, stream: StreamId, call: &'static str) -> Result<()> {
        match self.capture.lock().as_mut() {
            Some(capture) if capture.stream == stream => {
                capture.broken.get_or_insert_with(|| format!("{call} was asked for inside it"));
                Err(Error::Capturing { call, capture: capture.label.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Notes that the capture of `stream`, if it is captured, lacks something.
    pub(crate) fn break_capture(&self, stream: StreamId, why: impl FnOnce() -> String) {
        if let Some(capture) = self.capture.lock().as_mut()
            && capture.stream == stream
        {
            capture.broken.get_or_insert_with(why);
        }
    }

    /// Plants a fault, instead of the one before.
    pub(crate) fn plant(&self, fault: Option<Planted>) {
        let (capture, launch) = match fault {
            None => (NOWHERE, NOWHERE),
            Some(Planted::Capture(at)) => (at as u64, NOWHERE),
            Some(Planted::Launch(after)) => (NOWHERE, after as u64),
        };
        self.planted.capture.store(capture, Ordering::Relaxed);
        self.planted.launch.store(launch, Ordering::Relaxed);
    }

    /// The entry at which a capture of `entries` entries is to fail.
    pub(crate) fn capture_fails_at(&self, entries: usize) -> Option<usize> {
        let at = self.planted.capture.load(Ordering::Relaxed);
        (at < entries as u64).then_some(at as usize)
    }

    /// The entry at which a launch of `entries` entries is to fail.
    pub(crate) fn launch_fails_at(&self, entries: usize) -> Option<usize> {
        let left = self.planted.launch.load(Ordering::Relaxed);
        if left == NOWHERE {
            return None;
        }
        let due = left < entries as u64;
        self.planted.launch.store(if due { NOWHERE } else { left - entries as u64 }, Ordering::Relaxed);
        due.then_some(left as usize)
    }

    /// The sticky fault as an error.
    pub(crate) fn healthy(&self) -> Result<()> {
        match &*self.fault.lock() {
            None => Ok(()),
            Some(fault) => Err(Error::Fault(fault.clone())),
        }
    }

    /// Notes a fault. The first one stays, and is returned.
    pub(crate) fn fail(&self, fault: Fault) -> Error {
        Error::Fault(self.fault.lock().get_or_insert(fault).clone())
    }
}

fn refuse(current: &mut Option<Capture>, call: &'static str) -> Result<()> {
    match current {
        None => Ok(()),
        Some(capture) => {
            capture.broken.get_or_insert_with(|| format!("{call} was called inside it"));
            Err(Error::Capturing { call, capture: capture.label.clone() })
        }
    }
}
