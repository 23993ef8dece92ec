//! The last kernel of a round: what the next round will find in each slot's head.

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Twin, host::Access};

use crate::source;
use crate::state::{Part, RowRange, runs};
use crate::table::{Head, PAGE, PREVIOUS};

/// Makes the covered rows final.
///
/// ```text
/// head.length += rows of the slot
/// head.previous = the slot's last row's id, then its previous ids
/// axes[position % 64] = the row's rotary position, for the slot's last 64 rows
/// ```
/// Domain     the covered rows of a slot are all its rows of the round
/// Effects    writes the heads (all but `last_id`, which picking wrote) and the rings of rotary positions
pub struct Advance;

/// Arguments of [`Advance`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Args {
    /// The rows.
    pub rows: RowRange,
    /// The heads of the slots.
    pub heads: Part,
    /// The rings of rotary positions: `[64, 3]` i32 per slot, row `position % 64`.
    pub axes: Part,
}

/// Threads of a block of the CUDA twin.
const THREADS: u32 = 128;

impl Kernel for Advance {
    type Args = Args;
    const NAME: &'static str = "advance";
    const ELEMENT: &'static str = "";
    const TWIN: Option<Twin> = source::plain(&source::ADVANCE, Self::NAME, THREADS);

    fn check(args: &Args) -> Result<(), String> {
        match args.rows.is_empty() {
            false => Ok(()),
            true => Err("no rows".into()),
        }
    }

    fn grid(args: &Args) -> Grid {
        Grid::line(args.rows.count.div_ceil(THREADS) as usize)
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let facts = args.rows.read(memory)?;
        for run in runs(facts) {
            let (Some(last), count) = (run.last(), run.len() as u32) else { continue };
            if count != last.count {
                return Err(memory.domain(format!("{count} of {} rows of slot {}", last.count, last.slot)));
            }
            let ring = memory.write(args.axes.slot::<[i32; 3]>(last.slot), PAGE)?;
            for fact in &run[run.len().saturating_sub(PAGE)..] {
                ring[fact.position as usize % PAGE] = fact.axes;
            }
            let head = &mut memory.write(args.heads.slot::<Head>(last.slot), 1)?[0];
            head.length += count;
            head.previous_plus_one[0] = last.id + 1;
            for back in 1..PREVIOUS {
                head.previous_plus_one[back] = last.previous[back - 1] + 1;
            }
        }
        Ok(())
    }
}
