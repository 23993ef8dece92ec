//! The prompts of a `generate` line, from options and files to token ids.

use std::fs;

use runtime::chat::{ChatRequest, ChatTemplate};
use runtime::tokenizer::Tokenizer;
use serde_json::Value;

use crate::args::{GenerateArgs, Switch};
use crate::failure::Failure;

/// A prompt before the model's tokenizer and template are known.
pub(crate) enum Prompt {
    Ids(Vec<u32>),
    Raw(String),
    Chat(Box<ChatRequest>),
}

/// Reads everything that can be wrong with the prompts before the model is loaded.
pub(crate) fn read(args: &GenerateArgs) -> Result<Vec<Prompt>, Failure> {
    if args.raw {
        return Ok(args.prompt.iter().cloned().map(Prompt::Raw).collect());
    }
    let mut chats: Vec<ChatRequest> = args.prompt.iter().map(|text| ChatRequest::user(text)).collect();
    if let Some(path) = &args.messages {
        let text = fs::read_to_string(path).map_err(|error| {
            Failure::Input(format!("cannot read {}: {error}; check --messages", path.display()))
        })?;
        let named = |why: String| Failure::Input(format!("{}: {why}", path.display()));
        let chat = ChatRequest::from_json(&text).map_err(|error| named(error.to_string()))?;
        only_text(&chat.messages).map_err(named)?;
        chats.push(chat);
    }
    for chat in &mut chats {
        chat.enable_thinking = args.thinking.map(Switch::is_on).or(chat.enable_thinking);
    }
    let ids = args.ids.iter().map(|ids| Prompt::Ids(ids.0.clone()));
    Ok(ids.chain(chats.into_iter().map(|chat| Prompt::Chat(Box::new(chat)))).collect())
}

impl Prompt {
    /// The ids that the model is given.
    pub(crate) fn ids(self, tokenizer: &Tokenizer, template: &ChatTemplate) -> Result<Vec<u32>, Failure> {
        let text = match self {
            Prompt::Ids(ids) => return Ok(ids),
            Prompt::Raw(text) => text,
            Prompt::Chat(chat) => template.render(&chat).map_err(Failure::input)?,
        };
        tokenizer.encode(&text).map_err(Failure::input)
    }
}

/// Refuses pictures and videos: a template makes placeholders of them, and nothing would fill those in.
fn only_text(messages: &Value) -> Result<(), String> {
    for (number, message) in messages.as_array().into_iter().flatten().enumerate() {
        for part in message["content"].as_array().into_iter().flatten() {
            let Some(kind) = not_text(part) else { continue };
            return Err(format!(
                "message {} holds a part of kind {kind}; this build reads text only, so leave the part out",
                number + 1
            ));
        }
    }
    Ok(())
}

/// What a content part is, unless it is text.
fn not_text(part: &Value) -> Option<&str> {
    let fields = part.as_object()?;
    let stated = fields.get("type").and_then(Value::as_str).filter(|kind| *kind != "text");
    let held = || fields.keys().map(String::as_str).find(|key| !["type", "text"].contains(key));
    stated.or_else(held)
}
