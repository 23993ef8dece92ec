//! The matrix product of the host: one order of summation, whatever the number of rows.
//!
//! The simple version is `y[r, o] = dot(x[r, ..], w[o, ..])` with [`dot`](crate::numerics::dot). The real one departs from it in two ways
//! that change no bit: it computes tiles of a few rows by a few outputs, so that a loaded weight serves
//! several rows; and it spreads runs of outputs over threads.

use multiversion::multiversion;
use rayon::prelude::*;

use crate::numerics::{Element, LANES, fold};

/// Multiply-adds below which a product stays on the calling thread.
const PARALLEL_WORK: usize = 1 << 18;

/// A row-major matrix of `[outputs, inner]`, of which a product uses columns `from..to`.
#[derive(Clone, Copy)]
pub struct Columns<'a, E> {
    /// All elements.
    pub matrix: &'a [E],
    /// Elements of a row.
    pub inner: usize,
    /// First column used.
    pub from: usize,
    /// End of the columns used.
    pub to: usize,
}

impl<'a, E> Columns<'a, E> {
    /// All columns of a matrix.
    pub fn all(matrix: &'a [E], inner: usize) -> Self {
        Columns { matrix, inner, from: 0, to: inner }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.matrix.len() / self.inner
    }

    /// The used columns of row `row`.
    #[inline(always)]
    pub fn row(&self, row: usize) -> &'a [E] {
        &self.matrix[row * self.inner..][self.from..self.to]
    }
}

/// `x . w^T` in f32, transposed: element `[o * rows + r]` is the dot product of row `r` of `x` and row `o`
/// of `w`. `x` and `w` use equally many columns.
pub fn product<E: Element>(x: Columns<'_, f32>, w: Columns<'_, E>) -> Vec<f32> {
    let (rows, outputs) = (x.rows(), w.rows());
    let mut y = vec![0.0; rows * outputs];
    if rows == 0 {
        return y;
    }
    let inner = x.to - x.from;
    let run = |first: usize, y: &mut [f32]| E::tile_run(x, w, first, y);
    if rows * outputs * inner < PARALLEL_WORK {
        run(0, &mut y);
    } else {
        // Runs of outputs: a multiple of the tile, and a few per thread.
        let pieces = 4 * rayon::current_num_threads();
        let outputs_per_run = outputs.div_ceil(pieces).next_multiple_of(8);
        y.par_chunks_mut(outputs_per_run * rows).enumerate().for_each(|(i, y)| run(i * outputs_per_run, y));
    }
    y
}

/// The product with `x` given in elements and row-major output: `out(r, o, value)` is called for every
/// output in order of rows.
pub fn transpose_into(y: &[f32], rows: usize, mut store: impl FnMut(usize, usize, f32)) {
    let outputs = y.len() / rows.max(1);
    for r in 0..rows {
        for o in 0..outputs {
            store(r, o, y[o * rows + r]);
        }
    }
}

/// Multiversioned tiles, by element: `multiversion` cannot clone generic functions, so there is one door
/// per element type.
pub trait Tiled: Sized {
    /// Outputs `first..` of a product into `y`, a run of transposed rows.
    fn tile_run(x: Columns<'_, f32>, w: Columns<'_, Self>, first: usize, y: &mut [f32]);
}

impl Tiled for f32 {
    fn tile_run(x: Columns<'_, f32>, w: Columns<'_, f32>, first: usize, y: &mut [f32]) {
        run_f32(x, w, first, y);
    }
}

impl Tiled for half::bf16 {
    fn tile_run(x: Columns<'_, f32>, w: Columns<'_, half::bf16>, first: usize, y: &mut [f32]) {
        run_bf16(x, w, first, y);
    }
}

#[multiversion(targets("x86_64+avx+avx2", "x86_64+avx+avx2+avx512f"))]
fn run_f32(x: Columns<'_, f32>, w: Columns<'_, f32>, first: usize, y: &mut [f32]) {
    run(x, w, first, y);
}

#[multiversion(targets("x86_64+avx+avx2", "x86_64+avx+avx2+avx512f"))]
fn run_bf16(x: Columns<'_, f32>, w: Columns<'_, half::bf16>, first: usize, y: &mut [f32]) {
    run(x, w, first, y);
}

#[inline(always)]
fn run<E: Element>(x: Columns<'_, f32>, w: Columns<'_, E>, first: usize, y: &mut [f32]) {
    let rows = x.rows();
    let outputs = y.len() / rows;
    let mut r = 0;
    while r < rows {
        let step = if rows - r >= 4 { 4 } else { 1 };
        let mut o = 0;
        while o < outputs {
            match (step, outputs - o) {
                (4, 2..) => tile::<E, 4, 2>(x, w, r, first, o, y),
                (4, _) => tile::<E, 4, 1>(x, w, r, first, o, y),
                (_, 4..) => tile::<E, 1, 4>(x, w, r, first, o, y),
                _ => tile::<E, 1, 1>(x, w, r, first, o, y),
            }
            o += match (step, outputs - o) {
                (4, 2..) => 2,
                (1, 4..) => 4,
                _ => 1,
            };
        }
        r += step;
    }
}

/// Rows `r..r + R` by outputs `o..o + O` of a run that begins at output `first`.
#[inline(always)]
fn tile<E: Element, const R: usize, const O: usize>(
    x: Columns<'_, f32>,
    w: Columns<'_, E>,
    r: usize,
    first: usize,
    o: usize,
    y: &mut [f32],
) {
    let rows = x.rows();
    let xs: [&[f32]; R] = std::array::from_fn(|i| x.row(r + i));
    let ws: [&[E]; O] = std::array::from_fn(|j| w.row(first + o + j));
    let inner = xs[0].len();
    let mut sums = [[[0.0f32; LANES]; O]; R];
    let whole = inner / LANES * LANES;
    let mut k = 0;
    while k < whole {
        let mut wide = [[0.0f32; LANES]; O];
        for j in 0..O {
            let run: &[E; LANES] = ws[j][k..k + LANES].try_into().expect("a whole run");
            for l in 0..LANES {
                wide[j][l] = run[l].widen();
            }
        }
        for i in 0..R {
            let run: &[f32; LANES] = xs[i][k..k + LANES].try_into().expect("a whole run");
            for j in 0..O {
                for l in 0..LANES {
                    sums[i][j][l] += run[l] * wide[j][l];
                }
            }
        }
        k += LANES;
    }
    for i in 0..R {
        for j in 0..O {
            for l in 0..inner - whole {
                sums[i][j][l] += xs[i][whole + l] * ws[j][whole + l].widen();
            }
            y[(o + j) * rows + r + i] = fold(sums[i][j]);
        }
    }
}
