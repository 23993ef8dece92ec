//! A slot's rows in one launch, checked once, and the pages their positions fall in.

use std::ops::Range;

use graph::{Fault, host::Access};

use crate::state::{RowRange, runs};
use crate::table::Fact;

/// The covered rows of one slot: consecutive rows at consecutive positions.
pub(crate) struct Run<'a> {
    /// The slot.
    pub(crate) slot: u32,
    /// The number of the first covered row.
    pub(crate) row: usize,
    /// The facts of the covered rows.
    pub(crate) facts: &'a [Fact],
    /// Their positions.
    pub(crate) positions: Range<usize>,
}

impl<'a> Run<'a> {
    /// The runs of a launch, in order.
    ///
    /// # Errors
    /// Facts that do not describe consecutive rows of a slot.
    pub(crate) fn all(rows: RowRange, memory: &'a Access<'_>) -> Result<Vec<Run<'a>>, Fault> {
        let mut row = rows.start();
        let run = |facts: &'a [Fact]| {
            let first = facts[0];
            for (i, fact) in facts.iter().enumerate() {
                let place = first.place as usize + i;
                let follows = fact.place as usize == place
                    && fact.position as usize == first.position as usize + i
                    && fact.first as usize + place == row + i
                    && fact.position >= fact.place;
                if !follows {
                    let why = format!("row {} does not follow the first row of its slot: {fact:?}", row + i);
                    return Err(memory.domain(why));
                }
            }
            let start = first.position as usize;
            let run = Run { slot: first.slot, row, facts, positions: start..start + facts.len() };
            row += facts.len();
            Ok(run)
        };
        runs(rows.read(memory)?).map(run).collect()
    }
}

/// Cuts `range` at the multiples of `size`.
pub(crate) fn pieces(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        (at < range.end).then(|| {
            let piece = at..((at / size + 1) * size).min(range.end);
            at = piece.end;
            piece
        })
    })
}

#[cfg(test)]
mod tests {
    use super::pieces;

    #[test]
    fn pieces_end_at_multiples_and_at_the_end() {
        let cut = |range| pieces(range, 4).collect::<Vec<_>>();
        assert_eq!(cut(3..9), [3..4, 4..8, 8..9]);
        assert_eq!(cut(4..12), [4..8, 8..12]);
        assert_eq!(cut(5..5), []);
    }
}
