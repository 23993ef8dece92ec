//! Chat messages to prompt text, through the checkpoint's own Jinja template.
//!
//! The environment is the one that Hugging Face renders chat templates in: blocks trimmed,
//! `raise_exception`, loop controls, Python's string methods, and `tojson` as `json.dumps` with
//! `ensure_ascii=False`.

mod error;
mod python;

pub use error::ChatError;

use std::fmt;
use std::path::{Path, PathBuf};

use minijinja::value::{Kwargs, Value as Jinja};
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use serde_json::{Map, Value};

const TEMPLATE: &str = "chat";

/// The chat template of one checkpoint.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// `eos_token` and its like, which templates may use.
    token_names: Map<String, Value>,
    path: PathBuf,
}

impl ChatTemplate {
    /// Reads the template of the checkpoint folder `dir`: `chat_template.jinja`, or else
    /// `chat_template` in `tokenizer_config.json`.
    pub fn open(dir: &Path) -> Result<ChatTemplate, ChatError> {
        let config_path = dir.join("tokenizer_config.json");
        let config: Map<String, Value> = match read(&config_path)? {
            Some(text) => serde_json::from_str(&text)
                .map_err(|why| ChatError::Config { path: config_path.clone(), why: why.to_string() })?,
            None => Map::new(),
        };
        let file_path = dir.join("chat_template.jinja");
        let (path, source) = match (read(&file_path)?, config.get("chat_template")) {
            (Some(source), _) => (file_path, source),
            (None, Some(Value::String(source))) => (config_path, source.clone()),
            (None, None | Some(Value::Null)) => return Err(ChatError::Missing { dir: dir.to_path_buf() }),
            (None, Some(_)) => {
                let why = "chat_template is not a string".to_string();
                return Err(ChatError::Config { path: config_path, why });
            }
        };

        if source.len() > TEMPLATE_BYTES {
            let why =
                format!("it has {} bytes; a template of more than {TEMPLATE_BYTES} is none", source.len());
            return Err(ChatError::Syntax { path, why });
        }
        let mut environment = environment();
        environment
            .add_template_owned(TEMPLATE, source)
            .map_err(|why| ChatError::Syntax { path: path.clone(), why: why.to_string() })?;
        Ok(ChatTemplate { environment, token_names: token_names(&config), path })
    }

    /// A template for a model without texts: every chat is empty.
    pub fn blank() -> ChatTemplate {
        let mut environment = environment();
        environment.add_template(TEMPLATE, "").expect("nothing is a template");
        ChatTemplate { environment, token_names: Map::new(), path: PathBuf::new() }
    }

    /// The file that the template came from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the template reads a variable of this name, from the caller or anyone.
    pub fn reads(&self, variable: &str) -> bool {
        self.environment
            .get_template(TEMPLATE)
            .is_ok_and(|template| template.undeclared_variables(false).contains(variable))
    }

    /// The prompt text of `request`.
    pub fn render(&self, request: &ChatRequest) -> Result<String, ChatError> {
        let mut variables = self.token_names.clone();
        variables.extend(request.extra.clone());
        let mut set = |name: &str, value: Value| match request.extra.contains_key(name) {
            true => Err(ChatError::Reserved { name: name.to_string() }),
            false => {
                variables.insert(name.to_string(), value);
                Ok(())
            }
        };
        set("messages", request.messages.clone())?;
        // Hugging Face always defines `tools` and leaves the two after it to the caller.
        set("tools", request.tools.clone().unwrap_or(Value::Null))?;
        set("add_generation_prompt", Value::Bool(request.add_generation_prompt))?;
        if let Some(thinking) = request.enable_thinking {
            set("enable_thinking", Value::Bool(thinking))?;
        }
        if let Some(effort) = &request.reasoning_effort {
            set("reasoning_effort", Value::String(effort.clone()))?;
        }
        self.environment
            .get_template(TEMPLATE)
            .and_then(|template| template.render(Jinja::from_serialize(&variables)))
            .map_err(|error| self.explain(&error))
    }

    fn explain(&self, error: &Error) -> ChatError {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
        while let Some(this) = cause {
            if let Some(Raised(message)) = this.downcast_ref() {
                return ChatError::Refused { message: message.clone() };
            }
            cause = this.source();
        }
        let line = error.line().map_or(String::new(), |line| format!(" at line {line}"));
        ChatError::Render { path: self.path.clone(), why: format!("{error}{line}") }
    }
}

/// What a prompt is rendered from. What is `None` stays undefined in the template.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatRequest {
    /// The list of messages, as the caller wrote it.
    pub messages: Value,
    /// The functions that the model may call.
    pub tools: Option<Value>,
    /// Whether the answer begins with reasoning.
    pub enable_thinking: Option<bool>,
    /// How much reasoning, in the template's own words.
    pub reasoning_effort: Option<String>,
    /// Whether the text ends with the opening of an assistant turn.
    pub add_generation_prompt: bool,
    /// Further variables of the template.
    pub extra: Map<String, Value>,
}

impl ChatRequest {
    /// A request for an answer to `messages`, everything else left to the template.
    pub fn new(messages: Value) -> ChatRequest {
        ChatRequest { messages, add_generation_prompt: true, ..ChatRequest::default() }
    }

    /// A request for an answer to one user message.
    pub fn user(text: &str) -> ChatRequest {
        ChatRequest::new(serde_json::json!([{"role": "user", "content": text}]))
    }

    /// Reads a chat file: a JSON list of messages, or an object with `messages` and optionally
    /// `tools`, `enable_thinking` and `reasoning_effort`.
    pub fn from_json(text: &str) -> Result<ChatRequest, ChatError> {
        let fields = match serde_json::from_str(text) {
            Ok(Value::Array(messages)) => return Ok(ChatRequest::new(Value::Array(messages))),
            Ok(Value::Object(fields)) => fields,
            Ok(_) => return Err(ChatError::NotAChat),
            Err(why) => return Err(ChatError::NotJson { why: why.to_string() }),
        };
        let mut request = ChatRequest::new(Value::Null);
        let mut unknown = Vec::new();
        for (key, value) in fields {
            match (key.as_str(), value) {
                ("messages", messages @ Value::Array(_)) => request.messages = messages,
                ("messages", _) => return Err(ChatError::Field { key, wanted: "a list" }),
                ("tools", tools @ Value::Array(_)) => request.tools = Some(tools),
                ("tools", _) => return Err(ChatError::Field { key, wanted: "a list" }),
                ("enable_thinking", Value::Bool(on)) => request.enable_thinking = Some(on),
                ("enable_thinking", _) => return Err(ChatError::Field { key, wanted: "true or false" }),
                ("reasoning_effort", Value::String(effort)) => request.reasoning_effort = Some(effort),
                ("reasoning_effort", _) => return Err(ChatError::Field { key, wanted: "a string" }),
                _ => unknown.push(key),
            }
        }
        if !unknown.is_empty() {
            return Err(ChatError::UnknownKeys { keys: unknown });
        }
        if request.messages.is_null() {
            return Err(ChatError::Field { key: "messages".to_string(), wanted: "a list" });
        }
        Ok(request)
    }
}

/// Longest template. Those of models have a few thousand bytes.
const TEMPLATE_BYTES: usize = 1 << 18;
/// Steps that rendering may take: a template that loops on purpose ends within a second or so.
const TEMPLATE_STEPS: u64 = 20_000_000;

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(TEMPLATE_STEPS));
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(|out, _, value| {
        out.write_str(&python::str(value)).map_err(|_| ErrorKind::WriteFailure.into())
    });
    environment.add_filter("string", |value: Jinja| python::str(&value));
    environment.add_filter("tojson", |value: Jinja, kwargs: Kwargs| python::tojson(&value, kwargs));
    environment.add_function("raise_exception", |message: Jinja| -> Result<Jinja, Error> {
        let raised = Raised(python::str(&message));
        Err(Error::new(ErrorKind::InvalidOperation, "raise_exception was called").with_source(raised))
    });
    environment
}

/// The special tokens that `tokenizer_config.json` names, each a string or an object with `content`.
fn token_names(config: &Map<String, Value>) -> Map<String, Value> {
    let names = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
    let text = |name: &str| match config.get(name)? {
        Value::Object(token) => token.get("content").cloned(),
        token => Some(token.clone()),
    };
    let named = names.into_iter().filter_map(|name| Some((name.to_string(), text(name)?)));
    named.filter(|(_, token)| token.is_string()).collect()
}

fn read(path: &Path) -> Result<Option<String>, ChatError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ChatError::Read { path: path.to_path_buf(), source }),
    }
}

/// What a template said through `raise_exception`, on its way out of the engine.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}
