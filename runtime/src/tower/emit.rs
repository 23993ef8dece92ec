//! The launches of each step of an encoding. They depend on sizes alone, never on pixels.

use std::ops::Range;

use graph::{Emission, Ptr, Result};
use kernels::numerics::ElementType;
use kernels::{affine, launch, layer_norm, patch, pixels, span};

use super::{Run, Stage, Step, TowerBuffers, patch_bytes};
use crate::config::VisionConfig;
use crate::weights::{AffineWeights, NormWeights, TowerWeights};

/// Epsilon of the tower's norms.
const EPS: f32 = 1e-6;

/// A tower: what all its launches depend on.
pub(super) struct Body {
    pub(super) config: VisionConfig,
    pub(super) element: ElementType,
    pub(super) weights: TowerWeights,
    pub(super) buffers: TowerBuffers,
}

/// And what those of an encoding depend on.
pub(super) struct Emit<'a> {
    pub(super) body: &'a Body,
    pub(super) runs: &'a [Run],
    pub(super) features: Ptr<u8>,
}

/// A piece's rows of a run.
struct Part<'a> {
    run: &'a Run,
    rows: Range<usize>,
}

impl Part<'_> {
    fn patches(&self, config: &VisionConfig) -> patch::Patches {
        patch::Patches {
            first: (self.rows.start - self.run.rows.start) as u32,
            rows: self.rows.len() as u32,
            height: self.run.height,
            width: self.run.width,
            merge: config.spatial_merge_size as u32,
            zero: 0,
        }
    }
}

impl Emit<'_> {
    /// A step.
    pub(super) fn step(&self, step: &Step) -> Result<Emission> {
        match step.stage {
            Stage::Embed => self.embed(&step.rows),
            Stage::Project(block) => self.project(block, &step.rows),
            Stage::Attend(block) => self.attend(block, &step.rows),
            Stage::Merge => self.merge(&step.rows),
        }
    }

    /// From the bytes of a piece's patches to its rows.
    fn embed(&self, rows: &Range<usize>) -> Result<Emission> {
        let (c, b, w, patch) =
            (&self.body.config, &self.body.buffers, &self.body.weights, patch_bytes(&self.body.config));
        let mut e = Emission::new();
        let args = pixels::Args { bytes: b.attended, y: b.inner, count: (rows.len() * patch) as u64 };
        launch!(e, self.body.element, pixels::Pixels, &args)?;
        let args =
            self.affine(&w.patch, b.inner, self.row(b.rows, rows.start), rows.len(), (patch, c.hidden_size));
        launch!(e, self.body.element, affine::Affine, &args)?;
        for part in self.parts(rows) {
            let args = patch::PositionArgs {
                patches: part.patches(c),
                x: self.row(b.rows, part.rows.start),
                table: w.positions,
                side: c.num_position_embeddings.isqrt() as u32,
                hidden: c.hidden_size as u32,
            };
            launch!(e, self.body.element, patch::AddPositions, &args)?;
        }
        Ok(e)
    }

    /// A piece's queries, keys and values for a block.
    fn project(&self, block: usize, rows: &Range<usize>) -> Result<Emission> {
        let (c, b, w) = (&self.body.config, &self.body.buffers, &self.body.weights.blocks[block]);
        let (hidden, stacked) = (c.hidden_size, self.elements(b.stacked, 3 * rows.start * c.hidden_size));
        let mut e = Emission::new();
        launch!(e, self.body.element, layer_norm::LayerNorm, &self.norm(&w.norm1, rows))?;
        let args = self.affine(&w.qkv, b.normed, stacked, rows.len(), (hidden, 3 * hidden));
        launch!(e, self.body.element, affine::Affine, &args)?;
        for part in self.parts(rows) {
            let args = patch::TurnArgs {
                patches: part.patches(c),
                x: self.elements(b.stacked, 3 * part.rows.start * hidden),
                frequencies: self.body.weights.frequencies.cast(),
                heads: c.num_heads as u32,
                width: (hidden / c.num_heads) as u32,
                stride: 3 * hidden as u32,
                zero: 0,
            };
            launch!(e, self.body.element, patch::TurnPatches, &args)?;
        }
        Ok(e)
    }

    /// The rest of a block for a piece, once all pieces have queries, keys and values.
    fn attend(&self, block: usize, rows: &Range<usize>) -> Result<Emission> {
        let (c, b, w) = (&self.body.config, &self.body.buffers, &self.body.weights.blocks[block]);
        let (hidden, inner, x) = (c.hidden_size, c.intermediate_size, self.row(b.rows, rows.start));
        let mut e = Emission::new();
        for part in self.parts(rows) {
            let args = span::Args {
                x: self.elements(b.stacked, 3 * part.run.rows.start * hidden),
                out: self.row(b.attended, part.rows.start - rows.start),
                total: part.run.rows.len() as u32,
                span: part.run.height * part.run.width,
                first: (part.rows.start - part.run.rows.start) as u32,
                rows: part.rows.len() as u32,
                heads: c.num_heads as u32,
                width: (hidden / c.num_heads) as u32,
            };
            launch!(e, self.body.element, span::AttendSpan, &args)?;
        }
        let args = self.affine(&w.proj, b.attended, x, rows.len(), (hidden, hidden));
        launch!(e, self.body.element, affine::AffineAdd, &args)?;
        launch!(e, self.body.element, layer_norm::LayerNorm, &self.norm(&w.norm2, rows))?;
        let args = self.affine(&w.up, b.normed, b.inner, rows.len(), (hidden, inner));
        launch!(e, self.body.element, affine::AffineTanh, &args)?;
        let args = self.affine(&w.down, b.inner, x, rows.len(), (inner, hidden));
        launch!(e, self.body.element, affine::AffineAdd, &args)?;
        Ok(e)
    }

    /// From a piece's rows to its features: the rows of a square side by side are one.
    fn merge(&self, rows: &Range<usize>) -> Result<Emission> {
        let (c, b, w) = (&self.body.config, &self.body.buffers, &self.body.weights);
        let square = c.spatial_merge_size * c.spatial_merge_size;
        let (first, tokens, merged) = (rows.start / square, rows.len() / square, c.merged_width());
        let mut e = Emission::new();
        launch!(e, self.body.element, layer_norm::LayerNorm, &self.norm(&w.norm, rows))?;
        let args = self.affine(&w.merge_up, b.normed, b.inner, tokens, (merged, merged));
        launch!(e, self.body.element, affine::AffineErf, &args)?;
        let features = self.elements(self.features, first * c.out_hidden_size);
        let args = self.affine(&w.merge_down, b.inner, features, tokens, (merged, c.out_hidden_size));
        launch!(e, self.body.element, affine::Affine, &args)?;
        Ok(e)
    }

    /// A norm of a piece's rows.
    fn norm(&self, w: &NormWeights<Ptr<u8>>, rows: &Range<usize>) -> layer_norm::Args {
        layer_norm::Args {
            x: self.row(self.body.buffers.rows, rows.start),
            gain: w.gain,
            bias: w.bias,
            y: self.body.buffers.normed,
            rows: rows.len() as u32,
            width: self.body.config.hidden_size as u32,
            eps: EPS,
            zero: 0,
        }
    }

    fn affine(
        &self,
        w: &AffineWeights<Ptr<u8>>,
        x: Ptr<u8>,
        y: Ptr<u8>,
        rows: usize,
        (inner, outputs): (usize, usize),
    ) -> affine::Args {
        let [rows, inner, outputs] = [rows, inner, outputs].map(|size| size as u32);
        affine::Args { x, w: w.matrix, bias: w.bias, y, rows, inner, outputs, zero: 0 }
    }

    /// The runs that a piece's rows belong to, each with its share of them.
    fn parts(&self, rows: &Range<usize>) -> impl Iterator<Item = Part<'_>> {
        let (start, end) = (rows.start, rows.end);
        let part = move |run: &'_ Run| run.rows.start.max(start)..run.rows.end.min(end);
        let parts = self.runs.iter().map(move |run| Part { run, rows: part(run) });
        parts.filter(|part| !part.rows.is_empty())
    }

    /// A row of the tower's width.
    fn row(&self, base: Ptr<u8>, row: usize) -> Ptr<u8> {
        self.elements(base, row * self.body.config.hidden_size)
    }

    fn elements(&self, base: Ptr<u8>, count: usize) -> Ptr<u8> {
        base.byte_add(count * self.body.element.bytes())
    }
}
