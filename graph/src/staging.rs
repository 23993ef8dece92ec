//! The upload ring: pinned buffers written by the host in turn, each fenced by an event.
//!
//! ```text
//! turn 0   write A | copy A queued | event A
//! turn 1   write B | copy B queued | event B       (copy A may still be waiting to run)
//! turn 2   wait for event A, then write A ...
//! ```

use crate::Ptr;
use crate::arena::Pinned;
use crate::device::Device;
use crate::emission::Emission;
use crate::error::{Error, Result};
use crate::stream::{Event, Stream};

/// How many buffers there are: one being read by the device, one being written by the host.
pub const DEPTH: usize = 2;

/// A ring of [`DEPTH`] pinned buffers.
pub struct Staging {
    buffers: [(Pinned, Event); DEPTH],
    turn: usize,
}

impl Staging {
    /// A ring of buffers of `bytes` bytes.
    pub fn new(device: &Device, label: &str, bytes: usize) -> Result<Staging> {
        let buffer = || device.pinned(label, bytes).map(|pinned| (pinned, device.event()));
        Ok(Staging { buffers: [buffer()?, buffer()?], turn: 0 })
    }

    /// Size of one buffer in bytes.
    pub fn bytes(&self) -> usize {
        self.buffers[0].0.bytes()
    }

    /// Lets `fill` write the next buffer and queues one copy of its first `bytes` bytes to `to`. Waits, if
    /// it must, until the copy of two turns ago has run. `fill` must not call the device: it would wait for
    /// itself.
    pub fn upload(
        &mut self,
        stream: &Stream,
        to: Ptr<u8>,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<()> {
        let (pinned, event) = &mut self.buffers[self.turn];
        if bytes > pinned.bytes() {
            let why = format!("{bytes} bytes do not fit a staging buffer of {}", pinned.bytes());
            return Err(Error::Size { call: "upload", why });
        }
        event.synchronize()?;
        pinned.write(|buffer| fill(&mut buffer[..bytes]));
        let mut emission = Emission::new();
        emission.copy(to, pinned.base(), bytes);
        stream.run(emission, &[])?;
        stream.record(event)?;
        self.turn = (self.turn + 1) % DEPTH;
        Ok(())
    }
}
