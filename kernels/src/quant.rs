//! The numbers of quantised weights: what codes mean, and how weights become codes and scales.
//!
//! [`fp8`] is e4m3 codes under f32 scales, [`nvfp4`] e2m1 codes under e4m3 scales under one f32 number. A number
//! that two codes are equally near becomes the one with the even mantissa; what is larger than the largest code
//! becomes that. Scales are f32, and products of a code and a scale are made and rounded in f32, in the order that
//! each module says: so every device and every reader means the same number by the same bytes.
//!
//! Rows here are as checkpoints store them. What becomes of them in tiles is in [`crate::tiles`].

pub mod fp8;
pub mod nvfp4;

use crate::numerics::Element;

/// The largest magnitude; 0 of nothing. A comparison, not `f32::max`, so that it vectorises.
pub fn largest<E: Element>(weights: &[E]) -> f32 {
    let mut lanes = [0.0f32; 16];
    let (runs, tail) = weights.as_chunks::<16>();
    for run in runs {
        for (lane, weight) in lanes.iter_mut().zip(run) {
            let size = weight.widen().abs();
            *lane = if size > *lane { size } else { *lane };
        }
    }
    let tail = tail.iter().map(|weight| weight.widen().abs());
    lanes.into_iter().chain(tail).fold(0.0, |most, size| if size > most { size } else { most })
}
