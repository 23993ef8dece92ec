//! Sequences through the model, one at a time, with the logits after every id: for comparing models, not for serving.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use graph::host::HostOptions;
use graph::{Arena, Device};
use kernels::numerics::ElementType;
use kernels::table::{Kind, PAGE, PageEdit, PromptRow, Row, Sampling};
use vision::{ContentKey, Grid};

use crate::bundle::Bundle;
use crate::config::{ModelConfig, VisionConfig};
use crate::engine::media::{Features, Most, Shown, distinct};
use crate::engine::sight::{Look, Seen};
use crate::engine::{EngineOptions, Vision};
use crate::error::Error;
use crate::lanes::{LaneLayout, Lanes, PagePool};
use crate::memory::{ClassPlan, GraphPlan, MemoryPlan};
use crate::model::{Group, Picks, PictureRows, RoundShape};
use crate::open::{Load, OpenModel, Opened, Progress};
use crate::pictures::Sight;
use crate::place::Place;
use crate::request::Media;
use crate::runner::{Runner, StagedTable};
use crate::scratch::RoundLimits;
use crate::tokenizer::Tokenizer;
use crate::tower::{Patches, Tower};
use crate::weights::{TablePlace, WeightForm};

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
    /// Whether pictures are taken.
    pub vision: Vision,
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
            vision: Vision::Off,
            context: None,
            host_memory: HostOptions::default().memory_bytes,
        }
    }
}

/// Which logits to compute.
#[derive(Clone, Debug, Default)]
pub struct LogitsRequest {
    /// The ids, with a placeholder for every row of a picture.
    pub ids: Vec<u32>,
    /// The pictures and clips of the placeholders, in the order in which they stand there.
    pub media: Vec<Media>,
    /// Rows of each prompt piece; they sum to the number of prompt ids. Off the 64 grid, results agree with
    /// one pass within tolerance only.
    pub pieces: Option<Vec<usize>>,
    /// From this position on, ids go one by one through the decode route. Pictures are before it.
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
/// As [`Prepared::open`] and [`Prepared::logits`].
pub fn logits(
    dir: &Path,
    options: &LogitsOptions,
    request: &LogitsRequest,
    progress: &mut dyn FnMut(Progress),
) -> Result<Logits, Error> {
    Prepared::open(dir, options, progress)?.logits(request, progress)
}

/// A checked model folder and the device that it will run on; no weight has been read.
pub struct Prepared {
    opened: Opened,
    device: Device,
    element: ElementType,
    look: Look,
    context: usize,
}

impl Prepared {
    /// Checks a model folder, then opens the device.
    ///
    /// # Errors
    /// The device or the folder cannot be opened.
    pub fn open(
        dir: &Path,
        options: &LogitsOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Prepared, Error> {
        let &LogitsOptions { place, element, load, table, vision, context, host_memory } = options;
        let look = EngineOptions { place, vision, ..EngineOptions::default() }.look(dir)?;
        let form = WeightForm { vision: look.seen().is_some(), ..place.form(element, table) };
        let opened = Opened::with(dir, form, load)?;
        let device = place.open(element, false, host_memory)?;
        progress(Progress::Device(device.describe()));
        place.takes(&opened.checkpoint.config)?;
        if let Look::Blind(Some(why)) = &look {
            progress(Progress::Blind(why.clone()));
        }
        let context = opened.context(context, u32::MAX)? as usize;
        Ok(Prepared { opened, device, element, look, context })
    }

    /// What turns text into ids.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.opened.tokenizer
    }

    /// How the model sees, if it takes pictures.
    pub fn sight(&self) -> Option<Arc<Sight>> {
        self.look.seen().map(|seen| Arc::new(seen.sight.clone()))
    }

    /// The most ids.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Reads the weights and computes the logits of a request.
    ///
    /// # Errors
    /// The device or the system has too little memory; ids past the vocabulary or the context; pictures or pieces that
    /// do not fit the ids.
    pub fn logits(
        self,
        request: &LogitsRequest,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Logits, Error> {
        let config = &self.opened.checkpoint.config;
        let seen = self.look.seen().map(|seen| (&seen.tower, self.most(seen, request.ids.len())));
        let plan = Plan::new(request, config, self.context, seen)?;
        let largest = plan.pieces.iter().copied().max().unwrap_or(1);
        Probe::new(self, [request.ids.len(), largest], progress)?.run(request, plan)
    }

    /// The most that sequences of so many ids may bring.
    fn most(&self, seen: &Seen, longest: usize) -> Most {
        // Every row of features has its id.
        let row = seen.tower.out_hidden_size * self.element.bytes();
        Most::of(&seen.tower, seen.limits, self.element, row.saturating_mul(longest))
    }
}

/// A checked request.
struct Plan {
    pieces: Vec<usize>,
    shown: Option<Shown>,
}

impl Plan {
    /// A request of a model that takes at most `context` ids, and pictures if it has a tower for them.
    fn new(
        request: &LogitsRequest,
        config: &ModelConfig,
        context: usize,
        seen: Option<(&VisionConfig, Most)>,
    ) -> Result<Plan, Error> {
        let ids = &request.ids;
        crate::request::check_ids(ids, config.vocab_size)?;
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
        let (tower, most) = seen.unzip();
        let shown = Shown::of(ids, &request.media, tower, config.vision.as_ref(), most)?;
        if let Some(end) = shown.as_ref().map(Shown::end).filter(|end| prompt < *end) {
            let why = format!(
                "--decode-from {prompt} leaves pictures to decode rounds, which take none; the last one ends at position \
                 {end}, so decode from there or later"
            );
            return Err(Error::Setting(why));
        }
        let even = || (0..prompt).step_by(PIECE_ROWS).map(|start| PIECE_ROWS.min(prompt - start)).collect();
        let pieces = request.pieces.clone().unwrap_or_else(even);
        let sum = pieces.iter().try_fold(0usize, |sum, size| sum.checked_add(*size));
        if sum != Some(prompt) || pieces.contains(&0) {
            let why = format!("--pieces {pieces:?} must be positive and sum to the {prompt} prompt ids");
            return Err(Error::Setting(why));
        }
        Ok(Plan { pieces, shown })
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
    /// Its tower, if it takes pictures.
    eyes: Option<Eyes>,
}

/// A tower and what it takes.
struct Eyes {
    tower: Tower,
    config: VisionConfig,
    most: Most,
}

impl Probe {
    /// Opens a model folder for sequences of at most `longest` ids.
    ///
    /// # Errors
    /// The device or the folder cannot be opened, or it or the system has too little memory.
    pub fn open(
        dir: &Path,
        options: &LogitsOptions,
        longest: usize,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Probe, Error> {
        let prepared = Prepared::open(dir, options, progress)?;
        let longest = prepared.context.min(longest);
        Probe::new(prepared, [longest, longest.min(PIECE_ROWS)], progress)
    }

    /// A probe of sequences of at most so many ids, in pieces of at most so many rows.
    fn new(
        prepared: Prepared,
        [longest, rows]: [usize; 2],
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Probe, Error> {
        let seen = prepared.look.seen().map(|seen| (seen.clone(), prepared.most(seen, longest)));
        let Prepared { opened, device, element, .. } = prepared;
        opened.unused().into_iter().for_each(&mut *progress);
        let layout = LaneLayout::new(opened.weights.config(), element, longest);
        let edits = rows / PAGE + 2;
        let limits = RoundLimits { rows, picked_rows: rows, decode_rows: 1, context: longest, edits };
        let lane = ClassPlan { layout: &layout, first: 1, lanes: 1, pages: layout.pages_per_lane };
        let mut memory = MemoryPlan::new(&opened, &[lane], limits, GraphPlan::NONE);
        if let Some((seen, most)) = &seen {
            memory = memory.with_tower(&seen.tower, element, seen.limits).with_features(most.features);
        }
        progress(Progress::Plan(memory.clone()));
        memory.check(&device)?;

        let OpenModel { model, weights, tokenizer, .. } = opened.load(&device, progress)?;
        let eyes = seen.map(|(Seen { limits, tower: config, .. }, most)| {
            let tower = model.weights.tower.as_ref().expect("a form with a tower has its weights");
            let tower = Tower::new(&device, &config, element, tower, &weights, limits)?;
            Ok::<_, Error>(Eyes { tower, config, most })
        });
        let eyes = eyes.transpose()?;
        let pool = PagePool::new(&device, &layout, layout.pages_per_lane)?;
        let lanes = Lanes::new(&device, 0, Arc::new(layout), 1, pool)?;
        let runner = Runner::new(&device, model, weights, limits)?;
        Ok(Probe { runner, lanes, tokenizer, longest, rows, eyes })
    }

    /// What turns text into ids.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Computes the logits of a request, from an empty lane on.
    ///
    /// # Errors
    /// Ids past the vocabulary, or more than the probe takes; pictures or pieces that do not fit the ids; pieces longer
    /// than 512 rows; the device failed.
    pub fn logits(&mut self, request: &LogitsRequest) -> Result<Logits, Error> {
        let seen = self.eyes.as_ref().map(|eyes| (&eyes.config, eyes.most));
        let plan = Plan::new(request, &self.runner.model.config, self.longest, seen)?;
        match plan.pieces.iter().find(|piece| **piece > self.rows) {
            Some(piece) => Err(Error::Setting(format!("a piece of {piece} rows is more than {}", self.rows))),
            None => self.run(request, plan),
        }
    }

    fn run(&mut self, request: &LogitsRequest, plan: Plan) -> Result<Logits, Error> {
        let Plan { pieces, mut shown } = plan;
        self.runner.clear_slot(&self.lanes, 0)?;
        if let Some(shown) = &mut shown {
            shown.features = self.encode(&request.media)?;
            self.runner.stage_rope_offset(&self.lanes, 0, shown.offset)?;
        }
        let vocab = self.runner.model.config.vocab_size;
        let mut data = Vec::with_capacity(request.ids.len() * vocab);
        let mut start = 0;
        for size in pieces {
            self.prompt(start, &request.ids[start..start + size], shown.as_ref())?;
            data.extend(self.runner.logits(size)?);
            start += size;
        }
        for (position, &id) in request.ids.iter().enumerate().skip(start) {
            self.decode(position, id)?;
            data.extend(self.runner.logits(1)?);
        }
        Ok(Logits { positions: request.ids.len(), vocab, data })
    }

    /// The features of each picture or clip; of equal ones, they are made once.
    fn encode(&mut self, media: &[Media]) -> Result<Vec<Arc<Features>>, Error> {
        let Runner { device, stream, .. } = &self.runner;
        let tower = &mut self.eyes.as_mut().expect("the plan has pictures, so there is a tower").tower;
        let mut made: HashMap<ContentKey, Arc<Features>> = HashMap::new();
        for Media { patches, key, .. } in distinct(media) {
            let Grid { pairs, height, width } = patches.grid;
            let item = Patches { bytes: &patches.bytes, grid: [pairs, height, width] };
            let encoded = tower.encode(device, stream, vec![item])?;
            made.insert(*key, Arc::new(Features { arena: encoded.arena, rows: encoded.tokens }));
        }
        Ok(media.iter().map(|media| made[&media.key].clone()).collect())
    }

    /// Runs a piece of the prompt, whose first id has position `start`.
    fn prompt(&mut self, start: usize, ids: &[u32], shown: Option<&Shown>) -> Result<(), Error> {
        let count = ids.len() as u32;
        let rows: Vec<Row> = (0..count).map(|place| Row { slot: 0, place, first: 0, count }).collect();
        let axes = |position: usize| shown.map_or([position as i32; 3], |shown| shown.axes(position));
        let row = |(position, &id): (usize, &u32)| PromptRow { id, axes: axes(position) };
        let prompt: Vec<PromptRow> = (start..).zip(ids).map(row).collect();
        let row_bytes = self.eyes.as_ref().map_or(0, |eyes| eyes.most.row_bytes);
        let pictures = shown.map(|shown| shown.rows(start..start + ids.len(), row_bytes));
        self.round(Kind::Prompt, start, &rows, &prompt, &pictures.unwrap_or_default())
    }

    /// Runs `id` at `position` through the decode route.
    fn decode(&mut self, position: usize, id: u32) -> Result<(), Error> {
        let bundle = Bundle { lanes: &self.lanes, slot: 0, pages: &[], length: position };
        bundle.set_last_id(id, &self.runner.stream)?;
        let row = Row { slot: 0, place: 0, first: 0, count: 1 };
        self.round(Kind::Decode, position, &[row], &[], &Default::default())
    }

    fn round(
        &mut self,
        kind: Kind,
        start: usize,
        rows: &[Row],
        prompt: &[PromptRow],
        (pictures, rooms): &(Vec<PictureRows>, Vec<Arena>),
    ) -> Result<(), Error> {
        // Page `i` of the one lane is page `i` of the pool.
        let pages = start.div_ceil(PAGE) as u32..(start + rows.len()).div_ceil(PAGE) as u32;
        let edits: Vec<PageEdit> =
            pages.map(|page| PageEdit { slab: 0, slot: 0, index: page, page }).collect();
        let sampling = vec![Sampling::default(); rows.len()];
        self.runner.stage(StagedTable { rows, sampling: &sampling, prompt, edits: &edits })?;
        let groups = [Group { lanes: &self.lanes, rows: rows.len() }];
        let shape = RoundShape { kind, groups: &groups, picks: Picks::All };
        Ok(self.runner.run_pictures(&shape, pictures, rooms)?)
    }
}
