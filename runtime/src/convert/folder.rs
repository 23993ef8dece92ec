//! The folder that is written: empty before, and a model or nothing afterwards.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{ConvertError, Error};

/// What is added to the name of a weight file until it is whole.
pub(super) const UNFINISHED: &str = ".partial";
/// What a model's folder holds that is written anew, or not at all.
const OURS: [&str; 2] = ["config.json", "hf_quant_config.json"];
/// How the names of weights end, and of what says where weights are.
const WEIGHTS: [&str; 8] =
    [".safetensors", ".safetensors.index.json", ".gguf", ".bin", ".pt", ".pth", ".h5", ".bin.index.json"];

/// A folder that is being filled. What was put there goes again unless it is kept.
pub(super) struct Folder {
    path: PathBuf,
    /// Whether it was made for this.
    made: bool,
    files: Vec<PathBuf>,
    kept: bool,
}

impl Folder {
    /// Opens an empty folder, or makes one, outside of `model`.
    pub(super) fn new(out: &Path, model: &Path) -> Result<Folder, Error> {
        let inside = || -> io::Result<bool> { Ok(placed(out)?.starts_with(fs::canonicalize(model)?)) };
        if inside().map_err(|error| io("find", out, error))? {
            return Err(ConvertError::Inside { out: out.into(), model: model.into() }.into());
        }
        let made = fs::symlink_metadata(out).is_err();
        if made {
            fs::create_dir_all(out).map_err(|error| io("make", out, error))?;
        } else if !out.is_dir() {
            return Err(ConvertError::Occupied { out: out.into(), found: out.into() }.into());
        }
        let mut items = fs::read_dir(out).map_err(|error| io("list", out, error))?;
        match items.next() {
            None => Ok(Folder { path: out.into(), made, files: Vec::new(), kept: false }),
            Some(item) => {
                let found = item.map_err(|error| io("list", out, error))?.path();
                Err(ConvertError::Occupied { out: out.into(), found }.into())
            }
        }
    }

    /// The path of a file to be written.
    pub(super) fn file(&mut self, name: &str) -> PathBuf {
        let path = self.path.join(name);
        self.files.push(path.clone());
        path
    }

    /// Writes a file.
    pub(super) fn write(&mut self, name: &Path, bytes: &[u8]) -> Result<(), Error> {
        let path = self.file(&name.to_string_lossy());
        fs::write(&path, bytes).map_err(|error| io("write", &path, error).into())
    }

    /// Copies what `model` holds beside weights and settings: tokenizer, templates, preprocessors, texts.
    pub(super) fn copy_rest(&mut self, model: &Path) -> Result<(), Error> {
        for item in fs::read_dir(model).map_err(|error| io("list", model, error))? {
            let from = item.map_err(|error| io("list", model, error))?.path();
            let Some(name) = from.file_name().and_then(|name| name.to_str()) else { continue };
            let weights = WEIGHTS.iter().any(|end| name.ends_with(end));
            // What another conversion did not finish has the names that ours have until they are whole.
            if weights || name.ends_with(UNFINISHED) || OURS.contains(&name) {
                continue;
            }
            if !fs::metadata(&from).map_err(|error| io("copy", &from, error))?.is_file() {
                continue;
            }
            let to = self.file(name);
            fs::copy(&from, &to).map_err(|error| io("copy", &from, error))?;
        }
        Ok(())
    }

    /// The folder is whole, and stays.
    pub(super) fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        // The settings were written last and go first. What cannot be removed is no model without them.
        for path in self.files.iter().rev() {
            let _ = fs::remove_file(path);
        }
        if self.made {
            let _ = fs::remove_dir(&self.path);
        }
    }
}

/// Where a path leads that may not be there yet.
fn placed(path: &Path) -> io::Result<PathBuf> {
    match fs::canonicalize(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => match (path.parent(), path.file_name()) {
            (Some(parent), Some(name)) if parent.as_os_str().is_empty() => {
                Ok(fs::canonicalize(".")?.join(name))
            }
            (Some(parent), Some(name)) => Ok(placed(parent)?.join(name)),
            _ => Err(error),
        },
        found => found,
    }
}

pub(super) fn io(doing: &'static str, path: &Path, source: io::Error) -> ConvertError {
    ConvertError::Io { doing, path: path.into(), source }
}
