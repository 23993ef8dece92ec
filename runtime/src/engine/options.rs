//! The settings of an engine, and its opening.

use std::path::Path;
use std::sync::Arc;

use graph::host::HostOptions;
use graph::{Bank, Exchange, Planted};
use kernels::numerics::ElementType;
use planner::{ClassId, Limits, Slab, State};

use super::eyes::Eyes;
use super::media::{Most, PictureFault};
use super::sight::{Look, Vision};
use super::{Engine, RoundCounts, warm};
use crate::chat::ChatTemplate;
use crate::config::{ModelConfig, VisionConfig};
use crate::error::Error;
use crate::lanes::{LaneLayout, Lanes, PagePool};
use crate::memory::{ClassPlan, GraphPlan, MemoryPlan};
use crate::open::{Load, OpenModel, Opened, Progress};
use crate::pictures::Sight;
use crate::place::Place;
use crate::ranks::Rank;
use crate::runner::{DEPTH, Runner};
use crate::scratch::RoundLimits;
use crate::share::Share;
use crate::tokenizer::Tokenizer;
use crate::tower::{Tower, TowerLimits};
use crate::weights::{TablePlace, WeightForm};

/// Positions of the longest context, unless asked otherwise or the model has fewer.
const DEFAULT_CONTEXT: u32 = 32_768;
/// Lanes, unless asked otherwise.
const LANES: u16 = 16;
/// Most lanes of a slab, unless asked otherwise: as many as the widest captured round has rows.
const SLAB_LANES: u16 = planner::GRAPH_ROWS as u16;
/// Memory for pages on the host device, unless asked otherwise.
const PAGE_BYTES: u64 = 256 << 20;
/// Memory for the features of pictures on the host device and on a CUDA device, unless asked otherwise.
const FEATURE_BYTES: [usize; 2] = [32 << 20, 512 << 20];

/// The settings of an engine.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// The device.
    pub place: Place,
    /// Element type of activations, weights and caches.
    pub element: ElementType,
    /// Where the weights come from.
    pub load: Load,
    /// Whether ids stand for text; without, a folder needs no tokenizer and no chat template.
    pub text: bool,
    /// Where the n-gram tables live.
    pub table: TablePlace,
    /// Whether decode rounds are captured and replayed.
    pub graphs: bool,
    /// What carries the gathers of two ranks on CUDA devices.
    pub exchange: Exchange,
    /// The cache classes; requests name one by its number.
    pub classes: Vec<Class>,
    /// Bytes for the pages of each class that does not say how many it has. None: as many pages as its lanes can use,
    /// as far as they fit 256 MiB on the host device, or nine tenths of what else is free on a CUDA device; what the
    /// longest context takes at least.
    pub page_memory: Option<u64>,
    /// Whether pictures are taken.
    pub vision: Vision,
    /// Bytes for the features of pictures, those that requests need and those that are kept in case a picture comes
    /// again. None: 32 MiB on the host device, 512 MiB on a CUDA device.
    pub feature_bytes: Option<usize>,
    /// Lanes of a slab: what is made at start, and each time that more are needed.
    pub slab_lanes: u16,
    /// Rows of the longest prompt piece, a multiple of 64.
    pub piece_rows: u32,
    /// Decode rounds between two prompt pieces while a lane could decode.
    pub decode_share: u32,
    /// Requests that may wait.
    pub queue: u32,
    /// Every how many graph rounds one runs eager to be compared; 0 is never.
    pub audit: u32,
    /// Bytes of graphs that are kept.
    pub graph_bytes: usize,
    /// Rounds under way before one is read: 2 overlaps staging with execution, 1 does not.
    pub depth: usize,
    /// Whether every settled round says what it left in each lane. Needs a depth of 1.
    pub trace: bool,
    /// Whether fresh device memory is poisoned; zeros otherwise.
    pub poison: bool,
    /// Bytes of memory that the host device has.
    pub host_memory: usize,
    /// Plants a fault, for the suite that proves that tests catch it: changes every round key.
    #[doc(hidden)]
    pub key_fault: Option<fn(&mut graph::Key)>,
    /// Plants a fault in what pictures mean for rows.
    #[doc(hidden)]
    pub picture_fault: Option<PictureFault>,
    /// Plants a fault in the device, once its weights are read.
    #[doc(hidden)]
    pub planted: Option<Planted>,
}

/// A cache class: lanes with room for so many positions, and the pages they share.
#[derive(Clone, Debug)]
pub struct Class {
    /// Positions of a lane; 0: as many as the model was made for, at most 32,768.
    pub context: u32,
    /// Most lanes.
    pub lanes: u16,
    /// Pages of 64 positions, shared by its lanes; 0: what [`EngineOptions::page_memory`] holds.
    pub pages: u32,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            place: Place::Host,
            element: ElementType::Bf16,
            load: Load::default(),
            text: true,
            table: TablePlace::Device,
            graphs: true,
            exchange: Exchange::Auto,
            classes: vec![Class::default()],
            page_memory: None,
            vision: Vision::default(),
            feature_bytes: None,
            slab_lanes: SLAB_LANES,
            piece_rows: 512,
            decode_share: 4,
            queue: 1024,
            audit: 0,
            graph_bytes: 256 << 20,
            depth: DEPTH,
            trace: false,
            poison: false,
            host_memory: HostOptions::default().memory_bytes,
            key_fault: None,
            picture_fault: None,
            planted: None,
        }
    }
}

impl Default for Class {
    fn default() -> Self {
        Class { context: 0, lanes: LANES, pages: 0 }
    }
}

impl EngineOptions {
    /// Lanes of a class that are made at start.
    fn first_lanes(&self, class: &Class) -> u16 {
        class.lanes.min(self.slab_lanes)
    }

    /// Bytes for the features of pictures, where they are taken.
    fn features(&self) -> usize {
        self.feature_bytes.unwrap_or(FEATURE_BYTES[usize::from(self.place != Place::Host)])
    }

    /// A folder with all that these settings ask of one.
    fn opened(&self, dir: &Path, form: WeightForm) -> Result<Opened, Error> {
        match self.text {
            true => Opened::with(dir, form, self.load),
            false => Opened::without_text(dir, form, self.load),
        }
    }

    /// The form that an engine with these settings gives the weights of a model, with its vision tower if it takes
    /// pictures.
    ///
    /// # Errors
    /// As [`open`], of what its folder says of pictures.
    pub fn form(&self, dir: &Path) -> Result<WeightForm, Error> {
        Ok(self.form_of(self.look(dir)?.seen().is_some()))
    }

    fn form_of(&self, vision: bool) -> WeightForm {
        WeightForm { vision, ..self.place.form(self.element, self.table) }
    }

    /// Whether the model of a folder sees. One whose settings cannot be read is refused by who reads all of it.
    pub(crate) fn look(&self, dir: &Path) -> Result<Look, Error> {
        ModelConfig::open(dir).map_or(Ok(Look::Blind(None)), |config| Look::at(dir, &config, self))
    }

    fn check(&self) -> Result<(), Error> {
        let wrong = |why: String| Err(Error::Setting(why));
        if self.classes.is_empty() || self.classes.iter().any(|class| class.lanes == 0) {
            return wrong("there are no lanes; ask for at least 1 with --lanes".into());
        }
        if self.slab_lanes == 0 {
            return wrong("a slab of 0 lanes holds nothing; ask for at least 1".into());
        }
        if self.depth == 0 || self.depth > DEPTH {
            return wrong(format!("a depth of {} rounds is not between 1 and {DEPTH}", self.depth));
        }
        if self.trace && self.depth != 1 {
            return wrong(
                "tracing looks at what a round left: nothing later may run, so the depth must be 1".into(),
            );
        }
        Ok(())
    }
}

/// The settings of an engine with every size decided for one model.
struct Sizes {
    options: EngineOptions,
    /// The layout of each class.
    layouts: Vec<Arc<LaneLayout>>,
    limits: RoundLimits,
    eyes: Option<EyeSizes>,
}

/// The sizes of what pictures need.
struct EyeSizes {
    /// The tower and how much it takes, on the rank that has it.
    tower: Option<(VisionConfig, TowerLimits)>,
    /// Bytes of features.
    features: usize,
}

impl Sizes {
    /// Sizes for a device with `free` bytes, all of them for this model; none: for the host's.
    fn new(
        opened: &Opened,
        options: &EngineOptions,
        look: &Look,
        free: Option<usize>,
    ) -> Result<Sizes, Error> {
        options.check()?;
        let mut options = options.clone();
        let (mut layouts, mut open) = (Vec::new(), Vec::new());
        for class in &mut options.classes {
            let asked = Some(class.context).filter(|context| *context > 0);
            class.context = opened.context(asked, DEFAULT_CONTEXT)?;
            let layout = LaneLayout::new(opened.weights.config(), options.element, class.context as usize);
            if class.pages == 0 {
                class.pages = match options.page_memory {
                    Some(memory) => pages(&layout, class.lanes, memory)?,
                    None => layout.pages_per_lane as u32,
                };
                open.extend(options.page_memory.is_none().then_some(layouts.len()));
            }
            layouts.push(Arc::new(layout));
        }
        let rows = options.piece_rows as usize;
        let picked = (planner::GRAPH_ROWS as usize).min(rows);
        // A piece touches its own pages; a decode round at most one per row.
        let context = options.classes.iter().map(|class| class.context as usize).max().unwrap_or(0);
        let limits = RoundLimits {
            rows: rows.max(picked),
            picked_rows: picked,
            decode_rows: picked,
            context,
            edits: rows / 64 + picked,
        };
        let eyes = look.seen().map(|seen| EyeSizes {
            tower: opened.weights.form().vision.then(|| (seen.tower.clone(), seen.limits)),
            features: options.features(),
        });
        let mut sizes = Sizes { options, layouts, limits, eyes };
        let spare = free.map(|free| free.saturating_sub(sizes.memory_plan(opened).bytes()) as u64);
        for &at in &open {
            let (class, layout) = (&mut sizes.options.classes[at], &sizes.layouts[at]);
            let (least, most) = (class.pages, class.pages.saturating_mul(class.lanes.into()));
            let pages = match spare {
                Some(spare) => least.saturating_add(fitting(layout, spare / open.len() as u64 * 9 / 10)),
                None => fitting(layout, PAGE_BYTES),
            };
            class.pages = pages.clamp(least, most);
        }
        Ok(sizes)
    }

    fn memory_plan(&self, opened: &Opened) -> MemoryPlan {
        let classes = self.options.classes.iter().zip(&self.layouts).map(|(class, layout)| ClassPlan {
            layout,
            first: self.options.first_lanes(class).into(),
            lanes: class.lanes.into(),
            pages: class.pages as usize,
        });
        let classes: Vec<ClassPlan<'_>> = classes.collect();
        let graphs = GraphPlan {
            bytes: if self.options.graphs { self.options.graph_bytes } else { 0 },
            on_device: self.options.place != Place::Host,
        };
        let plan = MemoryPlan::new(opened, &classes, self.limits, graphs);
        let Some(EyeSizes { tower, features }) = &self.eyes else { return plan };
        let plan = match tower {
            Some((config, limits)) => plan.with_tower(config, self.options.element, *limits),
            None => plan,
        };
        plan.with_features(*features)
    }
}

/// Pages that fit so many bytes.
fn fitting(layout: &LaneLayout, bytes: u64) -> u32 {
    u32::try_from(bytes / layout.page_bytes.max(1) as u64).unwrap_or(u32::MAX)
}

/// Pages that a class of `lanes` can use and that fit `memory`.
fn pages(layout: &LaneLayout, lanes: u16, memory: u64) -> Result<u32, Error> {
    let per_lane = layout.pages_per_lane as u32;
    match fitting(layout, memory) {
        0 => Err(Error::Setting(format!(
            "--memory {memory} holds no page: one takes {} bytes, and the longest context {per_lane} of them",
            layout.page_bytes
        ))),
        fitting => Ok(fitting.min(per_lane.saturating_mul(lanes.into()))),
    }
}

/// What a model would take in memory with these settings; no weight is read. Of pictures it speaks if the form of the
/// weights has the tower: see [`EngineOptions::form`].
///
/// # Errors
/// A setting cannot be honoured.
pub fn memory_plan(opened: &Opened, options: &EngineOptions) -> Result<MemoryPlan, Error> {
    let look = look_of(opened, options)?;
    Ok(Sizes::new(opened, options, &look, None)?.memory_plan(opened))
}

/// Whether a model sees whose form was chosen already.
fn look_of(opened: &Opened, options: &EngineOptions) -> Result<Look, Error> {
    match opened.weights.form().vision {
        true => Look::at(opened.checkpoint.dir(), opened.weights.config(), options),
        false => Ok(Look::Blind(None)),
    }
}

/// An engine with what turns text into ids and back.
pub struct OpenEngine {
    /// The engine.
    pub engine: Engine,
    /// The tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The chat template.
    pub chat: ChatTemplate,
    /// How it sees, if it does.
    pub sight: Option<Arc<Sight>>,
}

/// Opens a model: checks the whole folder, tells the memory plan, reads the weights, captures the ladder.
///
/// # Errors
/// The folder cannot be loaded, a setting cannot be honoured, or the device or the system has too little memory; each
/// names what is wrong.
pub fn open(
    dir: &Path,
    options: &EngineOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<OpenEngine, Error> {
    open_share(dir, options, &mut None, progress)
}

/// As [`open`], one rank of two: its share of the model.
///
/// # Errors
/// As [`open`]; the model cannot be shared; or the other rank is gone.
pub fn open_rank(
    dir: &Path,
    options: &EngineOptions,
    rank: Rank,
    progress: &mut dyn FnMut(Progress),
) -> Result<OpenEngine, Error> {
    let mut rank = Some(rank);
    let opened = open_share(dir, options, &mut rank, progress);
    if let (Err(error), Some(rank)) = (&opened, &rank) {
        // The other rank should not have to guess.
        rank.peer.part(Some(&error.to_string()));
    }
    opened
}

fn open_share(
    dir: &Path,
    options: &EngineOptions,
    rank: &mut Option<Rank>,
    progress: &mut dyn FnMut(Progress),
) -> Result<OpenEngine, Error> {
    let share = rank.as_ref().map_or(Ok(Share::WHOLE), Rank::share)?;
    let mut look = options.look(dir)?;
    let mut tower = look.seen().is_some();
    if let Some(Rank { peer, .. }) = rank {
        // Rank 0 alone has the tower; the other one attaches what it encodes, and has memory for that.
        if peer.least("whether pictures are taken", tower.into())? == 0 && tower {
            look = Look::Blind(Some("the other rank takes no pictures".into()));
            tower = false;
        }
        tower &= peer.leads();
    }
    let form = WeightForm { share, ..options.form_of(tower) };
    open_any(options.opened(dir, form)?, options, look, rank, progress)
}

/// As [`open`], of a folder whose files were checked. It takes pictures only if the form of its weights has the tower.
///
/// # Errors
/// As [`open`].
pub fn open_opened(
    opened: Opened,
    options: &EngineOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<OpenEngine, Error> {
    let look = look_of(&opened, options)?;
    open_any(opened, options, look, &mut None, progress)
}

fn open_any(
    opened: Opened,
    options: &EngineOptions,
    look: Look,
    rank: &mut Option<Rank>,
    progress: &mut dyn FnMut(Progress),
) -> Result<OpenEngine, Error> {
    let device = options.place.open(options.element, options.poison, options.host_memory)?;
    progress(Progress::Device(device.describe()));
    options.place.takes(&opened.checkpoint.config)?;
    if let Some(rank) = rank {
        rank.connect(&device, options.exchange)?;
        if let Some(library) = rank.communicator.nccl() {
            progress(Progress::Collectives(format!("{library}; {}", rank.communicator.means())));
        }
    }
    let free = (options.place != Place::Host).then(|| device.free_bytes());
    let mut sizes = Sizes::new(&opened, options, &look, free)?;
    if let Some(rank) = rank {
        // Devices have different amounts of memory free, and both ranks give out the same pages.
        for class in &mut sizes.options.classes {
            class.pages = rank.peer.least("pages", class.pages.into())? as u32;
        }
    }
    opened.unused().into_iter().for_each(&mut *progress);
    match &look {
        Look::Blind(Some(why)) => progress(Progress::Blind(why.clone())),
        Look::Sees(_) if !opened.weights.form().vision => progress(Progress::Attaches),
        Look::Sees(_) | Look::Blind(None) => {}
    }
    let plan = sizes.memory_plan(&opened);
    progress(Progress::Plan(plan.clone()));
    plan.check(&device)?;
    if let Some(rank) = rank {
        // Before either reads for minutes what the other one has no memory for.
        rank.peer.meet("memory for its share of the model")?;
    }
    let Sizes { options, layouts, limits, eyes } = sizes;

    let state = State::new(
        Limits {
            context: options.classes.iter().map(|class| class.context).max().unwrap_or(0),
            piece_rows: options.piece_rows,
            round_rows: planner::GRAPH_ROWS,
            decode_share: options.decode_share,
            queue: options.queue,
            audit: options.audit,
            graphs: options.graphs,
            pages: options.classes.iter().map(|class| class.pages).collect(),
        },
        &options
            .classes
            .iter()
            .enumerate()
            .map(|(number, class)| Slab { class: ClassId(number as u8), slots: options.first_lanes(class) })
            .collect::<Vec<_>>(),
    )?;

    let OpenModel { mut model, weights, tokenizer, chat, stop_ids } = opened.load(&device, progress)?;
    if let Some(rank) = rank {
        // From here on each waits in collectives for the other, which may take longer to load.
        rank.peer.meet("its share of the model")?;
    }
    let peer = rank.take().map(|Rank { peer, communicator }| {
        let stop = communicator.clone();
        peer.on_failure(move |error| stop.stop(&error.to_string()));
        model.communicator = Some(communicator);
        peer
    });
    let eyes = match eyes {
        Some(EyeSizes { tower: Some((config, limits)), features }) => {
            let tower = model.weights.tower.as_ref().expect("a form with a tower has its weights");
            let tower = Tower::new(&device, &config, model.element, tower, &weights, limits)?;
            let most = Most::of(&config, limits, model.element, features);
            Some(Eyes::new(tower, most))
        }
        _ => None,
    };
    let (mut classes, mut slabs) = (Vec::new(), Vec::new());
    for (number, (class, layout)) in options.classes.iter().zip(layouts).enumerate() {
        let pool = PagePool::new(&device, &layout, class.pages as usize)?;
        let slots = options.first_lanes(class).into();
        slabs.push(Lanes::new(&device, number as u32, layout.clone(), slots, pool.clone())?);
        classes.push((layout, pool));
    }
    let tokenizer = Arc::new(tokenizer);
    let mut engine = Engine {
        state,
        runner: Runner::new(&device, model, weights, limits)?,
        bank: Bank::new(options.graph_bytes),
        classes,
        slabs,
        stage: Default::default(),
        tokenizer: tokenizer.clone(),
        stop_ids,
        live: Default::default(),
        flying: Default::default(),
        counts: RoundCounts::default(),
        tokens: 0,
        audits_failed: 0,
        slabs_refused: 0,
        gone: Vec::new(),
        peer,
        sees: look.seen().map(|seen| seen.tower.clone()),
        eyes,
        broken: None,
        options,
    };
    engine.runner.plant_key_fault(engine.options.key_fault);
    device.plant(engine.options.planted);
    match warm(&mut engine) {
        Ok(()) => {
            let sight = look.seen().map(|seen| Arc::new(seen.sight.clone()));
            Ok(OpenEngine { engine, tokenizer, chat, sight })
        }
        Err(error) => {
            engine.fail(&error);
            engine.close();
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tiny");

    /// Pages of every class, and whether the plan fits.
    fn pages_for(options: &EngineOptions, free: usize) -> (Vec<u32>, bool) {
        let form = options.place.form(options.element, options.table);
        let opened = Opened::with(Path::new(TINY), form, options.load).expect("the model opens");
        let blind = Look::Blind(None);
        let sizes = Sizes::new(&opened, options, &blind, Some(free)).expect("the sizes are good");
        let fits = sizes.memory_plan(&opened).bytes() <= free;
        (sizes.options.classes.iter().map(|class| class.pages).collect(), fits)
    }

    #[test]
    fn pages_take_what_is_left_as_far_as_lanes_can_use_it() {
        let mut options = EngineOptions::default();
        let lane = 32_768 / 64;
        // Room for everything.
        assert_eq!(pages_for(&options, 64 << 30), (vec![lane * 16], true));
        // Room for some of it: the plan fits, and a tenth of the rest at most stays.
        let (some, fits) = pages_for(&options, 1 << 30);
        assert!(fits && (lane..lane * 16).contains(&some[0]), "{some:?}");
        let (more, fits) = pages_for(&options, (1 << 30) + (100 << 20));
        assert!(fits && more[0] > some[0], "{more:?} and {some:?}");
        // No room: one context, and the plan says that it does not fit.
        assert_eq!(pages_for(&options, 1 << 20), (vec![lane], false));
        // Two classes share.
        let small = Class { context: 1024, lanes: 4, pages: 0 };
        options.classes = vec![Class::default(), small.clone(), Class { pages: 3, ..small }];
        let (shared, fits) = pages_for(&options, 1 << 30);
        assert!(fits && shared[0] < some[0] && shared[1] == 64 && shared[2] == 3, "{shared:?}");
        // What was asked for is what there is.
        options.classes = vec![Class::default()];
        options.page_memory = Some(10 << 20);
        let (asked, _) = pages_for(&options, 64 << 30);
        assert!(asked[0] < lane, "{asked:?}");
    }
}
