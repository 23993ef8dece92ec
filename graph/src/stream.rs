//! Streams and events: order within a stream, edges between streams.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::arena::Arena;
use crate::emission::Emission;
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::host::{Host, Queue, Target, Work};

/// A queue of work on one device. Work runs in order, and not before something waits for it.
#[derive(Clone)]
pub struct Stream {
    pub(crate) host: Arc<Host>,
    pub(crate) queue: Arc<Queue>,
}

impl Stream {
    pub(crate) fn on_host(host: &Arc<Host>) -> Stream {
        Stream { host: host.clone(), queue: Arc::default() }
    }

    /// Queues every entry of `emission`; or, while this stream is being captured, records them.
    /// `keeps` are the arenas it points into: they stay until it has run.
    ///
    /// # Errors
    /// Work failed earlier; or `keeps` are arenas of another device.
    pub fn run(&self, emission: Emission, keeps: &[Arena]) -> Result<()> {
        self.host.healthy()?;
        self.host.refuse_foreign("running work", keeps)?;
        if let Some(capture) = self.host.capture.lock().as_mut()
            && Arc::ptr_eq(&capture.queue, &self.queue)
        {
            capture.emission.append(&emission);
            capture.keeps.extend_from_slice(keeps);
            return Ok(());
        }
        self.queue.push_run(&self.host, Arc::new(emission), keeps.to_vec());
        Ok(())
    }

    /// Queues a replay of `exec`.
    ///
    /// # Errors
    /// This stream is being captured; work failed earlier; or `exec` is of another device.
    pub fn replay(&self, exec: &Exec) -> Result<()> {
        self.host.healthy()?;
        self.refuse_other_device("a replay", exec.host())?;
        self.refuse_in_own_capture("a replay")?;
        self.queue.push_run(&self.host, exec.emission().clone(), exec.keeps().to_vec());
        Ok(())
    }

    /// Marks this point of the stream in `event`.
    ///
    /// # Errors
    /// This stream is being captured; or `event` is of another device.
    pub fn record(&self, event: &Event) -> Result<()> {
        self.refuse_other_device("recording an event", &event.host)?;
        self.refuse_in_own_capture("recording an event")?;
        *event.target.lock() = Some(self.queue.tail());
        Ok(())
    }

    /// Makes later work of this stream wait for the point that `event` marks now.
    ///
    /// # Errors
    /// This stream is being captured; or `event` is of another device.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.refuse_other_device("waiting for an event", &event.host)?;
        self.refuse_in_own_capture("waiting for an event")?;
        if let Some(target) = event.target.lock().clone() {
            self.queue.push(Work::Wait(target));
        }
        Ok(())
    }

    /// Runs everything queued so far.
    ///
    /// # Errors
    /// A capture is in progress; or work failed, now or earlier.
    pub fn synchronize(&self) -> Result<()> {
        self.host.refuse_in_capture("synchronisation")?;
        self.queue.tail().run(&self.host)
    }

    /// Runs the next `items` queued items, as a device does that is busy meanwhile. Tests draw the moment.
    pub fn advance(&self, items: usize) -> Result<()> {
        self.queue.after(items as u64).run(&self.host)
    }

    fn refuse_other_device(&self, call: &'static str, of: &Arc<Host>) -> Result<()> {
        match Arc::ptr_eq(of, &self.host) {
            true => Ok(()),
            false => Err(Error::OtherDevice { call }),
        }
    }

    fn refuse_in_own_capture(&self, call: &'static str) -> Result<()> {
        match self.host.capture.lock().as_mut() {
            Some(capture) if Arc::ptr_eq(&capture.queue, &self.queue) => {
                capture.broken.get_or_insert_with(|| format!("{call} was asked for inside it"));
                Err(Error::Capturing { call, capture: capture.label.clone() })
            }
            _ => Ok(()),
        }
    }
}

/// A point in a stream.
pub struct Event {
    host: Arc<Host>,
    target: Mutex<Option<Target>>,
}

impl Event {
    pub(crate) fn on_host(host: &Arc<Host>) -> Event {
        Event { host: host.clone(), target: Mutex::new(None) }
    }

    /// Whether the marked point has been reached; true for an event never recorded.
    pub fn reached(&self) -> bool {
        self.target.lock().as_ref().is_none_or(Target::reached)
    }

    /// Waits until the marked point is reached.
    ///
    /// # Errors
    /// A capture is in progress; or work failed, now or earlier.
    pub fn synchronize(&self) -> Result<()> {
        self.host.refuse_in_capture("synchronisation")?;
        let target = self.target.lock().clone();
        target.map_or_else(|| self.host.healthy(), |target| target.run(&self.host))
    }
}
