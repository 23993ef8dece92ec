//! The two rings of pinned buffers between host and device, each buffer fenced by an event.
//!
//! ```text
//! upload   turn 0   write A | copy A queued | event A
//!          turn 1   write B | copy B queued | event B       (copy A may still be waiting to run)
//!          turn 2   wait for event A, then write A ...
//!
//! readback turn 0   copy into A queued | event A
//!          turn 1   copy into B queued | event B | wait for event A, take A
//!          turn 2   A was taken: copy into A queued ...
//! ```

use std::marker::PhantomData;

use bytemuck::Pod;

use crate::Ptr;
use crate::arena::{Arena, Pinned};
use crate::device::Device;
use crate::emission::Emission;
use crate::error::{Error, Result};
use crate::stream::{Event, Stream};

/// How many buffers a ring has: one for the device, one for the host.
pub const DEPTH: usize = 2;

/// The upload ring: the host writes a buffer while the device reads the other.
pub struct Staging {
    buffers: [(Pinned, Event); DEPTH],
    turn: usize,
    fenced: bool,
}

impl Staging {
    /// A ring of buffers of `bytes` bytes.
    pub fn new(device: &Device, label: &str, bytes: usize) -> Result<Staging> {
        let buffer = || device.pinned(label, bytes).map(|pinned| (pinned, device.event()));
        Ok(Staging { buffers: [buffer()?, buffer()?], turn: 0, fenced: true })
    }

    /// Size of one buffer in bytes.
    pub fn bytes(&self) -> usize {
        self.buffers[0].0.bytes()
    }

    /// Lets `fill` write the next buffer and queues one copy of its first `bytes` bytes to `to`, which lies
    /// in `keeps`. Waits, if it must, until the copy of two turns ago has run. `fill` must not call the
    /// device: it would wait for itself.
    pub fn upload(
        &mut self,
        stream: &Stream,
        to: Ptr<u8>,
        bytes: usize,
        keeps: &[Arena],
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<()> {
        let room = self.bytes();
        if bytes > room {
            let why = format!("{bytes} bytes do not fit a staging buffer of {room}");
            return Err(Error::Size { call: "upload", why });
        }
        let fill = |buffer: &mut [u8]| {
            fill(&mut buffer[..bytes]);
            Ok(())
        };
        self.send(stream, keeps, fill, |from| {
            let mut emission = Emission::new();
            emission.copy(to, from, bytes);
            Ok(emission)
        })
    }

    /// Lets `fill` write the next buffer and queues what `emit` makes of the buffer's address: work that reads
    /// it, and points into `keeps`. Waits, if it must, until the work of two turns ago has run. If either
    /// fails, nothing is queued and the same buffer is next. `fill` must not call the device: it would wait for
    /// itself.
    pub fn send<R, E: From<Error>>(
        &mut self,
        stream: &Stream,
        keeps: &[Arena],
        fill: impl FnOnce(&mut [u8]) -> std::result::Result<R, E>,
        emit: impl FnOnce(Ptr<u8>) -> std::result::Result<Emission, E>,
    ) -> std::result::Result<R, E> {
        let (pinned, event) = &mut self.buffers[self.turn];
        if self.fenced {
            event.synchronize()?;
        }
        let filled = pinned.write(fill)?;
        stream.run(emit(pinned.base())?, keeps)?;
        stream.record(event)?;
        self.turn = (self.turn + 1) % DEPTH;
        Ok(filled)
    }

    /// Plants a fault: buffers are written while their copies are pending.
    #[doc(hidden)]
    pub fn remove_fence(&mut self) {
        self.fenced = false;
    }
}

/// The read-back ring: results on their way to the host. At most [`DEPTH`] are under way.
pub struct Readback {
    buffers: [ReadbackBuffer; DEPTH],
    turn: usize,
    fenced: bool,
}

struct ReadbackBuffer {
    pinned: Pinned,
    event: Event,
    /// Whether something was read into it and not taken.
    waiting: bool,
}

/// `T`s under way through a [`Readback`]. Until they are taken, their buffer is theirs.
#[derive(Debug)]
#[must_use = "a buffer whose results nobody takes is never used again"]
pub struct Pending<T> {
    buffer: usize,
    count: usize,
    element: PhantomData<T>,
}

impl Readback {
    /// A ring of buffers of `bytes` bytes.
    pub fn new(device: &Device, label: &str, bytes: usize) -> Result<Readback> {
        let buffer = || -> Result<ReadbackBuffer> {
            let pinned = device.pinned(label, bytes)?;
            Ok(ReadbackBuffer { pinned, event: device.event(), waiting: false })
        };
        Ok(Readback { buffers: [buffer()?, buffer()?], turn: 0, fenced: true })
    }

    /// Queues one copy of the `count` values at `from`, which lie in `keeps`, to the next buffer.
    ///
    /// # Errors
    /// The values do not fit; or those of [`DEPTH`] turns ago were not taken: no wait would help, because
    /// taking them is up to the caller.
    pub fn queue<T: Pod>(
        &mut self,
        stream: &Stream,
        from: Ptr<T>,
        count: usize,
        keeps: &[Arena],
    ) -> Result<Pending<T>> {
        let refused = |why| Err(Error::Size { call: "read back", why });
        let buffer = &mut self.buffers[self.turn];
        let (bytes, room) = (count.saturating_mul(size_of::<T>()), buffer.pinned.bytes());
        if bytes > room {
            return refused(format!("{bytes} bytes do not fit a read-back buffer of {room}"));
        }
        if self.fenced && buffer.waiting {
            return refused(format!("all {DEPTH} buffers hold results under way; take the oldest first"));
        }
        let mut emission = Emission::new();
        emission.copy(buffer.pinned.base().cast(), from, count);
        stream.run(emission, keeps)?;
        stream.record(&buffer.event)?;
        buffer.waiting = true;
        let pending = Pending { buffer: self.turn, count, element: PhantomData };
        self.turn = (self.turn + 1) % DEPTH;
        Ok(pending)
    }

    /// The values, after waiting for their copy and for nothing later. Their buffer is free again.
    ///
    /// # Errors
    /// Work failed, now or earlier; or the values were queued on another ring.
    pub fn take<T: Pod>(&mut self, pending: Pending<T>) -> Result<Vec<T>> {
        let Readback { buffers, fenced, .. } = self;
        let (buffer, bytes) = (&mut buffers[pending.buffer], pending.count * size_of::<T>());
        if *fenced {
            if !buffer.waiting || bytes > buffer.pinned.bytes() {
                let why =
                    format!("these {bytes} bytes are not under way here; take them where they were queued");
                return Err(Error::Size { call: "read back", why });
            }
            buffer.event.synchronize()?;
        }
        buffer.waiting = false;
        Ok(buffer.pinned.read(|results| bytemuck::allocation::pod_collect_to_vec(&results[..bytes])))
    }

    /// Plants a fault: buffers are reused before they were taken, and taken before they were written.
    #[doc(hidden)]
    pub fn remove_fence(&mut self) {
        self.fenced = false;
    }
}
