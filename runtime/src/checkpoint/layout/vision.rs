//! Tensors of the vision tower.

use super::{Scope, Spec, tensors};
use crate::config::VisionConfig;

/// The vision tower.
#[derive(Debug, Clone)]
pub struct Vision {
    /// Patch embedding, positions and merger.
    pub stem: VisionStem,
    /// Transformer blocks.
    pub blocks: Vec<Block>,
}

tensors! {
    /// What comes before and after the blocks.
    VisionStem {
        /// `[width, channels, frames, edge, edge]`
        patch_weight,
        /// `[width]`
        patch_bias,
        /// `[positions, width]`
        pos_embed,
        /// `[width]`
        merger_norm_weight,
        /// `[width]`
        merger_norm_bias,
        /// `[merged width, merged width]`
        merger_fc1_weight,
        /// `[merged width]`
        merger_fc1_bias,
        /// `[hidden, merged width]`
        merger_fc2_weight,
        /// `[hidden]`
        merger_fc2_bias,
    }
}

tensors! {
    /// A transformer block of the tower.
    Block {
        /// `[width]`
        norm1_weight,
        /// `[width]`
        norm1_bias,
        /// Queries, keys, values: `[3 * width, width]`
        qkv_weight,
        /// `[3 * width]`
        qkv_bias,
        /// `[width, width]`
        proj_weight,
        /// `[width]`
        proj_bias,
        /// `[width]`
        norm2_weight,
        /// `[width]`
        norm2_bias,
        /// `[inner width, width]`
        fc1_weight,
        /// `[inner width]`
        fc1_bias,
        /// `[width, inner width]`
        fc2_weight,
        /// `[width]`
        fc2_bias,
    }
}

impl Vision {
    pub(super) fn new(at: &Scope<'_>, c: &VisionConfig) -> Self {
        let [width, merged, out] = [c.hidden_size, c.merged_width(), c.out_hidden_size];
        let patch = [width, c.in_channels, c.temporal_patch_size, c.patch_size, c.patch_size];
        Self {
            stem: VisionStem {
                patch_weight: at.weight("patch_embed.proj.weight", &patch),
                patch_bias: at.weight("patch_embed.proj.bias", &[width]),
                pos_embed: at.weight("pos_embed.weight", &[c.num_position_embeddings, width]),
                merger_norm_weight: at.weight("merger.norm.weight", &[width]),
                merger_norm_bias: at.weight("merger.norm.bias", &[width]),
                merger_fc1_weight: at.weight("merger.linear_fc1.weight", &[merged, merged]),
                merger_fc1_bias: at.weight("merger.linear_fc1.bias", &[merged]),
                merger_fc2_weight: at.weight("merger.linear_fc2.weight", &[out, merged]),
                merger_fc2_bias: at.weight("merger.linear_fc2.bias", &[out]),
            },
            blocks: (0..c.depth)
                .map(|block| Block::new(&at.within(&format!("blocks.{block}.")), c))
                .collect(),
        }
    }

    pub(super) fn gather<'a>(&'a self, specs: &mut Vec<&'a Spec>) {
        self.stem.gather(specs);
        self.blocks.iter().for_each(|block| block.gather(specs));
    }
}

impl Block {
    fn new(at: &Scope<'_>, c: &VisionConfig) -> Self {
        let [width, inner] = [c.hidden_size, c.intermediate_size];
        Self {
            norm1_weight: at.weight("norm1.weight", &[width]),
            norm1_bias: at.weight("norm1.bias", &[width]),
            qkv_weight: at.weight("attn.qkv.weight", &[3 * width, width]),
            qkv_bias: at.weight("attn.qkv.bias", &[3 * width]),
            proj_weight: at.weight("attn.proj.weight", &[width, width]),
            proj_bias: at.weight("attn.proj.bias", &[width]),
            norm2_weight: at.weight("norm2.weight", &[width]),
            norm2_bias: at.weight("norm2.bias", &[width]),
            fc1_weight: at.weight("mlp.linear_fc1.weight", &[inner, width]),
            fc1_bias: at.weight("mlp.linear_fc1.bias", &[inner]),
            fc2_weight: at.weight("mlp.linear_fc2.weight", &[width, inner]),
            fc2_bias: at.weight("mlp.linear_fc2.bias", &[width]),
        }
    }
}
