//! How a tensor's values are stored, decided from the types and the companions that the files hold.
//!
//! Settings files are not asked: what they say about formats is compared with the files later.

use safetensors::Dtype;

use super::{Layout, Part, Scope, Source, Spec, TokenMixer};

/// How the values of a weight are stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stored {
    /// One BF16 or F32 for each value.
    Plain,
    /// One F8_E4M3 for each value of `[out, in]`, and one multiplier for each block of 128 x 128.
    Fp8Block {
        /// `X.weight_scale_inv`, BF16 or F32, `[ceil(out / 128), ceil(in / 128)]`
        scale: Box<Spec>,
    },
    /// One F8_E4M3 for each value, and one multiplier for all. The pieces of an n-gram table share it.
    Fp8Tensor {
        /// `X.weight_scale`, BF16 or F32, a single value
        scale: Box<Spec>,
    },
    /// Two 4-bit codes in each byte of `[out, in / 2]`, the even column in the low half.
    Nvfp4 {
        /// `X.weight_scale`, F8_E4M3, `[out, in / 16]`: the multiplier of 16 columns
        scales: Box<Spec>,
        /// `X.weight_scale_2` or `X.weight_global_scale`, F32, a single value. The pieces of an n-gram table share it.
        global: Box<Spec>,
        /// Whether values are divided by `global`, and not multiplied with it.
        reciprocal: bool,
    },
}

/// Rows and columns of a block that has one scale in [`Stored::Fp8Block`].
pub const FP8_BLOCK: usize = 128;

/// Columns that have one scale in [`Stored::Nvfp4`].
pub const NVFP4_GROUP: usize = 16;

pub(super) const PLAIN: &[Dtype] = &[Dtype::BF16, Dtype::F32];
pub(super) const INTEGERS: &[Dtype] = &[Dtype::I64];
const WIDE: &[Dtype] = &[Dtype::F32];
const EIGHT: &[Dtype] = &[Dtype::F8_E4M3];
const PACKED: &[Dtype] = &[Dtype::U8];

impl Stored {
    /// The scales of this tensor alone.
    pub(super) fn own_scales(&self) -> Option<&Spec> {
        match self {
            Self::Fp8Block { scale } => Some(scale),
            Self::Nvfp4 { scales, .. } => Some(scales),
            Self::Plain | Self::Fp8Tensor { .. } => None,
        }
    }

    /// The scale that may be another tensor's too.
    pub(super) fn shared_scale(&self) -> Option<&Spec> {
        match self {
            Self::Fp8Tensor { scale } => Some(scale),
            Self::Nvfp4 { global, .. } => Some(global),
            Self::Plain | Self::Fp8Block { .. } => None,
        }
    }
}

impl Spec {
    /// The shape of what the file holds: [`shape`](Spec::shape), but for codes that are packed into bytes.
    pub fn stored_shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let (Stored::Nvfp4 { .. }, Some(columns)) = (&self.stored, shape.last_mut()) {
            *columns /= 2;
        }
        shape
    }

    /// The tensors without which this one has no meaning: its scales.
    pub fn scales(&self) -> impl Iterator<Item = &Spec> {
        self.stored.own_scales().into_iter().chain(self.stored.shared_scale())
    }

    pub(super) fn gather<'a>(&'a self, specs: &mut Vec<&'a Spec>) {
        specs.push(self);
        specs.extend(self.scales());
    }
}

impl Scope<'_> {
    /// A matrix that may be quantised; `base` is its name without `.weight`.
    pub(super) fn projection(&self, base: &str, shape: &[usize]) -> Spec {
        let plain = self.weight(&format!("{base}.weight"), shape);
        match self.source.dtype(&plain.name) {
            Some(Dtype::F8_E4M3) => {
                let block = self.weight(&format!("{base}.weight_scale_inv"), &blocks(shape));
                let whole = self.weight(&format!("{base}.weight_scale"), &[]);
                let blocks = self.source.has(&block.name) || !self.source.has(&whole.name);
                let stored = match blocks {
                    true => Stored::Fp8Block { scale: block.into() },
                    false => Stored::Fp8Tensor { scale: whole.into() },
                };
                Spec { stored, dtypes: EIGHT, ..plain }
            }
            _ => self.plain_or_packed(plain, base, base),
        }
    }

    /// A piece of an n-gram table, which shares the table's scale.
    pub(super) fn shard(&self, base: &str, shape: &[usize]) -> Spec {
        let plain = self.weight(&format!("{base}.weight"), shape);
        match self.source.dtype(&plain.name) {
            Some(Dtype::F8_E4M3) => {
                let scale = self.weight("weight_scale", &[]);
                Spec { stored: Stored::Fp8Tensor { scale: scale.into() }, dtypes: EIGHT, ..plain }
            }
            _ => self.plain_or_packed(plain, base, ""),
        }
    }

    /// The weight as it is, or as 4-bit codes; `shared` is where the name of the one scale begins.
    fn plain_or_packed(&self, plain: Spec, base: &str, shared: &str) -> Spec {
        let dot = if shared.is_empty() { "" } else { "." };
        let packed = |name: String, scale: &str, reciprocal: bool| Spec {
            stored: Stored::Nvfp4 {
                scales: Box::new(Spec {
                    dtypes: EIGHT,
                    ..self.weight(&format!("{base}.weight_scale"), &groups(&plain.shape))
                }),
                global: Box::new(Spec { dtypes: WIDE, ..self.weight(&format!("{shared}{dot}{scale}"), &[]) }),
                reciprocal,
            },
            name,
            dtypes: PACKED,
            ..plain.clone()
        };
        match self.source.dtype(&plain.name) {
            Some(Dtype::U8) => packed(plain.name.clone(), "weight_scale_2", false),
            Some(_) => plain,
            None => {
                let name = format!("{}_packed", plain.name);
                match self.source.has(&name) {
                    true => packed(name, "weight_global_scale", true),
                    false => plain,
                }
            }
        }
    }
}

fn blocks(shape: &[usize]) -> Vec<usize> {
    shape.iter().map(|size| size.div_ceil(FP8_BLOCK)).collect()
}

fn groups(shape: &[usize]) -> Vec<usize> {
    let mut shape = shape.to_vec();
    if let Some(columns) = shape.last_mut() {
        *columns /= NVFP4_GROUP;
    }
    shape
}

/// The scales of activations and caches that the files hold beside the layout's tensors.
pub(super) fn idle(layout: &Layout, source: Source<'_>) -> Vec<Spec> {
    let single = |name: String| Spec {
        name,
        shape: Vec::new(),
        stored: Stored::Plain,
        dtypes: PLAIN,
        required: false,
        part: Part::Idle,
    };
    let mut names = Vec::new();
    for spec in layout.specs() {
        let activation = match &spec.stored {
            Stored::Plain => continue,
            Stored::Nvfp4 { reciprocal: true, .. } => "input_global_scale",
            _ => "input_scale",
        };
        for scale in spec.scales() {
            let base = scale.name.rsplit_once('.').map_or("", |(base, _)| base);
            names.push(format!("{base}.{activation}"));
        }
    }
    let text = layout.layers.iter().filter_map(|layer| match &layer.mixer {
        TokenMixer::Sparse(sparse) => Some(sparse),
        TokenMixer::Linear(_) => None,
    });
    for attention in text.chain(layout.draft.as_ref().map(|draft| &draft.attention)) {
        let at = attention.q_norm.name.trim_end_matches("q_norm.weight");
        names.extend(
            ["k_scale", "v_scale", "k_proj.k_scale", "v_proj.v_scale"].map(|name| format!("{at}{name}")),
        );
    }
    names.retain(|name| source.has(name));
    names.sort_unstable();
    names.dedup();
    names.into_iter().map(single).collect()
}
