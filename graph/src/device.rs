//! A device: where memory, streams and captures come from. A closed set; today its only member is the host.

use std::sync::Arc;

use crate::arena::{Arena, Pinned};
use crate::error::Result;
use crate::host::{Host, HostOptions};
use crate::stream::{Event, Stream};

/// One device. Clones are handles to the same device.
#[derive(Clone)]
pub enum Device {
    /// The host device.
    Host(HostDevice),
}

/// A handle to a host device.
#[derive(Clone)]
pub struct HostDevice(pub(crate) Arc<Host>);

impl Device {
    /// A new host device.
    pub fn host(options: HostOptions) -> Device {
        Device::Host(HostDevice(Host::new(options)))
    }

    /// What the device is, for people.
    pub fn describe(&self) -> String {
        match self {
            Device::Host(_) => {
                let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
                format!("host ({threads} threads)")
            }
        }
    }

    /// Allocates `bytes` bytes of device memory, poisoned.
    ///
    /// # Errors
    /// Out of memory; or a capture is in progress.
    pub fn arena(&self, label: &str, bytes: usize) -> Result<Arena> {
        match self {
            Device::Host(HostDevice(host)) => Arena::on_host(host, label, bytes),
        }
    }

    /// Allocates `bytes` bytes of pinned host memory, poisoned.
    ///
    /// # Errors
    /// A capture is in progress.
    pub fn pinned(&self, label: &str, bytes: usize) -> Result<Pinned> {
        match self {
            Device::Host(HostDevice(host)) => Pinned::on_host(host, label, bytes),
        }
    }

    /// A new stream.
    pub fn stream(&self) -> Stream {
        match self {
            Device::Host(HostDevice(host)) => Stream::on_host(host),
        }
    }

    /// A new event, reached until it is recorded.
    pub fn event(&self) -> Event {
        match self {
            Device::Host(HostDevice(host)) => Event::on_host(host),
        }
    }

    /// Bytes of device memory in use.
    pub fn used_bytes(&self) -> usize {
        match self {
            Device::Host(HostDevice(host)) => host.memory().used(),
        }
    }

    /// Bytes of device memory that are free.
    pub fn free_bytes(&self) -> usize {
        match self {
            Device::Host(HostDevice(host)) => host.memory().free_bytes(),
        }
    }
}
