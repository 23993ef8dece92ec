//! A range of a file as memory: the only place that maps one.

use std::fs::File;
use std::io;
use std::ptr::NonNull;

use memmap2::{Advice, Mmap, MmapOptions};

/// Maps begin at multiples of this, so that an address inside one is as aligned as its offset in the file.
const ALIGN: u64 = 4096;

/// Bytes of a file that can be read as memory; the system reads them when they are first looked at.
pub(crate) struct FileMap {
    map: Mmap,
    /// Bytes of the map before those that were asked for.
    lead: usize,
}

impl FileMap {
    /// Maps `bytes` bytes of `file` from `offset` on.
    pub(crate) fn new(file: &File, offset: u64, bytes: usize) -> io::Result<FileMap> {
        let lead = (offset % ALIGN) as usize;
        let mut options = MmapOptions::new();
        options.offset(offset - lead as u64).len(lead + bytes);
        // SAFETY: the map is only read. That nobody shortens or rewrites the file meanwhile is asked of whoever
        // maps it (`Device::file_arena` says so): a process has no means to see to that.
        let map = unsafe { options.map(file)? };
        // Rows are looked up in no order, so reading ahead would fetch what nobody asks for.
        map.advise(Advice::Random)?;
        Ok(FileMap { map, lead })
    }

    /// The bytes that were asked for.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map[self.lead..]
    }

    /// Bytes of the map before them.
    pub(crate) fn lead(&self) -> usize {
        self.lead
    }

    /// Size of the whole map.
    pub(crate) fn mapped_bytes(&self) -> usize {
        self.map.len()
    }

    /// Where the map starts; good for reads of [`FileMap::mapped_bytes`] bytes.
    pub(crate) fn start(&self) -> NonNull<u8> {
        NonNull::from(&self.map[..]).cast()
    }
}
