//! A model opened on a host device with a few lanes, driven row by row: what model-level suites share.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use graph::host::HostOptions;
use graph::{Arena, Communicator, Device, Emission, Exec};
use kernels::numerics::ElementType;
use kernels::table::{Kind, Outcome, PAGE, PageEdit, PromptRow, Row, Sampling};
use kernels::weight::Order;
use runtime::bundle::Bundle;
use runtime::checkpoint::Checkpoint;
use runtime::lanes::{LaneLayout, Lanes, PagePool};
use runtime::model::{Group, Model, Picks, PictureRows, RoundShape};
use runtime::runner::{Runner, StagedTable};
use runtime::scratch::RoundLimits;
use runtime::share::Share;
use runtime::weights::{Loaded, WeightForm, WeightPlan};

/// A path inside the repository, or inside the archive that a packed program was extracted from: there it lies
/// in a folder beside those of the data.
pub fn repository(path: &str) -> PathBuf {
    static ROOT: OnceLock<PathBuf> = OnceLock::new();
    let root = ROOT.get_or_init(|| {
        let program = std::env::current_exe().ok();
        let archive = program.as_deref().and_then(|program| program.parent()?.parent());
        let archive = archive.filter(|archive| archive.join("tests/oracle/manifest.json").is_file());
        let built =
            || Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests is a folder of the repository");
        archive.unwrap_or_else(built).to_owned()
    });
    root.join(path)
}

/// A model with one slab of lanes.
pub struct Fixture {
    /// The runner.
    pub runner: Runner,
    /// The slab.
    pub lanes: Lanes,
    /// How ids are picked in every round.
    pub sampling: Sampling,
}

/// One lane of a fixture: page `i` of slot `s` is page `s * pages_per_lane + i` of the pool.
#[derive(Clone, Debug)]
pub struct Lane {
    /// Its slot.
    pub slot: usize,
    /// Its pages, for the whole context.
    pub pages: Vec<u32>,
    /// Positions that are final.
    pub length: usize,
}

/// How large a fixture is.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Lanes.
    pub slots: usize,
    /// Positions per lane.
    pub context: usize,
    /// Rows of a round, all of which may reach the head.
    pub rows: usize,
}

impl Fixture {
    /// Opens a model folder on a host device.
    pub fn open(dir: &Path, element: ElementType, size: Size) -> Fixture {
        Fixture::on(&Device::host(HostOptions::default()), dir, element, size)
    }

    /// Opens a model folder on a device.
    pub fn on(device: &Device, dir: &Path, element: ElementType, size: Size) -> Fixture {
        Fixture::with(device, dir, element, size, None, |plan, checkpoint| {
            plan.load(checkpoint, device, &mut |_, _| {}).expect("weights load")
        })
    }

    /// Opens one rank's share of a model folder on a device of its own.
    pub fn share(
        device: &Device,
        dir: &Path,
        element: ElementType,
        size: Size,
        communicator: Communicator,
    ) -> Fixture {
        Fixture::with(device, dir, element, size, Some(communicator), |plan, checkpoint| {
            plan.load(checkpoint, device, &mut |_, _| {}).expect("weights load")
        })
    }

    /// Opens a model folder on a device of virtual arenas, where weights have places and no bytes.
    pub fn virtual_on(device: &Device, dir: &Path, element: ElementType, size: Size) -> Fixture {
        Fixture::with(device, dir, element, size, None, |plan, checkpoint| {
            plan.allocate(checkpoint, device).expect("addresses are plenty")
        })
    }

    fn with(
        device: &Device,
        dir: &Path,
        element: ElementType,
        size: Size,
        communicator: Option<Communicator>,
        load: impl FnOnce(WeightPlan, &Checkpoint) -> Loaded,
    ) -> Fixture {
        let checkpoint = Checkpoint::open(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
        device.prepare(kernels::source::ALL).unwrap_or_else(|error| panic!("{error}"));
        let share = communicator.as_ref().map_or(Share::WHOLE, |communicator| {
            Share::new(communicator.rank(), communicator.ranks()).expect("two ranks share a model")
        });
        let form = WeightForm { share, ..WeightForm::new(element, Order::of(device)) };
        let plan = WeightPlan::new(&checkpoint, form).expect("weights are laid out");
        let config = plan.config().clone();
        let layout = Arc::new(LaneLayout::new(&config, element, size.context));
        let loaded = load(plan, &checkpoint);
        let pages = size.slots * layout.pages_per_lane;
        let pool = PagePool::new(device, &layout, pages).expect("pages fit");
        let lanes = Lanes::new(device, 0, layout, size.slots, pool).expect("lanes fit");
        let choices = config.vocab_size;
        let model = Model { config, share, element, weights: loaded.weights, choices, communicator };
        let edits = size.rows / PAGE + 2 * size.slots + 2;
        let limits = RoundLimits {
            rows: size.rows,
            picked_rows: size.rows,
            decode_rows: size.slots,
            context: size.context,
            edits,
        };
        let runner = Runner::new(device, model, loaded.memory, limits).expect("buffers fit");
        Fixture { runner, lanes, sampling: Sampling::default() }
    }

    /// A fresh lane in `slot`.
    pub fn lane(&self, slot: usize) -> Lane {
        self.runner.clear_slot(&self.lanes, slot).expect("a slot is cleared");
        let per_lane = self.lanes.layout.pages_per_lane;
        Lane {
            slot,
            pages: (slot * per_lane..(slot + 1) * per_lane).map(|page| page as u32).collect(),
            length: 0,
        }
    }

    /// The state of a lane.
    pub fn bundle<'a>(&'a self, lane: &'a Lane) -> Bundle<'a> {
        Bundle { lanes: &self.lanes, slot: lane.slot, pages: &lane.pages, length: lane.length }
    }

    /// Stages a piece of a prompt and gives its launches; the lane moves on.
    pub fn prompt_emission(&mut self, lane: &mut Lane, ids: &[u32], picks: Picks) -> Emission {
        let at = |(place, &id): (usize, &u32)| PromptRow { id, axes: [(lane.length + place) as i32; 3] };
        let prompt: Vec<PromptRow> = ids.iter().enumerate().map(at).collect();
        self.stage_prompt(lane, &prompt);
        let groups = [Group { lanes: &self.lanes, rows: ids.len() }];
        self.runner
            .emission(&RoundShape { kind: Kind::Prompt, groups: &groups, picks })
            .expect("legal launches")
    }

    /// Runs a piece of a prompt, some of whose rows are of pictures; the logits after each of its ids.
    pub fn picture_prompt(
        &mut self,
        lane: &mut Lane,
        prompt: &[PromptRow],
        pictures: &[PictureRows],
        rooms: &[Arena],
    ) -> Vec<f32> {
        self.stage_prompt(lane, prompt);
        let groups = [Group { lanes: &self.lanes, rows: prompt.len() }];
        let shape = RoundShape { kind: Kind::Prompt, groups: &groups, picks: Picks::All };
        self.runner.run_pictures(&shape, pictures, rooms).expect("queued");
        self.runner.logits(prompt.len()).expect("the round runs")
    }

    /// Stages a piece of a prompt; the lane moves on.
    fn stage_prompt(&mut self, lane: &mut Lane, prompt: &[PromptRow]) {
        let (slot, count) = (lane.slot as u32, prompt.len() as u32);
        let rows: Vec<Row> = (0..count).map(|place| Row { slot, place, first: 0, count }).collect();
        let edits = edits(lane, prompt.len());
        self.runner
            .stage(StagedTable {
                rows: &rows,
                sampling: &vec![self.sampling; rows.len()],
                prompt,
                edits: &edits,
            })
            .expect("staged");
        lane.length += prompt.len();
    }

    /// Runs a piece of a prompt; the logits after each of its ids.
    pub fn prompt(&mut self, lane: &mut Lane, ids: &[u32]) -> Vec<f32> {
        let emission = self.prompt_emission(lane, ids, Picks::All);
        self.runner.stream.run(emission, &[]).expect("queued");
        self.runner.logits(ids.len()).expect("the round runs")
    }

    /// Stages one decode row for each lane, in order; the lanes move on.
    pub fn stage_decode(&mut self, lanes: &mut [&mut Lane]) {
        let row = |(first, lane): (usize, &&mut Lane)| Row {
            slot: lane.slot as u32,
            place: 0,
            first: first as u32,
            count: 1,
        };
        let rows: Vec<Row> = lanes.iter().enumerate().map(row).collect();
        let edits: Vec<PageEdit> = lanes.iter().flat_map(|lane| edits(lane, 1)).collect();
        self.runner
            .stage(StagedTable {
                rows: &rows,
                sampling: &vec![self.sampling; rows.len()],
                prompt: &[],
                edits: &edits,
            })
            .expect("staged");
        lanes.iter_mut().for_each(|lane| lane.length += 1);
    }

    /// The launches of a decode round of `rows` rows.
    pub fn decode_emission(&self, rows: usize) -> Emission {
        let groups = [Group { lanes: &self.lanes, rows }];
        self.runner
            .emission(&RoundShape { kind: Kind::Decode, groups: &groups, picks: Picks::All })
            .expect("legal launches")
    }

    /// Captures a decode round of `rows` rows.
    pub fn capture_decode(&self, rows: usize) -> Exec {
        let groups = [Group { lanes: &self.lanes, rows }];
        self.runner
            .capture(&RoundShape { kind: Kind::Decode, groups: &groups, picks: Picks::All })
            .expect("captured")
    }

    /// Runs one decode row for each lane, eagerly or by replaying `exec`.
    pub fn decode(&mut self, lanes: &mut [&mut Lane], exec: Option<&Exec>) -> Vec<Outcome> {
        self.stage_decode(lanes);
        match exec {
            Some(exec) => self.runner.replay(exec).expect("queued"),
            None => self.runner.stream.run(self.decode_emission(lanes.len()), &[]).expect("queued"),
        }
        self.runner.outcomes(lanes.len()).expect("the round runs")
    }

    /// Runs an emission entry by entry; `look` is called after each.
    pub fn trace(&self, emission: &Emission, mut look: impl FnMut(usize)) {
        for index in 0..emission.len() {
            self.runner.stream.run(emission.slice(index..index + 1), &[]).expect("queued");
            self.runner.stream.synchronize().expect("the entry runs");
            look(index);
        }
    }
}

/// The page edits that the next `rows` rows of a lane need.
fn edits(lane: &Lane, rows: usize) -> Vec<PageEdit> {
    let (first, end) = (lane.length.div_ceil(PAGE), (lane.length + rows).div_ceil(PAGE));
    let edit = |index: usize| PageEdit {
        slab: 0,
        slot: lane.slot as u32,
        index: index as u32,
        page: lane.pages[index],
    };
    (first..end).map(edit).collect()
}
