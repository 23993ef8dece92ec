//! Linear layers: a weight matrix applied to every row.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};

use crate::matrix::{Columns, product};
use crate::numerics::{CUTS, Element, narrow, widened};
use crate::source::{self, product_tiles};

/// A linear layer.
///
/// ```text
/// y[r, o] = r16(sum over i of w[o, i] * x[r, i])
/// ```
/// Shapes     x: `[rows, inner]`, w: `[outputs, inner]`, y: `[rows, outputs]`, all elements
/// Effects    writes all of y
pub struct Linear<E>(PhantomData<E>);

/// As [`Linear`], with y in f32 and not rounded: for logits that decide something.
pub struct LinearWide<E>(PhantomData<E>);

/// A linear layer whose sum is cut in two: two partial sums over the halves of the inner width.
///
/// ```text
/// p[c, r, o] = sum over i in half c of w[o, i] * x[r, i]
/// ```
/// Shapes     x: `[rows, inner]`, w: `[outputs, inner]` elements; p: `[2, rows, outputs]` f32
/// Domain     inner is even
/// Effects    writes all of p
pub struct LinearCut<E>(PhantomData<E>);

/// Arguments of the linear layers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Args {
    /// The rows, elements.
    pub x: Ptr<u8>,
    /// The weights, elements.
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

    fn check(&self) -> Result<(), String> {
        let (rows, inner, outputs) = self.sizes();
        match rows > 0 && inner > 0 && outputs > 0 {
            true => Ok(()),
            false => Err(format!("rows {rows}, inner {inner} and outputs {outputs} must all be positive")),
        }
    }
}

impl<E: Element> Kernel for Linear<E> {
    type Args = Args;
    const NAME: &'static str = "linear";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::matrix_twin::<E>(&source::LINEAR, Self::NAME, 256);

    fn check(args: &Args) -> Result<(), String> {
        args.check()
    }

    fn grid(args: &Args) -> Grid {
        Grid::line(product_tiles(args.rows, args.outputs))
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let (rows, inner, outputs) = args.sizes();
        let x = widened(memory.read::<E>(args.x.cast(), rows * inner)?);
        let w = memory.read::<E>(args.w.cast(), outputs * inner)?;
        let y = memory.write::<E>(args.y.cast(), rows * outputs)?;
        let sums = product(Columns::all(&x, inner), Columns::all(w, inner));
        narrow(&sums, y);
        Ok(())
    }
}

impl<E: Element> Kernel for LinearWide<E> {
    type Args = Args;
    const NAME: &'static str = "linear_wide";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::matrix_twin::<E>(&source::LINEAR, Self::NAME, 256);

    fn check(args: &Args) -> Result<(), String> {
        args.check()
    }

    fn grid(args: &Args) -> Grid {
        Grid::line(product_tiles(args.rows, args.outputs))
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let (rows, inner, outputs) = args.sizes();
        let x = widened(memory.read::<E>(args.x.cast(), rows * inner)?);
        let w = memory.read::<E>(args.w.cast(), outputs * inner)?;
        let y = memory.write::<f32>(args.y.cast(), rows * outputs)?;
        let sums = product(Columns::all(&x, inner), Columns::all(w, inner));
        y.copy_from_slice(&sums);
        Ok(())
    }
}

impl<E: Element> Kernel for LinearCut<E> {
    type Args = Args;
    const NAME: &'static str = "linear_cut";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::matrix_twin::<E>(&source::LINEAR, Self::NAME, 256);

    fn check(args: &Args) -> Result<(), String> {
        args.check()?;
        match args.inner as usize % CUTS {
            0 => Ok(()),
            _ => Err(format!("inner {} is not a multiple of the {CUTS} cuts", args.inner)),
        }
    }

    fn grid(args: &Args) -> Grid {
        Grid::plane(product_tiles(args.rows, args.outputs), CUTS)
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
