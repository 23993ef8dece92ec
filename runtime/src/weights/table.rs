//! The n-gram tables: where they live, and how they get there.
//!
//! A table may lie with the other weights, in pinned host memory, or as ranges of the checkpoint's own files. A
//! kernel reaches it through the addresses of its shards, which are weights themselves.

use std::fmt;

use graph::{Arena, Device, Emission, Ptr, Span};
use kernels::numerics::ElementType;
use kernels::tiles::Place;
use kernels::weight::{Format, GROUP, Matrix};

use super::extract::Extract;
use super::load::Stack;
use super::read::format_of;
use super::{Made, made};
use crate::checkpoint::layout::{Ple, Spec, Stored};
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

/// How an n-gram table will lie in memory: its shards one after another, then their scales, if they have any.
pub(super) struct TablePlan {
    /// Where the addresses of its shards go.
    addresses: Span,
    /// Where those of their scales go, where they have any.
    scale_addresses: Option<Span>,
    /// Where it goes itself, if it lives with the other weights.
    pub(super) span: Option<Span>,
    /// The tensors of its shards, in order.
    pub(super) shards: Vec<Extract>,
    /// The tensors of their scales.
    scales: Vec<Spec>,
    /// How it is stored.
    format: Format,
    /// Size of a shard, without scales.
    shard_bytes: usize,
    /// Size of a shard's scales.
    scale_bytes: usize,
    /// Size of all.
    pub(super) bytes: usize,
    /// What it is made as if nothing is read.
    pub(super) made: Made,
}

impl TablePlan {
    /// The plan of a table that lives elsewhere than the other weights, where addresses go to these places.
    pub(super) fn new(
        ple: &Ple,
        element: ElementType,
        addresses: Span,
        scale_addresses: Option<Span>,
    ) -> TablePlan {
        let first = &ple.shards[0];
        let format = format_of(first);
        let numbers: usize = first.shape.iter().product();
        let (shard_bytes, scale_bytes) = match format {
            Format::Plain => (numbers * element.bytes(), 0),
            Format::Fp8 => (numbers, 0),
            Format::Nvfp4 => (numbers / 2, numbers / GROUP),
        };
        let scales = ple.shards.iter().filter_map(|shard| match &shard.stored {
            Stored::Nvfp4 { scales, .. } => Some(Spec::clone(scales)),
            _ => None,
        });
        TablePlan {
            addresses,
            scale_addresses,
            span: None,
            shards: ple.shards.iter().map(Extract::from).collect(),
            scales: scales.collect(),
            format,
            shard_bytes,
            scale_bytes,
            bytes: ple.shards.len() * (shard_bytes + scale_bytes),
            made: Made::of(first),
        }
    }

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

    /// Adds launches that make the table at `to`.
    pub(super) fn make(
        &self,
        emission: &mut Emission,
        element: ElementType,
        to: Ptr<u8>,
        seed: u64,
    ) -> graph::Result<()> {
        let shards = self.shards.len();
        match self.format {
            Format::Plain => made::fill(emission, element, to, self.bytes, seed, self.made.scale),
            Format::Fp8 => made::codes(emission, self.format, to, self.bytes, seed),
            Format::Nvfp4 => {
                let (codes, scales) = (shards * self.shard_bytes, shards * self.scale_bytes);
                made::codes(emission, self.format, to, codes, seed)?;
                made::scales_of_groups(emission, to.byte_add(codes), scales, seed)
            }
        }
    }

    /// All that is read of it: the rows of its shards, as one matrix.
    pub(super) fn stack(&self, element: ElementType) -> Stack<'_> {
        let shape = &self.shards[0].spec.shape;
        let (rows, width) = shape.split_at(shape.len() - 1);
        let rows = self.shards.len() * rows.iter().product::<usize>();
        Stack::rows(&self.shards, Matrix::plain(rows, width[0]).stored(self.format), element)
    }

    /// Where its parts go, if everything lies one after another from `first` on.
    pub(super) fn place(&self, first: Ptr<u8>) -> Place {
        let scales = match self.scale_bytes {
            0 => Ptr::NULL,
            _ => first.byte_add(self.shards.len() * self.shard_bytes),
        };
        Place { codes: first, scales, globals: Ptr::NULL }
    }

    /// Tells the kernels, which read it in `weights`, where each shard is, and where its scales are.
    pub(super) fn tell(&self, weights: &Arena, shards: &[Ptr<u8>], scales: &[Ptr<u8>]) -> graph::Result<()> {
        weights.write(self.addresses.at(weights.base()), shards)?;
        match self.scale_addresses {
            Some(span) => weights.write(span.at(weights.base()), scales),
            None => Ok(()),
        }
    }

    /// As [`TablePlan::tell`], if everything lies one after another from `first` on.
    pub(super) fn tell_from(&self, weights: &Arena, first: Ptr<u8>) -> graph::Result<()> {
        let count = self.shards.len();
        let at = |from: usize, each: usize| -> Vec<Ptr<u8>> {
            (0..count).map(|number| first.byte_add(from + number * each)).collect()
        };
        self.tell(weights, &at(0, self.shard_bytes), &at(count * self.shard_bytes, self.scale_bytes))
    }

    /// Maps every shard, then the scales of every shard.
    pub(super) fn map(&self, checkpoint: &Checkpoint, device: &Device) -> Result<Vec<Arena>, Error> {
        device.maps_files().map_err(unmappable)?;
        let shard = |spec: &Spec| {
            let entry = checkpoint.expect(spec);
            let (file, bytes) = (checkpoint.file(entry), entry.bytes() as usize);
            device.file_arena("n-gram table", file, entry.range.start, bytes).map_err(unmappable)
        };
        self.shards.iter().map(|shard| &shard.spec).chain(&self.scales).map(shard).collect()
    }

    /// Whether every shard can be used as it lies in its file.
    ///
    /// # Errors
    /// One cannot: which, and why.
    pub(super) fn mappable(&self, checkpoint: &Checkpoint, element: ElementType) -> Result<(), Error> {
        match self.format {
            Format::Plain => {
                self.shards.iter().try_for_each(|shard| mappable(checkpoint, element, &shard.spec))
            }
            // Single bytes, read as they are wherever they lie.
            Format::Fp8 | Format::Nvfp4 => Ok(()),
        }
    }
}

fn mappable(checkpoint: &Checkpoint, element: ElementType, spec: &Spec) -> Result<(), Error> {
    let (name, entry) = (&spec.name, checkpoint.expect(spec));
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
