//! Reading of weights: tensors one after another, as elements of the model or as codes and scales.

use half::bf16;
use kernels::numerics::{Element, ElementType};
use kernels::quant::fp8;
use kernels::weight::{BLOCK, Format, GROUP, Matrix, Order};

use crate::checkpoint::layout::{Spec, Stored};
use crate::checkpoint::{Checkpoint, Dtype};
use crate::error::{Error, LoadError};

/// Bytes read from a file at a time.
const READ_BYTES: usize = 4 << 20;

/// The format in which a device holds what is stored like this.
pub(super) fn format_of(spec: &Spec) -> Format {
    match spec.stored {
        Stored::Plain => Format::Plain,
        Stored::Fp8Block { .. } | Stored::Fp8Tensor { .. } => Format::Fp8,
        Stored::Nvfp4 { .. } => Format::Nvfp4,
    }
}

/// Reads tensors one after another.
pub(super) struct Reader<'a> {
    checkpoint: &'a Checkpoint,
    specs: std::slice::Iter<'a, Spec>,
    element: ElementType,
    /// The tensor being read and the numbers of it that were.
    current: Option<(&'a Spec, usize)>,
}

/// Room for rows of a matrix, part by part.
pub(super) struct Rows<'a> {
    pub(super) codes: &'a mut [u8],
    pub(super) scales: &'a mut [u8],
    pub(super) globals: &'a mut [u8],
}

impl<'a> Reader<'a> {
    /// A reader whose elements are of this type.
    pub(super) fn new(checkpoint: &'a Checkpoint, specs: &'a [Spec], element: ElementType) -> Reader<'a> {
        Reader { checkpoint, specs: specs.iter(), element, current: None }
    }

    /// Reads the next elements, as many as `into` holds. `told` is told the bytes read.
    pub(super) fn elements(&mut self, mut into: &mut [u8], told: &mut dyn FnMut(u64)) -> Result<(), Error> {
        while !into.is_empty() {
            let (spec, from) = self.next();
            let stored = self.dtype(spec).bitsize() / 8;
            let left = (numbers(spec) - from).min(READ_BYTES / stored);
            let count = left.min(into.len() / self.element.bytes());
            let (now, later) = into.split_at_mut(count * self.element.bytes());
            let offset = (from * stored) as u64;
            match (self.dtype(spec), self.element) {
                (Dtype::BF16, ElementType::Bf16) | (Dtype::F32, ElementType::F32) => {
                    self.checkpoint.read_range(&spec.name, offset, now)?;
                }
                (dtype, _) => {
                    let mut raw = vec![0; count * stored];
                    self.checkpoint.read_range(&spec.name, offset, &mut raw)?;
                    convert(dtype, &raw, now);
                }
            }
            told((count * stored) as u64);
            self.advance(spec, from + count);
            into = later;
        }
        Ok(())
    }

    /// Reads the next rows, as many as `into` holds of a matrix of this format and so many columns.
    ///
    /// # Errors
    /// A code or scale that is no number, or that no quantiser makes: which tensor has it, and where.
    pub(super) fn rows(
        &mut self,
        format: Format,
        columns: usize,
        into: Rows<'_>,
        told: &mut dyn FnMut(u64),
    ) -> Result<(), Error> {
        let Rows { codes, scales, globals } = into;
        if format == Format::Plain {
            return self.elements(codes, told);
        }
        let one = Matrix::plain(1, columns).stored(format).sizes(Order::Rows, 0);
        let rows = codes.len() / one.codes;
        let mut done = 0;
        while done < rows {
            let (spec, from) = self.next();
            let first = from / columns;
            let count = (numbers(spec) / columns - first).min(rows - done);
            let codes = &mut codes[done * one.codes..][..count * one.codes];
            let scales = &mut scales[done * one.scales..][..count * one.scales];
            if spec.stored != Stored::Plain {
                self.checkpoint.read_range(&spec.name, (first * one.codes) as u64, codes)?;
                told(codes.len() as u64);
            }
            match &spec.stored {
                Stored::Plain => told(self.quantise(spec, columns, first, codes, scales)?),
                Stored::Fp8Block { scale } => {
                    known_codes(spec, first * columns, codes)?;
                    self.block_scales(scale, columns, first, scales)?;
                }
                Stored::Fp8Tensor { scale } => {
                    known_codes(spec, first * columns, codes)?;
                    fill(scales, self.single(scale)?);
                }
                Stored::Nvfp4 { scales: stored, .. } => {
                    self.checkpoint.read_range(&stored.name, (first * one.scales) as u64, scales)?;
                    known_scales(stored, first * one.scales, scales)?;
                    fill(&mut globals[done * one.globals..][..count * one.globals], self.global(spec)?);
                }
            }
            self.advance(spec, from + count * columns);
            done += count;
        }
        Ok(())
    }

    /// What all numbers of a quantised tensor are multiplied by.
    pub(super) fn global(&self, spec: &Spec) -> Result<f32, Error> {
        match &spec.stored {
            Stored::Fp8Tensor { scale } => self.single(scale),
            Stored::Nvfp4 { global, reciprocal, .. } => {
                let value = self.single(global)?;
                if *reciprocal && value == 0.0 {
                    return Err(bad(global, 0, "weights are divided by it, and it is 0".into()));
                }
                Ok(if *reciprocal { 1.0 / value } else { value })
            }
            Stored::Plain | Stored::Fp8Block { .. } => Ok(1.0),
        }
    }

    /// Quantises rows `first ..` of a plain tensor to fp8, in the blocks of the whole tensor. Gives the bytes read of
    /// these rows: of a block that is cut by a run of rows, the others are read too.
    fn quantise(
        &self,
        spec: &Spec,
        columns: usize,
        first: usize,
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Result<u64, Error> {
        let rows = codes.len() / columns;
        let (from, end) = (first / BLOCK * BLOCK, (first + rows).next_multiple_of(BLOCK).min(spec.shape[0]));
        let weights = self.floats_of(spec, from * columns, (end - from) * columns)?;
        if let Some(at) = weights.iter().position(|weight| !weight.is_finite()) {
            let problem = format!("{} cannot be quantised (--dense fp8)", weights[at]);
            return Err(bad(spec, from * columns + at, problem));
        }
        let blocks = fp8::scales(&weights, columns, fp8::Scale::Bf16);
        let own = &weights[(first - from) * columns..][..codes.len()];
        let per_row = columns.div_ceil(BLOCK);
        for (row, to) in scales.chunks_exact_mut(per_row * 4).enumerate() {
            let scales = fp8::scales_of_row(&blocks, columns, first - from + row);
            to.copy_from_slice(bytemuck::cast_slice(scales));
        }
        codes.copy_from_slice(&fp8::codes_from(own, columns, &blocks, first - from));
        Ok((codes.len() * (self.dtype(spec).bitsize() / 8)) as u64)
    }

    /// The scales of rows `first ..` of a tensor in blocks.
    fn block_scales(&self, scale: &Spec, columns: usize, first: usize, to: &mut [u8]) -> Result<(), Error> {
        let blocks = columns.div_ceil(BLOCK);
        let rows = to.len() / (blocks * 4);
        let (from, end) = (first / BLOCK, (first + rows).div_ceil(BLOCK));
        let values = self.floats(scale, from * blocks, (end - from) * blocks)?;
        for (row, to) in to.chunks_exact_mut(blocks * 4).enumerate() {
            let values = &values[((first + row) / BLOCK - from) * blocks..][..blocks];
            to.copy_from_slice(bytemuck::cast_slice(values));
        }
        Ok(())
    }

    /// A scale that is a single value.
    fn single(&self, scale: &Spec) -> Result<f32, Error> {
        Ok(self.floats(scale, 0, 1)?[0])
    }

    /// Values of a plain tensor.
    fn floats_of(&self, spec: &Spec, from: usize, count: usize) -> Result<Vec<f32>, Error> {
        let dtype = self.dtype(spec);
        let bytes = dtype.bitsize() / 8;
        let mut raw = vec![0; count * bytes];
        self.checkpoint.read_range(&spec.name, (from * bytes) as u64, &mut raw)?;
        let mut values = vec![0f32; count];
        match dtype {
            Dtype::F32 => bytemuck::cast_slice_mut::<_, u8>(&mut values).copy_from_slice(&raw),
            _ => convert(dtype, &raw, bytemuck::cast_slice_mut(&mut values)),
        }
        Ok(values)
    }

    /// Values of a tensor of scales, which are finite and not negative.
    fn floats(&self, spec: &Spec, from: usize, count: usize) -> Result<Vec<f32>, Error> {
        let values = self.floats_of(spec, from, count)?;
        match values.iter().position(|value| !value.is_finite() || *value < 0.0) {
            None => Ok(values),
            Some(at) => {
                let what = format!("{} is no scale: it must be finite and not negative", values[at]);
                Err(bad(spec, from + at, what))
            }
        }
    }

    fn dtype(&self, spec: &Spec) -> Dtype {
        self.checkpoint.expect(spec).dtype
    }

    fn next(&mut self) -> (&'a Spec, usize) {
        self.current
            .take()
            .unwrap_or_else(|| (self.specs.next().expect("a weight is as large as its tensors"), 0))
    }

    fn advance(&mut self, spec: &'a Spec, to: usize) {
        self.current = (to < numbers(spec)).then_some((spec, to));
    }
}

/// Numbers of a tensor.
fn numbers(spec: &Spec) -> usize {
    spec.shape.iter().product()
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
fn known_scales(spec: &Spec, from: usize, scales: &[u8]) -> Result<(), Error> {
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
