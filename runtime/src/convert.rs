//! A checkpoint written anew in other formats: as published, so that other programs read it too.
//!
//! What may be quantised has three purposes (experts, dense projections, n-gram tables), each with a format of its own
//! or left as it is. All other tensors are copied byte for byte. The folder opens as a model when all of it is written,
//! and not before.

mod folder;
mod origin;
mod plan;
mod run;
mod settings;
mod writer;

use std::fmt;
use std::path::Path;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::layout::{Format, Formats, Layout, Wanted};
use crate::config::ModelConfig;
use crate::error::Error;
use crate::memory::Size;
use crate::open::MADE_TABLE_ROWS;
use folder::Folder;
use origin::Origin;
use settings::Settings;
use writer::Writer;

/// What to convert, and into what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvertOptions {
    /// How the routed experts of the decoder layers are to be stored: bf16, fp8 or nvfp4; nothing: as they are.
    pub experts: Option<Format>,
    /// How their other projections, their shared experts and the head are to be stored: bf16 or fp8; nothing: as they
    /// are.
    pub dense: Option<Format>,
    /// How the n-gram tables are to be stored: bf16, fp8 with one scale, or nvfp4; nothing: as they are.
    pub table: Option<Format>,
    /// Where the weights come from.
    pub from: Source,
    /// The most bytes of a weight file, unless a single tensor is larger.
    pub file_bytes: u64,
}

/// Where the weights of a conversion come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The files of the folder.
    Checkpoint,
    /// Nowhere: they are made in bf16, as `--load dummy` makes them, for a model of the shape that `config.json` says.
    Made {
        /// How many of the layers, from the first on; none: all.
        layers: Option<usize>,
        /// Equal seeds make equal weights.
        seed: u64,
    },
}

impl Default for ConvertOptions {
    /// Everything as it is, in files of 4 GiB.
    fn default() -> Self {
        Self { experts: None, dense: None, table: None, from: Source::Checkpoint, file_bytes: 4 << 30 }
    }
}

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The routed experts of the decoder layers.
    Experts,
    /// Their other projections, their shared experts, and the head.
    Dense,
    /// The n-gram tables.
    Table,
    /// Everything else, which is copied.
    Rest,
}

impl Purpose {
    /// All purposes, in the order of their numbers.
    pub const ALL: [Purpose; 4] = [Purpose::Experts, Purpose::Dense, Purpose::Table, Purpose::Rest];
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Purpose::Experts => "experts",
            Purpose::Dense => "dense",
            Purpose::Table => "n-gram table",
            Purpose::Rest => "the rest",
        })
    }
}

/// What became of the tensors of one purpose.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The purpose.
    pub purpose: Purpose,
    /// Every format that they had, and every one that they have now; nothing for the rest.
    pub formats: [Vec<Format>; 2],
    /// Their bytes before and now.
    pub bytes: [u64; 2],
    /// Root of the mean square of all changes of numbers, over that of the numbers; nothing if none was converted.
    pub error: Option<f64>,
}

/// What a conversion did.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// One for each purpose that the model has tensors of.
    pub outcomes: Vec<Outcome>,
    /// Weight files written.
    pub files: usize,
}

impl fmt::Display for Outcome {
    /// As in `experts       bf16 -> nvfp4    10.1 MiB -> 2.85 MiB    error 9.4 %`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let several =
            |formats: &[Format]| formats.iter().map(Format::to_string).collect::<Vec<_>>().join(" and ");
        let formats = match (self.purpose, self.error) {
            (Purpose::Rest, _) => "copied".to_owned(),
            _ if self.formats[0] == self.formats[1] => format!("{} as before", several(&self.formats[0])),
            _ => format!("{} -> {}", several(&self.formats[0]), several(&self.formats[1])),
        };
        let [before, after] = self.bytes.map(|bytes| Size(bytes as usize).to_string());
        write!(f, "{:<14}{formats:<28}{before:>9} -> {after:<9}", self.purpose)?;
        match self.error {
            Some(error) => write!(f, "  error {:.2} %", error * 100.0),
            None => f.write_str("  exact"),
        }
    }
}

/// Converts the model folder `source` into the folder `out`, which must be empty or not there. `progress` is told the
/// bytes read, of all that will be read; first of all that none is.
///
/// # Errors
/// `out` cannot be filled; the source cannot be opened or read, or holds a number that is none; a matrix does not go
/// with its format. What was written by then is removed.
pub fn convert(
    source: &Path,
    out: &Path,
    options: &ConvertOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Summary, Error> {
    known(options)?;
    let origin = open(source, options.from)?;
    let mut settings = Settings::read(source)?;
    if let Source::Made { .. } = options.from {
        settings.cut(&origin.checkpoint().config);
    }
    let plan = plan::plan(&origin, options)?;
    let settings = settings.describe(&Layout::of_types(&origin.checkpoint().config, &plan.types()));

    let mut folder = Folder::new(out, source)?;
    let writer = Writer::new(&mut folder, &plan.tensors, options.file_bytes)?;
    let tallies = run::run(&origin, &plan, &writer, progress)?;
    folder.copy_rest(source)?;
    let files = writer.finish(&mut folder)?;
    folder.write(Path::new("config.json"), &writer::pretty(&settings))?;
    let formats = Checkpoint::open(out)?.layout.formats;
    folder.keep();

    let (before, after) = (plan.before, plan.after());
    let outcome = |purpose: Purpose| Outcome {
        purpose,
        formats: [&origin.checkpoint().layout.formats, &formats].map(|formats| of(formats, purpose)),
        bytes: [before[purpose as usize], after[purpose as usize]],
        error: tallies[purpose as usize].relative(),
    };
    let outcomes = Purpose::ALL.map(outcome).into_iter().filter(|outcome| outcome.bytes != [0, 0]).collect();
    Ok(Summary { outcomes, files })
}

/// That every purpose has a format that it may have.
fn known(options: &ConvertOptions) -> Result<(), Error> {
    let ConvertOptions { experts, dense, table, .. } = *options;
    let named = [
        ("--experts", experts, &[Format::Bf16, Format::Fp8, Format::Nvfp4][..]),
        ("--dense", dense, &[Format::Bf16, Format::Fp8]),
        ("--table", table, &[Format::Bf16, Format::Fp8Tensor, Format::Nvfp4]),
    ];
    for (option, format, known) in named {
        if let Some(format) = format.filter(|format| !known.contains(format)) {
            let known: Vec<String> = known.iter().map(Format::to_string).collect();
            return Err(Error::Setting(format!("{option} {format} is none of {}", known.join(", "))));
        }
    }
    Ok(())
}

/// Opens what is converted.
fn open(source: &Path, from: Source) -> Result<Origin, Error> {
    let Source::Made { layers, seed } = from else {
        return Ok(Origin::Files(Checkpoint::open(source)?.into()));
    };
    let config = ModelConfig::open(source)?;
    let all = config.num_hidden_layers;
    let layers = layers.unwrap_or(all);
    if layers == 0 || layers > all {
        return Err(Error::Setting(format!(
            "--layers {layers} is not between 1 and the {all} layers of {}",
            source.join("config.json").display()
        )));
    }
    let config = config.first_layers(layers, MADE_TABLE_ROWS);
    Ok(Origin::made(Checkpoint::shape_of(source, config, Wanted::default())?, seed))
}

/// The formats of one purpose.
fn of(formats: &Formats, purpose: Purpose) -> Vec<Format> {
    let mut several = match purpose {
        Purpose::Experts => vec![formats.experts],
        Purpose::Dense => {
            formats.dense.iter().copied().chain([formats.shared, formats.head]).collect::<Vec<_>>()
        }
        Purpose::Table => formats.table.into_iter().collect(),
        Purpose::Rest => Vec::new(),
    };
    several.sort_unstable();
    several.dedup();
    several
}
