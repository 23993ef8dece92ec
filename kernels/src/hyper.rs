//! Hyper-connections: how the streams are mixed into one block's input, and how strongly its output comes
//! back to each. Two launches, since the second needs all of the first: down to the low rank, and up.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};
use rayon::prelude::*;

use crate::matrix::{Columns, product};
use crate::numerics::{Element, sigmoid, silu, widened};
use crate::source::{self, product_tiles};

/// Rows that one thread mixes at least.
const MIX_ROWS: usize = 16;

/// The first half of a hyper-connection.
///
/// ```text
/// d[t, i]      = r16(silu(r16(sum over k of down[i, k] * n[t, k]) / streams))
/// inject[t, s] = 2 * sigmoid(r16(sum over k of injection[s, k] * n[t, k]) / streams)      unless null
/// ```
/// Shapes     n: `[rows, streams * hidden]` (normed), down: `[rank, streams * hidden]`, injection:
///            `[streams, streams * hidden]`, d: `[rows, rank]`, elements; inject: `[rows, streams]` f32
/// Effects    writes all of d, and of inject unless injection is null (the mixer before the head)
/// Source     MODEL: hyper-connections
pub struct MixDown<E>(PhantomData<E>);

/// Arguments of [`MixDown`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct DownArgs {
    /// n.
    pub normed: Ptr<u8>,
    /// down.
    pub down: Ptr<u8>,
    /// injection, or null.
    pub injection: Ptr<u8>,
    /// d.
    pub low: Ptr<u8>,
    /// inject.
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

impl<E: Element> Kernel for MixDown<E> {
    type Args = DownArgs;
    const NAME: &'static str = "hyper_down";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::matrix_twin::<E>(&source::HYPER, Self::NAME, 512);

    fn check(args: &DownArgs) -> Result<(), String> {
        check_sizes(args.rows, args.streams, args.hidden, args.rank)
    }

    fn grid(args: &DownArgs) -> Grid {
        let injection = if args.injection.is_null() { 0 } else { product_tiles(args.rows, args.streams) };
        Grid::line(product_tiles(args.rows, args.rank) + injection)
    }

    fn host(args: &DownArgs, memory: &Access<'_>) -> Result<(), Fault> {
        let (rows, streams, rank) = (args.rows as usize, args.streams as usize, args.rank as usize);
        let width = streams * args.hidden as usize;
        let n = widened(memory.read::<E>(args.normed.cast(), rows * width)?);
        let n = Columns::all(&n, width);
        let down = memory.read::<E>(args.down.cast(), rank * width)?;
        let low = memory.write::<E>(args.low.cast(), rows * rank)?;
        for (low, sum) in low.iter_mut().zip(product(n, Columns::all(down, width))) {
            *low = E::narrow(silu(E::round(sum) / streams as f32));
        }
        if !args.injection.is_null() {
            let injection = memory.read::<E>(args.injection.cast(), streams * width)?;
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
/// Shapes     d: `[rows, rank]`, up: `[streams * hidden, rank]`, n: `[rows, streams, hidden]`,
///            x: `[rows, hidden]`, elements
/// Effects    writes all of x
/// Source     MODEL: hyper-connections
pub struct MixUp<E>(PhantomData<E>);

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

impl<E: Element> Kernel for MixUp<E> {
    type Args = UpArgs;
    const NAME: &'static str = "hyper_up";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::matrix_twin::<E>(&source::HYPER, Self::NAME, 256);

    fn check(args: &UpArgs) -> Result<(), String> {
        check_sizes(args.rows, args.streams, args.hidden, args.rank)
    }

    fn grid(args: &UpArgs) -> Grid {
        Grid::line(product_tiles(args.rows, args.hidden))
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
    match rows > 0 && streams > 0 && hidden > 0 && rank > 0 {
        true => Ok(()),
        false => Err(format!("rows {rows}, streams {streams}, hidden {hidden}, rank {rank}: all positive")),
    }
}
