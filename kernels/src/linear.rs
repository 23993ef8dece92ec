//! Linear layers: a weight matrix applied to every row. Each has two routes, which differ in how a CUDA device
//! walks the matrix and in no bit of the result: one for decode rounds, which have few rows, and one for prompts.
//!
//! The matrix is stored in any [`Format`]; w in a formula is the number that its code and scales stand for. The host
//! makes that number in f32 and sums with it. A CUDA device sums products with what is exact in bf16: with codes of
//! fp8 in units of 64 columns, each sum times its scale; with code times scale of nvfp4, the row's sum times its global.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};

use crate::matrix::{Columns, Weights, product};
use crate::numerics::{CUTS, Element, narrow, widened};
use crate::source::{self, PANEL_ROWS, PANEL_SHARED, PANEL_TILES, PART_ROWS, PART_TILES, part_shared};
use crate::weight::{Format, Matrix, NARROW_ROWS, Order, Plain, WeightFormat, named};

/// A linear layer.
///
/// ```text
/// y[r, o] = r16(sum over i of w[o, i] * x[r, i])
/// ```
/// Shapes     x: `[rows, inner]` elements, w: `[outputs, inner]` in format F, in the device's order, y:
///            `[rows, outputs]` elements, rows `stride` apart
/// Domain     nvfp4: inner is a multiple of 16
/// Effects    writes all of y, nothing between its rows
pub struct Linear<E, F = Plain, const PROMPT: bool = false>(PhantomData<(E, F)>);

/// As [`Linear`], with y in f32 and not rounded: for logits that decide something.
pub struct LinearWide<E, const PROMPT: bool = false>(PhantomData<E>);

/// A linear layer whose sum is cut in two: partial sums over the halves of the inner width, or over the one half that a
/// rank has.
///
/// ```text
/// p[c, r, o] = sum over i in cut c of w[o, i] * x[r, i]
/// ```
/// Shapes     x: `[rows, inner]` elements, w: `[outputs, inner]` in format F, cut, in the device's order; p:
///            `[cuts, rows, outputs]` f32, rows `stride` apart
/// Domain     inner is a multiple of the cuts; nvfp4: and of 16
/// Effects    writes all of p, nothing between its rows
pub struct LinearCut<E, F = Plain, const PROMPT: bool = false>(PhantomData<(E, F)>);

/// The prompt route of [`Linear`].
pub type LinearPrompt<E, F = Plain> = Linear<E, F, true>;
/// The prompt route of [`LinearWide`].
pub type LinearWidePrompt<E> = LinearWide<E, true>;
/// The prompt route of [`LinearCut`].
pub type LinearCutPrompt<E, F = Plain> = LinearCut<E, F, true>;

/// Arguments of the linear layers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Args {
    /// The rows, elements.
    pub x: Ptr<u8>,
    /// The weights, as [`Matrix::parts`] of one matrix says.
    pub w: Ptr<u8>,
    /// The outputs: elements for [`Linear`], f32 for the others.
    pub y: Ptr<u8>,
    /// Number of rows.
    pub rows: u32,
    /// Inner width.
    pub inner: u32,
    /// Outputs per row.
    pub outputs: u32,
    /// From one row of y to the next, in numbers: at least the outputs, more where y is a part of wider rows.
    pub stride: u32,
    /// Cuts of the inner width: 1, but for a cut layer on a rank that has both.
    pub cuts: u32,
    /// Columns of a longer row that the first block of fp8 has before the first.
    pub offset: u32,
}

impl Args {
    fn sizes(&self) -> (usize, usize, usize) {
        (self.rows as usize, self.inner as usize, self.outputs as usize)
    }

    fn matrix(&self, format: Format) -> Matrix {
        let (_, inner, outputs) = self.sizes();
        let (cuts, offset) = (self.cuts as usize, self.offset as usize);
        Matrix { cuts, offset, ..Matrix::plain(outputs, inner).stored(format) }
    }

    fn grid(&self, format: Format, prompt: bool, together: usize) -> Grid {
        let (rows, cuts) = (self.rows as usize, self.cuts as usize);
        let tiles = self.matrix(format).tiles();
        match (prompt, format) {
            (true, Format::Plain) => {
                Grid::plane(tiles.div_ceil(PANEL_TILES) * rows.div_ceil(PANEL_ROWS), cuts)
            }
            (true, _) => Grid::plane(tiles.div_ceil(PART_TILES) * rows.div_ceil(PART_ROWS), cuts),
            (false, _) => Grid::space(blocks(tiles), cuts, rows.div_ceil(together)),
        }
    }

    /// The sums of each cut in turn, `[rows, outputs]`, not rounded.
    fn sums<E: Element>(&self, format: Format, memory: &Access<'_>) -> Result<Vec<Vec<f32>>, Fault> {
        let ((rows, inner, _), cuts) = (self.sizes(), self.cuts as usize);
        let x = widened(memory.read::<E>(self.x.cast(), rows * inner)?);
        let w = Weights::<E>::read(&self.matrix(format), 1, self.w, memory)?;
        let part = inner / cuts;
        let sums = (0..cuts).map(|cut| {
            let (from, to) = (cut * part, (cut + 1) * part);
            product(Columns { matrix: &x[..], inner, from, to }, w.columns(from, to))
        });
        Ok(sums.collect())
    }

    /// Writes sums as `to` of `T` makes numbers of them, to their places in y.
    fn store<T: Pod>(
        &self,
        sums: &[Vec<f32>],
        memory: &Access<'_>,
        to: impl Fn(&[f32], &mut [T]),
    ) -> Result<(), Fault> {
        let (rows, _, outputs) = self.sizes();
        let stride = self.stride as usize;
        for (cut, sums) in sums.iter().enumerate() {
            for (row, sums) in sums.chunks_exact(outputs).enumerate() {
                to(sums, memory.write(self.y.cast::<T>().at((cut * rows + row) * stride), outputs)?);
            }
        }
        Ok(())
    }

    fn check(&self, format: Format, most_cuts: usize) -> Result<(), String> {
        let (rows, inner, outputs) = self.sizes();
        if [rows, inner, outputs].contains(&0) {
            return Err(format!("rows {rows}, inner {inner} and outputs {outputs} must all be positive"));
        }
        if self.stride < self.outputs {
            return Err(format!("stride {} is less than outputs {outputs}", self.stride));
        }
        let cuts = self.cuts as usize;
        if !(1..=most_cuts).contains(&cuts) || inner % cuts != 0 {
            return Err(format!(
                "inner {inner} in {cuts} cuts: a multiple of them, which are 1 to {most_cuts}"
            ));
        }
        self.matrix(format).check(Order::Rows)
    }
}

const fn twin<E: Element>(symbol: &'static str, format: Format, prompt: bool) -> Option<Twin> {
    let (source, part) = match format {
        Format::Plain => (&source::LINEAR, PANEL_SHARED),
        Format::Fp8 => (&source::LINEAR_FP8, part_shared(format)),
        Format::Nvfp4 => (&source::LINEAR_NVFP4, part_shared(format)),
    };
    source::shared_twin::<E>(source, symbol, 256, if prompt { part } else { NARROW_SHARED })
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

impl<E: Element, F: WeightFormat, const PROMPT: bool> Kernel for Linear<E, F, PROMPT> {
    type Args = Args;
    const NAME: &'static str = match PROMPT {
        true => named!("linear", F::FORMAT, "_prompt"),
        false => named!("linear", F::FORMAT),
    };
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = twin::<E>(Self::NAME, F::FORMAT, PROMPT);

    fn check(args: &Args) -> Result<(), String> {
        args.check(F::FORMAT, 1)
    }

    fn grid(args: &Args) -> Grid {
        args.grid(F::FORMAT, PROMPT, NARROW_ROWS)
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        args.store::<E>(&args.sums::<E>(F::FORMAT, memory)?, memory, narrow)
    }
}

impl<E: Element, const PROMPT: bool> Kernel for LinearWide<E, PROMPT> {
    type Args = Args;
    const NAME: &'static str = if PROMPT { "linear_wide_prompt" } else { "linear_wide" };
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = twin::<E>(Self::NAME, Format::Plain, PROMPT);

    fn check(args: &Args) -> Result<(), String> {
        args.check(Format::Plain, 1)
    }

    fn grid(args: &Args) -> Grid {
        args.grid(Format::Plain, PROMPT, NARROW_ROWS)
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let sums = args.sums::<E>(Format::Plain, memory)?;
        args.store::<f32>(&sums, memory, |sums, y| y.copy_from_slice(sums))
    }
}

impl<E: Element, F: WeightFormat, const PROMPT: bool> Kernel for LinearCut<E, F, PROMPT> {
    type Args = Args;
    const NAME: &'static str = match PROMPT {
        true => named!("linear_cut", F::FORMAT, "_prompt"),
        false => named!("linear_cut", F::FORMAT),
    };
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = twin::<E>(Self::NAME, F::FORMAT, PROMPT);

    fn check(args: &Args) -> Result<(), String> {
        args.check(F::FORMAT, CUTS)
    }

    fn grid(args: &Args) -> Grid {
        args.grid(F::FORMAT, PROMPT, CUT_ROWS)
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let sums = args.sums::<E>(F::FORMAT, memory)?;
        args.store::<f32>(&sums, memory, |sums, p| p.copy_from_slice(sums))
    }
}
