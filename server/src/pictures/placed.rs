//! Where pictures stand in a prompt: every row that the tower makes has its placeholder, and no text makes one.

use std::sync::Arc;

use runtime::chat::{ChatRequest, ChatTemplate};
use runtime::pictures::Sight;
use runtime::request::Media;
use runtime::tokenizer::Tokenizer;
use serde_json::{Value, json};
use vision::{Medium, Span, expand};

use super::{Allowed, Decoding, Planned, Refused, part_place};

/// A prompt whose pictures have their places and are not decoded yet.
#[derive(Debug)]
pub(crate) struct Placed {
    pub(crate) ids: Vec<u32>,
    pub(crate) spans: Vec<Span>,
    pub(crate) planned: Vec<Planned>,
}

impl Placed {
    /// A prompt without pictures.
    pub(crate) fn text(ids: Vec<u32>) -> Placed {
        Placed { ids, spans: Vec::new(), planned: Vec::new() }
    }

    /// Puts the pictures of a prompt in their places; in `context` it leaves so many positions for a reply.
    ///
    /// # Errors
    /// Says how many tokens are of text and how many of pictures.
    pub(crate) fn new(
        ids: &[u32],
        planned: Vec<Planned>,
        sight: &Sight,
        tokenizer: &Tokenizer,
        context: usize,
        reply: usize,
    ) -> Result<Placed, String> {
        let rows: usize = planned.iter().map(|planned| planned.rows(sight)).sum();
        let full = |text: usize| match text + rows + reply <= context {
            true => Ok(()),
            false => Err(format!(
                "{} tokens, {text} of text and {rows} of {} pictures and videos, {} a context of {context}; shorten the \
                 text, send fewer pictures or smaller ones, or raise --context",
                text + rows,
                planned.len(),
                if reply > 0 { "leave no room for a reply in" } else { "do not fit" }
            )),
        };
        // Before a list of that length is made; with time stamps the text may be longer yet.
        full(ids.len().saturating_sub(planned.len()))?;
        let media: Vec<Medium> = planned.iter().map(|planned| planned.medium.clone()).collect();
        let merge = sight.picture.merge;
        let expanded = expand(ids, &media, merge, &sight.ids, |text| tokenizer.encode(text))
            .map_err(|error| error.to_string())?;
        full(expanded.ids.len() - rows)?;
        Ok(Placed { ids: expanded.ids, spans: expanded.spans, planned })
    }

    /// Decodes the pictures.
    pub(crate) fn decode(self, sight: &Arc<Sight>) -> Result<(Vec<u32>, Vec<Media>), Refused> {
        let Placed { ids, spans, planned } = self;
        let whole = |(number, planned)| {
            let (patches, key) = Decoding::new(planned, sight.clone(), Allowed::default().limits).whole()?;
            Ok(Media::of(number, &spans, patches, key))
        };
        let media = planned.into_iter().enumerate().map(whole).collect::<Result<_, _>>()?;
        Ok((ids, media))
    }
}

/// Refuses a conversation in whose texts somebody wrote a placeholder: it would be taken for a picture. `text` is what
/// the template makes of it.
pub(crate) fn check_words(
    chat: &ChatRequest,
    text: &str,
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    sight: &Sight,
) -> Result<(), Refused> {
    let words = [sight.ids.image, sight.ids.video].map(|id| tokenizer.decode(&[id], false));
    let held = |text: &str| words.iter().find(|word| text.contains(*word));
    if held(text).is_none() {
        return Ok(());
    }
    // Those of the pictures go; what stays was written. Rendered, because parts may make a word together.
    let bare = ChatRequest { messages: without_media(&chat.messages), ..chat.clone() };
    let text = template.render(&bare).map_err(|error| Refused::new("messages", error))?;
    match held(&text) {
        None => Ok(()),
        Some(word) => Err(Refused::new(
            holder(&bare.messages, word),
            format!("the text holds {word}, which stands for a picture in a prompt; write it in another way"),
        )),
    }
}

/// What is wrong with a prompt without pictures that holds a placeholder.
pub(crate) fn stray(ids: &[u32], sight: &Sight) -> Option<String> {
    let pad = |id: &u32| [sight.ids.image, sight.ids.video].contains(id);
    let at = ids.iter().position(pad)?;
    Some(format!("token {} at position {at} stands for a picture, and this prompt brings none", ids[at]))
}

/// The messages with a dot for each picture.
fn without_media(messages: &Value) -> Value {
    let mut messages = messages.clone();
    for message in messages.as_array_mut().into_iter().flatten() {
        for part in message.get_mut("content").and_then(Value::as_array_mut).into_iter().flatten() {
            if part.get("type").is_some_and(|kind| kind != "text") {
                *part = json!({"type": "text", "text": "."});
            }
        }
    }
    messages
}

/// The place of the text that holds `word`; the messages, if several hold it together.
fn holder(messages: &Value, word: &str) -> String {
    let holds = |value: &Value| value.as_str().is_some_and(|text| text.contains(word));
    for (at, message) in messages.as_array().into_iter().flatten().enumerate() {
        if let Some(name) = ["content", "reasoning_content"].into_iter().find(|name| holds(&message[*name])) {
            return format!("messages[{at}].{name}");
        }
        let parts = message["content"].as_array().into_iter().flatten();
        if let Some(number) = parts.into_iter().position(|part| holds(&part["text"])) {
            return part_place(at, number);
        }
    }
    "messages".into()
}
