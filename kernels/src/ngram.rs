//! The n-gram embedding: which table rows a token reads, the gate against the streams, and the short
//! convolution that writes the result back.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};
use rayon::prelude::*;

use crate::conv::{History, ROWS_PER_THREAD, Taps, histories, places};
use crate::hash::Constants;
use crate::numerics::{Element, dot, narrow, sigmoid, silu};
use crate::quant::{fp8, nvfp4};
use crate::residual::rms_grouped;
use crate::source::{self, channel_grid};
use crate::state::{Part, RowRange};
use crate::table::PREVIOUS;
use crate::weight::{Format, GROUP, Plain, WeightFormat, named};

/// Looks up the table rows of every token's n-grams.
///
/// ```text
/// row[t, h] = rows(id[t], previous[t])[h]
/// e[t, h]   = shard[row[t, h] / shard_rows][row[t, h] % shard_rows]
///     plain: as it is      fp8: r16(code * global)      nvfp4: r16(code * (scale * global))
/// ```
/// with `heads = (ngram_size - 1) * heads_per_ngram`; see [`Constants::rows`]. The table may lie in shards of equal
/// size, each at an address of its own, also outside of device memory.
///
/// Shapes     shards: `[table_rows / shard_rows]` addresses of `[shard_rows, width]` elements or codes each, nvfp4 two
///            to a byte; scales: as many addresses of `[shard_rows, width / 16]` e4m3, nvfp4 only, else null;
///            e: `[rows, heads, width]` elements; multipliers: `[ngram_size]`, primes and offsets: `[heads]`
/// Domain     2 <= ngram_size <= [`PREVIOUS`] + 1; primes positive; every row inside the table; nvfp4: width a multiple
///            of 16
/// Effects    writes the covered rows of e
/// Source     MODEL: n-gram embedding, row ids
pub struct NgramGather<E, F = Plain>(PhantomData<(E, F)>);

/// Arguments of [`NgramGather`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct GatherArgs {
    /// The covered rows.
    pub rows: RowRange,
    /// The multipliers of the hash.
    pub multipliers: Ptr<u64>,
    /// The vocabulary of every head.
    pub primes: Ptr<u64>,
    /// The first table row of every head.
    pub offsets: Ptr<u64>,
    /// The address of every shard of the table.
    pub shards: Ptr<Ptr<u8>>,
    /// The address of every shard's scales, or null.
    pub scales: Ptr<Ptr<u8>>,
    /// e; row 0 of the round.
    pub e: Ptr<u8>,
    /// Rows of the table.
    pub table_rows: u64,
    /// Rows of a shard.
    pub shard_rows: u64,
    /// Width of a table row.
    pub width: u32,
    /// The longest n-gram.
    pub ngram_size: u32,
    /// Heads per n-gram length.
    pub heads_per_ngram: u32,
    /// The id that n-grams do not reach across.
    pub boundary: u32,
    /// What every number of the table is multiplied by; not read if it is plain.
    pub global: f32,
    /// Not used; zero.
    pub zero: u32,
}

/// Gates the values of the n-gram embedding by how well its keys match the streams.
///
/// ```text
/// key, val    = the first streams * hidden columns of kv, and the hidden columns after them
/// k[t, s, j]  = rms over j of key[t, s], 1 + norm_key;   q[t, s, j] = the same of R[t, s] with norm_query
/// a[t, s]     = (sum over j of k[t, s, j] * q[t, s, j]) / sqrt(hidden)
/// g[t, s]     = sqrt(max(|a|, 1e-6)) * sign(a),  sign(0) = 0
/// gv[t, s, j] = r16(sigmoid(g[t, s]) * val[t, j])
/// cn[t, s, j] = r16(rms over j of gv[t, s], 1 + norm_conv)
/// ```
/// Shapes     kv: `[rows, streams * hidden + hidden]`, R, gv, cn: `[rows, streams, hidden]`, norms:
///            `[streams, hidden]`, all elements
/// Effects    writes the covered rows of gv and cn; the rounded gv feeds the norm. Does not read facts
/// Source     MODEL: n-gram embedding, feature
pub struct NgramGate<E>(PhantomData<E>);

/// Arguments of [`NgramGate`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct GateArgs {
    /// The covered rows.
    pub rows: RowRange,
    /// kv; row 0 of the round, as are R, gv and cn.
    pub keyval: Ptr<u8>,
    /// R.
    pub streams: Ptr<u8>,
    /// The gain of the keys.
    pub norm_key: Ptr<u8>,
    /// The gain of the streams.
    pub norm_query: Ptr<u8>,
    /// The gain of the gated values.
    pub norm_conv: Ptr<u8>,
    /// gv.
    pub gv: Ptr<u8>,
    /// cn.
    pub cn: Ptr<u8>,
    /// Number of streams.
    pub count: u32,
    /// Width of a stream.
    pub hidden: u32,
    /// eps.
    pub eps: f32,
    /// Not used; zero.
    pub zero: u32,
}

/// The short convolution of the n-gram embedding, added to the streams.
///
/// ```text
/// cv[t, ch] = r16(sum over j in 0..taps, ascending, of w[ch, j] * cn[t - (taps - 1 - j) * dilation, ch])
/// R[t, ch]  = r16(R[t, ch] + (gv[t, ch] + silu(cv[t, ch])))
/// ```
/// cn at times before the rows of a slot comes from the slot's window, oldest row first; the window of a
/// fresh slot is zero.
///
/// Shapes     R, gv, cn: `[rows, width]` elements; w: `[width, taps]` elements; window:
///            `[(taps - 1) * dilation, width]` elements per slot
/// Domain     the rows of a slot are all of its rows of the round, in order
/// Effects    writes the covered rows of R; the windows of the covered slots become the last rows of cn,
///            rows of the old window included
/// Source     MODEL: n-gram embedding, feature
pub struct NgramConv<E>(PhantomData<E>);

/// Arguments of [`NgramConv`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct ConvArgs {
    /// The covered rows.
    pub rows: RowRange,
    /// gv; row 0 of the round, as are cn and R.
    pub gv: Ptr<u8>,
    /// cn.
    pub cn: Ptr<u8>,
    /// w.
    pub weight: Ptr<u8>,
    /// The windows.
    pub window: Part,
    /// R.
    pub streams: Ptr<u8>,
    /// Width of a row: all streams.
    pub width: u32,
    /// Taps of the convolution.
    pub taps: u32,
    /// Rows between two taps.
    pub dilation: u32,
    /// Not used; zero.
    pub zero: u32,
}

/// Threads of a block of the CUDA twin of [`NgramConv`].
const THREADS: u32 = 128;
impl<E: Element, F: WeightFormat> Kernel for NgramGather<E, F> {
    type Args = GatherArgs;
    const NAME: &'static str = named!("ngram_gather", F::FORMAT);
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::twin::<E>(&source::NGRAM, Self::NAME, 64);

    fn check(args: &GatherArgs) -> Result<(), String> {
        if args.rows.is_empty() || args.width == 0 || args.heads_per_ngram == 0 || args.shard_rows == 0 {
            return Err(format!(
                "rows {}, width {}, heads per n-gram {} and rows of a shard {} must all be positive",
                args.rows.count, args.width, args.heads_per_ngram, args.shard_rows
            ));
        }
        if !args.table_rows.is_multiple_of(args.shard_rows) {
            return Err(format!("{} rows are no shards of {} rows", args.table_rows, args.shard_rows));
        }
        if F::FORMAT == Format::Nvfp4
            && (args.scales.is_null() || !(args.width as usize).is_multiple_of(GROUP))
        {
            return Err(format!(
                "a table in nvfp4 needs scales (at {:?}) and rows of groups of {GROUP}, not {} wide",
                args.scales, args.width
            ));
        }
        match args.ngram_size as usize {
            2.. if args.ngram_size as usize <= PREVIOUS + 1 => Ok(()),
            size => Err(format!("ngram_size {size} is not in 2..={}", PREVIOUS + 1)),
        }
    }

    fn grid(args: &GatherArgs) -> Grid {
        let heads = (args.ngram_size - 1) * args.heads_per_ngram;
        Grid::plane(args.rows.len(), heads as usize)
    }

    fn host(args: &GatherArgs, memory: &Access<'_>) -> Result<(), Fault> {
        let width = args.width as usize;
        let heads = (args.ngram_size as usize - 1) * args.heads_per_ngram as usize;
        let facts = args.rows.read(memory)?;
        let hash = Constants {
            boundary: args.boundary,
            heads_per_ngram: args.heads_per_ngram as usize,
            multipliers: memory.read(args.multipliers, args.ngram_size as usize)?,
            primes: memory.read(args.primes, heads)?,
            offsets: memory.read(args.offsets, heads)?,
        };
        let count = (args.table_rows / args.shard_rows) as usize;
        let numbers = args.shard_rows as usize * width;
        let shards = memory.read(args.shards, count)?;
        let scales = match F::FORMAT {
            Format::Nvfp4 => memory.read(args.scales, count)?,
            Format::Plain | Format::Fp8 => &[],
        };
        let shards = shards.iter().enumerate().map(|(at, shard)| {
            Ok(match F::FORMAT {
                Format::Plain => Shard::Plain(memory.read::<E>(shard.cast(), numbers)?),
                Format::Fp8 => Shard::Fp8(memory.read(*shard, numbers)?),
                Format::Nvfp4 => Shard::Nvfp4 {
                    codes: memory.read(*shard, numbers / 2)?,
                    scales: memory.read(scales[at], numbers / GROUP)?,
                },
            })
        });
        let shards = shards.collect::<Result<Vec<_>, Fault>>()?;
        let mut wide = vec![0.0; width];
        let e = args.e.cast::<E>().at(args.rows.start() * heads * width);
        let e = memory.write(e, facts.len() * heads * width)?;
        if hash.primes.contains(&0) {
            return Err(memory.domain("a head has a vocabulary of 0 rows"));
        }
        let mut rows = vec![0; heads];
        for (fact, e) in facts.iter().zip(e.chunks_exact_mut(heads * width)) {
            hash.rows(fact.id, &fact.previous, &mut rows);
            for (&row, e) in rows.iter().zip(e.chunks_exact_mut(width)) {
                if row >= args.table_rows {
                    return Err(memory.domain(format!("row {row} of a table of {} rows", args.table_rows)));
                }
                let (shard, row) = (row / args.shard_rows, row % args.shard_rows);
                let from = row as usize * width;
                match shards[shard as usize] {
                    Shard::Plain(rows) => e.copy_from_slice(&rows[from..][..width]),
                    Shard::Fp8(codes) => {
                        for (e, code) in e.iter_mut().zip(&codes[from..][..width]) {
                            *e = E::narrow(fp8::decode(*code) * args.global);
                        }
                    }
                    Shard::Nvfp4 { codes, scales } => {
                        let (codes, scales) = (&codes[from / 2..][..width / 2], &scales[from / GROUP..]);
                        nvfp4::decode_row(codes, scales, args.global, &mut wide);
                        narrow(&wide, e);
                    }
                }
            }
        }
        Ok(())
    }
}

/// A shard of the table in memory.
enum Shard<'a, E> {
    Plain(&'a [E]),
    Fp8(&'a [u8]),
    Nvfp4 { codes: &'a [u8], scales: &'a [u8] },
}

impl<E: Element> Kernel for NgramGate<E> {
    type Args = GateArgs;
    const NAME: &'static str = "ngram_gate";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::twin::<E>(&source::NGRAM, Self::NAME, crate::residual::THREADS);

    fn check(args: &GateArgs) -> Result<(), String> {
        match args.rows.is_empty() || args.count == 0 || args.hidden == 0 {
            false => Ok(()),
            true => Err(format!(
                "rows {}, streams {} and hidden {} must all be positive",
                args.rows.count, args.count, args.hidden
            )),
        }
    }

    fn grid(args: &GateArgs) -> Grid {
        Grid::plane(args.rows.len(), args.count as usize)
    }

    fn host(args: &GateArgs, memory: &Access<'_>) -> Result<(), Fault> {
        let hidden = args.hidden as usize;
        let width = args.count as usize * hidden;
        let (first, rows) = (args.rows.start(), args.rows.len());
        let kv_width = width + hidden;
        let keyval = memory.read::<E>(args.keyval.cast::<E>().at(first * kv_width), rows * kv_width)?;
        let streams = memory.read::<E>(args.streams.cast::<E>().at(first * width), rows * width)?;
        let norm_key = memory.read::<E>(args.norm_key.cast(), width)?;
        let norm_query = memory.read::<E>(args.norm_query.cast(), width)?;
        let norm_conv = memory.read::<E>(args.norm_conv.cast(), width)?;
        let gv = memory.write::<E>(args.gv.cast::<E>().at(first * width), rows * width)?;
        let cn = memory.write::<E>(args.cn.cast::<E>().at(first * width), rows * width)?;

        let inputs = keyval.par_chunks_exact(kv_width).zip(streams.par_chunks_exact(width));
        let outputs = gv.par_chunks_exact_mut(width).zip(cn.par_chunks_exact_mut(width));
        inputs.zip(outputs).with_min_len(ROWS_PER_THREAD).for_each(|((keyval, streams), (gv, cn))| {
            let (key, value) = keyval.split_at(width);
            let mut k = vec![0.0f32; width];
            let mut q = vec![0.0f32; width];
            rms_grouped(key, norm_key, hidden, args.eps, &mut k);
            rms_grouped(streams, norm_query, hidden, args.eps, &mut q);
            let pairs = k.chunks_exact(hidden).zip(q.chunks_exact(hidden));
            for ((k, q), gv) in pairs.zip(gv.chunks_exact_mut(hidden)) {
                let open = sigmoid(signed_root(dot(k, q) / (hidden as f32).sqrt()));
                for (gv, value) in gv.iter_mut().zip(value) {
                    *gv = E::narrow(open * value.widen());
                }
            }
            rms_grouped(gv, norm_conv, hidden, args.eps, cn);
        });
        Ok(())
    }
}

/// `sqrt(max(|a|, 1e-6)) * sign(a)`; 0 for 0 and NaN for NaN.
fn signed_root(a: f32) -> f32 {
    let root = a.abs().max(1e-6).sqrt();
    if a == 0.0 || a.is_nan() { a } else { root.copysign(a) }
}

impl<E: Element> Kernel for NgramConv<E> {
    type Args = ConvArgs;
    const NAME: &'static str = "ngram_conv";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::twin::<E>(&source::NGRAM, Self::NAME, THREADS);

    fn check(args: &ConvArgs) -> Result<(), String> {
        match args.rows.is_empty() || args.width == 0 || args.taps == 0 || args.dilation == 0 {
            false => Ok(()),
            true => Err(format!(
                "rows {}, width {}, taps {} and dilation {} must all be positive",
                args.rows.count, args.width, args.taps, args.dilation
            )),
        }
    }

    fn grid(args: &ConvArgs) -> Grid {
        channel_grid(args.rows.len(), args.width, THREADS)
    }

    fn host(args: &ConvArgs, memory: &Access<'_>) -> Result<(), Fault> {
        let width = args.width as usize;
        let facts = args.rows.read(memory)?;
        let (first, rows) = (args.rows.start(), args.rows.len());
        let gv = memory.read::<E>(args.gv.cast::<E>().at(first * width), rows * width)?;
        let cn = memory.read::<E>(args.cn.cast::<E>().at(first * width), rows * width)?;
        let weight = memory.read::<E>(args.weight.cast(), width * args.taps as usize)?;
        let streams = memory.write::<E>(args.streams.cast::<E>().at(first * width), rows * width)?;
        let taps = Taps::new(weight, width, args.dilation as usize);
        let mut histories = histories(facts, args.window, &taps, memory, |t| &cn[t * width..][..width])?;

        let places = places(&histories);
        let rows = streams.par_chunks_exact_mut(width).zip(gv.par_chunks_exact(width)).zip(places);
        rows.with_min_len(ROWS_PER_THREAD).for_each(|((streams, gv), (history, place))| {
            let mut sums = vec![0.0; width];
            histories[history].convolve(&taps, place, &mut sums);
            for ((r, gv), sum) in streams.iter_mut().zip(gv).zip(&sums) {
                *r = E::narrow(r.widen() + (gv.widen() + silu(E::round(*sum))));
            }
        });
        histories.iter_mut().for_each(History::keep);
        Ok(())
    }
}
