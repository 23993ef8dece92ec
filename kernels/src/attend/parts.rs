//! Attention of decode rows in two launches: spans of a row's positions apart, then joined. A decode round
//! has few rows, each with up to thousands of positions; a row alone must occupy the whole device.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};

pub use super::SPAN;
use super::{Held, SHARED, Seen, THREADS, Values, accumulate, dots, head_tiles, held, softmax};
use crate::heads::Projection;
use crate::numerics::{Element, exp, sigmoid, widened};
use crate::runs::pieces;
use crate::source;
use crate::spread;
use crate::state::{Pages, RowRange};
use crate::table::PAGE;

/// Attention of every row and query head over each span of 64 of its positions.
///
/// ```text
/// J and s as Attend; span i = J[64 * i], J[64 * i + 1], ..., at most 64 of them
/// m[r, h, i] = max over span i of s
/// z[r, h, i] = sum over span i of exp(s - m[r, h, i])                 in the order of J, from 0
/// a[r, h, i] = sum over span i of exp(s - m[r, h, i]) * value
/// ```
/// Shapes     x, q, chosen: as [`Attend`](super::Attend); a: `[rows, q_heads, spans, width]` f32 and m, z
///            as pairs: `[rows, q_heads, spans, 2]` f32, with [`spans`] for the longest row
/// Domain     as [`Attend`](super::Attend)
/// Effects    writes a, m and z of the covered rows and of the spans that they have
/// CUDA       heads at most 256 wide
/// Source     MODEL: QSA attention
pub struct AttendPart<E>(PhantomData<E>);

/// Arguments of [`AttendPart`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct PartArgs {
    /// The rows.
    pub rows: RowRange,
    /// The stacked projection: its sizes.
    pub projection: Projection,
    /// q.
    pub q: Ptr<u8>,
    /// chosen.
    pub chosen: Ptr<u32>,
    /// The keys and values.
    pub pages: Pages,
    /// a.
    pub sums: Ptr<f32>,
    /// m and z.
    pub marks: Ptr<f32>,
    /// Entries of a row of chosen.
    pub top: u32,
    /// Not used; zero.
    pub zero: u32,
}

/// Joins the spans of every row and query head, and gates the result.
///
/// ```text
/// w[i]     = exp(m[r, h, i] - max over i of m[r, h, i])
/// o        = r16((sum over i of w[i] * a[r, h, i]) / (sum over i of w[i] * z[r, h, i]))    i ascends, from 0
/// out[r,h] = r16(o * sigmoid(gate h of x[r]))
/// ```
/// Shapes     x, out: as [`Attend`](super::Attend); a, m, z: as [`AttendPart`]
/// Effects    writes out of the covered rows
/// Source     MODEL: QSA attention
pub struct AttendJoin<E>(PhantomData<E>);

/// Arguments of [`AttendJoin`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct JoinArgs {
    /// The rows.
    pub rows: RowRange,
    /// The stacked projection: the gates.
    pub projection: Projection,
    /// a.
    pub sums: Ptr<f32>,
    /// m and z.
    pub marks: Ptr<f32>,
    /// The sizes of keys and values.
    pub pages: Pages,
    /// out.
    pub out: Ptr<u8>,
    /// Entries of a row of chosen.
    pub top: u32,
    /// Not used; zero.
    pub zero: u32,
}

/// Columns of a block of the CUDA twin of [`AttendJoin`].
pub(crate) const JOINED: u32 = 128;

/// How many spans a row has at most: of `top` blocks of `ratio` positions, and a tail.
pub fn spans(ratio: usize, top: usize) -> usize {
    (top * ratio + ratio - 1).div_ceil(SPAN)
}

/// Whether a launch of either kernel is legal.
fn check(rows: RowRange, projection: &Projection, pages: &Pages, top: u32) -> Result<(), String> {
    projection.check(rows, pages)?;
    match top {
        0 => Err("top 0: a row has no room for a chosen block".into()),
        _ => Ok(()),
    }
}

impl<E: Element> Kernel for AttendPart<E> {
    type Args = PartArgs;
    const NAME: &'static str = "attend_part";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::shared_twin::<E>(&source::ATTEND, Self::NAME, THREADS, SHARED);

    fn check(args: &PartArgs) -> Result<(), String> {
        check(args.rows, &args.projection, &args.pages, args.top)
    }

    fn grid(args: &PartArgs) -> Grid {
        let spans = spans(args.pages.ratio as usize, args.top as usize);
        Grid::plane(args.rows.len(), head_tiles(&args.projection, &args.pages) * spans)
    }

    fn host(args: &PartArgs, memory: &Access<'_>) -> Result<(), Fault> {
        let PartArgs { rows, projection, pages, .. } = args;
        let (start, count) = (rows.start(), rows.len());
        let (width, top, q_heads) = (pages.width as usize, args.top as usize, projection.q_heads as usize);
        let spans = spans(pages.ratio as usize, top);
        let row_parts = q_heads * spans;
        let sums = memory.write(args.sums.at(start * row_parts * width), count * row_parts * width)?;
        let marks = memory.write(args.marks.at(start * row_parts * 2), count * row_parts * 2)?;
        let q = memory.read::<E>(args.q.cast::<E>().at(start * q_heads * width), count * q_heads * width)?;
        let chosen = memory.read(args.chosen.at(start * top), count * top)?;
        let held = held::<E>(*rows, pages, chosen, top, memory)?;

        let group = q_heads / pages.kv_heads as usize;
        let mut heads = q
            .chunks_exact(group * width)
            .zip(sums.chunks_exact_mut(group * spans * width))
            .zip(marks.chunks_exact_mut(group * spans * 2));
        let (mut jobs, mut work) = (Vec::new(), 0);
        for Held { cache, seen } in &held {
            for seen in seen {
                work += seen.count * q_heads * width * 2;
                for (kv_head, ((q, sums), marks)) in heads.by_ref().take(pages.kv_heads as usize).enumerate()
                {
                    jobs.push(Job { cache, seen, kv_head, q, sums, marks });
                }
            }
        }
        spread::each(jobs, work, |job| job.run(pages, spans));
        Ok(())
    }
}

/// The query heads of one key/value head of one row.
struct Job<'a, E> {
    /// Keys and values by page of the slot.
    cache: &'a [(&'a [E], &'a [E])],
    seen: &'a Seen,
    kv_head: usize,
    /// The heads' queries, sums and marks.
    q: &'a [E],
    sums: &'a mut [f32],
    marks: &'a mut [f32],
}

impl<E: Element> Job<'_, E> {
    fn run(self, pages: &Pages, spans: usize) {
        let Job { cache, seen, kv_head, q, sums, marks } = self;
        let (width, inner) = (pages.width as usize, (pages.kv_heads * pages.width) as usize);
        let (group, from) = (q.len() / width, kv_head * width);
        let mut weights = dots(&widened(q), width, seen, cache, inner, from);
        for (i, weights) in weights.chunks_mut(SPAN * group).enumerate() {
            let (mut largest, mut total) = (vec![f32::NEG_INFINITY; group], vec![0.0; group]);
            let count = weights.len() / group;
            softmax(weights, count, group, (width as f32).sqrt(), &mut largest, &mut total);
            for (head, mark) in largest.into_iter().zip(total).enumerate() {
                marks[(head * spans + i) * 2..][..2].copy_from_slice(&[mark.0, mark.1]);
            }
        }

        let mut parts = vec![0.0; seen.count.div_ceil(SPAN) * group * width];
        let mut at = 0;
        for run in &seen.spans {
            let all = cache[run.start / PAGE].1;
            for piece in pieces(at..at + run.len(), SPAN) {
                let first = run.start % PAGE + piece.start - at;
                let part = &mut parts[piece.start / SPAN * group * width..][..group * width];
                let weights = &weights[piece.start * group..piece.end * group];
                accumulate(weights, group, 0, Values { all, inner, from, first }, width, part);
            }
            at += run.len();
        }
        for (i, part) in parts.chunks_exact(group * width).enumerate() {
            for (head, part) in part.chunks_exact(width).enumerate() {
                sums[(head * spans + i) * width..][..width].copy_from_slice(part);
            }
        }
    }
}

impl<E: Element> Kernel for AttendJoin<E> {
    type Args = JoinArgs;
    const NAME: &'static str = "attend_join";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::twin::<E>(&source::ATTEND, Self::NAME, 32);

    fn check(args: &JoinArgs) -> Result<(), String> {
        check(args.rows, &args.projection, &args.pages, args.top)
    }

    fn grid(args: &JoinArgs) -> Grid {
        let runs = args.pages.width.div_ceil(JOINED);
        Grid::plane(args.rows.len(), (args.projection.q_heads * runs) as usize)
    }

    fn host(args: &JoinArgs, memory: &Access<'_>) -> Result<(), Fault> {
        let JoinArgs { rows, projection, pages, .. } = args;
        let (start, count) = (rows.start(), rows.len());
        let (width, ratio, top) = (pages.width as usize, pages.ratio as usize, args.top as usize);
        let (q_heads, spans) = (projection.q_heads as usize, spans(ratio, top));
        let q_width = q_heads * width;
        let facts = rows.read(memory)?;
        let x = projection.rows::<E>(memory, start, count)?;
        let sums = memory.read(args.sums.at(start * spans * q_width), count * spans * q_width)?;
        let marks = memory.read(args.marks.at(start * spans * q_heads * 2), count * spans * q_heads * 2)?;
        let out = memory.write::<E>(args.out.cast::<E>().at(start * q_width), count * q_width)?;

        let parts = sums.chunks_exact(spans * width).zip(marks.chunks_exact(spans * 2));
        for (line, (out, (sums, marks))) in out.chunks_exact_mut(width).zip(parts).enumerate() {
            let (row, head) = (line / q_heads, line % q_heads);
            let visible = facts[row].position as usize + 1;
            let seen = (visible / ratio).min(top) * ratio + visible % ratio;
            let marks: Vec<(f32, f32)> =
                marks.chunks_exact(2).take(seen.div_ceil(SPAN)).map(|mark| (mark[0], mark[1])).collect();
            let largest =
                marks.iter().fold(f32::NEG_INFINITY, |most, mark| if mark.0 > most { mark.0 } else { most });
            let (mut total, mut mean) = (0.0, vec![0.0; width]);
            for (mark, sums) in marks.iter().zip(sums.chunks_exact(width)) {
                let factor = exp(mark.0 - largest);
                total += factor * mark.1;
                mean.iter_mut().zip(sums).for_each(|(mean, sum)| *mean += factor * sum);
            }
            let gate = &x[row * projection.stride as usize + projection.gate_at(pages, head)..];
            for ((out, mean), gate) in out.iter_mut().zip(mean).zip(gate) {
                *out = E::narrow(E::round(mean / total) * sigmoid(gate.widen()));
            }
        }
        Ok(())
    }
}
