//! The short causal convolution of the recurrent layers, and the windows that carry it between rounds.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};
use rayon::prelude::*;

use crate::numerics::{Element, silu};
use crate::source::{self, channel_grid};
use crate::state::{Part, RowRange, runs};
use crate::table::Fact;

/// Rows of a convolution below which a thread does not share them.
pub(crate) const ROWS_PER_THREAD: usize = 8;

/// A depthwise causal convolution of the first columns of a stacked projection, and silu.
///
/// ```text
/// c[t, ch] = r16(sum over j in 0..taps, ascending, of w[ch, j] * u[t - (taps - 1) + j, ch])
/// y[t, ch] = r16(silu(c[t, ch]))
/// ```
/// u at times before the rows of a slot comes from the slot's window, oldest row first; the window of a
/// fresh slot is zero.
///
/// Shapes     x: `[rows, stride]` elements, u its first `channels` columns; w: `[channels, taps]` elements;
///            y: `[rows, channels]` elements; window: `[taps - 1, channels]` elements per slot
/// Domain     the rows of a slot are all of its rows of the round, in order
/// Effects    writes the covered rows of y; the windows of the covered slots become the last `taps - 1`
///            rows of u, rows of the old window included
/// Source     MODEL: gated delta net, short convolution
pub struct Conv<E>(PhantomData<E>);

/// Arguments of [`Conv`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Args {
    /// The covered rows.
    pub rows: RowRange,
    /// x; row 0 of the round.
    pub x: Ptr<u8>,
    /// w.
    pub weight: Ptr<u8>,
    /// The windows.
    pub window: Part,
    /// y; row 0 of the round.
    pub y: Ptr<u8>,
    /// Channels: the convolved columns.
    pub channels: u32,
    /// Taps of the convolution.
    pub taps: u32,
    /// Elements from one row of x to the next.
    pub stride: u32,
    /// Not used; zero.
    pub zero: u32,
}

/// Threads of a block of the CUDA twin.
const THREADS: u32 = 128;

impl<E: Element> Kernel for Conv<E> {
    type Args = Args;
    const NAME: &'static str = "conv";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::twin::<E>(&source::CONV, Self::NAME, THREADS);

    fn check(args: &Args) -> Result<(), String> {
        if args.rows.is_empty() || args.channels == 0 || args.taps == 0 {
            return Err(format!(
                "rows {}, channels {} and taps {} must all be positive",
                args.rows.count, args.channels, args.taps
            ));
        }
        if args.channels > args.stride {
            return Err(format!("{} channels do not fit in a row of {}", args.channels, args.stride));
        }
        Ok(())
    }

    fn grid(args: &Args) -> Grid {
        channel_grid(args.rows.len(), args.channels, THREADS)
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let (channels, stride) = (args.channels as usize, args.stride as usize);
        let facts = args.rows.read(memory)?;
        let (first, rows) = (args.rows.start(), args.rows.len());
        let x = memory.read::<E>(args.x.cast::<E>().at(first * stride), rows * stride)?;
        let weight = memory.read::<E>(args.weight.cast(), channels * args.taps as usize)?;
        let y = memory.write::<E>(args.y.cast::<E>().at(first * channels), rows * channels)?;
        let taps = Taps::new(weight, channels, 1);
        let mut histories = histories(facts, args.window, &taps, memory, |t| &x[t * stride..][..channels])?;

        let places = places(&histories);
        y.par_chunks_exact_mut(channels).zip(places).with_min_len(ROWS_PER_THREAD).for_each(
            |(y, (history, place))| {
                let mut sums = vec![0.0; channels];
                histories[history].convolve(&taps, place, &mut sums);
                for (y, sum) in y.iter_mut().zip(&sums) {
                    *y = E::narrow(silu(E::round(*sum)));
                }
            },
        );
        histories.iter_mut().for_each(History::keep);
        Ok(())
    }
}

/// The weights of a depthwise causal convolution, tap by tap.
pub(crate) struct Taps {
    /// `[taps, channels]`, oldest tap first.
    weight: Vec<f32>,
    channels: usize,
    dilation: usize,
}

impl Taps {
    /// From weights `[channels, taps]`; neighbouring taps are `dilation` rows apart.
    pub(crate) fn new<E: Element>(weight: &[E], channels: usize, dilation: usize) -> Taps {
        let taps = weight.len() / channels;
        let mut by_tap = vec![0.0; weight.len()];
        for (channel, weight) in weight.chunks_exact(taps).enumerate() {
            for (tap, weight) in weight.iter().enumerate() {
                by_tap[tap * channels + channel] = weight.widen();
            }
        }
        Taps { weight: by_tap, channels, dilation }
    }

    /// How many rows before the current one it looks at.
    pub(crate) fn depth(&self) -> usize {
        (self.weight.len() / self.channels - 1) * self.dilation
    }
}

/// What one slot's rows see of their past: each other, and the slot's window before them.
pub(crate) struct History<'a, E> {
    /// `[depth, channels]`, oldest row first.
    window: &'a mut [E],
    /// The slot's rows of this launch.
    rows: Vec<&'a [E]>,
}

/// One history per slot, in the order of the rows. `row` gives the row with that index in the launch.
pub(crate) fn histories<'a, E: Element>(
    facts: &[Fact],
    window: Part,
    taps: &Taps,
    memory: &'a Access<'_>,
    row: impl Fn(usize) -> &'a [E],
) -> Result<Vec<History<'a, E>>, Fault> {
    let mut next = 0;
    let mut histories = Vec::new();
    for run in whole_runs(facts, memory)? {
        let window = memory.write(window.slot(run[0].slot), taps.depth() * taps.channels)?;
        histories.push(History { window, rows: (next..next + run.len()).map(&row).collect() });
        next += run.len();
    }
    Ok(histories)
}

/// For every row of the launch, the index of its history and its place in it.
pub(crate) fn places<E>(histories: &[History<'_, E>]) -> Vec<(usize, usize)> {
    let rows = histories.iter().enumerate();
    rows.flat_map(|(i, history)| (0..history.rows.len()).map(move |place| (i, place))).collect()
}

impl<E: Element> History<'_, E> {
    /// The convolution at row `place`, its sums added tap by tap, oldest first.
    pub(crate) fn convolve(&self, taps: &Taps, place: usize, sums: &mut [f32]) {
        let depth = taps.depth();
        sums.fill(0.0);
        for (tap, weight) in taps.weight.chunks_exact(taps.channels).enumerate() {
            // Rows are counted from the start of the window.
            let at = place + tap * taps.dilation;
            let row = match at.checked_sub(depth) {
                Some(at) => self.rows[at],
                None => &self.window[at * taps.channels..][..taps.channels],
            };
            for ((sum, weight), x) in sums.iter_mut().zip(weight).zip(row) {
                *sum += weight * x.widen();
            }
        }
    }

    /// Makes the window the last rows of what was seen.
    pub(crate) fn keep(&mut self) {
        let channels = self.rows[0].len();
        let depth = self.window.len() / channels;
        let new = self.rows.len().min(depth);
        self.window.copy_within(new * channels.., 0);
        let kept = &self.rows[self.rows.len() - new..];
        for (to, from) in self.window[(depth - new) * channels..].chunks_exact_mut(channels).zip(kept) {
            to.copy_from_slice(from);
        }
    }
}

/// The runs of a launch that advances state: each must be all of its slot's rows, in order.
pub(crate) fn whole_runs<'f>(facts: &'f [Fact], memory: &Access<'_>) -> Result<Vec<&'f [Fact]>, Fault> {
    let runs: Vec<&[Fact]> = runs(facts).collect();
    for run in &runs {
        let whole =
            |(place, fact): (usize, &Fact)| (fact.place as usize, fact.count as usize) == (place, run.len());
        if let Some((place, fact)) = run.iter().enumerate().find(|&row| !whole(row)) {
            return Err(memory.domain(format!(
                "row {place} of the {} rows of slot {} says it is row {} of {}",
                run.len(),
                fact.slot,
                fact.place,
                fact.count
            )));
        }
    }
    Ok(runs)
}
