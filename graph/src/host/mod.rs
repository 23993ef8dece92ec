//! The host device: a machine without a GPU that behaves like one.
//!
//! It owns memory with addresses, streams that run late, events, captures and replays. It is not a mock:
//! every law of the project is tested on it. What it has in common with a GPU on purpose:
//!
//! * queued work runs when something waits for it, not when it is queued, and a copy reads its source then;
//! * fresh memory is poisoned with a pattern that is NaN as f32 and as bf16;
//! * allocation, synchronisation and event waits are refused while a capture is in progress, and break it;
//! * a fault is sticky: after one, nothing later runs and every wait reports it.
//!
//! What it adds: an access outside live memory (freed memory included: addresses are never used twice), two
//! overlapping slices of one launch, pinned bytes that change under a queued copy and a kernel that panics are
//! faults that name what happened.

mod access;
mod memory;
mod queue;

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

pub use access::Access;
pub(crate) use memory::{Memory, Place};
pub(crate) use queue::{Queue, Target, Work};

use crate::arena::Arena;
use crate::emission::Emission;
use crate::error::{Error, Fault, Result};

/// Settings of a host device.
#[derive(Clone, Copy, Debug)]
pub struct HostOptions {
    /// How much memory it has, in bytes; arenas count, pinned memory does not.
    pub memory_bytes: usize,
    /// Whether fresh memory is filled with [`POISON`] instead of zeros.
    pub poison: bool,
}

impl Default for HostOptions {
    fn default() -> Self {
        HostOptions { memory_bytes: 1 << 40, poison: true }
    }
}

/// The byte that poisons memory: all ones is NaN in f32 and bf16 and far out of range as an index.
pub const POISON: u8 = 0xff;

/// The state that every handle to one host device shares.
pub(crate) struct Host {
    /// Bytes and the right to run work: whoever touches either holds this lock.
    memory: Mutex<Memory>,
    /// Allocations whose owner is gone. An owner may end while work runs, so it cannot take the lock.
    released: Mutex<Vec<u64>>,
    /// The capture in progress, if any.
    pub(crate) capture: Mutex<Option<Capture>>,
    /// The first fault, which stays.
    pub(crate) fault: Mutex<Option<Fault>>,
}

/// A capture in progress.
pub(crate) struct Capture {
    pub(crate) label: String,
    pub(crate) emission: Emission,
    /// The arenas that the recorded work was run with.
    pub(crate) keeps: Vec<Arena>,
    /// The stream being captured.
    pub(crate) queue: Arc<Queue>,
    /// The first thing that broke the capture.
    pub(crate) broken: Option<String>,
}

impl Capture {
    /// Refuses `call` if there is a capture, and breaks it.
    pub(crate) fn refuse(current: &mut Option<Capture>, call: &'static str) -> Result<()> {
        match current {
            None => Ok(()),
            Some(capture) => {
                capture.broken.get_or_insert_with(|| format!("{call} was called inside it"));
                Err(Error::Capturing { call, capture: capture.label.clone() })
            }
        }
    }
}

impl Host {
    pub(crate) fn new(options: HostOptions) -> Arc<Host> {
        Arc::new(Host {
            memory: Mutex::new(Memory::new(options)),
            released: Mutex::default(),
            capture: Mutex::new(None),
            fault: Mutex::new(None),
        })
    }

    /// Locks the memory and frees what was released.
    pub(crate) fn memory(&self) -> MutexGuard<'_, Memory> {
        let mut memory = self.memory.lock();
        self.free_released(&mut memory);
        memory
    }

    /// Frees what was released since the memory was locked.
    pub(crate) fn free_released(&self, memory: &mut Memory) {
        self.released.lock().drain(..).for_each(|address| memory.free(address));
    }

    /// Notes that the owner of the allocation at `address` is gone.
    pub(crate) fn release(&self, address: u64) {
        self.released.lock().push(address);
    }

    /// Refuses `call` during a capture, and breaks the capture, as CUDA does.
    pub(crate) fn refuse_in_capture(&self, call: &'static str) -> Result<()> {
        Capture::refuse(&mut self.capture.lock(), call)
    }

    /// Refuses `call` with arenas of another device: their addresses may be live here too.
    pub(crate) fn refuse_foreign(self: &Arc<Self>, call: &'static str, arenas: &[Arena]) -> Result<()> {
        match arenas.iter().all(|arena| Arc::ptr_eq(arena.host(), self)) {
            true => Ok(()),
            false => Err(Error::OtherDevice { call }),
        }
    }

    /// The sticky fault as an error.
    pub(crate) fn healthy(&self) -> Result<()> {
        match &*self.fault.lock() {
            None => Ok(()),
            Some(fault) => Err(Error::Fault(fault.clone())),
        }
    }
}
