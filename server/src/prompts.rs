//! The prompts of a `generate` line, from options and files to token ids and pictures.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use runtime::chat::{ChatRequest, ChatTemplate};
use runtime::pictures::Sight;
use runtime::request::Media;
use runtime::tokenizer::Tokenizer;
use serde_json::{Value, json};

use crate::args::{GenerateArgs, Switch};
use crate::failure::Failure;
use crate::image_root::{self, ImageRoot};
use crate::pictures::{self, Allowed, Content, Looked, Placed, Refused, Sent, frame_place, part_place};

/// A prompt before the model's tokenizer and template are known.
pub(crate) enum Prompt {
    Ids(Vec<u32>),
    Raw(String),
    Chat(Box<Chat>),
}

/// A conversation and its pictures.
pub(crate) struct Chat {
    /// The file that it was read from, if any.
    file: Option<PathBuf>,
    request: ChatRequest,
    looked: Vec<Looked>,
}

/// What an opened model makes of prompts.
pub(crate) struct Reader<'a> {
    pub(crate) tokenizer: &'a Tokenizer,
    pub(crate) chat: &'a ChatTemplate,
    pub(crate) sight: Option<Arc<Sight>>,
    /// Positions that prompt and answer have together.
    pub(crate) context: usize,
}

/// Reads everything that can be wrong with the prompts before the model is loaded.
pub(crate) fn read(args: &GenerateArgs) -> Result<Vec<Prompt>, Failure> {
    if args.raw {
        return Ok(args.prompt.iter().cloned().map(Prompt::Raw).collect());
    }
    let with_pictures = |text: &String| beside(text, &args.image).map_err(Failure::Input);
    let mut chats = args.prompt.iter().map(with_pictures).collect::<Result<Vec<_>, _>>()?;
    if let Some(path) = &args.messages {
        let text = fs::read_to_string(path).map_err(|error| {
            Failure::Input(format!("cannot read {}: {error}; check --messages", path.display()))
        })?;
        let named = |why: String| Failure::Input(format!("{}: {why}", path.display()));
        let chat = ChatRequest::from_json(&text).map_err(|error| named(error.to_string()))?;
        let looked = take_pictures(&chat.messages, args.image_root.as_deref());
        let looked = looked.map_err(|why| named(why.to_string()))?;
        chats.push(Chat { file: Some(path.clone()), request: chat, looked });
    }
    for Chat { request, .. } in &mut chats {
        request.enable_thinking = args.thinking.map(Switch::is_on).or(request.enable_thinking);
    }
    let ids = args.ids.iter().map(|ids| Prompt::Ids(ids.0.clone()));
    Ok(ids.chain(chats.into_iter().map(|chat| Prompt::Chat(Box::new(chat)))).collect())
}

impl Prompt {
    /// The ids that the model is given, and the pictures that stand in them.
    pub(crate) fn read(self, reader: &Reader<'_>) -> Result<(Vec<u32>, Vec<Media>), Failure> {
        let encode = |text: &str| reader.tokenizer.encode(text).map_err(Failure::input);
        let ids = match self {
            Prompt::Ids(ids) => ids,
            Prompt::Raw(text) => encode(&text)?,
            Prompt::Chat(chat) => {
                let Chat { file, request, looked } = *chat;
                let text = reader.chat.render(&request).map_err(Failure::input)?;
                let ids = encode(&text)?;
                return reader.see(&request, &text, ids, looked).map_err(|why| match file {
                    Some(file) => Failure::Input(format!("{}: {why}", file.display())),
                    None => Failure::input(why),
                });
            }
        };
        match reader.sight.as_ref().and_then(|sight| pictures::stray(&ids, sight)) {
            Some(why) => Err(Failure::Input(why)),
            None => Ok((ids, Vec::new())),
        }
    }
}

impl Reader<'_> {
    /// Puts the pictures of a chat in their places, and decodes them.
    fn see(
        &self,
        chat: &ChatRequest,
        text: &str,
        ids: Vec<u32>,
        looked: Vec<Looked>,
    ) -> Result<(Vec<u32>, Vec<Media>), Refused> {
        let Some(sight) = &self.sight else {
            return looked.first().map_or(Ok((ids, Vec::new())), |first| Err(Refused::blind(first.place())));
        };
        pictures::check_words(chat, text, self.chat, self.tokenizer, sight)?;
        if looked.is_empty() {
            return Ok((ids, Vec::new()));
        }
        let planned = looked.into_iter().map(|looked| looked.plan(sight)).collect::<Result<_, _>>()?;
        Placed::new(&ids, planned, sight, self.tokenizer, self.context, 1)
            .map_err(|why| Refused::new("messages", why))?
            .decode(sight)
    }
}

/// A user message of pictures and a text behind them.
fn beside(text: &str, files: &[PathBuf]) -> Result<Chat, String> {
    if files.is_empty() {
        return Ok(Chat { file: None, request: ChatRequest::user(text), looked: Vec::new() });
    }
    let looked = images(files)?;
    let mut parts = vec![picture_part(); files.len()];
    parts.push(json!({"type": "text", "text": text}));
    let request = ChatRequest::new(json!([{"role": "user", "content": parts}]));
    Ok(Chat { file: None, request, looked })
}

/// The files of --image, whose headers keep the limits.
pub(crate) fn images(files: &[PathBuf]) -> Result<Vec<Looked>, String> {
    let allowed = Allowed::default();
    let sent = |path: &PathBuf| {
        let file =
            image_root::read(path, allowed.limits.bytes).map_err(|why| format!("{why}; check --image"))?;
        Ok(Sent { place: format!("--image {}", path.display()), content: Content::Picture(file) })
    };
    let sent = files.iter().map(sent).collect::<Result<_, String>>()?;
    pictures::look(sent, &allowed).map_err(|why| why.to_string())
}

/// A picture as a template sees it.
pub(crate) fn picture_part() -> Value {
    json!({"type": "image", "image": ""})
}

/// Reads the files that parts of messages name; the parts stay for the template.
fn take_pictures(messages: &Value, root: Option<&Path>) -> Result<Vec<Looked>, Refused> {
    let allowed = Allowed::default();
    pictures::count(messages, allowed.budget.pictures)?;
    let mut files = Files { root, open: None, most: allowed.limits.bytes };
    let mut sent = Vec::new();
    for (at, message) in messages.as_array().into_iter().flatten().enumerate() {
        for (number, part) in message["content"].as_array().into_iter().flatten().enumerate() {
            let place = part_place(at, number);
            let Some(kind) = not_text(part) else { continue };
            let content = files.content(part, kind, &place)?;
            if message["role"] != "user" {
                let role = message["role"].as_str().unwrap_or("of another kind");
                let why =
                    format!("a message of role {role} cannot hold pictures; put them in a user message");
                return Err(Refused::new(place, why));
            }
            sent.push(Sent { place, content });
        }
    }
    pictures::look(sent, &allowed)
}

/// What a content part is, unless it is text.
fn not_text(part: &Value) -> Option<&str> {
    let fields = part.as_object()?;
    let stated = fields.get("type").and_then(Value::as_str).filter(|kind| *kind != "text");
    let held = || fields.keys().map(String::as_str).find(|key| !["type", "text"].contains(key));
    stated.or_else(held)
}

/// The files of a folder that is opened when the first of them is named.
struct Files<'a> {
    root: Option<&'a Path>,
    open: Option<ImageRoot>,
    most: usize,
}

impl Files<'_> {
    fn content(&mut self, part: &Value, kind: &str, place: &str) -> Result<Content, Refused> {
        let wrong = |why: String| Refused::new(place, why);
        let only = |known: &[&str]| {
            let mut keys = part.as_object().into_iter().flat_map(|part| part.keys());
            match keys.find(|key| !known.contains(&key.as_str())) {
                Some(key) => Err(wrong(format!("there is no field {key} here; give {}", known.join(", ")))),
                None => Ok(()),
            }
        };
        match part["type"].as_str() {
            Some("image") => {
                only(&["type", "image"])?;
                Ok(Content::Picture(self.read(&part["image"], place)?))
            }
            Some("video") => {
                only(&["type", "video", "fps"])?;
                let fps = part["fps"].as_f64().filter(|rate| vision::FRAME_RATES.contains(rate));
                let fps = fps.ok_or_else(|| wrong("fps must be a number from 0.001 to 1000".into()))?;
                let list = part["video"].as_array();
                let list =
                    list.ok_or_else(|| wrong("video must be a list of files, one for each frame".into()))?;
                let frame = |(at, name)| self.read(name, &frame_place(place, at));
                let frames = list.iter().enumerate().map(frame).collect::<Result<_, _>>()?;
                Ok(Content::Clip { frames, fps })
            }
            _ => Err(wrong(format!(
                "is a part of kind {kind}; give text, {{\"type\": \"image\", \"image\": FILE}} or \
                 {{\"type\": \"video\", \"video\": [FILE, ...], \"fps\": N}}"
            ))),
        }
    }

    fn read(&mut self, name: &Value, place: &str) -> Result<Vec<u8>, Refused> {
        let wrong = |why| Refused::new(place, why);
        let name = name.as_str().ok_or_else(|| wrong("must name a file".to_owned()))?;
        let root = match (&mut self.open, self.root) {
            (Some(open), _) => open,
            (none, Some(dir)) => none.insert(ImageRoot::open(dir).map_err(wrong)?),
            (None, None) => {
                return Err(wrong(format!("names the file {name}; give its folder with --image-root")));
            }
        };
        root.read(name, self.most).map_err(wrong)
    }
}
