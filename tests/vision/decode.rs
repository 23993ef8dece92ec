//! Every kind of pixel in every format, against another reader.

use image::{ExtendedColorType, ImageEncoder};
use vision::{Format, Limits, PictureError, read_header};

use crate::{decoded, difference, file};

/// Kinds of files, and how far the other reader's values may be: lossy formats leave a decoder some freedom in its
/// inverse transforms and in how it widens the colour planes.
const KINDS: [(&str, Format, u8); 25] = [
    ("one_bit.png", Format::Png, 0),
    ("palette.png", Format::Png, 0),
    ("palette_alpha.png", Format::Png, 0),
    ("palette_two_bits.png", Format::Png, 0),
    ("gray_alpha.png", Format::Png, 0),
    ("gray_key.png", Format::Png, 0),
    ("rgb_key.png", Format::Png, 0),
    ("rgba.png", Format::Png, 0),
    ("animated.png", Format::Png, 0),
    ("gray.jpg", Format::Jpeg, 1),
    ("baseline.jpg", Format::Jpeg, 2),
    ("subsampled.jpg", Format::Jpeg, 4),
    ("progressive.jpg", Format::Jpeg, 4),
    ("cmyk.jpg", Format::Jpeg, 2),
    ("ycck.jpg", Format::Jpeg, 2),
    ("lossless.webp", Format::WebP, 0),
    ("lossless_alpha.webp", Format::WebP, 0),
    ("lossy.webp", Format::WebP, 1),
    ("lossy_alpha.webp", Format::WebP, 1),
    ("animated.webp", Format::WebP, 0),
    ("still.gif", Format::Gif, 0),
    ("transparent.gif", Format::Gif, 0),
    ("animated.gif", Format::Gif, 0),
    ("rgb.bmp", Format::Bmp, 0),
    ("palette.bmp", Format::Bmp, 0),
];

#[test]
fn every_kind_of_file_is_read_as_another_reader_does() {
    let mut wrong = Vec::new();
    for (name, format, allowed) in KINDS {
        let bytes = file(name);
        let header = read_header(&bytes, &Limits::default()).unwrap();
        assert_eq!((header.format, header.width, header.height), (format, 24, 16), "{name}");
        let expected = decoded(&file(&format!("{}.expected.png", name.replace('.', "_"))));
        let off = difference(&decoded(&bytes), &expected);
        if off > allowed {
            wrong.push(format!("{name} is off by {off}; allowed {allowed}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A PNG of 16 x 16 such pixels.
fn png(pixel: &[u8], color: ExtendedColorType) -> Vec<u8> {
    let mut bytes = Vec::new();
    image::codecs::png::PngEncoder::new(&mut bytes).write_image(&pixel.repeat(256), 16, 16, color).unwrap();
    bytes
}

#[test]
fn sixteen_bits_give_their_high_byte_and_alpha_shows_white() {
    let wide = |values: &[u16]| values.iter().flat_map(|value| value.to_ne_bytes()).collect::<Vec<u8>>();
    let kinds = [
        (vec![77], ExtendedColorType::L8, [77; 3]),
        (vec![0, 255], ExtendedColorType::La8, [0; 3]),
        (vec![0, 0], ExtendedColorType::La8, [255; 3]),
        (vec![1, 2, 3], ExtendedColorType::Rgb8, [1, 2, 3]),
        (vec![100, 0, 255, 51], ExtendedColorType::Rgba8, [224, 204, 255]),
        (wide(&[0x12ff]), ExtendedColorType::L16, [0x12; 3]),
        (wide(&[0x12ff, 0xffff]), ExtendedColorType::La16, [0x12; 3]),
        (wide(&[0x12ff, 0x00ff]), ExtendedColorType::La16, [255; 3]),
        (wide(&[0x01ff, 0xff00, 0x8000]), ExtendedColorType::Rgb16, [0x01, 0xff, 0x80]),
        (wide(&[0x01ff, 0xff00, 0x8000, 0xff80]), ExtendedColorType::Rgba16, [0x01, 0xff, 0x80]),
    ];
    for (pixel, color, expected) in kinds {
        let picture = decoded(&png(&pixel, color));
        assert!(picture.rgb().as_chunks().0.iter().all(|rgb| *rgb == expected), "{color:?} {pixel:?}");
    }
}

#[test]
fn black_text_on_nothing_is_black_on_white() {
    let mut pixels = [0u8; 4 * 64];
    pixels[4 * 9 + 3] = 255;
    let mut bytes = Vec::new();
    image::codecs::png::PngEncoder::new(&mut bytes)
        .write_image(&pixels, 8, 8, ExtendedColorType::Rgba8)
        .unwrap();
    let picture = decoded(&bytes);
    for (index, rgb) in picture.rgb().as_chunks::<3>().0.iter().enumerate() {
        assert_eq!(*rgb, if index == 9 { [0; 3] } else { [255; 3] }, "pixel {index}");
    }
}

#[test]
fn other_types_are_refused_by_name() {
    let cases: [(&[u8], &str); 7] = [
        (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC"),
        (b"\0\0\0\x1cftypavif\0\0\0\0", "AVIF"),
        (b"II*\0\x08\0\0\0", "TIFF"),
        (b"%PDF-1.7", "PDF"),
        (b"<svg xmlns=\"http://www.w3.org/2000/svg\"/>", "SVG"),
        (b"hello, I am a picture", "no picture of a known format"),
        (b"", "no picture of a known format"),
    ];
    for (bytes, named) in cases {
        for error in [
            vision::decode(bytes, &Limits::default()).unwrap_err(),
            read_header(bytes, &Limits::default()).unwrap_err(),
        ] {
            assert!(matches!(error, PictureError::UnknownFormat { .. }), "{error:?}");
            let text = error.to_string();
            assert!(text.contains(named) && text.contains("PNG, JPEG, WebP, GIF or BMP"), "{text}");
        }
    }
}

#[test]
fn what_jpeg_has_and_we_do_not_read_is_refused_by_name() {
    // Twelve bits in place of eight, and arithmetic coding in place of Huffman's.
    for (offset, byte) in [(4, 12), (1, 0xc9)] {
        let mut bytes = file("gray.jpg");
        let frame = bytes.array_windows().position(|pair| *pair == [0xff, 0xc0]).unwrap();
        bytes[frame + offset] = byte;
        let error = vision::decode(&bytes, &Limits::default()).unwrap_err();
        assert!(error.to_string().contains("JPEG"), "{error}");
    }
}
