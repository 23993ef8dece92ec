//! The bundle: all state of one lane, moved as one. No other code moves lane state.
//!
//! A bundle is a slot's state parts (head with true length, last id and n-gram history; rotary ring;
//! recurrent states; windows; index rings) and the first pages of its table, which hold keys, values and
//! pooled index keys. It can be zeroed, copied, snapshotted, restored and digested.

use std::fmt;

use graph::{Arena, Device, Digest, Digester, Emission, Ptr, Stream};
use kernels::table::{Head, PAGE};

use crate::lanes::{LaneLayout, Lanes, LayerSpans};

/// One lane's state: a slot, the pages of its table that hold positions, and how many positions those are.
#[derive(Clone, Copy)]
pub struct Bundle<'a> {
    /// The slab.
    pub lanes: &'a Lanes,
    /// The slot in it.
    pub slot: usize,
    /// The lane's pages in order; at least as many as `length` needs.
    pub pages: &'a [u32],
    /// Positions whose state is final.
    pub length: usize,
}

impl<'a> Bundle<'a> {
    fn layout(&self) -> &'a LaneLayout {
        &self.lanes.layout
    }

    fn slot_base(&self) -> Ptr<u8> {
        self.lanes.slab.slot(self.slot)
    }

    /// Addresses of the pages that hold positions.
    fn used_pages(&self) -> impl Iterator<Item = Ptr<u8>> {
        let pages = &self.pages[..self.length.div_ceil(PAGE)];
        pages
            .iter()
            .map(|&page| self.lanes.pool.arena.base().byte_add(page as usize * self.lanes.layout.page_bytes))
    }

    /// The arenas that a copy between this bundle and a snapshot points into.
    fn keeps(&self, snapshot: &Snapshot) -> Vec<Arena> {
        self.lanes.arenas().into_iter().chain([snapshot.arena.clone()]).collect()
    }

    /// Makes the slot a fresh lane: zero state, and a page table that names no page.
    pub fn zero(&self, emission: &mut Emission) {
        let layout = self.layout();
        for (_, span) in layout.parts() {
            emission.fill(span.at(self.slot_base()), span.bytes, 0);
        }
        emission.fill(layout.page_table.at(self.slot_base()), layout.page_table.bytes, 0xff);
    }

    /// Copies this state into another bundle with the same layout and length. The other's page table must
    /// already name its own pages.
    pub fn copy_to(&self, other: &Bundle<'_>, emission: &mut Emission) {
        assert_eq!(self.length, other.length, "bundles of different lengths");
        for (_, span) in self.layout().parts() {
            emission.copy::<u8>(span.at(other.slot_base()), span.at(self.slot_base()), span.bytes);
        }
        for (from, to) in self.used_pages().zip(other.used_pages()) {
            emission.copy::<u8>(to, from, self.layout().page_bytes);
        }
    }

    /// Takes a copy of this state into memory of its own.
    pub fn snapshot(&self, device: &Device, stream: &Stream) -> graph::Result<Snapshot> {
        let pages = self.length.div_ceil(PAGE);
        let slot_bytes = self.layout().slot.bytes();
        let arena = device.arena("state snapshot", slot_bytes + pages * self.layout().page_bytes)?;
        let snapshot = Snapshot { arena, slot_bytes, length: self.length };
        let mut emission = Emission::new();
        for (_, span) in self.layout().parts() {
            emission.copy::<u8>(span.at(snapshot.arena.base()), span.at(self.slot_base()), span.bytes);
        }
        for (from, to) in self.used_pages().zip(snapshot.pages(self.layout())) {
            emission.copy::<u8>(to, from, self.layout().page_bytes);
        }
        stream.run(emission, &self.keeps(&snapshot))?;
        Ok(snapshot)
    }

    /// Puts a snapshot back. The bundle's length must be the snapshot's, its page table its own.
    pub fn restore(&self, snapshot: &Snapshot, stream: &Stream) -> graph::Result<()> {
        assert_eq!(self.length, snapshot.length, "a bundle and a snapshot of different lengths");
        let mut emission = Emission::new();
        for (_, span) in self.layout().parts() {
            emission.copy::<u8>(span.at(self.slot_base()), span.at(snapshot.arena.base()), span.bytes);
        }
        for (to, from) in self.used_pages().zip(snapshot.pages(self.layout())) {
            emission.copy::<u8>(to, from, self.layout().page_bytes);
        }
        stream.run(emission, &self.keeps(snapshot))
    }

    /// The digest of every part, after running what is queued on `stream`. Bytes of pages past the length
    /// are not state and not in it, nor is where pages lie.
    pub fn digest(&self, stream: &Stream) -> graph::Result<BundleDigest> {
        stream.synchronize()?;
        let layout = self.layout();
        let slot = self.lanes.slab.arena();
        let mut parts = Vec::new();
        for (label, span) in layout.parts() {
            let bytes = slot.read::<u8>(span.at(self.slot_base()), span.bytes)?;
            parts.push((label.to_owned(), Digester::of(&bytes)));
        }
        for (layer, spans) in layout.layers.iter().enumerate() {
            if let LayerSpans::Sparse { page_offset, .. } = *spans {
                parts.push((format!("layer {layer} pages"), self.digest_pages(page_offset)?));
            }
        }
        Ok(BundleDigest { length: self.length, parts })
    }

    fn digest_pages(&self, page_offset: usize) -> graph::Result<Digest> {
        let (layout, view) = (self.layout(), self.layout().page_view());
        let bytes = layout.element.bytes();
        let key_row = view.key_elements() / PAGE * bytes;
        let pooled_row = view.index_width as usize * bytes;
        let mut digest = Digester::new();
        for (index, page) in self.used_pages().enumerate() {
            let rows = (self.length - index * PAGE).min(PAGE);
            let base = page.byte_add(page_offset);
            let keys = view.key_elements() * bytes;
            let runs = [
                (0, rows * key_row),
                (keys, rows * key_row),
                (2 * keys, rows / view.ratio as usize * pooled_row),
            ];
            for (offset, bytes) in runs {
                digest.bytes(&self.lanes.pool.arena.read::<u8>(base.byte_add(offset), bytes)?);
            }
        }
        Ok(digest.finish())
    }

    /// The head, after running what is queued on `stream`.
    pub fn head(&self, stream: &Stream) -> graph::Result<Head> {
        stream.synchronize()?;
        Ok(self.lanes.slab.arena().read(self.layout().head.at::<Head>(self.slot_base()), 1)?[0])
    }

    /// Makes the lane look as if it had `length` positions, in these pages with whatever they hold: for benches. The
    /// page table names all of `pages`. What is queued on `stream` runs before.
    pub fn pretend(&self, stream: &Stream) -> graph::Result<()> {
        let head = Head { length: self.length as u32, ..self.head(stream)? };
        let (arena, base) = (self.lanes.slab.arena(), self.slot_base());
        arena.write(self.layout().head.at(base), &[head])?;
        arena.write(self.layout().page_table.at(base), self.pages)
    }

    /// Replaces the id that the next decode row will run, after running what is queued on `stream`.
    pub fn set_last_id(&self, id: u32, stream: &Stream) -> graph::Result<()> {
        let head = Head { last_id: id, ..self.head(stream)? };
        self.lanes.slab.arena().write(self.layout().head.at(self.slot_base()), &[head])
    }
}

/// A lane's state in memory of its own.
pub struct Snapshot {
    arena: Arena,
    slot_bytes: usize,
    length: usize,
}

impl Snapshot {
    /// Positions whose state it holds.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> usize {
        self.arena.bytes()
    }

    fn pages(&self, layout: &LaneLayout) -> impl Iterator<Item = Ptr<u8>> {
        let (first, bytes) = (self.arena.base().byte_add(self.slot_bytes), layout.page_bytes);
        (0..self.length.div_ceil(PAGE)).map(move |index| first.byte_add(index * bytes))
    }
}

/// The digest of a bundle, part by part, so that a difference can be named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BundleDigest {
    /// Positions.
    pub length: usize,
    /// Label and digest of each part.
    pub parts: Vec<(String, Digest)>,
}

impl BundleDigest {
    /// One digest over all parts.
    pub fn whole(&self) -> Digest {
        let mut digest = Digester::new();
        digest.number(self.length as u64);
        for (label, part) in &self.parts {
            digest.text(label).digest(*part);
        }
        digest.finish()
    }

    /// The labels of the parts in which two bundles differ.
    pub fn differences<'a>(&'a self, other: &'a BundleDigest) -> Vec<&'a str> {
        assert_eq!(self.parts.len(), other.parts.len(), "bundles of one layout");
        let pairs = self.parts.iter().zip(&other.parts);
        pairs.filter(|(a, b)| a != b).map(|(a, _)| a.0.as_str()).collect()
    }
}

impl fmt::Display for BundleDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "bundle of {} positions {:.12}", self.length, self.whole())?;
        self.parts.iter().try_for_each(|(label, digest)| writeln!(f, "  {digest:.12} {label}"))
    }
}
