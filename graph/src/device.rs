//! A device: where memory, streams and captures come from. A closed set: the host, and CUDA.

use std::fs::File;
use std::sync::Arc;

use crate::arena::{Arena, Pinned};
use crate::cuda::{self, Cuda, CudaOptions};
use crate::error::{Error, Result};
use crate::host::{Host, HostOptions};
use crate::kernel::Definition;
use crate::state::{Planted, State};
use crate::stream::{Event, Stream};

/// One device. Clones are handles to the same device.
#[derive(Clone)]
pub enum Device {
    /// The host device.
    Host(HostDevice),
    /// A CUDA device.
    Cuda(CudaDevice),
}

/// A handle to a host device.
#[derive(Clone)]
pub struct HostDevice(pub(crate) Arc<Host>);

/// A handle to a CUDA device.
#[derive(Clone)]
pub struct CudaDevice(pub(crate) Arc<Cuda>);

impl CudaDevice {
    /// What its code is compiled for, such as `sm_90a`.
    pub fn architecture(&self) -> &str {
        self.0.architecture()
    }
}

impl Device {
    /// A new host device.
    pub fn host(options: HostOptions) -> Device {
        Device::Host(HostDevice(Host::new(options)))
    }

    /// CUDA device `ordinal`, in the driver's order.
    ///
    /// # Errors
    /// The driver, or the device, is missing or too old.
    pub fn cuda(ordinal: usize) -> Result<Device> {
        Device::cuda_with(CudaOptions { ordinal, ..CudaOptions::default() })
    }

    /// A CUDA device, with settings.
    ///
    /// # Errors
    /// The driver, or the device, is missing or too old.
    pub fn cuda_with(options: CudaOptions) -> Result<Device> {
        Ok(Device::Cuda(CudaDevice(Cuda::open(options)?)))
    }

    /// How many CUDA devices there are.
    ///
    /// # Errors
    /// The driver is missing or too old.
    pub fn cuda_count() -> Result<usize> {
        cuda::count()
    }

    /// What the device is, for people.
    pub fn describe(&self) -> String {
        match self {
            Device::Host(_) => {
                let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
                format!("host ({threads} threads)")
            }
            Device::Cuda(CudaDevice(cuda)) => cuda.describe(),
        }
    }

    /// Makes `definitions` ready to launch. A device that needs nothing for that does nothing; CUDA compiles
    /// and loads their twins, and passes over those that have none. Do it before the first capture, and name
    /// all kernels of a source at once.
    ///
    /// # Errors
    /// A capture is in progress; NVRTC is missing; a source does not compile or load; a twin takes other
    /// arguments than its kernel has.
    pub fn prepare(&self, definitions: &[&'static Definition]) -> Result<()> {
        match self {
            Device::Host(HostDevice(host)) => host.state.refuse_in_capture("loading kernels"),
            Device::Cuda(CudaDevice(cuda)) => cuda.prepare(definitions),
        }
    }

    /// Allocates `bytes` bytes of device memory, poisoned or zeroed as the device's options say.
    ///
    /// # Errors
    /// Out of memory; or a capture is in progress.
    pub fn arena(&self, label: &str, bytes: usize) -> Result<Arena> {
        Arena::new(self, label, bytes)
    }

    /// Allocates `bytes` bytes of pinned host memory that launches may name: the device reads and writes it at
    /// its own address, over the bus. It does not count as device memory.
    ///
    /// # Errors
    /// As [`Device::pinned`].
    pub fn pinned_arena(&self, label: &str, bytes: usize) -> Result<Arena> {
        Arena::pinned(self, label, bytes)
    }

    /// Maps `bytes` bytes of a file, from `offset` on, as memory that launches may read. Its address is as
    /// aligned as `offset`, up to 4096. The file must stay as it is for as long as the arena lives: a file that
    /// is shortened ends the process that reads it.
    ///
    /// # Errors
    /// The file cannot be mapped; the device cannot read mapped files; or a capture is in progress.
    pub fn file_arena(&self, label: &str, file: &File, offset: u64, bytes: usize) -> Result<Arena> {
        Arena::file(self, label, file, offset, bytes)
    }

    /// Whether the device can read mapped files.
    ///
    /// # Errors
    /// It cannot, and why.
    pub fn maps_files(&self) -> Result<()> {
        match self {
            Device::Host(_) => Ok(()),
            Device::Cuda(CudaDevice(cuda)) => cuda.maps_files(),
        }
    }

    /// Allocates `bytes` bytes of pinned host memory, poisoned or zeroed as the device's options say.
    ///
    /// # Errors
    /// A capture is in progress; or the machine cannot give as much.
    pub fn pinned(&self, label: &str, bytes: usize) -> Result<Pinned> {
        match self {
            Device::Host(HostDevice(host)) => Pinned::on_host(host, label, bytes),
            Device::Cuda(CudaDevice(cuda)) => Pinned::on_cuda(cuda, label, bytes),
        }
    }

    /// A new stream. If the device cannot make one, that is its fault from then on, which every use reports.
    pub fn stream(&self) -> Stream {
        match self {
            Device::Host(HostDevice(host)) => Stream::on_host(host),
            Device::Cuda(CudaDevice(cuda)) => Stream::on_cuda(cuda),
        }
    }

    /// A new event, reached until it is recorded. A device that cannot make one reports it as for streams.
    pub fn event(&self) -> Event {
        match self {
            Device::Host(HostDevice(host)) => Event::on_host(host),
            Device::Cuda(CudaDevice(cuda)) => Event::on_cuda(cuda),
        }
    }

    /// Bytes of device memory in use by arenas.
    pub fn used_bytes(&self) -> usize {
        match self {
            Device::Host(HostDevice(host)) => host.memory().used(),
            Device::Cuda(CudaDevice(cuda)) => cuda.used_bytes(),
        }
    }

    /// Bytes of device memory that are free; on a CUDA device of those that the driver has for anyone.
    pub fn free_bytes(&self) -> usize {
        match self {
            Device::Host(HostDevice(host)) => host.memory().free_bytes(),
            Device::Cuda(CudaDevice(cuda)) => cuda.free_bytes(),
        }
    }

    /// Plants a fault, instead of the one before.
    #[doc(hidden)]
    pub fn plant(&self, fault: Option<Planted>) {
        self.state().plant(fault);
    }

    pub(crate) fn state(&self) -> &State {
        match self {
            Device::Host(HostDevice(host)) => &host.state,
            Device::Cuda(CudaDevice(cuda)) => &cuda.state,
        }
    }

    /// Refuses `call` with something of another device: its addresses may be live here too.
    pub(crate) fn refuse_other(&self, call: &'static str, other: &Device) -> Result<()> {
        // A device and its state are one allocation.
        match std::ptr::eq(self.state(), other.state()) {
            true => Ok(()),
            false => Err(Error::OtherDevice { call }),
        }
    }

    /// Refuses `call` with arenas of another device.
    pub(crate) fn refuse_foreign(&self, call: &'static str, arenas: &[Arena]) -> Result<()> {
        arenas.iter().try_for_each(|arena| self.refuse_other(call, arena.device()))
    }
}
