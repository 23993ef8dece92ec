//! A model folder, opened and checked: every tensor is known, placed and of the right shape before a weight is read.

mod check;
mod files;
mod header;
pub mod layout;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

pub use files::TensorEntry;
pub use safetensors::Dtype;

use crate::config::{GenerationConfig, ModelConfig};
use crate::error::LoadError;
use check::check;
use files::Files;
use layout::{Experts, Layout, Matrix, Part, Ple, Spec, Stored, Wanted};

/// A checked model folder. Reads are positioned, so that many threads may read at once.
#[derive(Debug)]
pub struct Checkpoint {
    /// The model's settings.
    pub config: ModelConfig,
    /// Stop ids and sampling defaults.
    pub generation: GenerationConfig,
    /// Name, shape and purpose of every tensor.
    pub layout: Layout,
    dir: PathBuf,
    files: Files,
}

/// What a checkpoint holds that its user does not read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unused<'a> {
    /// The tensors, in layout order.
    pub tensors: Vec<&'a str>,
    /// Their bytes together.
    pub bytes: u64,
}

impl Checkpoint {
    /// Opens a model folder and checks settings, file sizes, headers, names, shapes, types, formats and stored hash
    /// constants.
    pub fn open(dir: &Path) -> Result<Self, LoadError> {
        files::refuse_foreign(dir)?;
        let config = ModelConfig::open(dir)?;
        let generation = GenerationConfig::open(dir, &config)?;
        let files = Files::open(dir)?;
        let layout = Layout::of_files(&config, &files);
        check(dir, &config, &layout, &files)?;
        let checkpoint = Self { config, generation, layout, dir: dir.into(), files };
        for ple in checkpoint.layout.layers.iter().filter_map(|layer| layer.ple.as_ref()) {
            checkpoint.check_hash(ple)?;
        }
        Ok(checkpoint)
    }

    /// The shape of a model without its weights, which would be stored like this: the settings of a folder, of which no
    /// weight file is looked at.
    pub fn shape_of(dir: &Path, config: ModelConfig, wanted: Wanted) -> Result<Self, LoadError> {
        let generation = GenerationConfig::open(dir, &config)?;
        let layout = Layout::wanted(&config, wanted);
        Ok(Self { config, generation, layout, dir: dir.into(), files: Files::none() })
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where a tensor lies, or nothing if the checkpoint lacks it.
    pub fn entry(&self, name: &str) -> Option<&TensorEntry> {
        self.files.tensors.get(name)
    }

    /// Where a tensor lies that the layout requires.
    ///
    /// # Panics
    /// When the checkpoint lacks it: `open` has checked all required tensors, so the name is not one of them.
    pub fn expect(&self, spec: &Spec) -> &TensorEntry {
        self.entry(&spec.name).unwrap_or_else(|| panic!("tensor {} is not required by the layout", spec.name))
    }

    /// The file a tensor lies in.
    pub fn path(&self, entry: &TensorEntry) -> &Path {
        &self.files.files[entry.file].path
    }

    /// The same, open.
    pub fn file(&self, entry: &TensorEntry) -> &File {
        &self.files.files[entry.file].handle
    }

    /// Tensors in the folder.
    pub fn len(&self) -> usize {
        self.files.tensors.len()
    }

    /// Whether the folder has no tensors; an opened one always has some.
    pub fn is_empty(&self) -> bool {
        self.files.tensors.is_empty()
    }

    /// Bytes of the tensors of one part of the model.
    pub fn bytes(&self, part: Part) -> u64 {
        self.tensors_of(|p| p == part).map(|(_, entry)| entry.bytes()).sum()
    }

    /// The tensors that a user of `used` parts does not read; to be reported, never dropped in silence. Stored
    /// constants are not among them: opening the checkpoint used them.
    pub fn unused(&self, used: &[Part]) -> Unused<'_> {
        let (tensors, bytes): (Vec<_>, Vec<_>) = self
            .tensors_of(|part| part != Part::Constants && !used.contains(&part))
            .map(|(name, entry)| (name, entry.bytes()))
            .unzip();
        Unused { tensors, bytes: bytes.iter().sum() }
    }

    /// Reads a whole tensor; `into` must have its size.
    pub fn read(&self, name: &str, into: &mut [u8]) -> Result<(), LoadError> {
        let entry = self.known(name)?;
        if into.len() as u64 != entry.bytes() {
            return Err(range_error(name, 0, into, entry));
        }
        self.read_entry(name, entry, 0, into)
    }

    /// Reads `into.len()` bytes of a tensor, `offset` bytes after its first.
    pub fn read_range(&self, name: &str, offset: u64, into: &mut [u8]) -> Result<(), LoadError> {
        let entry = self.known(name)?;
        if offset.checked_add(into.len() as u64).is_none_or(|end| end > entry.bytes()) {
            return Err(range_error(name, offset, into, entry));
        }
        self.read_entry(name, entry, offset, into)
    }

    /// Reads one matrix of one routed expert, whichever way the checkpoint stores its experts, in its stored form.
    ///
    /// # Panics
    /// When the layer has no such expert.
    pub fn read_expert(
        &self,
        experts: &Experts,
        expert: usize,
        matrix: Matrix,
        into: &mut [u8],
    ) -> Result<(), LoadError> {
        let place = experts.place(expert, matrix);
        let bits = match place.spec.stored {
            Stored::Nvfp4 { .. } => 4,
            _ => self.expect(place.spec).dtype.bitsize(),
        };
        let bytes = |elements: usize| elements as u64 * bits as u64 / 8;
        let (name, first) = (&place.spec.name, bytes(place.first));
        if into.len() as u64 != bytes(place.elements) {
            return Err(range_error(name, first, into, self.expect(place.spec)));
        }
        self.read_range(name, first, into)
    }

    fn known(&self, name: &str) -> Result<&TensorEntry, LoadError> {
        self.entry(name).ok_or_else(|| LoadError::NoSuchTensor { tensor: name.into(), dir: self.dir.clone() })
    }

    fn read_entry(
        &self,
        name: &str,
        entry: &TensorEntry,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), LoadError> {
        let file = &self.files.files[entry.file];
        let offset = entry.range.start + offset;
        file.handle.read_exact_at(into, offset).map_err(|source| LoadError::Bytes {
            tensor: name.into(),
            path: file.path.clone(),
            offset,
            len: into.len() as u64,
            source,
        })
    }

    fn tensors_of(&self, wanted: impl Fn(Part) -> bool) -> impl Iterator<Item = (&str, &TensorEntry)> {
        let specs = self.layout.specs().into_iter().filter(move |spec| wanted(spec.part));
        specs.filter_map(|spec| Some((spec.name.as_str(), self.entry(&spec.name)?)))
    }

    /// Compares the stored constants of a hash, where there are any, with the recomputed ones.
    fn check_hash(&self, ple: &Ple) -> Result<(), LoadError> {
        let signed = |values: &[u64]| values.iter().map(|&value| value as i64).collect();
        let constants: [(&Spec, Vec<i64>); 3] = [
            (&ple.buffers.layer_multipliers, signed(&ple.hash.multipliers)),
            (&ple.buffers.vocab_sizes, signed(&ple.hash.primes)),
            (&ple.buffers.offsets, signed(&ple.hash.offsets)),
        ];
        for (spec, expected) in constants {
            let Some(entry) = self.entry(&spec.name) else { continue };
            let mut bytes = vec![0; expected.len() * size_of::<i64>()];
            self.read(&spec.name, &mut bytes)?;
            let words = bytes.as_chunks().0;
            let found: Vec<i64> = words.iter().map(|word| i64::from_le_bytes(*word)).collect();
            if found != expected {
                let path = self.path(entry).into();
                return Err(LoadError::HashBuffer { tensor: spec.name.clone(), path, found, expected });
            }
        }
        Ok(())
    }
}

fn range_error(name: &str, offset: u64, into: &[u8], entry: &TensorEntry) -> LoadError {
    LoadError::Range { tensor: name.into(), offset, len: into.len() as u64, bytes: entry.bytes() }
}
