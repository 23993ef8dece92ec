//! `generation_config.json`: which ids end a reply, and the sampling that the model's makers suggest.

use std::path::Path;

use super::section::{self, Section};
use super::{ModelConfig, read_text};
use crate::error::{ConfigError, LoadError};

/// Stop ids and sampling defaults of a model. An absent number means that the file does not say.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationConfig {
    /// Ids that end a reply; never empty.
    pub stop: Vec<u32>,
    /// Whether to sample at all; without it the likeliest token is taken.
    pub do_sample: Option<bool>,
    /// Divides the logits.
    pub temperature: Option<f32>,
    /// Keeps the likeliest so many tokens.
    pub top_k: Option<u32>,
    /// Keeps the likeliest tokens up to this share of probability.
    pub top_p: Option<f32>,
    /// Drops tokens below this share of the likeliest one's probability.
    pub min_p: Option<f32>,
    /// Scales down the logits of tokens that occurred.
    pub repetition_penalty: Option<f32>,
}

/// Keys that matter to other programs only.
const INFORMATIVE: [&str; 3] = ["_from_model_config", "pad_token_id", "transformers_version"];

impl GenerationConfig {
    /// Reads and checks `generation_config.json` of a model folder; without the file, the boundary id ends a reply.
    pub fn open(dir: &Path, model: &ModelConfig) -> Result<Self, LoadError> {
        let path = dir.join("generation_config.json");
        let json = if path.exists() { read_text(&path)? } else { "{}".into() };
        Self::from_json(&json, model).map_err(|problem| LoadError::Config { path, problem })
    }

    /// Checks the text of a `generation_config.json`.
    pub fn from_json(json: &str, model: &ModelConfig) -> Result<Self, ConfigError> {
        let file = section::parse(json)?;
        let mut c = Section::new("", &file);
        c.id("bos_token_id", model.vocab_size)?;
        let mut stop = c.ids("eos_token_id", model.vocab_size)?;
        if stop.is_empty() {
            stop.push(model.boundary);
        }
        let generation = Self {
            stop,
            do_sample: c.flag("do_sample")?,
            temperature: number(&mut c, "temperature", [0.0, 100.0])?,
            top_k: c.whole("top_k", [0, u64::from(u32::MAX)])?.map(|k| k as u32),
            top_p: number(&mut c, "top_p", [0.0, 1.0])?,
            min_p: number(&mut c, "min_p", [0.0, 1.0])?,
            repetition_penalty: number(&mut c, "repetition_penalty", [0.0, 100.0])?,
        };
        c.finish(&INFORMATIVE)?;
        Ok(generation)
    }
}

fn number(c: &mut Section<'_>, key: &str, [least, most]: [f64; 2]) -> Result<Option<f32>, ConfigError> {
    match c.number(key)? {
        Some(n) if !(least..=most).contains(&n) => {
            Err(c.out_of_range(key, n, &format!("from {least} to {most}")))
        }
        number => Ok(number.map(|n| n as f32)),
    }
}
