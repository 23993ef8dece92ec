//! Affine layers of the vision tower: a weight matrix applied to every row, a bias, and what comes of the sum. They
//! have one route, for many rows; a CUDA device sums from the first column to the last in one go.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};

use crate::matrix::{Columns, Weights, product};
use crate::numerics::{Element, gelu_erf, gelu_tanh, widened};
use crate::source::{self, AFFINE_ROWS, AFFINE_SHARED, PANEL_TILES};
use crate::weight::{Matrix, Order};

/// An affine layer and a finish.
///
/// ```text
/// s       = (sum over i of w[o, i] * x[r, i]) + bias[o]
/// y[r, o] = r16(s)                    [`Affine`]
///           r16(gelu_tanh(s))         [`AffineTanh`]
///           r16(gelu_erf(s))          [`AffineErf`]
///           r16(y[r, o] + s)          [`AffineAdd`]
/// ```
/// Shapes     x: `[rows, inner]` elements; w: `[outputs, inner]` elements, in the device's order; bias: `[outputs]`
///            elements; y: `[rows, outputs]` elements
/// Effects    writes all of y
/// Source     MODEL: vision tower
pub struct Layer<E, const FINISH: u8>(PhantomData<E>);

/// A [`Layer`] whose sum is the output.
pub type Affine<E> = Layer<E, PLAIN>;
/// A [`Layer`] with the GELU by tanh.
pub type AffineTanh<E> = Layer<E, TANH>;
/// A [`Layer`] with the exact GELU.
pub type AffineErf<E> = Layer<E, ERF>;
/// A [`Layer`] whose sum is added to what the output held.
pub type AffineAdd<E> = Layer<E, ADD>;

const PLAIN: u8 = 0;
const TANH: u8 = 1;
const ERF: u8 = 2;
const ADD: u8 = 3;

/// Arguments of the affine layers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Args {
    /// x.
    pub x: Ptr<u8>,
    /// w, as [`Matrix::parts`] of one matrix says.
    pub w: Ptr<u8>,
    /// bias.
    pub bias: Ptr<u8>,
    /// y.
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

impl<E: Element, const FINISH: u8> Kernel for Layer<E, FINISH> {
    type Args = Args;
    const NAME: &'static str = match FINISH {
        PLAIN => "affine",
        TANH => "affine_tanh",
        ERF => "affine_erf",
        _ => "affine_add",
    };
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::shared_twin::<E>(&source::AFFINE, Self::NAME, 256, AFFINE_SHARED);

    fn check(args: &Args) -> Result<(), String> {
        let [rows, inner, outputs] = [args.rows, args.inner, args.outputs].map(|size| size as usize);
        if [rows, inner, outputs].contains(&0) {
            return Err(format!("rows {rows}, inner {inner} and outputs {outputs} must all be positive"));
        }
        Matrix::plain(outputs, inner).check(Order::Rows)
    }

    fn grid(args: &Args) -> Grid {
        let tiles = Matrix::plain(args.outputs as usize, args.inner as usize).tiles();
        Grid::line(tiles.div_ceil(PANEL_TILES) * (args.rows as usize).div_ceil(AFFINE_ROWS))
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let [rows, inner, outputs] = [args.rows, args.inner, args.outputs].map(|size| size as usize);
        let x = widened(memory.read::<E>(args.x.cast(), rows * inner)?);
        let w = Weights::<E>::read(&Matrix::plain(outputs, inner), 1, args.w, memory)?;
        let bias = memory.read::<E>(args.bias.cast(), outputs)?;
        let y = memory.write::<E>(args.y.cast(), rows * outputs)?;
        let sums = product(Columns::all(&x[..], inner), w);
        for (sums, y) in sums.chunks_exact(outputs).zip(y.chunks_exact_mut(outputs)) {
            for ((sum, bias), y) in sums.iter().zip(bias).zip(y) {
                let sum = sum + bias.widen();
                *y = E::narrow(match FINISH {
                    PLAIN => sum,
                    TANH => gelu_tanh(sum),
                    ERF => gelu_erf(sum),
                    _ => y.widen() + sum,
                });
            }
        }
        Ok(())
    }
}
