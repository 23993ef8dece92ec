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

use crate::state::State;

/// Settings of a host device.
#[derive(Clone, Copy, Debug)]
pub struct HostOptions {
    /// How much memory it has, in bytes; arenas count, pinned memory does not.
    pub memory_bytes: usize,
    /// Whether fresh memory is filled with [`POISON`] instead of zeros.
    pub poison: bool,
    /// Whether arenas are addresses with no bytes behind them, for emitting and capturing what will never
    /// run: writes are lost, reads are refused, and work that touches one is a fault.
    pub virtual_arenas: bool,
}

impl Default for HostOptions {
    fn default() -> Self {
        HostOptions { memory_bytes: 1 << 40, poison: true, virtual_arenas: false }
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
    /// The capture in progress and the first fault.
    pub(crate) state: State,
}

impl Host {
    pub(crate) fn new(options: HostOptions) -> Arc<Host> {
        let memory = Mutex::new(Memory::new(options));
        Arc::new(Host { memory, released: Mutex::default(), state: State::default() })
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
}
