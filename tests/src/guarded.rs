//! Device memory between two guard bands.

use bytemuck::Pod;
use graph::{Arena, Device, Ptr};

/// Bytes of a guard band.
const GUARD_BYTES: usize = 512;
/// What fills a guard band.
const GUARD: u8 = 0xa5;
/// Bytes of an input that are compared at a time.
const PART_BYTES: usize = 1 << 20;

pub(crate) struct Guarded {
    pub(crate) arena: Arena,
    pub(crate) start: Ptr<u8>,
    pub(crate) bytes: usize,
    /// What must still be there after a launch, for memory that is only read.
    pub(crate) input: Option<Vec<u8>>,
}

impl Guarded {
    /// Memory as a device hands it out.
    pub(crate) fn new(device: &Device, label: &str, bytes: usize) -> Guarded {
        let arena = device.arena(label, GUARD_BYTES + bytes + GUARD_BYTES).expect("memory is plenty");
        let start = arena.base().byte_add(GUARD_BYTES);
        for guard in [arena.base(), start.byte_add(bytes)] {
            arena.write(guard, &[GUARD; GUARD_BYTES]).expect("the guard lies in its arena");
        }
        Guarded { arena, start, bytes, input: None }
    }

    /// Fills it.
    pub(crate) fn fill<T: Pod>(&self, values: &[T]) {
        self.arena.write(self.start.cast(), values).expect("the buffer is this large");
    }

    /// Fills it with what launches may only read.
    pub(crate) fn keep<T: Pod>(&mut self, values: &[T]) {
        self.fill(values);
        self.input = Some(bytemuck::cast_slice(values).to_vec());
    }

    /// All of it.
    pub(crate) fn read(&self) -> Vec<u8> {
        self.arena.read(self.start, self.bytes).expect("the buffer lies in its arena")
    }

    /// Whether the guards are as they were, and what may only be read.
    pub(crate) fn check(&self, writer: &str) -> Result<(), String> {
        for guard in [self.arena.base(), self.start.byte_add(self.bytes)] {
            let band: Vec<u8> = self.arena.read(guard, GUARD_BYTES).expect("the guard lies in its arena");
            if band.iter().any(|&b| b != GUARD) {
                return Err(format!("{writer} wrote around `{}`", self.arena.label()));
            }
        }
        // In parts: weights are large.
        let parts = self.input.iter().flat_map(|input| input.chunks(PART_BYTES)).enumerate();
        for (at, input) in parts {
            let from = self.start.byte_add(at * PART_BYTES);
            let now: Vec<u8> = self.arena.read(from, input.len()).expect("the part lies in its arena");
            if now != input {
                return Err(format!("{writer} changed its input `{}`", self.arena.label()));
            }
        }
        Ok(())
    }

    /// How far into it an address lies; its end counts.
    pub(crate) fn offset(&self, address: u64) -> Option<usize> {
        let offset = address.checked_sub(self.start.address())? as usize;
        (offset <= self.bytes).then_some(offset)
    }
}
