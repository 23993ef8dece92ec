//! The plain-old-data rows of a round: what is staged to the device, and what the device makes of it.
//!
//! Everything that varies between two rounds of equal shape is here or in resident state; nothing of it is
//! ever in an argument block. This is the table's layout, version [`LAYOUT`].

use bytemuck::{Pod, Zeroable};
use graph::{Ptr, Region, Span};

/// Version of the layouts in this file; part of what a capture depends on.
pub const LAYOUT: u32 = 2;

/// How many ids before the current one a row knows: the longest n-gram is one more.
pub const PREVIOUS: usize = 4;

/// Positions per page; also the prompt grid and the chunk of the recurrent layers.
pub const PAGE: usize = 64;

/// The most alternatives that a picked row reports.
pub const TOPS: usize = 20;

/// Entries of a slot's bias list.
pub const BIASES: usize = 512;

/// The bit of a slot's count of an id that says: it occurs in the prompt. The rest is how often it was picked.
pub const IN_PROMPT: u32 = 1 << 31;

/// The kinds of row batches. A kernel's route follows the kind, never the number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Rows of one prompt, with staged ids.
    Prompt,
    /// One row per sequence, whose id is resident.
    Decode,
}

/// Staged counts.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Header {
    /// Rows in the table.
    pub rows: u32,
    /// Page edits in the table.
    pub edits: u32,
}

/// Staged: one row.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Row {
    /// The slot, numbered inside its slab.
    pub slot: u32,
    /// This row's place among the rows of its slot in this round, from 0.
    pub place: u32,
    /// Index of the slot's first row in this round.
    pub first: u32,
    /// Number of rows of the slot in this round.
    pub count: u32,
}

/// Staged: the id of a prompt row and its rotary position on three axes (time, height, width).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct PromptRow {
    /// The id.
    pub id: u32,
    /// The rotary position.
    pub axes: [i32; 3],
}

/// Staged: entry `index` of a slot's page table becomes `page`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct PageEdit {
    /// The slab, in the engine's numbering.
    pub slab: u32,
    /// The slot in it.
    pub slot: u32,
    /// Which run of [`PAGE`] positions.
    pub index: u32,
    /// The page that holds it.
    pub page: u32,
}

/// Made on the device by the `rows` kernel: everything later kernels of the round know about a row.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Fact {
    /// The slot, as staged.
    pub slot: u32,
    /// As staged.
    pub place: u32,
    /// As staged.
    pub first: u32,
    /// As staged.
    pub count: u32,
    /// The row's id.
    pub id: u32,
    /// Its sequence position, from 0: where its keys are stored, and one less than what it can see.
    pub position: u32,
    /// Its rotary position.
    pub axes: [i32; 3],
    /// The ids before it, nearest first; the boundary id where there is none. No segment rule applied.
    pub previous: [u32; PREVIOUS],
}

impl Fact {
    /// The sequence position of the slot's first row in this round.
    pub fn start(&self) -> u32 {
        self.position - self.place
    }
}

/// Resident at the start of every slot: what a sequence knows of itself.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Head {
    /// Positions whose state is final.
    pub length: u32,
    /// The last picked id: the id of a decode row.
    pub last_id: u32,
    /// Added to the sequence position of a decode row to get its rotary position.
    pub rope_offset: i32,
    /// The ids at positions `length - 1`, `length - 2`, ..., plus one; 0 where there is none. (Plus one, so
    /// that a zeroed slot is a fresh sequence.)
    pub previous_plus_one: [u32; PREVIOUS],
}

/// Staged: how a slot's rows pick, at the index of its first row; entries of other rows are not read.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Sampling {
    /// Draws differ by it.
    pub seed: u64,
    /// 0: the likeliest id; else what logits are divided by. Finite, not negative.
    pub temperature: f32,
    /// The mass of the likeliest ids that may be drawn, above 0; 1 is off.
    pub top_p: f32,
    /// Ids less likely than this part of the likeliest are not drawn, 0 to 1; 0 is off.
    pub min_p: f32,
    /// Subtracted from the logits of ids that were picked before, -2 to 2; 0 is off.
    pub presence: f32,
    /// Subtracted once for every time that an id was picked before, -2 to 2; 0 is off.
    pub frequency: f32,
    /// Divides positive logits, and multiplies others, of ids in the prompt or picked before; above 0; 1 is
    /// off.
    pub repetition: f32,
    /// How many of the likeliest ids may be drawn; 0 is off.
    pub top_k: u32,
    /// How many of the likeliest ids to report, at most [`TOPS`].
    pub logprobs: u32,
    /// Entries used of the slot's bias list, at most [`BIASES`].
    pub biases: u32,
    /// Not used; zero.
    pub zero: u32,
}

/// The likeliest id, and no report.
impl Default for Sampling {
    fn default() -> Self {
        Sampling { top_p: 1.0, repetition: 1.0, ..Sampling::zeroed() }
    }
}

/// Resident: an entry of a slot's bias list.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct Bias {
    /// The id.
    pub id: u32,
    /// What is added to its logit.
    pub value: f32,
}

/// What a picked row reports.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct Outcome {
    /// The picked id.
    pub id: u32,
    /// 0: the logits were finite.
    pub status: u32,
    /// Rows of the slot that stand: 1.
    pub accepted: u32,
    /// How many of the likeliest ids follow.
    pub tops: u32,
    /// Natural log of the probability of the picked id.
    pub logprob: f32,
    /// The likeliest ids, best first; zero past `tops`.
    pub top_ids: [u32; TOPS],
    /// Their log probabilities; zero past `tops`.
    pub top_logprobs: [f32; TOPS],
}

/// Where the parts of the staged table lie: a fixed capacity, so that addresses never move.
#[derive(Clone, Copy, Debug)]
pub struct TableLayout {
    /// The [`Header`].
    pub header: Span,
    /// The [`Row`]s.
    pub rows: Span,
    /// The [`PageEdit`]s.
    pub edits: Span,
    /// The [`Sampling`] options, one per row.
    pub sampling: Span,
    /// The [`PromptRow`]s.
    pub prompt: Span,
    /// Size of the table in bytes.
    pub bytes: usize,
}

impl TableLayout {
    /// A table with room for so many rows and page edits.
    pub fn new(rows: usize, edits: usize) -> TableLayout {
        let mut region = Region::new();
        let header = region.array::<Header>("header", 1);
        let row_span = region.array::<Row>("rows", rows);
        let edits = region.array::<PageEdit>("page edits", edits);
        let sampling = region.array::<Sampling>("sampling", rows);
        let prompt = region.array::<PromptRow>("prompt rows", rows);
        TableLayout { header, rows: row_span, edits, sampling, prompt, bytes: region.bytes() }
    }

    /// The addresses of the parts in a table at `base`.
    pub fn at(&self, base: Ptr<u8>) -> Table {
        Table {
            header: self.header.at(base),
            rows: self.rows.at(base),
            edits: self.edits.at(base),
            sampling: self.sampling.at(base),
            prompt: self.prompt.at(base),
        }
    }
}

/// The staged table on the device.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Table {
    /// The header.
    pub header: Ptr<Header>,
    /// The rows.
    pub rows: Ptr<Row>,
    /// The page edits.
    pub edits: Ptr<PageEdit>,
    /// The sampling options, one per row.
    pub sampling: Ptr<Sampling>,
    /// The prompt rows.
    pub prompt: Ptr<PromptRow>,
}
