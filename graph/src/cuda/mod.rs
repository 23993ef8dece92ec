//! The CUDA device: memory, streams, captures and faults over the driver, which is loaded at run time.
//!
//! What it has in common with the host device is its contract: the same calls are refused inside a capture
//! in the same words, a fault is sticky, owners outlive what is queued. What differs:
//!
//! * work runs by itself, so an event may be reached before anything waits for it;
//! * addresses are trusted: no launch is checked against live memory. The host device does that, for the
//!   same emissions;
//! * a recording notes what is run and captures it all in [`Recording::finish`](crate::Recording::finish):
//!   nothing that happens in between can disturb the driver's capture, and a dropped one costs nothing;
//! * memory whose owner is gone is freed at the next allocation or synchronisation, never in a capture.
//!
//! Files: `driver` owns the handles, `queue` is a stream with what its pending work holds, `modules`
//! the loaded kernels, [`code`] the compiler and its cache, `pinned` host memory, `mapped` files, `nccl` the library
//! of collectives, `push` gathers over peer memory.

pub mod code;
mod driver;
mod mapped;
mod modules;
mod nccl;
mod pinned;
mod push;
mod queue;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Mutex, MutexGuard};

use crate::error::{Error, Result};
use crate::file::FileMap;
use crate::host::POISON;
use crate::kernel::Definition;
use crate::state::State;
use driver::{Context, Failure, Outcome, StreamHandle};
use modules::Modules;

pub(crate) use driver::Graph;
pub(crate) use mapped::MappedFile;
pub(crate) use nccl::{Handle, ID_BYTES, Nccl};
pub use nccl::{NcclLibrary, nccl_environment, nccl_library};
pub(crate) use pinned::PinnedMemory;
pub use push::EXCHANGE;
pub(crate) use push::{HANDLE_BYTES, Inbox, MOST_BYTES, Push};
pub(crate) use queue::{Lap, Marker, Queue};

/// Settings of a CUDA device.
#[derive(Clone, Copy, Debug, Default)]
pub struct CudaOptions {
    /// Which device, in the driver's order.
    pub ordinal: usize,
    /// Whether fresh memory is filled with [`POISON`] instead of zeros.
    pub poison: bool,
}

/// The state that every handle to one CUDA device shares.
pub(crate) struct Cuda {
    /// The capture in progress and the first fault.
    pub(crate) state: State,
    modules: Modules,
    /// The stream of synchronous reads and writes. The legacy default stream would not do: a copy from
    /// pageable memory may return before it has reached the device, and other streams do not wait for it.
    side: StreamHandle,
    /// Allocations whose owner is gone.
    released: Mutex<Vec<Release>>,
    /// Held while the driver captures and while memory is freed: one would break the other.
    gate: Mutex<()>,
    used: AtomicUsize,
    poison: bool,
    context: Arc<Context>,
}

/// Memory to free.
pub(crate) enum Release {
    /// Device memory: address and size.
    Device(u64, usize),
    /// Pinned memory.
    Pinned(pinned::Pages),
    /// A mapped file, and whether the driver knows of it.
    File(FileMap, bool),
    /// Memory of another process.
    Peer(u64),
}

/// How many CUDA devices there are.
pub(crate) fn count() -> Result<usize> {
    driver::count()
}

impl Cuda {
    pub(crate) fn open(options: CudaOptions) -> Result<Arc<Cuda>> {
        let context = Context::open(options.ordinal)?;
        let side = StreamHandle::new(&context).map_err(|failure| failure.fault("making a stream"))?;
        Ok(Arc::new(Cuda {
            state: State::default(),
            modules: Modules::new(code::architecture(context.capability)),
            side,
            released: Mutex::default(),
            gate: Mutex::default(),
            used: AtomicUsize::new(0),
            poison: options.poison,
            context,
        }))
    }

    /// Name, architecture, memory and driver.
    pub(crate) fn describe(&self) -> String {
        let gib = self.context.total_bytes as f64 / f64::from(1 << 30);
        let architecture = self.modules.architecture();
        format!("{} ({architecture}, {gib:.1} GiB, driver {})", self.context.name, self.context.driver)
    }

    fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn architecture(&self) -> &str {
        self.modules.architecture()
    }

    /// Refuses `call` in a capture and after a fault.
    pub(crate) fn ready(&self, call: &'static str) -> Result<()> {
        self.state.refuse_in_capture(call)?;
        self.state.healthy()
    }

    /// Whether mapped files can be read.
    pub(crate) fn maps_files(&self) -> Result<()> {
        mapped::supported(self)
    }

    /// Allocates device memory, filled.
    pub(crate) fn allocate(&self, label: &str, bytes: usize) -> Result<u64> {
        self.state.refuse_in_capture("allocation")?;
        self.state.healthy()?;
        self.free_released();
        let doing = || format!("allocation of {bytes} bytes for `{label}`");
        let address = self.context.allocate(bytes).map_err(|failure| match failure.out_of_memory() {
            true => self.out_of_memory(label, bytes),
            false => self.fail(failure, doing()),
        })?;
        self.used.fetch_add(bytes, Ordering::Relaxed);
        let value = self.fresh_byte();
        // SAFETY: the range was just allocated.
        let filled = unsafe { self.side.submit(&driver::Submission::Fill { to: address, bytes, value }) };
        if let Err(failure) = filled.and_then(|()| self.side.synchronize()) {
            self.release(Release::Device(address, bytes));
            return Err(self.fail(failure, doing()));
        }
        Ok(address)
    }

    fn out_of_memory(&self, label: &str, asked: usize) -> Error {
        Error::OutOfMemory { label: label.into(), asked, free: self.free_bytes() }
    }

    /// What fresh memory is filled with.
    fn fresh_byte(&self) -> u8 {
        if self.poison { POISON } else { 0 }
    }

    /// Writes device memory. The range must be allocated.
    pub(crate) fn write(&self, to: u64, bytes: &[u8]) -> Result<()> {
        self.state.refuse_in_capture("a synchronous write")?;
        self.state.healthy()?;
        // SAFETY: the caller, an arena, checked that the range is its own.
        let written = unsafe { self.side.write(to, bytes) };
        written.map_err(|failure| self.fail(failure, format!("write of {} bytes", bytes.len())))
    }

    /// Reads device memory. The range must be allocated.
    pub(crate) fn read(&self, to: &mut [u8], from: u64) -> Result<()> {
        self.state.refuse_in_capture("a synchronous read")?;
        self.state.healthy()?;
        // SAFETY: the caller, an arena, checked that the range is its own.
        let read = unsafe { self.side.read(to, from) };
        read.map_err(|failure| self.fail(failure, format!("read of {} bytes", to.len())))
    }

    /// Loads the twins of `definitions`.
    pub(crate) fn prepare(&self, definitions: &[&'static Definition]) -> Result<()> {
        self.state.refuse_in_capture("loading kernels")?;
        self.state.healthy()?;
        self.modules.prepare(&self.context, definitions)
    }

    /// Notes that the owner of an allocation is gone.
    pub(crate) fn release(&self, release: Release) {
        if let Release::Device(_, bytes) = release {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
        }
        self.released.lock().push(release);
    }

    /// Frees what was released, after everything on the device has run: work may have been queued without
    /// saying what it holds.
    fn free_released(&self) {
        if self.released.lock().is_empty() {
            return;
        }
        let _gate = self.gate();
        // After a fault both this and the frees fail, and the memory goes with the context.
        let _ = self.context.synchronize();
        let gone = std::mem::take(&mut *self.released.lock());
        for release in gone {
            let _ = match release {
                // SAFETY: the owner is gone, queued work held the owner, and whatever did not has run.
                Release::Device(address, _) => unsafe { self.context.free(address) },
                // SAFETY: as above.
                Release::Pinned(pages) => unsafe { self.context.free_pinned(pages.start) },
                Release::File(map, registered) => {
                    mapped::end(&self.context, map, registered);
                    Ok(())
                }
                // SAFETY: as above.
                Release::Peer(address) => unsafe { self.context.unimport(address) },
            };
        }
    }

    fn gate(&self) -> MutexGuard<'_, ()> {
        self.gate.lock()
    }

    pub(crate) fn used_bytes(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Bytes that an allocation could still get, as the driver says.
    pub(crate) fn free_bytes(&self) -> usize {
        let waiting = |release: &Release| match release {
            Release::Device(_, bytes) => *bytes,
            Release::Pinned(_) | Release::File(..) | Release::Peer(_) => 0,
        };
        let waiting: usize = self.released.lock().iter().map(waiting).sum();
        self.context.memory().map_or(0, |(free, _)| free + waiting)
    }

    /// Makes a failure the device's fault, unless it has one already.
    fn fail(&self, failure: Failure, doing: impl Into<String>) -> Error {
        self.state.fail(failure.fault(doing))
    }

    /// What the driver gave, or a stand-in and a fault that every later call reports.
    fn or_fault<T>(&self, made: Outcome<T>, doing: &str, stand_in: impl FnOnce(&Arc<Context>) -> T) -> T {
        made.unwrap_or_else(|failure| {
            self.fail(failure, doing);
            stand_in(&self.context)
        })
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        self.free_released();
    }
}
