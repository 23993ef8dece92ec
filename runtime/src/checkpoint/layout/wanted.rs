//! How weights are to be stored that are in no file yet: those of a conversion, and made ones.

use safetensors::Dtype;

use super::Format;

/// A format for each purpose. The draft layer, the vision tower and what is never quantised stay plain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// The routed experts of the decoder layers: bf16, fp8 or nvfp4.
    pub experts: Format,
    /// Their projections around token mixers and in the indexer, their shared experts, and the head: bf16 or fp8.
    pub dense: Format,
    /// The n-gram tables: bf16, fp8 with one scale, or nvfp4.
    pub table: Format,
}

impl Default for Wanted {
    /// Nothing quantised.
    fn default() -> Self {
        Self { experts: Format::Bf16, dense: Format::Bf16, table: Format::Bf16 }
    }
}

impl Wanted {
    /// The type of a tensor by its name; nothing for one that does not exist in these formats.
    pub(super) fn dtype(self, name: &str) -> Option<Dtype> {
        let (base, last) = name.rsplit_once('.')?;
        match (last, self.of(base)) {
            ("weight", Format::Nvfp4) => Some(Dtype::U8),
            ("weight", Format::Fp8 | Format::Fp8Tensor) => Some(Dtype::F8_E4M3),
            ("weight", Format::F32) => Some(Dtype::F32),
            ("weight", Format::Bf16) => Some(Dtype::BF16),
            ("weight_scale_inv", Format::Fp8) => Some(Dtype::BF16),
            _ => None,
        }
    }

    /// Whether routed experts are stacked: plain ones, as they are published.
    pub(super) fn stacks_experts(self) -> bool {
        !self.experts.is_quantised()
    }

    /// The format of a weight that may be quantised.
    fn of(self, base: &str) -> Format {
        let text = base.starts_with("model.language_model.layers.");
        if base.contains(".ngram_embedding.") {
            self.table
        } else if text && base.contains(".mlp.experts.") {
            self.experts
        } else if text || base == "lm_head" {
            self.dense
        } else {
            Format::Bf16
        }
    }
}
