//! What can go wrong on a device. [`Error`] is what calls return; [`Fault`] is what running work finds.

use std::fmt;

/// The result of a device call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a device call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The call may not happen while a stream of this device is being captured.
    Capturing {
        /// The refused call.
        call: &'static str,
        /// The label of the capture in progress.
        capture: String,
    },
    /// A capture ended without an exec, and why.
    CaptureFailed {
        /// The label of the capture.
        capture: String,
        /// What broke it.
        why: String,
    },
    /// The event, exec or arena belongs to another device than the stream.
    OtherDevice {
        /// The refused call.
        call: &'static str,
    },
    /// There is not enough memory.
    OutOfMemory {
        /// What the memory was for.
        label: String,
        /// Bytes asked for.
        asked: usize,
        /// Bytes that were left.
        free: usize,
    },
    /// Something that this machine would need does not exist or cannot be used.
    Missing {
        /// What: a library, a device.
        what: String,
        /// What was looked for and what was found.
        why: String,
    },
    /// Device code that cannot be compiled or loaded.
    Code {
        /// The source file.
        source: String,
        /// What was being done with it.
        doing: String,
        /// What the compiler or the driver said.
        why: String,
    },
    /// A launch whose arguments are not legal; nothing was queued.
    Launch {
        /// The kernel.
        kernel: &'static str,
        /// Which argument, with its values.
        why: String,
    },
    /// A call with sizes that do not fit.
    Size {
        /// The call.
        call: &'static str,
        /// The sizes.
        why: String,
    },
    /// A communicator cannot be connected, used or closed as asked.
    Communicator {
        /// What was being done.
        doing: String,
        /// Why it cannot be, and what to do.
        why: String,
    },
    /// Queued work failed when it ran. The device stays in this state: nothing later runs.
    Fault(Fault),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Capturing { call, capture } => {
                write!(
                    f,
                    "{call} is not allowed while `{capture}` is being captured; do it before the capture"
                )
            }
            Error::CaptureFailed { capture, why } => {
                write!(f, "capture `{capture}` failed: {why}; nothing of it ran, so run it eagerly")
            }
            Error::OtherDevice { call } => {
                write!(f, "{call} with an event, exec or arena of another device; use this device's own")
            }
            Error::OutOfMemory { label, asked, free } => {
                write!(
                    f,
                    "out of memory: `{label}` needs {asked} bytes and {free} are free; ask for less or "
                )?;
                f.write_str("free something first")
            }
            Error::Missing { what, why } => write!(f, "{what} is not usable: {why}"),
            Error::Code { source, doing, why } => write!(f, "cannot {doing} `{source}`: {why}"),
            Error::Launch { kernel, why } => {
                write!(f, "launch of `{kernel}` refused: {why}; nothing was queued")
            }
            Error::Size { call, why } => write!(f, "{call}: {why}"),
            Error::Communicator { doing, why } => write!(f, "cannot {doing}: {why}"),
            Error::Fault(fault) => {
                write!(f, "device work failed: {fault}; the device runs nothing more, so open a new one")
            }
        }
    }
}

impl std::error::Error for Error {}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        Error::Fault(fault)
    }
}

/// What running work found wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The kernel, copy, fill or collective that was running.
    pub work: String,
    /// What it met.
    pub kind: FaultKind,
}

/// The kinds of [`Fault`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// No live memory holds the range.
    Address {
        /// First byte of the range.
        address: u64,
        /// Its length in bytes.
        bytes: usize,
        /// The nearest memory below it, alive or freed, with how the range relates to it.
        near: String,
    },
    /// The address is not a multiple of the element's alignment.
    Alignment {
        /// The address.
        address: u64,
        /// The alignment the element needs.
        align: usize,
    },
    /// Two slices of one launch overlap and at least one of them is written.
    Overlap {
        /// First byte of the newer slice.
        address: u64,
        /// Its length in bytes.
        bytes: usize,
    },
    /// A write to a mapped file.
    ReadOnly {
        /// First byte of the range.
        address: u64,
        /// Its length in bytes.
        bytes: usize,
        /// The label of the mapping.
        label: String,
    },
    /// Pinned bytes were written between the queueing of a copy and its run.
    Overwritten {
        /// The label of the pinned memory.
        label: String,
    },
    /// A value that the kernel's domain excludes, such as an index past its table.
    Domain(String),
    /// The kernel's host implementation panicked, with its message.
    Panicked(String),
    /// A collective did not meet its counterpart on the other rank: how long was waited for what, and what to do.
    Peer(String),
    /// The driver of a CUDA device said so.
    Driver {
        /// The name of its code.
        name: String,
        /// Its sentence.
        says: String,
    },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.work)?;
        match &self.kind {
            FaultKind::Address { address, bytes, near } => {
                write!(f, "{bytes} bytes at {address:#x} are not live memory ({near})")
            }
            FaultKind::Alignment { address, align } => {
                write!(f, "address {address:#x} is not a multiple of {align}")
            }
            FaultKind::Overlap { address, bytes } => {
                write!(f, "{bytes} bytes at {address:#x} overlap another range of the same work")
            }
            FaultKind::ReadOnly { address, bytes, label } => {
                write!(f, "a write of {bytes} bytes at {address:#x}, in `{label}`, a file mapped to be read")
            }
            FaultKind::Overwritten { label } => {
                write!(
                    f,
                    "pinned memory `{label}` was overwritten before the copy from it ran; fence its reuse"
                )
            }
            FaultKind::Domain(why) | FaultKind::Peer(why) => f.write_str(why),
            FaultKind::Driver { name, says } => write!(f, "the CUDA driver reports {name} ({says})"),
            FaultKind::Panicked(message) => write!(f, "the kernel panicked: {message}"),
        }
    }
}

impl std::error::Error for Fault {}
