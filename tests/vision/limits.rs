//! What a picture may cost: limits that the header decides, and budgets of a request.

use std::time::{Duration, Instant};

use image::codecs::png::{CompressionType, FilterType, PngEncoder};
use image::{ExtendedColorType, ImageEncoder};
use vision::{Budget, Format, Header, Limits, PictureError, Preprocess, Spent, picture_patches, read_header};

use crate::{decoded, file};

/// A PNG of one colour: a small file of any size.
fn one_colour(width: u32, height: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    let pixels = vec![200u8; width as usize * height as usize];
    PngEncoder::new_with_quality(&mut bytes, CompressionType::Default, FilterType::NoFilter)
        .write_image(&pixels, width, height, ExtendedColorType::L8)
        .unwrap();
    bytes
}

#[test]
fn twelve_thousand_squared_is_refused_before_a_pixel_is_decoded() {
    let bytes = one_colour(12_000, 12_000);
    let begin = Instant::now();
    assert!(bytes.len() < 1 << 20, "{} bytes", bytes.len());
    let error = vision::decode(&bytes, &Limits::default()).unwrap_err();
    // Decoding takes longer than this by far on any machine.
    assert!(begin.elapsed() < Duration::from_millis(20), "{:?}", begin.elapsed());
    assert_eq!(error, PictureError::Pixels { width: 12_000, height: 12_000, limit: 1 << 26 });
    assert!(error.to_string().contains("12000 x 12000 = 144000000 pixels; at most 67108864"), "{error}");

    // It is a picture like any other where the limits are higher.
    let wide = Limits { pixels: 1 << 28, ..Limits::default() };
    assert_eq!(read_header(&bytes, &wide).unwrap().pixels(), 144_000_000);
    let picture = vision::decode(&bytes, &wide).unwrap();
    let patches = picture_patches(&picture, &Preprocess::PICTURE).unwrap();
    assert_eq!(patches.grid.rows(2), 16_384);
    assert!(patches.bytes.iter().all(|byte| *byte == 200));
}

#[test]
fn each_limit_names_itself_and_the_sizes() {
    let bytes = file("rgba.png");
    let limits = Limits::default();
    let refused = |limits: Limits| vision::decode(&bytes, &limits).unwrap_err();

    let error = refused(Limits { bytes: 100, ..limits });
    assert_eq!(error, PictureError::Bytes { bytes: bytes.len(), limit: 100 });
    let error = refused(Limits { pixels: 383, ..limits });
    assert_eq!(error, PictureError::Pixels { width: 24, height: 16, limit: 383 });
    // Four bytes of RGBA and three of RGB for each pixel.
    let error = refused(Limits { memory: 24 * 16 * 7 - 1, ..limits });
    assert_eq!(error, PictureError::Memory { width: 24, height: 16, bytes: 2688, limit: 2687 });
    assert!(error.to_string().contains("24 x 16") && error.to_string().contains("2687"), "{error}");
    let exact = Limits { bytes: bytes.len(), pixels: 384, memory: 1 << 20 };
    assert!(vision::decode(&bytes, &exact).is_ok());
}

#[test]
fn odd_sizes_are_scaled_or_refused() {
    let sizes = [(1, 1, 64), (1, 40, 0), (27, 257, 0), (26, 28, 0), (1000, 5, 0), (5, 1000, 0)];
    for (width, height, rows) in sizes {
        let patches = picture_patches(&decoded(&one_colour(width, height)), &Preprocess::PICTURE).unwrap();
        let got = patches.grid.rows(2);
        assert!(got >= 64 && (rows == 0 || got == rows), "{width} x {height}: {got} rows");
        assert!(patches.bytes.iter().all(|byte| *byte == 200), "{width} x {height}");
    }
    for (width, height) in [(1005, 5), (5, 1005), (201, 1)] {
        let error = vision::decode(&one_colour(width, height), &Limits::default()).unwrap_err();
        assert_eq!(error, PictureError::Ratio { width, height });
        assert!(error.to_string().contains("at most 200 times"), "{error}");
    }
}

#[test]
fn sizes_that_a_file_only_claims_cost_nothing() {
    // A GIF whose first frame is larger than its screen.
    let mut gif = file("still.gif");
    let frame = gif.windows(10).position(|w| w[0] == 0x2c && w[5..9] == [24, 0, 16, 0]).unwrap();
    gif[frame + 5..frame + 9].fill(0xff);
    assert!(matches!(vision::decode(&gif, &Limits::default()), Err(PictureError::Beyond { .. })));

    // A lossy WebP whose frame is larger than its canvas.
    let mut webp = file("lossy_alpha.webp");
    let frame = webp.windows(3).position(|w| *w == [0x9d, 0x01, 0x2a]).unwrap() + 3;
    webp[frame..frame + 4].copy_from_slice(&[0xff, 0x3f, 0xff, 0x3f]);
    let error = vision::decode(&webp, &Limits::default()).unwrap_err();
    assert!(error.to_string().contains("larger than the whole"), "{error}");
}

/// The checksum of a PNG's chunk.
fn crc(bytes: &[u8]) -> [u8; 4] {
    let byte = |crc: u32, byte: &u8| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| crc >> 1 ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 })
    };
    (!bytes.iter().fold(!0, byte)).to_be_bytes()
}

#[test]
fn a_png_beyond_all_numbers_is_too_large_and_not_damaged() {
    for side in [(1u32 << 31) - 1, 1 << 30] {
        let mut png = one_colour(1, 1);
        // After the signature, and the length and the name of the first chunk.
        png[16..20].copy_from_slice(&side.to_be_bytes());
        png[20..24].copy_from_slice(&side.to_be_bytes());
        let sum = crc(&png[12..29]);
        png[29..33].copy_from_slice(&sum);
        let error = vision::decode(&png, &Limits::default()).unwrap_err().to_string();
        assert!(error.contains("at most 67108864") && !error.contains("damaged"), "{error}");
    }
}

#[test]
fn a_thousand_tiny_pictures_are_quick() {
    let bytes = one_colour(1, 1);
    let begin = Instant::now();
    for _ in 0..1000 {
        let patches = picture_patches(&decoded(&bytes), &Preprocess::PICTURE).unwrap();
        assert_eq!(patches.bytes.len(), 256 * 1536);
    }
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
}

#[test]
fn budgets_are_spent_before_anything_is_decoded() {
    let header = |width, height| Header { format: Format::Png, width, height };
    let budget = Budget { pictures: 3, pixels: 1000 };
    let spent = budget.take(Spent::default(), &[header(10, 10), header(20, 20)]).unwrap();
    assert_eq!(spent, Spent { pictures: 2, pixels: 500 });
    assert_eq!(budget.take(spent, &[header(500, 1)]).unwrap(), Spent { pictures: 3, pixels: 1000 });

    let error = budget.take(spent, &[header(1, 1), header(1, 1)]).unwrap_err();
    assert_eq!(error, PictureError::Count { count: 4, limit: 3 });
    let error = budget.take(spent, &[header(501, 1)]).unwrap_err();
    assert_eq!(error, PictureError::TotalPixels { count: 3, pixels: 1001, limit: 1000 });
    assert!(error.to_string().contains("1001 pixels together; at most 1000"), "{error}");
    let huge = [header(u32::MAX, u32::MAX); 2];
    assert!(matches!(budget.take(spent, &huge[..1]), Err(PictureError::TotalPixels { .. })));
}
