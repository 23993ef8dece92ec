//! How ids are picked: the sampling options of a request.

use clap::Args;
use runtime::sampling::{SamplingError, SamplingOptions};

use super::Biases;
use crate::failure::Failure;

/// Greedy unless a temperature is given.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling options")]
pub(crate) struct SamplingArgs {
    /// 0 takes the likeliest token; above it, what logits are divided by before a draw.
    #[arg(long, value_name = "T", default_value_t = 0.0, allow_hyphen_values = true)]
    pub(crate) temperature: f32,

    /// How many of the likeliest tokens may be drawn; 0 is all.
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    pub(crate) top_k: u32,

    /// Of those, the fewest likeliest that have this much of their probability: above 0, at most 1.
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_hyphen_values = true)]
    pub(crate) top_p: f32,

    /// Tokens less likely than this part of the likeliest are not drawn: 0 to 1.
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_hyphen_values = true)]
    pub(crate) min_p: f32,

    /// Subtracted from the logits of tokens that were picked before: -2 to 2.
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_hyphen_values = true)]
    pub(crate) presence_penalty: f32,

    /// Subtracted once for every time that a token was picked before: -2 to 2.
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_hyphen_values = true)]
    pub(crate) frequency_penalty: f32,

    /// Divides positive logits, and multiplies others, of tokens in the prompt or picked before: above 0.
    #[arg(long, value_name = "X", default_value_t = 1.0, allow_hyphen_values = true)]
    pub(crate) repetition_penalty: f32,

    /// Added to the logits of tokens, for example 17=-2.5,4=10: each from -100 to 100; may be repeated.
    #[arg(long, value_name = "ID=B", allow_hyphen_values = true)]
    pub(crate) logit_bias: Vec<Biases>,

    /// Equal seeds draw equal tokens; another one for every prompt if not given.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) seed: Option<u64>,

    /// With --json: the logarithm of each token's probability, and of this many of the likeliest.
    #[arg(long, value_name = "N", requires = "json", allow_negative_numbers = true)]
    pub(crate) logprobs: Option<u32>,
}

impl SamplingArgs {
    /// The engine's own form of them.
    ///
    /// # Errors
    /// The first option outside its limits, by name. Ids are checked by [`check`] when the model is known.
    pub(crate) fn options(&self) -> Result<SamplingOptions, Failure> {
        let biases = self.logit_bias.iter().flat_map(|biases| &biases.0);
        let options = SamplingOptions {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            repetition_penalty: self.repetition_penalty,
            logit_bias: biases.map(|bias| (bias.id, bias.value)).collect(),
            seed: self.seed,
            logprobs: self.logprobs.unwrap_or(0),
        };
        check(&options, usize::MAX).map(|()| options)
    }
}

/// Checks sampling options for a model of `vocab` ids; the error names the option of the line.
pub(crate) fn check(options: &SamplingOptions, vocab: usize) -> Result<(), Failure> {
    options.check(vocab).map_err(|error| Failure::Input(format!("--{}: {error}", option(&error))))
}

/// The option that an error is about.
fn option(error: &SamplingError) -> String {
    match error {
        SamplingError::Value { option, .. } => option.replace('_', "-"),
        SamplingError::Logprobs { .. } => "logprobs".into(),
        _ => "logit-bias".into(),
    }
}
