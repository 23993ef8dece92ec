//! Sparse attention: each row over the blocks it chose and its tail. Prompts take a row in one launch
//! ([`Attend`]); decode rounds, whose rows are few, take it in [`parts`].

pub mod parts;

use std::marker::PhantomData;
use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};
use half::bf16;
use multiversion::multiversion;

use crate::heads::Projection;
use crate::matrix::Columns;
use crate::numerics::{Element, exp, sigmoid, widened};
use crate::runs::{Run, pieces};
use crate::source;
use crate::spread;
use crate::state::{Pages, RowRange};
use crate::table::PAGE;

/// Attention of every row and query head, gated.
///
/// ```text
/// J        = the positions of the chosen blocks, ascending, then ratio * nb ..= t    nb = (t + 1) / ratio
/// s[j]     = (q[r, h] . key j) / sqrt(width)                         h reads kv head h / (q_heads / kv_heads)
/// e[j]     = exp(s[j] - max over J of s)
/// o        = r16((sum over J of e[j] * value j) / (sum over J of e[j]))     both sums in the order of J, from 0
/// out[r,h] = r16(o * sigmoid(gate h of x[r]))
/// ```
/// Shapes     x: as [`Projection`]; q: `[rows, q_heads, width]`, out: `[rows, q_heads * width]` elements;
///            chosen: `[rows, top]` as `IndexSelect` writes it
/// Domain     chosen holds min(top, nb) ascending ids below nb, then u32::MAX
/// Effects    writes out of the covered rows
/// CUDA       heads at most 256 wide
/// Source     MODEL: QSA attention
///
/// The simple version takes one row and head at a time. The host departs from it in one way that changes
/// no bit: consecutive rows of a slot that see all their positions share loaded keys and values, up to the
/// positions that only the later of them see.
pub struct Attend<E>(PhantomData<E>);

/// Arguments of [`Attend`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Args {
    /// The rows.
    pub rows: RowRange,
    /// The stacked projection: the gates.
    pub projection: Projection,
    /// q.
    pub q: Ptr<u8>,
    /// chosen.
    pub chosen: Ptr<u32>,
    /// The keys and values.
    pub pages: Pages,
    /// out.
    pub out: Ptr<u8>,
    /// Entries of a row of chosen.
    pub top: u32,
    /// Not used; zero.
    pub zero: u32,
}

/// Rows that see all their positions and are computed together.
const BUNDLE: usize = 8;

/// Query heads of a block of the CUDA twins.
pub(crate) const HEADS: u32 = 16;

/// Positions that a twin takes at a time.
pub const SPAN: usize = 64;

/// The widest head that the CUDA twins take; wider ones they leave unwritten.
pub const CUDA_WIDTH: u32 = 256;

/// Threads of a block of the twins, and its shared memory: keys and values of a span, and queries.
const THREADS: u32 = 256;
const SHARED: u32 = ((2 * SPAN + HEADS as usize) * (CUDA_WIDTH as usize + 8) * size_of::<bf16>()) as u32;

impl<E: Element> Kernel for Attend<E> {
    type Args = Args;
    const NAME: &'static str = "attend";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::shared_twin::<E>(&source::ATTEND, Self::NAME, THREADS, SHARED);

    fn check(args: &Args) -> Result<(), String> {
        args.projection.check(args.rows, &args.pages)?;
        match args.top {
            0 => Err("top 0: a row has no room for a chosen block".into()),
            _ => Ok(()),
        }
    }

    fn grid(args: &Args) -> Grid {
        Grid::plane(args.rows.len(), head_tiles(&args.projection, &args.pages))
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let Args { rows, projection, pages, .. } = args;
        let (start, count) = (rows.start(), rows.len());
        let (width, kv_heads, top) = (pages.width as usize, pages.kv_heads as usize, args.top as usize);
        let q_width = projection.q_heads as usize * width;
        let out = memory.write::<E>(args.out.cast::<E>().at(start * q_width), count * q_width)?;
        let q = memory.read::<E>(args.q.cast::<E>().at(start * q_width), count * q_width)?;
        let x = projection.rows::<E>(memory, start, count)?;
        let chosen = memory.read(args.chosen.at(start * top), count * top)?;

        let held = held::<E>(*rows, pages, chosen, top, memory)?;
        let mut out = out.chunks_exact_mut(q_width);
        let (mut jobs, mut work, mut row) = (Vec::new(), 0, 0);
        for Held { cache, seen } in &held {
            for bundle in bundles(seen) {
                let mut outs: Vec<Vec<&mut [E]>> = (0..kv_heads).map(|_| Vec::new()).collect();
                for out in out.by_ref().take(bundle.len()) {
                    for (outs, out) in outs.iter_mut().zip(out.chunks_exact_mut(q_width / kv_heads)) {
                        outs.push(out);
                    }
                }
                work += bundle.len() * bundle[0].count * q_width * 2;
                let job = |(kv_head, outs)| Job { cache, seen: bundle, row, kv_head, outs };
                jobs.extend(outs.into_iter().enumerate().map(job));
                row += bundle.len();
            }
        }
        spread::each(jobs, work, |job| job.run(projection, pages, q, x));
        Ok(())
    }
}

/// The blocks of a launch per row: tiles of at most [`HEADS`] query heads of one key/value head.
fn head_tiles(projection: &Projection, pages: &Pages) -> usize {
    let kv_heads = pages.kv_heads;
    (kv_heads * (projection.q_heads / kv_heads).div_ceil(HEADS)) as usize
}

/// What the covered rows of one slot attend to.
struct Held<'a, E> {
    /// Keys and values by page.
    cache: Vec<(&'a [E], &'a [E])>,
    /// One per row.
    seen: Vec<Seen>,
}

/// What the covered rows attend to, slot by slot. `chosen` begins with the first covered row.
fn held<'a, E: Element>(
    rows: RowRange,
    pages: &Pages,
    chosen: &[u32],
    top: usize,
    memory: &'a Access<'_>,
) -> Result<Vec<Held<'a, E>>, Fault> {
    let mut held = Vec::new();
    for run in Run::all(rows, memory)? {
        let page = |&page| {
            let keys = memory.read(pages.keys::<E>(page), pages.key_elements())?;
            Ok((keys, memory.read(pages.values::<E>(page), pages.key_elements())?))
        };
        let table = pages.table(memory, run.slot, run.positions.end)?;
        let cache = table.iter().map(page).collect::<Result<Vec<(&[E], &[E])>, Fault>>()?;
        let mut seen = Vec::new();
        for (i, position) in run.positions.enumerate() {
            let row = run.row - rows.start() + i;
            let row = Seen::new(&chosen[row * top..][..top], position, pages.ratio as usize);
            seen.push(row.map_err(|why| memory.domain(format!("row {}: {why}", run.row + i)))?);
        }
        held.push(Held { cache, seen });
    }
    Ok(held)
}

/// The positions that a row attends to.
struct Seen {
    /// In ascending order, none empty, none across pages.
    spans: Vec<Range<usize>>,
    /// How many positions they hold.
    count: usize,
    /// Whether they are all positions up to the row's own.
    all: bool,
}

impl Seen {
    fn new(chosen: &[u32], position: usize, ratio: usize) -> Result<Seen, String> {
        let visible = position + 1;
        let blocks = visible / ratio;
        let ids = &chosen[..blocks.min(chosen.len())];
        if !ids.is_sorted_by(|a, b| a < b) || ids.last().is_some_and(|&last| last as usize >= blocks) {
            return Err(format!("the chosen blocks {ids:?} are not ascending ids below {blocks}"));
        }
        let all = ids.len() == blocks;
        let mut spans: Vec<Range<usize>> = Vec::new();
        let runs = ids.chunk_by(|a, b| a + 1 == *b).map(|run| {
            let first = run[0] as usize * ratio;
            first..first + run.len() * ratio
        });
        let tail = blocks * ratio..visible;
        for run in runs.chain(std::iter::once(tail)) {
            spans.extend(pieces(run, PAGE));
        }
        Ok(Seen { count: spans.iter().map(Range::len).sum(), spans, all })
    }
}

/// Groups consecutive rows: up to [`BUNDLE`] that see all their positions, or one.
fn bundles(mut seen: &[Seen]) -> impl Iterator<Item = &[Seen]> {
    std::iter::from_fn(move || {
        let full = seen.iter().take(BUNDLE).take_while(|row| row.all).count();
        let (bundle, rest) = seen.split_at_checked(full.max(1))?;
        seen = rest;
        Some(bundle)
    })
}

/// One bundle of rows for the query heads of one key/value head.
struct Job<'a, E> {
    /// Keys and values by page of the slot.
    cache: &'a [(&'a [E], &'a [E])],
    /// What the rows see: each all that the one before it sees, and one more.
    seen: &'a [Seen],
    /// The first row, counted from the first covered one.
    row: usize,
    kv_head: usize,
    /// Where the rows' heads go.
    outs: Vec<&'a mut [E]>,
}

impl<E: Element> Job<'_, E> {
    /// A line is a head of a row; tables of numbers are `[position, line]`.
    fn run(self, projection: &Projection, pages: &Pages, q: &[E], x: &[E]) {
        let (width, q_heads) = (pages.width as usize, projection.q_heads as usize);
        let group = q_heads / pages.kv_heads as usize;
        let (rows, inner, from) = (self.seen.len(), pages.kv_heads as usize * width, self.kv_head * width);
        let lines = rows * group;
        let first_head = self.kv_head * group;
        let mut queries = Vec::with_capacity(lines * width);
        for row in self.row..self.row + rows {
            queries.extend(widened(&q[(row * q_heads + first_head) * width..][..group * width]));
        }

        // The last row's spans hold everybody's positions; the first row's are common to all.
        let (common, last) = (self.seen[0].count, &self.seen[rows - 1]);
        let mut weights = dots(&queries, width, last, self.cache, inner, from);
        let (mut largest, mut sums) = (vec![f32::NEG_INFINITY; lines], vec![0.0; lines]);
        softmax(&mut weights, common, group, (width as f32).sqrt(), &mut largest, &mut sums);

        let mut means = vec![0.0; lines * width];
        let mut at = 0;
        for span in &last.spans {
            let values = self.cache[span.start / PAGE].1;
            let mut first = span.start % PAGE;
            // Positions common to all lines at once, then one by one those that later rows see.
            let mut count = span.len().min(common.saturating_sub(at));
            let end = at + span.len();
            while at < end {
                let line = (at + 1).saturating_sub(common) * group;
                count = count.max(1);
                let weights = &weights[at * lines..(at + count) * lines];
                let values = Values { all: values, inner, from, first };
                accumulate(weights, lines, line, values, width, &mut means[line * width..]);
                (at, first, count) = (at + count, first + count, 1);
            }
        }
        for (i, out) in self.outs.into_iter().enumerate() {
            let x = &x[(self.row + i) * projection.stride as usize..];
            for (h, out) in out.chunks_exact_mut(width).enumerate() {
                let line = i * group + h;
                let gate = &x[projection.gate_at(pages, first_head + h)..];
                for ((out, mean), gate) in out.iter_mut().zip(&means[line * width..]).zip(gate) {
                    *out = E::narrow(E::round(mean / sums[line]) * sigmoid(gate.widen()));
                }
            }
        }
    }
}

/// The products of every line of `queries` with the keys of every position that a row sees, columns
/// `from..from + width` of rows of `inner`: `[position, line]`.
fn dots<E: Element>(
    queries: &[f32],
    width: usize,
    seen: &Seen,
    cache: &[(&[E], &[E])],
    inner: usize,
    from: usize,
) -> Vec<f32> {
    let lines = queries.len() / width;
    let mut dots = vec![0.0; seen.count * lines];
    let mut left = &mut dots[..];
    for span in &seen.spans {
        let (dots, rest) = left.split_at_mut(span.len() * lines);
        let keys = Columns { matrix: cache[span.start / PAGE].0, inner, from, to: from + width };
        E::tile_run(Columns::all(queries, width), keys, span.start % PAGE, dots);
        left = rest;
    }
    dots
}

/// Turns products into weights, and adds to the largest score and the sum of the weights of each line. Line `l`
/// sees positions `0..common + l / group`; what lies past them is left as nonsense.
#[multiversion(targets("x86_64+avx+avx2"))]
fn softmax(
    scores: &mut [f32],
    common: usize,
    group: usize,
    root: f32,
    largest: &mut [f32],
    sums: &mut [f32],
) {
    let lines = sums.len();
    let unseen = |j: usize| (j + 1).saturating_sub(common) * group;
    scores.iter_mut().for_each(|score| *score /= root);
    for (j, scores) in scores.chunks_exact(lines).enumerate() {
        for (score, largest) in scores.iter().zip(&mut *largest).skip(unseen(j)) {
            *largest = if *score > *largest { *score } else { *largest };
        }
    }
    for scores in scores.chunks_exact_mut(lines) {
        scores.iter_mut().zip(&*largest).for_each(|(score, largest)| *score -= largest);
    }
    // Over all lines at once: they may be few.
    scores.iter_mut().for_each(|score| *score = exp(*score));
    for (j, weights) in scores.chunks_exact(lines).enumerate() {
        weights.iter().zip(&mut *sums).skip(unseen(j)).for_each(|(weight, sum)| *sum += weight);
    }
}

/// Values of one page from position `first` on, columns `from..` of rows of `inner`.
#[derive(Clone, Copy)]
pub(crate) struct Values<'a, E> {
    pub(crate) all: &'a [E],
    pub(crate) inner: usize,
    pub(crate) from: usize,
    pub(crate) first: usize,
}

/// Adds weighted values to the means of lines `line..`, position after position.
pub(crate) fn accumulate<E: Element>(
    weights: &[f32],
    lines: usize,
    line: usize,
    values: Values<'_, E>,
    width: usize,
    means: &mut [f32],
) {
    // `multiversion` cannot clone generic functions, so there is one door per element type.
    let Values { all, inner, from, first } = values;
    if E::NAME == bf16::NAME {
        let values = Values { all: bytemuck::cast_slice(all), inner, from, first };
        accumulate_bf16(weights, lines, line, values, width, means);
    } else {
        let values = Values { all: bytemuck::cast_slice(all), inner, from, first };
        accumulate_f32(weights, lines, line, values, width, means);
    }
}

#[multiversion(targets("x86_64+avx+avx2"))]
fn accumulate_f32(w: &[f32], lines: usize, line: usize, v: Values<'_, f32>, width: usize, m: &mut [f32]) {
    accumulate_tiles(w, lines, line, v, width, m);
}

#[multiversion(targets("x86_64+avx+avx2"))]
fn accumulate_bf16(w: &[f32], lines: usize, line: usize, v: Values<'_, bf16>, width: usize, m: &mut [f32]) {
    accumulate_tiles(w, lines, line, v, width, m);
}

#[inline(always)]
fn accumulate_tiles<E: Element>(
    weights: &[f32],
    lines: usize,
    line: usize,
    values: Values<'_, E>,
    width: usize,
    means: &mut [f32],
) {
    let mut l = line;
    let mut means = means;
    while l < lines {
        let step = if lines - l >= 4 { 4 } else { (lines - l).min(2) };
        let (here, rest) = means.split_at_mut(step * width);
        let mut column = 0;
        while column < width {
            // Tiles of eight vector registers of sums where the width allows.
            let (weights, here) = (&weights[l..], &mut here[column..]);
            let values = Values { from: values.from + column, ..values };
            column += match (step, width - column) {
                (4, 16..) => tile::<E, 4, 16>(weights, lines, values, width, here),
                (2, 32..) => tile::<E, 2, 32>(weights, lines, values, width, here),
                (1, 64..) => tile::<E, 1, 64>(weights, lines, values, width, here),
                (4, _) => tile::<E, 4, 1>(weights, lines, values, width, here),
                (2, _) => tile::<E, 2, 1>(weights, lines, values, width, here),
                _ => tile::<E, 1, 1>(weights, lines, values, width, here),
            };
        }
        (l, means) = (l + step, rest);
    }
}

/// The first `C` columns of the first `L` lines. Returns `C`.
#[inline(always)]
fn tile<E: Element, const L: usize, const C: usize>(
    weights: &[f32],
    lines: usize,
    values: Values<'_, E>,
    width: usize,
    means: &mut [f32],
) -> usize {
    let mut sums = [[0.0f32; C]; L];
    for (i, sums) in sums.iter_mut().enumerate() {
        sums.copy_from_slice(&means[i * width..][..C]);
    }
    let mut at = values.first * values.inner + values.from;
    for weights in weights.chunks(lines) {
        let weights: &[f32; L] = weights[..L].try_into().expect("a whole run of lines");
        let run: &[E; C] = values.all[at..at + C].try_into().expect("a whole run of columns");
        let wide: [f32; C] = std::array::from_fn(|c| run[c].widen());
        for i in 0..L {
            for c in 0..C {
                sums[i][c] += weights[i] * wide[c];
            }
        }
        at += values.inner;
    }
    for (i, sums) in sums.iter().enumerate() {
        means[i * width..][..C].copy_from_slice(sums);
    }
    C
}
