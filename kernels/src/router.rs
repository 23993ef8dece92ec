//! The router of a mixture of experts: which experts a row uses, and how much.

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};

use crate::numerics::{before, exp, sigmoid};
use crate::source;
use crate::spread;

/// Chooses experts and weighs them.
///
/// ```text
/// p[i]       = exp(l[r, i] - max l[r, ..]) / sum over i of exp(l[r, i] - max l[r, ..])     i < experts
/// ids[r]     = the k largest l[r, ..], largest first, ties to the lower id, NaN last
/// weights[r, j] = p[ids[j]] / (p[ids[0]] + ... + p[ids[k - 1]])      or p[ids[j]] where norm is 0
/// weights[r, k] = sigmoid(l[r, experts])                             the shared expert
/// ```
/// Sums run in the order written, from 0. (The largest l are the largest p; choosing by l keeps apart what
/// exp would make equal.)
///
/// Shapes     l: `[rows, experts + 1]` f32; ids: `[rows, k]`; weights: `[rows, k + 1]` f32
/// Domain     any l: a row with NaN or infinity chooses k different experts and may weigh them NaN
/// Effects    writes all of ids and weights
/// Source     MODEL: mixture of experts
pub struct Route;

/// Arguments of [`Route`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Args {
    /// l.
    pub logits: Ptr<f32>,
    /// ids.
    pub ids: Ptr<u32>,
    /// weights.
    pub weights: Ptr<f32>,
    /// Number of rows.
    pub rows: u32,
    /// Number of experts, the shared one not counted.
    pub experts: u32,
    /// Experts per row.
    pub k: u32,
    /// Whether the chosen weights are divided by their sum: 1 or 0.
    pub norm: u32,
}

/// Experts that the CUDA twin can hold; rows of more are left unwritten.
pub const CUDA_EXPERTS: u32 = 2048;
/// Experts per row that it can choose; rows with more are left unwritten.
pub const CUDA_CHOICES: u32 = 32;

impl Kernel for Route {
    type Args = Args;
    const NAME: &'static str = "route";
    const ELEMENT: &'static str = "";
    const TWIN: Option<Twin> = source::plain(&source::ROUTER, Self::NAME, 128);

    fn check(args: &Args) -> Result<(), String> {
        let Args { rows, experts, k, norm, .. } = *args;
        if rows == 0 || k == 0 || k > experts {
            return Err(format!("rows {rows} and k {k} must be positive, and k at most experts {experts}"));
        }
        match norm {
            0 | 1 => Ok(()),
            _ => Err(format!("norm {norm} is neither 0 nor 1")),
        }
    }

    fn grid(args: &Args) -> Grid {
        Grid::line(args.rows as usize)
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let (rows, experts, k) = (args.rows as usize, args.experts as usize, args.k as usize);
        let logits = memory.read(args.logits, rows * (experts + 1))?;
        let ids = memory.write(args.ids, rows * k)?;
        let weights = memory.write(args.weights, rows * (k + 1))?;
        let outputs = ids.chunks_exact_mut(k).zip(weights.chunks_exact_mut(k + 1));
        let jobs = logits.chunks_exact(experts + 1).zip(outputs).collect();
        spread::each(jobs, rows * experts * 8, |(logits, (ids, weights))| {
            let (logits, shared) = logits.split_at(experts);
            choose(logits, args.norm == 1, ids, weights);
            weights[k] = sigmoid(shared[0]);
        });
        Ok(())
    }
}

fn choose(logits: &[f32], norm: bool, ids: &mut [u32], weights: &mut [f32]) {
    let mut ranked: Vec<(f32, u32)> = logits.iter().copied().zip(0..).collect();
    let (k, order) = (ids.len(), |a: &(f32, u32), b: &(f32, u32)| before(*a, *b));
    ranked.select_nth_unstable_by(k - 1, order);
    ranked[..k].sort_unstable_by(order);

    let largest = ranked[0].0;
    let sum = logits.iter().fold(0.0, |sum, logit| sum + exp(logit - largest));
    for ((id, weight), ranked) in ids.iter_mut().zip(&mut *weights).zip(&ranked) {
        *id = ranked.1;
        *weight = exp(ranked.0 - largest) / sum;
    }
    if norm {
        let sum = weights[..k].iter().fold(0.0, |sum, weight| sum + weight);
        weights[..k].iter_mut().for_each(|weight| *weight /= sum);
    }
}
