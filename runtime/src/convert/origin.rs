//! What is converted: the tensors of a checkpoint, or made ones of its shape; as bytes, and as the numbers they mean.

use std::collections::HashMap;

use half::bf16;
use kernels::quant::{fp8, nvfp4};
use kernels::weight::{BLOCK, GROUP};

use crate::checkpoint::layout::{Layout, Spec, Stored, TokenMixer};
use crate::checkpoint::{Checkpoint, Dtype};
use crate::error::{Error, LoadError};
use crate::weights::{self, Made};

/// Where tensors come from.
pub(super) enum Origin {
    /// The files of a checkpoint.
    Files(Box<Checkpoint>),
    /// No files: all that the layout requires is made, in BF16.
    Made {
        /// The shape of the model.
        shape: Box<Checkpoint>,
        /// What each tensor is made as, and of which seed.
        recipes: HashMap<String, (Made, u64)>,
    },
}

/// Whole rows of a matrix in a tensor.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    /// The tensor.
    pub(super) spec: &'a Spec,
    /// The number in it that the matrix begins with; 0 if it is quantised.
    pub(super) matrix: usize,
    /// Columns of the matrix.
    pub(super) columns: usize,
    /// The first row, the first of a block.
    pub(super) first: usize,
    /// How many.
    pub(super) count: usize,
}

impl Rows<'_> {
    /// The first number.
    pub(super) fn from(&self) -> usize {
        self.matrix + self.first * self.columns
    }

    /// How many numbers.
    pub(super) fn numbers(&self) -> usize {
        self.count * self.columns
    }
}

impl Origin {
    /// Made tensors of a model of this shape.
    pub(super) fn made(shape: Checkpoint, seed: u64) -> Origin {
        let special = |layout: &Layout| -> HashMap<String, Made> {
            let mixers = layout.layers.iter().map(|layer| &layer.mixer);
            let linear = mixers.filter_map(|mixer| match mixer {
                TokenMixer::Linear(linear) => Some(linear),
                TokenMixer::Sparse(_) => None,
            });
            let three = linear.flat_map(|w| {
                [(&w.a_log, Made::A_LOG), (&w.dt_bias, Made::DT_BIAS), (&w.norm, Made::PLAIN_GAIN)]
            });
            three.map(|(spec, made)| (spec.name.clone(), made)).collect()
        };
        let special = special(&shape.layout);
        let specs = shape.layout.specs().into_iter().filter(|spec| spec.required);
        // Every tensor has a seed of its own, far from its neighbours'.
        let seed = seed.wrapping_mul(0x2545_f491_4f6c_dd1d);
        let recipe = |(number, spec): (u64, &Spec)| {
            let made = special.get(&spec.name).copied().unwrap_or_else(|| Made::of(spec));
            (spec.name.clone(), (made, seed.wrapping_add(number << 40)))
        };
        let recipes = (0..).zip(specs).map(recipe).collect();
        Origin::Made { shape: shape.into(), recipes }
    }

    /// The settings and tensors.
    pub(super) fn checkpoint(&self) -> &Checkpoint {
        match self {
            Origin::Files(checkpoint) => checkpoint,
            Origin::Made { shape, .. } => shape,
        }
    }

    /// Type and shape of a tensor as it is stored, or nothing if there is none.
    pub(super) fn entry(&self, spec: &Spec) -> Option<(Dtype, Vec<usize>)> {
        match self {
            Origin::Files(files) => files.entry(&spec.name).map(|entry| (entry.dtype, entry.shape.clone())),
            Origin::Made { recipes, .. } => {
                recipes.contains_key(&spec.name).then(|| (Dtype::BF16, spec.shape.clone()))
            }
        }
    }

    /// Some bytes of a tensor that there is.
    pub(super) fn bytes(&self, name: &str, offset: usize, len: usize) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; len];
        match self {
            Origin::Files(files) => files.read_range(name, offset as u64, &mut bytes)?,
            Origin::Made { recipes, .. } => {
                let (made, seed) = recipes[name];
                for (place, to) in (offset as u64 / 2..).zip(bytes.as_chunks_mut().0) {
                    *to = bf16::from_f32(made.value(seed, place)).to_le_bytes();
                }
            }
        }
        Ok(bytes)
    }

    /// The type of a tensor that there is.
    pub(super) fn dtype(&self, spec: &Spec) -> Dtype {
        self.entry(spec).unwrap_or_else(|| panic!("there is no tensor {}", spec.name)).0
    }

    /// The numbers of some rows.
    ///
    /// # Errors
    /// They cannot be read, or one of them is not finite: which tensor has it, and where.
    pub(super) fn numbers(&self, rows: &Rows<'_>) -> Result<Vec<f32>, Error> {
        let &Rows { spec, columns, first, count, .. } = rows;
        let (from, numbers) = (rows.from(), rows.numbers());
        let values = match &spec.stored {
            Stored::Plain => self.floats(spec, from, numbers)?,
            Stored::Fp8Block { scale } => {
                let blocks = columns.div_ceil(BLOCK);
                let (from, count) = (first / BLOCK * blocks, count.div_ceil(BLOCK) * blocks);
                let scales = weights::floats(self.checkpoint(), scale, from, count)?;
                let codes = self.bytes(&spec.name, from, numbers)?;
                fp8::dequantise(&fp8::Blocks { codes, scales }, columns)
            }
            Stored::Fp8Tensor { scale } => {
                let scale = weights::floats(self.checkpoint(), scale, 0, 1)?[0];
                let codes = self.bytes(&spec.name, from, numbers)?;
                codes.into_iter().map(|code| fp8::decode(code) * scale).collect()
            }
            Stored::Nvfp4 { .. } => nvfp4::dequantise(&nvfp4::Groups {
                codes: self.bytes(&spec.name, from / 2, numbers / 2)?,
                scales: self.scales(spec, from, numbers)?,
                global: self.global(spec)?,
            }),
        };
        match values.iter().position(|value| !value.is_finite()) {
            None => Ok(values),
            Some(at) => Err(bad(spec, from + at, format!("{} cannot be converted", values[at]))),
        }
    }

    /// The scales of so many numbers of an nvfp4 tensor.
    ///
    /// # Errors
    /// They cannot be read, or one of them is none that a quantiser makes: which tensor has it, and where.
    pub(super) fn scales(&self, spec: &Spec, from: usize, numbers: usize) -> Result<Vec<u8>, Error> {
        let Stored::Nvfp4 { scales: spec, .. } = &spec.stored else {
            panic!("{} is not stored as nvfp4", spec.name);
        };
        let scales = self.bytes(&spec.name, from / GROUP, numbers / GROUP)?;
        weights::known_scales(spec, from / GROUP, &scales)?;
        Ok(scales)
    }

    /// What all numbers of an nvfp4 tensor are multiplied by.
    pub(super) fn global(&self, spec: &Spec) -> Result<f32, Error> {
        // Made tensors are plain.
        weights::global(self.checkpoint(), spec)
    }

    /// Numbers of a tensor that is stored in plain floats.
    fn floats(&self, spec: &Spec, from: usize, count: usize) -> Result<Vec<f32>, Error> {
        let dtype = self.dtype(spec);
        let bytes = dtype.bitsize() / 8;
        let raw = self.bytes(&spec.name, from * bytes, count * bytes)?;
        Ok(match dtype {
            Dtype::F32 => raw.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect(),
            _ => raw.as_chunks().0.iter().map(|word| bf16::from_le_bytes(*word).to_f32()).collect(),
        })
    }
}

fn bad(spec: &Spec, at: usize, problem: String) -> Error {
    LoadError::Value { tensor: spec.name.clone(), at, problem }.into()
}
