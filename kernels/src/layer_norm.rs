//! Layer norm: rows brought to mean zero and variance one, with a gain and a bias.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};
use rayon::prelude::*;

use crate::numerics::{Element, sum_of_squares, total};
use crate::source;

/// Layer norm of every row.
///
/// ```text
/// m       = mean over j of x[r, j]
/// y[r, j] = r16((x[r, j] - m) * rsqrt(mean over j of (x[r, j] - m)^2 + eps) * gain[j] + bias[j])
/// ```
/// Shapes     x, y: `[rows, width]` elements; gain, bias: `[width]` elements
/// Effects    writes all of y
/// CUDA       rows at most 5120 wide
/// Source     MODEL: vision tower
pub struct LayerNorm<E>(PhantomData<E>);

/// Arguments of [`LayerNorm`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Args {
    /// x.
    pub x: Ptr<u8>,
    /// gain.
    pub gain: Ptr<u8>,
    /// bias.
    pub bias: Ptr<u8>,
    /// y.
    pub y: Ptr<u8>,
    /// Number of rows.
    pub rows: u32,
    /// Width of a row.
    pub width: u32,
    /// eps.
    pub eps: f32,
    /// Not used; zero.
    pub zero: u32,
}

/// Threads of a block of the CUDA twin, and the runs of eight elements that each holds.
pub(crate) const THREADS: u32 = 160;
pub(crate) const HELD: u32 = 4;

/// The widest row that the CUDA twin takes; wider ones it leaves unwritten.
pub const CUDA_WIDTH: u32 = THREADS * HELD * 8;

impl<E: Element> Kernel for LayerNorm<E> {
    type Args = Args;
    const NAME: &'static str = "layer_norm";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::twin::<E>(&source::LAYER_NORM, Self::NAME, THREADS);

    fn check(args: &Args) -> Result<(), String> {
        match args.rows > 0 && args.width > 0 {
            true => Ok(()),
            false => Err(format!("rows {} and width {}: both positive", args.rows, args.width)),
        }
    }

    fn grid(args: &Args) -> Grid {
        Grid::line(args.rows as usize)
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let (rows, width) = (args.rows as usize, args.width as usize);
        let x = memory.read::<E>(args.x.cast(), rows * width)?;
        let gain = memory.read::<E>(args.gain.cast(), width)?;
        let bias = memory.read::<E>(args.bias.cast(), width)?;
        let y = memory.write::<E>(args.y.cast(), rows * width)?;
        let rows = y.par_chunks_exact_mut(width).zip(x.par_chunks_exact(width));
        rows.with_min_len(8).for_each(|(y, x)| norm(x, gain, bias, args.eps, y));
        Ok(())
    }
}

/// One row.
fn norm<E: Element>(x: &[E], gain: &[E], bias: &[E], eps: f32, y: &mut [E]) {
    let mean = total(x) / x.len() as f32;
    let centred: Vec<f32> = x.iter().map(|x| x.widen() - mean).collect();
    let scale = 1.0 / (sum_of_squares(&centred) / x.len() as f32 + eps).sqrt();
    for (((y, x), gain), bias) in y.iter_mut().zip(&centred).zip(gain).zip(bias) {
        *y = E::narrow(x * scale * gain.widen() + bias.widen());
    }
}
