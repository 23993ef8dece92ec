//! Hyper-connections: how the streams are mixed into one block's input, and how strongly its output comes
//! back to each. Two launches, since the second needs all of the first: down to the low rank, and up.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};
use rayon::prelude::*;

use crate::matrix::{Columns, product};
use crate::numerics::{Element, sigmoid, silu, widened};
use crate::source::{self, CLUSTER, PANEL_ROWS, PANEL_SHARED, PANEL_TILES};
use crate::weight::{Matrix, NARROW_ROWS};

/// Rows that one thread mixes at least.
const MIX_ROWS: usize = 16;

/// Of the first half's CUDA twin: warps and rows of a block. A cluster of blocks shares every sum.
pub(crate) const DOWN_WARPS: u32 = 10;
pub(crate) const DOWN_ROWS: usize = 16;
/// Tiles of a block of the second half's CUDA twin, a warp for each.
pub(crate) const UP_WARPS: u32 = 4;

/// The first half of a hyper-connection.
///
/// ```text
/// d[t, i]      = r16(silu(r16(sum over k of down[i, k] * n[t, k]) / streams))
/// inject[t, s] = 2 * sigmoid(r16(sum over k of down[rank + s, k] * n[t, k]) / streams)      unless null
/// ```
/// Shapes     n: `[rows, streams * hidden]` (normed), down: `[rank + streams, streams * hidden]` in the device's
///            order, the last rows only with inject, d: `[rows, rank]`, elements; inject: `[rows, streams]` f32
/// Effects    writes all of d, and of inject unless null (the mixer before the head)
/// Source     MODEL: hyper-connections
pub struct MixDown<E, const PROMPT: bool = false>(PhantomData<E>);

/// The prompt route of [`MixDown`].
pub type MixDownPrompt<E> = MixDown<E, true>;

/// Arguments of [`MixDown`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct DownArgs {
    /// n.
    pub normed: Ptr<u8>,
    /// down.
    pub down: Ptr<u8>,
    /// d.
    pub low: Ptr<u8>,
    /// inject, or null.
    pub inject: Ptr<f32>,
    /// Number of rows.
    pub rows: u32,
    /// Number of streams.
    pub streams: u32,
    /// Width of a stream.
    pub hidden: u32,
    /// Rank.
    pub rank: u32,
}

impl<E: Element, const PROMPT: bool> Kernel for MixDown<E, PROMPT> {
    type Args = DownArgs;
    const NAME: &'static str = if PROMPT { "hyper_down_prompt" } else { "hyper_down" };
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::shared_twin::<E>(
        &source::HYPER,
        Self::NAME,
        if PROMPT { 256 } else { DOWN_WARPS * 32 },
        if PROMPT { PANEL_SHARED } else { DOWN_WARPS * 32 * DOWN_ROWS as u32 / 2 * 4 },
    );

    fn check(args: &DownArgs) -> Result<(), String> {
        check_sizes(args.rows, args.streams, args.hidden, args.rank)
    }

    fn grid(args: &DownArgs) -> Grid {
        let (rows, streams) = (args.rows as usize, args.streams as usize);
        let outputs = args.rank as usize + if args.inject.is_null() { 0 } else { streams };
        let tiles = Matrix::plain(outputs, 1).tiles();
        match PROMPT {
            true => Grid::plane(tiles.div_ceil(PANEL_TILES) * rows.div_ceil(PANEL_ROWS), CLUSTER),
            false => Grid::space(tiles, CLUSTER, rows.div_ceil(DOWN_ROWS)),
        }
    }

    fn host(args: &DownArgs, memory: &Access<'_>) -> Result<(), Fault> {
        let (rows, streams, rank) = (args.rows as usize, args.streams as usize, args.rank as usize);
        let width = streams * args.hidden as usize;
        let injected = if args.inject.is_null() { 0 } else { streams };
        let n = widened(memory.read::<E>(args.normed.cast(), rows * width)?);
        let n = Columns::all(&n, width);
        let (down, injection) =
            memory.read::<E>(args.down.cast(), (rank + injected) * width)?.split_at(rank * width);
        let low = memory.write::<E>(args.low.cast(), rows * rank)?;
        for (low, sum) in low.iter_mut().zip(product(n, Columns::all(down, width))) {
            *low = E::narrow(silu(E::round(sum) / streams as f32));
        }
        if injected > 0 {
            let inject = memory.write(args.inject, rows * streams)?;
            for (inject, sum) in inject.iter_mut().zip(product(n, Columns::all(injection, width))) {
                *inject = 2.0 * sigmoid(E::round(sum) / streams as f32);
            }
        }
        Ok(())
    }
}

/// The second half of a hyper-connection.
///
/// ```text
/// g[t, s, j] = sigmoid(r16(sum over i of up[s * hidden + j, i] * d[t, i]))
/// x[t, j]    = r16((sum over s of g[t, s, j] * n[t, s, j]) / streams)
/// ```
/// Shapes     d: `[rows, rank]`, up: `[streams * hidden, rank]` in the device's order as `streams` groups,
///            n: `[rows, streams, hidden]`,
///            x: `[rows, hidden]`, elements
/// Effects    writes all of x
/// Source     MODEL: hyper-connections
pub struct MixUp<E, const PROMPT: bool = false>(PhantomData<E>);

/// The prompt route of [`MixUp`].
pub type MixUpPrompt<E> = MixUp<E, true>;

/// Arguments of [`MixUp`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct UpArgs {
    /// d.
    pub low: Ptr<u8>,
    /// up.
    pub up: Ptr<u8>,
    /// n.
    pub normed: Ptr<u8>,
    /// x.
    pub mixed: Ptr<u8>,
    /// Number of rows.
    pub rows: u32,
    /// Number of streams.
    pub streams: u32,
    /// Width of a stream.
    pub hidden: u32,
    /// Rank.
    pub rank: u32,
}

impl<E: Element, const PROMPT: bool> Kernel for MixUp<E, PROMPT> {
    type Args = UpArgs;
    const NAME: &'static str = if PROMPT { "hyper_up_prompt" } else { "hyper_up" };
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::shared_twin::<E>(
        &source::HYPER,
        Self::NAME,
        if PROMPT { 256 } else { UP_WARPS * 32 },
        if PROMPT { PANEL_SHARED } else { 0 },
    );

    fn check(args: &UpArgs) -> Result<(), String> {
        check_sizes(args.rows, args.streams, args.hidden, args.rank)
    }

    fn grid(args: &UpArgs) -> Grid {
        let (rows, streams) = (args.rows as usize, args.streams as usize);
        let tiles = Matrix::plain(streams * args.hidden as usize, 1).grouped(streams).tiles();
        match PROMPT {
            true => Grid::line(tiles.div_ceil(PANEL_TILES) * rows.div_ceil(PANEL_ROWS)),
            false => Grid::plane(tiles.div_ceil(UP_WARPS as usize), rows.div_ceil(NARROW_ROWS)),
        }
    }

    fn host(args: &UpArgs, memory: &Access<'_>) -> Result<(), Fault> {
        let (rows, streams, hidden) = (args.rows as usize, args.streams as usize, args.hidden as usize);
        let (rank, width) = (args.rank as usize, streams * hidden);
        let d = widened(memory.read::<E>(args.low.cast(), rows * rank)?);
        let up = memory.read::<E>(args.up.cast(), width * rank)?;
        let n = memory.read::<E>(args.normed.cast(), rows * width)?;
        let x = memory.write::<E>(args.mixed.cast(), rows * hidden)?;
        let u = product(Columns::all(&d, rank), Columns::all(up, rank));
        let rows =
            u.par_chunks_exact(width).zip(n.par_chunks_exact(width)).zip(x.par_chunks_exact_mut(hidden));
        rows.with_min_len(MIX_ROWS).for_each(|((u, n), x)| {
            let mut sums = vec![0.0f32; hidden];
            for (u, n) in u.chunks_exact(hidden).zip(n.chunks_exact(hidden)) {
                for ((sum, u), n) in sums.iter_mut().zip(u).zip(n) {
                    *sum += sigmoid(E::round(*u)) * n.widen();
                }
            }
            x.iter_mut().zip(&sums).for_each(|(x, sum)| *x = E::narrow(sum / streams as f32));
        });
        Ok(())
    }
}

fn check_sizes(rows: u32, streams: u32, hidden: u32, rank: u32) -> Result<(), String> {
    match rows > 0 && (1..=16).contains(&streams) && hidden > 0 && rank > 0 {
        true => Ok(()),
        false => Err(format!(
            "rows {rows}, streams {streams}, hidden {hidden}, rank {rank}: all positive, at most 16 streams"
        )),
    }
}
