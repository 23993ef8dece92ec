//! The recorded cases of the reference: bytes of patches, grids, ids and positions.

use tests::oracle::{Case, cases};
use tokenizers::Tokenizer;
use vision::{
    Choice, Clip, Grid, MediaIds, Medium, Patches, Picture, Position, Preprocess, Span, Start, Times,
    VideoSettings, choose_frames, expand, normal, picture_patches, three_axis,
};

use crate::{bytes, clip_of, decoded, object};

fn settings(case: &Case) -> (Preprocess, VideoSettings) {
    let of = |name: &str| {
        let checkpoint = case.manifest["checkpoint"].as_str().unwrap();
        object(&format!("tests/oracle/checkpoints/{checkpoint}/{name}"))
    };
    let picture = Preprocess::read(&of("preprocessor_config.json")).unwrap();
    (picture, VideoSettings::read(&of("video_preprocessor_config.json")).unwrap())
}

fn image(name: &str) -> Picture {
    decoded(&bytes(&format!("tests/oracle/{name}")))
}

fn grid(values: &[i64]) -> Grid {
    let side = |at: usize| u32::try_from(values[at]).unwrap();
    Grid { pairs: side(0), height: side(1), width: side(2) }
}

/// The recorded bytes were made on a processor with vector units, which is the arithmetic of `vision::resize`.
fn assert_bytes(id: &str, patches: &Patches, expected: &[f64]) {
    assert_eq!(patches.bytes.len(), expected.len(), "{id}");
    let off = patches.bytes.iter().zip(expected).filter(|(got, expected)| f64::from(**got) != **expected);
    assert_eq!(off.count(), 0, "{id}: bytes that differ");
}

#[test]
fn pictures_become_the_recorded_bytes() {
    for case in cases("image_preprocess") {
        let rgb = case.tensor("rgb");
        let stored: Vec<u8> = rgb.values.iter().map(|value| *value as u8).collect();
        let given = Picture::new(rgb.shape[1] as u32, rgb.shape[0] as u32, stored).unwrap();
        let file = image(case.manifest["image"].as_str().unwrap());
        // Of a picture with alpha the case stores the colours alone; the reference shows it on white, as we do.
        if case.manifest["mode"] == "RGBA" {
            assert_ne!(file.rgb(), given.rgb(), "{}", case.id());
        } else {
            assert_eq!(file.rgb(), given.rgb(), "{}", case.id());
        }
        let patches = picture_patches(&file, &settings(&case).0).unwrap();
        assert_eq!(patches.grid, grid(&case.indices("grid_thw")), "{}", case.id());
        assert_bytes(case.id(), &patches, &case.tensor("pixel_u8").values);
        if let Some(values) = case.tensors.get("pixel_values_first_two_patches") {
            for (byte, value) in patches.bytes.iter().zip(&values.values) {
                assert_eq!(f64::from(normal(*byte)), *value, "{}", case.id());
            }
        }
    }
}

fn clip(case: &Case, settings: &VideoSettings) -> Clip {
    let frames = case.manifest["frames"].as_array().unwrap();
    let times = Times::at_rate(frames.len(), Some(case.number("/video_metadata/fps"))).unwrap();
    let chosen = choose_frames(&times, Choice::Settings, settings).unwrap();
    let pictures: Vec<Picture> = chosen.iter().map(|frame| image(frames[*frame].as_str().unwrap())).collect();
    clip_of(&pictures, chosen.iter().map(|frame| times.seconds()[*frame]).collect(), settings).unwrap()
}

#[test]
fn a_clip_becomes_the_recorded_bytes() {
    let mut seen = 0;
    for case in cases("video_prompt") {
        let patches = clip(&case, &settings(&case).1).patches;
        assert_eq!(patches.grid, grid(&case.indices("video_grid_thw")), "{}", case.id());
        if let Some(expected) = case.tensors.get("pixel_values_videos_u8") {
            assert_bytes(case.id(), &patches, &expected.values);
            seen += 1;
        }
    }
    assert_eq!(seen, 1, "one case records bytes");
}

fn ids_of(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, tokenizers::Error> {
    Ok(tokenizer.encode(text, false)?.get_ids().to_vec())
}

fn media_ids(case: &Case) -> MediaIds {
    let checkpoint = case.manifest["checkpoint"].as_str().unwrap();
    let config = object(&format!("tests/oracle/checkpoints/{checkpoint}/config.json"));
    let id = |key: &str| config[key].as_u64().unwrap() as u32;
    MediaIds {
        image: id("image_token_id"),
        video: id("video_token_id"),
        start: id("vision_start_token_id"),
        end: id("vision_end_token_id"),
    }
}

fn assert_positions(case: &Case, spans: &[Span]) {
    let expected = case.indices("position_ids");
    let tokens = expected.len() / 3;
    let at = |axis: usize, token: usize| expected[axis * tokens + token] as i32;
    let walk = three_axis(Start::default(), tokens, spans).unwrap();
    for (token, position) in walk.tokens.iter().enumerate() {
        let expected = Position { time: at(0, token), row: at(1, token), column: at(2, token) };
        assert_eq!(*position, expected, "{} token {token}", case.id());
    }
    assert_eq!(i64::from(walk.offset()), case.indices("rope_delta")[0], "{}", case.id());
}

/// Expands the case's text; `None` where the recorded ids lack the outer markers that we keep.
fn expanded(case: &Case, media: &[Medium]) -> Vec<Span> {
    let tokenizer = Tokenizer::from_file(case.checkpoint().join("tokenizer.json")).unwrap();
    let ids = ids_of(&tokenizer, case.manifest["text"].as_str().unwrap()).unwrap();
    let merge = settings(case).0.merge;
    let expanded = expand(&ids, media, merge, &media_ids(case), |text| ids_of(&tokenizer, text)).unwrap();
    assert_eq!(expanded.ids, case.input_ids(), "{}", case.id());
    expanded.spans
}

#[test]
fn prompts_with_pictures_have_the_recorded_ids_and_positions() {
    for case in cases("image_prompt") {
        let names = case.manifest["images"].as_array().unwrap();
        let settings = settings(&case).0;
        let patches =
            names.iter().map(|name| picture_patches(&image(name.as_str().unwrap()), &settings).unwrap());
        let media: Vec<Medium> = patches.map(|patches| Medium::Picture { grid: patches.grid }).collect();
        let spans = expanded(&case, &media);
        let rows: usize = spans.iter().map(Span::rows).sum();
        assert_eq!(rows, case.tensor("image_features").shape[0], "{}", case.id());
        assert_positions(&case, &spans);
    }
}

#[test]
fn prompts_with_videos_have_the_recorded_ids_and_positions() {
    let (mut kept, mut removed) = (0, 0);
    for case in cases("video_prompt") {
        let (picture, settings) = settings(&case);
        let clip = clip(&case, &settings);
        let grid = clip.patches.grid;
        if case.manifest["markers"].as_str().unwrap().starts_with("outer vision markers kept") {
            let spans = expanded(&case, &[Medium::Video { grid, stamps: clip.stamps }]);
            assert_eq!(spans.iter().map(|span| span.row).collect::<Vec<_>>(), [0, 6]);
            assert_positions(&case, &spans);
            kept += 1;
        } else {
            // We do not write this form; its positions hold all the same.
            let ids = case.input_ids();
            let video = media_ids(&case).video;
            let begins = |at: usize| ids[at] == video && ids[at - 1] != video;
            let (height, width) = (grid.height / picture.merge, grid.width / picture.merge);
            let firsts = (1..ids.len()).filter(|at| begins(*at));
            let spans: Vec<Span> = firsts
                .enumerate()
                .map(|(pair, first)| Span { medium: 0, row: 6 * pair, first, height, width })
                .collect();
            assert_eq!(spans.len(), grid.pairs as usize);
            assert_positions(&case, &spans);
            removed += 1;
        }
    }
    assert_eq!((kept, removed), (1, 1));
}
