//! The numbers of checkpoints, whole tensors at a time: what the codes of a file stand for.

use std::path::Path;

use half::bf16;
use kernels::quant::{fp8, nvfp4};
use runtime::checkpoint::layout::{Experts, Matrix, Spec, Stored, TokenMixer};
use runtime::checkpoint::{Checkpoint, Dtype};

/// An opened checkpoint.
pub(crate) struct Numbers(pub(crate) Checkpoint);

impl Numbers {
    pub(crate) fn open(dir: &Path) -> Numbers {
        Numbers(Checkpoint::open(dir).unwrap_or_else(|error| panic!("{error}")))
    }

    pub(crate) fn bytes(&self, name: &str) -> Vec<u8> {
        let entry = self.0.entry(name).unwrap_or_else(|| panic!("no tensor {name}"));
        let mut bytes = vec![0; entry.bytes() as usize];
        self.0.read(name, &mut bytes).expect("a tensor is read");
        bytes
    }

    /// What a weight means.
    pub(crate) fn of(&self, spec: &Spec) -> Vec<f32> {
        let columns = *spec.shape.last().expect("columns");
        match &spec.stored {
            Stored::Plain => self.floats(spec),
            Stored::Fp8Block { scale } => {
                let blocks = fp8::Blocks { codes: self.bytes(&spec.name), scales: self.floats(scale) };
                fp8::dequantise(&blocks, columns)
            }
            Stored::Fp8Tensor { scale } => {
                let scale = self.floats(scale)[0];
                self.bytes(&spec.name).into_iter().map(|code| fp8::decode(code) * scale).collect()
            }
            Stored::Nvfp4 { scales, global, reciprocal } => {
                let global = self.floats(global)[0];
                nvfp4::dequantise(&nvfp4::Groups {
                    codes: self.bytes(&spec.name),
                    scales: self.bytes(&scales.name),
                    global: if *reciprocal { 1.0 / global } else { global },
                })
            }
        }
    }

    /// One matrix of one expert of a layer, and its columns.
    pub(crate) fn expert(&self, layer: usize, expert: usize, matrix: Matrix) -> (Vec<f32>, usize) {
        let place = self.experts(layer).place(expert, matrix);
        let all = self.of(place.spec);
        (all[place.first..][..place.elements].to_vec(), *place.spec.shape.last().expect("columns"))
    }

    pub(crate) fn experts(&self, layer: usize) -> &Experts {
        &self.0.layout.layers[layer].moe.experts
    }

    /// The pieces of all tables.
    pub(crate) fn tables(&self) -> Vec<&[Spec]> {
        let tables = self.0.layout.layers.iter().filter_map(|layer| layer.ple.as_ref());
        tables.map(|ple| &ple.shards[..]).collect()
    }

    /// Projections outside the routed experts, and the head.
    pub(crate) fn dense(&self) -> Vec<&Spec> {
        let layers = self.0.layout.layers.iter().flat_map(|layer| {
            let shared = &layer.moe.shared;
            let mut specs = match &layer.mixer {
                TokenMixer::Linear(w) => {
                    vec![&w.in_proj_qkv, &w.in_proj_z, &w.in_proj_b, &w.in_proj_a, &w.out_proj]
                }
                TokenMixer::Sparse(w) => vec![&w.q_proj, &w.k_proj, &w.v_proj, &w.o_proj, &w.index_qk_proj],
            };
            specs.extend([&shared.gate_proj, &shared.up_proj, &shared.down_proj]);
            specs
        });
        layers.chain([&self.0.layout.lm_head]).collect()
    }

    fn floats(&self, spec: &Spec) -> Vec<f32> {
        let bytes = self.bytes(&spec.name);
        match self.0.entry(&spec.name).expect("it is there").dtype {
            Dtype::BF16 => {
                bytes.as_chunks().0.iter().map(|word| bf16::from_le_bytes(*word).to_f32()).collect()
            }
            Dtype::F32 => bytes.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect(),
            other => panic!("{} is stored as {other}", spec.name),
        }
    }
}
