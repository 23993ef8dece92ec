//! Copies of model folders to damage.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use crate::binary::{Ended, on, run, tiny};

pub(crate) const CONFIG: &str = "config.json";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
pub(crate) const SHARD: &str = "model-00004-of-00004.safetensors";

/// The demo model in a folder of its own; a file is a link until it is edited.
pub(crate) struct Folder {
    dir: TempDir,
}

impl Folder {
    pub(crate) fn new() -> Folder {
        let dir = tempfile::tempdir().unwrap();
        for file in fs::read_dir(tiny()).unwrap() {
            let file = file.unwrap();
            symlink(file.path(), dir.path().join(file.file_name())).unwrap();
        }
        Folder { dir }
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn without(self, file: &str) -> Folder {
        fs::remove_file(self.file(file)).unwrap();
        self
    }

    pub(crate) fn with_bytes(self, file: &str, edit: impl FnOnce(&mut Vec<u8>)) -> Folder {
        let mut bytes = fs::read(self.file(file)).unwrap();
        edit(&mut bytes);
        fs::remove_file(self.file(file)).unwrap();
        fs::write(self.file(file), bytes).unwrap();
        self
    }

    pub(crate) fn with_json(self, file: &str, edit: impl FnOnce(&mut Value)) -> Folder {
        self.with_bytes(file, |bytes| {
            let mut value = serde_json::from_slice(bytes).unwrap();
            edit(&mut value);
            *bytes = serde_json::to_vec(&value).unwrap();
        })
    }

    /// Edits the header of a safetensors file; the data stays as it is.
    pub(crate) fn with_header(self, file: &str, edit: impl FnOnce(&mut Value)) -> Folder {
        self.with_bytes(file, |bytes| {
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let mut header = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
            edit(&mut header);
            let mut header = serde_json::to_vec(&header).unwrap();
            header.resize(header.len().next_multiple_of(8), b' ');
            let data = bytes.split_off(8 + length);
            *bytes = [&(header.len() as u64).to_le_bytes(), &header[..], &data[..]].concat();
        })
    }

    /// Requires that every command refuses the folder, with the same message, which says all of `words`.
    #[track_caller]
    pub(crate) fn refused(&self, words: &[&str]) {
        self.generate(&[]).refused(words);
        run(&mut on("inspect", self.path())).refused(words);
    }

    pub(crate) fn generate(&self, options: &[&str]) -> Ended {
        run(on("generate", self.path()).args(["--ids", "1,2,3", "--max-tokens", "2"]).args(options))
    }

    fn file(&self, file: &str) -> PathBuf {
        self.dir.path().join(file)
    }
}
