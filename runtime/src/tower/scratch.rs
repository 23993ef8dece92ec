//! The buffers of the vision tower, at addresses that never move.

use graph::{Ptr, Region};
use kernels::numerics::ElementType;

use super::patch_bytes;
use crate::config::VisionConfig;
use crate::place::Place;

/// How much a tower encodes at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TowerLimits {
    /// Patches of all pictures of an encoding: attention needs every row of a picture, so the largest picture too.
    pub patches: usize,
    /// Patches that one step takes through everything but attention.
    pub piece: usize,
}

impl TowerLimits {
    /// The most of a picture that the model's own preprocessing makes: 16,777,216 pixels in patches of 16 by 16.
    pub const LARGEST: TowerLimits = TowerLimits::of(65_536);

    /// Rows of a piece: a picture of 1088 by 1920 pixels in one go.
    const PIECE: usize = 8192;
    /// The same on the host device, which is slower by as much.
    const HOST_PIECE: usize = 64;

    /// Buffers for so many patches.
    pub const fn of(patches: usize) -> TowerLimits {
        let piece = if patches < Self::PIECE { patches } else { Self::PIECE };
        TowerLimits { patches, piece }
    }

    /// The same with pieces that others wait for on a device of this place.
    pub(crate) fn at(place: Place, patches: usize) -> TowerLimits {
        let limits = TowerLimits::of(patches);
        match place {
            Place::Host => TowerLimits { piece: limits.piece.min(Self::HOST_PIECE), ..limits },
            Place::Cuda(_) => limits,
        }
    }

    /// The same in whole squares of patches, at least one.
    pub(crate) fn whole_squares(self, config: &VisionConfig) -> TowerLimits {
        let square = config.spatial_merge_size * config.spatial_merge_size;
        let patches = (self.patches / square).max(1) * square;
        TowerLimits { patches, piece: (self.piece / square).max(1).min(patches / square) * square }
    }
}

/// The buffers of a tower, by address. All hold `[rows, ...]` elements, `patches` rows or those of a piece.
#[derive(Clone, Debug)]
pub struct TowerBuffers {
    /// The residual rows, `[patches, width]`.
    pub rows: Ptr<u8>,
    /// Queries, keys and values, `[patches, 3 * width]`.
    pub stacked: Ptr<u8>,
    /// Normed rows, `[piece, width]`.
    pub normed: Ptr<u8>,
    /// What attention makes, `[piece, width]`; before that, the bytes of a piece's patches.
    pub attended: Ptr<u8>,
    /// Inside of an MLP, `[piece, inner width]`; before that, the pixels of a piece as elements.
    pub inner: Ptr<u8>,
}

impl TowerBuffers {
    /// Size of all buffers in bytes.
    pub fn bytes(config: &VisionConfig, element: ElementType, limits: TowerLimits) -> usize {
        Self::carve(config, element, limits.whole_squares(config), Ptr::NULL).1
    }

    /// Size in bytes of the pinned memory that patches come through.
    pub fn pinned_bytes(config: &VisionConfig, limits: TowerLimits) -> usize {
        graph::staging::DEPTH * limits.whole_squares(config).piece * patch_bytes(config)
    }

    pub(super) fn new(
        config: &VisionConfig,
        element: ElementType,
        limits: TowerLimits,
        base: Ptr<u8>,
    ) -> TowerBuffers {
        Self::carve(config, element, limits, base).0
    }

    fn carve(
        c: &VisionConfig,
        element: ElementType,
        limits: TowerLimits,
        base: Ptr<u8>,
    ) -> (TowerBuffers, usize) {
        let (bytes, patch) = (element.bytes(), patch_bytes(c));
        let mut region = Region::new();
        let mut add = |label: &str, rows: usize, row: usize| region.add(label, rows * row).at::<u8>(base);
        let buffers = TowerBuffers {
            rows: add("rows", limits.patches, c.hidden_size * bytes),
            stacked: add("stacked", limits.patches, 3 * c.hidden_size * bytes),
            normed: add("normed", limits.piece, c.hidden_size * bytes),
            attended: add("attended", limits.piece, (c.hidden_size * bytes).max(patch)),
            // The merger's inner rows are as wide as a square of patches.
            inner: add("inner", limits.piece, c.intermediate_size.max(patch).max(c.hidden_size) * bytes),
        };
        (buffers, region.bytes())
    }
}
