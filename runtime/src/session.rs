//! A model opened for use, and one sequence at a time through it.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use graph::{Device, Exec, host::HostOptions};
use kernels::numerics::ElementType;
use kernels::table::{Kind, PAGE, PageEdit, PromptRow, Row, Sampling};

use crate::chat::ChatTemplate;
use crate::checkpoint::Checkpoint;
use crate::checkpoint::layout::Part;
use crate::error::Error;
use crate::lanes::{LaneLayout, Lanes};
use crate::memory::{MemoryPlan, Size};
use crate::model::{Group, Model, Picks, RoundShape};
use crate::runner::{Runner, StagedTable};
use crate::sampling::SamplingOptions;
use crate::scratch::RoundLimits;
use crate::tokenizer::Tokenizer;
use crate::weights::WeightPlan;

/// Rows of a prompt piece, unless asked otherwise; a multiple of 64.
const PIECE_ROWS: usize = 512;
/// Positions of the longest context, unless asked otherwise or the model has fewer.
const DEFAULT_CONTEXT: usize = 32_768;

/// How to open a model.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// Element type of activations and weights.
    pub dtype: ElementType,
    /// Whether decode rounds are captured and replayed.
    pub graphs: bool,
    /// Positions of the longest context.
    pub context: Option<u32>,
}

/// What happens while a model is opened.
#[derive(Clone, Debug)]
pub enum Progress {
    /// The device that was chosen.
    Device(String),
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
            Progress::Plan(plan) => f.write_str(plan.to_string().trim_end()),
            Progress::Unused { tensors, bytes, what } => {
                write!(f, "not used: {tensors} tensors of the {what}, {}", Size(*bytes as usize))
            }
            Progress::Loading { done, total } => {
                write!(f, "read {} of {}", Size(*done as usize), Size(*total as usize))
            }
        }
    }
}

/// How to continue a prompt.
#[derive(Clone, Debug, Default)]
pub struct GenerateOptions {
    /// Most ids to make; none: as many as the context holds.
    pub max_tokens: Option<u32>,
    /// Whether stop ids are ids like any other.
    pub ignore_eos: bool,
    /// How ids are picked.
    pub sampling: SamplingOptions,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model picked a stop id, which is the last id.
    Stop,
    /// The most ids asked for, or the end of the context.
    Length,
    /// The caller wanted no more.
    Cancelled,
}

/// How rounds were executed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoundCounts {
    /// Rounds that were captured, and then run.
    pub captured: u64,
    /// Rounds that were replays.
    pub replayed: u64,
    /// Rounds that ran eagerly, by reason.
    pub eager: BTreeMap<&'static str, u64>,
}

/// A finished generation.
#[derive(Clone, Debug)]
pub struct Generation {
    /// The ids made, a stop id included.
    pub ids: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
    /// How its rounds were executed.
    pub rounds: RoundCounts,
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

/// A model in memory, with one lane.
pub struct Session {
    runner: Runner,
    lanes: Lanes,
    graphs: bool,
    /// The captured decode round.
    decode: Option<Exec>,
    context: usize,
    stop_ids: Vec<u32>,
    tokenizer: Tokenizer,
    chat: ChatTemplate,
}

/// Everything about a checkpoint that is known before its weights are read.
struct Opened {
    checkpoint: Checkpoint,
    element: ElementType,
    layout: LaneLayout,
    context: usize,
    limits: RoundLimits,
    weights: WeightPlan,
    plan: MemoryPlan,
}

impl Opened {
    fn new(dir: &Path, element: ElementType, context: Option<u32>) -> Result<Opened, Error> {
        let checkpoint = Checkpoint::open(dir)?;
        let longest = checkpoint.config.max_position_embeddings;
        let context = context.map_or(longest.min(DEFAULT_CONTEXT), |context| context as usize);
        if context == 0 || context > longest {
            return Err(Error::Setting(format!(
                "--context {context} is not between 1 and the {longest} positions that the model was made for"
            )));
        }
        let limits = RoundLimits { rows: PIECE_ROWS, picked_rows: 1, edits: PIECE_ROWS / PAGE + 1 };
        let layout = LaneLayout::new(&checkpoint.config, element, context);
        let weights = WeightPlan::new(&checkpoint, element);
        let pages = layout.pages_per_lane;
        let plan = MemoryPlan::new(&checkpoint, element, &weights, &layout, 1, pages, limits);
        Ok(Opened { checkpoint, element, layout, context, limits, weights, plan })
    }

    /// The parts of the checkpoint that the text model leaves alone.
    fn unused(&self) -> Vec<Progress> {
        const PARTS: [(Part, &str); 3] =
            [(Part::Draft, "draft layer"), (Part::Vision, "vision tower"), (Part::Idle, "mixers (idle)")];
        let all = [Part::Text, Part::Table, Part::Constants, Part::Draft, Part::Vision, Part::Idle];
        let rest = PARTS.map(|(part, what)| {
            let others: Vec<Part> = all.into_iter().filter(|other| *other != part).collect();
            let unused = self.checkpoint.unused(&others);
            Progress::Unused { tensors: unused.tensors.len(), bytes: unused.bytes, what }
        });
        rest.into_iter().filter(|unused| !matches!(unused, Progress::Unused { tensors: 0, .. })).collect()
    }
}

/// The settings, tensors and memory plan of a model folder as text, without reading weights.
pub fn describe(dir: &Path) -> Result<String, Error> {
    let opened = Opened::new(dir, ElementType::Bf16, None)?;
    let mut text = opened.checkpoint.to_string();
    for unused in opened.unused() {
        text += &format!("{unused}\n");
    }
    Ok(text + &opened.plan.to_string())
}

impl Session {
    /// Opens a model: checks the whole folder, prints the plan, then reads the weights.
    pub fn open(
        dir: &Path,
        options: &SessionOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Session, Error> {
        let device = Device::host(HostOptions::default());
        progress(Progress::Device(device.describe()));
        let opened = Opened::new(dir, options.dtype, options.context)?;
        let tokenizer = Tokenizer::open(dir)?;
        let chat = ChatTemplate::open(dir)?;
        opened.unused().into_iter().for_each(&mut *progress);
        progress(Progress::Plan(opened.plan.clone()));

        let Opened { checkpoint, element, layout, context, limits, weights, .. } = opened;
        let loaded = weights.load(&checkpoint, &device, &mut |done, total| {
            progress(Progress::Loading { done, total });
        })?;
        let choices = checkpoint.config.vocab_size.min(tokenizer.last_text_id() as usize + 1);
        let model = Model { config: checkpoint.config, element, weights: loaded.weights, choices };
        let pages = layout.pages_per_lane;
        let lanes = Lanes::new(&device, 0, Arc::new(layout), 1, pages)?;
        let runner = Runner::new(&device, model, loaded.arena, limits)?;
        let stop_ids = checkpoint.generation.stop;
        Ok(Session {
            runner,
            lanes,
            graphs: options.graphs,
            decode: None,
            context,
            stop_ids,
            tokenizer,
            chat,
        })
    }

    /// The model's tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The model's chat template.
    pub fn chat(&self) -> &ChatTemplate {
        &self.chat
    }

    /// Continues a prompt. `on_token` is told every id as it is made, and may end the generation there.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        options: &GenerateOptions,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generation, Error> {
        self.check_prompt(prompt)?;
        let room = self.context + 1 - prompt.len();
        let most = options.max_tokens.map_or(room, |most| room.min(most as usize));
        if most == 0 {
            return Err(Error::Setting("--max-tokens 0 asks for nothing; ask for at least 1".into()));
        }
        options.sampling.check(self.runner.model.config.vocab_size)?;
        let sampling = options.sampling.to_row();
        self.runner.clear_slot(&self.lanes, 0)?;
        self.runner.stage_biases(&self.lanes, 0, &options.sampling.biases())?;
        let mut rounds = RoundCounts::default();
        for (start, piece) in pieces(prompt, &vec![PIECE_ROWS; prompt.len().div_ceil(PIECE_ROWS)]) {
            self.prompt_piece(start, piece, Picks::Last, sampling)?;
            *rounds.eager.entry("prompt pass").or_default() += 1;
        }
        let mut ids = Vec::new();
        loop {
            let outcome = self.runner.outcomes(1)?[0];
            if outcome.status != 0 {
                let position = prompt.len() + ids.len();
                let why = format!(
                    "the logits after position {position} are not finite; the weights or the device are damaged"
                );
                return Err(Error::Device(graph::Error::CaptureFailed { capture: "decode".into(), why }));
            }
            ids.push(outcome.id);
            let told = on_token(outcome.id);
            if !options.ignore_eos && self.stop_ids.contains(&outcome.id) {
                return Ok(Generation { ids, finish: Finish::Stop, rounds });
            }
            if ids.len() == most {
                return Ok(Generation { ids, finish: Finish::Length, rounds });
            }
            if told.is_break() {
                return Ok(Generation { ids, finish: Finish::Cancelled, rounds });
            }
            self.decode_row(prompt.len() + ids.len() - 1, sampling, &mut rounds)?;
        }
    }

    /// The logits after every id of a request.
    pub fn logits(&mut self, request: &LogitsRequest) -> Result<Logits, Error> {
        let ids = &request.ids;
        self.check_prompt(ids)?;
        let decode_from = request.decode_from.unwrap_or(ids.len());
        if decode_from == 0 || decode_from > ids.len() {
            let why = format!("--decode-from {decode_from} is not between 1 and the {} ids", ids.len());
            return Err(Error::Setting(why));
        }
        let prompt = &ids[..decode_from];
        let sizes = request.pieces.clone().unwrap_or_else(|| even_pieces(prompt.len(), PIECE_ROWS));
        let sum = sizes.iter().try_fold(0usize, |sum, size| sum.checked_add(*size));
        if sum != Some(prompt.len()) || sizes.contains(&0) {
            let why =
                format!("--pieces {sizes:?} must be positive and sum to the {} prompt ids", prompt.len());
            return Err(Error::Setting(why));
        }
        let largest = sizes.iter().copied().max().unwrap_or(0);
        let limits = RoundLimits { rows: largest, picked_rows: largest, edits: largest / PAGE + 2 };
        self.decode = None;
        self.runner.reserve(limits)?;

        self.runner.clear_slot(&self.lanes, 0)?;
        let vocab = self.runner.model.config.vocab_size;
        let mut data = Vec::with_capacity(ids.len() * vocab);
        for (start, piece) in pieces(prompt, &sizes) {
            self.prompt_piece(start, piece, Picks::All, Sampling::default())?;
            data.extend(self.runner.logits(piece.len())?);
        }
        for (position, &id) in ids.iter().enumerate().skip(decode_from) {
            let bundle = crate::bundle::Bundle { lanes: &self.lanes, slot: 0, pages: &[], length: position };
            bundle.set_last_id(id, &self.runner.stream)?;
            self.decode_row(position, Sampling::default(), &mut RoundCounts::default())?;
            data.extend(self.runner.logits(1)?);
        }
        Ok(Logits { positions: ids.len(), vocab, data })
    }

    fn check_prompt(&self, ids: &[u32]) -> Result<(), Error> {
        let vocab = self.runner.model.config.vocab_size;
        if ids.is_empty() {
            return Err(Error::Prompt("the prompt is empty; give at least one id".into()));
        }
        if let Some((at, id)) = ids.iter().enumerate().find(|(_, id)| **id as usize >= vocab) {
            return Err(Error::Prompt(format!("id {id} at position {at} is past the vocabulary of {vocab}")));
        }
        if ids.len() > self.context {
            return Err(Error::Prompt(format!(
                "the prompt has {} ids and the context holds {}; shorten it or raise --context",
                ids.len(),
                self.context
            )));
        }
        Ok(())
    }

    /// Runs one piece of a prompt, whose first id has position `start`.
    fn prompt_piece(
        &mut self,
        start: usize,
        ids: &[u32],
        picks: Picks,
        sampling: Sampling,
    ) -> Result<(), Error> {
        let count = ids.len() as u32;
        let rows: Vec<Row> = (0..count).map(|place| Row { slot: 0, place, first: 0, count }).collect();
        let row = |(place, &id): (usize, &u32)| PromptRow { id, axes: [(start + place) as i32; 3] };
        let prompt: Vec<PromptRow> = ids.iter().enumerate().map(row).collect();
        self.runner.stage(StagedTable {
            rows: &rows,
            sampling: &vec![sampling; ids.len()],
            prompt: &prompt,
            edits: &page_edits(start, ids.len()),
        })?;
        let groups = [Group { lanes: &self.lanes, rows: ids.len() }];
        self.runner.run_eager(&RoundShape { kind: Kind::Prompt, groups: &groups, picks })?;
        Ok(())
    }

    /// Runs one decode row at `position`.
    fn decode_row(
        &mut self,
        position: usize,
        sampling: Sampling,
        rounds: &mut RoundCounts,
    ) -> Result<(), Error> {
        let rows = [Row { slot: 0, place: 0, first: 0, count: 1 }];
        let edits = page_edits(position, 1);
        self.runner.stage(StagedTable { rows: &rows, sampling: &[sampling], prompt: &[], edits: &edits })?;
        let groups = [Group { lanes: &self.lanes, rows: 1 }];
        let shape = RoundShape { kind: Kind::Decode, groups: &groups, picks: Picks::All };
        if !self.graphs {
            *rounds.eager.entry("graphs off").or_default() += 1;
            return Ok(self.runner.run_eager(&shape)?);
        }
        let exec = match self.decode.take() {
            Some(exec) => {
                rounds.replayed += 1;
                exec
            }
            None => {
                rounds.captured += 1;
                self.runner.capture(&shape)?
            }
        };
        self.runner.replay(self.decode.insert(exec))?;
        Ok(())
    }
}

/// The page edits that rows from `position` on need: page `i` of the one lane is page `i` of the pool.
fn page_edits(position: usize, rows: usize) -> Vec<PageEdit> {
    let (first, end) = (position.div_ceil(PAGE), (position + rows).div_ceil(PAGE));
    (first as u32..end as u32).map(|index| PageEdit { slab: 0, slot: 0, index, page: index }).collect()
}

/// As many pieces of `size` as fit, and the rest.
fn even_pieces(length: usize, size: usize) -> Vec<usize> {
    (0..length).step_by(size).map(|start| size.min(length - start)).collect()
}

/// Cuts ids into pieces, each with the position of its first id.
fn pieces<'a>(ids: &'a [u32], sizes: &'a [usize]) -> impl Iterator<Item = (usize, &'a [u32])> {
    sizes.iter().scan(0, |next, &size| {
        let start = *next;
        *next = (start + size).min(ids.len());
        Some((start, &ids[start..*next]))
    })
}
