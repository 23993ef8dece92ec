//! The weight files of a model folder: one file, or an index and its shards, with every tensor in exactly one place.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde::Deserialize;

use super::header::Header;
use crate::config::read_text;
use crate::error::{FormatError, LoadError};
use crate::json::Object;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Where a tensor lies and what its bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    /// Number of its file, for [`Checkpoint::path`](super::Checkpoint::path).
    pub file: usize,
    /// Type of an element.
    pub dtype: Dtype,
    /// Sizes, the slowest first.
    pub shape: Vec<usize>,
    /// Its bytes, counted from the file's first.
    pub range: Range<u64>,
}

impl TensorEntry {
    /// Bytes of the tensor.
    pub fn bytes(&self) -> u64 {
        self.range.end - self.range.start
    }
}

/// An open weight file.
#[derive(Debug)]
pub(super) struct WeightFile {
    pub(super) path: PathBuf,
    pub(super) handle: File,
}

/// All weight files of a folder, with the place of every tensor.
#[derive(Debug)]
pub(super) struct Files {
    pub(super) files: Vec<WeightFile>,
    pub(super) tensors: HashMap<String, TensorEntry>,
}

impl Files {
    /// No files.
    pub(super) fn none() -> Self {
        Self { files: Vec::new(), tensors: HashMap::new() }
    }

    /// Opens the folder's weight files, reads their headers and compares them with the index.
    pub(super) fn open(dir: &Path) -> Result<Self, LoadError> {
        let index_path = dir.join(INDEX);
        if index_path.exists() {
            let index = Index::read(&index_path)?;
            let shards = index.shards(dir)?;
            refuse_strays(dir, &shards, Some(&index_path))?;
            let files = Self::read(dir, &shards)?;
            index.compare(&files)?;
            Ok(files)
        } else if dir.join(SINGLE).exists() {
            refuse_strays(dir, &[SINGLE], None)?;
            Self::read(dir, &[SINGLE])
        } else {
            Err(LoadError::NoWeights { dir: dir.into() })
        }
    }

    fn read(dir: &Path, names: &[&str]) -> Result<Self, LoadError> {
        let mut all = Self { files: Vec::with_capacity(names.len()), tensors: HashMap::new() };
        for name in names {
            let path = dir.join(name);
            let handle = File::open(&path).map_err(|source| LoadError::Io {
                doing: "open",
                path: path.clone(),
                source,
            })?;
            let header = Header::read(&handle, &path)?;
            let file = all.files.len();
            all.files.push(WeightFile { path, handle });
            for (tensor, info) in header.tensors {
                let (begin, end) = info.data_offsets;
                let range = header.data_start + begin as u64..header.data_start + end as u64;
                let entry = TensorEntry { file, dtype: info.dtype, shape: info.shape, range };
                if let Some(first) = all.tensors.get(&tensor) {
                    let path = |file: usize| all.files[file].path.clone();
                    return Err(LoadError::Duplicate { tensor, first: path(first.file), second: path(file) });
                }
                all.tensors.insert(tensor, entry);
            }
        }
        Ok(all)
    }

    /// The name of a file.
    pub(super) fn name(&self, file: usize) -> String {
        self.files[file].path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }
}

/// Refuses a folder, or what was given for one, that holds weights of another kind of file.
pub(super) fn refuse_foreign(dir: &Path) -> Result<(), LoadError> {
    let gguf = |path: &Path| path.extension().is_some_and(|extension| extension == "gguf");
    let mut found: Vec<PathBuf> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .filter_map(|item| Some(item.ok()?.path()).filter(|path| gguf(path)))
        .collect();
    found.extend(gguf(dir).then(|| dir.into()));
    match found.iter().min() {
        Some(path) => {
            let what = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            Err(LoadError::Format { dir: dir.into(), problem: FormatError::Foreign { what, layout: "GGUF" } })
        }
        None => Ok(()),
    }
}

/// Refuses weight files in the folder that nothing names.
fn refuse_strays(dir: &Path, named: &[&str], index: Option<&Path>) -> Result<(), LoadError> {
    let io = |source| LoadError::Io { doing: "list", path: dir.into(), source };
    let mut strays = Vec::new();
    for item in fs::read_dir(dir).map_err(io)? {
        let path = item.map_err(io)?.path();
        let weights = path.extension().is_some_and(|extension| extension == "safetensors");
        if weights && !named.iter().any(|name| path.file_name().is_some_and(|file| file == *name)) {
            strays.push(path);
        }
    }
    match strays.into_iter().min() {
        Some(path) => Err(LoadError::StrayFile { path, index: index.map(Path::to_path_buf) }),
        None => Ok(()),
    }
}

/// The index: which file should hold which tensor.
struct Index {
    path: PathBuf,
    places: Vec<(String, String)>,
}

impl Index {
    fn read(path: &Path) -> Result<Self, LoadError> {
        #[derive(Deserialize)]
        struct Json {
            weight_map: Object<String>,
        }
        let json: Json = serde_json::from_str(&read_text(path)?)
            .map_err(|error| LoadError::Index { path: path.into(), detail: error.to_string() })?;
        Ok(Self { path: path.into(), places: json.weight_map.0 })
    }

    /// The names of its files, in order; all of them plain names of existing files.
    fn shards(&self, dir: &Path) -> Result<Vec<&str>, LoadError> {
        let mut tensors: BTreeMap<&str, usize> = BTreeMap::new();
        for (_, shard) in &self.places {
            *tensors.entry(shard).or_default() += 1;
        }
        for (&shard, &tensors) in &tensors {
            if Path::new(shard).file_name().is_none_or(|name| name != shard)
                || !shard.ends_with(".safetensors")
            {
                let detail = format!("{shard:?} is no name of a safetensors file in the same folder");
                return Err(LoadError::Index { path: self.path.clone(), detail });
            }
            if !dir.join(shard).exists() {
                return Err(LoadError::MissingShard {
                    index: self.path.clone(),
                    shard: shard.into(),
                    tensors,
                });
            }
        }
        if tensors.is_empty() {
            return Err(LoadError::Index { path: self.path.clone(), detail: "it names no tensor".into() });
        }
        Ok(tensors.into_keys().collect())
    }

    fn compare(&self, files: &Files) -> Result<(), LoadError> {
        let index = || self.path.clone();
        for (tensor, shard) in &self.places {
            let found_in = files.tensors.get(tensor).map(|entry| files.name(entry.file));
            if found_in.as_ref() != Some(shard) {
                let (tensor, shard) = (tensor.clone(), shard.clone());
                return Err(LoadError::IndexedElsewhere { index: index(), tensor, shard, found_in });
            }
        }
        if self.places.len() == files.tensors.len() {
            return Ok(());
        }
        let named: HashSet<&str> = self.places.iter().map(|(name, _)| name.as_str()).collect();
        let unnamed = files.tensors.iter().filter(|(name, _)| !named.contains(name.as_str()));
        match unnamed.min_by_key(|(name, _)| *name) {
            Some((tensor, entry)) => Err(LoadError::NotInIndex {
                index: index(),
                tensor: tensor.clone(),
                shard: files.name(entry.file),
            }),
            None => Ok(()),
        }
    }
}
