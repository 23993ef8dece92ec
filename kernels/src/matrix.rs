//! The matrix product of the host: one order of summation, whatever the number of rows.
//!
//! The simple version is `y[r, o] = dot(x[r, ..], w[o, ..])` with [`dot`](crate::numerics::dot). The real one departs
//! from it in three ways that change no bit: it computes tiles of four rows (or four outputs), so that a
//! loaded value serves several sums; it walks the weights once per block of rows; and it spreads runs of
//! outputs, or blocks of rows, over threads.
//!
//! A quantised row of weights is decoded to f32 once for all rows of x, and then summed like any other: so a product
//! with a quantised matrix has the bits of the product with the f32 matrix that it stands for.

mod weights;

pub use weights::Weights;

use multiversion::multiversion;
use rayon::prelude::*;

use crate::numerics::{Element, LANES, fold};
use weights::Stored;

/// Multiply-adds below which a product stays on the calling thread: about a fifth of a millisecond, many
/// times what it takes to wake another.
const PARALLEL_WORK: usize = 1 << 20;

/// Rows that are computed against one walk over the weights.
const BLOCK_ROWS: usize = 32;

/// Rows of weights that are decoded at a time.
const DECODED_ROWS: usize = 16;

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

    /// Block `index` of [`BLOCK_ROWS`] rows, the last one with fewer.
    fn block(&self, index: usize) -> Self {
        let (first, block) = (index * BLOCK_ROWS * self.inner, BLOCK_ROWS * self.inner);
        Columns { matrix: &self.matrix[first..self.matrix.len().min(first + block)], ..*self }
    }
}

/// `x . w^T` in f32, `[rows, outputs]`: the dot products of each row of `x` with each row of `w`, which use
/// equally many columns.
pub fn product<'a, E: Element>(x: Columns<'_, f32>, w: impl Into<Weights<'a, E>>) -> Vec<f32> {
    let w = w.into();
    debug_assert_eq!(x.to - x.from, w.width());
    let mut y = vec![0.0; x.rows() * w.rows()];
    match w.stored {
        _ if y.is_empty() => {}
        Stored::Plain(elements) => {
            let matrix = &elements[w.first * w.inner..][..w.rows * w.inner];
            plain(x, Columns { matrix, inner: w.inner, from: w.from, to: w.to }, &mut y);
        }
        Stored::Fp8 { .. } | Stored::Nvfp4 { .. } => decoded(x, w, &mut y),
    }
    y
}

fn plain<E: Element>(x: Columns<'_, f32>, w: Columns<'_, E>, y: &mut [f32]) {
    let (rows, outputs) = (x.rows(), w.rows());
    let parallel = rows * outputs * (x.to - x.from) >= PARALLEL_WORK;
    let block = |(index, y): (usize, &mut [f32])| {
        let mut transposed = vec![0.0; y.len()];
        E::tile_run(x.block(index), w, 0, &mut transposed);
        transpose(&transposed, y.len() / outputs, y);
    };
    if rows > BLOCK_ROWS && parallel {
        y.par_chunks_mut(BLOCK_ROWS * outputs).enumerate().for_each(block);
    } else if rows > BLOCK_ROWS || !parallel {
        y.chunks_mut(BLOCK_ROWS * outputs).enumerate().for_each(block);
    } else {
        // One block of rows: runs of outputs instead, a few per thread.
        let outputs_per_run = outputs.div_ceil(2 * rayon::current_num_threads()).next_multiple_of(4);
        let mut transposed = vec![0.0; y.len()];
        let runs = transposed.par_chunks_mut(outputs_per_run * rows).enumerate();
        runs.for_each(|(index, run)| E::tile_run(x, w, index * outputs_per_run, run));
        transpose(&transposed, rows, y);
    }
}

/// As [`plain`]: runs of outputs, which all rows use once they are decoded.
fn decoded<E: Element>(x: Columns<'_, f32>, w: Weights<'_, E>, y: &mut [f32]) {
    let (rows, outputs, width) = (x.rows(), w.rows(), w.width());
    let run = |(weights, sums): &mut (Vec<f32>, Vec<f32>), (index, y): (usize, &mut [f32])| {
        let (first, count) = (index * DECODED_ROWS, y.len() / rows);
        w.decode(first..first + count, weights);
        let weights = Columns::all(&weights[..], width);
        for (block, from) in (0..rows).step_by(BLOCK_ROWS).enumerate() {
            let x = x.block(block);
            sums.resize(count * x.rows(), 0.0);
            f32::tile_run(x, weights, 0, sums);
            for (y, sums) in y.chunks_exact_mut(rows).zip(sums.chunks_exact(x.rows())) {
                y[from..from + sums.len()].copy_from_slice(sums);
            }
        }
    };
    let mut transposed = vec![0.0; y.len()];
    if rows * outputs * width >= PARALLEL_WORK {
        let runs = transposed.par_chunks_mut(DECODED_ROWS * rows).enumerate();
        runs.for_each_init(Default::default, run);
    } else {
        let mut scratch = Default::default();
        let runs = transposed.chunks_mut(DECODED_ROWS * rows).enumerate();
        runs.for_each(|job| run(&mut scratch, job));
    }
    transpose(&transposed, rows, y);
}

/// `from` is `[outputs, rows]`, `to` becomes `[rows, outputs]`.
fn transpose(from: &[f32], rows: usize, to: &mut [f32]) {
    let outputs = from.len() / rows;
    for (r, to) in to.chunks_exact_mut(outputs).enumerate() {
        for (o, to) in to.iter_mut().enumerate() {
            *to = from[o * rows + r];
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

#[multiversion(targets("x86_64+avx+avx2"))]
fn run_f32(x: Columns<'_, f32>, w: Columns<'_, f32>, first: usize, y: &mut [f32]) {
    run(x, w, first, y);
}

#[multiversion(targets("x86_64+avx+avx2"))]
fn run_bf16(x: Columns<'_, f32>, w: Columns<'_, half::bf16>, first: usize, y: &mut [f32]) {
    run(x, w, first, y);
}

#[inline(always)]
fn run<E: Element>(x: Columns<'_, f32>, w: Columns<'_, E>, first: usize, y: &mut [f32]) {
    let rows = x.rows();
    let fours = rows / 4 * 4;
    // In memory, so that the loops keep whole runs of partial sums in vector registers: a sum that is later
    // indexed by a variable would be kept as single floats throughout.
    let mut sums = [[0.0; LANES]; 4];
    for (o, y) in y.chunks_exact_mut(rows).enumerate() {
        let w = w.row(first + o);
        for r in (0..fours).step_by(4) {
            partial_sums::<E, 4>(std::array::from_fn(|i| x.row(r + i)), w, &mut sums);
            y[r..r + 4].copy_from_slice(&sums.map(fold));
        }
        for (r, y) in y.iter_mut().enumerate().skip(fours) {
            partial_sums::<E, 1>([x.row(r)], w, &mut sums);
            *y = fold(sums[0]);
        }
    }
}

/// The partial sums of the dot products of a few rows with one row of weights.
#[inline(always)]
fn partial_sums<E: Element, const R: usize>(x: [&[f32]; R], w: &[E], into: &mut [[f32; LANES]; 4]) {
    let inner = w.len();
    let whole = inner / LANES * LANES;
    let mut sums = [[0.0f32; LANES]; R];
    let mut k = 0;
    while k < whole {
        let run: &[E; LANES] = w[k..k + LANES].try_into().expect("a whole run");
        let mut wide = [0.0f32; LANES];
        for l in 0..LANES {
            wide[l] = run[l].widen();
        }
        for i in 0..R {
            let run: &[f32; LANES] = x[i][k..k + LANES].try_into().expect("a whole run");
            for l in 0..LANES {
                sums[i][l] += run[l] * wide[l];
            }
        }
        k += LANES;
    }
    for i in 0..R {
        into[i].copy_from_slice(&sums[i]);
        for l in 0..inner - whole {
            into[i][l] += x[i][whole + l] * w[whole + l].widen();
        }
    }
}
