//! Linear layers: a weight matrix applied to every row. Each has two routes, which differ in how a CUDA device
//! walks the matrix and in no bit of the result: one for decode rounds, which have few rows, and one for prompts.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};

use crate::matrix::{Columns, product};
use crate::numerics::{CUTS, Element, narrow, widened};
use crate::source::{self, PANEL_ROWS, PANEL_SHARED, PANEL_TILES};
use crate::weight::{Matrix, NARROW_ROWS};

/// A linear layer.
///
/// ```text
/// y[r, o] = r16(sum over i of w[o, i] * x[r, i])
/// ```
/// Shapes     x: `[rows, inner]`, w: `[outputs, inner]` in the device's order, y: `[rows, outputs]`, all elements
/// Effects    writes all of y
pub struct Linear<E, const PROMPT: bool = false>(PhantomData<E>);

/// As [`Linear`], with y in f32 and not rounded: for logits that decide something.
pub struct LinearWide<E, const PROMPT: bool = false>(PhantomData<E>);

/// A linear layer whose sum is cut in two: two partial sums over the halves of the inner width.
///
/// ```text
/// p[c, r, o] = sum over i in half c of w[o, i] * x[r, i]
/// ```
/// Shapes     x: `[rows, inner]`, w: `[outputs, inner]` elements, cut, in the device's order; p: `[2, rows, outputs]`
///            f32
/// Domain     inner is even
/// Effects    writes all of p
pub struct LinearCut<E, const PROMPT: bool = false>(PhantomData<E>);

/// The prompt route of [`Linear`].
pub type LinearPrompt<E> = Linear<E, true>;
/// The prompt route of [`LinearWide`].
pub type LinearWidePrompt<E> = LinearWide<E, true>;
/// The prompt route of [`LinearCut`].
pub type LinearCutPrompt<E> = LinearCut<E, true>;

/// Arguments of the linear layers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Args {
    /// The rows, elements.
    pub x: Ptr<u8>,
    /// The weights, elements in the device's order.
    pub w: Ptr<u8>,
    /// The outputs: elements for [`Linear`], f32 for the others.
    pub y: Ptr<u8>,
    /// Number of rows.
    pub rows: u32,
    /// Inner width.
    pub inner: u32,
    /// Outputs per row.
    pub outputs: u32,
    /// Not used; zero.
    pub zero: u32,
}

impl Args {
    fn sizes(&self) -> (usize, usize, usize) {
        (self.rows as usize, self.inner as usize, self.outputs as usize)
    }

    fn grid(&self, prompt: bool, cuts: usize) -> Grid {
        let (rows, inner, outputs) = self.sizes();
        let tiles = Matrix::plain(outputs, inner).tiles();
        match prompt {
            true => Grid::plane(tiles.div_ceil(PANEL_TILES) * rows.div_ceil(PANEL_ROWS), cuts),
            false => Grid::space(
                blocks(tiles),
                cuts,
                rows.div_ceil(if cuts == 1 { NARROW_ROWS } else { CUT_ROWS }),
            ),
        }
    }

    /// `[rows, outputs]`, not rounded.
    fn sums<E: Element>(&self, memory: &Access<'_>) -> Result<Vec<f32>, Fault> {
        let (rows, inner, outputs) = self.sizes();
        let x = widened(memory.read::<E>(self.x.cast(), rows * inner)?);
        let w = memory.read::<E>(self.w.cast(), outputs * inner)?;
        Ok(product(Columns::all(&x, inner), Columns::all(w, inner)))
    }

    fn check(&self) -> Result<(), String> {
        let (rows, inner, outputs) = self.sizes();
        match rows > 0 && inner > 0 && outputs > 0 {
            true => Ok(()),
            false => Err(format!("rows {rows}, inner {inner} and outputs {outputs} must all be positive")),
        }
    }
}

const fn twin<E: Element>(symbol: &'static str, prompt: bool) -> Option<Twin> {
    source::shared_twin::<E>(&source::LINEAR, symbol, 256, if prompt { PANEL_SHARED } else { NARROW_SHARED })
}

/// Two buffers of the partial sums of 8 warps over 32 rows.
const NARROW_SHARED: u32 = 2 * 8 * 32 * 16 * 4;

/// Rows that a block takes of a linear layer that is cut.
pub(crate) const CUT_ROWS: usize = 16;

/// Blocks that fill the largest devices: two for each of 132 multiprocessors.
const BLOCKS: usize = 264;

/// Blocks that share so many tiles: one each, or, where a block gets several anyhow, as many as run at a time, each
/// of which reads its next tile while it sums up the last.
fn blocks(tiles: usize) -> usize {
    if tiles < 2 * BLOCKS { tiles } else { BLOCKS }
}

impl<E: Element, const PROMPT: bool> Kernel for Linear<E, PROMPT> {
    type Args = Args;
    const NAME: &'static str = if PROMPT { "linear_prompt" } else { "linear" };
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = twin::<E>(Self::NAME, PROMPT);

    fn check(args: &Args) -> Result<(), String> {
        args.check()
    }

    fn grid(args: &Args) -> Grid {
        args.grid(PROMPT, 1)
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let sums = args.sums::<E>(memory)?;
        narrow(&sums, memory.write::<E>(args.y.cast(), sums.len())?);
        Ok(())
    }
}

impl<E: Element, const PROMPT: bool> Kernel for LinearWide<E, PROMPT> {
    type Args = Args;
    const NAME: &'static str = if PROMPT { "linear_wide_prompt" } else { "linear_wide" };
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = twin::<E>(Self::NAME, PROMPT);

    fn check(args: &Args) -> Result<(), String> {
        args.check()
    }

    fn grid(args: &Args) -> Grid {
        args.grid(PROMPT, 1)
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let sums = args.sums::<E>(memory)?;
        memory.write::<f32>(args.y.cast(), sums.len())?.copy_from_slice(&sums);
        Ok(())
    }
}

impl<E: Element, const PROMPT: bool> Kernel for LinearCut<E, PROMPT> {
    type Args = Args;
    const NAME: &'static str = if PROMPT { "linear_cut_prompt" } else { "linear_cut" };
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = twin::<E>(Self::NAME, PROMPT);

    fn check(args: &Args) -> Result<(), String> {
        args.check()?;
        match args.inner as usize % CUTS {
            0 => Ok(()),
            _ => Err(format!("inner {} is not a multiple of the {CUTS} cuts", args.inner)),
        }
    }

    fn grid(args: &Args) -> Grid {
        args.grid(PROMPT, CUTS)
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let (rows, inner, outputs) = args.sizes();
        let x = widened(memory.read::<E>(args.x.cast(), rows * inner)?);
        let w = memory.read::<E>(args.w.cast(), outputs * inner)?;
        let p = memory.write::<f32>(args.y.cast(), CUTS * rows * outputs)?;
        let half = inner / CUTS;
        for (cut, p) in p.chunks_exact_mut(rows * outputs).enumerate() {
            let (from, to) = (cut * half, (cut + 1) * half);
            let x = Columns { matrix: &x[..], inner, from, to };
            p.copy_from_slice(&product(x, Columns { matrix: w, inner, from, to }));
        }
        Ok(())
    }
}
