//! Pixels in the order in which the tower reads them.

use rayon::prelude::*;

use crate::size::picture_size;
use crate::{Grid, Picture, PictureError, Preprocess, Size, resize};

/// The patches of a picture or a video, as bytes; the tower makes [`normal`] values of them.
///
/// `bytes` is `[grid.patches(), 3, frames, patch, patch]`: colour, frame, row, column. Patches lie pair by pair; within a
/// pair, merged squares row by row; within a square, row by row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Patches {
    /// Patches in each direction.
    pub grid: Grid,
    /// The values.
    pub bytes: Vec<u8>,
}

/// Resizes a picture as the settings say and cuts it into patches.
pub fn picture_patches(picture: &Picture, settings: &Preprocess) -> Result<Patches, PictureError> {
    let size = picture_size(Size { width: picture.width(), height: picture.height() }, settings)?;
    let frame = resize(picture, size);
    let grid = Grid::picture(size, settings);
    let mut bytes = vec![0; grid.patches() * settings.patch_values()];
    let frames = vec![&frame; settings.frames as usize];
    cut(&frames, grid, settings, &mut bytes);
    Ok(Patches { grid, bytes })
}

/// The value that the tower computes with: -1 for black, 1 for white.
pub fn normal(byte: u8) -> f32 {
    (f32::from(byte) - 127.5) / 127.5
}

/// Cuts the frames of one time pair into its patches.
pub(crate) fn cut(frames: &[&Picture], grid: Grid, settings: &Preprocess, out: &mut [u8]) {
    let edge = settings.patch as usize;
    let square = edge * edge;
    let places: Vec<[u32; 2]> = grid.places(settings.merge).collect();
    out.par_chunks_exact_mut(settings.patch_values()).zip(places).with_min_len(64).for_each(
        |(patch, [row, column])| {
            for (colour, patch) in patch.chunks_exact_mut(frames.len() * square).enumerate() {
                for (slot, frame) in frames.iter().enumerate() {
                    if slot > 0 && std::ptr::eq(*frame, frames[slot - 1]) {
                        patch.copy_within((slot - 1) * square..slot * square, slot * square);
                        continue;
                    }
                    let lines = patch[slot * square..][..square].chunks_exact_mut(edge).enumerate();
                    for (y, line) in lines {
                        let at = (row as usize * edge + y) * frame.width() as usize + column as usize * edge;
                        let pixels = frame.rgb()[3 * at..][..3 * edge].as_chunks::<3>().0;
                        for (value, pixel) in line.iter_mut().zip(pixels) {
                            *value = pixel[colour];
                        }
                    }
                }
            }
        },
    );
}
