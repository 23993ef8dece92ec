//! How many patches a picture has, in which direction.

use crate::{Preprocess, Size};

/// Patches of a picture or a video: time pairs, rows and columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Grid {
    /// Groups of frames that share patches; 1 for a still picture.
    pub pairs: u32,
    /// Rows of patches.
    pub height: u32,
    /// Columns of patches.
    pub width: u32,
}

impl Grid {
    /// The grid of a still picture that was resized to `size`.
    pub fn picture(size: Size, settings: &Preprocess) -> Grid {
        Self::video(size, 1, settings)
    }

    /// The grid of `frames` frames that were resized to `size`.
    pub fn video(size: Size, frames: usize, settings: &Preprocess) -> Grid {
        let pairs = frames.div_ceil(settings.frames as usize) as u32;
        Grid { pairs, height: size.height / settings.patch, width: size.width / settings.patch }
    }

    /// All patches.
    pub fn patches(&self) -> usize {
        self.pairs as usize * self.pair_patches()
    }

    /// Patches of one time pair.
    pub fn pair_patches(&self) -> usize {
        self.height as usize * self.width as usize
    }

    /// Rows of the language model: merged squares of `merge` x `merge` patches.
    pub fn rows(&self, merge: u32) -> usize {
        self.patches() / (merge as usize).pow(2)
    }

    /// Row and column of each patch of one time pair, in the order in which patches lie: merged squares row by row, and the
    /// patches of a square row by row. Sides must be multiples of `merge`.
    pub(crate) fn places(self, merge: u32) -> impl Iterator<Item = [u32; 2]> {
        let squares = (0..self.height / merge)
            .flat_map(move |row| (0..self.width / merge).map(move |column| [row * merge, column * merge]));
        squares.flat_map(move |[row, column]| {
            (0..merge).flat_map(move |y| (0..merge).map(move |x| [row + y, column + x]))
        })
    }
}
