//! Reading of weights: rows of tensors one after another, as elements of the model or as codes and scales, on all
//! threads.

use std::ops::Range;

use half::bf16;
use kernels::numerics::{Element, ElementType};
use kernels::quant::fp8;
use kernels::weight::{BLOCK, Format, GROUP, Matrix, Order, Parts};
use rayon::prelude::*;

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

/// Bytes that are read of a tensor, those of scales included that belong to its rows.
pub(super) fn bytes(checkpoint: &Checkpoint, spec: &Spec) -> u64 {
    let scales = match &spec.stored {
        Stored::Fp8Block { scale: scales } | Stored::Nvfp4 { scales, .. } => {
            checkpoint.expect(scales).bytes()
        }
        Stored::Plain | Stored::Fp8Tensor { .. } => 0,
    };
    checkpoint.expect(spec).bytes() + scales
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
    specs: std::slice::Iter<'a, Spec>,
    element: ElementType,
    /// What rows become.
    format: Format,
    /// Numbers of a row.
    columns: usize,
    /// Bytes of the parts of a row.
    one: Parts,
    /// Rows that one thread reads at a time.
    together: usize,
    /// The tensor being read and the rows of it that were.
    current: Option<(&'a Spec, usize)>,
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
        specs: &'a [Spec],
        element: ElementType,
        matrix: &Matrix,
        piece_bytes: usize,
    ) -> Reader<'a> {
        let columns = matrix.columns;
        let one = Matrix::plain(1, columns).stored(matrix.format).sizes(Order::Rows, element.bytes());
        let quantised = matrix.format == Format::Fp8 && specs.iter().any(|spec| spec.stored == Stored::Plain);
        let together = match quantised {
            // By whole blocks.
            true => (piece_bytes / one.codes).max(1).next_multiple_of(BLOCK),
            false => (piece_bytes / one.codes).max(1),
        };
        let format = matrix.format;
        Reader { checkpoint, specs: specs.iter(), element, format, columns, one, together, current: None }
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
        let (columns, one) = (self.columns, self.one);
        let start = || (self.specs.next().expect("a weight is as large as its tensors"), 0);
        let (spec, first) = self.current.take().unwrap_or_else(start);
        let rows = spec.shape.iter().product::<usize>() / columns;
        let count = (rows - first).min(into.codes.len() / one.codes).min(self.together);
        let end = first + count;
        self.current = (end < rows).then_some((spec, end));
        let quantise = spec.stored == Stored::Plain && self.format == Format::Fp8;
        Piece { spec, rows: first..end, columns, quantise, into: into.split_off(count, one) }
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
    spec: &'a Spec,
    rows: Range<usize>,
    columns: usize,
    /// Whether they are plain, and become fp8.
    quantise: bool,
    into: Rows<'r>,
}

impl Piece<'_, '_> {
    /// Reads the rows, then what belongs to them. Gives the bytes read.
    fn read(mut self, checkpoint: &Checkpoint, element: ElementType) -> Result<u64, Error> {
        if self.quantise {
            return self.quantise(checkpoint);
        }
        let numbers = match format_of(self.spec) {
            Format::Plain => self.elements(checkpoint, element)?,
            Format::Fp8 | Format::Nvfp4 => self.codes(checkpoint)?,
        };
        Ok(numbers + self.scales(checkpoint)?)
    }

    fn elements(&mut self, checkpoint: &Checkpoint, element: ElementType) -> Result<u64, Error> {
        let dtype = checkpoint.expect(self.spec).dtype;
        let row_bytes = self.columns * dtype.bitsize() / 8;
        let (offset, bytes) = ((self.rows.start * row_bytes) as u64, self.rows.len() * row_bytes);
        let (name, into) = (&self.spec.name, &mut *self.into.codes);
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
        let (rows, columns, spec) = (self.rows, self.columns, self.spec);
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
        let codes = &mut *self.into.codes;
        let row_bytes = codes.len() / self.rows.len();
        checkpoint.read_range(&self.spec.name, (self.rows.start * row_bytes) as u64, codes)?;
        if format_of(self.spec) == Format::Fp8 {
            known_codes(self.spec, self.rows.start * self.columns, codes)?;
        }
        Ok(codes.len() as u64)
    }

    fn scales(&mut self, checkpoint: &Checkpoint) -> Result<u64, Error> {
        let Rows { scales, globals, .. } = &mut self.into;
        match &self.spec.stored {
            Stored::Plain => Ok(0),
            Stored::Fp8Block { scale } => block_scales(checkpoint, scale, self.columns, &self.rows, scales),
            Stored::Fp8Tensor { scale } => {
                fill(scales, single(checkpoint, scale)?);
                Ok(0)
            }
            Stored::Nvfp4 { scales: stored, .. } => {
                let first = self.rows.start * self.columns / GROUP;
                checkpoint.read_range(&stored.name, first as u64, scales)?;
                known_scales(stored, first, scales)?;
                fill(globals, global(checkpoint, self.spec)?);
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
    let begun = end - rows.start.div_ceil(BLOCK);
    Ok((begun * blocks * checkpoint.expect(scale).dtype.bitsize() / 8) as u64)
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
