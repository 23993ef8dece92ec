//! What a model folder is converted from and to.

use std::path::PathBuf;

use clap::Args;
use runtime::convert::{ConvertOptions, Source};

use super::engine::DUMMY_SEED;
use super::{ByteSize, LoadFrom, Projections, Stored};
use crate::failure::Failure;

#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// The model folder; with --load dummy, config.json in it is enough.
    pub(crate) model: PathBuf,

    /// The folder to write, outside of MODEL; empty, or not there yet.
    pub(crate) out: PathBuf,

    /// How the routed experts are stored; as they are, if not given.
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub(crate) experts: Option<Stored>,

    /// How the n-gram tables are stored; as they are, if not given.
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub(crate) table: Option<Stored>,

    /// How projections around token mixers and in the indexer, shared experts, and the head are stored; as they are, if
    /// not given.
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub(crate) dense: Option<Projections>,

    /// Where the weights come from: checkpoint, or dummy: random ones of the shape that config.json says.
    #[arg(long, value_enum, default_value = "checkpoint")]
    pub(crate) load: LoadFrom,

    /// With --load dummy: only the first N layers; all of them if not given.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) layers: Option<u32>,

    /// The most bytes of a weight file, in bytes or with K, M, G or T; a tensor that is larger has one to itself.
    #[arg(long, value_name = "SIZE", default_value = "4G", allow_negative_numbers = true)]
    pub(crate) file_size: ByteSize,
}

impl ConvertArgs {
    /// The runtime's own form of them.
    ///
    /// # Errors
    /// Nothing is to be converted, or layers are counted of a checkpoint.
    pub(crate) fn options(&self) -> Result<ConvertOptions, Failure> {
        let experts = self.experts.map(Stored::of_matrices);
        let dense = self.dense.map(Projections::format);
        let table = self.table.map(Stored::of_tables);
        let from = match (self.load, self.layers) {
            (LoadFrom::Dummy, layers) => {
                Source::Made { layers: layers.map(|layers| layers as usize), seed: DUMMY_SEED }
            }
            (LoadFrom::Checkpoint, Some(layers)) => {
                return Err(Failure::Input(format!(
                    "--layers {layers}: a checkpoint is converted whole; add --load dummy, or leave --layers out"
                )));
            }
            (LoadFrom::Checkpoint, None) if experts.is_none() && dense.is_none() && table.is_none() => {
                let what = "nothing is to be converted; give --experts, --table or --dense";
                return Err(Failure::Input(what.into()));
            }
            (LoadFrom::Checkpoint, None) => Source::Checkpoint,
        };
        Ok(ConvertOptions { experts, dense, table, from, file_bytes: self.file_size.0 })
    }
}
