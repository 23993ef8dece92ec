//! Name, shape and purpose of every tensor of a checkpoint, all derived from the model's settings.
//!
//! This is the only place that spells a tensor name. The tree mirrors the model: loaders walk it by field.

mod draft;
mod experts;
mod formats;
mod stored;
mod text;
mod vision;
mod wanted;

use std::collections::HashMap;

use safetensors::Dtype;

pub use draft::{Draft, Fusion};
pub use experts::{Expert, Experts, Matrix, Place};
pub use formats::{Format, Formats};
pub use stored::{FP8_BLOCK, NVFP4_GROUP, Stored};
pub use text::{
    FinalMixer, HashBuffers, HyperConnection, Layer, LinearAttention, Moe, Ple, PleDense, SharedExpert,
    SparseAttention, TokenMixer,
};
pub use vision::{Block, Vision, VisionStem};
pub use wanted::Wanted;

use super::files::Files;
use crate::config::{ModelConfig, StorageDtype};
pub(super) use formats::{Unlike, unlike};
use stored::{INTEGERS, PLAIN};

/// All tensors of a model.
#[derive(Debug, Clone)]
pub struct Layout {
    /// Token embedding, `[vocab, hidden]`.
    pub embed_tokens: Spec,
    /// Output head, `[vocab, hidden]`.
    pub lm_head: Spec,
    /// The mixer that turns the streams into the head's input.
    pub final_mixer: FinalMixer,
    /// Decoder layers.
    pub layers: Vec<Layer>,
    /// The draft layer, where the model has one.
    pub draft: Option<Draft>,
    /// The vision tower, where the model has one.
    pub vision: Option<Vision>,
    /// What quantised exports carry and weight-only arithmetic does not use: scales of activations and of caches.
    pub idle: Vec<Spec>,
    /// How the files store the weights, in short.
    pub formats: Formats,
}

/// What is expected of one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// Its name in the checkpoint.
    pub name: String,
    /// The sizes of what it means, the slowest first: `[out, in]` for a matrix, however its values are packed. A
    /// single value is `[]` here and may be stored as `[1]`.
    pub shape: Vec<usize>,
    /// How its values are stored, by the files.
    pub stored: Stored,
    /// The types it may be stored in.
    pub dtypes: &'static [Dtype],
    /// Whether a checkpoint without it is incomplete.
    pub required: bool,
    /// What it belongs to.
    pub part: Part,
}

/// The parts of a checkpoint that are used or left alone as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Part {
    /// The language model.
    Text,
    /// The n-gram tables, which may live outside of device memory.
    Table,
    /// Stored constants, compared with recomputed ones when the checkpoint is opened.
    Constants,
    /// The draft layer.
    Draft,
    /// The vision tower.
    Vision,
    /// Tensors that some checkpoints carry and the model does not use.
    Idle,
}

impl Layout {
    /// The tensors that `config` implies, none of them quantised, with the routed experts stacked or one by one.
    pub fn plain(config: &ModelConfig, stacked: bool) -> Self {
        Self::new(config, Source::Nothing { stacked })
    }

    /// The tensors that `config` implies, in these formats.
    pub fn wanted(config: &ModelConfig, wanted: Wanted) -> Self {
        Self::new(config, Source::Wanted(wanted))
    }

    /// The tensors that `config` implies, each in the form that the files give it. What the files lack, or store in a
    /// form that is not known, is expected as BF16 or F32.
    pub(super) fn of_files(config: &ModelConfig, files: &Files) -> Self {
        Self::new(config, Source::Files(files))
    }

    /// The tensors that `config` implies, each in the form that types by name give it: those of files that are being
    /// written.
    pub(crate) fn of_types(config: &ModelConfig, types: &HashMap<&str, Dtype>) -> Self {
        Self::new(config, Source::Types(types))
    }

    fn new(config: &ModelConfig, source: Source<'_>) -> Self {
        let root = Scope { prefix: String::new(), part: Part::Text, source };
        let text = root.within("model.language_model.");
        let [vocab, hidden] = [config.vocab_size, config.hidden_size];
        let layer = |at: usize| Layer::new(&text.within(&format!("layers.{at}.")), config, at);
        let plain = match config.dtype {
            StorageDtype::Bf16 => Format::Bf16,
            StorageDtype::F32 => Format::F32,
        };
        let mut layout = Self {
            embed_tokens: text.weight("embed_tokens.weight", &[vocab, hidden]),
            lm_head: root.projection("lm_head", &[vocab, hidden]),
            final_mixer: FinalMixer::new(&text.within("hyper_connection_mixer."), config),
            layers: (0..config.num_hidden_layers).map(layer).collect(),
            draft: (config.mtp_num_hidden_layers > 0)
                .then(|| Draft::new(&root.within("mtp.").of(Part::Draft), config)),
            vision: config
                .vision
                .as_ref()
                .map(|vision| Vision::new(&root.within("model.visual.").of(Part::Vision), vision)),
            idle: Vec::new(),
            formats: Formats::all(plain),
        };
        layout.idle = stored::idle(&layout, source);
        layout.formats = Formats::read(&layout, source, plain);
        layout
    }

    /// Every tensor, in the order of the model; a quantised one is followed by its scales.
    pub fn specs(&self) -> Vec<&Spec> {
        let mut specs = Vec::new();
        self.embed_tokens.gather(&mut specs);
        self.lm_head.gather(&mut specs);
        self.layers.iter().for_each(|layer| layer.gather(&mut specs));
        self.final_mixer.gather(&mut specs);
        if let Some(draft) = &self.draft {
            draft.gather(&mut specs);
        }
        if let Some(vision) = &self.vision {
            vision.gather(&mut specs);
        }
        specs.extend(&self.idle);
        specs
    }
}

/// What says how tensors are stored.
#[derive(Clone, Copy)]
enum Source<'a> {
    Files(&'a Files),
    /// The types of files to come.
    Types(&'a HashMap<&'a str, Dtype>),
    /// No files yet.
    Wanted(Wanted),
    /// No files: nothing is quantised.
    Nothing {
        /// Whether the routed experts are stacked.
        stacked: bool,
    },
}

impl Source<'_> {
    fn dtype(self, name: &str) -> Option<Dtype> {
        match self {
            Source::Files(files) => files.tensors.get(name).map(|entry| entry.dtype),
            Source::Types(types) => types.get(name).copied(),
            Source::Wanted(wanted) => wanted.dtype(name),
            Source::Nothing { .. } => None,
        }
    }

    fn has(self, name: &str) -> bool {
        self.dtype(name).is_some()
    }
}

/// Where names begin alike.
#[derive(Clone)]
struct Scope<'a> {
    prefix: String,
    part: Part,
    source: Source<'a>,
}

impl Scope<'_> {
    fn within(&self, more: &str) -> Self {
        Self { prefix: format!("{}{more}", self.prefix), ..*self }
    }

    fn of(self, part: Part) -> Self {
        Self { part, ..self }
    }

    /// A tensor that is never quantised.
    fn weight(&self, name: &str, shape: &[usize]) -> Spec {
        Spec {
            name: format!("{}{name}", self.prefix),
            shape: shape.to_vec(),
            stored: Stored::Plain,
            dtypes: PLAIN,
            required: true,
            part: self.part,
        }
    }

    /// A stored constant that may be absent.
    fn constant(&self, name: &str, len: usize) -> Spec {
        Spec { dtypes: INTEGERS, required: false, part: Part::Constants, ..self.weight(name, &[len]) }
    }
}

/// Declares a struct of tensors together with the walk over them.
macro_rules! tensors {
    ($(#[$about:meta])* $name:ident { $($(#[$what:meta])* $field:ident,)* }) => {
        $(#[$about])*
        #[derive(Debug, Clone)]
        pub struct $name {
            $($(#[$what])* pub $field: $crate::checkpoint::layout::Spec,)*
        }

        impl $name {
            pub(super) fn gather<'a>(&'a self, specs: &mut Vec<&'a $crate::checkpoint::layout::Spec>) {
                $(self.$field.gather(specs);)*
            }
        }
    };
}
use tensors;
