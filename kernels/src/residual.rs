//! The streams of the residual: what a block writes back to them, and their norm for the next block.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};
use rayon::prelude::*;

use crate::numerics::{CUTS, Element, sum_of_squares};
use crate::source;

/// Adds a block's output to the streams, and norms the streams for the next block. Either part can be
/// left out by a null pointer.
///
/// ```text
/// y[t, j]       = r16(p[0, t, j] + p[1, t, j])
/// R[t, s, j]    = r16(R[t, s, j] + y[t, j] * inject[t, s])                        if p is given
/// n[t, s, j]    = r16(R[t, s, j] * rsqrt(mean over j of R[t, s, j]^2 + eps) * (1 + gain[s, j]))
///                                                                               if gain is given
/// ```
/// Shapes     R, n: `[rows, streams, hidden]` elements; gain: `[streams, hidden]` elements;
///            p: `[2, rows, hidden]` f32; inject: `[rows, streams]` f32
/// Effects    writes R in place (if p) and all of n (if gain). The rounded R feeds the norm.
/// CUDA       streams at most 10240 wide
/// Source     MODEL: hyper-connections, write-back merged with the norm of the next block
pub struct Residual<E>(PhantomData<E>);

/// Arguments of [`Residual`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Args {
    /// R.
    pub streams: Ptr<u8>,
    /// p, or null.
    pub partials: Ptr<f32>,
    /// The injection; read only with p.
    pub inject: Ptr<f32>,
    /// gain, or null.
    pub gain: Ptr<u8>,
    /// n; written only with gain.
    pub normed: Ptr<u8>,
    /// Number of rows.
    pub rows: u32,
    /// Number of streams.
    pub count: u32,
    /// Width of a stream.
    pub hidden: u32,
    /// eps.
    pub eps: f32,
}

/// Threads of a block of the CUDA twin, and the runs of eight elements that each holds.
pub(crate) const THREADS: u32 = 320;
pub(crate) const HELD: u32 = 4;

/// The widest stream that the CUDA twin takes; wider ones it leaves unwritten.
pub const CUDA_WIDTH: u32 = THREADS * HELD * 8;

impl<E: Element> Kernel for Residual<E> {
    type Args = Args;
    const NAME: &'static str = "residual";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::twin::<E>(&source::RESIDUAL, Self::NAME, THREADS);

    fn check(args: &Args) -> Result<(), String> {
        if args.rows == 0 || args.count == 0 || args.hidden == 0 {
            return Err(format!(
                "rows {}, streams {}, hidden {}: all positive",
                args.rows, args.count, args.hidden
            ));
        }
        if args.partials.is_null() && args.gain.is_null() {
            return Err("neither partial sums nor a gain: nothing to do".into());
        }
        Ok(())
    }

    fn grid(args: &Args) -> Grid {
        Grid::plane(args.rows as usize, args.count as usize)
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let (rows, count, hidden) = (args.rows as usize, args.count as usize, args.hidden as usize);
        let width = count * hidden;
        let streams = memory.write::<E>(args.streams.cast(), rows * width)?;
        if !args.partials.is_null() {
            let partials = memory.read(args.partials, CUTS * rows * hidden)?;
            let inject = memory.read(args.inject, rows * count)?;
            let (first, second) = partials.split_at(rows * hidden);
            for (t, row) in streams.chunks_exact_mut(width).enumerate() {
                let halves = first[t * hidden..].iter().zip(&second[t * hidden..]).take(hidden);
                let y: Vec<f32> = halves.map(|(a, b)| E::round(a + b)).collect();
                for (stream, inject) in row.chunks_exact_mut(hidden).zip(&inject[t * count..]) {
                    for (value, y) in stream.iter_mut().zip(&y) {
                        *value = E::narrow(value.widen() + y * inject);
                    }
                }
            }
        }
        if !args.gain.is_null() {
            let gain = memory.read::<E>(args.gain.cast(), width)?;
            let normed = memory.write::<E>(args.normed.cast(), rows * width)?;
            let rows = normed.par_chunks_exact_mut(width).zip(streams.par_chunks_exact(width));
            rows.with_min_len(8).for_each(|(normed, row)| rms_grouped(row, gain, hidden, args.eps, normed));
        }
        Ok(())
    }
}

/// RMS norm with a zero-centred gain over every run of `group` values:
/// `y = x * rsqrt(mean(x^2) + eps) * (1 + gain)`, rounded to the element type of `y`. `gain` is as long as `x`.
pub fn rms_grouped<E: Element, Y: Element>(x: &[E], gain: &[E], group: usize, eps: f32, y: &mut [Y]) {
    let runs = x.chunks_exact(group).zip(gain.chunks_exact(group)).zip(y.chunks_exact_mut(group));
    for ((x, gain), y) in runs {
        let scale = inverse_rms(x, eps);
        for ((x, gain), y) in x.iter().zip(gain).zip(y) {
            *y = Y::narrow(x.widen() * scale * (1.0 + gain.widen()));
        }
    }
}

/// `1 / sqrt(mean(x^2) + eps)`.
#[inline(always)]
pub fn inverse_rms<E: Element>(x: &[E], eps: f32) -> f32 {
    1.0 / (sum_of_squares(x) / x.len() as f32 + eps).sqrt()
}
