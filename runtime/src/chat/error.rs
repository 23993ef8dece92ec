//! Why a chat could not be rendered, in words for whoever wrote the chat or chose the folder.

use std::fmt;
use std::path::PathBuf;

/// Why messages could not become a prompt.
#[derive(Debug)]
pub enum ChatError {
    /// A template file could not be read.
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The checkpoint folder has no template.
    Missing {
        /// The folder.
        dir: PathBuf,
    },
    /// `tokenizer_config.json` is not usable.
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The template is not Jinja that is understood here.
    Syntax {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The template itself refused the messages.
    Refused {
        /// The template's own words.
        message: String,
    },
    /// The template could not be carried out on these messages.
    Render {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        why: String,
    },
    /// An extra variable has the name of a field of the request.
    Reserved {
        /// The name.
        name: String,
    },
    /// A chat file is not JSON.
    NotJson {
        /// What is wrong with it.
        why: String,
    },
    /// A chat file is neither a list nor an object.
    NotAChat,
    /// A chat file has keys that mean nothing here.
    UnknownKeys {
        /// All of them.
        keys: Vec<String>,
    },
    /// A field of a chat file is missing or has the wrong type.
    Field {
        /// Its name.
        key: String,
        /// What it must be.
        wanted: &'static str,
    },
}

impl fmt::Display for ChatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ChatError::Read { path, source } => {
                write!(f, "cannot read {}: {source}; check the checkpoint folder", path.display())
            }
            ChatError::Missing { dir } => write!(
                f,
                "{} has no chat template; add its chat_template.jinja, or give the prompt as plain text or ids",
                dir.display()
            ),
            ChatError::Config { path, why } => write!(
                f,
                "cannot use {}: {why}; copy it again from the model's repository, or add chat_template.jinja",
                path.display()
            ),
            ChatError::Syntax { path, why } => write!(
                f,
                "cannot compile the chat template {}: {why}; use the model's own template",
                path.display()
            ),
            ChatError::Refused { message } => {
                write!(f, "the chat template refuses these messages: {message}")
            }
            ChatError::Render { path, why } => write!(
                f,
                "the chat template {} fails on these messages: {why}; check their fields",
                path.display()
            ),
            ChatError::Reserved { name } => {
                write!(f, "the extra template variable `{name}` is a field of its own; give it there")
            }
            ChatError::NotJson { why } => {
                write!(f, "the chat is not JSON: {why}; give a list of messages")
            }
            ChatError::NotAChat => {
                write!(f, "the chat is neither a list of messages nor an object with `messages`; give one")
            }
            ChatError::UnknownKeys { keys } => write!(
                f,
                "the chat has unknown keys: {}; known are messages, tools, enable_thinking and reasoning_effort",
                keys.join(", ")
            ),
            ChatError::Field { key, wanted } => {
                write!(f, "the chat's `{key}` must be {wanted}; add or correct it")
            }
        }
    }
}

impl std::error::Error for ChatError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            ChatError::Read { source, .. } => Some(source),
            _ => None,
        }
    }
}
