//! The choice of blocks of decode rows in two launches: scores, then the choice. A decode round has few rows,
//! each with up to tens of thousands of blocks; a row alone must occupy the whole device.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};

use super::{best, keep_keys, scores};
use crate::heads::Projection;
use crate::numerics::{Element, widened};
use crate::runs::Run;
use crate::source;
use crate::spread;
use crate::state::{Pages, Part, RowRange};
use crate::table::PAGE;

/// Scores the blocks of every row that has more of them than it may choose.
///
/// ```text
/// nb       = (t + 1) / ratio                                       complete blocks at position t
/// s[r, b]  = (sum over h of max(0, iq[h] . pooled[b])) / sqrt(index_width)        b < nb; NaN counts as 0
/// ```
/// Shapes     iq: `[rows, heads, index_width]` elements; s: `[rows, room]` f32
/// Domain     room holds the blocks of a slot's whole page table
/// Effects    writes the first nb scores of the covered rows with nb > top
/// Source     MODEL: QSA attention, indexer
pub struct IndexScore<E>(PhantomData<E>);

/// Arguments of [`IndexScore`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct ScoreArgs {
    /// The rows.
    pub rows: RowRange,
    /// iq.
    pub iq: Ptr<u8>,
    /// s.
    pub scores: Ptr<f32>,
    /// Where pooled keys are.
    pub pages: Pages,
    /// Index query heads.
    pub heads: u32,
    /// How many blocks a row chooses at most.
    pub top: u32,
    /// Scores from one row to the next.
    pub room: u32,
    /// Not used; zero.
    pub zero: u32,
}

/// Chooses the blocks that each row attends to by their scores, and keeps the raw index keys for later rounds.
/// What [`IndexSelect`](super::IndexSelect) does, behind [`IndexScore`].
///
/// ```text
/// chosen   = the min(top, nb) blocks with the largest s, ties to the lower id; ascending ids, the rest
///            u32::MAX
/// ring[t % PAGE] = the row's raw key                               for the last PAGE rows of the slot
/// ```
/// Shapes     s: as [`IndexScore`]; chosen: `[rows, top]`; x and ring as [`IndexPool`](super::IndexPool)
/// Domain     no score is negative
/// Effects    writes chosen of the covered rows and their entries of the ring
/// Source     MODEL: QSA attention, indexer; config `indexer_budget` = top * ratio
pub struct IndexTop<E>(PhantomData<E>);

/// Arguments of [`IndexTop`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct TopArgs {
    /// The rows.
    pub rows: RowRange,
    /// The stacked projection: the raw keys.
    pub projection: Projection,
    /// s.
    pub scores: Ptr<f32>,
    /// chosen.
    pub chosen: Ptr<u32>,
    /// Raw index keys for later rounds.
    pub ring: Part,
    /// The sizes of blocks and keys.
    pub pages: Pages,
    /// How many blocks a row chooses at most.
    pub top: u32,
    /// Scores from one row to the next.
    pub room: u32,
}

/// Blocks that a block of the CUDA twin of [`IndexScore`] scores at a time.
const SCORED: usize = 128;

/// Blocks of the twin that all rows share, if they can use them, and that a row has at least. Each score is a
/// sum of its own, so its bits do not depend on who computes it.
const SHARED: usize = 512;
const LEAST: usize = 8;

/// How many blocks a page table of `pages` pages can hold.
pub fn room(pages: usize, ratio: usize) -> usize {
    pages * PAGE / ratio
}

fn check(pages: &Pages, top: u32, given: u32) -> Result<(), String> {
    if top == 0 {
        return Err("top 0: a row must choose at least one block".into());
    }
    let room = room(pages.capacity as usize, pages.ratio as usize);
    match room <= given as usize {
        true => Ok(()),
        false => Err(format!("room for {given} scores a row; a slot can have {room} blocks")),
    }
}

impl<E: Element> Kernel for IndexScore<E> {
    type Args = ScoreArgs;
    const NAME: &'static str = "index_score";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::twin::<E>(&source::INDEX, Self::NAME, 256);

    fn check(args: &ScoreArgs) -> Result<(), String> {
        let Pages { ratio, index_width, .. } = args.pages;
        if args.rows.is_empty() || args.heads == 0 || index_width == 0 {
            return Err(format!(
                "rows {}, heads {} and index_width {index_width} must all be positive",
                args.rows.count, args.heads
            ));
        }
        if ratio == 0 || !PAGE.is_multiple_of(ratio as usize) {
            return Err(format!("ratio {ratio} does not divide a page of {PAGE}"));
        }
        check(&args.pages, args.top, args.room)
    }

    fn grid(args: &ScoreArgs) -> Grid {
        let all = room(args.pages.capacity as usize, args.pages.ratio as usize).div_ceil(SCORED).max(1);
        Grid::plane(args.rows.len(), (SHARED / args.rows.len()).max(LEAST).min(all))
    }

    fn host(args: &ScoreArgs, memory: &Access<'_>) -> Result<(), Fault> {
        let ScoreArgs { rows, pages, .. } = args;
        let (width, ratio, heads) = (pages.index_width as usize, pages.ratio as usize, args.heads as usize);
        let (start, top, room) = (rows.start(), args.top as usize, args.room as usize);
        let iq =
            memory.read::<E>(args.iq.cast::<E>().at(start * heads * width), rows.len() * heads * width)?;
        let written = memory.write(args.scores.at(start * room), rows.len() * room)?;

        let mut lines = iq.chunks_exact(heads * width).zip(written.chunks_exact_mut(room));
        let (mut jobs, mut work) = (Vec::new(), 0);
        for run in Run::all(*rows, memory)? {
            for (position, (iq, written)) in run.positions.zip(&mut lines) {
                let blocks = (position + 1) / ratio;
                if blocks <= top {
                    continue;
                }
                let table = pages.table(memory, run.slot, blocks * ratio)?;
                let page = |&page| memory.read(pages.pooled::<E>(page), pages.pooled_elements());
                let keys = table.iter().map(page).collect::<Result<Vec<&[E]>, _>>()?;
                work += blocks * heads * width;
                jobs.push((iq, keys, &mut written[..blocks]));
            }
        }
        spread::each(jobs, work, |(iq, keys, written): (&[E], Vec<&[E]>, &mut [f32])| {
            written.copy_from_slice(&scores(&widened(iq), heads, &keys, width, written.len()));
        });
        Ok(())
    }
}

impl<E: Element> Kernel for IndexTop<E> {
    type Args = TopArgs;
    const NAME: &'static str = "index_top";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::twin::<E>(&source::INDEX, Self::NAME, 1024);

    fn check(args: &TopArgs) -> Result<(), String> {
        args.projection.check(args.rows, &args.pages)?;
        check(&args.pages, args.top, args.room)
    }

    fn grid(args: &TopArgs) -> Grid {
        Grid::line(args.rows.len())
    }

    fn host(args: &TopArgs, memory: &Access<'_>) -> Result<(), Fault> {
        let TopArgs { rows, projection, pages, .. } = args;
        let (width, ratio) = (pages.index_width as usize, pages.ratio as usize);
        let (start, top, room) = (rows.start(), args.top as usize, args.room as usize);
        let (key_at, stride) = (projection.index_key_at(pages), projection.stride as usize);
        let x = projection.rows::<E>(memory, start, rows.len())?;
        let chosen = memory.write(args.chosen.at(start * top), rows.len() * top)?;
        for run in Run::all(*rows, memory)? {
            let ring = memory.write(args.ring.slot::<E>(run.slot), PAGE * width)?;
            keep_keys(&run, &x[(run.row - start) * stride + key_at..], stride, ring, width);
            for (i, position) in run.positions.enumerate() {
                let (row, blocks) = (run.row + i, (position + 1) / ratio);
                let chosen = &mut chosen[(row - start) * top..][..top];
                if blocks > top {
                    best(memory.read(args.scores.at(row * room), blocks)?, chosen);
                } else {
                    chosen.fill(u32::MAX);
                    (0..).zip(&mut chosen[..blocks]).for_each(|(id, to)| *to = id);
                }
            }
        }
        Ok(())
    }
}
