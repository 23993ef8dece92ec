//! How a kernel reaches resident state: parts of slots, and pages.

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Ptr, host::Access};

use crate::numerics::Element;
use crate::table::{Fact, PAGE};

/// The rows that a launch covers: `count` facts from row `first` on. Buffers of activations are indexed by
/// row number, so a launch over a part of the rows touches only their part of a buffer.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct RowRange {
    /// The facts of the round, row 0 first.
    pub facts: Ptr<Fact>,
    /// The first row.
    pub first: u32,
    /// How many rows.
    pub count: u32,
}

impl RowRange {
    /// The facts of the covered rows.
    pub fn read<'a>(&self, memory: &'a Access<'_>) -> Result<&'a [Fact], Fault> {
        memory.read(self.facts.at(self.first as usize), self.count as usize)
    }

    /// The first row as an index.
    pub fn start(&self) -> usize {
        self.first as usize
    }

    /// The number of rows as a size.
    pub fn len(&self) -> usize {
        self.count as usize
    }

    /// Whether no row is covered.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }
}

/// Splits facts into runs of one slot. A run is a slot's rows in order, from its first to its last.
pub fn runs(facts: &[Fact]) -> impl Iterator<Item = &[Fact]> {
    facts.chunk_by(|a, b| a.slot == b.slot)
}

/// One part of the state in every slot of a slab.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Part {
    /// The part in slot 0.
    pub base: Ptr<u8>,
    /// Bytes from one slot to the next.
    pub stride: u64,
}

impl Part {
    /// The part in `slot`.
    pub fn slot<T>(&self, slot: u32) -> Ptr<T> {
        self.base.byte_add(slot as usize * self.stride as usize).cast()
    }
}

/// The pages of one attention layer: keys, values and pooled index keys of [`PAGE`] positions each.
///
/// In a page, from this layer's offset on: keys `[PAGE, kv_heads, width]`, values the same, pooled index
/// keys `[PAGE / ratio, index_width]`, all of one element type.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Pages {
    /// This layer's part of page 0.
    pub base: Ptr<u8>,
    /// Bytes from one page to the next.
    pub stride: u64,
    /// The page tables: `capacity` page numbers per slot.
    pub tables: Part,
    /// Entries of a page table.
    pub capacity: u32,
    /// Number of pages.
    pub pages: u32,
    /// Key/value heads.
    pub kv_heads: u32,
    /// Width of a key or value head.
    pub width: u32,
    /// Positions per index block; divides [`PAGE`].
    pub ratio: u32,
    /// Width of an index key.
    pub index_width: u32,
}

impl Pages {
    /// Elements of one page's keys (or values).
    pub fn key_elements(&self) -> usize {
        PAGE * self.kv_heads as usize * self.width as usize
    }

    /// Elements of one page's pooled index keys.
    pub fn pooled_elements(&self) -> usize {
        PAGE / self.ratio as usize * self.index_width as usize
    }

    /// Bytes of one layer's part of a page, for elements of `element_bytes`.
    pub fn layer_bytes(&self, element_bytes: usize) -> usize {
        (2 * self.key_elements() + self.pooled_elements()) * element_bytes
    }

    /// The page numbers of a slot's first `positions` positions.
    ///
    /// # Errors
    /// The slot has no room for so many, or a page number is past the pool.
    pub fn table<'a>(&self, memory: &'a Access<'_>, slot: u32, positions: usize) -> Result<&'a [u32], Fault> {
        let entries = positions.div_ceil(PAGE);
        if entries > self.capacity as usize {
            let why =
                format!("{positions} positions need {entries} pages; a slot's table holds {}", self.capacity);
            return Err(memory.domain(why));
        }
        let table = memory.read(self.tables.slot::<u32>(slot), entries)?;
        match table.iter().find(|&&page| page >= self.pages) {
            Some(page) => {
                Err(memory.domain(format!("page {page} of slot {slot} is past the pool of {}", self.pages)))
            }
            None => Ok(table),
        }
    }

    /// The keys of `page`.
    pub fn keys<E: Element>(&self, page: u32) -> Ptr<E> {
        self.base.byte_add(page as usize * self.stride as usize).cast()
    }

    /// The values of `page`.
    pub fn values<E: Element>(&self, page: u32) -> Ptr<E> {
        self.keys::<E>(page).at(self.key_elements())
    }

    /// The pooled index keys of `page`.
    pub fn pooled<E: Element>(&self, page: u32) -> Ptr<E> {
        self.keys::<E>(page).at(2 * self.key_elements())
    }
}
