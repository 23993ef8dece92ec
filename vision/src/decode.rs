//! Bytes to pixels. Everything that limits can decide is decided from the header, before a pixel is decoded.

use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};

use image::codecs::{
    bmp::BmpDecoder, gif::GifDecoder, jpeg::JpegDecoder, png::PngDecoder, webp::WebPDecoder,
};
use image::metadata::Orientation;
use image::{ColorType, DynamicImage, ImageDecoder, ImageError, RgbImage};

use crate::format;
use crate::picture::opaque;
use crate::size::check_ratio;
use crate::{Format, Picture, PictureError};

/// What a picture may cost. Each limit that is met is an error that names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most bytes of a file.
    pub bytes: usize,
    /// Most pixels, width times height.
    pub pixels: u64,
    /// Most bytes of memory that decoding takes beside the file, by the decoder's own buffers and ours.
    pub memory: u64,
}

/// Bytes that a PNG's decoder may take beside the file's own for what is no pixel: a row, and a colour profile, which is
/// packed and read for nothing. One that is larger is left out.
const BESIDE_PIXELS: usize = 16 << 20;

impl Default for Limits {
    /// 32 MiB of file, 2^26 pixels (8,192 x 8,192, four times what a model sees at most), 1 GiB of memory. A photo of 50
    /// megapixels passes; 12,000 x 12,000 is refused, whatever its colours.
    fn default() -> Self {
        Self { bytes: 32 << 20, pixels: 1 << 26, memory: 1 << 30 }
    }
}

/// What the first bytes of a picture say, within the limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The format that the bytes have.
    pub format: Format,
    /// Columns of the picture when it is upright.
    pub width: u32,
    /// Rows of the picture when it is upright.
    pub height: u32,
}

impl Header {
    /// Width times height.
    pub fn pixels(&self) -> u64 {
        u64::from(self.width) * u64::from(self.height)
    }
}

/// Format and size of a picture, without decoding pixels. Fails as [`decode`] would for each limit.
pub fn read_header(bytes: &[u8], limits: &Limits) -> Result<Header, PictureError> {
    contained(bytes, || Opened::new(bytes, limits).map(|opened| opened.header))
}

/// Decodes a picture: upright by its EXIF orientation, transparent parts on white, 8 bits a colour (the high byte of 16).
///
/// Of an animation it is the first frame (of a PNG the picture that readers without animation show). Colour profiles are
/// not applied, and CMYK is read as Adobe writes it, inverted; the reference does the same.
///
/// # Errors
/// Formats other than [`Format`], a limit that is met, files that are damaged or cut. It does not panic.
pub fn decode(bytes: &[u8], limits: &Limits) -> Result<Picture, PictureError> {
    contained(bytes, || Opened::new(bytes, limits)?.pixels(limits))
}

struct Opened<'a> {
    header: Header,
    color: ColorType,
    orientation: Orientation,
    decoder: Box<dyn ImageDecoder + 'a>,
}

impl<'a> Opened<'a> {
    fn new(bytes: &'a [u8], limits: &Limits) -> Result<Self, PictureError> {
        if bytes.len() > limits.bytes {
            return Err(PictureError::Bytes { bytes: bytes.len(), limit: limits.bytes });
        }
        let format = Format::of(bytes).map_err(|found| PictureError::UnknownFormat { found })?;
        let error = |error| translate(format, error, limits);
        let mut allocations = image::Limits::no_limits();
        allocations.max_alloc = Some(limits.memory);
        let mut beside = allocations.clone();
        beside.max_alloc = Some(limits.memory.min((bytes.len() + BESIDE_PIXELS) as u64));
        let input = Cursor::new(bytes);
        let mut decoder: Box<dyn ImageDecoder + 'a> = match format {
            Format::Png => Box::new(PngDecoder::with_limits(input, beside).map_err(error)?),
            Format::Jpeg => Box::new(JpegDecoder::new(input).map_err(error)?),
            Format::WebP => Box::new(WebPDecoder::new(input).map_err(error)?),
            Format::Gif => Box::new(GifDecoder::new(input).map_err(error)?),
            Format::Bmp => Box::new(BmpDecoder::new(input).map_err(error)?),
        };
        let (width, height) = decoder.dimensions();
        let broken = |detail: &str| Err(PictureError::Broken { format, detail: detail.into() });
        if width == 0 || height == 0 {
            return broken(&format!("its size is {width} x {height}"));
        }
        let pixels = u64::from(width) * u64::from(height);
        if pixels > limits.pixels {
            return Err(PictureError::Pixels { width, height, limit: limits.pixels });
        }
        check_ratio(width, height)?;
        let color = decoder.color_type();
        let taken = pixels.saturating_mul(memory_per_pixel(format, color));
        if taken > limits.memory {
            return Err(PictureError::Memory { width, height, bytes: taken, limit: limits.memory });
        }
        match format {
            Format::Jpeg if !format::jpeg_has_end(bytes) => return broken("it ends before its end marker"),
            Format::WebP if !format::webp_fits(bytes, (width, height)) => {
                return broken("a part of it is larger than the whole");
            }
            _ => {}
        }
        decoder.set_limits(allocations).map_err(error)?;
        let orientation = orientation(format, bytes, &mut *decoder);
        let (width, height) = if turns(orientation) { (height, width) } else { (width, height) };
        Ok(Self { header: Header { format, width, height }, color, orientation, decoder })
    }

    fn pixels(self, limits: &Limits) -> Result<Picture, PictureError> {
        let format = self.header.format;
        let (width, height) = self.decoder.dimensions();
        let mut pixels = vec![0; self.decoder.total_bytes() as usize];
        self.decoder.read_image(&mut pixels).map_err(|error| translate(format, error, limits))?;
        let rgb = opaque(pixels, self.color).ok_or_else(|| PictureError::Unsupported {
            format,
            detail: format!("pixels of kind {:?}", self.color),
        })?;
        let picture = Picture::new(width, height, rgb)?;
        if self.orientation == Orientation::NoTransforms {
            return Ok(picture);
        }
        let stored =
            RgbImage::from_raw(width, height, picture.into_rgb()).expect("it is as large as it says");
        let mut upright = DynamicImage::ImageRgb8(stored);
        upright.apply_orientation(self.orientation);
        Picture::new(self.header.width, self.header.height, upright.into_bytes())
    }
}

/// Bytes of memory that decoding takes for a pixel: the decoder's buffers beside its result, then result and RGB, then two
/// of RGB to turn it.
fn memory_per_pixel(format: Format, color: ColorType) -> u64 {
    let result = u64::from(color.bytes_per_pixel());
    let buffers = match format {
        // Rows only.
        Format::Png | Format::Bmp => 0,
        // Coefficients of a progressive file: 16 bits, up to four components.
        Format::Jpeg => 8,
        // The canvas and the frame of an animation; a still one has less.
        Format::WebP => 8,
        // A first frame that does not fill the screen.
        Format::Gif => 4,
    };
    (buffers + result).max(result + 3).max(6)
}

fn turns(orientation: Orientation) -> bool {
    use Orientation::*;
    matches!(orientation, Rotate90 | Rotate270 | Rotate90FlipH | Rotate270FlipH)
}

/// The orientation that EXIF data names; damaged data names none, as in other readers.
fn orientation(format: Format, bytes: &[u8], decoder: &mut dyn ImageDecoder) -> Orientation {
    let exif = match format {
        Format::Png => format::png_exif(bytes).map(<[u8]>::to_vec),
        _ => decoder.exif_metadata().ok().flatten(),
    };
    // Some writers keep JPEG's name of the data in other formats.
    let body = |exif: &[u8]| Orientation::from_exif_chunk(exif.strip_prefix(b"Exif\0\0").unwrap_or(exif));
    exif.and_then(|exif| body(&exif)).unwrap_or(Orientation::NoTransforms)
}

/// Runs a decoder on bytes that anyone may have written. A decoder that panics has met a broken file and nothing else: its
/// state is gone with it, and other pictures do not share any.
fn contained<T>(bytes: &[u8], f: impl FnOnce() -> Result<T, PictureError>) -> Result<T, PictureError> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|_| {
        let format = Format::of(bytes).map_err(|found| PictureError::UnknownFormat { found })?;
        Err(PictureError::Broken { format, detail: "the decoder gave up".into() })
    })
}

fn translate(format: Format, error: ImageError, limits: &Limits) -> PictureError {
    match error {
        ImageError::Limits(_) => {
            PictureError::Beyond { format, pixels: limits.pixels, memory: limits.memory }
        }
        ImageError::Unsupported(error) => PictureError::Unsupported { format, detail: error.to_string() },
        error => PictureError::Broken { format, detail: error.to_string() },
    }
}
