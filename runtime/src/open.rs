//! Opening a model folder: everything that is known before weights are read, then the weights.

use std::fmt;
use std::path::Path;

use graph::Device;

use crate::chat::ChatTemplate;
use crate::checkpoint::Checkpoint;
use crate::checkpoint::layout::{Part, Wanted};
use crate::config::ModelConfig;
use crate::error::Error;
use crate::memory::{MemoryPlan, Size};
use crate::model::Model;
use crate::tokenizer::Tokenizer;
use crate::weights::{DenseForm, TablePlace, WeightForm, WeightMemory, WeightPlan};

/// What happens while a model is opened.
#[derive(Clone, Debug)]
pub enum Progress {
    /// The device that was chosen.
    Device(String),
    /// What carries the collectives of two ranks.
    Collectives(String),
    /// What memory will be taken, before any weight is read.
    Plan(MemoryPlan),
    /// Tensors that the checkpoint holds and this model does not read.
    Unused {
        /// How many.
        tensors: usize,
        /// Their size.
        bytes: u64,
        /// What they belong to.
        what: &'static str,
    },
    /// The model has a vision tower and pictures are not taken: why.
    Blind(String),
    /// This rank attaches pictures that rank 0 encodes.
    Attaches,
    /// Dense projections become fp8 while they are read.
    Quantising,
    /// Weights were made, none read.
    Made {
        /// Their size.
        bytes: usize,
        /// How many layers they are for.
        layers: usize,
        /// How many layers the model has.
        of: usize,
    },
    /// Weights read so far.
    Loading {
        /// Bytes read.
        done: u64,
        /// Bytes to read.
        total: u64,
    },
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Progress::Device(device) => write!(f, "device {device}"),
            Progress::Collectives(means) => write!(f, "collectives over {means}"),
            Progress::Plan(plan) => f.write_str(plan.to_string().trim_end()),
            Progress::Unused { tensors, bytes, what } => {
                write!(f, "not used: {tensors} tensors of the {what}, {}", Size(*bytes as usize))
            }
            Progress::Blind(why) => write!(f, "pictures are refused: {why}"),
            Progress::Attaches => f.write_str("rank 0 has the vision tower; this rank attaches what it encodes"),
            Progress::Quantising => f.write_str(
                "dense projections become fp8 (--dense fp8): answers change a little; `roundhouse check MODEL --dense \
                 fp8` measures by how much",
            ),
            Progress::Made { bytes, layers, of } => {
                write!(
                    f,
                    "made {} of random weights for {layers} of {of} layers (--load dummy); ",
                    Size(*bytes)
                )?;
                f.write_str("answers mean nothing")
            }
            Progress::Loading { done, total } => {
                write!(f, "read {} of {}", Size(*done as usize), Size(*total as usize))
            }
        }
    }
}

/// Where weights come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// The files of the folder.
    Checkpoint {
        /// What becomes of dense projections on the way.
        dense: DenseForm,
    },
    /// Nowhere: they are made of a seed on the device, for a model of the shape that `config.json` says.
    Dummy {
        /// How many of the layers, from the first on; none: all.
        layers: Option<usize>,
        /// Equal seeds make equal weights.
        seed: u64,
        /// How they are stored.
        stored: Wanted,
    },
}

impl Default for Load {
    fn default() -> Load {
        Load::Checkpoint { dense: DenseForm::Stored }
    }
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Load::Checkpoint { dense: DenseForm::Stored } => f.write_str("checkpoint"),
            Load::Checkpoint { dense: DenseForm::Fp8 } => {
                f.write_str("checkpoint, its dense projections in fp8")
            }
            Load::Dummy { layers, seed, stored: Wanted { experts, dense, table } } => {
                let layers = layers.map_or_else(|| "all layers".into(), |layers| format!("{layers} layers"));
                write!(f, "dummy, {layers} of seed {seed}, experts {experts}, dense {dense}, table {table}")
            }
        }
    }
}

/// Rows that each head of a made n-gram table has at most in device memory: few enough to leave room for layers, and
/// enough that no cache holds them.
pub(crate) const MADE_TABLE_ROWS: u64 = 1_000_000;

/// A model folder whose every file was checked; no weight has been read.
pub struct Opened {
    /// The settings and tensors.
    pub checkpoint: Checkpoint,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The chat template.
    pub chat: ChatTemplate,
    /// How the weights will lie in memory.
    pub weights: WeightPlan,
    /// Where they come from.
    pub load: Load,
    /// Layers of the model that the settings describe; more than are opened if only the first ones are.
    pub full_layers: usize,
}

impl Opened {
    /// Checks a model folder whose weights will be in this form.
    pub fn new(dir: &Path, form: WeightForm) -> Result<Opened, Error> {
        Opened::with(dir, form, Load::default())
    }

    /// Checks a model folder of which only the text files and what `load` needs must be there.
    pub fn with(dir: &Path, form: WeightForm, load: Load) -> Result<Opened, Error> {
        let opened = Opened::without_text(dir, form, load)?;
        Ok(Opened { tokenizer: Tokenizer::open(dir)?, chat: ChatTemplate::open(dir)?, ..opened })
    }

    /// Checks a model folder of which only what `load` needs must be there. Ids stand for no text.
    pub fn without_text(dir: &Path, form: WeightForm, load: Load) -> Result<Opened, Error> {
        let mut form = form;
        let (checkpoint, full_layers) = match load {
            Load::Checkpoint { dense } => {
                form.dense = dense;
                let checkpoint = Checkpoint::open(dir)?;
                let layers = checkpoint.config.num_hidden_layers;
                (checkpoint, layers)
            }
            Load::Dummy { .. } if form.table == TablePlace::Mapped => {
                let why = "made tables are in no file; use --table device or --table pinned";
                return Err(Error::Setting(format!("--table mmap with --load dummy: {why}")));
            }
            Load::Dummy { layers, stored, .. } => {
                let config = ModelConfig::open(dir)?;
                let all = config.num_hidden_layers;
                let layers = layers.unwrap_or(all);
                if layers == 0 || layers > all {
                    return Err(Error::Setting(format!(
                        "--layers {layers} is not between 1 and the {all} layers of {}",
                        dir.join("config.json").display()
                    )));
                }
                let rows = if form.table == TablePlace::Device { MADE_TABLE_ROWS } else { u64::MAX };
                let vision = config.vision.clone().filter(|_| form.vision);
                let first = ModelConfig { vision, ..config.first_layers(layers, rows) };
                (Checkpoint::shape_of(dir, first, stored)?, all)
            }
        };
        let weights = WeightPlan::new(&checkpoint, form)?;
        let (tokenizer, chat) = (Tokenizer::blank(checkpoint.config.vocab_size), ChatTemplate::blank());
        Ok(Opened { tokenizer, chat, checkpoint, weights, load, full_layers })
    }

    /// Size in bytes of what loading needs beside the weights, until they are loaded.
    pub fn staging_bytes(&self) -> usize {
        match self.load {
            Load::Checkpoint { .. } => self.weights.staging_bytes(),
            Load::Dummy { .. } => 0,
        }
    }

    /// The context to run with: what was asked for, or `most`, or what the model was made for.
    ///
    /// # Errors
    /// More than the model was made for, or nothing.
    pub fn context(&self, asked: Option<u32>, most: u32) -> Result<u32, Error> {
        let longest = self.checkpoint.config.max_position_embeddings as u32;
        let context = asked.unwrap_or(longest.min(most));
        match context == 0 || context > longest {
            false => Ok(context),
            true => Err(Error::Setting(format!(
                "--context {context} is not between 1 and the {longest} positions that the model was made for"
            ))),
        }
    }

    /// The parts of the checkpoint that the model leaves alone.
    pub fn unused(&self) -> Vec<Progress> {
        const PARTS: [(Part, &str); 3] =
            [(Part::Draft, "draft layer"), (Part::Vision, "vision tower"), (Part::Idle, "mixers (idle)")];
        let all = [Part::Text, Part::Table, Part::Constants, Part::Draft, Part::Vision, Part::Idle];
        let used = |part: &(Part, &str)| part.0 == Part::Vision && self.weights.form().vision;
        let rest = PARTS.into_iter().filter(|part| !used(part)).map(|(part, what)| {
            let others: Vec<Part> = all.into_iter().filter(|other| *other != part).collect();
            let unused = self.checkpoint.unused(&others);
            Progress::Unused { tensors: unused.tensors.len(), bytes: unused.bytes, what }
        });
        rest.filter(|unused| !matches!(unused, Progress::Unused { tensors: 0, .. })).collect()
    }

    /// Reads the weights to `device`.
    pub fn load(self, device: &Device, progress: &mut dyn FnMut(Progress)) -> Result<OpenModel, Error> {
        let Opened { checkpoint, tokenizer, chat, weights, load, full_layers } = self;
        let (WeightForm { element, share, .. }, config) = (weights.form(), weights.config().clone());
        let loaded = match load {
            Load::Checkpoint { .. } => {
                if weights.quantises() {
                    progress(Progress::Quantising);
                }
                weights.load(&checkpoint, device, &mut |done, total| {
                    progress(Progress::Loading { done, total });
                })?
            }
            Load::Dummy { seed, .. } => {
                let bytes = weights.bytes() + weights.table_bytes();
                let layers = checkpoint.config.num_hidden_layers;
                let loaded = weights.make(seed, device)?;
                progress(Progress::Made { bytes, layers, of: full_layers });
                loaded
            }
        };
        let choices = checkpoint.config.vocab_size.min(tokenizer.last_text_id() as usize + 1);
        let model = Model { config, share, element, weights: loaded.weights, choices, communicator: None };
        Ok(OpenModel { model, weights: loaded.memory, tokenizer, chat, stop_ids: checkpoint.generation.stop })
    }
}

/// A model in memory, with what turns text into ids and back.
pub struct OpenModel {
    /// The model.
    pub model: Model,
    /// The memory of its weights.
    pub weights: WeightMemory,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The chat template.
    pub chat: ChatTemplate,
    /// The ids that end a reply.
    pub stop_ids: Vec<u32>,
}
