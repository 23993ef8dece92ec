//! How the model is run: options that mean the same to every command that has them.

use std::fmt;
use std::path::Path;

use clap::Args;
use graph::Exchange;
use kernels::numerics::ElementType;
use runtime::checkpoint::layout::{Format, Wanted};
use runtime::engine::{Class, EngineOptions};
use runtime::open::Load;
use runtime::place::Place;
use runtime::receipts::CheckOptions;
use runtime::weights::TablePlace;

use super::{ByteSize, Dense, Device, Dtype, Eyes, LoadFrom, RankArgs, Stored, Switch, Table};
use crate::failure::Failure;

/// The seed of dummy weights.
pub(super) const DUMMY_SEED: u64 = 1;

/// Where and how exactly.
#[derive(Debug, Args)]
#[command(next_help_heading = "Engine options")]
pub(crate) struct RunArgs {
    /// Where to run: auto (a CUDA device if there is one and it runs the dtype, or else host), host, cuda, or
    /// cuda:N for device N. Compiled kernels are kept in the folder ROUNDHOUSE_CACHE, or else below the user's
    /// cache folder.
    #[arg(long, env = "ROUNDHOUSE_DEVICE", default_value = "auto")]
    pub(crate) device: Device,

    /// Precision of the arithmetic.
    #[arg(long, env = "ROUNDHOUSE_DTYPE", value_enum, default_value = "bf16")]
    pub(crate) dtype: Dtype,

    /// Where the weights come from: checkpoint, or dummy: random ones of the shape that config.json says, to
    /// measure and try; no weight file is needed.
    #[arg(long, env = "ROUNDHOUSE_LOAD", value_enum, default_value = "checkpoint")]
    pub(crate) load: LoadFrom,

    /// With --load dummy: only the first N layers; all of them if not given.
    #[arg(long, env = "ROUNDHOUSE_LAYERS", value_name = "N", allow_negative_numbers = true)]
    pub(crate) layers: Option<u32>,

    /// With --load dummy: how the routed experts are stored.
    #[arg(long, env = "ROUNDHOUSE_EXPERTS", value_enum, value_name = "FORMAT")]
    pub(crate) experts: Option<Stored>,

    /// With --load dummy: how the n-gram tables are stored.
    #[arg(long, env = "ROUNDHOUSE_TABLE_FORMAT", value_enum, value_name = "FORMAT")]
    pub(crate) table_format: Option<Stored>,

    /// Projections around token mixers and in the indexer, shared experts, and the head: as they are stored, or, where
    /// they are stored in plain floats, quantised to fp8 in blocks of 128 x 128 while they are loaded. That reads fewer
    /// bytes a token, and changes what the model says; `check --dense fp8` measures by how much.
    #[arg(long, env = "ROUNDHOUSE_DENSE", value_enum, default_value = "stored")]
    pub(crate) dense: Dense,

    /// Where the n-gram tables live: in device memory, in pinned host memory, or mapped from the checkpoint.
    #[arg(long, env = "ROUNDHOUSE_TABLE", value_enum, default_value = "device")]
    pub(crate) table: Table,
}

/// How long.
#[derive(Debug, Args)]
#[command(next_help_heading = "Engine options")]
pub(crate) struct ContextArgs {
    /// The most positions of a sequence, prompt and answer together; the model's own, at most 32768, if not
    /// given.
    #[arg(
        long,
        env = "ROUNDHOUSE_CONTEXT",
        value_name = "TOKENS",
        allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub(crate) context: Option<u32>,
}

/// All of it, for commands that run requests in lanes.
#[derive(Debug, Args)]
#[command(next_help_heading = "Engine options")]
pub(crate) struct EngineArgs {
    #[command(flatten)]
    pub(crate) run: RunArgs,

    /// Whether decode rounds are captured and replayed.
    #[arg(long, env = "ROUNDHOUSE_GRAPHS", value_enum, default_value = "on")]
    pub(crate) graphs: Switch,

    /// The most answers that are made at once.
    #[arg(
        long,
        env = "ROUNDHOUSE_LANES",
        value_name = "LANES",
        default_value_t = 16,
        allow_negative_numbers = true,
        value_parser = clap::value_parser!(u16).range(1..=1024)
    )]
    pub(crate) lanes: u16,

    #[command(flatten)]
    pub(crate) context: ContextArgs,

    /// Memory for the pages that the lanes share, in bytes or with K, M, G or T. If not given: as many pages as the
    /// lanes can use, within 256M on the host device and nine tenths of the free memory on CUDA; one sequence of the
    /// longest context at least.
    #[arg(long, env = "ROUNDHOUSE_MEMORY", value_name = "SIZE", allow_negative_numbers = true)]
    pub(crate) memory: Option<ByteSize>,

    /// Whether pictures are taken: auto (if the model sees), off (its vision tower is not read), or the most patches of
    /// a picture or a video, each of 16 x 16 pixels.
    #[arg(
        long,
        env = "ROUNDHOUSE_VISION",
        value_name = "WHAT",
        default_value = "auto",
        allow_negative_numbers = true
    )]
    pub(crate) vision: Eyes,

    /// Memory for the features of pictures that run, wait or were seen before, in bytes or with K, M, G or T; 32M on
    /// the host device and 512M on CUDA if not given.
    #[arg(long, env = "ROUNDHOUSE_FEATURE_MEMORY", value_name = "SIZE", allow_negative_numbers = true)]
    pub(crate) feature_memory: Option<ByteSize>,

    /// Every how many graph rounds one runs eager and is compared with its graph; 0 is never.
    #[arg(
        long,
        env = "ROUNDHOUSE_AUDIT",
        value_name = "ROUNDS",
        default_value_t = 0,
        allow_negative_numbers = true
    )]
    pub(crate) audit: u32,

    #[command(flatten)]
    pub(crate) ranks: RankArgs,
}

/// Where a command runs, decided once.
pub(crate) struct Chosen {
    pub(crate) place: Place,
    pub(crate) element: ElementType,
    pub(crate) load: Load,
    pub(crate) table: TablePlace,
    /// Why it is this device.
    pub(crate) why: String,
}

impl RunArgs {
    /// Decides where to run.
    ///
    /// # Errors
    /// The device that was asked for does not run the dtype, or layers are counted of a checkpoint.
    pub(crate) fn choose(&self) -> Result<Chosen, Failure> {
        let element = self.dtype.element();
        let asked = |place| (place, "asked for with --device".to_string());
        let (place, why) = match self.device {
            Device::Auto => {
                let (place, why) = Place::best(element);
                (place, format!("auto: {why}"))
            }
            Device::Host => asked(Place::Host),
            Device::Cuda(ordinal) => asked(Place::Cuda(ordinal)),
        };
        place.runs(element).map_err(Failure::input)?;
        let layers = self.layers.map(|layers| layers as usize);
        let load = match self.load {
            LoadFrom::Dummy => Load::Dummy { layers, seed: DUMMY_SEED, stored: self.stored() },
            LoadFrom::Checkpoint => {
                self.leaves_dummies_out()?;
                Load::Checkpoint { dense: self.dense.form() }
            }
        };
        Ok(Chosen { place, element, load, table: self.table.place(), why })
    }
}

impl RunArgs {
    /// How dummy weights are stored.
    fn stored(&self) -> Wanted {
        let plain = Wanted::default();
        Wanted {
            experts: self.experts.map_or(plain.experts, Stored::of_matrices),
            dense: if self.dense == Dense::Fp8 { Format::Fp8 } else { plain.dense },
            table: self.table_format.map_or(plain.table, Stored::of_tables),
        }
    }

    /// That nothing is said of dummy weights.
    fn leaves_dummies_out(&self) -> Result<(), Failure> {
        let format = |stored: &Stored| format!("{stored:?}").to_lowercase();
        let said = [
            ("--layers", self.layers.map(|layers| layers.to_string()), "opened whole"),
            ("--experts", self.experts.as_ref().map(format), "read as it is stored"),
            ("--table-format", self.table_format.as_ref().map(format), "read as it is stored"),
        ];
        match said.into_iter().find_map(|(option, value, why)| Some((option, value?, why))) {
            None => Ok(()),
            Some((option, value, why)) => Err(Failure::Input(format!(
                "{option} {value}: a checkpoint is {why}; add --load dummy, or leave {option} out"
            ))),
        }
    }
}

impl Chosen {
    /// What receipts need to know.
    pub(crate) fn receipts(&self, cases: u32, seed: u64) -> CheckOptions {
        let &Chosen { place, element, load, table, .. } = self;
        CheckOptions { place, element, load, table, exchange: Exchange::Auto, cases, seed }
    }

    /// The note before a model is opened.
    pub(crate) fn opening(&self, model: &Path) -> impl fmt::Display {
        let Chosen { place, element, why, .. } = self;
        format!("loading {} on the {place} device in {} ({why})", model.display(), element.name())
    }
}

impl EngineArgs {
    /// The engine's own form of them.
    pub(crate) fn options(&self, chosen: &Chosen) -> EngineOptions {
        let context = self.context.context.unwrap_or(0);
        EngineOptions {
            place: chosen.place,
            piece_rows: chosen.place.piece_rows(),
            element: chosen.element,
            load: chosen.load,
            table: chosen.table,
            graphs: self.graphs.is_on(),
            exchange: self.ranks.exchange(),
            classes: vec![Class { context, lanes: self.lanes, pages: 0 }],
            page_memory: self.memory.map(|size| size.0),
            vision: self.vision.0,
            feature_bytes: self.feature_memory.map(|size| usize::try_from(size.0).unwrap_or(usize::MAX)),
            audit: self.audit,
            ..EngineOptions::default()
        }
    }
}
