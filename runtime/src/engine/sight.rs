//! Whether a model sees, and how: decided from its folder and the settings before any weight is read.

use std::fmt;
use std::path::Path;

use serde_json::{Map, Value};
use vision::{MediaIds, Preprocess, SettingsError, VideoSettings};

use super::EngineOptions;
use crate::config::{ModelConfig, VisionConfig};
use crate::error::Error;
use crate::json::Strict;
use crate::pictures::Sight;
use crate::place::Place;
use crate::tower::TowerLimits;

/// How pictures are prepared.
const PICTURES: &str = "preprocessor_config.json";
/// How clips are.
const CLIPS: &str = "video_preprocessor_config.json";

/// Whether an engine takes pictures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Vision {
    /// If the model has a vision tower and its folder says how pictures are prepared: pictures and clips as large as
    /// the model's own preprocessing makes them on a CUDA device, a quarter of that on the host device.
    #[default]
    Auto,
    /// No: its weights are not read.
    Off,
    /// Pictures and clips of up to so many patches each. A model that does not see is an error.
    Patches(usize),
}

impl fmt::Display for Vision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Vision::Auto => f.write_str("auto"),
            Vision::Off => f.write_str("off"),
            Vision::Patches(most) => write!(f, "{most}"),
        }
    }
}

/// What is known of a model's sight before its weights are read.
#[derive(Clone, Debug)]
pub(crate) enum Look {
    /// It sees.
    Sees(Box<Seen>),
    /// It does not, and, unless nobody would expect it, why not.
    Blind(Option<String>),
}

/// How a model sees.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    /// What front ends must know.
    pub(crate) sight: Sight,
    /// How much the tower encodes at a time.
    pub(crate) limits: TowerLimits,
    /// The tower.
    pub(crate) tower: VisionConfig,
}

impl Look {
    /// Looks into a model's folder.
    ///
    /// # Errors
    /// Sight was asked for by name and there is none, or a file says something that is not prepared here.
    pub(super) fn at(dir: &Path, config: &ModelConfig, options: &EngineOptions) -> Result<Look, Error> {
        let (most, asked) = match options.vision {
            Vision::Off => return Ok(Look::Blind(None)),
            Vision::Auto if options.place == Place::Host => (TowerLimits::LARGEST.patches / 4, false),
            Vision::Auto => (TowerLimits::LARGEST.patches, false),
            Vision::Patches(most) => (most, true),
        };
        let blind = |why: Option<String>| match why {
            Some(why) if asked => {
                Err(Error::Setting(format!("{why}, so pictures cannot be taken; leave --vision out")))
            }
            why => Ok(Look::Blind(why)),
        };
        let Some(tower) = &config.vision else {
            return blind(asked.then(|| "the model has no vision tower".to_owned()));
        };
        let [picture, clip] = [PICTURES, CLIPS].map(|name| dir.join(name));
        if let Some(missing) = [&picture, &clip].into_iter().find(|path| !path.exists()) {
            return blind(Some(format!(
                "the model has a vision tower, but {} is missing",
                missing.display()
            )));
        }
        if options.feature_bytes == Some(0) {
            return blind(Some("no memory is given to the features of pictures".into()));
        }
        let limits = TowerLimits::at(options.place, most);
        let square = tower.spatial_merge_size * tower.spatial_merge_size;
        if most < square {
            return Err(Error::Setting(format!(
                "--vision {most} is less than the {square} patches of the smallest picture"
            )));
        }
        let sight = Sight {
            picture: read(&picture, tower, Preprocess::read, |read| *read)?,
            video: read(&clip, tower, VideoSettings::read, |read| read.preprocess)?,
            ids: MediaIds {
                image: tower.tokens.image,
                video: tower.tokens.video,
                start: tower.tokens.start,
                end: tower.tokens.end,
            },
            most_patches: limits.patches / square * square,
        };
        Ok(Look::Sees(Box::new(Seen { sight, limits, tower: tower.clone() })))
    }

    /// How it sees, if it does.
    pub(crate) fn seen(&self) -> Option<&Seen> {
        match self {
            Look::Sees(seen) => Some(seen),
            Look::Blind(_) => None,
        }
    }
}

/// Reads the settings of a file, and checks that the tower takes what they prepare.
fn read<T>(
    path: &Path,
    tower: &VisionConfig,
    read: impl Fn(&Map<String, Value>) -> Result<T, SettingsError>,
    preprocess: impl Fn(&T) -> Preprocess,
) -> Result<T, Error> {
    let wrong = |why: String| Error::Setting(format!("{}: {why}", path.display()));
    let bytes = std::fs::read(path).map_err(|error| wrong(error.to_string()))?;
    let Strict(value) = serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
    let object = value.as_object().ok_or_else(|| wrong("it is no JSON object".into()))?;
    let settings = read(object).map_err(|error| wrong(error.to_string()))?;
    let Preprocess { patch, merge, frames, .. } = preprocess(&settings);
    let pairs = [
        ("patch_size", patch, tower.patch_size),
        ("merge_size", merge, tower.spatial_merge_size),
        ("temporal_patch_size", frames, tower.temporal_patch_size),
        ("number of colours", 3, tower.in_channels),
    ];
    match pairs.into_iter().find(|(_, prepared, taken)| *prepared as usize != *taken) {
        None => Ok(settings),
        Some((key, prepared, taken)) => {
            Err(wrong(format!("{key} is {prepared}, and the vision tower of config.json takes {taken}")))
        }
    }
}
