//! EXIF orientation: a picture that was stored turned or mirrored is the same picture, in every format that has the tag.

use image::{ExtendedColorType, ImageEncoder};
use vision::{Limits, Picture, read_header};

use crate::{decoded, difference};

/// EXIF data with one entry: the orientation.
fn exif(orientation: u8, big: bool) -> Vec<u8> {
    let o = orientation;
    if big {
        [b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0".as_slice(), &[o, 0, 0, 0, 0, 0, 0]].concat()
    } else {
        [b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0".as_slice(), &[o, 0, 0, 0, 0, 0, 0, 0]].concat()
    }
}

/// An upright picture of 24 x 16 smooth enough for JPEG, no two corners alike.
fn upright() -> Picture {
    let rgb = (0..16).flat_map(|y| (0..24).flat_map(move |x| [x * 10, y * 15, 255 - x * 5 - y * 5]));
    Picture::new(24, 16, rgb.collect()).unwrap()
}

/// How a camera that writes `orientation` stores the picture: pixel (x, y) of what it stores is which of the upright one?
fn stored(orientation: u8) -> Picture {
    let upright = upright();
    let (w, h) = (24u32, 16u32);
    let (width, height) = if orientation >= 5 { (h, w) } else { (w, h) };
    let from = |x: u32, y: u32| match orientation {
        1 => (x, y),
        2 => (w - 1 - x, y),
        3 => (w - 1 - x, h - 1 - y),
        4 => (x, h - 1 - y),
        5 => (y, x),
        6 => (w - 1 - y, x),
        7 => (w - 1 - y, h - 1 - x),
        _ => (y, h - 1 - x),
    };
    let mut rgb = Vec::new();
    for y in 0..height {
        for x in 0..width {
            let (x, y) = from(x, y);
            rgb.extend(&upright.rgb()[3 * (y * w + x) as usize..][..3]);
        }
    }
    Picture::new(width, height, rgb).unwrap()
}

fn jpeg(picture: &Picture, exif: Vec<u8>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = image::codecs::jpeg::JpegEncoder::new_with_quality(&mut bytes, 100);
    encoder.set_exif_metadata(exif).unwrap();
    encoder.write_image(picture.rgb(), picture.width(), picture.height(), ExtendedColorType::Rgb8).unwrap();
    bytes
}

fn png(picture: &Picture, exif: Vec<u8>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = image::codecs::png::PngEncoder::new(&mut bytes);
    encoder.set_exif_metadata(exif).unwrap();
    encoder.write_image(picture.rgb(), picture.width(), picture.height(), ExtendedColorType::Rgb8).unwrap();
    bytes
}

fn webp(picture: &Picture, exif: Vec<u8>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = image::codecs::webp::WebPEncoder::new_lossless(&mut bytes);
    encoder.set_exif_metadata(exif).unwrap();
    encoder.write_image(picture.rgb(), picture.width(), picture.height(), ExtendedColorType::Rgb8).unwrap();
    bytes
}

/// Moves a PNG's EXIF data behind its pixels, where the format allows it too.
fn moved(png: &[u8]) -> Vec<u8> {
    let at = |name: &[u8]| png.windows(4).position(|window| window == name).unwrap() - 4;
    let (exif, end) = (at(b"eXIf"), at(b"IEND"));
    let length = 12 + u32::from_be_bytes(png[exif..exif + 4].try_into().unwrap()) as usize;
    [&png[..exif], &png[exif + length..end], &png[exif..exif + length], &png[end..]].concat()
}

#[test]
fn all_eight_orientations_are_one_picture() {
    let upright = upright();
    for orientation in 1..=8 {
        let stored = stored(orientation);
        for big in [false, true] {
            let exif = exif(orientation, big);
            let named = [b"Exif\0\0", &exif[..]].concat();
            let files = [
                ("JPEG", jpeg(&stored, exif.clone()), 6),
                ("PNG", png(&stored, exif.clone()), 0),
                ("PNG, behind the pixels", moved(&png(&stored, exif.clone())), 0),
                ("WebP", webp(&stored, exif.clone()), 0),
                ("WebP, with JPEG's name of the data", webp(&stored, named), 0),
            ];
            for (format, bytes, allowed) in files {
                let header = read_header(&bytes, &Limits::default()).unwrap();
                assert_eq!([header.width, header.height], [24, 16], "{format}, orientation {orientation}");
                let off = difference(&decoded(&bytes), &upright);
                assert!(off <= allowed, "{format}, orientation {orientation}: off by {off}");
            }
        }
    }
}

#[test]
fn damaged_tags_turn_nothing() {
    let stored = stored(1);
    for exif in [vec![], vec![0; 4], exif(0, false), exif(9, true), b"II*\0\xff\xff\xff\xff".to_vec()] {
        assert_eq!(decoded(&png(&stored, exif)).rgb(), stored.rgb());
    }
}
