//! Which ids a draw may pick: partial selections, so that no vocabulary is ever sorted.

use super::draw::{mass, weigh};
use crate::numerics::before;
use crate::table::Sampling;

/// An id that may be picked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    /// Its changed logit.
    pub(super) logit: f32,
    /// The id.
    pub(super) id: u32,
    /// Its probability over that of the likeliest.
    pub(super) weight: f32,
}

/// The ids that are left of logits after top-k, top-p and min-p, in any order. `max` is the largest logit.
pub(super) fn survivors(logits: &[f32], max: f32, options: &Sampling) -> Vec<Candidate> {
    let kept = match options.top_k as usize {
        0 => top(logits, logits.len()),
        k => top(logits, k),
    };
    let mut weights: Vec<f32> = kept.iter().map(|(logit, _)| *logit).collect();
    weigh(&mut weights, max, options.temperature);
    let candidate = |((logit, id), weight)| Candidate { logit, id, weight };
    let mut left: Vec<Candidate> = kept.into_iter().zip(weights).map(candidate).collect();

    let total: u64 = left.iter().map(|c| mass(c.weight)).sum();
    // Both limits cut a prefix of the same order, so either may come first; this one needs no selection.
    left.retain(|c| c.weight >= options.min_p);
    if options.top_p < 1.0 {
        cut(&mut left, (f64::from(options.top_p) * total as f64).ceil() as u64);
    }
    left
}

/// The `k` best of finite values with their ids, in any order; all, if there are no more.
pub(super) fn top(values: &[f32], k: usize) -> Vec<(f32, u32)> {
    /// Values that are compared with the bar together.
    const RUN: usize = 64;
    if k >= values.len() {
        return values.iter().copied().zip(0..).collect();
    }
    if k == 0 {
        return Vec::new();
    }
    let room = 2 * k + RUN;
    let mut kept: Vec<(f32, u32)> = Vec::with_capacity(room);
    // Ids ascend, so a later value that only equals the k-th best is behind it.
    let mut bar = f32::NEG_INFINITY;
    for (run, first) in values.chunks(RUN).zip((0..).step_by(RUN)) {
        if !run.iter().fold(false, |any, value| any | (*value > bar)) {
            continue;
        }
        for (&value, id) in run.iter().zip(first..) {
            if value > bar {
                kept.push((value, id));
                if kept.len() == room {
                    kept.select_nth_unstable_by(k - 1, |a, b| before(*a, *b));
                    kept.truncate(k);
                    bar = kept[k - 1].0;
                }
            }
        }
    }
    if kept.len() > k {
        kept.select_nth_unstable_by(k - 1, |a, b| before(*a, *b));
        kept.truncate(k);
    }
    kept
}

/// Keeps the smallest prefix, best first, whose mass reaches `need`; all, if none does.
fn cut(candidates: &mut Vec<Candidate>, need: u64) {
    // The prefix ends inside from..to; what lies before has the mass `held`, which is less than `need`.
    let (mut from, mut to, mut held) = (0, candidates.len(), 0);
    while to - from > 1 {
        let middle = from + (to - from) / 2;
        candidates[from..to]
            .select_nth_unstable_by(middle - from, |a, b| before((a.logit, a.id), (b.logit, b.id)));
        let mass: u64 = candidates[from..middle].iter().map(|c| mass(c.weight)).sum();
        if held + mass >= need {
            to = middle;
        } else {
            held += mass;
            from = middle;
        }
    }
    candidates.truncate(to);
}
