//! A submission as it stands on the wire. These structs mirror the real ones field by field: a field that is added
//! there and not here does not compile.
//!
//! Floats travel as their bits: every value comes out as it went in, also those that JSON has no number for.

use planner::ClassId;
use serde::{Deserialize, Serialize};

use crate::request::{Media, Submission};
use crate::sampling::SamplingOptions;

#[derive(Serialize, Deserialize)]
#[serde(remote = "Submission")]
pub(super) struct SubmissionForm {
    prompt: Vec<u32>,
    #[serde(default)]
    max_tokens: Option<u32>,
    #[serde(default, with = "SamplingForm")]
    sampling: SamplingOptions,
    #[serde(default)]
    stop_ids: Vec<u32>,
    #[serde(default)]
    stop: Vec<String>,
    #[serde(default)]
    ignore_eos: bool,
    #[serde(default = "first_class", with = "ClassForm")]
    class: ClassId,
    /// Without pixels: rank 0 alone encodes pictures.
    #[serde(default, with = "pictures")]
    media: Vec<Media>,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "SamplingOptions", default = "SamplingOptions::default")]
struct SamplingForm {
    #[serde(with = "bits")]
    temperature: f32,
    top_k: u32,
    #[serde(with = "bits")]
    top_p: f32,
    #[serde(with = "bits")]
    min_p: f32,
    #[serde(with = "bits")]
    presence_penalty: f32,
    #[serde(with = "bits")]
    frequency_penalty: f32,
    #[serde(with = "bits")]
    repetition_penalty: f32,
    #[serde(with = "biases")]
    logit_bias: Vec<(u32, f32)>,
    seed: Option<u64>,
    logprobs: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "ClassId")]
struct ClassForm(u8);

fn first_class() -> ClassId {
    ClassId(0)
}

mod bits {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(value: &f32, to: S) -> Result<S::Ok, S::Error> {
        value.to_bits().serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f32, D::Error> {
        u32::deserialize(from).map(f32::from_bits)
    }
}

/// A picture or a clip: what it is, and where its rows stand.
#[derive(Serialize, Deserialize)]
struct Picture {
    key: [u8; 16],
    /// Pairs of frames, lines and columns, in patches.
    grid: [u32; 3],
    /// The medium and its row, the position in the prompt, lines and columns of each span.
    spans: Vec<(usize, usize, usize, u32, u32)>,
}

mod pictures {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serializer};
    use vision::{ContentKey, Grid, Patches, Span};

    use super::Picture;
    use crate::request::Media;

    pub(super) fn serialize<S: Serializer>(media: &[Media], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(media.iter().map(|Media { patches, spans, key }| {
            let Grid { pairs, height, width } = patches.grid;
            let span =
                |&Span { medium, row, first, height, width }: &Span| (medium, row, first, height, width);
            Picture { key: key.0, grid: [pairs, height, width], spans: spans.iter().map(span).collect() }
        }))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Media>, D::Error> {
        let pictures: Vec<Picture> = Vec::deserialize(from)?;
        let media = |Picture { key, grid: [pairs, height, width], spans }| {
            let span = |(medium, row, first, height, width)| Span { medium, row, first, height, width };
            Media {
                patches: Arc::new(Patches { grid: Grid { pairs, height, width }, bytes: Vec::new() }),
                spans: spans.into_iter().map(span).collect(),
                key: ContentKey(key),
            }
        };
        Ok(pictures.into_iter().map(media).collect())
    }
}

mod biases {
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(biases: &[(u32, f32)], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(biases.iter().map(|(id, bias)| (id, bias.to_bits())))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<(u32, f32)>, D::Error> {
        let biases: Vec<(u32, u32)> = Vec::deserialize(from)?;
        Ok(biases.into_iter().map(|(id, bits)| (id, f32::from_bits(bits))).collect())
    }
}
