//! Float64 formulas as the model is written, and how near a kernel must come to them.

use kernels::numerics::Element;

/// f32 results: error allowed, relative to the largest value of a head or row.
const F32: f64 = 2e-5;
/// bf16 results: error allowed, relative to the value. Two units in the last place: the formulas round where
/// the contract rounds, so only a value near the middle of two elements comes out one off, once per store.
pub(crate) const BF16: f64 = 2.0 / 128.0;

pub(crate) fn wide<E: Element>(x: &[E]) -> Vec<f64> {
    x.iter().map(|x| x.widen() as f64).collect()
}

/// The value as the element type stores it; f32 is taken as exact.
pub(crate) fn stored<E: Element>(x: f64) -> f64 {
    if E::NAME == f32::NAME { x } else { E::round(x as f32) as f64 }
}

/// Asserts that `got` is `want`. `scale(i)` is the size of the numbers that made element `i`.
#[track_caller]
pub(crate) fn check<E: Element>(what: &str, got: &[E], want: &[f64], scale: impl Fn(usize) -> f64) {
    assert_eq!(got.len(), want.len(), "{what}: lengths");
    let largest = want.iter().fold(0.0, |m: f64, w| m.max(w.abs()));
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let got = got.widen() as f64;
        let allowed = if E::NAME == f32::NAME { F32 * largest } else { BF16 * want.abs().max(scale(i)) };
        assert!(
            got.is_finite() && (got - want).abs() <= allowed,
            "{what}: element {i} is {got}, not {want} within {allowed}"
        );
    }
}

/// Root-mean-square norm with a zero-centred gain, stored.
pub(crate) fn rms<E: Element>(x: &[f64], gain: &[f64], eps: f64) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(gain).map(|(x, gain)| stored::<E>(x / (mean + eps).sqrt() * (1.0 + gain))).collect()
}

/// A rotary table: `THWTHW...` as far as the sections go, then `T`.
#[derive(Clone)]
pub(crate) struct Rope {
    pub(crate) frequencies: Vec<f32>,
    pub(crate) sections: [usize; 3],
}

impl Rope {
    /// Turns a head; the result is not yet stored.
    pub(crate) fn turn<E: Element>(&self, head: &[f64], axes: [i32; 3]) -> Vec<f64> {
        let half = self.frequencies.len();
        let mut turned = head.to_vec();
        for i in 0..half {
            let axis = (1..3).find(|&axis| i % 3 == axis && i / 3 < self.sections[axis]).unwrap_or(0);
            let angle = (axes[axis] as f32 * self.frequencies[i]) as f64;
            let (cos, sin) = (stored::<E>(angle.cos()), stored::<E>(angle.sin()));
            turned[i] = head[i] * cos - head[i + half] * sin;
            turned[i + half] = head[i + half] * cos + head[i] * sin;
        }
        turned
    }

    /// Asserts that `got` is `head`, turned; an element is as large as the pair that made it.
    #[track_caller]
    pub(crate) fn check<E: Element>(&self, what: &str, got: &[E], head: &[f64], axes: [i32; 3]) {
        let half = self.frequencies.len();
        check(what, got, &self.turn::<E>(head, axes), |i| match i {
            i if i < half => head[i].hypot(head[i + half]),
            i if i < 2 * half => head[i].hypot(head[i - half]),
            _ => 0.0,
        });
    }
}

pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

pub(crate) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The `count` first ids by larger score, then lower id, ascending.
pub(crate) fn best(scores: &[f32], count: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..scores.len() as u32).collect();
    ids.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]).then(a.cmp(&b)));
    ids.truncate(count);
    ids.sort();
    ids
}
