//! Why a checkpoint could not be converted, apart from what is wrong with the one that is read.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// A conversion that was refused, or that the system did not let finish. Nothing that opens as a model is left.
#[derive(Debug)]
#[non_exhaustive]
pub enum ConvertError {
    /// The folder to write holds something.
    Occupied {
        /// The folder.
        out: PathBuf,
        /// What it holds, among other things.
        found: PathBuf,
    },
    /// The folder to write is the one that is read, or lies in it.
    Inside {
        /// The folder to write.
        out: PathBuf,
        /// The folder that is read.
        model: PathBuf,
    },
    /// A matrix whose columns are no whole groups of 4-bit codes.
    Groups {
        /// The tensor.
        tensor: String,
        /// Its columns.
        columns: usize,
        /// Columns of a group.
        group: usize,
    },
    /// The system refused to make or write a file.
    Io {
        /// What was being done, as in "write".
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

impl std::error::Error for ConvertError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}

impl fmt::Display for ConvertError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Occupied { out, found } if out == found => {
                write!(f, "{} is there and is no folder; name one that is not there yet", out.display())
            }
            Self::Occupied { out, found } => write!(
                f,
                "{} holds {} already; name a folder that is empty or not there yet",
                out.display(),
                found.file_name().unwrap_or_default().display()
            ),
            Self::Inside { out, model } => write!(
                f,
                "{} is the model folder {}, or lies in it; write the converted model elsewhere",
                out.display(),
                model.display()
            ),
            Self::Groups { tensor, columns, group } => write!(
                f,
                "tensor {tensor} has {columns} columns, no multiple of the {group} that share a scale in nvfp4; convert \
                 it to fp8 or bf16"
            ),
            Self::Io { doing, path, source } => {
                write!(
                    f,
                    "could not {doing} {}: {source}; nothing of the converted model is kept",
                    path.display()
                )
            }
        }
    }
}
