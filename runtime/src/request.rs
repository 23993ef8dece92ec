//! What a caller asks of the engine, and the checks that need no engine.

use std::sync::Arc;

use planner::ClassId;
use vision::{ContentKey, Patches, Span};

use crate::error::Error;
use crate::sampling::SamplingOptions;

/// A request: a prompt and how to continue it.
#[derive(Clone, Debug, PartialEq)]
pub struct Submission {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Most ids to make; none: as many as the context holds.
    pub max_tokens: Option<u32>,
    /// How ids are picked.
    pub sampling: SamplingOptions,
    /// Ids that end the reply, beside the model's own.
    pub stop_ids: Vec<u32>,
    /// Texts that end the reply and are not part of it.
    pub stop: Vec<String>,
    /// Whether the model's own stop ids are ids like any other.
    pub ignore_eos: bool,
    /// The cache class of its lane.
    pub class: ClassId,
    /// The pictures and clips whose placeholders the prompt holds, in the order in which they stand there.
    pub media: Vec<Media>,
}

/// A picture or a clip of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Media {
    /// What the vision tower reads of it.
    pub patches: Arc<Patches>,
    /// Where its rows stand in the prompt: one span for a picture, one for each pair of frames of a clip.
    pub spans: Vec<Span>,
    /// What it is: equal keys have equal patches.
    pub key: ContentKey,
}

impl Media {
    /// Medium `number` of a prompt, with those of `spans` that are its own.
    pub fn of(number: usize, spans: &[Span], patches: Arc<Patches>, key: ContentKey) -> Media {
        let spans = spans.iter().filter(|span| span.medium == number).copied().collect();
        Media { patches, spans, key }
    }
}

impl Submission {
    /// A greedy request of the first cache class that ends at the model's stop ids.
    pub fn new(prompt: Vec<u32>) -> Submission {
        Submission {
            prompt,
            max_tokens: None,
            sampling: SamplingOptions::default(),
            stop_ids: Vec::new(),
            stop: Vec::new(),
            ignore_eos: false,
            class: ClassId(0),
            media: Vec::new(),
        }
    }

    /// Checks everything that does not depend on what else runs.
    ///
    /// # Errors
    /// The first thing that the model cannot honour, with its value.
    pub fn check(&self, vocab: usize) -> Result<(), Error> {
        check_ids(&self.prompt, vocab)?;
        if self.max_tokens == Some(0) {
            return Err(Error::Setting("max_tokens 0 asks for nothing; ask for at least 1".into()));
        }
        if let Some(id) = self.stop_ids.iter().find(|id| **id as usize >= vocab) {
            return Err(Error::Setting(format!("stop id {id} is past the vocabulary of {vocab}")));
        }
        if self.stop.iter().any(String::is_empty) {
            return Err(Error::Setting(
                "an empty stop text would end every reply at once; leave it out".into(),
            ));
        }
        self.sampling.check(vocab)?;
        Ok(())
    }
}

/// Checks that there is a prompt, of ids that the model has.
pub(crate) fn check_ids(ids: &[u32], vocab: usize) -> Result<(), Error> {
    if ids.is_empty() {
        return Err(Error::Prompt("the prompt is empty; give at least one id".into()));
    }
    match ids.iter().enumerate().find(|(_, id)| **id as usize >= vocab) {
        Some((at, id)) => {
            Err(Error::Prompt(format!("id {id} at position {at} is past the vocabulary of {vocab}")))
        }
        None => Ok(()),
    }
}
