//! The weights of the vision tower: the tree, and which tensors make up each.

use graph::{Ptr, Span};
use kernels::weight::Matrix;

use super::Builder;
use super::extract::Extract;
use crate::checkpoint::layout::{Block, Spec, Vision};
use crate::config::VisionConfig;

/// Base of the tower's rotary frequencies.
const THETA: f32 = 10_000.0;

/// All weights of the vision tower, by address.
#[derive(Clone, Debug)]
pub struct TowerWeights<T = Ptr<u8>> {
    /// From the pixels of a patch: `[width, channels * frames * edge * edge]`
    pub patch: AffineWeights<T>,
    /// `[positions, width]`
    pub positions: T,
    /// Inverse frequencies of the rotary table, f32: `[head width / 4]`
    pub frequencies: T,
    /// The blocks.
    pub blocks: Vec<BlockWeights<T>>,
    /// Before the merger.
    pub norm: NormWeights<T>,
    /// `[merged width, merged width]`
    pub merge_up: AffineWeights<T>,
    /// `[hidden, merged width]`
    pub merge_down: AffineWeights<T>,
}

/// One block.
#[derive(Clone, Debug)]
pub struct BlockWeights<T> {
    /// Before attention.
    pub norm1: NormWeights<T>,
    /// Queries, keys, values: `[3 * width, width]`
    pub qkv: AffineWeights<T>,
    /// `[width, width]`
    pub proj: AffineWeights<T>,
    /// Before the MLP.
    pub norm2: NormWeights<T>,
    /// `[inner width, width]`
    pub up: AffineWeights<T>,
    /// `[width, inner width]`
    pub down: AffineWeights<T>,
}

/// A matrix, and a number for each of its outputs.
#[derive(Clone, Debug)]
pub struct AffineWeights<T> {
    /// The matrix.
    pub matrix: T,
    /// `[outputs]`
    pub bias: T,
}

/// A layer norm.
#[derive(Clone, Debug)]
pub struct NormWeights<T> {
    /// `[width]`
    pub gain: T,
    /// `[width]`
    pub bias: T,
}

impl<T> TowerWeights<T> {
    /// The same tree over other leaves.
    pub(super) fn map<U>(self, f: &mut impl FnMut(T) -> U) -> TowerWeights<U> {
        TowerWeights {
            patch: self.patch.map(f),
            positions: f(self.positions),
            frequencies: f(self.frequencies),
            blocks: self.blocks.into_iter().map(|block| block.map(f)).collect(),
            norm: self.norm.map(f),
            merge_up: self.merge_up.map(f),
            merge_down: self.merge_down.map(f),
        }
    }
}

impl<T> BlockWeights<T> {
    fn map<U>(self, f: &mut impl FnMut(T) -> U) -> BlockWeights<U> {
        BlockWeights {
            norm1: self.norm1.map(f),
            qkv: self.qkv.map(f),
            proj: self.proj.map(f),
            norm2: self.norm2.map(f),
            up: self.up.map(f),
            down: self.down.map(f),
        }
    }
}

impl<T> AffineWeights<T> {
    fn map<U>(self, f: &mut impl FnMut(T) -> U) -> AffineWeights<U> {
        AffineWeights { matrix: f(self.matrix), bias: f(self.bias) }
    }
}

impl<T> NormWeights<T> {
    fn map<U>(self, f: &mut impl FnMut(T) -> U) -> NormWeights<U> {
        NormWeights { gain: f(self.gain), bias: f(self.bias) }
    }
}

impl Builder<'_> {
    /// The weights of a tower.
    pub(super) fn tower(&mut self, layout: &Vision, config: &VisionConfig) -> TowerWeights<Span> {
        let stem = &layout.stem;
        let frequencies = kernels::rope::frequencies(THETA, config.hidden_size / config.num_heads / 2);
        TowerWeights {
            patch: self.affine(&stem.patch_weight, &stem.patch_bias),
            positions: self.one(&stem.pos_embed),
            frequencies: self.constant("rotary frequencies of patches", &frequencies),
            blocks: layout.blocks.iter().map(|block| self.block(block)).collect(),
            norm: self.norm(&stem.merger_norm_weight, &stem.merger_norm_bias),
            merge_up: self.affine(&stem.merger_fc1_weight, &stem.merger_fc1_bias),
            merge_down: self.affine(&stem.merger_fc2_weight, &stem.merger_fc2_bias),
        }
    }

    fn block(&mut self, block: &Block) -> BlockWeights<Span> {
        BlockWeights {
            norm1: self.norm(&block.norm1_weight, &block.norm1_bias),
            qkv: self.affine(&block.qkv_weight, &block.qkv_bias),
            proj: self.affine(&block.proj_weight, &block.proj_bias),
            norm2: self.norm(&block.norm2_weight, &block.norm2_bias),
            up: self.affine(&block.fc1_weight, &block.fc1_bias),
            down: self.affine(&block.fc2_weight, &block.fc2_bias),
        }
    }

    /// A matrix whose rows are whatever its tensor has of each output.
    fn affine(&mut self, weight: &Spec, bias: &Spec) -> AffineWeights<Span> {
        let (outputs, inner) = (weight.shape[0], weight.shape[1..].iter().product());
        let flat = Spec { shape: vec![outputs, inner], ..weight.clone() };
        AffineWeights {
            matrix: self.matrices(vec![Extract::from(&flat)], Matrix::plain(outputs, inner), 1),
            bias: self.one(bias),
        }
    }

    fn norm(&mut self, gain: &Spec, bias: &Spec) -> NormWeights<Span> {
        NormWeights { gain: self.plain_gain(gain), bias: self.one(bias) }
    }
}
