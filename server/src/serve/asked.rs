//! What a request for replies asks, in the engine's own form: the fields that both wires share.

use runtime::request::{Media, Submission};
use runtime::sampling::SamplingOptions;
use vision::Span;

use super::errors::ApiError;
use super::fields::{self, Fields, Ignored};
use super::options;
use super::pictures::Held;
use super::state::{App, Model};
use crate::pictures::{self, Placed, Planned};

/// A request that was read and checked.
pub(crate) struct Asked {
    pub(crate) prompts: Vec<Prompt>,
    /// Everything but the prompt and the seed.
    pub(crate) submission: Submission,
    /// Replies to each prompt.
    pub(crate) n: usize,
    /// The seed of each prompt's first reply, as the caller wrote it.
    pub(crate) seed: i128,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    /// Alternatives to report of each token; none: no logprobs.
    pub(crate) logprobs: Option<u32>,
    pub(crate) ignored: Ignored,
    /// The memory of its pictures.
    pub(crate) held: Option<Held>,
}

/// A prompt, and how replies to it are read.
pub(crate) struct Prompt {
    pub(crate) ids: Vec<u32>,
    pub(crate) reply: ReplyForm,
    /// Where rows of its pictures lie.
    pub(crate) spans: Vec<Span>,
    /// Pictures that are not decoded yet.
    pub(crate) planned: Vec<Planned>,
    /// Those that are.
    pub(crate) media: Vec<Media>,
}

/// How the text of a reply is read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ReplyForm {
    /// As it is.
    Plain,
    /// Reasoning and then content; whether the prompt opened the reasoning.
    Thinking { opened: bool },
}

impl Asked {
    /// Reads the fields that both wires have. Logprobs differ and are read before.
    pub(crate) fn read(
        fields: &mut Fields,
        app: &App,
        model: &Model,
        logprobs: Option<u32>,
        ignored: &mut Ignored,
    ) -> Result<Asked, ApiError> {
        check_model(fields, app)?;
        let most_n = app.settings.max_n;
        let n = fields.integer("n", 1..=most_n as i128)?.unwrap_or(1) as usize;
        let seed = fields.integer("seed", i64::MIN.into()..=u64::MAX.into())?;
        let stream = fields.flag("stream")?.unwrap_or(false);
        let include_usage = include_usage(fields, stream, ignored)?;
        let submission = Submission {
            max_tokens: options::max_tokens(fields)?,
            sampling: options::sampling(fields, logprobs, model.vocab)?,
            stop: options::stops(fields)?,
            stop_ids: options::stop_ids(fields, model.vocab)?,
            ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
            ..Submission::new(Vec::new())
        };
        Ok(Asked {
            prompts: Vec::new(),
            submission,
            n,
            seed: seed.unwrap_or_else(drawn),
            stream,
            include_usage,
            logprobs,
            ignored: Ignored::default(),
            held: None,
        })
    }

    /// Replies in all.
    pub(crate) fn replies(&self) -> usize {
        self.prompts.len() * self.n
    }

    /// What the engine is asked for reply `index`, which is one of the prompt `index / n`. It never has more tokens
    /// than there is room for.
    pub(crate) fn submission(&self, index: usize, app: &App, model: &Model) -> Submission {
        let Prompt { ids, media, .. } = &self.prompts[index / self.n];
        let room = u32::try_from(model.context - ids.len()).unwrap_or(u32::MAX);
        let asked = self.submission.max_tokens.unwrap_or(app.settings.max_tokens_default);
        let seed = (self.seed as u64).wrapping_add((index % self.n) as u64);
        Submission {
            prompt: ids.clone(),
            media: media.clone(),
            max_tokens: Some(asked.min(room)),
            sampling: SamplingOptions { seed: Some(seed), ..self.submission.sampling.clone() },
            ..self.submission.clone()
        }
    }
}

impl Prompt {
    /// A prompt that leaves room for a token at least.
    pub(crate) fn new(
        placed: Placed,
        reply: ReplyForm,
        path: &str,
        model: &Model,
    ) -> Result<Prompt, ApiError> {
        let Placed { ids, spans, planned } = placed;
        let (have, most) = (ids.len(), model.context);
        if have == 0 {
            return Err(ApiError::field(path, "has no token; give at least one"));
        }
        if let Some(id) = ids.iter().find(|id| **id as usize >= model.vocab) {
            let why = format!("token {id} is past the vocabulary of {}", model.vocab);
            return Err(ApiError::field(path, why));
        }
        if have >= most {
            let why = format!("{have} tokens leave no room for a reply in a context of {most}; shorten it");
            return Err(ApiError::field(path, why));
        }
        let blind = model.sight.as_ref().filter(|_| planned.is_empty());
        if let Some(why) = blind.and_then(|sight| pictures::stray(&ids, sight)) {
            return Err(ApiError::field(path, why));
        }
        Ok(Prompt { ids, reply, spans, planned, media: Vec::new() })
    }
}

/// Checks the name of the model, if there is one.
pub(crate) fn check_model(fields: &mut Fields, app: &App) -> Result<(), ApiError> {
    let served = &app.settings.served_name;
    match fields.text("model")? {
        Some(asked) if asked != *served => Err(ApiError::unknown_model(&asked, served)),
        _ => Ok(()),
    }
}

fn include_usage(fields: &mut Fields, stream: bool, ignored: &mut Ignored) -> Result<bool, ApiError> {
    let Some(value) = fields.any("stream_options") else { return Ok(false) };
    let path = fields.path("stream_options");
    if !stream {
        return Err(ApiError::field(path, "has no effect without stream; remove it or set stream"));
    }
    let mut options = Fields::new(value, &path, &fields::STREAM_OPTIONS, ignored)?;
    let include = options.flag("include_usage")?;
    options.finish()?;
    Ok(include.unwrap_or(false))
}

/// A seed that every reader of JSON can hold.
fn drawn() -> i128 {
    use std::hash::{BuildHasher, RandomState};
    i128::from(RandomState::new().hash_one(0) >> 11)
}
