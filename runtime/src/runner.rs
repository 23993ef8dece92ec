//! Staging and executing rounds: the device side of one round, with nothing decided here.

use graph::{
    Arena, Bank, Buffers, Communicator, Device, Emission, Exec, How, Key, Pending, Readback, Recording,
    Result, Staging, Stream,
};
use kernels::numerics::{Element, ElementType};
use kernels::table::{
    BIASES, Bias, Head, Header, Kind, LAYOUT, Outcome, PageEdit, PromptRow, Row, Sampling, TableLayout,
};

use crate::error::Error;
use crate::lanes::Lanes;
use crate::model::{Group, Model, Picks, PictureRows, RoundShape};
use crate::scratch::{RoundLimits, Scratch};
use crate::weights::WeightMemory;

/// Rounds whose outcomes may be under way.
pub const DEPTH: usize = graph::staging::DEPTH;

/// What varies in a round: the rows of the staged table.
#[derive(Clone, Copy, Debug)]
pub struct StagedTable<'a> {
    /// The rows, slab by slab.
    pub rows: &'a [Row],
    /// How ids are picked, one per row; only that of a lane's first row counts.
    pub sampling: &'a [Sampling],
    /// Ids and rotary positions, one per row of a prompt; empty for decode rows.
    pub prompt: &'a [PromptRow],
    /// Edits of page tables, applied before anything else.
    pub edits: &'a [PageEdit],
}

/// A model, its buffers and a stream: stages tables, runs or captures rounds, reads outcomes.
pub struct Runner {
    /// The device.
    pub device: Device,
    /// The stream that everything runs on.
    pub stream: Stream,
    /// The model.
    pub model: Model,
    /// The memory of the weights.
    pub weights: WeightMemory,
    /// The buffers of rounds.
    pub scratch: Scratch,
    staging: Staging,
    biases: Staging,
    results: Readback,
    key_fault: Option<fn(&mut Key)>,
}

/// The rings of a runner, by what they carry.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub enum Ring {
    /// Staged tables.
    Table,
    /// Bias lists.
    Biases,
    /// Outcomes.
    Results,
}

impl Runner {
    /// Allocates the buffers for rounds within `limits`.
    pub fn new(device: &Device, model: Model, weights: WeightMemory, limits: RoundLimits) -> Result<Runner> {
        let Buffering { scratch, staging, results } = Buffering::new(device, &model, limits)?;
        Ok(Runner {
            device: device.clone(),
            stream: device.stream(),
            model,
            weights,
            scratch,
            staging,
            biases: Staging::new(device, "bias list", BIASES * size_of::<Bias>())?,
            results,
            key_fault: None,
        })
    }

    /// Makes room for rounds within `limits` too. If there was none, buffers move: graphs captured before
    /// are stale, as their keys say: the epoch of the buffers is another one.
    pub fn reserve(&mut self, limits: RoundLimits) -> Result<()> {
        let now = self.scratch.limits;
        let most = RoundLimits {
            rows: now.rows.max(limits.rows),
            picked_rows: now.picked_rows.max(limits.picked_rows),
            decode_rows: now.decode_rows.max(limits.decode_rows),
            context: now.context.max(limits.context),
            edits: now.edits.max(limits.edits),
        };
        if most != now {
            self.stream.synchronize()?;
            let buffers = Buffering::new(&self.device, &self.model, most)?;
            (self.scratch, self.staging, self.results) = (buffers.scratch, buffers.staging, buffers.results);
        }
        Ok(())
    }

    /// Writes the table into staging and queues its one copy to the device.
    ///
    /// # Panics
    /// When the table is larger than the buffers were made for: the caller plans within the limits.
    pub fn stage(&mut self, table: StagedTable<'_>) -> Result<()> {
        let limits = self.scratch.limits;
        let rows = if table.prompt.is_empty() { limits.decode_rows } else { limits.rows };
        assert!(table.rows.len() <= rows && table.edits.len() <= limits.edits, "a round past its limits");
        assert_eq!(table.sampling.len(), table.rows.len(), "one set of options per row");
        assert!(table.prompt.is_empty() || table.prompt.len() == table.rows.len(), "one id per prompt row");
        let layout = self.scratch.buffers.table_layout;
        // Decode rows need nothing of the last part.
        let bytes = if table.prompt.is_empty() { layout.prompt.offset } else { layout.bytes };
        let header = Header { rows: table.rows.len() as u32, edits: table.edits.len() as u32 };
        let (to, keeps) = (self.scratch.buffers.table_base, std::slice::from_ref(&self.scratch.arena));
        self.staging.upload(&self.stream, to, bytes, keeps, |buffer| {
            let mut put = |offset: usize, part: &[u8]| buffer[offset..][..part.len()].copy_from_slice(part);
            put(layout.header.offset, bytemuck::bytes_of(&header));
            put(layout.rows.offset, bytemuck::cast_slice(table.rows));
            put(layout.edits.offset, bytemuck::cast_slice(table.edits));
            put(layout.sampling.offset, bytemuck::cast_slice(table.sampling));
            if !table.prompt.is_empty() {
                put(layout.prompt.offset, bytemuck::cast_slice(table.prompt));
            }
        })
    }

    /// Queues the copy of a request's bias list into its slot. Rounds staged before still see the old one.
    ///
    /// # Panics
    /// When the list is longer than [`BIASES`]: options are checked before.
    pub fn stage_biases(&mut self, lanes: &Lanes, slot: usize, list: &[Bias]) -> Result<()> {
        assert!(list.len() <= BIASES, "a bias list past its capacity");
        if list.is_empty() {
            return Ok(());
        }
        let bytes: &[u8] = bytemuck::cast_slice(list);
        let to = lanes.layout.biases.at(lanes.slab.slot(slot));
        let keeps = lanes.arenas();
        self.biases.upload(&self.stream, to, bytes.len(), &keeps, |buffer| buffer.copy_from_slice(bytes))
    }

    /// Stages what is added to the sequence positions of a lane's decode rows to get their rotary positions: for a
    /// lane that begins, after its slot was cleared.
    pub fn stage_rope_offset(&mut self, lanes: &Lanes, slot: usize, offset: i32) -> Result<()> {
        let at = lanes.layout.head.at::<u8>(lanes.slab.slot(slot));
        let (to, bytes) = (at.byte_add(std::mem::offset_of!(Head, rope_offset)), offset.to_ne_bytes());
        let keeps = lanes.arenas();
        self.biases.upload(&self.stream, to, bytes.len(), &keeps, |buffer| buffer.copy_from_slice(&bytes))
    }

    /// The launches of a round of this shape.
    pub fn emission(&self, shape: &RoundShape<'_>) -> Result<Emission> {
        let mut emission = Emission::new();
        self.model.emit(shape, &self.scratch.buffers, &mut emission)?;
        Ok(emission)
    }

    /// Queues a round eagerly.
    pub fn run_eager(&self, shape: &RoundShape<'_>) -> Result<()> {
        self.stream.run(self.emission(shape)?, &self.keeps(shape))
    }

    /// Queues a round, some of whose rows are of pictures, eagerly; features lie in `rooms`.
    pub fn run_pictures(
        &self,
        shape: &RoundShape<'_>,
        pictures: &[PictureRows],
        rooms: &[Arena],
    ) -> Result<()> {
        let mut emission = Emission::new();
        self.model.emit_with(shape, pictures, &self.scratch.buffers, &mut emission)?;
        self.stream.run(emission, &[&self.keeps(shape), rooms].concat())
    }

    /// What a graph of a round of this shape depends on.
    pub fn key(&self, shape: &RoundShape<'_>) -> Key {
        let buffers = |group: &Group<'_>| Buffers { digest: group.lanes.digest(), rows: group.rows as u32 };
        let mut key = Key {
            kind: match (shape.kind, shape.picks) {
                (Kind::Prompt, Picks::All) => "prompt, all picked",
                (Kind::Prompt, Picks::Last) => "prompt",
                (Kind::Prompt, Picks::None) => "prompt, none picked",
                (Kind::Decode, Picks::All) => "decode",
                (Kind::Decode, Picks::Last) => "decode, last picked",
                (Kind::Decode, Picks::None) => "decode, none picked",
            },
            buffers: shape.groups.iter().map(buffers).collect(),
            layout: LAYOUT,
            scratch: self.scratch.arena.epoch(),
            weights: self.weights.epoch(),
            communicator: self.model.communicator.as_ref().map_or(0, Communicator::epoch),
            split: self.model.share.ranks() as u32 - 1,
        };
        if let Some(fault) = self.key_fault {
            fault(&mut key);
        }
        key
    }

    /// Queues a round by whatever the bank knows of its key. `agreed` as [`Bank::run`] says.
    pub fn run(
        &self,
        bank: &mut Bank,
        shape: &RoundShape<'_>,
        agreed: impl FnOnce(bool) -> Result<bool, Error>,
    ) -> Result<How, Error> {
        bank.run(&self.stream, &self.key(shape), &self.keeps(shape), || self.emission(shape), agreed)
    }

    /// Captures a round of this shape into the bank. Nothing of it runs. False if the capture failed, here or, as
    /// `agreed` says, on another rank.
    pub fn prepare(
        &self,
        bank: &mut Bank,
        shape: &RoundShape<'_>,
        agreed: impl FnOnce(bool) -> Result<bool, Error>,
    ) -> Result<bool, Error> {
        bank.prepare(&self.stream, &self.key(shape), &self.keeps(shape), || self.emission(shape), agreed)
    }

    /// Captures a round of this shape. Nothing of it runs.
    pub fn capture(&self, shape: &RoundShape<'_>) -> Result<Exec> {
        let recording = Recording::begin(&self.stream, self.key(shape).to_string())?;
        self.stream.run(self.emission(shape)?, &[])?;
        recording.finish(self.keeps(shape))
    }

    /// Queues a replay.
    pub fn replay(&self, exec: &Exec) -> Result<()> {
        self.stream.replay(exec)
    }

    /// Queues the copy of the last round's first `count` outcomes to the host. At most [`DEPTH`] may be under
    /// way.
    pub fn read_back(&mut self, count: usize) -> Result<Pending<Outcome>> {
        let (from, keeps) = (self.scratch.buffers.outcomes, std::slice::from_ref(&self.scratch.arena));
        self.results.queue(&self.stream, from, count, keeps)
    }

    /// The outcomes that were read back, after waiting for them and for nothing later.
    ///
    /// # Errors
    /// The device failed, or collectives have ended: of the other rank's part, what was read may lack some.
    pub fn take(&mut self, pending: Pending<Outcome>) -> Result<Vec<Outcome>> {
        let outcomes = self.results.take(pending)?;
        match self.model.communicator.as_ref().and_then(Communicator::ended) {
            None => Ok(outcomes),
            Some(why) => {
                Err(graph::Error::Communicator { doing: "use what a round left".into(), why: why.into() })
            }
        }
    }

    /// The outcomes of the last round's first `count` picked rows, after running everything queued.
    pub fn outcomes(&mut self, count: usize) -> Result<Vec<Outcome>> {
        let pending = self.read_back(count)?;
        self.take(pending)
    }

    /// The logits of the last round's first `count` picked rows, after running everything queued.
    pub fn logits(&self, count: usize) -> Result<Vec<f32>> {
        self.stream.synchronize()?;
        let (arena, at) = (&self.scratch.arena, self.scratch.buffers.logits);
        let values = count * self.model.config.vocab_size;
        Ok(match self.model.element {
            ElementType::F32 => arena.read::<f32>(at.cast(), values)?,
            ElementType::Bf16 => {
                arena.read::<half::bf16>(at.cast(), values)?.into_iter().map(Element::widen).collect()
            }
        })
    }

    /// The arenas that a round of this shape points into.
    fn keeps(&self, shape: &RoundShape<'_>) -> Vec<Arena> {
        let lanes = shape.groups.iter().flat_map(|group| group.lanes.arenas());
        self.weights.arenas().chain([self.scratch.arena.clone()]).chain(lanes).collect()
    }

    /// Zeroes a slot and forgets its pages, for a new lane.
    pub fn clear_slot(&self, lanes: &Lanes, slot: usize) -> Result<()> {
        let mut emission = Emission::new();
        crate::bundle::Bundle { lanes, slot, pages: &[], length: 0 }.zero(&mut emission);
        self.stream.run(emission, &lanes.arenas())
    }

    /// Plants a fault: the ring's buffers are reused without waiting.
    #[doc(hidden)]
    pub fn remove_fence(&mut self, ring: Ring) {
        match ring {
            Ring::Table => self.staging.remove_fence(),
            Ring::Biases => self.biases.remove_fence(),
            Ring::Results => self.results.remove_fence(),
        }
    }

    /// Plants a fault: every key is changed before it is used.
    #[doc(hidden)]
    pub fn plant_key_fault(&mut self, fault: Option<fn(&mut Key)>) {
        self.key_fault = fault;
    }
}

/// Bytes of pinned host memory that the rings of a runner take.
pub fn pinned_bytes(limits: RoundLimits) -> usize {
    let table = TableLayout::new(limits.rows, limits.edits).bytes;
    DEPTH * (table + BIASES * size_of::<Bias>() + limits.picked_rows * size_of::<Outcome>())
}

/// The buffers that depend on the size of rounds.
struct Buffering {
    scratch: Scratch,
    staging: Staging,
    results: Readback,
}

impl Buffering {
    fn new(device: &Device, model: &Model, limits: RoundLimits) -> Result<Buffering> {
        let scratch = Scratch::new(device, &model.config, model.share, model.element, limits)?;
        let staging = Staging::new(device, "staged table", scratch.buffers.table_layout.bytes)?;
        let results = Readback::new(device, "outcomes", limits.picked_rows * size_of::<Outcome>())?;
        Ok(Buffering { scratch, staging, results })
    }
}
