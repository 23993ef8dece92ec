//! `/v1/chat/completions`: messages to a prompt, with or without reasoning.

use runtime::chat::ChatRequest;
use runtime::pictures::Sight;
use serde_json::Value;

use super::asked::{Asked, Prompt, ReplyForm};
use super::errors::ApiError;
use super::fields::{self, Fields, Ignored};
use super::parts::Parts;
use super::state::{App, Model};
use crate::pictures::{self, Looked, Placed, Planned, Refused};

/// Reads a request. Its pictures are not decoded yet.
pub(crate) fn read(body: &[u8], app: &App, model: &Model) -> Result<Asked, ApiError> {
    let mut ignored = Ignored::default();
    let mut fields = fields::body(body, &fields::CHAT, &mut ignored)?;
    let logprobs = logprobs(&mut fields)?;
    let mut asked = Asked::read(&mut fields, app, model, logprobs, &mut ignored)?;
    only_text(&mut fields)?;
    let conversation = conversation(&mut fields, app, model, &mut ignored)?;
    fields.finish()?;
    asked.prompts = vec![prompt(conversation, app, model)?];
    asked.ignored = ignored;
    Ok(asked)
}

/// Messages, how they are to be rendered, and the pictures that they hold.
pub(crate) struct Conversation {
    pub(crate) chat: ChatRequest,
    looked: Vec<Looked>,
}

/// Reads the conversation of a request, and the headers of its pictures.
pub(crate) fn conversation(
    fields: &mut Fields,
    app: &App,
    model: &Model,
    ignored: &mut Ignored,
) -> Result<Conversation, ApiError> {
    let Some(list) = fields.any("messages") else {
        return Err(fields.wrong("messages", "is missing; give a list of messages"));
    };
    let allowed = app.settings.pictures();
    pictures::count(&list, allowed.budget.pictures).map_err(|why| app.unseen(why))?;
    let Value::Array(list) = list else { return Err(fields.wrong("messages", "is not a list")) };
    let mut parts = Parts { ignored, most_bytes: allowed.limits.bytes, sent: Vec::new() };
    let messages = list.into_iter().enumerate().map(|(at, value)| message(at, value, &mut parts));
    let mut chat = ChatRequest::new(Value::Array(messages.collect::<Result<_, _>>()?));
    let Parts { sent, .. } = parts;
    if let (Some(first), None) = (sent.first(), &model.sight) {
        return Err(app.unseen(Refused::blind(&first.place)));
    }
    let looked = pictures::look(sent, &allowed).map_err(|why| app.unseen(why))?;
    let (mut thinking, mut effort) = (fields.flag("enable_thinking")?, fields.text("reasoning_effort")?);
    if let Some(value) = fields.any("chat_template_kwargs") {
        let path = fields.path("chat_template_kwargs");
        let mut more = Fields::new(value, &path, &fields::TEMPLATE, ignored)?;
        agree(&mut thinking, more.flag("enable_thinking")?, &more, "enable_thinking")?;
        agree(&mut effort, more.text("reasoning_effort")?, &more, "reasoning_effort")?;
        more.finish()?;
    }
    if let Some(word) = effort {
        let level = Effort::named(&word).ok_or_else(|| {
            fields.wrong("reasoning_effort", format!("must be one of {}", Effort::NAMES.join(", ")))
        })?;
        let on = level.0.is_some();
        if thinking.is_some_and(|thinking| thinking != on) {
            let why = format!("is {word}, and enable_thinking says otherwise; give one of them");
            return Err(fields.wrong("reasoning_effort", why));
        }
        thinking = Some(on);
        match level.0 {
            Some(level) if model.chat.reads("reasoning_effort") => {
                chat.reasoning_effort = Some(level.to_owned());
            }
            // On or off is honoured; of how much, this template knows nothing.
            Some(_) => ignored.add("reasoning_effort"),
            None => {}
        }
    }
    chat.enable_thinking = thinking.or(app.settings.default_thinking);
    Ok(Conversation { chat, looked })
}

/// The prompt of a conversation, and whether it opened the reasoning of its reply.
fn prompt(conversation: Conversation, app: &App, model: &Model) -> Result<Prompt, ApiError> {
    let text = render(&conversation.chat, model)?;
    let opened = text.trim_end().ends_with("<think>");
    let ids = encode_prompt(&text, "messages", model)?;
    let placed = conversation.place(&text, ids, app, model)?;
    Prompt::new(placed, ReplyForm::Thinking { opened }, "messages", model)
}

impl Conversation {
    /// Puts the pictures in their places among the ids of the rendered text; both together leave room for a reply.
    pub(crate) fn place(
        self,
        text: &str,
        ids: Vec<u32>,
        app: &App,
        model: &Model,
    ) -> Result<Placed, ApiError> {
        let Some(sight) = &model.sight else { return Ok(Placed::text(ids)) };
        let (chat, tokenizer) = (&self.chat, &model.tokenizer);
        pictures::check_words(chat, text, &model.chat, tokenizer, sight).map_err(|why| app.unseen(why))?;
        if self.looked.is_empty() {
            return Ok(Placed::text(ids));
        }
        let planned = planned(self.looked, sight).map_err(|why| app.unseen(why))?;
        Placed::new(&ids, planned, sight, tokenizer, model.context, 1)
            .map_err(|why| app.unseen(Refused::new("messages", why)))
    }
}

fn planned(looked: Vec<Looked>, sight: &Sight) -> Result<Vec<Planned>, Refused> {
    looked.into_iter().map(|looked| looked.plan(sight)).collect()
}

/// The text of a conversation.
pub(crate) fn render(chat: &ChatRequest, model: &Model) -> Result<String, ApiError> {
    model.chat.render(chat).map_err(|error| ApiError::field("messages", error.to_string()))
}

/// The ids of a prompt. One that is far too long is refused before its ids are counted.
pub(crate) fn encode_prompt(text: &str, path: &str, model: &Model) -> Result<Vec<u32>, ApiError> {
    if !model.tokenizer.may_fit(text.len(), model.context) {
        let (bytes, most) = (text.len(), model.context);
        let why = format!("a text of {bytes} bytes has more tokens than a context of {most}; shorten it");
        return Err(ApiError::field(path, why));
    }
    encode(text, path, model)
}

/// The ids of a text.
pub(crate) fn encode(text: &str, path: &str, model: &Model) -> Result<Vec<u32>, ApiError> {
    model.tokenizer.encode(text).map_err(|error| ApiError::field(path, error.to_string()))
}

/// How much reasoning, in the words of templates; none is no reasoning.
struct Effort(Option<&'static str>);

impl Effort {
    const NAMES: [&'static str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

    /// The wire has more names than templates have levels.
    fn named(name: &str) -> Option<Effort> {
        match name {
            "none" => Some(Effort(None)),
            "minimal" | "low" => Some(Effort(Some("low"))),
            "medium" => Some(Effort(Some("medium"))),
            "high" | "xhigh" | "max" => Some(Effort(Some("xhigh"))),
            _ => None,
        }
    }
}

/// One setting under two names: they must not differ.
fn agree<T: PartialEq>(
    one: &mut Option<T>,
    other: Option<T>,
    at: &Fields,
    name: &str,
) -> Result<(), ApiError> {
    match (&one, other) {
        (Some(one), Some(other)) if *one != other => {
            Err(at.wrong(name, "differs from the field of that name beside it; give one"))
        }
        (None, other) => {
            *one = other;
            Ok(())
        }
        _ => Ok(()),
    }
}

fn logprobs(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let on = fields.flag("logprobs")?.unwrap_or(false);
    match fields.integer("top_logprobs", 0..=20)? {
        Some(_) if !on => Err(fields.wrong("top_logprobs", "needs logprobs; set it to true")),
        top => Ok(on.then(|| top.unwrap_or(0) as u32)),
    }
}

/// Refuses what this build does not make: tool calls and constrained output.
fn only_text(fields: &mut Fields) -> Result<(), ApiError> {
    if !fields.list("tools")?.unwrap_or_default().is_empty() {
        return Err(fields.wrong("tools", "this build makes no tool calls; leave them out"));
    }
    match fields.any("tool_choice") {
        None => {}
        Some(Value::String(choice)) if choice == "none" => {}
        Some(_) => return Err(fields.wrong("tool_choice", "this build makes no tool calls; leave it out")),
    }
    let Some(format) = fields.any("response_format") else { return Ok(()) };
    let path = fields.path("response_format");
    let mut format = Fields::new(format, &path, &fields::FORMAT, &mut Ignored::default())?;
    match format.any("type") {
        Some(Value::String(kind)) if kind == "text" => format.finish(),
        _ => Err(ApiError::field(path, r#"this build makes plain text only: give {"type": "text"}"#)),
    }
}

/// Checks a message, and gives it as a template may see it.
fn message(at: usize, value: Value, parts: &mut Parts<'_>) -> Result<Value, ApiError> {
    let path = format!("messages[{at}]");
    let mut fields = Fields::new(value, &path, &fields::MESSAGE, parts.ignored)?;
    let Some(role) = fields.text("role")? else { return Err(fields.wrong("role", "is missing")) };
    if !["system", "developer", "user", "assistant"].contains(&role.as_str()) {
        return Err(fields.wrong("role", "must be system, developer, user or assistant"));
    }
    let mut message = serde_json::Map::new();
    match fields.any("content") {
        Some(content @ Value::String(_)) => message.insert("content".into(), content),
        Some(Value::Array(list)) => {
            let part = |(number, value)| parts.read(value, &pictures::part_place(at, number), &role);
            let list = list.into_iter().enumerate().map(part);
            message.insert("content".into(), Value::Array(list.collect::<Result<_, _>>()?))
        }
        Some(_) => return Err(fields.wrong("content", "must be a string or a list of parts")),
        None if role == "assistant" => message.insert("content".into(), "".into()),
        None => return Err(fields.wrong("content", "is missing")),
    };
    if !fields.list("tool_calls")?.unwrap_or_default().is_empty() {
        return Err(fields.wrong("tool_calls", "this build reads no tool calls; leave them out"));
    }
    if let Some(reasoning) = fields.text("reasoning_content")? {
        if role != "assistant" {
            return Err(fields.wrong("reasoning_content", "belongs to messages of the assistant"));
        }
        message.insert("reasoning_content".into(), reasoning.into());
    }
    message.insert("role".into(), role.into());
    fields.finish()?;
    Ok(Value::Object(message))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_message_is_what_a_template_may_see() {
        let mut ignored = Ignored::default();
        let parts =
            json!({"role": "user", "content": [{"type": "text", "text": "a"}], "name": "n", "refusal": null});
        let seen = message(3, parts, &mut ignored).unwrap();
        assert_eq!(seen, json!({"role": "user", "content": [{"type": "text", "text": "a"}]}));
        assert_eq!(ignored.list().unwrap(), "messages[].name, messages[].refusal");
        let silent =
            json!({"role": "assistant", "content": null, "reasoning_content": "r", "tool_calls": []});
        let seen = message(0, silent, &mut ignored).unwrap();
        assert_eq!(seen, json!({"role": "assistant", "content": "", "reasoning_content": "r"}));
    }

    fn message(at: usize, value: Value, ignored: &mut Ignored) -> Result<Value, ApiError> {
        super::message(at, value, &mut Parts { ignored, most_bytes: 64, sent: Vec::new() })
    }

    #[test]
    fn what_is_wrong_with_a_message_is_named_by_its_path() {
        let picture = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}});
        let with = |field: &str, value: Value| {
            let mut part = picture.clone();
            part["image_url"][field] = value;
            json!({"role": "user", "content": [part]})
        };
        let clip = |more: Value| {
            let mut part = json!({"type": "video", "video": ["data:image/png;base64,"], "fps": 2});
            part.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            json!({"role": "user", "content": [{"type": "text", "text": ""}, part]})
        };
        for (value, param) in [
            (json!("text"), "messages[1]"),
            (json!({"content": "a"}), "messages[1].role"),
            (json!({"role": "tool", "content": "a"}), "messages[1].role"),
            (json!({"role": "user"}), "messages[1].content"),
            (json!({"role": "user", "content": 1}), "messages[1].content"),
            (json!({"role": "system", "content": [picture]}), "messages[1].content[0]"),
            (json!({"role": "assistant", "content": [picture]}), "messages[1].content[0]"),
            (with("url", "https://example.org/a.png".into()), "messages[1].content[0].image_url.url"),
            (with("url", Value::Null), "messages[1].content[0].image_url.url"),
            (with("detail", "full".into()), "messages[1].content[0].image_url.detail"),
            (with("size", 5.into()), "messages[1].content[0].image_url.size"),
            (json!({"role": "user", "content": [{"type": "image_url"}]}), "messages[1].content[0].image_url"),
            (
                json!({"role": "user", "content": [{"type": "image_url", "image_url": "data:,"}]}),
                "messages[1].content[0].image_url",
            ),
            (clip(json!({"fps": 0})), "messages[1].content[1].fps"),
            (clip(json!({"fps": null})), "messages[1].content[1].fps"),
            (clip(json!({"fps": "2"})), "messages[1].content[1].fps"),
            (clip(json!({"video": null})), "messages[1].content[1].video"),
            (clip(json!({"video": "data:image/gif;base64,"})), "messages[1].content[1].video"),
            (clip(json!({"video": [5]})), "messages[1].content[1].video[0]"),
            (clip(json!({"video": ["data:image/png;base64,", "a.png"]})), "messages[1].content[1].video[1]"),
            (clip(json!({"frames": 5})), "messages[1].content[1].frames"),
            (clip(json!({"type": "video_url"})), "messages[1].content[1]"),
            (clip(json!({"type": "image"})), "messages[1].content[1]"),
            (clip(json!({"type": "input_audio"})), "messages[1].content[1]"),
            (json!({"role": "user", "content": [{"type": "text"}]}), "messages[1].content[0].text"),
            (json!({"role": "user", "content": [{"text": "a"}]}), "messages[1].content[0].type"),
            (
                json!({"role": "user", "content": [{"type": "text", "text": "", "x": 1}]}),
                "messages[1].content[0].x",
            ),
            (
                json!({"role": "user", "content": "a", "reasoning_content": "r"}),
                "messages[1].reasoning_content",
            ),
            (json!({"role": "assistant", "content": "a", "tool_calls": [1]}), "messages[1].tool_calls"),
            (json!({"role": "user", "content": "a", "weight": 1}), "messages[1].weight"),
        ] {
            let error = message(1, value, &mut Ignored::default()).unwrap_err().to_json();
            assert!(error.contains(&format!("\"param\":\"{param}\"")), "{param} is not in {error}");
        }
    }

    #[test]
    fn effort_has_more_names_than_levels() {
        let levels = Effort::NAMES.map(|name| Effort::named(name).unwrap().0);
        let expected =
            [None, Some("low"), Some("low"), Some("medium"), Some("xhigh"), Some("xhigh"), Some("xhigh")];
        assert_eq!(levels, expected);
        assert!(Effort::named("hi").is_none());
    }

    #[test]
    fn tools_and_formats_other_than_text_are_refused() {
        let read = |body: Value| {
            let mut ignored = Ignored::default();
            let mut fields = Fields::new(body, "", &fields::CHAT, &mut ignored).unwrap();
            only_text(&mut fields).and_then(|()| fields.finish())
        };
        assert!(
            read(json!({"tools": [], "tool_choice": "none", "response_format": {"type": "text"}})).is_ok()
        );
        for body in [
            json!({"tools": [{"type": "function"}]}),
            json!({"tool_choice": "auto"}),
            json!({"response_format": {"type": "json_object"}}),
        ] {
            assert!(read(body.clone()).is_err(), "{body}");
        }
    }
}
