//! e4m3: one sign bit, four of exponent (bias 7), three of mantissa; subnormals, no infinities.
//!
//! ```text
//! w = code * scale        in f32
//! ```

use half::bf16;
use rayon::prelude::*;

use super::largest;
use crate::numerics::Element;
use crate::weight::BLOCK;

/// The largest number that a code has.
pub const LARGEST: f32 = 448.0;

/// The code of no number. The other one is its negative, 0xff.
pub const NAN: u8 = 0x7f;

/// The numbers of all codes.
static VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = value(code as u8);
        code += 1;
    }
    values
};

const fn value(code: u8) -> f32 {
    let (exponent, mantissa) = ((code >> 3 & 15) as u32, (code & 7) as u32);
    let size = match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        // Steps of 2^-9.
        (0, _) => mantissa as f32 / 512.0,
        // The bias is 127 in f32.
        _ => f32::from_bits((exponent + 120) << 23 | mantissa << 20),
    };
    if code & 0x80 == 0 { size } else { -size }
}

/// The number of a code, exact; NaN for [`NAN`] and its negative.
#[inline(always)]
pub fn decode(code: u8) -> f32 {
    VALUES[code as usize]
}

/// The code of the nearest number, ties to even, at most [`LARGEST`]; [`NAN`], with its sign, for NaN.
#[inline(always)]
pub fn encode(value: f32) -> u8 {
    let sign = (value.to_bits() >> 24 & 0x80) as u8;
    let size = value.abs();
    let size = if size > LARGEST { LARGEST } else { size };
    let bits = size.to_bits();
    let normal = (bits.wrapping_add(0x7_ffff + (bits >> 20 & 1)) >> 20).wrapping_sub(120 << 3);
    // Adding 1.5 * 2^14 leaves steps of 2^-9, which then sit in the low bits.
    const ROUNDER: f32 = 24_576.0;
    let subnormal = (size + ROUNDER).to_bits().wrapping_sub(ROUNDER.to_bits());
    let code = if size < 1.0 / 64.0 { subnormal } else { normal };
    let code = if value.is_nan() { u32::from(NAN) } else { code };
    code as u8 | sign
}

/// How a scale is stored, which it is rounded to before codes are made with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// f32.
    F32,
    /// bf16.
    Bf16,
}

impl Scale {
    /// The scale of numbers up to `largest`, which must be finite.
    pub fn of(self, largest: f32) -> f32 {
        if largest == 0.0 {
            return 1.0;
        }
        let scale = (largest / LARGEST).max(f32::MIN_POSITIVE);
        match self {
            Scale::F32 => scale,
            Scale::Bf16 => bf16::round(scale),
        }
    }
}

/// A matrix in blocks of [`BLOCK`] by [`BLOCK`].
#[derive(Clone, Debug, PartialEq)]
pub struct Blocks {
    /// `[rows, columns]`.
    pub codes: Vec<u8>,
    /// `[ceil(rows / BLOCK), ceil(columns / BLOCK)]`.
    pub scales: Vec<f32>,
}

/// Quantises a matrix of finite weights. A block's scale makes its largest weight [`LARGEST`]; it is 1 in a block
/// of zeros.
pub fn quantise<E: Element>(weights: &[E], columns: usize, scale: Scale) -> Blocks {
    let scales = scales(weights, columns, scale);
    Blocks { codes: codes(weights, columns, &scales), scales }
}

/// The scales of [`quantise`].
pub fn scales<E: Element>(weights: &[E], columns: usize, scale: Scale) -> Vec<f32> {
    let block_row = |rows: &[E]| -> Vec<f32> {
        let mut sizes = vec![0.0f32; columns.div_ceil(BLOCK)];
        for row in rows.chunks_exact(columns) {
            for (size, run) in sizes.iter_mut().zip(row.chunks(BLOCK)) {
                *size = size.max(largest(run));
            }
        }
        sizes.into_iter().map(|size| scale.of(size)).collect()
    };
    weights.par_chunks(BLOCK * columns).flat_map_iter(block_row).collect()
}

/// The codes of a matrix under given scales, `[ceil(rows / BLOCK), ceil(columns / BLOCK)]`.
pub fn codes<E: Element>(weights: &[E], columns: usize, scales: &[f32]) -> Vec<u8> {
    codes_from(weights, columns, scales, 0)
}

/// As [`codes`], of a run of rows that begins with row `first` of the matrix.
pub fn codes_from<E: Element>(weights: &[E], columns: usize, scales: &[f32], first: usize) -> Vec<u8> {
    let mut codes = vec![0; weights.len()];
    let rows = codes.par_chunks_exact_mut(columns).zip(weights.par_chunks_exact(columns));
    rows.enumerate().for_each(|(row, (codes, weights))| {
        let runs = codes.chunks_mut(BLOCK).zip(weights.chunks(BLOCK));
        for ((codes, weights), scale) in runs.zip(scales_of_row(scales, columns, first + row)) {
            encode_run(weights, *scale, codes);
        }
    });
    codes
}

/// The weights of a matrix, `code * scale`.
pub fn dequantise(blocks: &Blocks, columns: usize) -> Vec<f32> {
    let mut weights = vec![0.0; blocks.codes.len()];
    let rows = weights.par_chunks_exact_mut(columns).zip(blocks.codes.par_chunks_exact(columns));
    rows.enumerate().for_each(|(row, (weights, codes))| {
        decode_row(codes, scales_of_row(&blocks.scales, columns, row), weights);
    });
    weights
}

/// The scales of one row of a matrix.
pub fn scales_of_row(scales: &[f32], columns: usize, row: usize) -> &[f32] {
    let blocks = columns.div_ceil(BLOCK);
    &scales[row / BLOCK * blocks..][..blocks]
}

/// A row of codes, or a part of it that begins with a block, under a scale for every [`BLOCK`] of them.
pub(crate) fn decode_row(codes: &[u8], scales: &[f32], weights: &mut [f32]) {
    for ((weights, codes), scale) in weights.chunks_mut(BLOCK).zip(codes.chunks(BLOCK)).zip(scales) {
        for (weight, code) in weights.iter_mut().zip(codes) {
            *weight = decode(*code) * scale;
        }
    }
}

/// Quantises a table of finite weights under one scale, which is a bf16: the largest weight becomes about
/// [`LARGEST`].
pub fn quantise_table<E: Element>(weights: &[E]) -> (Vec<u8>, f32) {
    /// Weights of a job.
    const RUN: usize = 1 << 16;
    let size = weights.par_chunks(RUN).map(largest).reduce(|| 0.0, f32::max);
    let scale = Scale::Bf16.of(size);
    let mut codes = vec![0; weights.len()];
    let runs = codes.par_chunks_mut(RUN).zip(weights.par_chunks(RUN));
    runs.for_each(|(codes, weights)| encode_run(weights, scale, codes));
    (codes, scale)
}

fn encode_run<E: Element>(weights: &[E], scale: f32, codes: &mut [u8]) {
    for (code, weight) in codes.iter_mut().zip(weights) {
        *code = encode(weight.widen() / scale);
    }
}
