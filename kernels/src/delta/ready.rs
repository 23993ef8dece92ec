//! What rows bring to the chunks of the gated delta rule, whatever the state is.

use std::marker::PhantomData;

use graph::{Fault, Grid, Kernel, Twin, host::Access};

use super::Args;
use super::inputs::Inputs;
use crate::numerics::{Element, dot, exp};
use crate::source;

/// Rows of a span: the chunk of the CUDA twin of [`DeltaChunk`](super::DeltaChunk).
const SPAN: usize = 16;

/// What a row brings for a value head: a row of each of two matrices over its span, and four factors.
pub const READY: usize = 2 * SPAN + 4;

/// Spans of 16 rows, counted from the first row of a slot in the launch: how the rows of a span enter each
/// other's fresh values and outputs.
///
/// ```text
/// qn, kn, beta, g = as DeltaStep;  q * qs = qn;  k * ks = kn
/// G_i    = g_1 + ... + g_i                       inside the span, of n rows; L_ij = exp(G_i - G_j)
/// A_ij   = beta_i * (kn_i . kn_j) * L_ij         for j < i, else 0
/// T      = (1 + A)^-1 * diag(beta)
/// B_ij   = (qn_i . kn_j) * L_ij                  for j <= i, else 0
/// ready_i = T_i1 .. T_i16, B_i1 .. B_i16, exp(G_i) * ks_i, exp(G_i) * qs_i, exp(G_n - G_i) * ks_i, exp(G_i)
/// ```
/// per v head. With them F = T * (v - exp(G) * S^T kn) and y = exp(G) * S^T qn + B * F, as
/// [`DeltaChunk`](super::DeltaChunk) has them for its chunks. The rows of T come one after the other, sums ascend.
///
/// Shapes     as [`DeltaStep`](super::DeltaStep); ready: `[rows, v_heads, READY]` f32, at a multiple of 16 bytes
/// Domain     as [`DeltaStep`](super::DeltaStep)
/// Effects    writes the covered rows of ready
/// CUDA       key heads at most 256 wide
/// Source     MODEL: gated delta net, chunked form
pub struct DeltaReady<E>(PhantomData<E>);

impl<E: Element> Kernel for DeltaReady<E> {
    type Args = Args;
    const NAME: &'static str = "delta_ready";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::twin::<E>(&source::CHUNK, Self::NAME, 128);

    fn check(args: &Args) -> Result<(), String> {
        args.check()
    }

    fn grid(args: &Args) -> Grid {
        // A warp for every head, of four in a block.
        Grid::plane(args.v_heads.div_ceil(4) as usize, args.rows.len().div_ceil(SPAN))
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let inputs = Inputs::<E>::read(args, memory)?;
        let (first, rows, v_heads) = (args.rows.start(), args.rows.len(), args.v_heads as usize);
        let ready = memory.write(args.ready.at(first * v_heads * READY), rows * v_heads * READY)?;
        let spans = inputs.runs.iter().flat_map(|run| run.pieces(SPAN));
        let jobs = spans.flat_map(|rows| (0..inputs.k_heads).map(move |head| (rows.clone(), head))).collect();
        let spans = inputs.spread(jobs, |(rows, head)| {
            let pairs: Vec<_> = rows.clone().map(|row| inputs.unit_pair(row, head)).collect();
            let scales: Vec<_> = rows.clone().map(|row| inputs.scales(row, head)).collect();
            let heads: Vec<_> = (head * inputs.ratio..(head + 1) * inputs.ratio)
                .map(|head| {
                    let gates = rows.clone().map(|row| (inputs.beta(row, head), inputs.decay(row, head)));
                    (head, span(&pairs, &scales, &gates.collect::<Vec<_>>()))
                })
                .collect();
            (rows, heads)
        });
        for (rows, heads) in spans {
            for (head, brought) in heads {
                for (row, brought) in rows.clone().zip(brought) {
                    ready[(row * v_heads + head) * READY..][..READY].copy_from_slice(&brought);
                }
            }
        }
        Ok(())
    }
}

/// What the rows of a span bring for a value head: from qn and kn, their scales, and beta and g.
fn span(pairs: &[(Vec<f32>, Vec<f32>)], scales: &[(f32, f32)], gates: &[(f32, f32)]) -> Vec<[f32; READY]> {
    let mut sum = 0.0;
    let sums: Vec<f32> = gates
        .iter()
        .map(|(_, g)| {
            sum += g;
            sum
        })
        .collect();
    let mut solved: Vec<[f32; SPAN]> = Vec::new();
    let mut brought = Vec::new();
    for (i, (((q, k), (q_scale, k_scale)), (beta, _))) in pairs.iter().zip(scales).zip(gates).enumerate() {
        let (mut system, mut output) = ([0.0; SPAN], [0.0; SPAN]);
        system[i] = 1.0;
        for j in 0..=i {
            let decay = exp(sums[i] - sums[j]);
            output[j] = dot(q, &pairs[j].1) * decay;
            if let Some(row) = solved.get(j) {
                let enters = beta * dot(k, &pairs[j].1) * decay;
                for (system, solved) in system.iter_mut().zip(row) {
                    *system -= enters * solved;
                }
            }
        }
        solved.push(system);
        let mut row = [0.0; READY];
        for ((to, system), (beta, _)) in row.iter_mut().zip(system).zip(gates) {
            *to = system * beta;
        }
        row[SPAN..2 * SPAN].copy_from_slice(&output);
        let decay = exp(sums[i]);
        row[2 * SPAN..].copy_from_slice(&[
            decay * k_scale,
            decay * q_scale,
            exp(sum - sums[i]) * k_scale,
            decay,
        ]);
        brought.push(row);
    }
    brought
}
