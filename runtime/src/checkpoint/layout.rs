//! Name, shape and purpose of every tensor of a checkpoint, all derived from the model's settings.
//!
//! This is the only place that spells a tensor name. The tree mirrors the model: loaders walk it by field.

mod draft;
mod experts;
mod text;
mod vision;

use safetensors::Dtype;

pub use draft::{Draft, Fusion};
pub use experts::{Expert, Experts, Matrix, Place};
pub use text::{
    FinalMixer, HashBuffers, HyperConnection, Layer, LinearAttention, Moe, Ple, PleDense, SharedExpert,
    SparseAttention, TokenMixer,
};
pub use vision::{Block, Vision, VisionStem};

use crate::config::ModelConfig;

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
}

/// What is expected of one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// Its name in the checkpoint.
    pub name: String,
    /// Its sizes, the slowest first.
    pub shape: Vec<usize>,
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
    /// The tensors that `config` implies. `has` says which names the checkpoint holds: it decides, layer by layer, how
    /// the routed experts are stored, and nothing else.
    pub fn new(config: &ModelConfig, has: impl Fn(&str) -> bool) -> Self {
        let root = Scope { prefix: String::new(), part: Part::Text };
        let text = root.within("model.language_model.");
        let [vocab, hidden] = [config.vocab_size, config.hidden_size];
        let layer = |at: usize| Layer::new(&text.within(&format!("layers.{at}.")), config, at, &has);
        Self {
            embed_tokens: text.weight("embed_tokens.weight", &[vocab, hidden]),
            lm_head: root.weight("lm_head.weight", &[vocab, hidden]),
            final_mixer: FinalMixer::new(&text.within("hyper_connection_mixer."), config),
            layers: (0..config.num_hidden_layers).map(layer).collect(),
            draft: (config.mtp_num_hidden_layers > 0)
                .then(|| Draft::new(&root.within("mtp.").of(Part::Draft), config, &has)),
            vision: config
                .vision
                .as_ref()
                .map(|vision| Vision::new(&root.within("model.visual.").of(Part::Vision), vision)),
        }
    }

    /// Every tensor, in the order of the model.
    pub fn specs(&self) -> Vec<&Spec> {
        let mut specs = vec![&self.embed_tokens, &self.lm_head];
        self.layers.iter().for_each(|layer| layer.gather(&mut specs));
        self.final_mixer.gather(&mut specs);
        if let Some(draft) = &self.draft {
            draft.gather(&mut specs);
        }
        if let Some(vision) = &self.vision {
            vision.gather(&mut specs);
        }
        specs
    }
}

/// Where names begin alike.
#[derive(Clone)]
struct Scope {
    prefix: String,
    part: Part,
}

impl Scope {
    fn within(&self, more: &str) -> Self {
        Self { prefix: format!("{}{more}", self.prefix), part: self.part }
    }

    fn of(self, part: Part) -> Self {
        Self { part, ..self }
    }

    fn weight(&self, name: &str, shape: &[usize]) -> Spec {
        const FLOATS: &[Dtype] = &[Dtype::BF16, Dtype::F32];
        Spec {
            name: format!("{}{name}", self.prefix),
            shape: shape.to_vec(),
            dtypes: FLOATS,
            required: true,
            part: self.part,
        }
    }

    /// A stored constant that may be absent.
    fn constant(&self, name: &str, len: usize) -> Spec {
        const INTEGERS: &[Dtype] = &[Dtype::I64];
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
                specs.extend([$(&self.$field,)*]);
            }
        }
    };
}
use tensors;
