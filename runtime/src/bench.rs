//! Measuring a model on a device: rounds, prompts and kernels, each against the bytes that it must move.
//!
//! Contexts are synthetic: lanes are told that they have so many positions, in pages of made values, and then
//! take real decode rounds through the engine's own loop. Weights are whatever was opened; with made weights of
//! the first layers only, times for all layers are computed from those measured, and called so.

mod bandwidth;
pub mod bytes;
mod kernels;
mod moves;
mod pair;
mod report;
mod rig;
mod tower;

use std::path::Path;

use ::kernels::numerics::ElementType;
use graph::Exchange;

pub use kernels::{KernelRow, KernelTable};
pub use pair::{GatherLine, PairLine, PairPrompt, Rounds, run_pair};
pub use report::{Bandwidth, Line, PromptLine, RoundLine};
pub use tower::{TowerLine, time_tower};

use crate::engine::{Class, EngineOptions, Vision, open_opened};
use crate::error::Error;
use crate::open::{Load, Opened, Progress};
use crate::place::Place;
use crate::weights::TablePlace;
use rig::Rig;

/// What to measure.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// The device.
    pub place: Place,
    /// Element type.
    pub element: ElementType,
    /// Where the weights come from.
    pub load: Load,
    /// Where the n-gram tables live.
    pub table: TablePlace,
    /// What carries the gathers of two ranks.
    pub exchange: Exchange,
    /// Lanes of the decode rounds.
    pub rows: Vec<usize>,
    /// Positions that their rows see.
    pub contexts: Vec<usize>,
    /// Rounds of each measurement.
    pub rounds: usize,
    /// Tokens of the prompt; 0: none.
    pub prompt: usize,
    /// Rows of a prompt piece.
    pub piece_rows: u32,
    /// Whether to measure each kernel on its own.
    pub kernels: bool,
    /// Bytes for pages; none: as many as the contexts take.
    pub page_memory: Option<u64>,
}

/// Rounds that are run before any is measured.
const WARM: usize = 8;
/// Rounds that seating a lane takes at most.
const SEATING: usize = 8;
/// Positions that lanes run through beside the measured rounds of one measurement.
const SPARE: usize = 128;

impl BenchOptions {
    /// Tokens that a lane makes at most, over all its measurements.
    fn steps(&self) -> usize {
        let seating = SEATING * self.rows.iter().max().unwrap_or(&0) + WARM;
        seating + 2 * self.contexts.len() * (self.rounds + WARM + 4)
    }
}

/// Measures, and tells each line when it is known.
///
/// # Errors
/// A setting cannot be honoured, the model cannot be opened, or the device failed.
pub fn run(
    dir: &Path,
    options: &BenchOptions,
    progress: &mut dyn FnMut(Progress),
    told: &mut dyn FnMut(Line),
) -> Result<(), Error> {
    let opened = Opened::without_text(dir, options.place.form(options.element, options.table), options.load)?;
    let engine_options = engine_options(&opened, options, options.steps())?;
    let full_layers = opened.full_layers;
    let engine = open_opened(opened, &engine_options, progress)?.engine;
    let mut rig = Rig::new(engine, options, full_layers)?;
    let bandwidth = rig.bandwidth()?;
    told(Line::Bandwidth(bandwidth));

    told(Line::Heading(RoundLine::HEADING));
    for &rows in &options.rows {
        let crowd = rig.seat(rows)?;
        let mut first = None;
        for &context in &options.contexts {
            let mut line = rig.round(&crowd, context, &bandwidth)?;
            line.of_first = line.device_ms / *first.get_or_insert(line.device_ms);
            told(Line::Round(line));
        }
        rig.leave(crowd)?;
    }
    if options.prompt > 0 {
        told(Line::Prompt(rig.prompt()?));
    }
    if options.kernels {
        for &rows in &options.rows {
            let crowd = rig.seat(rows)?;
            for &context in &options.contexts {
                told(Line::Kernels(rig.decode_kernels(&crowd, context)?));
            }
            rig.leave(crowd)?;
        }
        if options.prompt > 0 {
            told(Line::Kernels(rig.prompt_kernels()?));
        }
    }
    Ok(())
}

/// The engine of [`run_pair`], on either rank and alone.
///
/// # Errors
/// A setting cannot be honoured, or the model cannot be opened.
pub fn settings(dir: &Path, options: &BenchOptions) -> Result<EngineOptions, Error> {
    let opened = Opened::without_text(dir, options.place.form(options.element, options.table), options.load)?;
    let longest = options.contexts.iter().max().unwrap_or(&0);
    engine_options(&opened, options, longest + pair::steps(options))
}

/// An engine with room for what is asked: one slab, and pages for its longest contexts, and for `steps` positions.
fn engine_options(opened: &Opened, options: &BenchOptions, steps: usize) -> Result<EngineOptions, Error> {
    let wrong = |why: String| Err(Error::Setting(why));
    let most = |list: &[usize]| list.iter().copied().max().unwrap_or(0);
    let (lanes, context) = (most(&options.rows), most(&options.contexts));
    let widest = planner::GRAPH_ROWS as usize;
    if options.rows.contains(&0) || lanes == 0 || lanes > widest {
        return wrong(format!(
            "--rows {:?} are not between 1 and the {widest} rows of a graph",
            options.rows
        ));
    }
    if options.contexts.contains(&0) || context == 0 || options.rounds == 0 {
        return wrong("--contexts and --rounds must be at least 1".into());
    }
    let positions = (context + options.rounds + SPARE).max(steps + 2).max(options.prompt + 2);
    let longest = opened.checkpoint.config.max_position_embeddings;
    if positions > longest {
        return wrong(format!(
            "--contexts {context}, --prompt {} and --rounds {} need {positions} positions; the model has {longest}: \
             give smaller ones, such as --contexts 1k --prompt 1k",
            options.prompt, options.rounds
        ));
    }
    let pages = match options.page_memory {
        Some(_) => 0,
        None => lanes * positions.div_ceil(planner::PAGE as usize),
    };
    Ok(EngineOptions {
        place: options.place,
        element: options.element,
        load: options.load,
        text: false,
        vision: Vision::Off,
        table: options.table,
        exchange: options.exchange,
        classes: vec![Class { context: positions as u32, lanes: lanes as u16, pages: pages as u32 }],
        page_memory: options.page_memory,
        slab_lanes: lanes as u16,
        piece_rows: options.piece_rows,
        ..EngineOptions::default()
    })
}
