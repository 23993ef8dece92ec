//! An emission: the list of launches, copies, fills and collectives that a body asks for, before anything runs.
//!
//! Emitting needs no device. A device runs an emission eagerly, or records it under a capture; the digest
//! of the list is what two rounds with equal keys must share.

use std::fmt;

use bytemuck::Pod;

use crate::Ptr;
use crate::communicator::{Collective, Communicator, Held};
use crate::digest::{Digest, Digester};
use crate::error::{Error, Result};
use crate::kernel::{Definition, Grid, Kernel};

/// An ordered list of entries.
#[derive(Clone, Debug, Default)]
pub struct Emission {
    entries: Vec<Entry>,
    /// The argument blocks of all launches, one after another.
    blocks: Vec<u8>,
    /// The communicators of all collectives, in the order of their first use.
    communicators: Vec<Held>,
}

/// One thing for a device to do.
#[derive(Clone, Copy, Debug)]
pub enum Entry {
    /// Runs a kernel.
    Launch {
        /// Which.
        kernel: &'static Definition,
        /// Its launch shape.
        grid: Grid,
        /// Where its argument block starts in the emission.
        block: usize,
    },
    /// Copies bytes; source and destination do not overlap. Either side may be pinned memory. The source is
    /// read when the copy runs.
    Copy {
        /// Where to.
        to: Ptr<u8>,
        /// Where from.
        from: Ptr<u8>,
        /// How many bytes.
        bytes: usize,
    },
    /// Sets bytes to one value.
    Fill {
        /// Where.
        to: Ptr<u8>,
        /// How many bytes.
        bytes: usize,
        /// The value of each.
        value: u8,
    },
    /// Exchanges bytes with the other rank.
    Collective {
        /// Which of the emission's communicators.
        communicator: usize,
        /// What is done.
        what: Collective,
        /// Where the bytes are or go; of a gather, where the parts of all ranks lie, in rank order.
        at: Ptr<u8>,
        /// How many bytes; of a gather, of each rank.
        bytes: usize,
    },
}

impl Emission {
    /// An empty emission.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a launch of `K`, after checking that its arguments and its grid are legal.
    pub fn launch<K: Kernel>(&mut self, args: &K::Args) -> Result<()> {
        let refused = |why| Error::Launch { kernel: K::NAME, why };
        K::check(args).map_err(refused)?;
        let grid = K::grid(args);
        grid.check().map_err(refused)?;
        let block = self.blocks.len();
        self.blocks.extend_from_slice(bytemuck::bytes_of(args));
        self.entries.push(Entry::Launch { kernel: K::DEFINITION, grid, block });
        Ok(())
    }

    /// Adds a copy of `count` values.
    pub fn copy<T: Pod>(&mut self, to: Ptr<T>, from: Ptr<T>, count: usize) {
        self.entries.push(Entry::Copy { to: to.cast(), from: from.cast(), bytes: count * size_of::<T>() });
    }

    /// Adds a fill of `bytes` bytes.
    pub fn fill(&mut self, to: Ptr<u8>, bytes: usize, value: u8) {
        self.entries.push(Entry::Fill { to, bytes, value });
    }

    /// Adds a gather: `at` has room for `bytes` bytes of each rank, in rank order. Each rank brings its own part in
    /// its place; afterwards every rank has all parts.
    ///
    /// # Errors
    /// `bytes` is 0, or too large for any memory.
    pub fn gather(&mut self, communicator: &Communicator, at: Ptr<u8>, bytes: usize) -> Result<()> {
        self.collective("gather", communicator, Collective::Gather, at, bytes)
    }

    /// Adds a send of `bytes` bytes to the other rank, which receives as many.
    ///
    /// # Errors
    /// As [`Emission::gather`].
    pub fn send(&mut self, communicator: &Communicator, from: Ptr<u8>, bytes: usize) -> Result<()> {
        self.collective("send", communicator, Collective::Send, from, bytes)
    }

    /// Adds a receive of `bytes` bytes from the other rank, which sends as many.
    ///
    /// # Errors
    /// As [`Emission::gather`].
    pub fn receive(&mut self, communicator: &Communicator, to: Ptr<u8>, bytes: usize) -> Result<()> {
        self.collective("receive", communicator, Collective::Receive, to, bytes)
    }

    fn collective(
        &mut self,
        call: &'static str,
        communicator: &Communicator,
        what: Collective,
        at: Ptr<u8>,
        bytes: usize,
    ) -> Result<()> {
        let refused = |why| Err(Error::Size { call, why });
        if bytes == 0 {
            return refused("0 bytes; leave it out on both ranks".into());
        }
        if bytes > isize::MAX as usize / communicator.ranks() {
            return refused(format!("{bytes} bytes of each rank are more than any memory has"));
        }
        let communicator = self.hold(communicator);
        self.entries.push(Entry::Collective { communicator, what, at, bytes });
        Ok(())
    }

    /// The index of a communicator, which is held from now on.
    fn hold(&mut self, communicator: &Communicator) -> usize {
        let same = |held: &Held| {
            let held = held.communicator();
            held.epoch() == communicator.epoch() && held.exchange() == communicator.exchange()
        };
        self.communicators.iter().position(same).unwrap_or_else(|| {
            self.communicators.push(Held::new(communicator));
            self.communicators.len() - 1
        })
    }

    /// Adds every entry of `other`.
    pub fn append(&mut self, other: &Emission) {
        let shift = self.blocks.len();
        self.blocks.extend_from_slice(&other.blocks);
        self.entries.reserve(other.entries.len());
        for entry in &other.entries {
            let entry = match *entry {
                Entry::Launch { kernel, grid, block } => Entry::Launch { kernel, grid, block: block + shift },
                entry => self.adopt(other, entry),
            };
            self.entries.push(entry);
        }
    }

    /// What an entry of `other` that is no launch is in this emission.
    fn adopt(&mut self, other: &Emission, entry: Entry) -> Entry {
        match entry {
            Entry::Collective { communicator, what, at, bytes } => {
                let communicator = self.hold(other.communicator(communicator));
                Entry::Collective { communicator, what, at, bytes }
            }
            entry => entry,
        }
    }

    /// The entries of a range, as an emission of their own: to run a round in parts and look in between.
    pub fn slice(&self, range: std::ops::Range<usize>) -> Emission {
        let mut part = Emission { blocks: self.blocks.clone(), ..Emission::default() };
        for &entry in &self.entries[range] {
            let entry = part.adopt(self, entry);
            part.entries.push(entry);
        }
        part
    }

    /// The entries that `keep` chooses by index, in order, as an emission of their own.
    pub fn pick(&self, keep: impl Fn(usize, &Entry) -> bool) -> Emission {
        let mut picked = Emission::new();
        for (_, entry) in self.entries.iter().enumerate().filter(|(index, entry)| keep(*index, entry)) {
            let entry = match *entry {
                Entry::Launch { kernel, grid, block } => {
                    let to = picked.blocks.len();
                    picked.blocks.extend_from_slice(self.block(kernel, block));
                    Entry::Launch { kernel, grid, block: to }
                }
                entry => picked.adopt(self, entry),
            };
            picked.entries.push(entry);
        }
        picked
    }

    /// The arguments of entry `index` if it launches `K`.
    pub fn args<K: Kernel>(&self, index: usize) -> Option<K::Args> {
        match self.entries[index] {
            Entry::Launch { kernel, block, .. } if kernel.name == K::NAME && kernel.element == K::ELEMENT => {
                Some(bytemuck::pod_read_unaligned(self.block(kernel, block)))
            }
            _ => None,
        }
    }

    /// Removes everything, lets go of the communicators, and keeps the memory.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.blocks.clear();
        self.communicators.clear();
    }

    /// The entries in order.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Bytes that the list itself takes.
    pub fn bytes(&self) -> usize {
        let communicators = size_of_val(self.communicators.as_slice());
        size_of_val(self.entries.as_slice()) + self.blocks.len() + communicators
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The argument block of a launch that starts at `block`.
    pub fn block(&self, kernel: &Definition, block: usize) -> &[u8] {
        &self.blocks[block..block + kernel.args_bytes]
    }

    /// The communicator with this index.
    pub fn communicator(&self, index: usize) -> &Communicator {
        self.communicators[index].communicator()
    }

    /// A hold of its own on each communicator, for whatever outlives the emission.
    pub(crate) fn holds(&self) -> &[Held] {
        &self.communicators
    }

    /// Ends the communicators of work that will not run: the peer must not wait for it.
    pub(crate) fn give_up(&self, why: &Error) {
        self.communicators().for_each(|communicator| communicator.end(format!("this rank gave up: {why}")));
    }

    /// The communicators of all collectives, each once.
    pub fn communicators(&self) -> impl Iterator<Item = &Communicator> {
        self.communicators.iter().map(Held::communicator)
    }

    /// The digest of every entry in order: of a launch all that either device is told, which is kernel,
    /// element, twin, grid and argument bytes; of copies and fills addresses and sizes; of collectives also what is
    /// done, the rank, the communicator's epoch, and what this handle to it wants gathers carried by: with the epoch,
    /// which stands for what both ranks chose, that and the size say which kernel runs.
    pub fn digest(&self) -> Digest {
        let mut digest = Digester::new();
        for entry in &self.entries {
            match *entry {
                Entry::Launch { kernel, grid, block } => {
                    digest.number(0).text(kernel.name).text(kernel.element);
                    digest.number(kernel.twin.is_some().into());
                    kernel.twin.iter().for_each(|twin| twin.hash(&mut digest));
                    digest.bytes(bytemuck::bytes_of(&grid.0)).bytes(self.block(kernel, block));
                }
                Entry::Copy { to, from, bytes } => {
                    digest.number(1).number(to.address()).number(from.address()).number(bytes as u64);
                }
                Entry::Fill { to, bytes, value } => {
                    digest.number(2).number(to.address()).number(bytes as u64).number(value.into());
                }
                Entry::Collective { communicator, what, at, bytes } => {
                    let end = self.communicator(communicator);
                    let [rank, ranks] = [end.rank(), end.ranks()].map(|number| number as u64);
                    digest.number(3).number(what as u64).number(end.epoch()).number(rank).number(ranks);
                    digest.number(end.exchange() as u64);
                    digest.number(at.address()).number(bytes as u64);
                }
            }
        }
        digest.finish()
    }
}

/// One line per entry: what a person reads when two emissions differ.
impl fmt::Display for Emission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        struct Block<'a>(&'static Definition, &'a [u8]);
        impl fmt::Display for Block<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                (self.0.describe)(self.1, f)
            }
        }
        for (index, entry) in self.entries.iter().enumerate() {
            match *entry {
                Entry::Launch { kernel, grid: Grid([x, y, z]), block } => {
                    let block = Block(kernel, self.block(kernel, block));
                    writeln!(f, "{index:4} {kernel:?} grid {x}x{y}x{z} {block}")?;
                }
                Entry::Copy { to, from, bytes } => {
                    writeln!(f, "{index:4} copy {bytes} bytes {from:?} -> {to:?}")?
                }
                Entry::Fill { to, bytes, value } => {
                    writeln!(f, "{index:4} fill {bytes} bytes {to:?} with {value:#04x}")?;
                }
                Entry::Collective { communicator, what, at, bytes } => {
                    let text = self.communicator(communicator).describe(what, bytes);
                    writeln!(f, "{index:4} {text} at {at:?}")?;
                }
            }
        }
        Ok(())
    }
}
