//! The weights of matrices as a host reads them: row by row, in whatever format.

use std::ops::Range;

use graph::{Fault, Ptr, host::Access};

use super::Columns;
use crate::numerics::Element;
use crate::quant::{fp8, nvfp4};
use crate::tiles::Place;
use crate::weight::{BLOCK, Format, GROUP, Matrix, Order};

/// Rows of weights, of which a product uses columns `from..to`.
#[derive(Clone, Copy)]
pub struct Weights<'a, E> {
    pub(super) stored: Stored<'a, E>,
    /// First row, of all that are stored.
    pub(super) first: usize,
    /// Rows from there on.
    pub(super) rows: usize,
    /// Columns of a row.
    pub(super) inner: usize,
    /// Columns that its first block of fp8 has before it.
    pub(super) offset: usize,
    /// First column used.
    pub(super) from: usize,
    /// End of the columns used.
    pub(super) to: usize,
}

/// All rows, part by part, as [`Parts`](crate::weight::Parts) says.
#[derive(Clone, Copy)]
pub(super) enum Stored<'a, E> {
    Plain(&'a [E]),
    Fp8 { codes: &'a [u8], scales: &'a [f32] },
    Nvfp4 { codes: &'a [u8], scales: &'a [u8], globals: &'a [f32] },
}

impl<'a, E: Element> From<Columns<'a, E>> for Weights<'a, E> {
    fn from(Columns { matrix, inner, from, to }: Columns<'a, E>) -> Self {
        Weights {
            stored: Stored::Plain(matrix),
            first: 0,
            rows: matrix.len() / inner,
            inner,
            offset: 0,
            from,
            to,
        }
    }
}

impl<'a, E: Element> Weights<'a, E> {
    /// The rows of `count` matrices that lie at an address in [`Order::Rows`].
    ///
    /// # Errors
    /// Where the memory does not hold them.
    pub fn read(
        matrix: &Matrix,
        count: usize,
        at: Ptr<u8>,
        memory: &'a Access<'_>,
    ) -> Result<Weights<'a, E>, Fault> {
        let place = Place::new(matrix, count, Order::Rows, size_of::<E>(), at);
        let sizes = matrix.sizes(Order::Rows, size_of::<E>());
        let codes = || memory.read(place.codes, count * sizes.codes);
        let stored = match matrix.format {
            Format::Plain => {
                Stored::Plain(memory.read(place.codes.cast(), count * matrix.elements(Order::Rows))?)
            }
            Format::Fp8 => Stored::Fp8 {
                codes: codes()?,
                scales: memory.read(place.scales.cast(), count * sizes.scales / size_of::<f32>())?,
            },
            Format::Nvfp4 => Stored::Nvfp4 {
                codes: codes()?,
                scales: memory.read(place.scales, count * sizes.scales)?,
                globals: memory.read(place.globals.cast(), count * sizes.globals / size_of::<f32>())?,
            },
        };
        let (rows, inner, offset) = (count * matrix.rows(), matrix.columns, matrix.offset);
        Ok(Weights { stored, first: 0, rows, inner, offset, from: 0, to: inner })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns used.
    pub fn width(&self) -> usize {
        self.to - self.from
    }

    /// Matrix number `index` of those of so many rows.
    pub fn matrix(self, index: usize, rows: usize) -> Self {
        assert!((index + 1) * rows <= self.rows, "matrix {index} of {rows} rows, in {} rows", self.rows);
        Weights { first: self.first + index * rows, rows, ..self }
    }

    /// Columns `from..to` of each row.
    pub fn columns(self, from: usize, to: usize) -> Self {
        assert!(from <= to && to <= self.inner, "columns {from}..{to} of {}", self.inner);
        Weights { from, to, ..self }
    }

    /// The used columns of some rows in f32, one row after another.
    pub fn decode(&self, rows: Range<usize>, to: &mut Vec<f32>) {
        to.clear();
        let mut whole = Vec::new();
        for row in rows {
            let row = self.first + row;
            match self.stored {
                Stored::Plain(elements) => {
                    let elements = &elements[row * self.inner..][self.from..self.to];
                    to.extend(elements.iter().map(|x| x.widen()));
                }
                Stored::Fp8 { codes, scales } => {
                    let blocks = (self.offset + self.inner).div_ceil(BLOCK);
                    let (codes, scales) = (&codes[row * self.inner..], &scales[row * blocks..]);
                    let mut from = self.from;
                    while from < self.to {
                        let block = (self.offset + from) / BLOCK;
                        let end = ((block + 1) * BLOCK - self.offset).min(self.to);
                        whole.resize(end - from, 0.0);
                        fp8::decode_row(&codes[from..end], &scales[block..=block], &mut whole);
                        to.extend(&whole);
                        from = end;
                    }
                }
                Stored::Nvfp4 { codes, scales, globals } => {
                    let used = self.from / GROUP * GROUP..self.to.next_multiple_of(GROUP).min(self.inner);
                    let codes = &codes[row * self.inner / 2..][used.start / 2..used.end / 2];
                    let scales = &scales[row * self.inner / GROUP..][used.start / GROUP..used.end / GROUP];
                    whole.resize(used.len(), 0.0);
                    nvfp4::decode_row(codes, scales, globals[row], &mut whole);
                    to.extend(&whole[self.from % GROUP..][..self.width()]);
                }
            }
        }
    }
}
