//! Reading of weights: rows of tensors one after another, as elements of the model or as codes and scales, on all
//! threads.

use std::ops::Range;

use half::bf16;
use kernels::numerics::{Element, ElementType};
use kernels::quant::fp8;
use kernels::weight::{BLOCK, Format, GROUP, Matrix, Order, Parts};
use rayon::prelude::*;

use super::extract::Extract;
use crate::checkpoint::layout::{Spec, Stored};
use crate::checkpoint::{Checkpoint, Dtype};
use crate::error::{Error, LoadError};

/// The format in which a device holds what is stored like this.
pub(super) fn format_of(spec: &Spec) -> Format {
    match spec.stored {
        Stored::Plain => Format::Plain,
        Stored::Fp8Block { .. } | Stored::Fp8Tensor { .. } => Format::Fp8,
        Stored::Nvfp4 { .. } => Format::Nvfp4,
    }
}

/// Bytes that are read of a tensor, those of scales included that belong to its rows: whole rows, whichever of their
/// columns are wanted.
pub(super) fn bytes(checkpoint: &Checkpoint, extract: &Extract) -> u64 {
    let Extract { spec, rows, .. } = extract;
    let part =
        |of: &Spec, some: usize, all: usize| checkpoint.expect(of).bytes() * some as u64 / all.max(1) as u64;
    let all = spec.shape.iter().product::<usize>() / extract.width();
    let scales = match &spec.stored {
        Stored::Fp8Block { scale } => part(scale, begun(rows), begun(&(0..all))),
        Stored::Nvfp4 { scales, .. } => part(scales, rows.len(), all),
        Stored::Plain | Stored::Fp8Tensor { .. } => 0,
    };
    part(spec, rows.len(), all) + scales
}

/// Blocks that begin in these rows.
fn begun(rows: &Range<usize>) -> usize {
    rows.end.div_ceil(BLOCK) - rows.start.div_ceil(BLOCK)
}

/// What all numbers of a quantised tensor are multiplied by.
pub(crate) fn global(checkpoint: &Checkpoint, spec: &Spec) -> Result<f32, Error> {
    match &spec.stored {
        Stored::Fp8Tensor { scale } => single(checkpoint, scale),
        Stored::Nvfp4 { global, reciprocal, .. } => {
            let value = single(checkpoint, global)?;
            if *reciprocal && value == 0.0 {
                return Err(bad(global, 0, "weights are divided by it, and it is 0".into()));
            }
            Ok(if *reciprocal { 1.0 / value } else { value })
        }
        Stored::Plain | Stored::Fp8Block { .. } => Ok(1.0),
    }
}

/// Reads rows of tensors one after another.
pub(super) struct Reader<'a> {
    checkpoint: &'a Checkpoint,
    extracts: std::slice::Iter<'a, Extract>,
    element: ElementType,
    /// The rows of a matrix of which one becomes what is read.
    row: Matrix,
    /// Rows that one thread reads at a time.
    together: usize,
    /// The tensor being read, and which rows of it are still to read, in rows of the matrix.
    current: Option<(&'a Extract, Range<usize>)>,
}

/// Room for rows, part by part. What is the same for many rows may have none: it is checked all the same.
pub(super) struct Rows<'a> {
    pub(super) codes: &'a mut [u8],
    pub(super) scales: &'a mut [u8],
    pub(super) globals: &'a mut [u8],
}

impl<'a> Reader<'a> {
    /// A reader of the rows of such a matrix, whose elements are of this type; of about so many bytes of them on each
    /// thread at a time.
    pub(super) fn new(
        checkpoint: &'a Checkpoint,
        extracts: &'a [Extract],
        element: ElementType,
        matrix: &Matrix,
        piece_bytes: usize,
    ) -> Reader<'a> {
        let row = Matrix { outputs: 1, groups: 1, cuts: 1, ..*matrix };
        let one = row.sizes(Order::Rows, element.bytes());
        let plain = |extract: &Extract| extract.spec.stored == Stored::Plain;
        let quantised = matrix.format == Format::Fp8 && extracts.iter().any(plain);
        let together = match quantised {
            // By whole blocks.
            true => (piece_bytes / one.codes).max(1).next_multiple_of(BLOCK),
            false => (piece_bytes / one.codes).max(1),
        };
        Reader { checkpoint, extracts: extracts.iter(), element, row, together, current: None }
    }

    /// Reads the next rows, as many as `into` holds, on all threads. Gives the bytes read.
    ///
    /// # Errors
    /// A file cannot be read; or a code or scale is no number, or none that a quantiser makes: which tensor has it,
    /// and where. Of several the first.
    pub(super) fn read(&mut self, mut into: Rows<'_>) -> Result<u64, Error> {
        let mut pieces = Vec::new();
        while !into.codes.is_empty() {
            pieces.push(self.piece(&mut into));
        }
        let (checkpoint, element) = (self.checkpoint, self.element);
        let read = pieces.into_par_iter().map(|piece| piece.read(checkpoint, element));
        read.collect::<Vec<_>>().into_iter().sum()
    }

    /// The next piece, and the room for it.
    fn piece<'r>(&mut self, into: &mut Rows<'r>) -> Piece<'a, 'r> {
        let one = self.row.sizes(Order::Rows, self.element.bytes());
        let (extract, left) = self.current.take().unwrap_or_else(|| {
            let extract = self.extracts.next().expect("a weight is as large as its tensors");
            (extract, self.row.rows_of(extract))
        });
        let count = left.len().min(into.codes.len() / one.codes).min(self.together);
        let end = left.start + count;
        self.current = (end < left.end).then_some((extract, end..left.end));
        let quantise = extract.spec.stored == Stored::Plain && self.row.format == Format::Fp8;
        let rows = left.start..end;
        Piece { extract, rows, row: self.row, quantise, into: into.split_off(count, one) }
    }
}

trait RowsOf {
    fn rows_of(&self, extract: &Extract) -> Range<usize>;
}

impl RowsOf for Matrix {
    /// The rows of an extract, in rows of this one's columns: whole rows of a tensor may be several of them.
    fn rows_of(&self, extract: &Extract) -> Range<usize> {
        let Extract { rows, columns, .. } = extract;
        match columns.len() == self.columns {
            true => rows.clone(),
            false => {
                let width = extract.width();
                debug_assert_eq!(*columns, 0..width, "some columns become a row");
                rows.start * width / self.columns..rows.end * width / self.columns
            }
        }
    }
}

impl<'r> Rows<'r> {
    /// Splits off the first rows.
    fn split_off(&mut self, count: usize, one: Parts) -> Rows<'r> {
        let part = |room: &mut &'r mut [u8], bytes: usize| {
            let bytes = if room.is_empty() { 0 } else { count * bytes };
            room.split_off_mut(..bytes).expect("there is room for all rows")
        };
        Rows {
            codes: part(&mut self.codes, one.codes),
            scales: part(&mut self.scales, one.scales),
            globals: part(&mut self.globals, one.globals),
        }
    }
}

/// Some rows of a tensor, and the room for them.
struct Piece<'a, 'r> {
    extract: &'a Extract,
    rows: Range<usize>,
    /// What a row becomes.
    row: Matrix,
    /// Whether they are plain, and become fp8.
    quantise: bool,
    into: Rows<'r>,
}

impl Piece<'_, '_> {
    /// Reads the rows, then what belongs to them. Gives the bytes read.
    fn read(mut self, checkpoint: &Checkpoint, element: ElementType) -> Result<u64, Error> {
        if self.extract.columns.len() < self.extract.width() {
            return self.narrow(checkpoint, element);
        }
        if self.quantise {
            return self.quantise(checkpoint);
        }
        let numbers = match format_of(&self.extract.spec) {
            Format::Plain => self.elements(checkpoint, element)?,
            Format::Fp8 | Format::Nvfp4 => self.codes(checkpoint)?,
        };
        Ok(numbers + self.scales(checkpoint)?)
    }

    /// Reads whole rows, and keeps the columns that are wanted.
    fn narrow(self, checkpoint: &Checkpoint, element: ElementType) -> Result<u64, Error> {
        let (rows, columns, width) = (self.rows.len(), &self.extract.columns, self.extract.width());
        let whole = Extract { columns: 0..width, ..self.extract.clone() };
        let row = Matrix { columns: width, offset: 0, ..self.row };
        let (all, own) =
            (row.sizes(Order::Rows, element.bytes()), self.row.sizes(Order::Rows, element.bytes()));
        let [mut codes, mut scales, mut globals] =
            [all.codes, all.scales, all.globals].map(|one| vec![0; rows * one]);
        let into = Rows { codes: &mut codes, scales: &mut scales, globals: &mut globals };
        let piece = Piece { extract: &whole, rows: self.rows, row, quantise: self.quantise, into };
        let read = piece.read(checkpoint, element)?;
        let keep = |from: &[u8], one: usize, at: usize, to: &mut [u8], own: usize| {
            if own > 0 {
                let rows = from.chunks_exact(one).zip(to.chunks_exact_mut(own));
                rows.for_each(|(from, to)| to.copy_from_slice(&from[at..][..own]));
            }
        };
        let scales_at = match self.row.format {
            Format::Plain => 0,
            Format::Fp8 => columns.start / BLOCK * 4,
            Format::Nvfp4 => columns.start / GROUP,
        };
        keep(&codes, all.codes, columns.start * all.codes / width, self.into.codes, own.codes);
        keep(&scales, all.scales, scales_at, self.into.scales, own.scales);
        keep(&globals, all.globals, 0, self.into.globals, own.globals);
        Ok(read)
    }

    fn elements(&mut self, checkpoint: &Checkpoint, element: ElementType) -> Result<u64, Error> {
        let spec = &self.extract.spec;
        let dtype = checkpoint.expect(spec).dtype;
        let row_bytes = self.row.columns * dtype.bitsize() / 8;
        let (offset, bytes) = ((self.rows.start * row_bytes) as u64, self.rows.len() * row_bytes);
        let (name, into) = (&spec.name, &mut *self.into.codes);
        match (dtype, element) {
            (Dtype::BF16, ElementType::Bf16) | (Dtype::F32, ElementType::F32) => {
                checkpoint.read_range(name, offset, into)?;
            }
            _ => {
                let mut raw = vec![0; bytes];
                checkpoint.read_range(name, offset, &mut raw)?;
                convert(dtype, &raw, into);
            }
        }
        Ok(bytes as u64)
    }

    /// Quantises the rows in the blocks of the whole tensor: of a block that they are a part of, the others are read too,
    /// and not counted.
    fn quantise(self, checkpoint: &Checkpoint) -> Result<u64, Error> {
        let (rows, columns, spec) = (self.rows, self.row.columns, &self.extract.spec);
        let (from, end) = (rows.start / BLOCK * BLOCK, rows.end.next_multiple_of(BLOCK).min(spec.shape[0]));
        let weights = values(checkpoint, spec, from * columns, (end - from) * columns)?;
        if let Some(at) = weights.iter().position(|weight| !weight.is_finite()) {
            let problem = format!("{} cannot be quantised (--dense fp8)", weights[at]);
            return Err(bad(spec, from * columns + at, problem));
        }
        let blocks = fp8::scales(&weights, columns, fp8::Scale::Bf16);
        let first = rows.start - from;
        let own = &weights[first * columns..][..rows.len() * columns];
        self.into.codes.copy_from_slice(&fp8::codes_from(own, columns, &blocks, first));
        for (row, to) in self.into.scales.chunks_exact_mut(columns.div_ceil(BLOCK) * 4).enumerate() {
            to.copy_from_slice(bytemuck::cast_slice(fp8::scales_of_row(&blocks, columns, first + row)));
        }
        Ok((own.len() * checkpoint.expect(spec).dtype.bitsize() / 8) as u64)
    }

    fn codes(&mut self, checkpoint: &Checkpoint) -> Result<u64, Error> {
        let (codes, spec) = (&mut *self.into.codes, &self.extract.spec);
        let row_bytes = codes.len() / self.rows.len();
        checkpoint.read_range(&spec.name, (self.rows.start * row_bytes) as u64, codes)?;
        if format_of(spec) == Format::Fp8 {
            known_codes(spec, self.rows.start * self.row.columns, codes)?;
        }
        Ok(codes.len() as u64)
    }

    fn scales(&mut self, checkpoint: &Checkpoint) -> Result<u64, Error> {
        let (Rows { scales, globals, .. }, columns, spec) =
            (&mut self.into, self.row.columns, &self.extract.spec);
        match &spec.stored {
            Stored::Plain => Ok(0),
            Stored::Fp8Block { scale } => block_scales(checkpoint, scale, columns, &self.rows, scales),
            Stored::Fp8Tensor { scale } => {
                fill(scales, single(checkpoint, scale)?);
                Ok(0)
            }
            Stored::Nvfp4 { scales: stored, .. } => {
                let first = self.rows.start * columns / GROUP;
                checkpoint.read_range(&stored.name, first as u64, scales)?;
                known_scales(stored, first, scales)?;
                fill(globals, global(checkpoint, spec)?);
                Ok(scales.len() as u64)
            }
        }
    }
}

/// The scales of rows of a tensor in blocks. Gives the bytes of the blocks that begin in these rows, so that each block
/// counts once.
fn block_scales(
    checkpoint: &Checkpoint,
    scale: &Spec,
    columns: usize,
    rows: &Range<usize>,
    to: &mut [u8],
) -> Result<u64, Error> {
    let blocks = columns.div_ceil(BLOCK);
    let (from, end) = (rows.start / BLOCK, rows.end.div_ceil(BLOCK));
    let values = floats(checkpoint, scale, from * blocks, (end - from) * blocks)?;
    for (row, to) in rows.clone().zip(to.chunks_exact_mut(blocks * 4)) {
        let values = &values[(row / BLOCK - from) * blocks..][..blocks];
        to.copy_from_slice(bytemuck::cast_slice(values));
    }
    Ok((begun(rows) * blocks * checkpoint.expect(scale).dtype.bitsize() / 8) as u64)
}

/// A scale that is a single value.
fn single(checkpoint: &Checkpoint, scale: &Spec) -> Result<f32, Error> {
    Ok(floats(checkpoint, scale, 0, 1)?[0])
}

/// Values of a plain tensor.
fn values(checkpoint: &Checkpoint, spec: &Spec, from: usize, count: usize) -> Result<Vec<f32>, Error> {
    let dtype = checkpoint.expect(spec).dtype;
    let bytes = dtype.bitsize() / 8;
    let mut raw = vec![0; count * bytes];
    checkpoint.read_range(&spec.name, (from * bytes) as u64, &mut raw)?;
    let mut values = vec![0f32; count];
    match dtype {
        Dtype::F32 => bytemuck::cast_slice_mut::<_, u8>(&mut values).copy_from_slice(&raw),
        _ => convert(dtype, &raw, bytemuck::cast_slice_mut(&mut values)),
    }
    Ok(values)
}

/// Values of a tensor of scales, which are finite and not negative.
pub(crate) fn floats(
    checkpoint: &Checkpoint,
    spec: &Spec,
    from: usize,
    count: usize,
) -> Result<Vec<f32>, Error> {
    let values = values(checkpoint, spec, from, count)?;
    match values.iter().position(|value| !value.is_finite() || *value < 0.0) {
        None => Ok(values),
        Some(at) => {
            let what = format!("{} is no scale: it must be finite and not negative", values[at]);
            Err(bad(spec, from + at, what))
        }
    }
}

fn fill(to: &mut [u8], value: f32) {
    to.as_chunks_mut().0.iter_mut().for_each(|to| *to = value.to_le_bytes());
}

/// That fp8 codes from number `from` on are numbers.
fn known_codes(spec: &Spec, from: usize, codes: &[u8]) -> Result<(), Error> {
    // All first, which vectorises; then where.
    if !codes.iter().fold(false, |bad, code| bad | (code & 0x7f == 0x7f)) {
        return Ok(());
    }
    let at = codes.iter().position(|code| code & 0x7f == 0x7f).expect("there is one");
    Err(bad(spec, from + at, format!("code {:#04x} is no number", codes[at])))
}

/// That scales of nvfp4 from number `from` on are numbers and not negative.
pub(crate) fn known_scales(spec: &Spec, from: usize, scales: &[u8]) -> Result<(), Error> {
    if !scales.iter().fold(false, |bad, scale| bad | (*scale >= 0x7f)) {
        return Ok(());
    }
    let at = scales.iter().position(|scale| *scale >= 0x7f).expect("there is one");
    let what =
        format!("code {:#04x} is no scale: {GROUP} columns share one that is not negative", scales[at]);
    Err(bad(spec, from + at, what))
}

fn bad(spec: &Spec, at: usize, problem: String) -> Error {
    LoadError::Value { tensor: spec.name.clone(), at, problem }.into()
}

/// Widens stored bf16, or narrows stored f32.
fn convert(stored: Dtype, from: &[u8], to: &mut [u8]) {
    if stored == Dtype::BF16 {
        for (from, to) in from.as_chunks().0.iter().zip(to.as_chunks_mut().0) {
            *to = bf16::from_le_bytes(*from).widen().to_le_bytes();
        }
    } else {
        for (from, to) in from.as_chunks().0.iter().zip(to.as_chunks_mut().0) {
            *to = bf16::narrow(f32::from_le_bytes(*from)).to_le_bytes();
        }
    }
}
