//! Why a settings file was refused.

use std::fmt;

use super::Listed;

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
}

impl std::error::Error for ConfigError {}

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
        }
    }
}
