//! Why a model folder could not be opened: every variant names the file, the key or the tensor.

use std::fmt;
use std::io;
use std::path::PathBuf;

use safetensors::Dtype;

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
    /// A tensor is stored in a data type this build does not read.
    Dtype {
        /// The tensor.
        tensor: String,
        /// The file that holds it.
        path: PathBuf,
        /// The type in the file.
        found: Dtype,
        /// The types that may stand there.
        permitted: &'static [Dtype],
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

/// What is wrong in a settings file.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum ConfigError {
    /// Not a JSON object.
    Json {
        /// The parser's complaint, with line and column.
        detail: String,
    },
    /// A needed key is absent.
    Missing {
        /// The key, with its section.
        key: String,
    },
    /// A value of the wrong JSON type.
    Type {
        /// The key, with its section.
        key: String,
        /// What should stand there.
        wanted: &'static str,
        /// What stands there.
        found: String,
    },
    /// Keys that this build does not know.
    Unknown {
        /// The keys, with their section.
        keys: Vec<String>,
    },
    /// A known key with a value this build does not support.
    Unsupported {
        /// The key, with its section.
        key: String,
        /// The value.
        found: String,
        /// What this build supports.
        supported: String,
    },
    /// A number outside its range.
    Range {
        /// The key, with its section.
        key: String,
        /// The value.
        found: String,
        /// The range.
        rule: String,
    },
    /// Values that do not go together.
    Relation {
        /// The rule that is broken, with the values.
        rule: String,
    },
    /// The weights are quantised.
    Quantised {
        /// Where that is written.
        key: String,
        /// The method it names.
        method: String,
    },
}

/// What is wrong in a safetensors header.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum HeaderError {
    /// The file is too short to hold the header it announces.
    Short {
        /// Bytes that the header needs.
        needs: u64,
        /// Bytes that the file has.
        file_bytes: u64,
    },
    /// The announced header is larger than any real one.
    Huge {
        /// Bytes announced.
        bytes: u64,
        /// The most this build accepts.
        limit: u64,
    },
    /// Not the JSON that a header must be.
    Json {
        /// The parser's complaint.
        detail: String,
    },
    /// A tensor's byte range does not fit its type and shape.
    Size {
        /// The tensor.
        tensor: String,
        /// Its type and shape.
        what: String,
        /// The range.
        range: (usize, usize),
    },
    /// A tensor does not begin where the one before it ended.
    Offset {
        /// The tensor.
        tensor: String,
        /// Where it begins.
        begins: usize,
        /// Where it should.
        expected: usize,
    },
    /// The file is longer or shorter than its header says.
    Length {
        /// Bytes by the header.
        expected: u64,
        /// Bytes that the file has.
        found: u64,
    },
}

impl std::error::Error for LoadError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } | Self::Bytes { source, .. } => Some(source),
            Self::Config { problem, .. } => Some(problem),
            Self::Header { problem, .. } => Some(problem),
            _ => None,
        }
    }
}

impl std::error::Error for ConfigError {}
impl std::error::Error for HeaderError {}

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
            Self::Shape { tensor, path, found, expected } => write!(
                f,
                "tensor {tensor} in {} has shape {found:?}; config.json makes it {expected:?}",
                path.display()
            ),
            Self::Dtype { tensor, path, found, permitted } => {
                write!(
                    f,
                    "tensor {tensor} in {} is stored as {found}; this build reads it as ",
                    path.display()
                )?;
                for (i, dtype) in permitted.iter().enumerate() {
                    write!(f, "{}{dtype}", if i == 0 { "" } else { " or " })?;
                }
                Ok(())
            }
            Self::HashBuffer { tensor, path, found, expected } => write!(
                f,
                "tensor {tensor} in {} holds {found:?}; config.json implies {expected:?}; the n-gram table belongs to \
                 other settings",
                path.display()
            ),
            Self::Range { tensor, offset, len, bytes } => {
                write!(f, "cannot read {len} bytes at {offset} of tensor {tensor}, which has {bytes}")
            }
            Self::Bytes { tensor, path, offset, len, source } => write!(
                f,
                "could not read {len} bytes at {offset} of {} for tensor {tensor}: {source}",
                path.display()
            ),
            Self::NoSuchTensor { tensor, dir } => write!(f, "{} has no tensor {tensor}", dir.display()),
        }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json { detail } => write!(f, "not a JSON object: {detail}"),
            Self::Missing { key } => write!(f, "{key} is missing"),
            Self::Type { key, wanted, found } => write!(f, "{key} must be {wanted}, not {found}"),
            Self::Unknown { keys } => write!(
                f,
                "unknown settings, {}; this build would ignore them, so it refuses: remove them if they do not matter",
                Listed(keys)
            ),
            Self::Unsupported { key, found, supported } => {
                write!(f, "{key} is {found}; this build supports {supported}")
            }
            Self::Range { key, found, rule } => write!(f, "{key} is {found}; it must be {rule}"),
            Self::Relation { rule } => f.write_str(rule),
            Self::Quantised { key, method } => write!(
                f,
                "{key} says that the weights are quantised ({method}); this build reads BF16 and F32 checkpoints"
            ),
        }
    }
}

impl fmt::Display for HeaderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short { needs, file_bytes } => {
                write!(
                    f,
                    "the header needs {needs} bytes and the file has {file_bytes}; it is truncated or no safetensors"
                )
            }
            Self::Huge { bytes, limit } => {
                write!(
                    f,
                    "the header would be {bytes} bytes long, beyond the limit of {limit}; this is no safetensors file"
                )
            }
            Self::Json { detail } => write!(f, "the header is damaged: {detail}"),
            Self::Size { tensor, what, range: (begin, end) } => {
                write!(f, "tensor {tensor} is {what} but its byte range is {begin}..{end}")
            }
            Self::Offset { tensor, begins, expected } => write!(
                f,
                "tensor {tensor} begins at byte {begins} of the data, {} {expected} where the one before it ends",
                if begins > expected { "leaving a gap after" } else { "overlapping" }
            ),
            Self::Length { expected, found } => write!(
                f,
                "the file has {found} bytes and its header describes {expected}; it is {}",
                if found < expected { "truncated: fetch it again" } else { "damaged or was written over" }
            ),
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
