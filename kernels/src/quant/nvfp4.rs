//! e2m1 codes, two to a byte, the even column low: one sign bit, two of exponent (bias 1), one of mantissa.
//!
//! ```text
//! w = code * (scale * global)        in f32
//! ```

use rayon::prelude::*;

use super::{fp8, largest};
use crate::numerics::Element;
use crate::weight::GROUP;

/// The largest number that a code has.
pub const LARGEST: f32 = 6.0;

/// The numbers of all codes.
static VALUES: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The number of the code in the low half of a byte, exact.
#[inline(always)]
pub fn decode(code: u8) -> f32 {
    VALUES[(code & 15) as usize]
}

/// The code of the nearest number, ties to even, at most [`LARGEST`]. NaN has no code and becomes the largest.
#[inline(always)]
pub fn encode(value: f32) -> u8 {
    let sign = (value.to_bits() >> 28 & 8) as u8;
    let size = value.abs();
    let size = if size < LARGEST { size } else { LARGEST };
    let bits = size.to_bits();
    let normal = (bits.wrapping_add(0x1f_ffff + (bits >> 22 & 1)) >> 22).wrapping_sub(126 << 1);
    // Adding 1.5 * 2^22 leaves steps of a half, which then sit in the low bits.
    const ROUNDER: f32 = 6_291_456.0;
    let subnormal = (size + ROUNDER).to_bits().wrapping_sub(ROUNDER.to_bits());
    (if size < 1.0 { subnormal } else { normal }) as u8 | sign
}

/// A matrix in groups of [`GROUP`] columns.
#[derive(Clone, Debug, PartialEq)]
pub struct Groups {
    /// `[rows, columns / 2]`.
    pub codes: Vec<u8>,
    /// `[rows, columns / GROUP]`, e4m3.
    pub scales: Vec<u8>,
    /// The number of the whole tensor.
    pub global: f32,
}

/// Quantises a matrix of finite weights, whose columns are a multiple of [`GROUP`], under its own [`global`].
pub fn quantise<E: Element>(weights: &[E], columns: usize) -> Groups {
    quantise_under(weights, columns, global(weights))
}

/// As [`quantise`], under a given number of the whole tensor.
pub fn quantise_under<E: Element>(weights: &[E], columns: usize, global: f32) -> Groups {
    assert!(columns.is_multiple_of(GROUP), "{columns} columns are no groups of {GROUP}");
    let scales = scales(weights, global);
    Groups { codes: codes(weights, &scales, global), scales, global }
}

/// The number of a whole tensor of finite weights: its largest is then the largest code under the largest scale. 1
/// for zeros.
pub fn global<E: Element>(weights: &[E]) -> f32 {
    match weights.par_chunks(RUN).map(largest).reduce(|| 0.0, f32::max) {
        0.0 => 1.0,
        size => (size / (LARGEST * fp8::LARGEST)).max(f32::MIN_POSITIVE),
    }
}

/// The scales of [`quantise_under`]: 0 for a group of zeros, else positive.
pub fn scales<E: Element>(weights: &[E], global: f32) -> Vec<u8> {
    let scale = |group: &[E]| match largest(group) {
        0.0 => 0,
        size => fp8::encode(size / LARGEST / global).max(1),
    };
    let groups = weights.par_chunks_exact(GROUP).with_min_len(RUN / GROUP);
    groups.map(scale).collect()
}

/// The codes of weights under given scales, one for each [`GROUP`], and a number of the whole tensor. Under a scale of
/// 0 all are 0.
pub fn codes<E: Element>(weights: &[E], scales: &[u8], global: f32) -> Vec<u8> {
    let mut codes = vec![0; weights.len() / 2];
    let groups = codes.par_chunks_exact_mut(GROUP / 2).zip(weights.par_chunks_exact(GROUP)).zip(scales);
    groups.with_min_len(RUN / GROUP).for_each(|((codes, weights), scale)| {
        if *scale == 0 {
            return;
        }
        let step = fp8::decode(*scale) * global;
        let weights: &[E; GROUP] = weights.try_into().expect("a whole group");
        let ones = weights.map(|weight| encode(weight.widen() / step));
        for (code, pair) in codes.iter_mut().zip(ones.as_chunks::<2>().0) {
            *code = pair[0] | pair[1] << 4;
        }
    });
    codes
}

/// The weights of a matrix, `code * (scale * global)`.
pub fn dequantise(groups: &Groups) -> Vec<f32> {
    let mut weights = vec![0.0; 2 * groups.codes.len()];
    let codes = groups.codes.par_chunks(RUN / 2).zip(groups.scales.par_chunks(RUN / GROUP));
    weights.par_chunks_mut(RUN).zip(codes).for_each(|(weights, (codes, scales))| {
        decode_row(codes, scales, groups.global, weights);
    });
    weights
}

/// A row of codes, or a part of it that begins with a group, under a scale for every [`GROUP`] of them.
pub(crate) fn decode_row(codes: &[u8], scales: &[u8], global: f32, weights: &mut [f32]) {
    let groups = weights.as_chunks_mut::<GROUP>().0.iter_mut().zip(codes.as_chunks::<{ GROUP / 2 }>().0);
    for ((weights, codes), scale) in groups.zip(scales) {
        let step = fp8::decode(*scale) * global;
        for (pair, code) in weights.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
            pair[0] = decode(*code) * step;
            pair[1] = decode(code >> 4) * step;
        }
    }
}

/// Weights of a job: whole groups.
const RUN: usize = 1 << 16;
