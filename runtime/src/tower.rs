//! The vision tower: patches of pictures and videos to rows that stand for placeholders.
//!
//! ```text
//! embed ─ ( project ─ attend ) per block ─ merge
//! ```
//! An encoding goes in steps, each a short list of launches over a piece of the rows, so that rounds can run between
//! them. Only attention looks at other rows than its own: residual rows, queries, keys and values of all patches
//! are held from step to step, everything else for a piece. Rows of several pictures lie one after another; no row
//! depends on what comes before or after its picture, nor on where pieces are cut.

mod emit;
mod scratch;

use std::ops::Range;

use graph::{Arena, Device, Emission, Ptr, Staging, Stream};
use kernels::numerics::ElementType;
use kernels::{layer_norm, patch, span};

use crate::config::VisionConfig;
use crate::error::Error;
use crate::weights::{TowerWeights, WeightMemory};
use emit::{Body, Emit};
pub use scratch::{TowerBuffers, TowerLimits};

/// A picture or a video, cut into patches.
#[derive(Clone, Debug)]
pub struct Patches<B> {
    /// The pixels of every patch, one patch after another: channels, frames, lines and columns, the last the fastest.
    pub bytes: B,
    /// Frames (in as many as a patch has), lines and columns, in patches.
    pub grid: [u32; 3],
}

/// A tower with its buffers. It has one encoding at a time.
pub struct Tower {
    body: Body,
    /// The sizes that the buffers were made for.
    pub limits: TowerLimits,
    /// The memory of the buffers.
    pub arena: Arena,
    /// What launches point into: buffers and weights.
    keeps: Vec<Arena>,
    ring: Staging,
    begun: u64,
}

/// An encoding in progress.
pub struct Encoding<B> {
    items: Vec<Patches<B>>,
    runs: Vec<Run>,
    rows: usize,
    /// Rows of a piece, and how many pieces there are.
    piece: usize,
    pieces: usize,
    steps: Range<usize>,
    to: Ptr<u8>,
    keeps: Vec<Arena>,
    number: u64,
}

/// What a step does, and with which rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// What it does.
    pub stage: Stage,
    /// Patches.
    pub rows: Range<usize>,
}

/// The stages of an encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// From pixels to rows.
    Embed,
    /// Queries, keys and values of a block.
    Project(usize),
    /// The rest of a block.
    Attend(usize),
    /// From rows to features.
    Merge,
}

/// Consecutive rows of pictures, or pairs of frames, of one size.
#[derive(Clone, Debug)]
struct Run {
    rows: Range<usize>,
    height: u32,
    width: u32,
}

/// The features of an encoding that owns their memory.
pub struct Features {
    /// `[tokens, hidden]` elements.
    pub arena: Arena,
    /// Number of rows.
    pub tokens: usize,
}

impl Tower {
    /// Allocates the buffers of a tower whose weights are in memory.
    ///
    /// # Errors
    /// The device has no room, or no kernels for these sizes.
    pub fn new(
        device: &Device,
        config: &VisionConfig,
        element: ElementType,
        weights: &TowerWeights,
        memory: &WeightMemory,
        limits: TowerLimits,
    ) -> Result<Tower, Error> {
        if matches!(device, Device::Cuda(_)) {
            has_kernels(config)?;
        }
        let limits = limits.whole_squares(config);
        let arena = device.arena("vision buffers", TowerBuffers::bytes(config, element, limits))?;
        let buffers = TowerBuffers::new(config, element, limits, arena.base());
        let ring = Staging::new(device, "patches", limits.piece * patch_bytes(config))?;
        let keeps = std::iter::once(arena.clone()).chain(memory.arenas()).collect();
        let body = Body { config: config.clone(), element, weights: weights.clone(), buffers };
        Ok(Tower { body, limits, arena, keeps, ring, begun: 0 })
    }

    /// Begins an encoding whose features go to `to`, one item after another; they lie in `room`, as large as
    /// [`Tower::feature_bytes`] says. It ends an encoding that has not: of two, only the later goes on.
    ///
    /// # Errors
    /// An item is no picture, or all together are more than the buffers hold: which, and by how much.
    pub fn begin<B: AsRef<[u8]>>(
        &mut self,
        items: Vec<Patches<B>>,
        room: &Arena,
        to: Ptr<u8>,
    ) -> Result<Encoding<B>, Error> {
        let merge = self.body.config.spatial_merge_size as u32;
        let (mut runs, mut rows): (Vec<Run>, usize) = (Vec::new(), 0);
        for (number, item) in items.iter().enumerate() {
            let wrong = |why: String| Error::Prompt(format!("picture {number}: {why}"));
            let [frames, height, width] = item.grid;
            let patches = item.grid.iter().try_fold(1usize, |all, size| all.checked_mul(*size as usize));
            let patches = patches.filter(|patches| *patches > 0 && *patches <= self.limits.patches);
            let patches = patches.ok_or_else(|| {
                wrong(format!("{frames} x {height} x {width} patches are not 1 to {}", self.limits.patches))
            })?;
            if height % merge != 0 || width % merge != 0 {
                return Err(wrong(format!(
                    "{height} x {width} patches are not squares of {merge} x {merge}"
                )));
            }
            let (bytes, wanted) = (item.bytes.as_ref().len(), patches * patch_bytes(&self.body.config));
            if bytes != wanted {
                return Err(wrong(format!("{bytes} bytes for {patches} patches, which have {wanted}")));
            }
            let here = rows..rows + patches;
            rows = here.end;
            match runs.last_mut().filter(|run| (run.height, run.width) == (height, width)) {
                Some(run) => run.rows.end = rows,
                None => runs.push(Run { rows: here, height, width }),
            }
        }
        if rows == 0 || rows > self.limits.patches {
            return Err(Error::Prompt(format!(
                "{} pictures of {rows} patches together: 1 to {} are encoded at a time",
                items.len(),
                self.limits.patches
            )));
        }
        self.begun += 1;
        let pieces = rows.div_ceil(self.limits.piece);
        let keeps = self.keeps.iter().chain([room]).cloned().collect();
        let (piece, number) = (self.limits.piece, self.begun);
        let steps = 0..(2 * self.body.config.depth + 2) * pieces;
        Ok(Encoding { items, runs, rows, piece, pieces, steps, to, keeps, number })
    }

    /// Queues the next step, and says whether there was one: when there is none, the features are complete as soon as
    /// the stream has come this far. All steps of all encodings go to one stream.
    ///
    /// # Errors
    /// The device failed.
    ///
    /// # Panics
    /// If another encoding has begun since.
    pub fn step<B: AsRef<[u8]>>(
        &mut self,
        encoding: &mut Encoding<B>,
        stream: &Stream,
    ) -> Result<bool, Error> {
        assert_eq!(encoding.number, self.begun, "another encoding has begun");
        let Some(step) = encoding.next_step() else { return Ok(false) };
        let emit = Emit { body: &self.body, runs: &encoding.runs, features: encoding.to };
        if step.stage == Stage::Embed {
            let patch = patch_bytes(&self.body.config);
            let bytes = step.rows.len() * patch;
            let fill = |buffer: &mut [u8]| {
                encoding.fill(step.rows.start * patch, &mut buffer[..bytes]);
                Ok::<(), graph::Error>(())
            };
            self.ring.send(stream, &encoding.keeps, fill, |from| {
                let mut emission = Emission::new();
                emission.copy(self.body.buffers.attended, from, bytes);
                emission.append(&emit.step(&step)?);
                Ok(emission)
            })?;
        } else {
            stream.run(emit.step(&step)?, &encoding.keeps)?;
        }
        encoding.steps.start += 1;
        Ok(true)
    }

    /// All launches to come but the upload of pixels, which are whatever lies in the buffers: to measure them.
    pub(crate) fn launches<B: AsRef<[u8]>>(&self, encoding: &Encoding<B>) -> graph::Result<Emission> {
        let emit = Emit { body: &self.body, runs: &encoding.runs, features: encoding.to };
        let mut all = Emission::new();
        for number in encoding.steps.clone() {
            all.append(&emit.step(&encoding.step(number))?);
        }
        Ok(all)
    }

    /// Encodes items into memory of its own, all at once. What is queued may still run.
    ///
    /// # Errors
    /// As [`Tower::begin`] and [`Tower::step`]; there is no room for the features.
    pub fn encode<B: AsRef<[u8]>>(
        &mut self,
        device: &Device,
        stream: &Stream,
        items: Vec<Patches<B>>,
    ) -> Result<Features, Error> {
        let tokens = items.iter().map(|item| self.tokens(item.grid)).sum();
        let arena = device.arena("vision features", self.feature_bytes(tokens).max(1))?;
        let mut encoding = self.begin(items, &arena, arena.base())?;
        while self.step(&mut encoding, stream)? {}
        Ok(Features { arena, tokens })
    }

    /// Rows of features of a picture or a video.
    pub fn tokens(&self, [frames, height, width]: [u32; 3]) -> usize {
        let square = self.body.config.spatial_merge_size * self.body.config.spatial_merge_size;
        (frames as usize).saturating_mul(height as usize).saturating_mul(width as usize) / square
    }

    /// Width of a residual row.
    pub fn row_width(&self) -> usize {
        self.body.config.hidden_size
    }

    /// Where each buffer lies.
    pub fn buffers(&self) -> &TowerBuffers {
        &self.body.buffers
    }

    /// Size of so many rows of features.
    pub fn feature_bytes(&self, tokens: usize) -> usize {
        tokens.saturating_mul(self.body.config.out_hidden_size * self.body.element.bytes())
    }
}

impl<B: AsRef<[u8]>> Encoding<B> {
    /// What comes next; nothing if all is queued.
    pub fn next_step(&self) -> Option<Step> {
        self.steps.clone().next().map(|number| self.step(number))
    }

    fn step(&self, number: usize) -> Step {
        let (stage, piece) = (number / self.pieces, number % self.pieces);
        let last = self.steps.end / self.pieces - 1;
        let stage = match stage {
            0 => Stage::Embed,
            stage if stage == last => Stage::Merge,
            stage if stage % 2 == 1 => Stage::Project(stage / 2),
            stage => Stage::Attend(stage / 2 - 1),
        };
        let first = piece * self.piece;
        Step { stage, rows: first..self.rows.min(first + self.piece) }
    }

    /// Steps to come.
    pub fn left(&self) -> usize {
        self.steps.len()
    }

    /// Bytes of all items one after another, from byte `from` on.
    fn fill(&self, from: usize, to: &mut [u8]) {
        let mut at = from;
        let mut to = to;
        for item in &self.items {
            let bytes = item.bytes.as_ref();
            if at >= bytes.len() {
                at -= bytes.len();
                continue;
            }
            let count = to.len().min(bytes.len() - at);
            let (here, rest) = to.split_at_mut(count);
            here.copy_from_slice(&bytes[at..at + count]);
            (to, at) = (rest, 0);
        }
    }
}

/// Bytes of the pixels of a patch.
pub fn patch_bytes(config: &VisionConfig) -> usize {
    config.in_channels * config.temporal_patch_size * config.patch_size * config.patch_size
}

/// That the CUDA kernels compute a tower of these sizes: past their limits they would leave rows unwritten.
fn has_kernels(config: &VisionConfig) -> Result<(), Error> {
    let head = config.hidden_size / config.num_heads;
    let limits = [
        ("hidden_size", config.hidden_size, layer_norm::CUDA_WIDTH),
        ("hidden_size / num_heads", head, span::CUDA_WIDTH.min(patch::CUDA_TURNED)),
    ];
    match limits.into_iter().find(|&(_, value, most)| value > most as usize) {
        None => Ok(()),
        Some((setting, value, most)) => Err(Error::Setting(format!(
            "config.json: vision_config: {setting} is {value}, and the CUDA kernels take at most {most}; leave --vision \
             out, or run the model with --device host"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::ModelConfig;

    #[test]
    fn the_most_is_taken_and_one_more_is_refused_by_name() {
        let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny");
        let tiny = ModelConfig::open(&tiny).expect("the repository's own model").vision.expect("a tower");
        has_kernels(&tiny).expect("it is small");
        for (hidden_size, num_heads, says) in
            [(5120, 80, None), (5184, 81, Some("hidden_size is 5184")), (152, 2, Some("num_heads is 76"))]
        {
            let checked = has_kernels(&VisionConfig { hidden_size, num_heads, ..tiny.clone() });
            let says = says.map(|says| (says, checked.expect_err("it is refused").to_string()));
            assert!(says.is_none_or(|(words, why)| why.contains(words)), "{hidden_size}");
        }
    }
}
