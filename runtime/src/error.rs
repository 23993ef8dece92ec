//! Why a model folder could not be opened: every variant names the file, the key or the tensor.

mod config;
mod convert;
mod format;
mod header;

use std::fmt;
use std::io;
use std::path::PathBuf;

pub use config::ConfigError;
pub use convert::ConvertError;
pub use format::{FormatError, Located};
pub use header::HeaderError;

/// A model folder that cannot be loaded. All of these are faults of the input, found before any weight is used.
#[derive(Debug)]
#[non_exhaustive]
pub enum LoadError {
    /// The system refused a read.
    Io {
        /// What was being done, as in "open", "read the header of".
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A JSON settings file holds something this build cannot run.
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        problem: ConfigError,
    },
    /// The folder has neither weights in one file nor an index.
    NoWeights {
        /// The folder.
        dir: PathBuf,
    },
    /// A weight file lies in the folder but nothing says that it belongs to the model.
    StrayFile {
        /// The file.
        path: PathBuf,
        /// Where it should have been named.
        index: Option<PathBuf>,
    },
    /// The index is not a map from tensor to file.
    Index {
        /// The index file.
        path: PathBuf,
        /// What is wrong in it.
        detail: String,
    },
    /// The index names a file that the folder lacks.
    MissingShard {
        /// The index file.
        index: PathBuf,
        /// The missing file's name.
        shard: String,
        /// Tensors that should be in it.
        tensors: usize,
    },
    /// The index places a tensor in a file that does not hold it.
    IndexedElsewhere {
        /// The index file.
        index: PathBuf,
        /// The tensor.
        tensor: String,
        /// Where the index places it.
        shard: String,
        /// The file that does hold it, if any.
        found_in: Option<String>,
    },
    /// A file holds a tensor that the index does not name.
    NotInIndex {
        /// The index file.
        index: PathBuf,
        /// The tensor.
        tensor: String,
        /// The file that holds it.
        shard: String,
    },
    /// Two files hold a tensor of the same name.
    Duplicate {
        /// The tensor.
        tensor: String,
        /// One file.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
    /// A safetensors header is damaged.
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        problem: HeaderError,
    },
    /// The tensors found are not the tensors that the configuration asks for.
    Tensors {
        /// The folder.
        dir: PathBuf,
        /// Expected and absent.
        missing: Vec<String>,
        /// Present and not expected.
        left_over: Vec<String>,
    },
    /// A tensor has another shape than the configuration gives it.
    Shape {
        /// The tensor.
        tensor: String,
        /// The file that holds it.
        path: PathBuf,
        /// The shape in the file.
        found: Vec<usize>,
        /// The shape by `config.json`.
        expected: Vec<usize>,
    },
    /// Weights are stored in a form that this build cannot read, or not as the settings say.
    Format {
        /// The folder.
        dir: PathBuf,
        /// What is wrong.
        problem: FormatError,
    },
    /// A stored constant of the n-gram hash differs from the one that `config.json` implies.
    HashBuffer {
        /// The tensor.
        tensor: String,
        /// The file that holds it.
        path: PathBuf,
        /// The stored values.
        found: Vec<i64>,
        /// The recomputed values.
        expected: Vec<i64>,
    },
    /// A read outside a tensor, or into a buffer of another size.
    Range {
        /// The tensor.
        tensor: String,
        /// First byte asked for, counted from the tensor's first.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Bytes that the tensor has.
        bytes: u64,
    },
    /// A code or a scale that stands for nothing.
    Value {
        /// The tensor.
        tensor: String,
        /// Which of its numbers.
        at: usize,
        /// What it is.
        problem: String,
    },
    /// The bytes of a tensor could not be read.
    Bytes {
        /// The tensor.
        tensor: String,
        /// The file that holds it.
        path: PathBuf,
        /// First byte asked for, counted from the file's first.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// The system's reason.
        source: io::Error,
    },
    /// A read of a tensor that the checkpoint does not have.
    NoSuchTensor {
        /// The tensor.
        tensor: String,
        /// The folder.
        dir: PathBuf,
    },
}

impl std::error::Error for LoadError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } | Self::Bytes { source, .. } => Some(source),
            Self::Config { problem, .. } => Some(problem),
            Self::Header { problem, .. } => Some(problem),
            Self::Format { problem, .. } => Some(problem),
            _ => None,
        }
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io { doing, path, source } => write!(f, "could not {doing} {}: {source}", path.display()),
            Self::Config { path, problem } => write!(f, "{}: {problem}", path.display()),
            Self::NoWeights { dir } => write!(
                f,
                "{} holds neither model.safetensors nor model.safetensors.index.json; is the download complete?",
                dir.display()
            ),
            Self::StrayFile { path, index: Some(index) } => write!(
                f,
                "{} is not named by {}; the index is stale, or the file should not be there",
                path.display(),
                index.display()
            ),
            Self::StrayFile { path, index: None } => write!(
                f,
                "{} lies beside model.safetensors and no model.safetensors.index.json names it; move it away or add \
                 the index",
                path.display()
            ),
            Self::Index { path, detail } => write!(f, "{} is not a usable index: {detail}", path.display()),
            Self::MissingShard { index, shard, tensors } => write!(
                f,
                "{} is missing; {} places {tensors} tensors in it; fetch the file again",
                index.with_file_name(shard).display(),
                index.display()
            ),
            Self::IndexedElsewhere { index, tensor, shard, found_in } => {
                write!(f, "{} places tensor {tensor} in {shard}, which does not hold it; ", index.display())?;
                match found_in {
                    Some(file) => write!(f, "it is in {file}; the index is stale"),
                    None => {
                        write!(f, "no other file does; the index is stale or {shard} is from another version")
                    }
                }
            }
            Self::NotInIndex { index, tensor, shard } => write!(
                f,
                "{shard} holds tensor {tensor}, which {} does not name; the index is stale",
                index.display()
            ),
            Self::Duplicate { tensor, first, second } => write!(
                f,
                "tensor {tensor} is in both {} and {}; one of the files does not belong here",
                first.display(),
                second.display()
            ),
            Self::Header { path, problem } => write!(f, "{}: {problem}", path.display()),
            Self::Tensors { dir, missing, left_over } => {
                write!(f, "{} does not hold the tensors that its config.json describes", dir.display())?;
                if !missing.is_empty() {
                    write!(f, "; missing {}", Listed(missing))?;
                }
                if !left_over.is_empty() {
                    write!(f, "; left over {}", Listed(left_over))?;
                }
                if !missing.is_empty() && missing.iter().all(|name| name.starts_with("mtp.")) {
                    write!(f, "; if it has no draft layer, mtp_num_hidden_layers must be 0")?;
                }
                if !missing.is_empty() && missing.iter().all(|name| name.starts_with("model.visual.")) {
                    write!(f, "; if it has no vision tower, vision_config must be absent")?;
                }
                Ok(())
            }
            Self::Shape { tensor, path, found, expected } => {
                write!(
                    f,
                    "tensor {tensor} in {} has shape {found:?}; config.json makes it ",
                    path.display()
                )?;
                match expected.is_empty() {
                    true => write!(f, "a single value, [] or [1]")?,
                    false => write!(f, "{expected:?}")?,
                }
                write!(
                    f,
                    "; the settings and the weights are of different models: fetch both again from one place"
                )
            }
            Self::Format { dir, problem } => write!(f, "{}: {problem}", dir.display()),
            Self::HashBuffer { tensor, path, found, expected } => write!(
                f,
                "tensor {tensor} in {} holds {found:?}; config.json implies {expected:?}; the n-gram table belongs to \
                 other settings",
                path.display()
            ),
            Self::Range { tensor, offset, len, bytes } => {
                write!(f, "cannot read {len} bytes at {offset} of tensor {tensor}, which has {bytes}")
            }
            Self::Value { tensor, at, problem } => write!(
                f,
                "tensor {tensor}, number {at}: {problem}; the file is damaged, or of another kind than its names say"
            ),
            Self::Bytes { tensor, path, offset, len, source } => write!(
                f,
                "could not read {len} bytes at {offset} of {} for tensor {tensor}: {source}",
                path.display()
            ),
            Self::NoSuchTensor { tensor, dir } => write!(f, "{} has no tensor {tensor}", dir.display()),
        }
    }
}

/// A count and the first few names.
struct Listed<'a>(&'a [String]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        write!(f, "{}: {}", self.0.len(), self.0[..self.0.len().min(SHOWN)].join(", "))?;
        if self.0.len() > SHOWN {
            write!(f, " and {} more", self.0.len() - SHOWN)?;
        }
        Ok(())
    }
}

/// Why a call failed.
#[derive(Debug)]
pub enum Error {
    /// The model folder cannot be loaded.
    Load(LoadError),
    /// The model folder cannot be converted.
    Convert(ConvertError),
    /// Text could not be turned into ids.
    Text(crate::tokenizer::TextError),
    /// The chat template is unusable or refused the messages.
    Chat(crate::chat::ChatError),
    /// A prompt that the model cannot run; the text says which number decided.
    Prompt(String),
    /// A setting that cannot be honoured; the text names it.
    Setting(String),
    /// The device failed.
    Device(graph::Error),
    /// The other rank, or the way to it, failed; the text says how.
    Peer(String),
    /// The engine has failed before; the text says how.
    Broken(String),
    /// The engine has ended; nothing can be asked of it.
    Ended,
}

impl Error {
    /// Whether the device failed, rather than the input.
    pub fn is_device(&self) -> bool {
        matches!(self, Error::Device(_) | Error::Peer(_) | Error::Broken(_) | Error::Ended)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Load(error) => error.fmt(f),
            Error::Convert(error) => error.fmt(f),
            Error::Text(error) => error.fmt(f),
            Error::Chat(error) => error.fmt(f),
            Error::Prompt(why) | Error::Setting(why) | Error::Peer(why) | Error::Broken(why) => {
                f.write_str(why)
            }
            Error::Device(error) => error.fmt(f),
            Error::Ended => f.write_str("the engine has ended; open the model again"),
        }
    }
}

impl std::error::Error for Error {}

impl From<crate::ranks::LinkError> for Error {
    fn from(error: crate::ranks::LinkError) -> Self {
        use crate::ranks::LinkError::{Address, InUse, Refused, RefusedByPeer};
        match error {
            Address { .. } | InUse { .. } | Refused { .. } | RefusedByPeer { .. } => {
                Error::Setting(error.to_string())
            }
            _ => Error::Peer(error.to_string()),
        }
    }
}

impl From<LoadError> for Error {
    fn from(error: LoadError) -> Self {
        Error::Load(error)
    }
}

impl From<ConvertError> for Error {
    fn from(error: ConvertError) -> Self {
        Error::Convert(error)
    }
}

impl From<crate::tokenizer::TextError> for Error {
    fn from(error: crate::tokenizer::TextError) -> Self {
        Error::Text(error)
    }
}

impl From<crate::chat::ChatError> for Error {
    fn from(error: crate::chat::ChatError) -> Self {
        Error::Chat(error)
    }
}

impl From<graph::Error> for Error {
    fn from(error: graph::Error) -> Self {
        Error::Device(error)
    }
}

impl From<planner::LimitError> for Error {
    fn from(error: planner::LimitError) -> Self {
        Error::Setting(error.to_string())
    }
}
