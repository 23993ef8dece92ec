//! The arithmetic of the gated delta rule for one head, all f32: a step, and a chunk of steps.
//!
//! The simple version of a chunk is the formulas of [`DeltaChunk`](super::DeltaChunk), each sum a loop. The
//! real one departs from it in one way that changes no bit: sums are computed in tiles of [`ROWS`] rows by
//! [`COLUMNS`] columns that stay in registers, every element still adding its terms in ascending order.

use multiversion::multiversion;

use crate::numerics::{dot, exp};

/// Rows of a tile.
const ROWS: usize = 4;

/// Columns of a tile.
const COLUMNS: usize = 16;

/// One step: `output` holds v and becomes the output; `decay` is exp(g).
#[multiversion(targets("x86_64+avx+avx2"))]
pub(super) fn step(q: &[f32], k: &[f32], beta: f32, decay: f32, state: &mut [f32], output: &mut [f32]) {
    let width = output.len();
    let mut seen = vec![0.0; width];
    for (state, k) in state.chunks_exact(width).zip(k) {
        for (seen, state) in seen.iter_mut().zip(state) {
            *seen += state * decay * k;
        }
    }
    let mut fresh = seen;
    for (fresh, v) in fresh.iter_mut().zip(&*output) {
        *fresh = (v - *fresh) * beta;
    }
    output.fill(0.0);
    for ((state, k), q) in state.chunks_exact_mut(width).zip(k).zip(q) {
        for ((state, fresh), output) in state.iter_mut().zip(&fresh).zip(&mut *output) {
            *state = *state * decay + k * fresh;
            *output += *state * q;
        }
    }
}

/// The queries and keys of one key head in a chunk, and their products: what its value heads share.
pub(super) struct Pairs {
    /// qn, `[rows, width]`.
    q: Vec<f32>,
    /// kn, `[rows, width]`.
    k: Vec<f32>,
    /// `qn_i . kn_j`, `[rows, rows]`; only `j <= i` is set.
    qk: Vec<f32>,
    /// `kn_i . kn_j`, `[rows, rows]`; only `j < i` is set.
    kk: Vec<f32>,
    width: usize,
}

impl Pairs {
    /// From qn and kn, `[rows, width]`.
    pub(super) fn new(q: Vec<f32>, k: Vec<f32>, width: usize) -> Pairs {
        let rows = k.len() / width;
        let (mut qk, mut kk) = (vec![0.0; rows * rows], vec![0.0; rows * rows]);
        lower_products(&q, &k, width, &mut qk);
        lower_products(&k, &k, width, &mut kk);
        Pairs { q, k, qk, kk, width }
    }
}

/// One value head's inputs in a chunk, and its scratch memory.
#[derive(Default)]
pub(super) struct Chunk {
    v: Vec<f32>,
    beta: Vec<f32>,
    /// G: the running sum of g.
    log_decay: Vec<f32>,
    /// F.
    fresh: Vec<f32>,
    /// Two matrices `[rows, rows]`: how F_j enters F_i and y_i.
    into_fresh: Vec<f32>,
    into_output: Vec<f32>,
    panel: Vec<[f32; ROWS]>,
}

impl Chunk {
    /// Takes v, beta and g of every row.
    pub(super) fn load(&mut self, rows: impl Iterator<Item = (Vec<f32>, f32, f32)>) {
        self.v.clear();
        self.beta.clear();
        self.log_decay.clear();
        let mut sum = 0.0;
        for (v, beta, g) in rows {
            sum += g;
            self.v.extend(v);
            self.beta.push(beta);
            self.log_decay.push(sum);
        }
        let rows = self.beta.len();
        self.fresh.resize(self.v.len(), 0.0);
        self.into_fresh.resize(rows * rows, 0.0);
        self.into_output.resize(rows * rows, 0.0);
    }

    /// Advances the state by the chunk and writes its outputs, `[rows, v_width]`.
    pub(super) fn advance(&mut self, pairs: &Pairs, state: &mut [f32], output: &mut [f32]) {
        advance(self, pairs, state, output);
    }
}

/// `out[i, j] = a_i . b_j` for `j <= i`.
#[multiversion(targets("x86_64+avx+avx2"))]
fn lower_products(a: &[f32], b: &[f32], width: usize, out: &mut [f32]) {
    let rows = a.len() / width;
    for ((i, a), out) in a.chunks_exact(width).enumerate().zip(out.chunks_exact_mut(rows)) {
        for (b, out) in b.chunks_exact(width).zip(out).take(i + 1) {
            *out = dot(a, b);
        }
    }
}

#[multiversion(targets("x86_64+avx+avx2"))]
fn advance(chunk: &mut Chunk, pairs: &Pairs, state: &mut [f32], output: &mut [f32]) {
    let Chunk { v, beta, log_decay, fresh, into_fresh, into_output, panel } = chunk;
    let rows = beta.len();
    let columns = v.len() / rows;
    let last = log_decay[rows - 1];

    for i in 0..rows {
        let at = i * rows;
        for j in 0..=i {
            let decay = exp(log_decay[i] - log_decay[j]);
            into_fresh[at + j] = -(beta[i] * pairs.kk[at + j] * decay);
            into_output[at + j] = pairs.qk[at + j] * decay;
        }
    }

    // What the state alone gives: F without its sum, and y without its sum.
    fresh.fill(0.0);
    multiply(&pairs.k, pairs.width, state, columns, fresh, panel);
    for (((fresh, v), beta), log_decay) in
        fresh.chunks_exact_mut(columns).zip(v.chunks_exact(columns)).zip(&*beta).zip(&*log_decay)
    {
        let decay = exp(*log_decay);
        for (fresh, v) in fresh.iter_mut().zip(v) {
            *fresh = beta * (v - decay * *fresh);
        }
    }
    output.fill(0.0);
    multiply(&pairs.q, pairs.width, state, columns, output, panel);
    for (output, log_decay) in output.chunks_exact_mut(columns).zip(&*log_decay) {
        let decay = exp(*log_decay);
        output.iter_mut().for_each(|y| *y *= decay);
    }

    // The sums over the rows of the chunk: tiles below the diagonal, then row by row along it.
    for i in (0..rows).step_by(ROWS) {
        let end = rows.min(i + ROWS);
        let (before, current) = fresh.split_at_mut(i * columns);
        pack(panel, &into_fresh[i * rows..end * rows], rows, i);
        accumulate(panel, before, columns, &mut current[..(end - i) * columns]);
        for r in i..end {
            let (done, current) = current.split_at_mut((r - i) * columns);
            add_rows(&into_fresh[r * rows + i..r * rows + r], done, &mut current[..columns]);
        }
        let output = &mut output[i * columns..end * columns];
        pack(panel, &into_output[i * rows..end * rows], rows, i);
        accumulate(panel, before, columns, output);
        for (r, output) in (i..end).zip(output.chunks_exact_mut(columns)) {
            add_rows(&into_output[r * rows + i..=r * rows + r], current, output);
        }
    }

    let decay = exp(last);
    state.iter_mut().for_each(|s| *s *= decay);
    let decays = &mut into_fresh[..rows];
    for (decay, log_decay) in decays.iter_mut().zip(&*log_decay) {
        *decay = exp(last - log_decay);
    }
    for (i, state) in state.chunks_mut(ROWS * columns).enumerate() {
        panel.clear();
        for (k, decay) in pairs.k.chunks_exact(pairs.width).zip(&*decays) {
            let mut column = [0.0; ROWS];
            for (to, k) in column.iter_mut().zip(&k[i * ROWS..]) {
                *to = decay * k;
            }
            panel.push(column);
        }
        accumulate(panel, fresh, columns, state);
    }
}

/// `out += a . b` for a of `[rows, inner]`, b of `[inner, columns]`.
#[inline(always)]
fn multiply(
    a: &[f32],
    inner: usize,
    b: &[f32],
    columns: usize,
    out: &mut [f32],
    panel: &mut Vec<[f32; ROWS]>,
) {
    for (a, out) in a.chunks(ROWS * inner).zip(out.chunks_mut(ROWS * columns)) {
        pack(panel, a, inner, inner);
        accumulate(panel, b, columns, out);
    }
}

/// The first `inner` columns of up to [`ROWS`] rows as a panel; rows that are missing are zero.
#[inline(always)]
fn pack(panel: &mut Vec<[f32; ROWS]>, rows: &[f32], stride: usize, inner: usize) {
    panel.clear();
    panel.resize(inner, [0.0; ROWS]);
    for (r, row) in rows.chunks_exact(stride).enumerate() {
        for (column, value) in panel.iter_mut().zip(row) {
            column[r] = *value;
        }
    }
}

/// `out[r, c] += sum over j, ascending, of panel[j][r] * b[j, c]` for the up to [`ROWS`] rows of out.
#[inline(always)]
fn accumulate(panel: &[[f32; ROWS]], b: &[f32], columns: usize, out: &mut [f32]) {
    let whole = columns / COLUMNS * COLUMNS;
    for c in (0..whole).step_by(COLUMNS) {
        let mut sums = [[0.0; COLUMNS]; ROWS];
        for (sums, out) in sums.iter_mut().zip(out.chunks_exact(columns)) {
            sums.copy_from_slice(&out[c..c + COLUMNS]);
        }
        let sums = tile(sums, panel, b, columns, c);
        for (sums, out) in sums.iter().zip(out.chunks_exact_mut(columns)) {
            out[c..c + COLUMNS].copy_from_slice(sums);
        }
    }
    for (r, out) in out.chunks_exact_mut(columns).enumerate() {
        for (a, b) in panel.iter().zip(b.chunks_exact(columns)) {
            for (out, b) in out[whole..].iter_mut().zip(&b[whole..]) {
                *out += a[r] * b;
            }
        }
    }
}

#[inline(always)]
fn tile(
    mut sums: [[f32; COLUMNS]; ROWS],
    panel: &[[f32; ROWS]],
    b: &[f32],
    columns: usize,
    c: usize,
) -> [[f32; COLUMNS]; ROWS] {
    for (a, b) in panel.iter().zip(b.chunks_exact(columns)) {
        let b: &[f32; COLUMNS] = b[c..c + COLUMNS].try_into().expect("a whole tile");
        for r in 0..ROWS {
            for l in 0..COLUMNS {
                sums[r][l] += a[r] * b[l];
            }
        }
    }
    sums
}

/// `out += sum over j, ascending, of weights[j] * rows[j]`.
#[inline(always)]
fn add_rows(weights: &[f32], rows: &[f32], out: &mut [f32]) {
    for (weight, row) in weights.iter().zip(rows.chunks_exact(out.len())) {
        for (out, x) in out.iter_mut().zip(row) {
            *out += weight * x;
        }
    }
}
