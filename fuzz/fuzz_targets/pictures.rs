//! Bytes of a picture: pixels within the limits, which become patches, or a refusal. `tests/vision/pictures` is a corpus.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vision::{Limits, Preprocess};

const LIMITS: Limits = Limits { bytes: 1 << 16, pixels: 1 << 18, memory: 1 << 22 };

fuzz_target!(|bytes: &[u8]| {
    let header = vision::read_header(bytes, &LIMITS);
    match vision::decode(bytes, &LIMITS) {
        Ok(picture) => {
            let header = header.expect("what is decoded has a header");
            assert_eq!([header.width, header.height], [picture.width(), picture.height()]);
            assert!(header.pixels() <= LIMITS.pixels);
            let settings = Preprocess { max_pixels: 1 << 18, ..Preprocess::PICTURE };
            let patches = vision::picture_patches(&picture, &settings).expect("its sides were checked");
            assert_eq!(patches.bytes.len(), patches.grid.patches() * settings.patch_values());
        }
        Err(error) => assert!(error.to_string().len() > 20, "{error}"),
    }
});
