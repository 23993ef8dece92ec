//! Which size is a picture resized to? Sides become multiples of a merged square, and the area fits the model's range.
//!
//! Source: `smart_resize` of the Qwen2-VL picture processor and of the Qwen3-VL video processor.

use crate::{PictureError, Preprocess};

/// The longer side is at most this many times the shorter.
pub const MAX_RATIO: u32 = 200;

/// Columns and rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Size {
    /// Columns.
    pub width: u32,
    /// Rows.
    pub height: u32,
}

/// The size to which a still picture is resized: both sides are multiples of [`Preprocess::factor`].
///
/// Rounded sides decide whether the area is out of range; the factor that brings it back is that of the given sides.
pub fn picture_size(size: Size, settings: &Preprocess) -> Result<Size, PictureError> {
    check_ratio(size.width, size.height)?;
    Ok(fit(size, 1, 1, settings))
}

/// The size to which the `frames` chosen frames of a video are resized. The range holds for all of them together.
pub fn video_size(size: Size, frames: usize, settings: &Preprocess) -> Result<Size, PictureError> {
    check_ratio(size.width, size.height)?;
    let factor = f64::from(settings.factor());
    let (width, height) = (f64::from(size.width), f64::from(size.height));
    let mut size = size;
    if width < factor || height < factor {
        let scale = (factor / height).max(factor / width);
        size = Size { width: (width * scale) as u32, height: (height * scale) as u32 };
        check_ratio(size.width, size.height)?;
    }
    let group = settings.frames as usize;
    let rounded = (frames as f64 / group as f64).round_ties_even() as usize * group;
    Ok(fit(size, frames, rounded, settings))
}

/// Refuses a side of length zero, and one that is too long beside the other.
pub(crate) fn check_ratio(width: u32, height: u32) -> Result<(), PictureError> {
    let (short, long) = (width.min(height), width.max(height));
    if short == 0 || u64::from(long) > u64::from(short) * u64::from(MAX_RATIO) {
        return Err(PictureError::Ratio { width, height });
    }
    Ok(())
}

/// `frames` scales the area of the given sides, `rounded` that of rounded sides.
fn fit(size: Size, frames: usize, rounded: usize, settings: &Preprocess) -> Size {
    let factor = f64::from(settings.factor());
    let (min, max) = (settings.min_pixels as f64, settings.max_pixels as f64);
    let (width, height) = (f64::from(size.width), f64::from(size.height));
    let nearest = |side: f64| (side / factor).round_ties_even() * factor;
    let area = rounded as f64 * nearest(height) * nearest(width);
    let given = frames as f64 * height * width;
    let side: &dyn Fn(f64) -> f64 = if area > max {
        let shrink = (given / max).sqrt();
        &move |side| ((side / shrink / factor).floor() * factor).max(factor)
    } else if area < min {
        let grow = (min / given).sqrt();
        &move |side| (side * grow / factor).ceil() * factor
    } else {
        &nearest
    };
    Size { width: side(width) as u32, height: side(height) as u32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(height: u32, width: u32) -> [u32; 2] {
        let size = picture_size(Size { width, height }, &Preprocess::PICTURE).unwrap();
        [size.height, size.width]
    }

    fn video(frames: usize, height: u32, width: u32) -> [u32; 2] {
        let size = video_size(Size { width, height }, frames, &Preprocess::VIDEO).unwrap();
        [size.height, size.width]
    }

    #[test]
    fn sizes_of_known_pictures() {
        let known = [
            ([480, 640], [480, 640]),
            ([1080, 1920], [1088, 1920]),
            ([100, 100], [256, 256]),
            ([5000, 7000], [3456, 4832]),
            ([720, 1280], [704, 1280]),
            ([48, 1000], [64, 1184]),
        ];
        for ([height, width], resized) in known {
            assert_eq!(picture(height, width), resized, "{height} x {width}");
        }
    }

    #[test]
    fn sizes_of_known_videos() {
        assert_eq!(video(20, 720, 1280), [704, 1280]);
        assert_eq!(video(5, 360, 480), [352, 480]);
        assert_eq!(video(768, 1080, 1920), [128, 224]);
    }

    #[test]
    fn a_ratio_of_200_is_the_most() {
        assert_eq!(picture(5, 1000)[0], 32);
        assert_eq!(picture(1, 1), [256, 256]);
        let error = picture_size(Size { width: 1005, height: 5 }, &Preprocess::PICTURE).unwrap_err();
        assert_eq!(error, PictureError::Ratio { width: 1005, height: 5 });
        let error = video_size(Size { width: 5, height: 1005 }, 4, &Preprocess::VIDEO).unwrap_err();
        assert_eq!(error, PictureError::Ratio { width: 5, height: 1005 });
    }
}
