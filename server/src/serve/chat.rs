//! `/v1/chat/completions`: messages to a prompt, with or without reasoning.

use runtime::chat::ChatRequest;
use serde_json::Value;

use super::asked::{Asked, Prompt, ReplyForm};
use super::errors::ApiError;
use super::fields::{self, Fields, Ignored};
use super::state::{App, Model};

/// Reads a request.
pub(crate) fn read(body: &[u8], app: &App, model: &Model) -> Result<Asked, ApiError> {
    let mut ignored = Ignored::default();
    let mut fields = fields::body(body, &fields::CHAT, &mut ignored)?;
    let logprobs = logprobs(&mut fields)?;
    let mut asked = Asked::read(&mut fields, app, model, logprobs, &mut ignored)?;
    only_text(&mut fields)?;
    let chat = conversation(&mut fields, app, model, &mut ignored)?;
    fields.finish()?;
    asked.prompts = vec![prompt(&chat, model)?];
    asked.ignored = ignored;
    Ok(asked)
}

/// The messages of a request and how they are to be rendered.
pub(crate) fn conversation(
    fields: &mut Fields,
    app: &App,
    model: &Model,
    ignored: &mut Ignored,
) -> Result<ChatRequest, ApiError> {
    let Some(list) = fields.list("messages")? else {
        return Err(fields.wrong("messages", "is missing; give a list of messages"));
    };
    let messages = list.into_iter().enumerate().map(|(at, value)| message(at, value, ignored));
    let mut chat = ChatRequest::new(Value::Array(messages.collect::<Result<_, _>>()?));
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
    Ok(chat)
}

/// The prompt of a conversation, and whether it opened the reasoning of its reply.
fn prompt(chat: &ChatRequest, model: &Model) -> Result<Prompt, ApiError> {
    let text = render(chat, model)?;
    let opened = text.trim_end().ends_with("<think>");
    let ids = encode_prompt(&text, "messages", model)?;
    Prompt::new(ids, ReplyForm::Thinking { opened }, "messages", model)
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
fn message(at: usize, value: Value, ignored: &mut Ignored) -> Result<Value, ApiError> {
    let path = format!("messages[{at}]");
    let mut fields = Fields::new(value, &path, &fields::MESSAGE, ignored)?;
    let Some(role) = fields.text("role")? else { return Err(fields.wrong("role", "is missing")) };
    if !["system", "developer", "user", "assistant"].contains(&role.as_str()) {
        return Err(fields.wrong("role", "must be system, developer, user or assistant"));
    }
    let mut message = serde_json::Map::new();
    match fields.any("content") {
        Some(content @ Value::String(_)) => message.insert("content".into(), content),
        Some(Value::Array(parts)) => {
            let path = fields.path("content");
            let parts = parts.into_iter().enumerate().map(|(at, value)| part(at, value, &path, ignored));
            message.insert("content".into(), Value::Array(parts.collect::<Result<_, _>>()?))
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

/// Checks a part of a message's content: text.
fn part(at: usize, value: Value, path: &str, ignored: &mut Ignored) -> Result<Value, ApiError> {
    let path = format!("{path}[{at}]");
    // What is no text is named as such, whatever fields it has.
    if let Some(kind) = value.get("type").and_then(Value::as_str).filter(|kind| *kind != "text") {
        let why = format!("holds a part of kind {kind}; this build reads text only, so leave it out");
        return Err(ApiError::field(path, why));
    }
    let mut fields = Fields::new(value, &path, &fields::PART, ignored)?;
    if fields.text("type")?.is_none() {
        return Err(fields.wrong("type", "is missing"));
    }
    let Some(text) = fields.text("text")? else { return Err(fields.wrong("text", "is missing")) };
    fields.finish()?;
    Ok(serde_json::json!({"type": "text", "text": text}))
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

    #[test]
    fn what_is_wrong_with_a_message_is_named_by_its_path() {
        let picture = json!({"type": "image_url", "image_url": {"url": "x"}});
        for (value, param) in [
            (json!("text"), "messages[1]"),
            (json!({"content": "a"}), "messages[1].role"),
            (json!({"role": "tool", "content": "a"}), "messages[1].role"),
            (json!({"role": "user"}), "messages[1].content"),
            (json!({"role": "user", "content": 1}), "messages[1].content"),
            (json!({"role": "user", "content": [picture]}), "messages[1].content[0]"),
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
