//! Model folders to open and to damage.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::PathBuf;

use runtime::checkpoint::{Checkpoint, Dtype};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tempfile::TempDir;
use tests::fixture::repository;

pub(crate) const WEIGHTS: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// The unquantised checkpoints of the oracle.
pub(crate) const ORACLES: [&str; 5] = ["base_fp32", "base_bf16", "two_ple", "no_ple", "ratio2_oddheads"];

pub(crate) fn oracle(name: &str) -> PathBuf {
    repository("tests/oracle/checkpoints").join(name)
}

pub(crate) fn tiny() -> PathBuf {
    repository("models/tiny")
}

/// A tensor in memory.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Tensor {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Vec<u8>,
}

pub(crate) type Tensors = BTreeMap<String, Tensor>;

/// Types and shapes by name.
pub(crate) type Heads = BTreeMap<String, (Dtype, Vec<usize>)>;

impl Tensor {
    /// A BF16 tensor's values as F32.
    pub(crate) fn widened(&self) -> Self {
        assert_eq!(self.dtype, Dtype::BF16);
        let data = self.data.as_chunks().0.iter().flat_map(|[low, high]| [0, 0, *low, *high]).collect();
        Self { dtype: Dtype::F32, shape: self.shape.clone(), data }
    }
}

/// A copy of an oracle checkpoint in a folder of its own.
pub(crate) struct Folder {
    dir: TempDir,
}

impl Folder {
    pub(crate) fn copy_of(name: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for file in ["config.json", "generation_config.json", WEIGHTS] {
            fs::copy(oracle(name).join(file), dir.path().join(file)).unwrap();
        }
        Self { dir }
    }

    /// A folder with settings and nothing else.
    pub(crate) fn with_config(config: &Value) -> Self {
        let folder = Self { dir: tempfile::tempdir().unwrap() };
        folder.write_json("config.json", config);
        folder
    }

    /// A copy whose tensors are dealt to two files, with an index.
    pub(crate) fn sharded(name: &str) -> Self {
        let folder = Self::copy_of(name);
        let all = folder.tensors(WEIGHTS);
        fs::remove_file(folder.path(WEIGHTS)).unwrap();
        let mut shards = [Tensors::new(), Tensors::new()];
        let mut places = serde_json::Map::new();
        for (number, (name, tensor)) in all.into_iter().enumerate() {
            places.insert(name.clone(), shard(number % 2).into());
            shards[number % 2].insert(name, tensor);
        }
        for (number, tensors) in shards.iter().enumerate() {
            folder.write(&shard(number), tensors);
        }
        folder.write_json(INDEX, &json!({"metadata": {}, "weight_map": places}));
        folder
    }

    pub(crate) fn path(&self, file: &str) -> PathBuf {
        self.dir.path().join(file)
    }

    pub(crate) fn tensors(&self, file: &str) -> Tensors {
        let bytes = fs::read(self.path(file)).unwrap();
        let tensor = |view: &TensorView<'_>| Tensor {
            dtype: view.dtype(),
            shape: view.shape().to_vec(),
            data: view.data().to_vec(),
        };
        SafeTensors::deserialize(&bytes)
            .unwrap()
            .iter()
            .map(|(name, view)| (name.into(), tensor(&view)))
            .collect()
    }

    pub(crate) fn write(&self, file: &str, tensors: &Tensors) {
        let views = tensors
            .iter()
            .map(|(name, t)| (name, TensorView::new(t.dtype, t.shape.clone(), &t.data).unwrap()));
        fs::write(self.path(file), safetensors::serialize(views, None).unwrap()).unwrap();
    }

    /// Writes a file of the right header and size, with a hole in place of the weights.
    pub(crate) fn write_hollow(&self, file: &str, heads: &Heads) {
        let mut header = serde_json::Map::new();
        let mut at = 0;
        for (name, (dtype, shape)) in heads {
            let end = at + (shape.iter().product::<usize>() * dtype.bitsize() / 8) as u64;
            let entry = json!({"dtype": dtype.to_string(), "shape": shape, "data_offsets": [at, end]});
            header.insert(name.clone(), entry);
            at = end;
        }
        let header = Value::from(header).to_string();
        let mut out = fs::File::create(self.path(file)).unwrap();
        out.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
        out.write_all(header.as_bytes()).unwrap();
        out.set_len(8 + header.len() as u64 + at).unwrap();
    }

    pub(crate) fn edit(&self, file: &str, edit: impl FnOnce(&mut Tensors)) {
        let mut tensors = self.tensors(file);
        edit(&mut tensors);
        self.write(file, &tensors);
    }

    pub(crate) fn write_json(&self, file: &str, value: &Value) {
        fs::write(self.path(file), serde_json::to_vec(value).unwrap()).unwrap();
    }

    pub(crate) fn edit_json(&self, file: &str, edit: impl FnOnce(&mut Value)) {
        let mut value = serde_json::from_slice(&fs::read(self.path(file)).unwrap()).unwrap();
        edit(&mut value);
        self.write_json(file, &value);
    }

    pub(crate) fn edit_bytes(&self, file: &str, edit: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = fs::read(self.path(file)).unwrap();
        edit(&mut bytes);
        fs::write(self.path(file), bytes).unwrap();
    }

    pub(crate) fn open(&self) -> Checkpoint {
        Checkpoint::open(self.dir.path()).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Requires that the folder is refused with a message that holds all of `parts`.
    #[track_caller]
    pub(crate) fn refused(&self, parts: &[&str]) {
        let message = match Checkpoint::open(self.dir.path()) {
            Ok(_) => panic!("the folder was opened; expected an error with {parts:?}"),
            Err(error) => error.to_string(),
        };
        for part in parts {
            assert!(message.contains(part), "{message:?} does not say {part:?}");
        }
    }
}

/// The name of a file of a sharded folder.
pub(crate) fn shard(number: usize) -> String {
    format!("model-{}-of-2.safetensors", number + 1)
}

/// A tensor's bytes through the checkpoint.
pub(crate) fn bytes(checkpoint: &Checkpoint, name: &str) -> Vec<u8> {
    let mut bytes = vec![0; checkpoint.entry(name).unwrap().bytes() as usize];
    checkpoint.read(name, &mut bytes).unwrap();
    bytes
}
