//! `/v1/completions`: prompts as they are, one or several.

use serde_json::Value;

use super::asked::{Asked, Prompt, ReplyForm};
use super::chat::encode_prompt;
use super::errors::ApiError;
use super::fields::{self, Fields, Ignored};
use super::state::{App, Model};
use crate::pictures::Placed;

/// Reads a request.
pub(crate) fn read(body: &[u8], app: &App, model: &Model) -> Result<Asked, ApiError> {
    let mut ignored = Ignored::default();
    let mut fields = fields::body(body, &fields::COMPLETIONS, &mut ignored)?;
    let logprobs = fields.integer("logprobs", 0..=20)?.map(|tops| tops as u32);
    let mut asked = Asked::read(&mut fields, app, model, logprobs, &mut ignored)?;
    if fields.flag("echo")? == Some(true) {
        return Err(fields.wrong("echo", "the prompt is not repeated here; leave it out"));
    }
    if fields.any("suffix").is_some() {
        return Err(fields.wrong("suffix", "the model does not fill in; leave it out"));
    }
    if let Some(best) = fields.integer("best_of", 1..=u32::MAX.into())?
        && best != asked.n as i128
    {
        return Err(
            fields.wrong("best_of", format!("must equal n, which is {}: every reply is given", asked.n))
        );
    }
    asked.prompts = prompts(&mut fields, app.most_replies() / asked.n, model)?;
    fields.finish()?;
    asked.ignored = ignored;
    Ok(asked)
}

/// The prompts: a text, a list of ids, or a list of at most `most` texts or lists.
fn prompts(fields: &mut Fields, most: usize, model: &Model) -> Result<Vec<Prompt>, ApiError> {
    let wrong = "must be a string, a list of token ids, a list of strings, or a list of such lists";
    let one = |value: &Value, path: &str| {
        let ids = match value {
            Value::String(text) => encode_prompt(text, path, model)?,
            Value::Array(ids) => fields::ids(ids, path)?,
            _ => return Err(ApiError::field(path, wrong)),
        };
        Prompt::new(Placed::text(ids), ReplyForm::Plain, path, model)
    };
    match fields.any("prompt") {
        None => Err(fields.wrong("prompt", "is missing")),
        Some(Value::Array(list)) if list.is_empty() => Err(fields.wrong("prompt", "is an empty list")),
        Some(Value::Array(list)) if !list[0].is_number() => {
            if list.len() > most {
                let why = format!(
                    "{} prompts have more replies than may run or wait: give {most} at most",
                    list.len()
                );
                return Err(fields.wrong("prompt", why));
            }
            if list.iter().any(|value| value.is_string() != list[0].is_string()) {
                return Err(fields.wrong("prompt", wrong));
            }
            list.iter().enumerate().map(|(at, value)| one(value, &format!("prompt[{at}]"))).collect()
        }
        Some(value) => Ok(vec![one(&value, "prompt")?]),
    }
}
