//! Which format are these bytes, and is the file whole? Decided by the bytes; names and media types are never asked.

use std::fmt;

/// A picture format that is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Format {
    /// PNG; of an animation, the picture that other readers show.
    Png,
    /// JPEG: baseline and progressive, 8 bits; gray, YCbCr, RGB, CMYK, YCCK.
    Jpeg,
    /// WebP, lossy and lossless; of an animation, the first frame.
    WebP,
    /// GIF, the first frame.
    Gif,
    /// BMP.
    Bmp,
}

impl Format {
    /// The formats, as error texts and documents list them.
    pub const LIST: &str = "PNG, JPEG, WebP, GIF or BMP";

    /// The format of `bytes`, or what else they look like.
    pub(crate) fn of(bytes: &[u8]) -> Result<Format, Option<&'static str>> {
        const READ: [(usize, &[u8], Format); 6] = [
            (0, b"\x89PNG\r\n\x1a\n", Format::Png),
            (0, b"\xff\xd8\xff", Format::Jpeg),
            (8, b"WEBP", Format::WebP),
            (0, b"GIF87a", Format::Gif),
            (0, b"GIF89a", Format::Gif),
            (0, b"BM", Format::Bmp),
        ];
        const OTHER: [(usize, &[u8], &str); 18] = [
            (4, b"ftypavif", "AVIF"),
            (4, b"ftypavis", "AVIF"),
            (4, b"ftyphe", "HEIC"),
            (4, b"ftypmif1", "HEIC"),
            (4, b"ftypmsf1", "HEIC"),
            (4, b"ftyp", "a film file (MP4 or QuickTime)"),
            (0, b"\x1a\x45\xdf\xa3", "a film file (Matroska or WebM)"),
            (0, b"II*\0", "TIFF"),
            (0, b"MM\0*", "TIFF"),
            (0, b"\0\0\x01\0", "an icon file (ICO)"),
            (0, b"\0\0\0\x0cJXL ", "JPEG XL"),
            (0, b"\xff\x0a", "JPEG XL"),
            (0, b"\0\0\0\x0cjP  ", "JPEG 2000"),
            (0, b"%PDF", "PDF"),
            (0, b"8BPS", "a Photoshop file"),
            (0, b"<svg", "SVG"),
            (0, b"<?xml", "XML or SVG"),
            (0, b"<", "HTML or XML text"),
        ];
        let starts = |at: usize, magic: &[u8]| bytes.get(at..).is_some_and(|rest| rest.starts_with(magic));
        READ.iter()
            .find(|(at, magic, format)| {
                starts(*at, magic) && (*format != Format::WebP || bytes.starts_with(b"RIFF"))
            })
            .map(|(.., format)| *format)
            .ok_or_else(|| OTHER.iter().find(|(at, magic, _)| starts(*at, magic)).map(|(.., name)| *name))
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Png => "PNG",
            Self::Jpeg => "JPEG",
            Self::WebP => "WebP",
            Self::Gif => "GIF",
            Self::Bmp => "BMP",
        })
    }
}

/// True if a JPEG's scans are followed by an end marker. The decoder shows what a cut file lacks as gray.
pub(crate) fn jpeg_has_end(bytes: &[u8]) -> bool {
    let mut at = 2;
    while let Some([0xff, marker]) = bytes.get(at..at + 2) {
        match marker {
            // Behind the first start of a scan, a byte 0xff that is data has a zero behind it.
            0xda => return bytes[at..].array_windows().any(|pair| *pair == [0xff, 0xd9]),
            0xff => at += 1,
            0x01 | 0xd0..=0xd7 => at += 2,
            _ => match bytes.get(at + 2..at + 4) {
                Some(&[high, low]) => at += 2 + usize::from(u16::from_be_bytes([high, low])).max(2),
                _ => return false,
            },
        }
    }
    false
}

/// The EXIF data of a PNG, wherever it stands: a decoder knows only what comes before the pixels.
pub(crate) fn png_exif(bytes: &[u8]) -> Option<&[u8]> {
    let mut rest = bytes.get(8..)?;
    loop {
        let (length, behind) = rest.split_first_chunk::<4>()?;
        let (kind, behind) = behind.split_first_chunk::<4>()?;
        let length = u32::from_be_bytes(*length) as usize;
        if kind == b"eXIf" {
            return behind.get(..length);
        }
        rest = behind.get(length.checked_add(4)?..)?;
    }
}

/// True if each lossy part of a WebP file that would be decoded is no larger than the canvas, which the limits were
/// compared with: the decoder compares them only when it is done.
pub(crate) fn webp_fits(bytes: &[u8], canvas: (u32, u32)) -> bool {
    let mut animated = false;
    chunks(bytes.get(12..).unwrap_or_default()).all(|(kind, data)| match kind {
        b"VP8 " => lossy_fits(data, canvas),
        // Only the first frame is decoded.
        b"ANMF" if !std::mem::replace(&mut animated, true) => chunks(data.get(16..).unwrap_or_default())
            .all(|(kind, data)| kind != b"VP8 " || lossy_fits(data, canvas)),
        _ => true,
    })
}

fn lossy_fits(data: &[u8], (width, height): (u32, u32)) -> bool {
    let side = |at: usize| data.get(at..at + 2).map(|b| u32::from(u16::from_le_bytes([b[0], b[1]]) & 0x3fff));
    // Without its size it is cut, and the decoder finds that at once.
    side(6).is_none_or(|own| own <= width) && side(8).is_none_or(|own| own <= height)
}

/// The chunks of a RIFF list; the last may be cut.
fn chunks(mut rest: &[u8]) -> impl Iterator<Item = (&[u8; 4], &[u8])> {
    std::iter::from_fn(move || {
        let (kind, behind) = rest.split_first_chunk::<4>()?;
        let (length, behind) = behind.split_first_chunk::<4>()?;
        let length = u32::from_le_bytes(*length) as usize;
        let data = behind.get(..length).unwrap_or(behind);
        rest = behind.get(length + length % 2..).unwrap_or_default();
        Some((kind, data))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_decide_the_format() {
        assert_eq!(Format::of(b"GIF89a..."), Ok(Format::Gif));
        assert_eq!(Format::of(b"RIFF....WEBPVP8 "), Ok(Format::WebP));
        assert_eq!(Format::of(b"RIFX....WEBPVP8 "), Err(None));
        assert_eq!(Format::of(b"\0\0\0\x18ftypheic"), Err(Some("HEIC")));
        assert_eq!(Format::of(b"\0\0\0\x18ftypisom"), Err(Some("a film file (MP4 or QuickTime)")));
        assert_eq!(Format::of(b"<svg xmlns"), Err(Some("SVG")));
        assert_eq!(Format::of(b""), Err(None));
    }

    #[test]
    fn an_end_inside_a_thumbnail_is_not_the_end() {
        let mut file = b"\xff\xd8\xff\xe1\0\x06\xff\xd9\0\0\xff\xda\0\x02data".to_vec();
        assert!(!jpeg_has_end(&file));
        file.extend(b"\xff\xd9");
        assert!(jpeg_has_end(&file));
    }

    #[test]
    fn a_lossy_frame_larger_than_its_canvas_is_seen() {
        let chunk =
            |kind: &[u8; 4], data: &[u8]| [kind, &(data.len() as u32).to_le_bytes()[..], data].concat();
        let frame = chunk(b"VP8 ", &[0, 0, 0, 0x9d, 0x01, 0x2a, 0xff, 0x3f, 4, 0]);
        let still = [b"RIFF....WEBP", &chunk(b"VP8X", &[0; 10])[..], &frame].concat();
        assert!(!webp_fits(&still, (16_382, 4)));
        assert!(webp_fits(&still, (16_383, 4)));
        let first = chunk(b"ANMF", &[&[0; 16][..], &frame].concat());
        let animated = [b"RIFF....WEBP", &first[..], &first].concat();
        assert!(!webp_fits(&animated, (16_383, 3)));
    }
}
