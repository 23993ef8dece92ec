//! Where each patch lies, as the tower's kernels read it. Patches come in the order of [`Patches`](crate::Patches); every
//! time pair repeats the values of one.

use std::ops::Range;

use crate::Grid;

/// Four rows of the position table and their weights: the bilinear mix that belongs to one patch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Taps {
    /// Rows of the table, `y * side + x`: above left, above right, below left, below right.
    pub rows: [u32; 4],
    /// Their weights, which add up to one.
    pub weights: [f32; 4],
}

/// The mix of the position table, which is a square of `side` x `side` rows, for each patch. The corners of the grid are
/// the corners of the table.
pub fn position_taps(grid: Grid, merge: u32, side: u32) -> Vec<Taps> {
    let axis = |length: u32| -> Vec<(u32, u32, f32)> {
        let place = |index: u32| {
            let at = (index * (side - 1)) as f32 / (length - 1).max(1) as f32;
            let low = (at as u32).min(side - 1);
            (low, (low + 1).min(side - 1), at - low as f32)
        };
        (0..length).map(place).collect()
    };
    let (down, right) = (axis(grid.height), axis(grid.width));
    repeated(grid, merge, |[row, column]| {
        let (y0, y1, dy) = down[row as usize];
        let (x0, x1, dx) = right[column as usize];
        Taps {
            rows: [y0 * side + x0, y0 * side + x1, y1 * side + x0, y1 * side + x1],
            weights: [(1.0 - dy) * (1.0 - dx), (1.0 - dy) * dx, dy * (1.0 - dx), dy * dx],
        }
    })
}

/// The rotary angles of each patch, `[patches, head / 2]`: the first half turns with the row, the second with the column.
/// Element `j` of a head pairs with element `j + head / 2`. `head` is a multiple of four.
pub fn rotary_angles(grid: Grid, merge: u32, head: usize) -> Vec<f32> {
    const BASE: f64 = 10_000.0;
    let axis = head / 4;
    let rates: Vec<f32> =
        (0..axis).map(|i| BASE.powf(-(2.0 * i as f64) / (2 * axis) as f64) as f32).collect();
    let angles =
        repeated(grid, merge, |place| place.map(|at| rates.iter().map(move |rate| at as f32 * rate)));
    angles.into_iter().flatten().flatten().collect()
}

/// Row and column of each patch, `[patches, 2]`.
pub fn patch_places(grid: Grid, merge: u32) -> Vec<[u32; 2]> {
    repeated(grid, merge, |place| place)
}

/// The patches that attend to each other: one span for each time pair.
pub fn attention_spans(grid: Grid) -> Vec<Range<usize>> {
    let pair = grid.pair_patches();
    (0..grid.pairs as usize).map(|index| index * pair..(index + 1) * pair).collect()
}

fn repeated<T: Clone>(grid: Grid, merge: u32, of: impl Fn([u32; 2]) -> T) -> Vec<T> {
    let pair: Vec<T> = grid.places(merge).map(of).collect();
    let all = pair.iter().cycle().take(pair.len() * grid.pairs as usize);
    all.cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn corners_meet_and_places_between_are_mixed() {
        let grid = Grid { pairs: 1, height: 30, width: 2 };
        let taps = position_taps(grid, 2, 48);
        assert_eq!(taps[0], Taps { rows: [0, 1, 48, 49], weights: [1.0, 0.0, 0.0, 0.0] });
        // Row 1 of 30 lies at 47 / 29 = 1.62069; column 1 of 2 is the last of the table.
        assert_eq!(taps[3].rows, [48 + 47, 48 + 47, 96 + 47, 96 + 47]);
        let part = taps[3].weights[2];
        assert!((part - 0.62069).abs() < 1e-5, "{part}");
        let last = taps[59];
        assert_eq!((last.rows[0], last.weights[0]), (48 * 48 - 1, 1.0));
        for tap in taps {
            assert!((tap.weights.iter().sum::<f32>() - 1.0).abs() < 1e-6);
            assert!(tap.rows.iter().all(|row| *row < 48 * 48));
        }
        let alone = position_taps(Grid { pairs: 1, height: 1, width: 1 }, 1, 48);
        assert_eq!(alone[0].weights[0], 1.0);
    }

    #[test]
    fn patches_lie_square_by_square() {
        let grid = Grid { pairs: 2, height: 2, width: 4 };
        let pair = [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]];
        assert_eq!(patch_places(grid, 2), [pair, pair].concat());
        assert_eq!(attention_spans(grid), [0..8, 8..16]);
        let angles = rotary_angles(grid, 2, 72);
        assert_eq!(angles.len(), 16 * 36);
        // Patch 7 is row 1, column 3.
        let patch = &angles[7 * 36..8 * 36];
        assert_eq!((patch[0], patch[18]), (1.0, 3.0));
        assert!((f64::from(patch[19]) - 3.0 / 10_000f64.powf(2.0 / 36.0)).abs() < 1e-6);
    }
}
