//! The options of a reply that both wires share: how ids are picked, and what ends it.

use runtime::sampling::{SamplingError, SamplingOptions};
use serde_json::Value;

use super::errors::ApiError;
use super::fields::{self, Fields};

/// Most stop texts of a request, and bytes of each.
const STOPS: usize = 16;
const STOP_BYTES: usize = 1024;
/// Most stop ids of a request.
const STOP_IDS: usize = 256;

/// The most tokens of a reply: under either name, or under both if they agree.
pub(crate) fn max_tokens(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let range = 1..=i128::from(u64::MAX);
    let old = fields.integer("max_tokens", range.clone())?;
    let new = fields.integer("max_completion_tokens", range)?;
    if let (Some(old), Some(new)) = (old, new)
        && old != new
    {
        let why = format!("is {new} and max_tokens is {old}; give one");
        return Err(fields.wrong("max_completion_tokens", why));
    }
    Ok(new.or(old).map(|most| u32::try_from(most).unwrap_or(u32::MAX)))
}

/// How ids are picked. The seed is each reply's own.
pub(crate) fn sampling(
    fields: &mut Fields,
    logprobs: Option<u32>,
    vocab: usize,
) -> Result<SamplingOptions, ApiError> {
    // -1 is a common way to say all.
    let top_k = fields.integer("top_k", -1..=u32::MAX.into())?.unwrap_or(0).max(0) as u32;
    let options = SamplingOptions {
        temperature: fields.number("temperature")?.unwrap_or(1.0),
        top_k,
        top_p: fields.number("top_p")?.unwrap_or(1.0),
        min_p: fields.number("min_p")?.unwrap_or(0.0),
        presence_penalty: fields.number("presence_penalty")?.unwrap_or(0.0),
        frequency_penalty: fields.number("frequency_penalty")?.unwrap_or(0.0),
        repetition_penalty: fields.number("repetition_penalty")?.unwrap_or(1.0),
        logit_bias: biases(fields)?,
        seed: None,
        logprobs: logprobs.unwrap_or(0),
    };
    options.check(vocab).map_err(|error| ApiError::field(option(&error), error.to_string()))?;
    Ok(options)
}

/// The field that an error is about.
fn option(error: &SamplingError) -> &'static str {
    match error {
        SamplingError::Value { option, .. } => option,
        SamplingError::Logprobs { .. } => "logprobs",
        _ => "logit_bias",
    }
}

fn biases(fields: &mut Fields) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(value) = fields.any("logit_bias") else { return Ok(Vec::new()) };
    let Value::Object(biases) = value else {
        return Err(fields.wrong("logit_bias", "must be an object from token ids to numbers"));
    };
    let bias = |(name, value): (&String, &Value)| {
        let path = || fields.path(&format!("logit_bias.{name}"));
        let id = name.parse().map_err(|_| ApiError::field(path(), "the name is not a token id"))?;
        let bias = fields::number(value).ok_or_else(|| ApiError::field(path(), "must be a number"))?;
        Ok((id, bias))
    };
    biases.iter().map(bias).collect()
}

/// The texts that end a reply.
pub(crate) fn stops(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let list = match fields.any("stop") {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) => list,
        Some(text) => vec![text],
    };
    if list.len() > STOPS {
        return Err(fields.wrong("stop", format!("has {} texts; at most {STOPS} are looked for", list.len())));
    }
    let stop = |(at, value): (usize, Value)| match value {
        Value::String(text) if text.is_empty() => {
            Err(fields.wrong(&format!("stop[{at}]"), "is empty; leave it out"))
        }
        Value::String(text) if text.len() > STOP_BYTES => {
            let why = format!("has {} bytes; at most {STOP_BYTES} are looked for", text.len());
            Err(fields.wrong(&format!("stop[{at}]"), why))
        }
        Value::String(text) => Ok(text),
        _ => Err(fields.wrong("stop", "must be a string or a list of strings")),
    };
    list.into_iter().enumerate().map(stop).collect()
}

/// The ids that end a reply beside the model's own.
pub(crate) fn stop_ids(fields: &mut Fields, vocab: usize) -> Result<Vec<u32>, ApiError> {
    let list = fields.list("stop_token_ids")?.unwrap_or_default();
    if list.len() > STOP_IDS {
        let why = format!("has {} ids; at most {STOP_IDS} are looked for", list.len());
        return Err(fields.wrong("stop_token_ids", why));
    }
    let ids = fields::ids(&list, &fields.path("stop_token_ids"))?;
    match ids.iter().find(|id| **id as usize >= vocab) {
        Some(id) => Err(fields.wrong("stop_token_ids", format!("{id} is past the vocabulary of {vocab}"))),
        None => Ok(ids),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::fields::Ignored;
    use super::*;

    fn fields(body: Value) -> Fields {
        Fields::new(body, "", &fields::CHAT, &mut Ignored::default()).unwrap()
    }

    #[test]
    fn the_most_tokens_have_two_names_that_must_agree() {
        let most = |body| max_tokens(&mut fields(body));
        assert_eq!(most(json!({})).unwrap(), None);
        assert_eq!(most(json!({"max_tokens": 3})).unwrap(), Some(3));
        assert_eq!(most(json!({"max_completion_tokens": 3, "max_tokens": 3})).unwrap(), Some(3));
        assert_eq!(most(json!({"max_completion_tokens": 1_000_000_000_000_u64})).unwrap(), Some(u32::MAX));
        assert!(most(json!({"max_completion_tokens": 3, "max_tokens": 4})).is_err());
        assert!(most(json!({"max_tokens": 0})).is_err());
        assert!(most(json!({"max_tokens": -1})).is_err());
    }

    #[test]
    fn stops_are_one_text_or_a_few() {
        let read = |body| stops(&mut fields(body));
        assert_eq!(read(json!({"stop": "a"})).unwrap(), ["a"]);
        assert_eq!(read(json!({"stop": ["a", "b"]})).unwrap(), ["a", "b"]);
        assert!(read(json!({})).unwrap().is_empty());
        for stop in [json!(""), json!(["a", ""]), json!(1), json!(vec!["x"; 17]), json!("x".repeat(1025))] {
            assert!(read(json!({"stop": stop})).is_err(), "{stop}");
        }
    }

    #[test]
    fn sampling_errors_name_the_field() {
        let read = |body| sampling(&mut fields(body), None, 100);
        assert_eq!(read(json!({})).unwrap().temperature, 1.0);
        assert_eq!(read(json!({"top_k": -1, "logit_bias": {"7": -1.5}})).unwrap().logit_bias, [(7, -1.5)]);
        for (body, param) in [
            (json!({"temperature": -1}), "temperature"),
            (json!({"top_p": 0}), "top_p"),
            (json!({"presence_penalty": 3}), "presence_penalty"),
            (json!({"logit_bias": {"x": 1}}), "logit_bias.x"),
            (json!({"logit_bias": {"100": 1}}), "logit_bias"),
            (json!({"logit_bias": {"1": 101}}), "logit_bias"),
            (json!({"logit_bias": [1]}), "logit_bias"),
        ] {
            let error = read(body).unwrap_err().to_json();
            assert!(error.contains(&format!("\"param\":\"{param}\"")), "{param} is not in {error}");
        }
    }

    #[test]
    fn stop_ids_are_in_the_vocabulary() {
        assert_eq!(stop_ids(&mut fields(json!({"stop_token_ids": [1, 99]})), 100).unwrap(), [1, 99]);
        assert!(stop_ids(&mut fields(json!({"stop_token_ids": [100]})), 100).is_err());
        assert!(stop_ids(&mut fields(json!({"stop_token_ids": [-1]})), 100).is_err());
        assert!(stop_ids(&mut fields(json!({"stop_token_ids": vec![1; 257]})), 100).is_err());
    }
}
