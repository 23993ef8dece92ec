//! Some of a tensor: what is read of it.

use std::ops::Range;

use crate::checkpoint::layout::Spec;

/// Some rows of a tensor, of some columns each. A row is what its last dimension says; a list has rows of one.
#[derive(Clone, Debug)]
pub(super) struct Extract {
    /// The tensor.
    pub(super) spec: Spec,
    /// Which of its rows.
    pub(super) rows: Range<usize>,
    /// Which columns of them.
    pub(super) columns: Range<usize>,
}

impl Extract {
    /// Some whole rows.
    pub(super) fn rows(spec: &Spec, rows: Range<usize>) -> Extract {
        Extract { spec: spec.clone(), rows, columns: 0..width(spec) }
    }

    /// Some columns of all rows.
    pub(super) fn columns(spec: &Spec, columns: Range<usize>) -> Extract {
        Extract { columns, ..Extract::from(spec) }
    }

    /// Columns of a whole row.
    pub(super) fn width(&self) -> usize {
        width(&self.spec)
    }

    /// How many numbers it has.
    pub(super) fn elements(&self) -> usize {
        self.rows.len() * self.columns.len()
    }
}

/// All of a tensor.
impl From<&Spec> for Extract {
    fn from(spec: &Spec) -> Extract {
        let rows = spec.shape.iter().product::<usize>() / width(spec);
        Extract::rows(spec, 0..rows)
    }
}

fn width(spec: &Spec) -> usize {
    match spec.shape[..] {
        [.., _, width] => width,
        _ => 1,
    }
}
