//! Formulas in f64, as the model is written.

use kernels::numerics::Element;
use tests::check::{Draw, Want, close, r16};

/// Numbers of rows around the tiles, blocks and page sizes of the kernels.
pub(crate) const ROWS: [usize; 11] = [1, 2, 3, 4, 5, 31, 32, 33, 63, 64, 65];

/// Numbers of rows at which the twins of real sizes take another path: tiles, panels and blocks of rows.
pub(crate) const REAL_ROWS: [usize; 12] = [1, 2, 8, 9, 16, 17, 32, 33, 63, 64, 65, 130];

/// `count` multiples of 1/16 from -1 to 1: sums of some thousand products of two are exact in f32, so that
/// what is made of a sum can be judged alone.
pub(crate) fn sixteenths<E: Element>(draw: &mut Draw, count: usize) -> Vec<E> {
    (0..count).map(|_| E::narrow((draw.below(33) as f32 - 16.0) / 16.0)).collect()
}

pub(crate) fn wide<E: Element>(x: &[E]) -> Vec<f64> {
    x.iter().map(|x| x.widen() as f64).collect()
}

/// Root-mean-square norm with a zero-centred gain, stored.
pub(crate) fn rms<E: Element>(x: &[f64], gain: &[f64], eps: f64) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(gain).map(|(x, gain)| r16::<E>(x / (mean + eps).sqrt() * (1.0 + gain))).collect()
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
            let (cos, sin) = (r16::<E>(angle.cos()), r16::<E>(angle.sin()));
            turned[i] = head[i] * cos - head[i + half] * sin;
            turned[i + half] = head[i + half] * cos + head[i] * sin;
        }
        turned
    }

    /// Asserts that `got` is `head`, turned; an element is as large as the pair that made it.
    #[track_caller]
    pub(crate) fn check<E: Element>(&self, label: &str, got: &[E], head: &[f64], axes: [i32; 3]) {
        let half = self.frequencies.len();
        let turned = self.turn::<E>(head, axes).into_iter().enumerate();
        let wants: Vec<Want> = turned
            .map(|(i, value)| {
                let scale = match i {
                    i if i < half => head[i].hypot(head[i + half]),
                    i if i < 2 * half => head[i].hypot(head[i - half]),
                    _ => value.abs(),
                };
                Want { value, scale }
            })
            .collect();
        close(label, got, &wants, 2);
    }
}

pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

pub(crate) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub(crate) fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

/// The `count` first ids by larger score, then lower id, ascending.
pub(crate) fn best(scores: &[f32], count: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..scores.len() as u32).collect();
    ids.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]).then(a.cmp(&b)));
    ids.truncate(count);
    ids.sort();
    ids
}
