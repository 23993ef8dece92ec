//! Staging and executing rounds: the device side of one round, with nothing decided here.

use graph::{Arena, Device, Emission, Exec, Pinned, Recording, Result, Staging, Stream};
use kernels::numerics::{Element, ElementType};
use kernels::table::{BIASES, Bias, Header, Kind, Outcome, PageEdit, PromptRow, Row, Sampling};

use crate::lanes::Lanes;
use crate::model::{Model, RoundShape};
use crate::scratch::{RoundLimits, Scratch};

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
    results: Pinned,
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
        })
    }

    /// Makes room for rounds within `limits` too. If there was none, buffers move: graphs captured before
    /// are stale, as the changed [`Runner::digest`] says.
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

    /// Captures a round of this shape. Nothing of it runs.
    pub fn capture(&self, shape: &RoundShape<'_>) -> Result<Exec> {
        let rows: usize = shape.groups.iter().map(|group| group.rows).sum();
        let kind = match shape.kind {
            Kind::Prompt => "prompt",
            Kind::Decode => "decode",
        };
        let recording = Recording::begin(&self.stream, format!("{kind} {rows} rows"))?;
        self.stream.run(self.emission(shape)?, &[])?;
        recording.finish(self.keeps(shape))
    }

    /// Queues a replay.
    pub fn replay(&self, exec: &Exec) -> Result<()> {
        self.stream.replay(exec)
    }

    /// The outcomes of the last round's first `count` picked rows, after running everything queued.
    pub fn outcomes(&mut self, count: usize) -> Result<Vec<Outcome>> {
        let mut emission = Emission::new();
        emission.copy(self.results.base().cast(), self.scratch.buffers.outcomes, count);
        self.stream.run(emission, std::slice::from_ref(&self.scratch.arena))?;
        self.stream.synchronize()?;
        let bytes = count * size_of::<Outcome>();
        Ok(self.results.read(|results| bytemuck::allocation::pod_collect_to_vec(&results[..bytes])))
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

    /// Digest of what every round bakes beside its lanes: buffers and weights.
    pub fn digest(&self) -> graph::Digest {
        let mut digest = graph::Digester::new();
        digest.digest(self.weights.digest()).digest(self.scratch.arena.digest()).finish()
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
    results: Pinned,
}

impl Buffering {
    fn new(device: &Device, model: &Model, limits: RoundLimits) -> Result<Buffering> {
        let scratch = Scratch::new(device, &model.config, model.element, limits)?;
        let staging = Staging::new(device, "staged table", scratch.buffers.table_layout.bytes)?;
        let results = device.pinned("outcomes", limits.picked_rows * size_of::<Outcome>())?;
        Ok(Buffering { scratch, staging, results })
    }
}
