//! What holds for every size: resizing, grids, clips and keys.

use proptest::prelude::*;
use serde_json::{Value, json};
use vision::{
    Choice, Clip, ClipBuilder, ContentKey, Grid, Picture, PictureError, Preprocess, SettingsError, Size,
    Times, VideoSettings, choose_frames, picture_patches, picture_size, resize, video_size,
};

use crate::{clip_of, gradient, object};

proptest! {
    #[test]
    fn a_picture_gets_a_size_within_the_range(width in 1u32..20_000, height in 1u32..20_000) {
        let settings = Preprocess::PICTURE;
        let size = Size { width, height };
        let long = width.max(height) > 200 * width.min(height);
        match picture_size(size, &settings) {
            Err(error) => {
                prop_assert!(long);
                prop_assert_eq!(error, PictureError::Ratio { width, height });
            }
            Ok(new) => {
                prop_assert!(!long);
                prop_assert!(new.width.is_multiple_of(32) && new.height.is_multiple_of(32));
                let area = u64::from(new.width) * u64::from(new.height);
                prop_assert!(area >= settings.min_pixels, "{new:?}");
                prop_assert!(area <= settings.max_pixels, "{new:?}");
                // A size that was chosen is kept, unless rounding its sides made one too long.
                match picture_size(new, &settings) {
                    Ok(again) => prop_assert_eq!(again, new),
                    Err(_) => prop_assert!(new.width.max(new.height) > 200 * new.width.min(new.height)),
                }
                let grid = Grid::picture(new, &settings);
                prop_assert_eq!(grid.rows(2) as u64 * 1024, area);
            }
        }
    }

    #[test]
    fn a_video_gets_a_size_within_the_range(
        width in 1u32..4_000, height in 1u32..4_000, frames in 2usize..769,
    ) {
        let settings = Preprocess::VIDEO;
        if let Ok(new) = video_size(Size { width, height }, frames, &settings) {
            prop_assert!(new.width.is_multiple_of(32) && new.height.is_multiple_of(32));
            let area = frames as u64 * u64::from(new.width) * u64::from(new.height);
            // A side is never below 32, so a long thin clip may exceed the range; an odd last frame counts for two.
            let least_side = new.width.min(new.height) == 32;
            prop_assert!(area <= settings.max_pixels + area / 2 || least_side, "{new:?}");
        } else {
            prop_assert!(width.max(height) > 190 * width.min(height));
        }
    }

    #[test]
    fn chosen_frames_ascend_from_the_first_to_the_last(total in 0usize..5_000, fps in 0.5f64..240.0) {
        let settings = VideoSettings::default();
        let chosen = choose_frames(&Times::at_rate(total, Some(fps)).unwrap(), Choice::Settings, &settings);
        if total < 2 {
            prop_assert_eq!(chosen.unwrap_err(), PictureError::Frames { count: total, range: [2, 768] });
        } else {
            let chosen = chosen.unwrap();
            prop_assert!(chosen.len() >= total.min(4) && chosen.len() <= total.min(768));
            prop_assert_eq!((chosen[0], chosen[chosen.len() - 1]), (0, total - 1));
            prop_assert!(chosen.array_windows().all(|[a, b]| a < b));
        }
    }

    #[test]
    fn resizing_keeps_what_is_smooth(width in 1u32..90, height in 1u32..90, new in 1u32..120) {
        let flat = Picture::new(width, height, [7, 130, 255].repeat((width * height) as usize)).unwrap();
        let resized = resize(&flat, Size { width: new, height: 121 - new });
        for pixel in resized.rgb().as_chunks::<3>().0 {
            prop_assert!(pixel[0].abs_diff(7) <= 1 && pixel[1].abs_diff(130) <= 1 && pixel[2] >= 254);
        }
    }
}

#[test]
fn patches_hold_every_pixel_where_it_belongs() {
    // As large as it is resized to.
    let settings = Preprocess { min_pixels: 1, ..Preprocess::PICTURE };
    let picture = gradient(96, 64);
    let patches = picture_patches(&picture, &settings).unwrap();
    assert_eq!(patches.grid, Grid { pairs: 1, height: 4, width: 6 });
    let places = vision::patch_places(patches.grid, 2);
    for (patch, [row, column]) in patches.bytes.chunks(1536).zip(places) {
        for (index, byte) in patch.iter().enumerate() {
            let (colour, y, x) = (index / 512, index / 16 % 16, index % 16);
            let at = (row as usize * 16 + y) * 96 + column as usize * 16 + x;
            assert_eq!(*byte, picture.rgb()[3 * at + colour], "patch {row} {column}, value {index}");
        }
    }
}

fn clip(pictures: &[Picture], seconds: &[f64]) -> Result<Clip, PictureError> {
    clip_of(pictures, seconds.to_vec(), &VideoSettings::default())
}

#[test]
fn an_odd_clip_repeats_its_last_frame() {
    let frames: Vec<Picture> =
        (0..3u8).map(|n| Picture::new(64, 64, vec![n * 50; 12_288]).unwrap()).collect();
    let clip = clip(&frames, &[0.0, 0.5, 1.0]).unwrap();
    assert_eq!(clip.stamps, [0.25, 1.0]);
    let patches = clip.patches;
    assert_eq!(patches.grid, Grid { pairs: 2, height: 4, width: 4 });
    // Each colour has 256 values of the pair's first frame, then of its second.
    for (index, byte) in patches.bytes.iter().enumerate() {
        let (pair, second) = (index / (16 * 1536), index / 256 % 2);
        assert_eq!(usize::from(*byte), (2 * pair + second).min(2) * 50, "value {index}");
    }
}

#[test]
fn clips_that_are_none_are_refused() {
    let frame = gradient(64, 32);
    let refused = |frames: &[Picture], seconds: &[f64]| clip(frames, seconds).unwrap_err();
    let pair = [frame.clone(), frame.clone()];
    assert_eq!(refused(&pair, &[0.0]), PictureError::Frames { count: 1, range: [2, 768] });
    let other = [frame.clone(), gradient(32, 64)];
    let error = refused(&other, &[0.0, 1.0]);
    assert_eq!(error, PictureError::FrameSize { frame: 1, size: [32, 64], given: [64, 32] });
    let bad: [&[f64]; 4] = [&[1.0, 0.5], &[0.0, f64::NAN], &[-1.0, 0.0], &[0.0, f64::INFINITY]];
    for seconds in bad.into_iter().chain([&[0.0, 0.5, 1.0][..]]) {
        assert!(matches!(refused(&pair, seconds), PictureError::Times { .. }), "{seconds:?}");
    }
    let size = Size { width: 64, height: 32 };
    let mut full = ClipBuilder::new(size, vec![0.0, 1.0], &VideoSettings::default()).unwrap();
    pair.iter().for_each(|frame| full.push(frame).unwrap());
    assert!(matches!(full.push(&frame), Err(PictureError::Times { .. })));
    for fps in [0.0, -1.0, f64::NAN, f64::INFINITY, f64::MIN_POSITIVE / 4.0] {
        assert!(matches!(Times::at_rate(2, Some(fps)), Err(PictureError::Times { .. })), "{fps}");
    }
}

#[test]
fn keys_differ_when_anything_does() {
    let settings = Preprocess::PICTURE;
    let picture = gradient(12, 8);
    let key = |picture: &Picture| ContentKey::of_picture(picture, &settings);
    assert_eq!(key(&picture), key(&gradient(12, 8)));
    let same_bytes = Picture::new(8, 12, picture.rgb().to_vec()).unwrap();
    let mut other = picture.rgb().to_vec();
    other[100] ^= 1;
    let other = Picture::new(12, 8, other).unwrap();
    let mut keys = vec![key(&picture), key(&same_bytes), key(&other)];
    for settings in [
        Preprocess { patch: 14, ..settings },
        Preprocess { merge: 1, ..settings },
        Preprocess { frames: 1, ..settings },
        Preprocess { min_pixels: 1, ..settings },
        Preprocess { max_pixels: 1 << 20, ..settings },
    ] {
        keys.push(ContentKey::of_picture(&picture, &settings));
    }
    for (frames, seconds) in [
        ([&picture, &picture], [0.0, 0.5]),
        ([&picture, &picture], [0.0, 1.0]),
        ([&picture, &other], [0.0, 0.5]),
        ([&other, &picture], [0.0, 0.5]),
    ] {
        keys.push(clip(&frames.map(Picture::clone), &seconds).unwrap().key);
    }
    let count = keys.len();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), count);
}

#[test]
fn settings_of_the_models_are_read() {
    for model in ["models/tiny", "tests/oracle/checkpoints/base_bf16"] {
        let pictures = Preprocess::read(&object(&format!("{model}/preprocessor_config.json"))).unwrap();
        let videos =
            VideoSettings::read(&object(&format!("{model}/video_preprocessor_config.json"))).unwrap();
        if model == "models/tiny" {
            assert_eq!((pictures, videos), (Preprocess::PICTURE, VideoSettings::default()));
        } else {
            assert_eq!((pictures.min_pixels, pictures.max_pixels), (2048, 12_288));
            assert!(!videos.choose);
        }
    }
}

#[test]
fn settings_that_would_not_be_followed_are_refused() {
    let path = "models/tiny/preprocessor_config.json";
    let with = |key: &str, value: Value| {
        let mut object = object(path);
        object.insert(key.into(), value);
        Preprocess::read(&object)
    };
    let unknown = with("sharpen", json!(true)).unwrap_err();
    assert_eq!(unknown, SettingsError::Unknown { keys: vec!["sharpen".into()] });
    for (key, value) in [
        ("do_resize", json!(false)),
        ("do_normalize", json!(false)),
        ("image_mean", json!([0.48, 0.46, 0.41])),
        ("image_std", json!([0.5, 0.5])),
        ("rescale_factor", json!(1.0)),
        ("resample", json!(2)),
        ("patch_size", json!(0)),
        ("patch_size", json!("16")),
        ("size", json!({"height": 1, "width": 1})),
        ("size", json!({"shortest_edge": 10, "longest_edge": 5})),
        ("image_processor_type", json!("CLIPImageProcessor")),
        ("crop_size", json!(224)),
    ] {
        match with(key, value.clone()).unwrap_err() {
            SettingsError::Value { key: named, .. } => assert_eq!(named, key),
            error => panic!("{key} {value}: {error}"),
        }
    }
    assert!(with("crop_size", Value::Null).is_ok());
    let mut video = object("models/tiny/video_preprocessor_config.json");
    video.insert("max_frames".into(), json!(3));
    assert!(VideoSettings::read(&video).unwrap_err().to_string().contains("max_frames"));
}
