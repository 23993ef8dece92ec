//! Work over threads: large work is spread, small work stays on the calling thread.

use rayon::prelude::*;

/// Multiply-adds (or steps as long) below which waking threads costs more than it saves.
const PARALLEL_WORK: usize = 1 << 20;

/// Calls `f` on every job, on several threads if all jobs together are at least [`PARALLEL_WORK`] steps.
/// Jobs do not depend on each other, so the bits are the same either way.
pub(crate) fn each<T: Send>(jobs: Vec<T>, work: usize, f: impl Fn(T) + Send + Sync) {
    if jobs.len() < 2 || work < PARALLEL_WORK {
        jobs.into_iter().for_each(f);
    } else {
        let least = (jobs.len() * PARALLEL_WORK / 4 / work).max(1);
        jobs.into_par_iter().with_min_len(least).for_each(f);
    }
}

/// As [`each`], with results in the order of the jobs.
pub(crate) fn map<T: Send, R: Send>(jobs: Vec<T>, work: usize, f: impl Fn(T) -> R + Send + Sync) -> Vec<R> {
    if jobs.len() < 2 || work < PARALLEL_WORK {
        jobs.into_iter().map(f).collect()
    } else {
        jobs.into_par_iter().map(f).collect()
    }
}
