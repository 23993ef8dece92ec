//! What a model wants of pictures and videos: `preprocessor_config.json` and `video_preprocessor_config.json`.

use serde_json::{Map, Value};

use crate::SettingsError;

/// How pixels become patches, and between which areas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preprocess {
    /// Edge of a patch in pixels.
    pub patch: u32,
    /// Edge, in patches, of the square that becomes one row of the language model.
    pub merge: u32,
    /// Frames in a patch; a still picture is repeated.
    pub frames: u32,
    /// Fewest pixels after resizing; of a video, in all frames together.
    pub min_pixels: u64,
    /// Most pixels after resizing; of a video, in all frames together.
    pub max_pixels: u64,
}

/// How a video becomes frames, and these patches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct VideoSettings {
    /// Patches and areas.
    pub preprocess: Preprocess,
    /// Are frames chosen, or all taken as they come?
    pub choose: bool,
    /// Chosen frames for each second.
    pub fps: f64,
    /// Fewest chosen frames, if there are as many.
    pub min_frames: usize,
    /// Most frames, chosen or taken.
    pub max_frames: usize,
}

impl Preprocess {
    /// The published model's settings for still pictures.
    pub const PICTURE: Preprocess =
        Preprocess { patch: 16, merge: 2, frames: 2, min_pixels: 65_536, max_pixels: 16_777_216 };
    /// The published model's settings for videos.
    pub const VIDEO: Preprocess =
        Preprocess { patch: 16, merge: 2, frames: 2, min_pixels: 4_096, max_pixels: 25_165_824 };

    /// Sides of a resized picture are multiples of this many pixels.
    pub fn factor(&self) -> u32 {
        self.patch * self.merge
    }

    /// Values of a patch: three colours, [`frames`](Self::frames), rows and columns.
    pub fn patch_values(&self) -> usize {
        3 * self.frames as usize * (self.patch as usize).pow(2)
    }

    /// Reads the object of `preprocessor_config.json`. Keys that it lacks have the published model's values.
    ///
    /// # Errors
    /// A key that is not known, or a value that would have pictures prepared in another way than here.
    pub fn read(object: &Map<String, Value>) -> Result<Preprocess, SettingsError> {
        let mut keys = Keys::new(object);
        keys.only(
            "image_processor_type",
            &["Qwen2VLImageProcessorFast", "Qwen2VLImageProcessor", "Qwen2VLImageProcessorPil"],
        )?;
        let settings = keys.preprocess(Preprocess::PICTURE)?;
        keys.finish(&[])?;
        Ok(settings)
    }
}

impl Default for VideoSettings {
    /// The published model's settings.
    fn default() -> Self {
        Self { preprocess: Preprocess::VIDEO, choose: true, fps: 2.0, min_frames: 4, max_frames: 768 }
    }
}

impl VideoSettings {
    /// Reads the object of `video_preprocessor_config.json`, as [`Preprocess::read`] does the other.
    pub fn read(object: &Map<String, Value>) -> Result<VideoSettings, SettingsError> {
        let published = VideoSettings::default();
        let mut keys = Keys::new(object);
        keys.only("video_processor_type", &["Qwen3VLVideoProcessor"])?;
        let preprocess = keys.preprocess(Preprocess::VIDEO)?;
        let choose = keys.flag("do_sample_frames")?.unwrap_or(published.choose);
        let fps = match keys.take("fps") {
            None => published.fps,
            Some(value) => value
                .as_f64()
                .filter(|fps| *fps > 0.0 && *fps <= 1000.0)
                .ok_or_else(|| mismatch("fps", value, "a number above 0 and at most 1000"))?,
        };
        let min_frames = keys.whole("min_frames", 1 << 16)?.map_or(published.min_frames, |n| n as usize);
        let max_frames = keys.whole("max_frames", 1 << 16)?.map_or(published.max_frames, |n| n as usize);
        if max_frames < min_frames.max(2) {
            return Err(SettingsError::Value {
                key: "max_frames".into(),
                found: max_frames.to_string(),
                expected: format!("at least 2 and at least min_frames, {min_frames}"),
            });
        }
        keys.finish(&["num_frames", "cap_pixels_per_frame", "video_metadata"])?;
        Ok(VideoSettings { preprocess, choose, fps, min_frames, max_frames })
    }
}

/// The keys of an object that are not read yet. A key whose value is `null` counts as absent.
struct Keys<'a> {
    left: Vec<(&'a str, &'a Value)>,
}

impl<'a> Keys<'a> {
    fn new(object: &'a Map<String, Value>) -> Self {
        Self { left: object.iter().map(|(key, value)| (key.as_str(), value)).collect() }
    }

    fn take(&mut self, key: &str) -> Option<&'a Value> {
        let at = self.left.iter().position(|(name, _)| *name == key)?;
        Some(self.left.swap_remove(at).1).filter(|value| !value.is_null())
    }

    fn whole(&mut self, key: &str, most: u64) -> Result<Option<u64>, SettingsError> {
        let Some(value) = self.take(key) else { return Ok(None) };
        let number = value.as_u64().filter(|number| (1..=most).contains(number));
        number.map(Some).ok_or_else(|| mismatch(key, value, &format!("a whole number from 1 to {most}")))
    }

    fn flag(&mut self, key: &str) -> Result<Option<bool>, SettingsError> {
        let Some(value) = self.take(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| mismatch(key, value, "true or false"))
    }

    fn only(&mut self, key: &str, words: &[&str]) -> Result<(), SettingsError> {
        let Some(value) = self.take(key) else { return Ok(()) };
        let known = value.as_str().is_some_and(|word| words.contains(&word));
        if known { Ok(()) } else { Err(mismatch(key, value, &words.join(" or "))) }
    }

    /// What both files say.
    fn preprocess(&mut self, published: Preprocess) -> Result<Preprocess, SettingsError> {
        for key in ["do_resize", "do_rescale", "do_normalize", "do_convert_rgb"] {
            if self.flag(key)? == Some(false) {
                return Err(mismatch(key, &Value::Bool(false), "true"));
            }
        }
        self.numbers("resample", &[3.0])?;
        self.numbers("rescale_factor", &[1.0 / 255.0])?;
        self.numbers("image_mean", &[0.5; 3])?;
        self.numbers("image_std", &[0.5; 3])?;
        self.only("processor_class", &["Qwen3VLProcessor"])?;
        let mut edge = |key: &str, published: u32| {
            self.whole(key, 1 << 8).map(|edge| edge.map_or(published, |edge| edge as u32))
        };
        let patch = edge("patch_size", published.patch)?;
        let merge = edge("merge_size", published.merge)?;
        let frames = edge("temporal_patch_size", published.frames)?;
        let (min_pixels, max_pixels) = self.area(published)?;
        Ok(Preprocess { patch, merge, frames, min_pixels, max_pixels })
    }

    /// The range of areas, which the files call edges.
    fn area(&mut self, published: Preprocess) -> Result<(u64, u64), SettingsError> {
        const MOST: u64 = 1 << 32;
        let Some(value) = self.take("size") else { return Ok((published.min_pixels, published.max_pixels)) };
        let object = value.as_object().ok_or_else(|| mismatch("size", value, "an object"))?;
        let mut size = Keys::new(object);
        let mut need = |key: &str| {
            let lacking = || mismatch("size", value, &format!("an object with {key}"));
            size.whole(key, MOST)?.ok_or_else(lacking)
        };
        let (min, max) = (need("shortest_edge")?, need("longest_edge")?);
        size.finish(&[])?;
        if min > max {
            return Err(mismatch("size", value, "a shortest_edge that is not above longest_edge"));
        }
        Ok((min, max))
    }

    fn numbers(&mut self, key: &str, expected: &[f64]) -> Result<(), SettingsError> {
        let Some(value) = self.take(key) else { return Ok(()) };
        let found: Option<Vec<f64>> = match value {
            Value::Array(list) => list.iter().map(Value::as_f64).collect(),
            value => value.as_f64().map(|number| vec![number]),
        };
        let close = |found: &Vec<f64>| {
            found.len() == expected.len()
                && found.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-9)
        };
        if found.as_ref().is_some_and(close) {
            Ok(())
        } else {
            Err(mismatch(key, value, &format!("{expected:?}")))
        }
    }

    /// Refuses what nobody read. Saved processors name many switches that are off; off is `null`.
    fn finish(mut self, off: &[&str]) -> Result<(), SettingsError> {
        const OFF: [&str; 8] = [
            "crop_size",
            "data_format",
            "device",
            "disable_grouping",
            "do_pad",
            "input_data_format",
            "pad_size",
            "return_tensors",
        ];
        for key in OFF.iter().chain(off) {
            if let Some(value) = self.take(key) {
                return Err(mismatch(key, value, "null"));
            }
        }
        if self.left.is_empty() {
            return Ok(());
        }
        Err(SettingsError::Unknown { keys: self.left.iter().map(|(key, _)| (*key).into()).collect() })
    }
}

fn mismatch(key: &str, found: &Value, expected: &str) -> SettingsError {
    SettingsError::Value { key: key.into(), found: found.to_string(), expected: expected.into() }
}
