//! Staging and executing rounds: the device side of one round, with nothing decided here.

use graph::{
    Arena, Bank, Buffers, Device, Emission, Event, Exec, How, Key, Pinned, Recording, Result, Staging, Stream,
};
use kernels::numerics::{Element, ElementType};
use kernels::table::{BIASES, Bias, Header, Kind, LAYOUT, Outcome, PageEdit, PromptRow, Row, Sampling};

use crate::lanes::Lanes;
use crate::model::{Group, Model, RoundShape};
use crate::scratch::{RoundLimits, Scratch};

/// Rounds whose outcomes may be under way.
pub const DEPTH: usize = 2;

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
    pub weights: Arena,
    /// The buffers of rounds.
    pub scratch: Scratch,
    staging: Staging,
    biases: Staging,
    results: [(Pinned, Event); DEPTH],
    turn: usize,
}

/// Outcomes on their way to the host: see [`Runner::read_back`].
#[derive(Clone, Copy, Debug)]
pub struct ReadBack {
    buffer: usize,
    count: usize,
}

impl Runner {
    /// Allocates the buffers for rounds within `limits`.
    pub fn new(device: &Device, model: Model, weights: Arena, limits: RoundLimits) -> Result<Runner> {
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
            turn: 0,
        })
    }

    /// Makes room for rounds within `limits` too. If there was none, buffers move: graphs captured before
    /// are stale, as their keys say: the epoch of the buffers is another one.
    pub fn reserve(&mut self, limits: RoundLimits) -> Result<()> {
        let now = self.scratch.limits;
        let most = RoundLimits {
            rows: now.rows.max(limits.rows),
            picked_rows: now.picked_rows.max(limits.picked_rows),
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
        assert!(
            table.rows.len() <= limits.rows && table.edits.len() <= limits.edits,
            "a round past its limits"
        );
        assert_eq!(table.sampling.len(), table.rows.len(), "one set of options per row");
        assert!(table.prompt.is_empty() || table.prompt.len() == table.rows.len(), "one id per prompt row");
        let layout = self.scratch.buffers.table_layout;
        // Decode rows need nothing of the last part.
        let bytes = if table.prompt.is_empty() { layout.prompt.offset } else { layout.bytes };
        let header = Header { rows: table.rows.len() as u32, edits: table.edits.len() as u32 };
        self.staging.upload(&self.stream, self.scratch.buffers.table_base, bytes, |buffer| {
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
        self.biases.upload(&self.stream, to, bytes.len(), |buffer| buffer.copy_from_slice(bytes))
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

    /// What a graph of a round of this shape depends on.
    pub fn key(&self, shape: &RoundShape<'_>) -> Key {
        let buffers = |group: &Group<'_>| Buffers { digest: group.lanes.digest(), rows: group.rows as u32 };
        Key {
            kind: match shape.kind {
                Kind::Prompt => "prompt",
                Kind::Decode => "decode",
            },
            rows: shape.groups.iter().map(|group| group.rows as u32).sum(),
            buffers: shape.groups.iter().map(buffers).collect(),
            layout: LAYOUT,
            scratch: self.scratch.arena.epoch(),
            weights: self.weights.epoch(),
            communicator: 0,
            split: 0,
        }
    }

    /// Queues a round by whatever the bank knows of its key.
    pub fn run(&self, bank: &mut Bank, shape: &RoundShape<'_>) -> Result<How> {
        bank.run(&self.stream, &self.key(shape), &self.keeps(shape), || self.emission(shape))
    }

    /// Captures a round of this shape into the bank. Nothing of it runs.
    pub fn prepare(&self, bank: &mut Bank, shape: &RoundShape<'_>) -> Result<()> {
        bank.capture(&self.stream, &self.key(shape), &self.keeps(shape), || self.emission(shape))
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
    /// way: the next one reuses the buffer of the one before the last.
    pub fn read_back(&mut self, count: usize) -> Result<ReadBack> {
        let (pinned, event) = &self.results[self.turn];
        let mut emission = Emission::new();
        emission.copy(pinned.base().cast(), self.scratch.buffers.outcomes, count);
        self.stream.run(emission, std::slice::from_ref(&self.scratch.arena))?;
        self.stream.record(event)?;
        let read = ReadBack { buffer: self.turn, count };
        self.turn = (self.turn + 1) % DEPTH;
        Ok(read)
    }

    /// The outcomes that were read back, after waiting for them and for nothing later.
    pub fn take(&self, read: ReadBack) -> Result<Vec<Outcome>> {
        let (pinned, event) = &self.results[read.buffer];
        event.synchronize()?;
        let bytes = read.count * size_of::<Outcome>();
        Ok(pinned.read(|results| bytemuck::allocation::pod_collect_to_vec(&results[..bytes])))
    }

    /// The outcomes of the last round's first `count` picked rows, after running everything queued.
    pub fn outcomes(&mut self, count: usize) -> Result<Vec<Outcome>> {
        let read = self.read_back(count)?;
        self.take(read)
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
        [self.weights.clone(), self.scratch.arena.clone()].into_iter().chain(lanes).collect()
    }

    /// Zeroes a slot and forgets its pages, for a new lane.
    pub fn clear_slot(&self, lanes: &Lanes, slot: usize) -> Result<()> {
        let mut emission = Emission::new();
        crate::bundle::Bundle { lanes, slot, pages: &[], length: 0 }.zero(&mut emission);
        self.stream.run(emission, &lanes.arenas())
    }
}

/// The buffers that depend on the size of rounds.
struct Buffering {
    scratch: Scratch,
    staging: Staging,
    results: [(Pinned, Event); DEPTH],
}

impl Buffering {
    fn new(device: &Device, model: &Model, limits: RoundLimits) -> Result<Buffering> {
        let scratch = Scratch::new(device, &model.config, model.element, limits)?;
        let staging = Staging::new(device, "staged table", scratch.buffers.table_layout.bytes)?;
        let bytes = limits.picked_rows * size_of::<Outcome>();
        let result = || device.pinned("outcomes", bytes).map(|pinned| (pinned, device.event()));
        let results = [result()?, result()?];
        Ok(Buffering { scratch, staging, results })
    }
}
