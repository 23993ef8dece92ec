//! The weight files: safetensors in one file, or in several with an index, written in any order.
//!
//! ```text
//! length of the header, u64 little-endian | header, JSON padded to 8 bytes | tensors without gaps, the widest type first
//! ```
//!
//! So every tensor begins at a multiple of its elements' size. Until all is written, files bear a name that no reader
//! takes for weights.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::folder::{Folder, UNFINISHED, io};
use super::plan::Tensor;
use crate::error::Error;

/// The name of weights that are in one file.
const SINGLE: &str = "model.safetensors";
/// The name of the index of several files.
const INDEX: &str = "model.safetensors.index.json";
/// Files at most, all of which are open while they are written.
const MOST_FILES: usize = 512;

/// Files that are being written.
pub(super) struct Writer {
    files: Vec<Output>,
    /// Of each tensor: its file, and its first byte there.
    places: Vec<(usize, u64)>,
    /// What the index says, if there is one.
    index: Option<Value>,
}

struct Output {
    /// Its name when it is whole.
    name: String,
    path: PathBuf,
    handle: File,
}

impl Writer {
    /// Makes the files of `tensors` with their headers, none larger than `file_bytes` unless a single tensor is.
    pub(super) fn new(folder: &mut Folder, tensors: &[Tensor], file_bytes: u64) -> Result<Writer, Error> {
        let groups = grouped(tensors, file_bytes);
        let count = groups.len();
        if count > MOST_FILES {
            return Err(Error::Setting(format!(
                "--file-size {file_bytes} makes {count} weight files, more than {MOST_FILES}; raise it"
            )));
        }
        let name = |number: usize| match count {
            1 => SINGLE.to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
        };
        let mut places = vec![(0, 0); tensors.len()];
        let (mut files, mut named) = (Vec::new(), vec![0; tensors.len()]);
        for (number, mut group) in groups.into_iter().enumerate() {
            group.sort_by_key(|at| std::cmp::Reverse(tensors[*at].dtype.bitsize()));
            let (header, bytes) = header(tensors, &group);
            let mut from = header.len() as u64;
            for at in group {
                (places[at], named[at]) = ((number, from), number);
                from += tensors[at].bytes();
            }
            assert_eq!(from, header.len() as u64 + bytes);
            let path = folder.file(&format!("{}{UNFINISHED}", name(number)));
            let handle = File::create_new(&path).map_err(|error| io("make", &path, error))?;
            handle.set_len(from).map_err(|error| io("make room in", &path, error))?;
            handle.write_all_at(&header, 0).map_err(|error| io("write", &path, error))?;
            files.push(Output { name: name(number), path, handle });
        }
        let index = (count > 1).then(|| {
            let total: u64 = tensors.iter().map(Tensor::bytes).sum();
            let map: Map<String, Value> =
                tensors.iter().zip(&named).map(|(t, file)| (t.name.clone(), name(*file).into())).collect();
            json!({"metadata": {"total_size": total}, "weight_map": map})
        });
        Ok(Writer { files, places, index })
    }

    /// Writes bytes of a tensor, from byte `offset` of it on.
    pub(super) fn write(&self, tensor: usize, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        let (file, first) = self.places[tensor];
        let file = &self.files[file];
        file.handle
            .write_all_at(bytes, first + offset as u64)
            .map_err(|error| io("write", &file.path, error).into())
    }

    /// Gives the files their names, now that all is written. How many there are.
    pub(super) fn finish(self, folder: &mut Folder) -> Result<usize, Error> {
        for Output { name, path, handle } in &self.files {
            handle.sync_all().map_err(|error| io("write", path, error))?;
            fs::rename(path, folder.file(name)).map_err(|error| io("rename", path, error))?;
        }
        if let Some(index) = &self.index {
            folder.write(Path::new(INDEX), &pretty(index))?;
        }
        Ok(self.files.len())
    }
}

/// The numbers of the tensors of each file.
fn grouped(tensors: &[Tensor], file_bytes: u64) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut filled = 0;
    for (at, tensor) in tensors.iter().enumerate() {
        match groups.last_mut() {
            Some(group) if filled + tensor.bytes() <= file_bytes => group.push(at),
            _ => {
                groups.push(vec![at]);
                filled = 0;
            }
        }
        filled += tensor.bytes();
    }
    groups
}

/// The start of a file that holds these tensors in this order, and their bytes.
fn header(tensors: &[Tensor], group: &[usize]) -> (Vec<u8>, u64) {
    let mut entries = Map::new();
    entries.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut from = 0;
    for Tensor { name, dtype, shape, .. } in group.iter().map(|at| &tensors[*at]) {
        let bytes = (shape.iter().product::<usize>() * dtype.bitsize() / 8) as u64;
        let entry = json!({"dtype": dtype.to_string(), "shape": shape, "data_offsets": [from, from + bytes]});
        entries.insert(name.clone(), entry);
        from += bytes;
    }
    let mut text = Value::from(entries).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend(text);
    (header, from)
}

/// JSON as people read it.
pub(super) fn pretty(value: &Value) -> Vec<u8> {
    let mut text = serde_json::to_vec_pretty(value).expect("a value is JSON");
    text.push(b'\n');
    text
}
