//! The heads of sparse attention: one stacked projection row becomes normed, turned queries, keys and
//! values in pages, and index queries.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};

use crate::numerics::Element;
use crate::residual::rms_grouped;
use crate::rope::Rotary;
use crate::runs::{Run, pieces};
use crate::source;
use crate::spread;
use crate::state::{Pages, RowRange};
use crate::table::{Fact, PAGE};

/// Norms and turns the heads of every row and stores its keys and values.
///
/// ```text
/// q[r, h]  = rope(r16(RMS+1(query h of x[r], q_gain)))
/// keys of the row's position, h    = rope(r16(RMS+1(key h of x[r], k_gain)))
/// values of the row's position, h  = value h of x[r]
/// iq[r, h] = rope(r16(RMS+1(index query h of x[r], iq_gain)))
/// ```
/// with `RMS+1(v, gain) = v * rsqrt(mean(v^2) + eps) * (1 + gain)` and rope at the row's rotary position
/// ([`Rotary`]; it rounds again).
///
/// Shapes     x: `[rows, stride]` elements, laid out as [`Projection`] says; q: `[rows, q_heads, width]`,
///            iq: `[rows, index_heads, index_width]` elements; gains: elements of one head
/// Domain     every position lies in the slot's page table; rows of a slot are consecutive
/// Effects    writes q and iq of the covered rows, keys and values of their positions
/// Source     MODEL: QSA attention, rotary embedding
pub struct Heads<E>(PhantomData<E>);

/// Arguments of [`Heads`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Args {
    /// The rows.
    pub rows: RowRange,
    /// x.
    pub projection: Projection,
    /// The gain of a query head.
    pub q_gain: Ptr<u8>,
    /// The gain of a key head.
    pub k_gain: Ptr<u8>,
    /// The gain of an index query head.
    pub iq_gain: Ptr<u8>,
    /// q.
    pub q: Ptr<u8>,
    /// iq.
    pub iq: Ptr<u8>,
    /// Where keys and values go.
    pub pages: Pages,
    /// The rotary table.
    pub rotary: Rotary,
    /// eps.
    pub eps: f32,
    /// Not used; zero.
    pub zero: u32,
}

/// The stacked projection of sparse attention. A row is, in this order (widths and kv heads are those of
/// [`Pages`]):
///
/// ```text
/// per q head: query [width], gate [width] | keys [kv_heads, width] | values [kv_heads, width]
///   | index queries [index_heads, index_width] | raw index key [index_width] | unused
/// ```
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Projection {
    /// Row 0, elements.
    pub base: Ptr<u8>,
    /// Elements from one row to the next.
    pub stride: u32,
    /// Query heads.
    pub q_heads: u32,
    /// Index query heads.
    pub index_heads: u32,
    /// Not used; zero.
    pub zero: u32,
}

impl Projection {
    /// Where the query of head `head` begins.
    pub fn query_at(&self, pages: &Pages, head: usize) -> usize {
        2 * head * pages.width as usize
    }

    /// Where the gate of head `head` begins.
    pub fn gate_at(&self, pages: &Pages, head: usize) -> usize {
        self.query_at(pages, head) + pages.width as usize
    }

    /// Where the keys begin.
    pub fn keys_at(&self, pages: &Pages) -> usize {
        self.query_at(pages, self.q_heads as usize)
    }

    /// Where the values begin.
    pub fn values_at(&self, pages: &Pages) -> usize {
        self.keys_at(pages) + pages.kv_heads as usize * pages.width as usize
    }

    /// Where the index queries begin.
    pub fn index_queries_at(&self, pages: &Pages) -> usize {
        self.values_at(pages) + pages.kv_heads as usize * pages.width as usize
    }

    /// Where the raw index key begins.
    pub fn index_key_at(&self, pages: &Pages) -> usize {
        self.index_queries_at(pages) + self.index_heads as usize * pages.index_width as usize
    }

    /// Whether the sizes of a sparse-attention launch fit together.
    pub(crate) fn check(&self, rows: RowRange, pages: &Pages) -> Result<(), String> {
        let Pages { kv_heads, width, ratio, index_width, .. } = *pages;
        let sizes = [rows.count, self.q_heads, self.index_heads, kv_heads, width, index_width, ratio];
        if sizes.contains(&0) {
            return Err(format!(
                "rows {}, q_heads {}, index_heads {}, kv_heads {kv_heads}, width {width}, index_width \
                 {index_width} and ratio {ratio} must all be positive",
                rows.count, self.q_heads, self.index_heads
            ));
        }
        if !self.q_heads.is_multiple_of(kv_heads) {
            return Err(format!("q_heads {} is not a multiple of kv_heads {kv_heads}", self.q_heads));
        }
        if !PAGE.is_multiple_of(ratio as usize) {
            return Err(format!("ratio {ratio} does not divide a page of {PAGE}"));
        }
        let used = self.index_key_at(pages) + index_width as usize;
        match used <= self.stride as usize {
            true => Ok(()),
            false => Err(format!("stride {} is less than the {used} elements of a row", self.stride)),
        }
    }

    /// Rows `first..first + count`.
    pub(crate) fn rows<'a, E: Element>(
        &self,
        memory: &'a Access<'_>,
        first: usize,
        count: usize,
    ) -> Result<&'a [E], Fault> {
        let stride = self.stride as usize;
        memory.read(self.base.cast::<E>().at(first * stride), count * stride)
    }
}

/// Checks that a rotary table is not wider than the heads it turns.
pub(crate) fn check_rotary(rotary: &Rotary, pages: &Pages) -> Result<(), String> {
    let narrowest = pages.width.min(pages.index_width);
    match 2 * rotary.half <= narrowest {
        true => Ok(()),
        false => Err(format!("rotary half {} does not fit a head of {narrowest}", rotary.half)),
    }
}

impl<E: Element> Kernel for Heads<E> {
    type Args = Args;
    const NAME: &'static str = "heads";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::twin::<E>(&source::HEADS, Self::NAME, 64);

    fn check(args: &Args) -> Result<(), String> {
        args.projection.check(args.rows, &args.pages)?;
        check_rotary(&args.rotary, &args.pages)
    }

    fn grid(args: &Args) -> Grid {
        let heads = args.projection.q_heads + 2 * args.pages.kv_heads + args.projection.index_heads;
        Grid::plane(args.rows.len(), heads as usize)
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let Args { rows, projection, pages, rotary, .. } = args;
        let (width, index_width) = (pages.width as usize, pages.index_width as usize);
        let stride = projection.stride as usize;
        let q_width = projection.q_heads as usize * width;
        let iq_width = projection.index_heads as usize * index_width;
        let kv_width = pages.kv_heads as usize * width;
        let (start, count) = (rows.start(), rows.len());

        let x = projection.rows::<E>(memory, start, count)?;
        let q = memory.write::<E>(args.q.cast::<E>().at(start * q_width), count * q_width)?;
        let iq = memory.write::<E>(args.iq.cast::<E>().at(start * iq_width), count * iq_width)?;
        let mut parts =
            x.chunks_exact(stride).zip(q.chunks_exact_mut(q_width)).zip(iq.chunks_exact_mut(iq_width));
        let mut jobs = Vec::with_capacity(count);
        for run in Run::all(*rows, memory)? {
            let table = pages.table(memory, run.slot, run.positions.end)?;
            let mut facts = run.facts.iter();
            for piece in pieces(run.positions, PAGE) {
                let page = table[piece.start / PAGE];
                let (at, len) = (piece.start % PAGE * kv_width, piece.len() * kv_width);
                let keys = memory.write(pages.keys::<E>(page).at(at), len)?;
                let values = memory.write(pages.values::<E>(page).at(at), len)?;
                let stored = keys.chunks_exact_mut(kv_width).zip(values.chunks_exact_mut(kv_width));
                for (((keys, values), fact), ((x, q), iq)) in stored.zip(&mut facts).zip(&mut parts) {
                    jobs.push(Row { fact, x, q, iq, keys, values });
                }
            }
        }

        let q_gain = memory.read::<E>(args.q_gain.cast(), width)?;
        let k_gain = memory.read::<E>(args.k_gain.cast(), width)?;
        let iq_gain = memory.read::<E>(args.iq_gain.cast(), index_width)?;
        let frequencies = rotary.frequencies(memory)?;
        let (keys_at, values_at) = (projection.keys_at(pages), projection.values_at(pages));
        let iq_at = projection.index_queries_at(pages);
        spread::each(jobs, count * stride, |row: Row<'_, E>| {
            let turn = rotary.turn::<E>(frequencies, row.fact.axes);
            let head = |x: &[E], gain: &[E], y: &mut [E]| {
                rms_grouped(x, gain, gain.len(), args.eps, y);
                turn.apply(y);
            };
            for (h, y) in row.q.chunks_exact_mut(width).enumerate() {
                head(&row.x[projection.query_at(pages, h)..][..width], q_gain, y);
            }
            for (x, y) in row.x[keys_at..].chunks_exact(width).zip(row.keys.chunks_exact_mut(width)) {
                head(x, k_gain, y);
            }
            row.values.copy_from_slice(&row.x[values_at..][..kv_width]);
            let queries = row.x[iq_at..].chunks_exact(index_width);
            for (x, y) in queries.zip(row.iq.chunks_exact_mut(index_width)) {
                head(x, iq_gain, y);
            }
        });
        Ok(())
    }
}

/// What one row reads and writes.
struct Row<'a, E> {
    fact: &'a Fact,
    x: &'a [E],
    q: &'a mut [E],
    iq: &'a mut [E],
    keys: &'a mut [E],
    values: &'a mut [E],
}
