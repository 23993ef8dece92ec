//! Files that are cut or damaged: the whole picture or a refusal, never a part of it, never a panic.

use proptest::prelude::*;
use vision::{Limits, PictureError};

use crate::{decoded, file};

const FILES: [&str; 14] = [
    "rgba.png",
    "palette_alpha.png",
    "animated.png",
    "baseline.jpg",
    "progressive.jpg",
    "cmyk.jpg",
    "lossless_alpha.webp",
    "lossy.webp",
    "lossy_alpha.webp",
    "animated.webp",
    "still.gif",
    "animated.gif",
    "rgb.bmp",
    "palette.bmp",
];

#[test]
fn a_file_cut_at_any_length_is_whole_or_refused() {
    let mut wrong = Vec::new();
    for name in FILES {
        let bytes = file(name);
        let whole = decoded(&bytes);
        let mut shortest = bytes.len();
        for length in 0..bytes.len() {
            match vision::decode(&bytes[..length], &Limits::default()) {
                Ok(picture) if picture == whole => shortest = shortest.min(length),
                Ok(_) => {
                    wrong.push(format!("{name} cut to {length} of {} shows something else", bytes.len()))
                }
                Err(PictureError::Broken { .. } | PictureError::UnknownFormat { .. }) => {}
                Err(error) => wrong.push(format!("{name} cut to {length}: {error}")),
            }
        }
        // All but its last bytes must matter, or nothing was tested.
        assert!(shortest > bytes.len() / 4, "{name}: {shortest} of {} are enough", bytes.len());
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// A picture of some size, or an error; and it stays within small limits.
    #[test]
    fn damaged_bytes_do_no_harm(
        choice in 0..FILES.len(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let limits = Limits { bytes: 4096, pixels: 1 << 16, memory: 1 << 20 };
        let mut bytes = file(FILES[choice]);
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(picture) = vision::decode(&bytes, &limits) {
            prop_assert!(u64::from(picture.width()) * u64::from(picture.height()) <= limits.pixels);
        }
    }
}
