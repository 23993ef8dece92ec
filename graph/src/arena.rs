//! Memory with an owner: arenas, which launches may name, wherever they live; pinned memory; slabs of equal slots.

use std::fmt;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::Pod;
use parking_lot::Mutex;

use crate::Ptr;
use crate::cuda::{Cuda, MappedFile, PinnedMemory, Release};
use crate::device::{CudaDevice, Device, HostDevice};
use crate::digest::{Digest, Digester};
use crate::error::{Error, Result};
use crate::file::FileMap;
use crate::host::{Host, Place};
use crate::region::Region;

/// Counts arenas and communicators, so that no two of a process share an epoch.
static EPOCH: AtomicU64 = AtomicU64::new(1);

/// An epoch that nothing else has.
pub(crate) fn next_epoch() -> u64 {
    EPOCH.fetch_add(1, Ordering::Relaxed)
}

/// Memory that launches may name, in one piece. Clones share it; it is freed when the last owner goes.
#[derive(Clone)]
pub struct Arena(Arc<Owned>);

struct Owned {
    device: Device,
    label: String,
    address: u64,
    bytes: usize,
    epoch: u64,
    home: Home,
}

/// What owns the bytes of an arena.
enum Home {
    /// Device memory.
    Device,
    /// Pinned host memory, which the device reads and writes at the same address.
    Pinned(Mutex<Pinned>),
    /// A mapped file of the host device.
    HostFile(#[expect(dead_code, reason = "it is held, not looked at")] HostFile),
    /// A mapped file that a CUDA device reads.
    CudaFile(MappedFile),
}

/// A mapped file of the host device: its first address.
struct HostFile(Arc<Host>, u64);

impl Drop for HostFile {
    fn drop(&mut self) {
        self.0.release(self.1);
    }
}

impl Arena {
    pub(crate) fn new(device: &Device, label: &str, bytes: usize) -> Result<Arena> {
        let address = match device {
            Device::Host(HostDevice(host)) => {
                host.state.refuse_in_capture("allocation")?;
                host.state.healthy()?;
                host.memory().allocate(label, bytes, Place::Device)?
            }
            Device::Cuda(CudaDevice(cuda)) => cuda.allocate(label, bytes)?,
        };
        Ok(Arena::own(device, label, address, bytes, Home::Device))
    }

    pub(crate) fn pinned(device: &Device, label: &str, bytes: usize) -> Result<Arena> {
        let pinned = device.pinned(label, bytes)?;
        let address = pinned.base().address();
        Ok(Arena::own(device, label, address, bytes, Home::Pinned(Mutex::new(pinned))))
    }

    pub(crate) fn file(
        device: &Device,
        label: &str,
        file: &File,
        offset: u64,
        bytes: usize,
    ) -> Result<Arena> {
        const CALL: &str = "mapping a file";
        device.state().refuse_in_capture(CALL)?;
        device.state().healthy()?;
        device.maps_files()?;
        let map = FileMap::new(file, offset, bytes).map_err(|error| Error::Size {
            call: CALL,
            why: format!("{bytes} bytes from {offset} on for `{label}`: {error}"),
        })?;
        Ok(match device {
            Device::Host(HostDevice(host)) => {
                let lead = map.lead() as u64;
                let base = host.memory().adopt(label, map);
                Arena::own(device, label, base + lead, bytes, Home::HostFile(HostFile(host.clone(), base)))
            }
            Device::Cuda(CudaDevice(cuda)) => {
                let file = MappedFile::new(cuda, label, map)?;
                Arena::own(device, label, file.address(), bytes, Home::CudaFile(file))
            }
        })
    }

    fn own(device: &Device, label: &str, address: u64, bytes: usize, home: Home) -> Arena {
        let epoch = next_epoch();
        Arena(Arc::new(Owned { device: device.clone(), label: label.into(), address, bytes, epoch, home }))
    }

    /// What the memory is for.
    pub fn label(&self) -> &str {
        &self.0.label
    }

    /// Its first address.
    pub fn base(&self) -> Ptr<u8> {
        Ptr::new(self.0.address)
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> usize {
        self.0.bytes
    }

    /// A number that no other arena of this process has: two arenas at one address differ in it.
    pub fn epoch(&self) -> u64 {
        self.0.epoch
    }

    /// The digest of what a launch can bake of this arena: address, size, epoch.
    pub fn digest(&self) -> Digest {
        Digester::new().number(self.0.address).number(self.0.bytes as u64).number(self.0.epoch).finish()
    }

    /// Writes `values` at `to`, which must lie in this arena. Waits for nothing: queued work may still
    /// read the old bytes.
    ///
    /// # Errors
    /// The range is not in the arena, or the arena is a file; a capture is in progress; the device failed.
    pub fn write<T: Pod>(&self, to: Ptr<T>, values: &[T]) -> Result<()> {
        self.check_range("write", to, values.len())?;
        let bytes: &[u8] = bytemuck::cast_slice(values);
        match (&self.0.device, &self.0.home) {
            (_, Home::HostFile(_) | Home::CudaFile(_)) => {
                let why = format!("`{}` is a file, mapped to be read", self.0.label);
                Err(Error::Size { call: "write", why })
            }
            (Device::Host(HostDevice(host)), home) => {
                host.state.refuse_in_capture("a synchronous write")?;
                host.state.healthy()?;
                let mut memory = host.memory();
                if memory.is_virtual() && matches!(home, Home::Device) {
                    return Ok(());
                }
                let target = memory.bytes_mut(to.address(), bytes.len());
                target.expect("the range was checked").copy_from_slice(bytes);
                Ok(())
            }
            (Device::Cuda(CudaDevice(cuda)), Home::Pinned(pinned)) => {
                cuda.ready("a synchronous write")?;
                let from = self.offset(to);
                pinned.lock().write(|all| all[from..][..bytes.len()].copy_from_slice(bytes));
                Ok(())
            }
            (Device::Cuda(CudaDevice(cuda)), _) => cuda.write(to.address(), bytes),
        }
    }

    /// Lets the host fill memory that it reaches in its place: pinned memory, and all of a host device's. Waits for
    /// nothing, and `fill` must not call the device, as for [`Pinned::write`].
    ///
    /// # Errors
    /// The host does not reach it; a capture is in progress; the device failed.
    pub fn fill<R>(&self, fill: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
        const CALL: &str = "filling in place";
        self.0.device.state().refuse_in_capture(CALL)?;
        self.0.device.state().healthy()?;
        match (&self.0.device, &self.0.home) {
            (_, Home::Pinned(pinned)) => return Ok(pinned.lock().write(fill)),
            (Device::Host(HostDevice(host)), Home::Device) => {
                let mut memory = host.memory();
                if !memory.is_virtual() {
                    let bytes = memory.bytes_mut(self.0.address, self.0.bytes);
                    return Ok(fill(bytes.expect("an arena lives as long as its owner")));
                }
            }
            _ => {}
        }
        let why = format!("`{}` is no memory that the host reaches", self.0.label);
        Err(Error::Size { call: CALL, why })
    }

    /// Reads `count` values at `from`, which must lie in this arena. Waits for nothing: synchronise first.
    pub fn read<T: Pod>(&self, from: Ptr<T>, count: usize) -> Result<Vec<T>> {
        self.check_range("read", from, count)?;
        let bytes = count * size_of::<T>();
        let part = |all: &[u8]| {
            let from = self.offset(from);
            bytemuck::allocation::pod_collect_to_vec(&all[from..][..bytes])
        };
        match (&self.0.device, &self.0.home) {
            (Device::Host(HostDevice(host)), home) => {
                host.state.refuse_in_capture("a synchronous read")?;
                host.state.healthy()?;
                let memory = host.memory();
                if memory.is_virtual() && matches!(home, Home::Device) {
                    let why = format!("`{}` is virtual and has no bytes", self.0.label);
                    return Err(Error::Size { call: "read", why });
                }
                let bytes = memory.bytes(from.address(), bytes);
                Ok(bytemuck::allocation::pod_collect_to_vec(bytes.expect("the range was checked")))
            }
            (Device::Cuda(CudaDevice(cuda)), Home::Pinned(pinned)) => {
                cuda.ready("a synchronous read")?;
                Ok(pinned.lock().read(part))
            }
            (Device::Cuda(CudaDevice(cuda)), Home::CudaFile(file)) => {
                cuda.ready("a synchronous read")?;
                Ok(part(file.bytes()))
            }
            (Device::Cuda(CudaDevice(cuda)), _) => {
                let mut values = vec![T::zeroed(); count];
                cuda.read(bytemuck::cast_slice_mut(&mut values), from.address())?;
                Ok(values)
            }
        }
    }

    pub(crate) fn device(&self) -> &Device {
        &self.0.device
    }

    /// How far into the arena an address lies.
    fn offset<T>(&self, at: Ptr<T>) -> usize {
        (at.address() - self.0.address) as usize
    }

    fn check_range<T>(&self, call: &'static str, at: Ptr<T>, count: usize) -> Result<()> {
        let bytes = count.saturating_mul(size_of::<T>());
        let offset = at.address().checked_sub(self.0.address);
        let end = offset.and_then(|offset| offset.checked_add(bytes as u64));
        if end.is_none_or(|end| end > self.0.bytes as u64) {
            let why = format!("{bytes} bytes at {at:?} are not inside `{}` ({self:?})", self.0.label);
            return Err(Error::Size { call, why });
        }
        Ok(())
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // What does not live on the device has an owner of its own.
        let Home::Device = self.home else { return };
        match &self.device {
            Device::Host(HostDevice(host)) => host.release(self.address),
            Device::Cuda(CudaDevice(cuda)) => cuda.release(Release::Device(self.address, self.bytes)),
        }
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` {} bytes @{:x} epoch {}", self.0.label, self.0.bytes, self.0.address, self.0.epoch)
    }
}

/// Pinned host memory: the host writes and reads it, and copies may name its addresses.
pub struct Pinned(Pages);

enum Pages {
    Host { host: Arc<Host>, address: u64, bytes: usize },
    Cuda(PinnedMemory),
}

impl Pinned {
    pub(crate) fn on_host(host: &Arc<Host>, label: &str, bytes: usize) -> Result<Pinned> {
        host.state.refuse_in_capture("pinned allocation")?;
        host.state.healthy()?;
        let address = host.memory().allocate(label, bytes, Place::Pinned)?;
        Ok(Pinned(Pages::Host { host: host.clone(), address, bytes }))
    }

    pub(crate) fn on_cuda(cuda: &Arc<Cuda>, label: &str, bytes: usize) -> Result<Pinned> {
        PinnedMemory::new(cuda, label, bytes).map(|memory| Pinned(Pages::Cuda(memory)))
    }

    /// Its first address.
    pub fn base(&self) -> Ptr<u8> {
        match &self.0 {
            Pages::Host { address, .. } => Ptr::new(*address),
            Pages::Cuda(memory) => Ptr::new(memory.address()),
        }
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> usize {
        match &self.0 {
            Pages::Host { bytes, .. } => *bytes,
            Pages::Cuda(memory) => memory.bytes().len(),
        }
    }

    /// Lets the host write. Copies from here that were queued and have not run become faults on the host
    /// device and read either bytes on a CUDA device: fence them. `fill` must not call the device: the host
    /// device would wait for itself.
    pub fn write<R>(&mut self, fill: impl FnOnce(&mut [u8]) -> R) -> R {
        match &mut self.0 {
            Pages::Host { host, address, bytes } => {
                let mut memory = host.memory();
                memory.touch(*address);
                let bytes = memory.bytes_mut(*address, *bytes);
                fill(bytes.expect("pinned memory lives as long as its owner"))
            }
            Pages::Cuda(memory) => fill(memory.bytes_mut()),
        }
    }

    /// Lets the host read. Wait for copies to here first. `look` must not call the device: the host device
    /// would wait for itself.
    pub fn read<R>(&self, look: impl FnOnce(&[u8]) -> R) -> R {
        match &self.0 {
            Pages::Host { host, address, bytes } => {
                let memory = host.memory();
                look(memory.bytes(*address, *bytes).expect("pinned memory lives as long as its owner"))
            }
            Pages::Cuda(memory) => look(memory.bytes()),
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // The CUDA variant has an owner of its own.
        if let Pages::Host { host, address, .. } = self {
            host.release(*address);
        }
    }
}

/// An arena cut into slots of one size. A slot is reached through its number, so launches bake the slab's
/// address and stride, never a slot's.
#[derive(Clone, Debug)]
pub struct Slab {
    arena: Arena,
    stride: usize,
    slots: usize,
}

impl Slab {
    /// Allocates `slots` slots with the layout of `slot`.
    pub fn new(device: &Device, label: &str, slot: &Region, slots: usize) -> Result<Slab> {
        let stride = slot.bytes();
        Ok(Slab { arena: device.arena(label, stride * slots)?, stride, slots })
    }

    /// The arena behind it.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Bytes from one slot to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// How many slots there are.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// The first address of slot `index`.
    pub fn slot(&self, index: usize) -> Ptr<u8> {
        assert!(index < self.slots, "slot {index} of a slab of {}", self.slots);
        self.arena.base().byte_add(index * self.stride)
    }

    /// The digest of what a launch can bake of this slab: its arena, stride and capacity.
    pub fn digest(&self) -> Digest {
        let mut digest = Digester::new();
        digest.digest(self.arena.digest()).number(self.stride as u64).number(self.slots as u64).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::host::HostOptions;

    #[test]
    fn digests_cover_every_field_that_a_launch_can_bake() {
        let device = Device::host(HostOptions::default());
        let arena = |address, bytes, epoch| {
            let (device, label, home) = (device.clone(), "pool".into(), Home::Device);
            Arena(Arc::new(Owned { device, label, address, bytes, epoch, home }))
        };
        let slab = |arena, stride, slots| Slab { arena, stride, slots }.digest();
        let plain = || arena(1 << 20, 512, 7);
        let digests = [
            slab(plain(), 256, 2),
            slab(arena(1 << 21, 512, 7), 256, 2),
            slab(arena(1 << 20, 1024, 7), 256, 2),
            slab(arena(1 << 20, 512, 8), 256, 2),
            slab(plain(), 128, 2),
            slab(plain(), 256, 1),
            slab(plain(), 2, 256),
        ];
        assert_eq!(digests[0], slab(plain(), 256, 2));
        assert_eq!(HashSet::from(digests).len(), 7);
    }
}
