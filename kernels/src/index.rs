//! The index of sparse attention: pooled keys of complete blocks, and each row's choice of blocks. Prompts
//! choose in one launch ([`IndexSelect`]); decode rounds, whose rows are few, choose in [`split`].

pub mod split;

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};

use crate::heads::{Projection, check_rotary};
use crate::matrix::Columns;
use crate::numerics::{Element, before, widened};
use crate::residual::rms_grouped;
use crate::rope::Rotary;
use crate::runs::{Run, pieces};
use crate::source;
use crate::spread;
use crate::state::{Pages, Part, RowRange};
use crate::table::PAGE;

/// Pools the raw index keys of every block that a covered row completes.
///
/// ```text
/// for a row at position t with (t + 1) % ratio == 0, b = t / ratio:
/// m          = r16((raw[ratio * b] + ... + raw[t]) / ratio)          f32 sum in ascending order from 0
/// pooled[b]  = rope(r16(m * rsqrt(mean(m^2) + eps) * (1 + gain)))   at the rotary position of ratio * b
/// ```
/// A position of this round has its raw key in the stacked projection and its rotary position in its fact;
/// an earlier one has both in the slot's rings.
///
/// Shapes     x: as [`Projection`]; gain: `[index_width]` elements; ring: `[PAGE, index_width]` elements and
///            axes: `[PAGE, 3]` i32 per slot, position p in entry p % PAGE
/// Effects    writes the pooled keys of the completed blocks
/// Source     MODEL: QSA attention, indexer
pub struct IndexPool<E>(PhantomData<E>);

/// Arguments of [`IndexPool`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct PoolArgs {
    /// The rows.
    pub rows: RowRange,
    /// The stacked projection.
    pub projection: Projection,
    /// The gain of an index key.
    pub gain: Ptr<u8>,
    /// Raw index keys of earlier positions.
    pub ring: Part,
    /// Rotary positions of earlier positions.
    pub axes: Part,
    /// Where pooled keys go.
    pub pages: Pages,
    /// The rotary table.
    pub rotary: Rotary,
    /// eps.
    pub eps: f32,
    /// Not used; zero.
    pub zero: u32,
}

/// Chooses the blocks that each row attends to, and keeps the raw index keys for later rounds. Runs a
/// launch after [`IndexPool`], which still reads the old ring.
///
/// ```text
/// nb       = (t + 1) / ratio                                       complete blocks at position t
/// score b  = (sum over h of max(0, iq[h] . pooled[b])) / sqrt(index_width)        NaN counts as 0
/// chosen   = the min(top, nb) blocks with the largest scores, ties to the lower id; ascending ids, the
///            rest u32::MAX
/// ring[t % PAGE] = the row's raw key                               for the last PAGE rows of the slot
/// ```
/// Shapes     iq: `[rows, index_heads, index_width]` elements; chosen: `[rows, top]`; ring as [`IndexPool`]
/// Effects    writes chosen of the covered rows and their entries of the ring
/// CUDA       top at most 2560
/// Source     MODEL: QSA attention, indexer; config `indexer_budget` = top * ratio
pub struct IndexSelect<E>(PhantomData<E>);

/// Arguments of [`IndexSelect`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct SelectArgs {
    /// The rows.
    pub rows: RowRange,
    /// The stacked projection.
    pub projection: Projection,
    /// iq.
    pub iq: Ptr<u8>,
    /// chosen.
    pub chosen: Ptr<u32>,
    /// Raw index keys for later rounds.
    pub ring: Part,
    /// Where pooled keys are.
    pub pages: Pages,
    /// How many blocks a row chooses at most.
    pub top: u32,
    /// Not used; zero.
    pub zero: u32,
}

/// Rows that are scored together, so that a loaded key serves several.
const SCORED_ROWS: usize = 8;

/// The most blocks that a row of the CUDA twin can choose; of more it leaves its list unwritten.
pub const CUDA_TOP: u32 = 2560;

impl<E: Element> Kernel for IndexPool<E> {
    type Args = PoolArgs;
    const NAME: &'static str = "index_pool";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::twin::<E>(&source::INDEX, Self::NAME, 64);

    fn check(args: &PoolArgs) -> Result<(), String> {
        args.projection.check(args.rows, &args.pages)?;
        check_rotary(&args.rotary, &args.pages)
    }

    fn grid(args: &PoolArgs) -> Grid {
        Grid::line(args.rows.len())
    }

    fn host(args: &PoolArgs, memory: &Access<'_>) -> Result<(), Fault> {
        let PoolArgs { rows, projection, pages, rotary, .. } = args;
        let (width, ratio) = (pages.index_width as usize, pages.ratio as usize);
        let mut jobs = Vec::new();
        for run in Run::all(*rows, memory)? {
            // A block completes here if its last position is covered.
            let blocks = run.positions.start / ratio..run.positions.end / ratio;
            if blocks.is_empty() {
                continue;
            }
            // The positions of this round, from the slot's first: they may begin before the covered rows.
            let fact = run.facts[0];
            let (start, first) = (fact.start() as usize, fact.first as usize);
            let count = run.positions.end - start;
            let x = projection.rows::<E>(memory, first, count)?;
            let facts = memory.read(rows.facts.at(first), count)?;
            let old = blocks.start * ratio < start;
            let ring = memory.read(args.ring.slot::<E>(run.slot), if old { PAGE * width } else { 0 })?;
            let axes = memory.read(args.axes.slot::<[i32; 3]>(run.slot), if old { PAGE } else { 0 })?;

            let table = pages.table(memory, run.slot, run.positions.end)?;
            for piece in pieces(blocks, PAGE / ratio) {
                let page = table[piece.start * ratio / PAGE];
                let at = piece.start % (PAGE / ratio) * width;
                let pooled = memory.write(pages.pooled::<E>(page).at(at), piece.len() * width)?;
                for (block, pooled) in piece.zip(pooled.chunks_exact_mut(width)) {
                    jobs.push((block, start, x, facts, ring, axes, pooled));
                }
            }
        }

        let gain = memory.read::<E>(args.gain.cast(), width)?;
        let frequencies = rotary.frequencies(memory)?;
        let (key_at, stride) = (projection.index_key_at(pages), projection.stride as usize);
        let work = jobs.len() * ratio * width;
        spread::each(
            jobs,
            work,
            |(block, start, x, facts, ring, axes, pooled): (_, usize, &[E], _, &[E], _, _)| {
                let positions = block * ratio..(block + 1) * ratio;
                let mut sum = vec![0.0f32; width];
                for p in positions.clone() {
                    let key = match p.checked_sub(start) {
                        Some(row) => &x[row * stride + key_at..][..width],
                        None => &ring[p % PAGE * width..][..width],
                    };
                    sum.iter_mut().zip(key).for_each(|(sum, key)| *sum += key.widen());
                }
                let mean: Vec<E> = sum.iter().map(|sum| E::narrow(sum / ratio as f32)).collect();
                rms_grouped(&mean, gain, width, args.eps, pooled);
                let first = positions.start;
                let axes = first.checked_sub(start).map_or_else(|| axes[first % PAGE], |row| facts[row].axes);
                rotary.turn::<E>(frequencies, axes).apply(pooled);
            },
        );
        Ok(())
    }
}

impl<E: Element> Kernel for IndexSelect<E> {
    type Args = SelectArgs;
    const NAME: &'static str = "index_select";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::twin::<E>(&source::INDEX, Self::NAME, 512);

    fn check(args: &SelectArgs) -> Result<(), String> {
        args.projection.check(args.rows, &args.pages)?;
        match args.top {
            0 => Err("top 0: a row must choose at least one block".into()),
            _ => Ok(()),
        }
    }

    fn grid(args: &SelectArgs) -> Grid {
        Grid::line(args.rows.len())
    }

    fn host(args: &SelectArgs, memory: &Access<'_>) -> Result<(), Fault> {
        let SelectArgs { rows, projection, pages, .. } = args;
        let (width, ratio, top) = (pages.index_width as usize, pages.ratio as usize, args.top as usize);
        let heads = projection.index_heads as usize;
        let (start, count) = (rows.start(), rows.len());
        let x = projection.rows::<E>(memory, start, count)?;
        let iq = memory.read::<E>(args.iq.cast::<E>().at(start * heads * width), count * heads * width)?;
        let chosen = memory.write(args.chosen.at(start * top), count * top)?;
        let (key_at, stride) = (projection.index_key_at(pages), projection.stride as usize);

        let mut held = Vec::new();
        for run in Run::all(*rows, memory)? {
            let ring = memory.write(args.ring.slot::<E>(run.slot), PAGE * width)?;
            keep_keys(&run, &x[(run.row - start) * stride + key_at..], stride, ring, width);
            let table = match run.positions.end / ratio > top {
                true => pages.table(memory, run.slot, run.positions.end / ratio * ratio)?,
                false => &[],
            };
            let page = |&page| memory.read(pages.pooled::<E>(page), pages.pooled_elements());
            held.push((run.positions, table.iter().map(page).collect::<Result<Vec<&[E]>, _>>()?));
        }

        let mut left = (iq, chosen);
        let mut jobs = Vec::new();
        let mut work = 0;
        for (positions, keys) in &held {
            for piece in pieces(0..positions.len(), SCORED_ROWS) {
                let (iq, iq_left) = left.0.split_at(piece.len() * heads * width);
                let (chosen, chosen_left) = left.1.split_at_mut(piece.len() * top);
                left = (iq_left, chosen_left);
                work +=
                    piece.len() * if keys.is_empty() { top } else { positions.end * heads * width / ratio };
                jobs.push((positions.start + piece.start, keys, iq, chosen));
            }
        }
        spread::each(jobs, work, |(first, keys, iq, chosen): (usize, &Vec<&[E]>, &[E], &mut [u32])| {
            let rows = chosen.len() / top;
            let blocks = |i: usize| (first + i + 1) / ratio;
            let most = blocks(rows - 1);
            let scores = if most > top { scores(&widened(iq), heads, keys, width, most) } else { Vec::new() };
            for (i, chosen) in chosen.chunks_exact_mut(top).enumerate() {
                match scores.get(i * most..i * most + blocks(i)) {
                    Some(scores) if blocks(i) > top => best(scores, chosen),
                    _ => (0..).zip(chosen).for_each(|(id, to)| {
                        *to = if (id as usize) < blocks(i) { id } else { u32::MAX };
                    }),
                }
            }
        });
        Ok(())
    }
}

/// Puts the raw keys of a run's rows into its slot's ring, if they are among the slot's last. `keys` begins
/// with the first row's, and each is `stride` behind the one before it.
fn keep_keys<E: Element>(run: &Run<'_>, keys: &[E], stride: usize, ring: &mut [E], width: usize) {
    for (i, fact) in run.facts.iter().enumerate() {
        if fact.place as usize + PAGE >= fact.count as usize {
            let entry = &mut ring[fact.position as usize % PAGE * width..][..width];
            entry.copy_from_slice(&keys[i * stride..][..width]);
        }
    }
}

/// The scores of the first `blocks` blocks for every row: `[rows, blocks]`.
///
/// `queries`: `[rows, heads, width]`; `keys`: the pooled keys in runs of equally many blocks (the last may
/// be shorter), each `[.., width]`.
pub fn scores<E: Element>(
    queries: &[f32],
    heads: usize,
    keys: &[&[E]],
    width: usize,
    blocks: usize,
) -> Vec<f32> {
    let queries = Columns::all(queries, width);
    let lines = queries.rows();
    let mut dots = vec![0.0; blocks * lines];
    let mut left = &mut dots[..];
    for keys in keys {
        let (dots, rest) = left.split_at_mut(left.len().min(keys.len() / width * lines));
        E::tile_run(queries, Columns::all(keys, width), 0, dots);
        left = rest;
    }
    assert!(left.is_empty(), "{blocks} blocks are more than the keys hold");
    let root = (width as f32).sqrt();
    let mut scores = vec![0.0; lines / heads * blocks];
    for (block, dots) in dots.chunks_exact(lines).enumerate() {
        for (row, dots) in dots.chunks_exact(heads).enumerate() {
            let sum = dots.iter().fold(0.0, |sum, &dot| sum + if dot > 0.0 { dot } else { 0.0 });
            scores[row * blocks + block] = sum / root;
        }
    }
    scores
}

/// The ids of the `chosen.len()` best of more scores, ascending.
fn best(scores: &[f32], chosen: &mut [u32]) {
    let mut ranked: Vec<(f32, u32)> = scores.iter().copied().zip(0..).collect();
    ranked.select_nth_unstable_by(chosen.len() - 1, |a, b| before(*a, *b));
    chosen.iter_mut().zip(&ranked).for_each(|(to, (_, id))| *to = *id);
    chosen.sort_unstable();
}
