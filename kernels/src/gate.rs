//! The output gate of the recurrent layers: a norm per head, then a gate.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};
use rayon::prelude::*;

use crate::numerics::{Element, sigmoid, silu};
use crate::residual::inverse_rms;
use crate::source;

/// [`Args::gate`]: the gate is `sigmoid(z)`.
pub const SIGMOID: u32 = 0;
/// [`Args::gate`]: the gate is `silu(z)`.
pub const SILU: u32 = 1;

/// Norms every head of the recurrent output and multiplies it by its gate.
///
/// ```text
/// y[t, h, j] = r16((gain[j] * (o[t, h, j] * rsqrt(mean over j of o[t, h, j]^2 + eps))) * act(z[t, h, j]))
/// ```
/// with act = sigmoid or silu; the gain is plain, not zero-centred.
///
/// Shapes     o, y: `[rows, heads, width]` elements; gain: `[width]` elements; z: columns
///            `z_at..z_at + heads * width` of x, `[rows, stride]` elements
/// Effects    writes all of y
/// Source     MODEL: gated delta net, output; config `output_gate_type`
pub struct GatedNorm<E>(PhantomData<E>);

/// Arguments of [`GatedNorm`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Args {
    /// o.
    pub o: Ptr<u8>,
    /// x, the stacked projection.
    pub x: Ptr<u8>,
    /// The gain.
    pub gain: Ptr<u8>,
    /// y.
    pub y: Ptr<u8>,
    /// Number of rows.
    pub rows: u32,
    /// Heads.
    pub heads: u32,
    /// Width of a head.
    pub width: u32,
    /// Elements from one row of x to the next.
    pub stride: u32,
    /// First column of z in x.
    pub z_at: u32,
    /// [`SIGMOID`] or [`SILU`].
    pub gate: u32,
    /// eps.
    pub eps: f32,
    /// Not used; zero.
    pub zero: u32,
}

/// Heads of a block of the CUDA twin.
pub(crate) const HEADS: u32 = 4;

impl<E: Element> Kernel for GatedNorm<E> {
    type Args = Args;
    const NAME: &'static str = "gated_norm";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::twin::<E>(&source::GATE, Self::NAME, HEADS * 32);

    fn check(args: &Args) -> Result<(), String> {
        if args.rows == 0 || args.heads == 0 || args.width == 0 {
            return Err(format!(
                "rows {}, heads {} and width {} must all be positive",
                args.rows, args.heads, args.width
            ));
        }
        let end = args.z_at as usize + args.heads as usize * args.width as usize;
        if end > args.stride as usize {
            return Err(format!("z ends at column {end} of a row of {}", args.stride));
        }
        if args.gate > SILU {
            return Err(format!("gate {} is neither {SIGMOID} (sigmoid) nor {SILU} (silu)", args.gate));
        }
        Ok(())
    }

    fn grid(args: &Args) -> Grid {
        Grid::plane(args.rows as usize, args.heads.div_ceil(HEADS) as usize)
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let (rows, width, stride) = (args.rows as usize, args.width as usize, args.stride as usize);
        let columns = args.heads as usize * width;
        let o = memory.read::<E>(args.o.cast(), rows * columns)?;
        let x = memory.read::<E>(args.x.cast(), rows * stride)?;
        let gain = memory.read::<E>(args.gain.cast(), width)?;
        let y = memory.write::<E>(args.y.cast(), rows * columns)?;
        let z = x.par_chunks_exact(stride).map(|row| &row[args.z_at as usize..][..columns]);
        let rows = y.par_chunks_exact_mut(columns).zip(o.par_chunks_exact(columns)).zip(z);
        let gate_rows = |act: fn(&[E], &[E], &[E], f32, &mut [E])| {
            rows.with_min_len(8).for_each(|((y, o), z)| {
                let heads = y.chunks_exact_mut(width).zip(o.chunks_exact(width)).zip(z.chunks_exact(width));
                heads.for_each(|((y, o), z)| act(o, z, gain, args.eps, y));
            });
        };
        match args.gate {
            SIGMOID => gate_rows(|o, z, gain, eps, y| head(o, z, gain, eps, y, sigmoid)),
            _ => gate_rows(|o, z, gain, eps, y| head(o, z, gain, eps, y, silu)),
        }
        Ok(())
    }
}

/// One head of one row.
#[inline(always)]
fn head<E: Element>(o: &[E], z: &[E], gain: &[E], eps: f32, y: &mut [E], act: impl Fn(f32) -> f32) {
    let scale = inverse_rms(o, eps);
    for (((y, o), z), gain) in y.iter_mut().zip(o).zip(z).zip(gain) {
        *y = E::narrow(gain.widen() * (o.widen() * scale) * act(z.widen()));
    }
}
