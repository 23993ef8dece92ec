//! Sequences through the model, one at a time, with the logits after every id: for comparing models, not for serving.

use std::path::Path;
use std::sync::Arc;

use graph::Device;
use graph::host::HostOptions;
use kernels::numerics::ElementType;
use kernels::table::{Kind, PAGE, PageEdit, PromptRow, Row, Sampling};

use crate::bundle::Bundle;
use crate::error::Error;
use crate::lanes::{LaneLayout, Lanes, PagePool};
use crate::memory::{ClassPlan, GraphPlan, MemoryPlan};
use crate::model::{Group, Picks, RoundShape};
use crate::open::{Load, OpenModel, Opened, Progress};
use crate::place::Place;
use crate::runner::{Runner, StagedTable};
use crate::scratch::RoundLimits;
use crate::tokenizer::Tokenizer;
use crate::weights::TablePlace;

/// Rows of a prompt piece, unless asked otherwise; a multiple of 64.
const PIECE_ROWS: usize = 512;

/// How the model is run.
#[derive(Clone, Copy, Debug)]
pub struct LogitsOptions {
    /// The device.
    pub place: Place,
    /// Element type of activations, weights and caches.
    pub element: ElementType,
    /// Where the weights come from.
    pub load: Load,
    /// Where the n-gram tables live.
    pub table: TablePlace,
    /// The most ids; none: as many as the model was made for.
    pub context: Option<u32>,
    /// Bytes of memory that the host device has.
    pub host_memory: usize,
}

impl Default for LogitsOptions {
    fn default() -> Self {
        LogitsOptions {
            place: Place::Host,
            element: ElementType::Bf16,
            load: Load::default(),
            table: TablePlace::Device,
            context: None,
            host_memory: HostOptions::default().memory_bytes,
        }
    }
}

/// Which logits to compute.
#[derive(Clone, Debug, Default)]
pub struct LogitsRequest {
    /// The ids.
    pub ids: Vec<u32>,
    /// Rows of each prompt piece; they sum to the number of prompt ids. Off the 64 grid, results agree with
    /// one pass within tolerance only.
    pub pieces: Option<Vec<usize>>,
    /// From this position on, ids go one by one through the decode route.
    pub decode_from: Option<usize>,
}

/// The logits after every id.
#[derive(Clone, Debug)]
pub struct Logits {
    /// Number of positions.
    pub positions: usize,
    /// Logits per position.
    pub vocab: usize,
    /// `[positions, vocab]`.
    pub data: Vec<f32>,
}

impl Logits {
    /// The logits of each position.
    pub fn rows(&self) -> impl Iterator<Item = &[f32]> {
        self.data.chunks_exact(self.vocab)
    }
}

/// Opens a model folder and computes the logits of a request.
///
/// # Errors
/// The device or the folder cannot be opened, or the device has too little memory; ids past the vocabulary or the
/// context; pieces that do not fit the ids.
pub fn logits(
    dir: &Path,
    options: &LogitsOptions,
    request: &LogitsRequest,
    progress: &mut dyn FnMut(Progress),
) -> Result<Logits, Error> {
    let (opened, device) = opened(dir, options, progress)?;
    let context = opened.context(options.context, u32::MAX)? as usize;
    let plan = Plan::new(request, opened.checkpoint.config.vocab_size, context)?;
    let largest = plan.pieces.iter().copied().max().unwrap_or(1);
    Probe::new(opened, &device, options, [request.ids.len(), largest], progress)?.run(request, plan)
}

/// Checks a model folder, then opens the device.
fn opened(
    dir: &Path,
    options: &LogitsOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<(Opened, Device), Error> {
    let &LogitsOptions { place, element, load, table, host_memory, .. } = options;
    let opened = Opened::with(dir, place.form(element, table), load)?;
    let device = place.open(element, false, host_memory)?;
    progress(Progress::Device(device.describe()));
    place.takes(&opened.checkpoint.config)?;
    Ok((opened, device))
}

/// A checked request.
struct Plan {
    pieces: Vec<usize>,
}

impl Plan {
    fn new(request: &LogitsRequest, vocab: usize, context: usize) -> Result<Plan, Error> {
        let ids = &request.ids;
        crate::request::check_ids(ids, vocab)?;
        if ids.len() > context {
            let why = format!(
                "{} ids do not fit the context of {context}; give fewer or raise --context",
                ids.len()
            );
            return Err(Error::Prompt(why));
        }
        let prompt = request.decode_from.unwrap_or(ids.len());
        if prompt == 0 || prompt > ids.len() {
            let why = format!("--decode-from {prompt} is not between 1 and the {} ids", ids.len());
            return Err(Error::Setting(why));
        }
        let even = || (0..prompt).step_by(PIECE_ROWS).map(|start| PIECE_ROWS.min(prompt - start)).collect();
        let pieces = request.pieces.clone().unwrap_or_else(even);
        let sum = pieces.iter().try_fold(0usize, |sum, size| sum.checked_add(*size));
        if sum != Some(prompt) || pieces.contains(&0) {
            let why = format!("--pieces {pieces:?} must be positive and sum to the {prompt} prompt ids");
            return Err(Error::Setting(why));
        }
        Ok(Plan { pieces })
    }
}

/// A model with one lane, which takes one sequence after another.
pub struct Probe {
    runner: Runner,
    lanes: Lanes,
    tokenizer: Tokenizer,
    longest: usize,
    /// Rows of a piece at most.
    rows: usize,
}

impl Probe {
    /// Opens a model folder for sequences of at most `longest` ids.
    ///
    /// # Errors
    /// The device or the folder cannot be opened, or the device has too little memory.
    pub fn open(
        dir: &Path,
        options: &LogitsOptions,
        longest: usize,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Probe, Error> {
        let (opened, device) = opened(dir, options, progress)?;
        let longest = opened.context(options.context, u32::MAX)?.min(longest as u32) as usize;
        Probe::new(opened, &device, options, [longest, longest.min(PIECE_ROWS)], progress)
    }

    /// A probe of sequences of at most so many ids, in pieces of at most so many rows.
    fn new(
        opened: Opened,
        device: &Device,
        options: &LogitsOptions,
        [longest, rows]: [usize; 2],
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Probe, Error> {
        opened.unused().into_iter().for_each(&mut *progress);
        let layout = LaneLayout::new(opened.weights.config(), options.element, longest);
        let edits = rows / PAGE + 2;
        let limits = RoundLimits { rows, picked_rows: rows, decode_rows: 1, context: longest, edits };
        let lane = ClassPlan { layout: &layout, first: 1, lanes: 1, pages: layout.pages_per_lane };
        let memory = MemoryPlan::new(&opened, &[lane], limits, GraphPlan::NONE);
        progress(Progress::Plan(memory.clone()));
        memory.check(device.free_bytes())?;

        let OpenModel { model, weights, tokenizer, .. } = opened.load(device, progress)?;
        let pool = PagePool::new(device, &layout, layout.pages_per_lane)?;
        let lanes = Lanes::new(device, 0, Arc::new(layout), 1, pool)?;
        let runner = Runner::new(device, model, weights, limits)?;
        Ok(Probe { runner, lanes, tokenizer, longest, rows })
    }

    /// What turns text into ids.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Computes the logits of a request, from an empty lane on.
    ///
    /// # Errors
    /// Ids past the vocabulary, or more than the probe takes; pieces that do not fit the ids, or are longer than 512
    /// rows; the device failed.
    pub fn logits(&mut self, request: &LogitsRequest) -> Result<Logits, Error> {
        let plan = Plan::new(request, self.runner.model.config.vocab_size, self.longest)?;
        match plan.pieces.iter().find(|piece| **piece > self.rows) {
            Some(piece) => Err(Error::Setting(format!("a piece of {piece} rows is more than {}", self.rows))),
            None => self.run(request, plan),
        }
    }

    fn run(&mut self, request: &LogitsRequest, plan: Plan) -> Result<Logits, Error> {
        self.runner.clear_slot(&self.lanes, 0)?;
        let vocab = self.runner.model.config.vocab_size;
        let mut data = Vec::with_capacity(request.ids.len() * vocab);
        let mut start = 0;
        for size in plan.pieces {
            self.prompt(start, &request.ids[start..start + size])?;
            data.extend(self.runner.logits(size)?);
            start += size;
        }
        for (position, &id) in request.ids.iter().enumerate().skip(start) {
            self.decode(position, id)?;
            data.extend(self.runner.logits(1)?);
        }
        Ok(Logits { positions: request.ids.len(), vocab, data })
    }

    /// Runs a piece of the prompt, whose first id has position `start`.
    fn prompt(&mut self, start: usize, ids: &[u32]) -> Result<(), Error> {
        let count = ids.len() as u32;
        let rows: Vec<Row> = (0..count).map(|place| Row { slot: 0, place, first: 0, count }).collect();
        let row = |(place, &id): (usize, &u32)| PromptRow { id, axes: [(start + place) as i32; 3] };
        let prompt: Vec<PromptRow> = ids.iter().enumerate().map(row).collect();
        self.round(Kind::Prompt, start, &rows, &prompt)
    }

    /// Runs `id` at `position` through the decode route.
    fn decode(&mut self, position: usize, id: u32) -> Result<(), Error> {
        let bundle = Bundle { lanes: &self.lanes, slot: 0, pages: &[], length: position };
        bundle.set_last_id(id, &self.runner.stream)?;
        self.round(Kind::Decode, position, &[Row { slot: 0, place: 0, first: 0, count: 1 }], &[])
    }

    fn round(&mut self, kind: Kind, start: usize, rows: &[Row], prompt: &[PromptRow]) -> Result<(), Error> {
        // Page `i` of the one lane is page `i` of the pool.
        let pages = start.div_ceil(PAGE) as u32..(start + rows.len()).div_ceil(PAGE) as u32;
        let edits: Vec<PageEdit> =
            pages.map(|page| PageEdit { slab: 0, slot: 0, index: page, page }).collect();
        let sampling = vec![Sampling::default(); rows.len()];
        self.runner.stage(StagedTable { rows, sampling: &sampling, prompt, edits: &edits })?;
        let groups = [Group { lanes: &self.lanes, rows: rows.len() }];
        Ok(self.runner.run_eager(&RoundShape { kind, groups: &groups, picks: Picks::All })?)
    }
}
