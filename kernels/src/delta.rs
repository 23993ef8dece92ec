//! The gated delta rule: the recurrence of the recurrent layers, row by row or in chunks of rows.
//!
//! Step and chunk advance the same state by the same rule. They group the arithmetic differently, so they
//! agree within tolerance, not bit for bit.

mod form;
mod inputs;
mod ready;

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};
use inputs::{Inputs, Run};

use crate::numerics::{Element, exp};
use crate::source;
use crate::state::{Part, RowRange};
use crate::table::PAGE;

pub use ready::{DeltaReady, READY};

/// The gated delta rule, one row of a slot after another.
///
/// ```text
/// q, k, v  = the heads of qkv: k_heads of q, k_heads of k, v_heads of v; v head h uses q, k head h / ratio
/// qn       = q * rsqrt(sum q^2 + 1e-6) * k_width^-0.5;   kn = k * rsqrt(sum k^2 + 1e-6)
/// beta     = sigmoid(b);   g = -exp(a_log) * softplus(a + dt_bias)
///
/// S  = S * exp(g)
/// d  = (v - S^T kn) * beta
/// S  = S + kn (outer) d
/// y  = r16(S^T qn)
/// ```
/// per v head, with ratio = v_heads / k_heads. Sums over the rows of S ascend.
///
/// Shapes     qkv: `[rows, 2 * k_heads * k_width + v_heads * v_width]` elements; b, a: columns `beta_at..`
///            and `decay_at..` of x, one per v head, x: `[rows, stride]` elements; a_log, dt_bias:
///            `[v_heads]` f32; S: `[v_heads, k_width, v_width]` f32 per slot; y: `[rows, v_heads, v_width]`
///            elements
/// Domain     k_heads divides v_heads; the rows of a slot are all of its rows of the round, in order
/// Effects    writes the covered rows of y and the states of the covered slots
/// CUDA       key heads at most 256 wide
/// Source     MODEL: gated delta net, recurrence
pub struct DeltaStep<E>(PhantomData<E>);

/// The gated delta rule in chunks of [`CHUNK`] rows, counted from the first row of a slot in the launch.
/// The same function as [`DeltaStep`].
///
/// ```text
/// G_i  = g_1 + ... + g_i                         inside the chunk; L_ij = exp(G_i - G_j)
/// F_i  = beta_i * (v_i - exp(G_i) * S^T kn_i) - sum over j < i of (beta_i * (kn_i . kn_j) * L_ij) * F_j
/// y_i  = r16(exp(G_i) * S^T qn_i + sum over j <= i of ((qn_i . kn_j) * L_ij) * F_j)
/// S    = exp(G_n) * S + sum over j of (exp(G_n - G_j) * kn_j) (outer) F_j
/// ```
/// A chunk has only real rows: nothing of row i depends on the rows after it. Sums ascend.
///
/// Shapes, domain and effects are those of [`DeltaStep`]; [`DeltaReady`] ran with the same arguments.
/// CUDA       chunks of 16 rows, for which it reads ready; the host makes its own. A row that is not finite spoils
///            all of its 16
/// Source     MODEL: gated delta net, chunked form; F solves the triangular system of U - W S directly
pub struct DeltaChunk<E>(PhantomData<E>);

/// Rows of a chunk: the prompt grid, so that a prompt may be cut at any multiple of it.
pub const CHUNK: usize = PAGE;
/// The widest key head that the CUDA twins take; wider ones they leave unwritten.
pub const CUDA_KEY_WIDTH: u32 = 256;

/// Rows of a block of the CUDA twin of [`DeltaChunk`], which takes the slots that begin there. One block after
/// the other, the columns of all heads keep the device busy.
pub(crate) const CHUNK_ROWS: u32 = 512;

/// Shared memory of a block of it.
pub(crate) const CHUNK_SHARED: u32 = 61440;

/// Arguments of [`DeltaStep`], [`DeltaReady`] and [`DeltaChunk`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Args {
    /// The covered rows.
    pub rows: RowRange,
    /// qkv; row 0 of the round, as are x, y and ready.
    pub qkv: Ptr<u8>,
    /// x, the stacked projection.
    pub x: Ptr<u8>,
    /// a_log.
    pub a_log: Ptr<f32>,
    /// dt_bias.
    pub dt_bias: Ptr<f32>,
    /// The states S; not used by [`DeltaReady`].
    pub state: Part,
    /// y; not used by [`DeltaReady`].
    pub y: Ptr<u8>,
    /// What [`DeltaReady`] writes; not used by [`DeltaStep`].
    pub ready: Ptr<f32>,
    /// Elements from one row of x to the next.
    pub stride: u32,
    /// First column of b in x.
    pub beta_at: u32,
    /// First column of a in x.
    pub decay_at: u32,
    /// Query and key heads.
    pub k_heads: u32,
    /// Value heads.
    pub v_heads: u32,
    /// Width of a query or key head.
    pub k_width: u32,
    /// Width of a value head.
    pub v_width: u32,
    /// Not used; zero.
    pub zero: u32,
}

impl Args {
    fn check(&self) -> Result<(), String> {
        let Args { k_heads, v_heads, k_width, v_width, .. } = *self;
        if self.rows.is_empty() || [k_heads, v_heads, k_width, v_width].contains(&0) {
            return Err(format!(
                "rows {}, heads {k_heads} and {v_heads}, widths {k_width} and {v_width} must all be positive",
                self.rows.count
            ));
        }
        if v_heads % k_heads != 0 {
            return Err(format!("{k_heads} key heads do not divide {v_heads} value heads"));
        }
        let end = self.beta_at.max(self.decay_at) as usize + v_heads as usize;
        if end > self.stride as usize {
            return Err(format!("b or a ends at column {end} of a row of {}", self.stride));
        }
        Ok(())
    }
}

impl<E: Element> Kernel for DeltaStep<E> {
    type Args = Args;
    const NAME: &'static str = "delta_step";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::twin::<E>(&source::DELTA, Self::NAME, 64);

    fn check(args: &Args) -> Result<(), String> {
        args.check()
    }

    fn grid(args: &Args) -> Grid {
        // A block holds two warps' columns: 32, or 16 if keys are wide.
        let columns = if args.k_width <= 128 { 32 } else { 16 };
        Grid::plane((args.v_heads * args.v_width.div_ceil(columns)) as usize, args.rows.len())
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let inputs = Inputs::<E>::read(args, memory)?;
        inputs.advance(args, memory, |run, head, state, output| {
            for (row, output) in run.rows.clone().zip(output.chunks_exact_mut(inputs.v_width)) {
                let (q, k) = inputs.unit_pair(row, head / inputs.ratio);
                output.copy_from_slice(&inputs.v(row, head));
                form::step(&q, &k, inputs.beta(row, head), exp(inputs.decay(row, head)), state, output);
            }
        })
    }
}

impl<E: Element> Kernel for DeltaChunk<E> {
    type Args = Args;
    const NAME: &'static str = "delta_chunk";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::shared_twin::<E>(&source::CHUNK, Self::NAME, 128, CHUNK_SHARED);

    fn check(args: &Args) -> Result<(), String> {
        args.check()
    }

    fn grid(args: &Args) -> Grid {
        // The chunks of a slot follow each other, so they are not an axis.
        let columns = args.v_heads * args.v_width.div_ceil(16);
        Grid::plane(columns as usize, args.rows.count.div_ceil(CHUNK_ROWS) as usize)
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let inputs = Inputs::<E>::read(args, memory)?;
        // First what the value heads of one key head share: chunk by chunk, key head by key head.
        let chunks = inputs.runs.iter().flat_map(Run::chunks);
        let jobs =
            chunks.flat_map(|rows| (0..inputs.k_heads).map(move |head| (rows.clone(), head))).collect();
        let pairs: Vec<form::Pairs> = inputs.spread(jobs, |(rows, head)| {
            let (q, k): (Vec<_>, Vec<_>) = rows.map(|row| inputs.unit_pair(row, head)).unzip();
            form::Pairs::new(q.concat(), k.concat(), inputs.k_width)
        });
        inputs.advance(args, memory, |run, head, state, output| {
            let pairs = pairs[run.first_chunk * inputs.k_heads..].iter();
            let pairs = pairs.skip(head / inputs.ratio).step_by(inputs.k_heads);
            let mut form = form::Chunk::default();
            for ((rows, pairs), output) in
                run.chunks().zip(pairs).zip(output.chunks_mut(CHUNK * inputs.v_width))
            {
                form.load(
                    rows.map(|row| (inputs.v(row, head), inputs.beta(row, head), inputs.decay(row, head))),
                );
                form.advance(pairs, state, output);
            }
        })
    }
}
