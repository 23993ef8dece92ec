//! Full attention inside of spans: every patch of a picture over all of them, in both directions.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};
use multiversion::multiversion;

use crate::attend::{Values, accumulate};
use crate::matrix::Columns;
use crate::numerics::{Element, ElementType, exp2, widened};
use crate::source;
use crate::spread;

/// Attention of rows and heads over the rows of their span: row `first + r` over rows `span * n .. span * (n + 1)` of
/// which it is one.
///
/// ```text
/// s[j]      = (q[r, h] . k[j, h]) * (log2(e) / sqrt(width))
/// e[j]      = r16(2^(s[j] - M))                                     M the least integer that no s[j] is above
/// out[r, h] = r16((sum over j of e[j] * v[j, h]) / (sum over j of e[j]))       both sums in the order of j, from 0
/// ```
/// Another integer for M, down to where weights vanish, changes no bit: powers of two go through every rounding.
///
/// Shapes     x: `[total, 3 * heads * width]` elements: queries, keys, values, heads side by side in each; out:
///            `[rows, heads * width]` elements
/// Domain     total is a multiple of span; first + rows is at most total
/// Effects    writes all of out
/// CUDA       heads at most 72 wide
/// Source     MODEL: vision tower
pub struct AttendSpan<E>(PhantomData<E>);

/// Arguments of [`AttendSpan`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Args {
    /// x.
    pub x: Ptr<u8>,
    /// out.
    pub out: Ptr<u8>,
    /// Rows of x.
    pub total: u32,
    /// Rows of a span.
    pub span: u32,
    /// The first row that attends.
    pub first: u32,
    /// How many do.
    pub rows: u32,
    /// Number of heads.
    pub heads: u32,
    /// Width of a head.
    pub width: u32,
}

/// Rows of a block of the CUDA twin, the rows that it attends to at a time, and its threads.
pub const QUERIES: u32 = 128;
/// See [`QUERIES`].
pub const KEYS: u32 = 64;
const THREADS: u32 = 128;

/// The widest head that the CUDA twin takes; wider ones it leaves unwritten.
pub const CUDA_WIDTH: u32 = 72;

/// Shared memory: keys and values, two stages of each.
const SHARED: u32 = 2 * 2 * KEYS * CUDA_WIDTH * 2;

/// Rows that are computed together on the host.
const BUNDLE: usize = 8;

impl Args {
    /// The spans that the attending rows lie in.
    fn spans(&self) -> std::ops::Range<usize> {
        let (span, first, rows) = (self.span as usize, self.first as usize, self.rows as usize);
        first / span..(first + rows).div_ceil(span)
    }
}

impl<E: Element> Kernel for AttendSpan<E> {
    type Args = Args;
    const NAME: &'static str = "attend_span";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::shared_twin::<E>(&source::SPAN, Self::NAME, THREADS, SHARED);

    fn check(args: &Args) -> Result<(), String> {
        let Args { total, span, first, rows, heads, width, .. } = *args;
        if [span, rows, heads, width].contains(&0) {
            return Err(format!("span {span}, rows {rows}, heads {heads}, width {width}: all positive"));
        }
        if !total.is_multiple_of(span) {
            return Err(format!("{total} rows are not spans of {span}"));
        }
        match u64::from(first) + u64::from(rows) <= total.into() {
            true => Ok(()),
            false => Err(format!("rows {first} and {rows} from there on, of {total}")),
        }
    }

    fn grid(args: &Args) -> Grid {
        let tiles = args.rows.min(args.span).div_ceil(QUERIES);
        Grid::space(tiles as usize, args.heads as usize, args.spans().len())
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let [total, span, first, rows] =
            [args.total, args.span, args.first, args.rows].map(|size| size as usize);
        let (heads, width) = (args.heads as usize, args.width as usize);
        let hidden = heads * width;
        let x = memory.read::<E>(args.x.cast(), total * 3 * hidden)?;
        let out = memory.write::<E>(args.out.cast(), rows * hidden)?;

        let mut jobs = Vec::new();
        let mut left = out;
        for number in args.spans() {
            let (start, end) = (number * span, (number + 1) * span);
            let mut row = first.max(start);
            while row < end.min(first + rows) {
                let count = BUNDLE.min(end.min(first + rows) - row);
                let (outs, rest) = left.split_at_mut(count * hidden);
                left = rest;
                jobs.push((&x[start * 3 * hidden..end * 3 * hidden], row - start, outs));
                row += count;
            }
        }
        spread::each(jobs, rows * span * hidden * 2, |(x, row, outs)| bundle(x, row, heads, width, outs));
        Ok(())
    }
}

/// Consecutive rows from `first` on of a span's rows `x`.
fn bundle<E: Element>(x: &[E], first: usize, heads: usize, width: usize, outs: &mut [E]) {
    let hidden = heads * width;
    let (inner, lines) = (3 * hidden, outs.len() / hidden);
    let scale = std::f32::consts::LOG2_E / (width as f32).sqrt();
    let mut weights = vec![0.0; x.len() / inner * lines];
    for head in 0..heads {
        let column = head * width;
        let query = |row: usize| widened(&x[(first + row) * inner + column..][..width]);
        let queries: Vec<f32> = (0..lines).flat_map(query).collect();
        let from = hidden + column;
        let keys = Columns { matrix: x, inner, from, to: from + width };
        E::tile_run(Columns::all(&queries, width), keys, 0, &mut weights);
        let mut sums = vec![0.0; lines];
        match E::NAME == ElementType::F32.name() {
            true => weigh_f32(&mut weights, scale, &mut sums),
            false => weigh_bf16(&mut weights, scale, &mut sums),
        }
        let mut means = vec![0.0; lines * width];
        let values = Values { all: x, inner, from: 2 * hidden + column, first: 0 };
        accumulate(&weights, lines, 0, values, width, &mut means);
        for ((means, sum), out) in means.chunks_exact(width).zip(&sums).zip(outs.chunks_exact_mut(hidden)) {
            for (out, mean) in out[column..].iter_mut().zip(means) {
                *out = E::narrow(mean / sum);
            }
        }
    }
}

// `multiversion` cannot clone generic functions, so there is one door per element type.
#[multiversion(targets("x86_64+avx+avx2"))]
fn weigh_f32(products: &mut [f32], scale: f32, sums: &mut [f32]) {
    weigh::<f32>(products, scale, sums);
}

#[multiversion(targets("x86_64+avx+avx2"))]
fn weigh_bf16(products: &mut [f32], scale: f32, sums: &mut [f32]) {
    weigh::<half::bf16>(products, scale, sums);
}

/// Turns products, `[position, line]`, into weights, and adds up those of each line.
#[inline(always)]
fn weigh<E: Element>(products: &mut [f32], scale: f32, sums: &mut [f32]) {
    let lines = sums.len();
    let mut most = vec![f32::NEG_INFINITY; lines];
    products.iter_mut().for_each(|product| *product *= scale);
    for scores in products.chunks_exact(lines) {
        for (most, score) in most.iter_mut().zip(scores) {
            *most = if *score > *most { *score } else { *most };
        }
    }
    most.iter_mut().for_each(|most| *most = most.ceil());
    for scores in products.chunks_exact_mut(lines) {
        scores.iter_mut().zip(&most).for_each(|(score, most)| *score -= most);
    }
    // Over all lines at once: they may be few.
    products.iter_mut().for_each(|score| *score = E::round(exp2(*score)));
    for weights in products.chunks_exact(lines) {
        sums.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += weight);
    }
}
