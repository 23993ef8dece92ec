//! The numbers behind a draw: keyed noise, and sums of weights that do not depend on their order.
//!
//! **Noise.** Each (seed, position, id) has 64 bits of its own. SplitMix64 is a generator whose state only
//! counts, so its outputs can be had by number: output `n` from state `s` is `splitmix64(s + n * GOLDEN)`.
//!
//! ```text
//! key     = output `position` from state splitmix64(seed)
//! bits    = output `id` from state key
//! uniform = f32((bits >> 1) | 1) * 2^-63, at most 1 - 2^-24              fine near 0, where it decides
//! wait    = -ln(1 - uniform)                                             exponential, mean 1
//! ```
//! Whoever waits the shortest time per weight wins with a probability proportional to the weight. (With
//! `g = -ln(wait)`, which has a Gumbel distribution, it is the largest `ln(weight) + g`.)
//!
//! **Sums.** Weights are at most 1, and the largest is 1. They are summed as integers in units of 2^-40, so
//! the sum is exact and any order of summation gives the same bits.

use multiversion::multiversion;

use super::choice::Candidate;
use crate::hash::{GOLDEN, splitmix64};
use crate::numerics::{LANES, before, exp};

/// The noise of one row.
#[derive(Clone, Copy, Debug)]
pub struct Draw {
    key: u64,
}

impl Draw {
    /// The noise for the id that will stand at `position`.
    pub fn new(seed: u64, position: u32) -> Draw {
        Draw { key: output(splitmix64(seed), position) }
    }

    /// The 64 bits of `id`.
    pub fn bits(self, id: u32) -> u64 {
        output(self.key, id)
    }

    /// A number of (0, 1) for `id`, uniformly distributed.
    pub fn uniform(self, id: u32) -> f32 {
        const UNIT: f32 = 1.0 / (1u64 << 63) as f32;
        // Below 2^63, so that the signed conversion, which hosts have, is right.
        let number = ((self.bits(id) >> 1) | 1) as i64;
        (number as f32 * UNIT).min(1.0 - f32::EPSILON / 2.0)
    }

    /// How long `id` waits: exponentially distributed with mean 1.
    pub fn wait(self, id: u32) -> f32 {
        wait(self.uniform(id))
    }

    /// The id of the largest `weight / wait`; ties go to the lower id.
    pub(super) fn race(self, candidates: Vec<Candidate>) -> u32 {
        let mut best = (f32::NEG_INFINITY, u32::MAX);
        for Candidate { weight, id, .. } in candidates {
            let uniform = self.uniform(id);
            // A wait is longer than its uniform, but for rounding: most ids lose without a logarithm.
            if weight < best.0 * uniform * 0.9999 {
                continue;
            }
            let rate = (weight / wait(uniform), id);
            if before(rate, best).is_lt() {
                best = rate;
            }
        }
        best.1
    }
}

fn output(state: u64, number: u32) -> u64 {
    splitmix64(state.wrapping_add(u64::from(number).wrapping_mul(GOLDEN)))
}

/// `-ln(1 - uniform)`, precise near 0 too.
fn wait(uniform: f32) -> f32 {
    match uniform < 0.25 {
        true => twice_atanh(uniform / (2.0 - uniform)),
        false => -ln(1.0 - uniform),
    }
}

/// `ln(x)` of a positive normal number, within 2 units in the last place of f32. Our own, so that it gives
/// the same bits on every host.
pub fn ln(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    /// Bits of the square root of one half: mantissas are taken from there up to its double.
    const ROOT: u32 = 0x3f35_04f3;
    let exponent = x.to_bits().wrapping_sub(ROOT) as i32 >> 23;
    let mantissa = f32::from_bits(x.to_bits().wrapping_sub((exponent << 23) as u32));
    let n = exponent as f32;
    n * LN2_HIGH + (n * LN2_LOW + twice_atanh((mantissa - 1.0) / (mantissa + 1.0)))
}

/// `2 atanh(s)` for `s` within the square root of one half less one.
fn twice_atanh(s: f32) -> f32 {
    let square = s * s;
    let mut sum = 1.0 / 11.0;
    for c in [1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0] {
        sum = sum * square + c;
    }
    let twice = 2.0 * s;
    twice + twice * (square * sum)
}

/// Binary digits of a mass behind the point.
const MASS_DIGITS: u32 = 40;

/// A weight of at most 1 in units of 2^-40, to the nearest, ties to even.
#[inline(always)]
pub fn mass(weight: f32) -> u64 {
    /// Adding it rounds to an integer, which then sits in the low bits.
    const ROUNDER: f64 = (1u64 << 52) as f64;
    (f64::from(weight) * (1u64 << MASS_DIGITS) as f64 + ROUNDER).to_bits().wrapping_sub(ROUNDER.to_bits())
}

/// A sum of masses as a weight.
pub fn weight_of(mass: u64) -> f32 {
    mass as f32 * (1.0 / (1u64 << MASS_DIGITS) as f32)
}

/// The sum of the masses of `exp(x - max)`.
#[multiversion(targets("x86_64+avx+avx2", "x86_64+avx+avx2+avx512f"))]
pub(super) fn total_mass(x: &[f32], max: f32) -> u64 {
    x.iter().fold(0, |sum: u64, x| sum.wrapping_add(mass(exp(x - max))))
}

/// Replaces every `x` by `exp((x - max) / temperature)`.
#[multiversion(targets("x86_64+avx+avx2", "x86_64+avx+avx2+avx512f"))]
pub(super) fn weigh(x: &mut [f32], max: f32, temperature: f32) {
    x.iter_mut().for_each(|x| *x = exp((*x - max) / temperature));
}

/// The largest of numbers, none of which is NaN.
#[multiversion(targets("x86_64+avx+avx2", "x86_64+avx+avx2+avx512f"))]
pub(super) fn max(x: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    let mut most = [f32::NEG_INFINITY; LANES];
    let (runs, tail) = x.as_chunks::<LANES>();
    for run in runs {
        for i in 0..LANES {
            most[i] = larger(most[i], run[i]);
        }
    }
    tail.iter().chain(&most).fold(f32::NEG_INFINITY, |most, x| larger(most, *x))
}
