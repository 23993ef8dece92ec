//! The n-gram tables: where they live, and how they get there.
//!
//! A table may lie with the other weights, in pinned host memory, or as ranges of the checkpoint's own files. A
//! kernel reaches it through the addresses of its shards, which are weights themselves.

use std::fmt;

use graph::{Arena, Device, Ptr, Span};
use kernels::numerics::ElementType;

use super::Made;
use crate::checkpoint::{Checkpoint, Dtype};
use crate::error::Error;

/// Where the n-gram tables live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TablePlace {
    /// In device memory, with the other weights.
    #[default]
    Device,
    /// In pinned host memory, which the device reads over the bus.
    Pinned,
    /// In the checkpoint's files, mapped: rows are read from disk when they are first looked up.
    Mapped,
}

impl fmt::Display for TablePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TablePlace::Device => "device",
            TablePlace::Pinned => "pinned",
            TablePlace::Mapped => "mmap",
        })
    }
}

/// How an n-gram table will lie in memory.
pub(super) struct TablePlan {
    /// Where the addresses of its shards go.
    pub(super) addresses: Span,
    /// Where it goes itself, if it lives with the other weights.
    pub(super) span: Option<Span>,
    /// The tensors of its shards, in order.
    pub(super) shards: Vec<String>,
    /// Size of all shards, in elements of the model.
    pub(super) bytes: usize,
    /// What it is made as if nothing is read.
    pub(super) made: Made,
}

impl TablePlan {
    /// Room for all shards, one after another: among the weights, or in pinned memory of its own.
    pub(super) fn room(&self, weights: &Arena, device: &Device) -> graph::Result<(Arena, Ptr<u8>)> {
        match self.span {
            Some(span) => Ok((weights.clone(), span.at(weights.base()))),
            None => {
                let pinned = device.pinned_arena("n-gram table", self.bytes)?;
                let to = pinned.base();
                Ok((pinned, to))
            }
        }
    }

    /// Tells the kernels, which read it in `weights`, where each shard is.
    pub(super) fn tell(&self, weights: &Arena, shards: &[Ptr<u8>]) -> graph::Result<()> {
        weights.write(self.addresses.at(weights.base()), shards)
    }

    /// As [`TablePlan::tell`], if the shards lie one after another from `first` on.
    pub(super) fn tell_from(&self, weights: &Arena, first: Ptr<u8>) -> graph::Result<()> {
        let (count, shard) = (self.shards.len(), self.bytes / self.shards.len());
        let shards: Vec<Ptr<u8>> = (0..count).map(|number| first.byte_add(number * shard)).collect();
        self.tell(weights, &shards)
    }

    /// Maps every shard.
    pub(super) fn map(&self, checkpoint: &Checkpoint, device: &Device) -> Result<Vec<Arena>, Error> {
        device.maps_files().map_err(unmappable)?;
        let shard = |name: &String| {
            let entry = checkpoint.entry(name).expect("the layout's tensors are in the checkpoint");
            let (file, bytes) = (checkpoint.file(entry), entry.bytes() as usize);
            device.file_arena("n-gram table", file, entry.range.start, bytes).map_err(unmappable)
        };
        self.shards.iter().map(shard).collect()
    }

    /// Whether every shard can be used as it lies in its file.
    ///
    /// # Errors
    /// One cannot: which, and why.
    pub(super) fn mappable(&self, checkpoint: &Checkpoint, element: ElementType) -> Result<(), Error> {
        self.shards.iter().try_for_each(|shard| mappable(checkpoint, element, shard))
    }
}

fn mappable(checkpoint: &Checkpoint, element: ElementType, name: &str) -> Result<(), Error> {
    let entry = checkpoint.entry(name).expect("the layout's tensors are in the checkpoint");
    let stored = match element {
        ElementType::Bf16 => Dtype::BF16,
        ElementType::F32 => Dtype::F32,
    };
    let problem = if entry.dtype != stored {
        let kind = element.name();
        format!("is stored as {} and the model runs in {kind}, which takes a copy", entry.dtype)
    } else if !entry.range.start.is_multiple_of(element.bytes() as u64) {
        format!("begins at byte {}, which is no place for {} elements", entry.range.start, element.name())
    } else {
        return Ok(());
    };
    let path = checkpoint.path(entry).display();
    Err(Error::Setting(format!(
        "--table mmap: tensor {name} in {path} {problem}; use --table device or --table pinned"
    )))
}

/// What to say when the device refuses a mapped table.
fn unmappable(error: graph::Error) -> Error {
    match error {
        error @ (graph::Error::Missing { .. } | graph::Error::Size { .. }) => {
            Error::Setting(format!("--table mmap: {error}; use --table pinned or --table device"))
        }
        error => error.into(),
    }
}
