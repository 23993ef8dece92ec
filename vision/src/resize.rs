//! Resizing: bicubic with antialias on bytes, to the bit as PyTorch's `interpolate` does on CPUs with vector units.
//!
//! Columns first, then rows; after each pass values are rounded to bytes. A pass along one axis:
//!
//! ```text
//! scale = old / new ; support = 2 * max(scale, 1)
//! centre(i) = scale * (i + 0.5) ; taps = old pixels from int(centre - support + 0.5) to int(centre + support + 0.5)
//! weight = cubic((tap + 0.5 - centre) / max(scale, 1)), a = -0.5, over the sum of the weights of i
//! whole weight = weight * 2^p rounded half away from zero; p is the most for which the largest fits 15 bits
//! out = clamp((sum of whole weight * pixel + 2^(p-1)) >> p, 0, 255)
//! ```
//!
//! Source: `aten/src/ATen/native/cpu/UpSampleKernel.cpp` and `UpSampleKernelAVXAntialias.h`.

use rayon::prelude::*;

use crate::{Picture, Size};

/// Resizes a picture. A side that keeps its length is not touched.
///
/// # Panics
/// If a side of `size` is zero.
pub fn resize(picture: &Picture, size: Size) -> Picture {
    assert!(size.width > 0 && size.height > 0, "a picture has no side of length 0");
    let (width, height) = (picture.width() as usize, picture.height() as usize);
    let (new_width, new_height) = (size.width as usize, size.height as usize);
    let columns = (width != new_width).then(|| along(picture.rgb(), width, &Taps::new(width, new_width)));
    let pixels = columns.as_deref().unwrap_or(picture.rgb());
    let rows = (height != new_height).then(|| across(pixels, 3 * new_width, &Taps::new(height, new_height)));
    let pixels = rows.or(columns).unwrap_or_else(|| picture.rgb().to_vec());
    Picture::new(size.width, size.height, pixels).expect("both passes filled their sides")
}

/// Which old pixels make a new one, along one axis.
struct Taps {
    /// For each new pixel: the first old one, and where its weights lie.
    runs: Vec<(usize, std::ops::Range<usize>)>,
    weights: Vec<i16>,
    precision: u32,
}

impl Taps {
    fn new(old: usize, new: usize) -> Taps {
        let scale = old as f64 / new as f64;
        let stretch = scale.max(1.0);
        let support = 2.0 * stretch;
        let most = support.ceil() as usize * 2 + 1;
        let mut runs = Vec::with_capacity(new);
        let mut exact: Vec<f64> = Vec::new();
        for index in 0..new {
            let centre = scale * (index as f64 + 0.5);
            // Casts cut towards zero, and below zero to it.
            let first = (centre - support + 0.5) as usize;
            let end = ((centre + support + 0.5) as usize).min(old);
            let from = exact.len();
            let inverse = 1.0 / stretch;
            exact.extend(
                (0..(end - first).min(most))
                    .map(|tap| cubic(((tap + first) as f64 - centre + 0.5) * inverse)),
            );
            let sum: f64 = exact[from..].iter().sum();
            exact[from..].iter_mut().for_each(|weight| *weight /= sum);
            runs.push((first, from..exact.len()));
        }
        let largest = exact.iter().fold(0.0f64, |most, weight| most.max(*weight));
        let precision = (0..22)
            .find(|bits| (0.5 + largest * f64::from(1u32 << (bits + 1))) as u32 >= 1 << 15)
            .unwrap_or(22);
        let whole = |weight: &f64| (weight * f64::from(1u32 << precision)).round() as i16;
        Taps { runs, weights: exact.iter().map(whole).collect(), precision }
    }

    fn half(&self) -> i32 {
        1 << (self.precision - 1)
    }

    fn byte(&self, sum: i32) -> u8 {
        (sum >> self.precision).clamp(0, 255) as u8
    }
}

/// Keys' cubic with a = -0.5.
fn cubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A
    } else {
        0.0
    }
}

/// New columns: `[rows, old, 3]` to `[rows, new, 3]`.
fn along(pixels: &[u8], old: usize, taps: &Taps) -> Vec<u8> {
    let rows = pixels.len() / (3 * old);
    let new = taps.runs.len();
    let mut out = vec![0; rows * new * 3];
    out.par_chunks_exact_mut(3 * new).zip(pixels.par_chunks_exact(3 * old)).for_each(|(out, row)| {
        for (out, (first, weights)) in out.as_chunks_mut::<3>().0.iter_mut().zip(&taps.runs) {
            let mut sums = [taps.half(); 3];
            let weights = &taps.weights[weights.clone()];
            let pixels = row[3 * first..][..3 * weights.len()].as_chunks::<3>().0;
            for (weight, pixel) in weights.iter().zip(pixels) {
                for (sum, value) in sums.iter_mut().zip(pixel) {
                    *sum += i32::from(*weight) * i32::from(*value);
                }
            }
            *out = sums.map(|sum| taps.byte(sum));
        }
    });
    out
}

/// New rows: `[old, width]` to `[new, width]`, where `width` counts bytes.
fn across(pixels: &[u8], width: usize, taps: &Taps) -> Vec<u8> {
    /// Sums that stay in the nearest cache while the rows pass.
    const STRIP: usize = 1024;
    let mut out = vec![0; taps.runs.len() * width];
    out.par_chunks_exact_mut(width).zip(&taps.runs).for_each(|(out, (first, weights))| {
        let mut sums = [0i32; STRIP];
        for (strip, out) in out.chunks_mut(STRIP).enumerate() {
            let sums = &mut sums[..out.len()];
            sums.fill(taps.half());
            for (row, weight) in (*first..).zip(&taps.weights[weights.clone()]) {
                let row = &pixels[row * width + strip * STRIP..][..sums.len()];
                for (sum, value) in sums.iter_mut().zip(row) {
                    // It does not overflow: the sizes of a pixel's weights add up to less than 2^23.
                    *sum = sum.wrapping_add(i32::from(*weight) * i32::from(*value));
                }
            }
            for (out, sum) in out.iter_mut().zip(&*sums) {
                *out = taps.byte(*sum);
            }
        }
    });
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_colour_stays() {
        let picture = Picture::new(7, 5, vec![201; 105]).unwrap();
        for (width, height) in [(7, 5), (1, 1), (64, 3), (3, 64), (700, 500)] {
            let resized = resize(&picture, Size { width, height });
            assert!(resized.rgb().iter().all(|value| value.abs_diff(201) <= 1), "{width} x {height}");
        }
    }

    #[test]
    fn weights_are_whole_and_add_up() {
        for (old, new) in [(70, 64), (50, 64), (1, 32), (4000, 32), (33, 1), (512, 511)] {
            let taps = Taps::new(old, new);
            for (first, range) in &taps.runs {
                let weights = &taps.weights[range.clone()];
                assert!(first + weights.len() <= old && !weights.is_empty());
                let sum: i32 = weights.iter().map(|weight| i32::from(*weight)).sum();
                let off = (sum - (1 << taps.precision)).unsigned_abs() as usize;
                assert!(off <= weights.len(), "{old} to {new}: {sum} is not 2^{}", taps.precision);
                let sizes: i32 = weights.iter().map(|weight| i32::from(*weight).abs()).sum();
                assert!(sizes < 1 << 23, "{old} to {new}: {sizes}");
            }
        }
    }
}
