//! The memory of the host device: allocations at addresses that are never used twice.
//!
//! This file and `access.rs` hold the crate's unsafe code for the host: bytes live in raw allocations, and
//! slices of them are handed out after the range was found inside a live allocation.

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ptr::NonNull;

use super::{HostOptions, POISON};
use crate::error::{Error, FaultKind, Result};
use crate::file::FileMap;

/// Addresses of allocations are multiples of this.
pub(super) const ALIGN: usize = 4096;
/// Unmapped bytes between two allocations, so that an offset that is wrong by anything a 32-bit number can
/// say never lands in a neighbour. Addresses are only numbers: room costs nothing.
const GAP: u64 = 1 << 32;

/// Where an allocation lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Device memory: counts against the device's size.
    Device,
    /// Pinned host memory: copies from it are checked for overwriting.
    Pinned,
    /// A mapped file, which nothing may write.
    File,
}

pub(crate) struct Memory {
    options: HostOptions,
    live: BTreeMap<u64, Allocation>,
    freed: BTreeMap<u64, (usize, String)>,
    next: u64,
    used: usize,
}

struct Allocation {
    bytes: usize,
    label: String,
    place: Place,
    /// The bytes; none behind a virtual arena.
    storage: Option<Storage>,
    /// How often the host has written it (pinned memory only).
    version: u64,
}

struct Storage {
    backing: Backing,
    /// The first byte in it that is aligned as device addresses are.
    data: NonNull<u8>,
}

/// What holds bytes.
enum Backing {
    /// Memory of the system's allocator.
    Heap { raw: NonNull<u8>, layout: Layout },
    /// A file.
    File(#[expect(dead_code, reason = "it is held, not looked at")] FileMap),
}

// SAFETY: `data` is owned by this value alone and only reached through `Memory`, which its device keeps
// under a lock.
unsafe impl Send for Storage {}

impl Memory {
    pub(crate) fn new(options: HostOptions) -> Self {
        Memory { options, live: BTreeMap::new(), freed: BTreeMap::new(), next: 0x10_0000_0000, used: 0 }
    }

    pub(crate) fn allocate(&mut self, label: &str, bytes: usize, place: Place) -> Result<u64> {
        let free = self.options.memory_bytes.saturating_sub(self.used);
        if place == Place::Device && bytes > free {
            return Err(Error::OutOfMemory { label: label.into(), asked: bytes, free });
        }
        let refused = || {
            let why = format!("this machine has no {bytes} bytes for `{label}`; ask for less");
            Error::Size { call: "allocation", why }
        };
        let layout = layout(bytes).ok_or_else(refused)?;
        let storage = match place == Place::Device && self.options.virtual_arenas {
            true => None,
            false => Some(Storage::new(layout, self.options.poison).ok_or_else(refused)?),
        };
        let address = self.next;
        self.next += (layout.size().next_multiple_of(ALIGN)) as u64 + GAP;
        if place == Place::Device {
            self.used += bytes;
        }
        self.live.insert(address, Allocation { bytes, label: label.into(), place, storage, version: 0 });
        Ok(address)
    }

    /// Whether arenas have no bytes.
    pub(crate) fn is_virtual(&self) -> bool {
        self.options.virtual_arenas
    }

    /// Gives a mapped file an address: that of the map's first byte.
    pub(crate) fn adopt(&mut self, label: &str, map: FileMap) -> u64 {
        let (address, bytes) = (self.next, map.mapped_bytes());
        self.next += bytes.next_multiple_of(ALIGN) as u64 + GAP;
        let storage = Some(Storage { data: map.start(), backing: Backing::File(map) });
        let allocation = Allocation { bytes, label: label.into(), place: Place::File, storage, version: 0 };
        self.live.insert(address, allocation);
        address
    }

    pub(crate) fn free(&mut self, address: u64) {
        let Some(allocation) = self.live.remove(&address) else { return };
        if allocation.place == Place::Device {
            self.used -= allocation.bytes;
        }
        self.freed.insert(address, (allocation.bytes, allocation.label.clone()));
    }

    /// Bytes of device memory in use.
    pub(crate) fn used(&self) -> usize {
        self.used
    }

    /// Bytes of device memory that are free.
    pub(crate) fn free_bytes(&self) -> usize {
        self.options.memory_bytes.saturating_sub(self.used)
    }

    /// The start of a live range to read, or why it is none. The pointer is good for reads of `bytes` bytes
    /// while `self` is borrowed and nothing is freed; who uses it decides about aliasing.
    pub(super) fn locate(&self, address: u64, bytes: usize) -> Result<*const u8, FaultKind> {
        self.find(address, bytes).map(|(data, _)| data.cast_const())
    }

    /// As [`Memory::locate`], to write too.
    pub(super) fn locate_mut(&self, address: u64, bytes: usize) -> Result<*mut u8, FaultKind> {
        match self.find(address, bytes)? {
            (_, Allocation { place: Place::File, label, .. }) => {
                Err(FaultKind::ReadOnly { address, bytes, label: label.clone() })
            }
            (data, _) => Ok(data),
        }
    }

    /// The start of a live range, and the allocation that holds it.
    fn find(&self, address: u64, bytes: usize) -> Result<(*mut u8, &Allocation), FaultKind> {
        if let Some((&base, allocation)) = self.live.range(..=address).next_back() {
            let offset = (address - base) as usize;
            if offset.checked_add(bytes).is_some_and(|end| end <= allocation.bytes)
                && let Some(storage) = &allocation.storage
            {
                // SAFETY: offset + bytes lies inside the allocation.
                return Ok((unsafe { storage.data.as_ptr().add(offset) }, allocation));
            }
        }
        Err(FaultKind::Address { address, bytes, near: self.near(address) })
    }

    /// The bytes of a live range.
    pub(crate) fn bytes(&self, address: u64, bytes: usize) -> Result<&[u8], FaultKind> {
        let data = self.locate(address, bytes)?;
        // SAFETY: a live range of initialised bytes; `&self` excludes every `&mut` made by `bytes_mut`.
        Ok(unsafe { std::slice::from_raw_parts(data, bytes) })
    }

    /// The bytes of a live range, to write.
    pub(crate) fn bytes_mut(&mut self, address: u64, bytes: usize) -> Result<&mut [u8], FaultKind> {
        let data = self.locate_mut(address, bytes)?;
        // SAFETY: as in `bytes`, and `&mut self` makes it the only reference.
        Ok(unsafe { std::slice::from_raw_parts_mut(data, bytes) })
    }

    /// Copies bytes between two ranges that do not overlap.
    pub(crate) fn copy(&mut self, to: u64, from: u64, bytes: usize) -> Result<(), FaultKind> {
        if to.abs_diff(from) < bytes as u64 {
            return Err(FaultKind::Overlap { address: to, bytes });
        }
        let source = self.locate(from, bytes)?;
        let target = self.locate_mut(to, bytes)?;
        // SAFETY: both ranges are live, they do not overlap, and `&mut self` excludes other references.
        unsafe { std::ptr::copy_nonoverlapping(source, target, bytes) };
        Ok(())
    }

    /// Notes that the host is about to write the pinned allocation at `address`.
    pub(crate) fn touch(&mut self, address: u64) {
        if let Some(allocation) = self.live.get_mut(&address) {
            allocation.version += 1;
        }
    }

    /// The pinned allocation that holds `address`: its start, its write count and its label.
    pub(crate) fn pinned(&self, address: u64) -> Option<(u64, u64, &str)> {
        let (&base, a) = self.live.range(..=address).next_back()?;
        let inside = address - base < a.bytes as u64;
        (inside && a.place == Place::Pinned).then_some((base, a.version, a.label.as_str()))
    }

    /// Describes the memory around a bad address.
    fn near(&self, address: u64) -> String {
        if address == 0 {
            return "the null address".into();
        }
        let state = |a: &Allocation| if a.storage.is_some() { "live" } else { "virtual" };
        let live = self.live.range(..=address).next_back();
        let live = live.map(|(&base, a)| (base, a.bytes, &a.label, state(a)));
        let freed = self.freed.range(..=address).next_back().map(|(&base, (n, l))| (base, *n, l, "freed"));
        match live.into_iter().chain(freed).max_by_key(|near| near.0) {
            None => "below every allocation".into(),
            Some((base, bytes, label, state)) => {
                format!("{} bytes into {state} `{label}` of {bytes} bytes", address - base)
            }
        }
    }
}

/// The layout of an allocation, unless it is larger than any machine's memory. Aligned by hand: zeros of a
/// large alignment would be written one by one, where the system has pages of them.
fn layout(bytes: usize) -> Option<Layout> {
    let size = bytes.max(1).checked_next_multiple_of(64)?.checked_add(ALIGN)?;
    Layout::from_size_align(size, 16).ok()
}

impl Storage {
    fn new(layout: Layout, poison: bool) -> Option<Storage> {
        // SAFETY: the layout has a non-zero size.
        let raw = unsafe { if poison { alloc(layout) } else { alloc_zeroed(layout) } };
        let raw = NonNull::new(raw)?;
        if poison {
            // SAFETY: `raw` was just allocated with this size. With this or the zeros above, no slice ever
            // shows uninitialised bytes.
            unsafe { raw.as_ptr().write_bytes(POISON, layout.size()) };
        }
        // SAFETY: the layout has ALIGN bytes more than it was asked for, so the offset and what follows lie
        // inside.
        let data = unsafe { raw.add(raw.as_ptr().align_offset(ALIGN)) };
        Some(Storage { backing: Backing::Heap { raw, layout }, data })
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        let Backing::Heap { raw, layout } = self.backing else { return };
        // SAFETY: allocated in `new` with the same layout, and freed nowhere else.
        unsafe { dealloc(raw.as_ptr(), layout) };
    }
}
