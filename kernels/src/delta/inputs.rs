//! What the gated delta rule reads, and how its work is spread over slots and heads.

use std::ops::Range;

use graph::{Fault, host::Access};
use rayon::prelude::*;

use super::{Args, CHUNK};
use crate::conv::whole_runs;
use crate::numerics::{Element, narrow, sigmoid, softplus, sum_of_squares};

/// Added to a sum of squares before its root.
const UNIT_EPS: f32 = 1e-6;

/// Multiply-adds of a launch below which it stays on the calling thread.
const PARALLEL_WORK: usize = 1 << 18;

/// The rows of one slot, as indices into the launch.
pub(super) struct Run {
    slot: u32,
    pub(super) rows: Range<usize>,
    /// Chunks of the launch before this run.
    pub(super) first_chunk: usize,
}

impl Run {
    pub(super) fn chunks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        self.pieces(CHUNK)
    }

    /// Its rows, so many at a time.
    pub(super) fn pieces(&self, count: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let end = self.rows.end;
        self.rows.clone().step_by(count).map(move |first| first..end.min(first + count))
    }
}

/// What a launch reads, by row of the launch and head.
pub(super) struct Inputs<'a, E> {
    pub(super) runs: Vec<Run>,
    qkv: &'a [E],
    x: &'a [E],
    a_log: &'a [f32],
    dt_bias: &'a [f32],
    stride: usize,
    beta_at: usize,
    decay_at: usize,
    pub(super) k_heads: usize,
    v_heads: usize,
    pub(super) k_width: usize,
    pub(super) v_width: usize,
    /// Value heads per key head.
    pub(super) ratio: usize,
}

impl<'a, E: Element> Inputs<'a, E> {
    pub(super) fn read(args: &Args, memory: &'a Access<'_>) -> Result<Self, Fault> {
        let (k_heads, v_heads) = (args.k_heads as usize, args.v_heads as usize);
        let (k_width, v_width) = (args.k_width as usize, args.v_width as usize);
        let channels = 2 * k_heads * k_width + v_heads * v_width;
        let stride = args.stride as usize;
        let (first, rows) = (args.rows.start(), args.rows.len());
        let mut runs: Vec<Run> = Vec::new();
        for run in whole_runs(args.rows.read(memory)?, memory)? {
            let (start, first_chunk) =
                runs.last().map_or((0, 0), |run| (run.rows.end, run.first_chunk + run.chunks().count()));
            runs.push(Run { slot: run[0].slot, rows: start..start + run.len(), first_chunk });
        }
        Ok(Inputs {
            runs,
            qkv: memory.read(args.qkv.cast::<E>().at(first * channels), rows * channels)?,
            x: memory.read(args.x.cast::<E>().at(first * stride), rows * stride)?,
            a_log: memory.read(args.a_log, v_heads)?,
            dt_bias: memory.read(args.dt_bias, v_heads)?,
            stride,
            beta_at: args.beta_at as usize,
            decay_at: args.decay_at as usize,
            k_heads,
            v_heads,
            k_width,
            v_width,
            ratio: v_heads / k_heads,
        })
    }

    /// Columns `from..from + width` of a row of qkv, in f32.
    fn head(&self, row: usize, from: usize, width: usize) -> Vec<f32> {
        let channels = 2 * self.k_heads * self.k_width + self.v_heads * self.v_width;
        self.qkv[row * channels + from..][..width].iter().map(|x| x.widen()).collect()
    }

    /// q and k of a key head.
    fn raw_pair(&self, row: usize, head: usize) -> (Vec<f32>, Vec<f32>) {
        let q = self.head(row, head * self.k_width, self.k_width);
        let k = self.head(row, (self.k_heads + head) * self.k_width, self.k_width);
        (q, k)
    }

    /// qn and kn of a key head.
    pub(super) fn unit_pair(&self, row: usize, head: usize) -> (Vec<f32>, Vec<f32>) {
        let unit = |mut x: Vec<f32>, scale: f32| {
            let inverse = inverse_norm(&x);
            x.iter_mut().for_each(|x| *x = *x * inverse * scale);
            x
        };
        let (q, k) = self.raw_pair(row, head);
        (unit(q, self.query_scale()), unit(k, 1.0))
    }

    /// What makes qn of q, and kn of k.
    pub(super) fn scales(&self, row: usize, head: usize) -> (f32, f32) {
        let (q, k) = self.raw_pair(row, head);
        (inverse_norm(&q) * self.query_scale(), inverse_norm(&k))
    }

    /// What a unit query is multiplied with.
    fn query_scale(&self) -> f32 {
        1.0 / (self.k_width as f32).sqrt()
    }

    /// v of a value head.
    pub(super) fn v(&self, row: usize, head: usize) -> Vec<f32> {
        self.head(row, 2 * self.k_heads * self.k_width + head * self.v_width, self.v_width)
    }

    /// beta of a value head.
    pub(super) fn beta(&self, row: usize, head: usize) -> f32 {
        sigmoid(self.x[row * self.stride + self.beta_at + head].widen())
    }

    /// g of a value head.
    pub(super) fn decay(&self, row: usize, head: usize) -> f32 {
        let a = self.x[row * self.stride + self.decay_at + head].widen();
        -self.a_log[head].exp() * softplus(a + self.dt_bias[head])
    }

    /// Advances the state of every covered slot and value head by `rule(run, head, state, output)`, whose
    /// output is `[rows of the run, v_width]`, and stores the outputs.
    pub(super) fn advance(
        &self,
        args: &Args,
        memory: &Access<'_>,
        rule: impl Fn(&Run, usize, &mut [f32], &mut [f32]) + Sync,
    ) -> Result<(), Fault> {
        let (state_size, y_width) = (self.k_width * self.v_width, self.v_heads * self.v_width);
        let (first, rows) = (args.rows.start(), args.rows.len());
        let y = memory.write::<E>(args.y.cast::<E>().at(first * y_width), rows * y_width)?;
        let mut jobs = Vec::new();
        for run in &self.runs {
            let states = memory.write(args.state.slot::<f32>(run.slot), self.v_heads * state_size)?;
            jobs.extend(
                states.chunks_exact_mut(state_size).enumerate().map(|(head, state)| (run, head, state)),
            );
        }
        let outputs = self.spread(jobs, |(run, head, state)| {
            let mut output = vec![0.0; run.rows.len() * self.v_width];
            rule(run, head, state, &mut output);
            (run, head, output)
        });
        for (run, head, output) in outputs {
            for (row, output) in run.rows.clone().zip(output.chunks_exact(self.v_width)) {
                let y = &mut y[row * y_width + head * self.v_width..][..self.v_width];
                narrow(output, y);
            }
        }
        Ok(())
    }

    /// Runs jobs in order of their list, on several threads if the launch is large.
    pub(super) fn spread<J: Send, R: Send>(
        &self,
        jobs: Vec<J>,
        run: impl Fn(J) -> R + Sync + Send,
    ) -> Vec<R> {
        let rows = self.qkv.len() / (2 * self.k_heads * self.k_width + self.v_heads * self.v_width);
        match rows * self.v_heads * self.k_width * self.v_width < PARALLEL_WORK {
            true => jobs.into_iter().map(run).collect(),
            false => jobs.into_par_iter().map(run).collect(),
        }
    }
}

fn inverse_norm(x: &[f32]) -> f32 {
    1.0 / (sum_of_squares(x) + UNIT_EPS).sqrt()
}
