//! `/tokenize` and `/detokenize`: the model's own way from text to ids and back.

use serde_json::{Value, json};

use super::asked::check_model;
use super::chat::{conversation, encode, render};
use super::errors::ApiError;
use super::fields::{self, Ignored};
use super::state::{App, Model};

/// `/tokenize`: the ids of a text, or of the prompt that messages make.
pub(crate) fn tokenize(body: &[u8], app: &App, model: &Model) -> Result<(Value, Ignored), ApiError> {
    let mut ignored = Ignored::default();
    let mut fields = fields::body(body, &fields::TOKENIZE, &mut ignored)?;
    check_model(&mut fields, app)?;
    let ids = match fields.text("prompt")? {
        Some(text) => encode(&text, "prompt", model)?,
        None => {
            let generation = fields.flag("add_generation_prompt")?.unwrap_or(true);
            let mut conversation = conversation(&mut fields, app, model, &mut ignored)?;
            conversation.chat.add_generation_prompt = generation;
            let text = render(&conversation.chat, model)?;
            let ids = encode(&text, "messages", model)?;
            conversation.place(&text, ids, app, model)?.ids
        }
    };
    fields.finish()?;
    let count = ids.len();
    Ok((json!({"tokens": ids, "count": count, "max_model_len": model.context}), ignored))
}

/// `/detokenize`: the text of ids, special tokens included.
pub(crate) fn detokenize(body: &[u8], app: &App, model: &Model) -> Result<(Value, Ignored), ApiError> {
    let mut ignored = Ignored::default();
    let mut fields = fields::body(body, &fields::DETOKENIZE, &mut ignored)?;
    check_model(&mut fields, app)?;
    let Some(list) = fields.list("tokens")? else { return Err(fields.wrong("tokens", "is missing")) };
    fields.finish()?;
    let ids = fields::ids(&list, "tokens")?;
    if let Some(id) = ids.iter().find(|id| **id as usize >= model.vocab) {
        let why = format!("{id} is past the vocabulary of {}", model.vocab);
        return Err(ApiError::field("tokens", why));
    }
    Ok((json!({"prompt": model.tokenizer.decode(&ids, false)}), ignored))
}
