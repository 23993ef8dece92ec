//! The first kernel of a round: turns the staged table and resident state into facts about each row.

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};

use crate::source;
use crate::state::Part;
use crate::table::{Fact, Head, Kind, Table};

/// Resolves rows, and applies the staged edits of page tables.
///
/// ```text
/// position  = head.length + place
/// id        = staged (prompt) or head.last_id (decode)
/// axes      = staged (prompt) or position + head.rope_offset on each axis (decode)
/// previous  = the ids of the rows before it in the round, then of the head, then the boundary id
/// table[index] = page       for every staged edit of this slab
/// ```
/// Domain     rows of a slot are consecutive, in order of place; a decode row has place 0; staged counts
///            fit the table; slots and edits fit the slab
/// Effects    writes the facts of the covered rows and the edited entries of page tables
pub struct Rows;

/// Arguments of [`Rows`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Args {
    /// The staged table.
    pub table: Table,
    /// The heads of the slab's slots.
    pub heads: Part,
    /// The page tables of the slab's slots.
    pub page_tables: Part,
    /// The facts of the round, row 0 first.
    pub facts: Ptr<Fact>,
    /// The first covered row.
    pub first: u32,
    /// How many rows are covered.
    pub count: u32,
    /// The slab, as page edits name it.
    pub slab: u32,
    /// Slots of the slab.
    pub slots: u32,
    /// Entries of a page table.
    pub pages: u32,
    /// Room for edits in the staged table.
    pub edits: u32,
    /// The id that stands for "nothing before".
    pub boundary: u32,
    /// 0: prompt rows; 1: decode rows.
    pub kind: u32,
}

/// [`Args::kind`] of a [`Kind`].
pub fn kind_code(kind: Kind) -> u32 {
    match kind {
        Kind::Prompt => 0,
        Kind::Decode => 1,
    }
}

/// Threads of a block of the CUDA twin.
const THREADS: u32 = 128;

impl Kernel for Rows {
    type Args = Args;
    const NAME: &'static str = "rows";
    const ELEMENT: &'static str = "";
    const TWIN: Option<Twin> = source::plain(&source::ROWS, Self::NAME, THREADS);

    fn check(args: &Args) -> Result<(), String> {
        match args.count > 0 && args.kind <= 1 {
            true => Ok(()),
            false => Err(format!("count {}, kind {}", args.count, args.kind)),
        }
    }

    fn grid(args: &Args) -> Grid {
        Grid::line(args.count.div_ceil(THREADS) as usize)
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let table = &args.table;
        let header = memory.read(table.header, 1)?[0];
        if header.edits > args.edits {
            return Err(memory.domain(format!("{} page edits staged, room for {}", header.edits, args.edits)));
        }
        for edit in
            memory.read(table.edits, header.edits as usize)?.iter().filter(|edit| edit.slab == args.slab)
        {
            if edit.slot >= args.slots || edit.index >= args.pages {
                return Err(
                    memory.domain(format!("{edit:?} is past {} slots or {} pages", args.slots, args.pages))
                );
            }
            memory.write(args.page_tables.slot::<u32>(edit.slot).at(edit.index as usize), 1)?[0] = edit.page;
        }

        let (first, count) = (args.first as usize, args.count as usize);
        if first + count > header.rows as usize {
            let why = format!("rows {first}..{} of a table of {} staged rows", first + count, header.rows);
            return Err(memory.domain(why));
        }
        let rows = memory.read(table.rows.at(first), count)?;
        let prompt = match args.kind {
            0 => memory.read(table.prompt.at(first), count)?,
            _ => &[],
        };
        let facts = memory.write(args.facts.at(first), count)?;
        for (i, row) in rows.iter().enumerate() {
            let start =
                (row.first as usize).checked_sub(first).filter(|start| start + row.place as usize == i);
            let Some(start) = start.filter(|_| row.slot < args.slots && row.place < row.count) else {
                return Err(memory.domain(format!("row {} of the table is {row:?}", first + i)));
            };
            let head = memory.read(args.heads.slot::<Head>(row.slot), 1)?[0];
            let position = head.length + row.place;
            let (id, axes) = match prompt.get(i) {
                Some(staged) => (staged.id, staged.axes),
                None if row.place == 0 => (head.last_id, [position as i32 + head.rope_offset; 3]),
                None => {
                    return Err(memory.domain(format!("decode row {} has place {}", first + i, row.place)));
                }
            };
            let previous = std::array::from_fn(|back| match (i - start).checked_sub(back + 1) {
                Some(place) => prompt[start + place].id,
                None => match head.previous_plus_one[back - row.place as usize] {
                    0 => args.boundary,
                    id => id - 1,
                },
            });
            let (slot, place, first, count) = (row.slot, row.place, row.first, row.count);
            facts[i] = Fact { slot, place, first, count, id, position, axes, previous };
        }
        Ok(())
    }
}
