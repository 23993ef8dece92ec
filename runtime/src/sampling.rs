//! How a request wants its ids picked: the options, their limits, and the row that is staged for them.

use std::fmt;
use std::hash::{BuildHasher, RandomState};

use kernels::table::{BIASES, Bias, Sampling, TOPS};

use crate::error::Error;

/// How ids are picked. The default is the likeliest id each time, and no report.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingOptions {
    /// 0: the likeliest id; else what logits are divided by before a draw.
    pub temperature: f32,
    /// How many of the likeliest ids may be drawn; 0 is off.
    pub top_k: u32,
    /// Of those, the fewest likeliest that have this much of their probability; 1 is off.
    pub top_p: f32,
    /// Ids less likely than this part of the likeliest are not drawn; 0 is off.
    pub min_p: f32,
    /// Subtracted from the logits of ids that were picked before.
    pub presence_penalty: f32,
    /// Subtracted once for every time that an id was picked before.
    pub frequency_penalty: f32,
    /// Divides positive logits, and multiplies others, of ids in the prompt or picked before; 1 is off.
    pub repetition_penalty: f32,
    /// Ids with what is added to their logits.
    pub logit_bias: Vec<(u32, f32)>,
    /// Equal seeds draw equal ids; none: another one for every request.
    pub seed: Option<u64>,
    /// How many of the likeliest ids to report.
    pub logprobs: u32,
}

impl Default for SamplingOptions {
    fn default() -> Self {
        SamplingOptions {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            seed: None,
            logprobs: 0,
        }
    }
}

impl SamplingOptions {
    /// Checks every option, for a model of `vocab` ids.
    ///
    /// # Errors
    /// The first option outside its limits, with its value.
    pub fn check(&self, vocab: usize) -> Result<(), SamplingError> {
        let SamplingOptions { temperature, top_p, min_p, .. } = *self;
        let repetition = self.repetition_penalty;
        let rules = [
            ("temperature", temperature, (0.0..=f32::MAX).contains(&temperature), "0 or more, and finite"),
            ("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "above 0 and at most 1"),
            ("min_p", min_p, (0.0..=1.0).contains(&min_p), "from 0 to 1"),
            ("presence_penalty", self.presence_penalty, penalty(self.presence_penalty), "from -2 to 2"),
            ("frequency_penalty", self.frequency_penalty, penalty(self.frequency_penalty), "from -2 to 2"),
            (
                "repetition_penalty",
                repetition,
                repetition > 0.0 && repetition.is_finite(),
                "above 0, and finite",
            ),
        ];
        if let Some((option, value, _, limits)) = rules.into_iter().find(|(_, _, holds, _)| !holds) {
            return Err(SamplingError::Value { option, value, limits });
        }
        if self.logprobs as usize > TOPS {
            return Err(SamplingError::Logprobs { asked: self.logprobs });
        }
        self.check_bias(vocab)
    }

    fn check_bias(&self, vocab: usize) -> Result<(), SamplingError> {
        if self.logit_bias.len() > BIASES {
            return Err(SamplingError::BiasCount { entries: self.logit_bias.len() });
        }
        if let Some(&(id, bias)) = self.logit_bias.iter().find(|(_, bias)| !(-100.0..=100.0).contains(bias)) {
            return Err(SamplingError::BiasValue { id, bias });
        }
        let mut ids: Vec<u32> = self.logit_bias.iter().map(|(id, _)| *id).collect();
        ids.sort_unstable();
        if let Some(&id) = ids.last().filter(|id| **id as usize >= vocab) {
            return Err(SamplingError::BiasId { id, vocab });
        }
        match ids.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(SamplingError::BiasTwice { id: pair[0] }),
            None => Ok(()),
        }
    }

    /// Draws a seed if there is none.
    pub(crate) fn settle_seed(&mut self) {
        self.seed.get_or_insert_with(|| RandomState::new().hash_one(0));
    }

    /// What is staged for the request, the same in each of its rounds. Without a seed, every call draws
    /// another one: make the row once per request.
    pub fn to_row(&self) -> Sampling {
        Sampling {
            seed: self.seed.unwrap_or_else(|| RandomState::new().hash_one(0)),
            temperature: self.temperature,
            top_p: self.top_p,
            min_p: self.min_p,
            presence: self.presence_penalty,
            frequency: self.frequency_penalty,
            repetition: self.repetition_penalty,
            top_k: self.top_k,
            logprobs: self.logprobs,
            biases: self.logit_bias.len() as u32,
            zero: 0,
        }
    }

    /// The list that goes into the request's slot, once.
    pub fn biases(&self) -> Vec<Bias> {
        self.logit_bias.iter().map(|&(id, value)| Bias { id, value }).collect()
    }
}

fn penalty(value: f32) -> bool {
    (-2.0..=2.0).contains(&value)
}

/// A sampling option outside its limits.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum SamplingError {
    /// A number outside its limits.
    Value {
        /// The option.
        option: &'static str,
        /// The value.
        value: f32,
        /// What it may be.
        limits: &'static str,
    },
    /// More alternatives than a row reports.
    Logprobs {
        /// How many were asked for.
        asked: u32,
    },
    /// More bias entries than a slot holds.
    BiasCount {
        /// How many there are.
        entries: usize,
    },
    /// A bias outside its limits.
    BiasValue {
        /// The id.
        id: u32,
        /// Its bias.
        bias: f32,
    },
    /// A bias for an id that the model does not have.
    BiasId {
        /// The id.
        id: u32,
        /// How many ids there are.
        vocab: usize,
    },
    /// Two biases for one id.
    BiasTwice {
        /// The id.
        id: u32,
    },
}

impl fmt::Display for SamplingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Value { option, value, limits } => write!(f, "{option} is {value}; it must be {limits}"),
            Self::Logprobs { asked } => {
                write!(f, "logprobs is {asked}; at most {TOPS} alternatives are reported")
            }
            Self::BiasCount { entries } => {
                write!(f, "logit_bias has {entries} entries; at most {BIASES} fit")
            }
            Self::BiasValue { id, bias } => {
                write!(f, "logit_bias of id {id} is {bias}; it must be from -100 to 100")
            }
            Self::BiasId { id, vocab } => {
                write!(f, "logit_bias names id {id}, which is past the vocabulary of {vocab}")
            }
            Self::BiasTwice { id } => write!(f, "logit_bias names id {id} twice; give it one bias"),
        }
    }
}

impl std::error::Error for SamplingError {}

impl From<SamplingError> for Error {
    fn from(error: SamplingError) -> Self {
        Error::Setting(error.to_string())
    }
}
