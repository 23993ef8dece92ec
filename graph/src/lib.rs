//! `graph`: what a device can do, and whether work may be replayed.
//!
//! The crate knows memory, streams, captures and digests. It names no model, operation, lane or request.
//!
//! **Who owns an address.** An [`Arena`] owns device memory; a [`Ptr`] is a number that says where in it
//! something lies. Whatever outlives the call that used a `Ptr` (a queued launch, an [`Exec`]) holds the
//! arenas it points into. The host device never reuses an address, so a stale one is an error that names
//! the arena it came from; a CUDA device trusts addresses, for the same emissions.
//!
//! Reading order: [`address`], [`region`], [`arena`], [`kernel`], [`emission`], [`stream`], [`recording`],
//! [`exec`], [`key`], [`bank`], [`staging`], [`communicator`], [`digest`], [`device`], [`host`], [`cuda`].

pub mod address;
pub mod arena;
pub mod bank;
pub mod communicator;
pub mod cuda;
pub mod device;
pub mod digest;
pub mod emission;
pub mod error;
pub mod exec;
mod file;
pub mod host;
pub mod kernel;
pub mod key;
pub mod recording;
pub mod region;
pub mod staging;
mod state;
pub mod stream;

pub use address::Ptr;
pub use arena::{Arena, Pinned, Slab};
pub use bank::{Bank, BankCounts, How};
pub use communicator::{Collective, Communicator, Exchange, GatherTimes};
pub use cuda::{CudaOptions, NcclLibrary, nccl_environment, nccl_library};
pub use device::Device;
pub use digest::{Digest, Digester};
pub use emission::{Emission, Entry};
pub use error::{Error, Fault, Result};
pub use exec::{Exec, Times};
pub use kernel::{Definition, Grid, Kernel, Source, Twin};
pub use key::{Buffers, Key};
pub use recording::Recording;
pub use region::{Region, Span};
pub use staging::{Pending, Readback, Staging};
#[doc(hidden)]
pub use state::Planted;
pub use stream::{Event, Stream};
