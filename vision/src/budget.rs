//! How many pictures and pixels may come together: decided from headers, before the first of them is decoded.

use crate::{Header, PictureError};

/// The most pictures and pixels of one request, or of all requests that are under way. A frame of a video is a picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Most pictures.
    pub pictures: usize,
    /// Most pixels of all of them, as they are stored.
    pub pixels: u64,
}

/// What some pictures take of a [`Budget`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Spent {
    /// Pictures.
    pub pictures: usize,
    /// Their pixels.
    pub pixels: u64,
}

impl Default for Budget {
    /// 1,024 pictures of 2^28 pixels together: four of the largest, or a video of 768 frames of 640 x 480.
    fn default() -> Self {
        Self { pictures: 1024, pixels: 1 << 28 }
    }
}

impl Budget {
    /// The pictures' part of this budget beside what is spent; an error that names the limit if it is not there.
    pub fn take(&self, spent: Spent, headers: &[Header]) -> Result<Spent, PictureError> {
        let pictures = spent.pictures.saturating_add(headers.len());
        if pictures > self.pictures {
            return Err(PictureError::Count { count: pictures, limit: self.pictures });
        }
        let pixels = headers.iter().fold(spent.pixels, |sum, header| sum.saturating_add(header.pixels()));
        if pixels > self.pixels {
            return Err(PictureError::TotalPixels { count: pictures, pixels, limit: self.pixels });
        }
        Ok(Spent { pictures, pixels })
    }
}
