//! A picture: rows of 8-bit RGB pixels, and how other pixels become such.

use image::ColorType;
use rayon::prelude::*;

use crate::PictureError;

/// Pixels of a still picture or a frame, as people should see it: turned upright, and opaque.
#[derive(Clone, PartialEq, Eq)]
pub struct Picture {
    width: u32,
    height: u32,
    rgb: Vec<u8>,
}

impl Picture {
    /// `rgb` has `height` rows of `width` pixels of three bytes: red, green, blue.
    pub fn new(width: u32, height: u32, rgb: Vec<u8>) -> Result<Picture, PictureError> {
        let bytes = u128::from(width) * u128::from(height) * 3;
        if bytes == 0 || bytes != rgb.len() as u128 {
            return Err(PictureError::Shape { width, height, bytes: rgb.len() });
        }
        Ok(Picture { width, height, rgb })
    }

    /// Columns.
    pub fn width(&self) -> u32 {
        self.width
    }

    /// Rows.
    pub fn height(&self) -> u32 {
        self.height
    }

    /// The pixels, `[height, width, 3]`.
    pub fn rgb(&self) -> &[u8] {
        &self.rgb
    }

    /// The pixels, given away.
    pub(crate) fn into_rgb(self) -> Vec<u8> {
        self.rgb
    }
}

impl std::fmt::Debug for Picture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Picture({} x {})", self.width, self.height)
    }
}

/// Pixels of a decoder as RGB: gray is repeated, 16 bits give their high byte, and what is transparent lies on white.
/// `None` for a kind of pixel that no decoder here makes.
pub(crate) fn opaque(pixels: Vec<u8>, color: ColorType) -> Option<Vec<u8>> {
    // Decoders store 16-bit values in the order of this machine.
    let high = |value: [u8; 2]| (u16::from_ne_bytes(value) >> 8) as u8;
    Some(match color {
        ColorType::Rgb8 => pixels,
        ColorType::L8 => each(&pixels, |[gray]: [u8; 1]| [gray; 3]),
        ColorType::La8 => each(&pixels, |[gray, alpha]| [on_white(gray, alpha); 3]),
        ColorType::Rgba8 => each(&pixels, |[r, g, b, alpha]| [r, g, b].map(|value| on_white(value, alpha))),
        ColorType::L16 => each(&pixels, |gray| [high(gray); 3]),
        ColorType::La16 => each(&pixels, |[g0, g1, a0, a1]| [on_white(high([g0, g1]), high([a0, a1])); 3]),
        ColorType::Rgb16 => {
            each(&pixels, |[r0, r1, g0, g1, b0, b1]| [[r0, r1], [g0, g1], [b0, b1]].map(high))
        }
        ColorType::Rgba16 => each(&pixels, |[r0, r1, g0, g1, b0, b1, a0, a1]| {
            [[r0, r1], [g0, g1], [b0, b1]].map(|value| on_white(high(value), high([a0, a1])))
        }),
        _ => return None,
    })
}

fn each<const N: usize>(pixels: &[u8], rgb: impl Fn([u8; N]) -> [u8; 3] + Sync) -> Vec<u8> {
    const RUN: usize = 1 << 16;
    let pixels = pixels.as_chunks::<N>().0;
    let mut out = vec![0; pixels.len() * 3];
    out.par_chunks_mut(3 * RUN).zip(pixels.par_chunks(RUN)).for_each(|(out, pixels)| {
        for (out, pixel) in out.as_chunks_mut::<3>().0.iter_mut().zip(pixels) {
            *out = rgb(*pixel);
        }
    });
    out
}

/// `round((value * alpha + 255 * (255 - alpha)) / 255)`.
fn on_white(value: u8, alpha: u8) -> u8 {
    let sum = u32::from(value) * u32::from(alpha) + 255 * u32::from(255 - alpha);
    ((sum + 127) / 255) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transparency_shows_white() {
        assert_eq!([on_white(0, 0), on_white(7, 0), on_white(0, 255), on_white(9, 255)], [255, 255, 0, 9]);
        for value in 0..=255u8 {
            for alpha in 0..=255u8 {
                let (v, a) = (f64::from(value), f64::from(alpha));
                let exact = (v * a + 255.0 * (255.0 - a)) / 255.0;
                assert_eq!(f64::from(on_white(value, alpha)), exact.round(), "{value} {alpha}");
            }
        }
    }

    #[test]
    fn pixels_must_fill_the_picture() {
        assert!(Picture::new(2, 1, vec![0; 6]).is_ok());
        for (width, height, bytes) in [(2, 1, 5), (2, 1, 7), (0, 1, 0), (1, 0, 0), (u32::MAX, u32::MAX, 3)] {
            let error = Picture::new(width, height, vec![0; bytes]).unwrap_err();
            assert_eq!(error, PictureError::Shape { width, height, bytes });
        }
    }
}
