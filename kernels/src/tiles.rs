//! The packing of weight matrices into tiles, the order in which a CUDA device reads them ([`crate::weight`]).

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};

use crate::numerics::Element;
use crate::source;
use crate::weight::{BLOCK, Format, GROUP, Matrix, Order, Plain, TILE, UNIT, WeightFormat, named};

/// Packs matrices, or runs of their outputs, into tiles.
///
/// ```text
/// to[tile][unit][...] = from[group][output][column]
///     row of the tile   row = g + 8 * upper, g = lane / 4        group = row / n, output = tile * n + row % n
///     column            of the unit's cut: 64 * unit + 16 * (lane % 4) + 4 * j + c
/// ```
/// with n outputs of a group per tile, lane below 32, j and c below 4, upper below 2; zero where there is no such
/// element. Where it goes in the unit:
/// ```text
/// plain   [j][lane][e]: e = 4 * (c / 2) + 2 * upper + c % 2
/// fp8     [j / 2][lane][byte]: byte = 8 * (j % 2) + 4 * (c / 2) + 2 * (c % 2) + 1 - upper
///         scales[tile][unit][upper]: of the first row there is
/// nvfp4   [lane][word j]: in half c % 2 of the word, by (c / 2, upper): sign and magnitude in bits
///         (0, 0) 15, 8..6    (0, 1) 12, 5..3    (1, 0) 13, 2..0    (1, 1) 14, 11..9
///         scales[tile][unit][lane][upper]: the e4m3 scale as five bits of exponent and three of mantissa, without
///         subnormals: 1.m * 2^(e - 9); where a scale is zero, codes are zero
///         globals[tile][row]: 128 times the row's number, which makes up for how codes are read
/// ```
/// Shapes     from and to: `count` matrices, each part as [`Parts`](crate::weight::Parts) says; a part that the format
///            lacks is null
/// Domain     nvfp4 scales are positive or zero; fp8 scales are alike in the eight rows of a half tile
/// Effects    writes all of to
/// Source     the operand registers of `mma.m16n8k16`, columns permuted so that a lane owns 16 in a row
pub struct Pack<E, F = Plain>(PhantomData<(E, F)>);

/// The parts of matrices in memory, by address.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Place {
    /// Codes, or elements.
    pub codes: Ptr<u8>,
    /// Scales, or null.
    pub scales: Ptr<u8>,
    /// Globals, or null.
    pub globals: Ptr<u8>,
}

/// Arguments of [`Pack`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Args {
    /// from.
    pub from: Place,
    /// to.
    pub to: Place,
    /// Outputs of a group.
    pub outputs: u32,
    /// Groups.
    pub groups: u32,
    /// Columns.
    pub columns: u32,
    /// Cuts of the columns.
    pub cuts: u32,
    /// Number of matrices.
    pub count: u32,
    /// Columns that the first block of fp8 has before the first.
    pub offset: u32,
}

impl Place {
    /// The parts of `count` matrices at `base`.
    pub fn new(matrix: &Matrix, count: usize, order: Order, element_bytes: usize, base: Ptr<u8>) -> Place {
        let (parts, _) = matrix.parts(count, order, element_bytes);
        let sizes = matrix.sizes(order, element_bytes);
        let at = |offset: usize, bytes: usize| if bytes == 0 { Ptr::NULL } else { base.byte_add(offset) };
        Place {
            codes: base,
            scales: at(parts.scales, sizes.scales),
            globals: at(parts.globals, sizes.globals),
        }
    }

    /// The parts from matrix number `index` and tile or row `first` of it on.
    pub fn from(
        self,
        matrix: &Matrix,
        order: Order,
        element_bytes: usize,
        index: usize,
        first: usize,
    ) -> Place {
        let Matrix { outputs, groups, .. } = *matrix;
        let one = matrix.sizes(order, element_bytes);
        let ahead = Matrix { outputs: first, ..*matrix }.sizes(order, element_bytes);
        debug_assert!(first == 0 || groups == 1 && first <= outputs);
        let at = |ptr: Ptr<u8>, one: usize, ahead: usize| {
            if ptr.is_null() { ptr } else { ptr.byte_add(index * one + ahead) }
        };
        Place {
            codes: at(self.codes, one.codes, ahead.codes),
            scales: at(self.scales, one.scales, ahead.scales),
            globals: at(self.globals, one.globals, ahead.globals),
        }
    }
}

impl Args {
    /// Packing of `count` matrices.
    pub fn new(matrix: &Matrix, count: usize, from: Place, to: Place) -> Args {
        let Matrix { outputs, groups, columns, cuts, offset, format: _ } = *matrix;
        let [outputs, groups, columns, cuts, offset, count] =
            [outputs, groups, columns, cuts, offset, count].map(|n| n as u32);
        Args { from, to, outputs, groups, columns, cuts, count, offset }
    }

    fn matrix(&self, format: Format) -> Matrix {
        let [outputs, groups, columns, cuts, offset] =
            [self.outputs, self.groups, self.columns, self.cuts, self.offset].map(|n| n as usize);
        Matrix { outputs, groups, columns, cuts, offset, format }
    }
}

/// A number of the tiles: where it comes from and where it goes.
struct Number {
    /// The row of the matrix and its column; none where there is no such element.
    from: Option<(usize, usize)>,
    tile: usize,
    unit: usize,
    lane: usize,
    j: usize,
    c: usize,
    upper: usize,
}

/// Every number of a matrix in tiles.
fn numbers(matrix: Matrix) -> impl Iterator<Item = Number> {
    let (per_tile, units) = (matrix.tile_outputs(), matrix.units());
    let (width, units_of_cut) = (matrix.columns / matrix.cuts, units / matrix.cuts);
    (0..matrix.elements(Order::Tiles)).map(move |at| {
        let (upper, c, j, lane) = (at % 2, at / 2 % 4, at / 8 % 4, at / 32 % 32);
        let (unit, tile) = (at / 1024 % units, at / 1024 / units);
        let row = lane / 4 + 8 * upper;
        let (group, output) = (row / per_tile, tile * per_tile + row % per_tile);
        let column = unit % units_of_cut * UNIT + lane % 4 * 16 + j * 4 + c;
        let live = group < matrix.groups && output < matrix.outputs && column < width;
        let place = (group * matrix.outputs + output, unit / units_of_cut * width + column);
        Number { from: live.then_some(place), tile, unit, lane, j, c, upper }
    })
}

/// The scale of an nvfp4 group as tiles hold it.
fn recoded(e4m3: u8) -> u8 {
    let (exponent, mantissa) = (e4m3 >> 3 & 15, e4m3 & 7);
    match (exponent, mantissa) {
        (0, 0) => 0,
        (0, _) => {
            let shift = mantissa.leading_zeros() as u8 - 4;
            (3 - shift) << 3 | (mantissa << shift & 7)
        }
        _ => (exponent + 2) << 3 | mantissa,
    }
}

fn pack_plain<E: Element>(args: &Args, matrix: Matrix, memory: &Access<'_>) -> Result<(), Fault> {
    let count = args.count as usize;
    let (rows, tiles) = (matrix.elements(Order::Rows), matrix.elements(Order::Tiles));
    let from = memory.read::<E>(args.from.codes.cast(), count * rows)?;
    let to = memory.write::<E>(args.to.codes.cast(), count * tiles)?;
    let units = matrix.units();
    for (from, to) in from.chunks_exact(rows).zip(to.chunks_exact_mut(tiles)) {
        for n in numbers(matrix) {
            let e = n.c / 2 * 4 + 2 * n.upper + n.c % 2;
            let value = n.from.map_or(E::zeroed(), |(row, column)| from[row * matrix.columns + column]);
            to[(((n.tile * units + n.unit) * 4 + n.j) * 32 + n.lane) * 8 + e] = value;
        }
    }
    Ok(())
}

fn pack_fp8(args: &Args, matrix: Matrix, memory: &Access<'_>) -> Result<(), Fault> {
    let count = args.count as usize;
    let (rows, tiles) = (matrix.sizes(Order::Rows, 0), matrix.sizes(Order::Tiles, 0));
    let from = memory.read::<u8>(args.from.codes, count * rows.codes)?;
    let from_scales = memory.read::<f32>(args.from.scales.cast(), count * rows.scales / 4)?;
    let to = memory.write::<u8>(args.to.codes, count * tiles.codes)?;
    let scales = memory.write::<f32>(args.to.scales.cast(), count * tiles.scales / 4)?;
    let (units, blocks) = (matrix.units(), matrix.blocks());
    scales.fill(0.0);
    for index in 0..count {
        let (from, from_scales) = (&from[index * rows.codes..], &from_scales[index * rows.scales / 4..]);
        let to = &mut to[index * tiles.codes..][..tiles.codes];
        let scales = &mut scales[index * tiles.scales / 4..];
        for n in numbers(matrix) {
            let unit = n.tile * units + n.unit;
            let byte = 8 * (n.j % 2) + 4 * (n.c / 2) + 2 * (n.c % 2) + 1 - n.upper;
            to[((unit * 2 + n.j / 2) * 32 + n.lane) * 16 + byte] = match n.from {
                None => 0,
                Some((row, column)) => {
                    if n.lane == 0 {
                        scales[unit * 2 + n.upper] =
                            from_scales[row * blocks + (matrix.offset + column) / BLOCK];
                    }
                    from[row * matrix.columns + column]
                }
            };
        }
    }
    Ok(())
}

fn pack_nvfp4(args: &Args, matrix: Matrix, memory: &Access<'_>) -> Result<(), Fault> {
    let count = args.count as usize;
    let (rows, tiles) = (matrix.sizes(Order::Rows, 0), matrix.sizes(Order::Tiles, 0));
    let from = memory.read::<u8>(args.from.codes, count * rows.codes)?;
    let from_scales = memory.read::<u8>(args.from.scales, count * rows.scales)?;
    let from_globals = memory.read::<f32>(args.from.globals.cast(), count * rows.globals / 4)?;
    let to = memory.write::<u32>(args.to.codes.cast(), count * tiles.codes / 4)?;
    let scales = memory.write::<u8>(args.to.scales, count * tiles.scales)?;
    let globals = memory.write::<f32>(args.to.globals.cast(), count * tiles.globals / 4)?;
    let units = matrix.units();
    to.fill(0);
    scales.fill(0);
    globals.fill(0.0);
    for index in 0..count {
        let (from, from_scales) = (&from[index * rows.codes..], &from_scales[index * rows.scales..]);
        let from_globals = &from_globals[index * rows.globals / 4..];
        let to = &mut to[index * tiles.codes / 4..];
        let scales = &mut scales[index * tiles.scales..];
        let globals = &mut globals[index * tiles.globals / 4..];
        for n in numbers(matrix) {
            let Some((row, column)) = n.from else { continue };
            let at = row * matrix.columns + column;
            let (code, scale) = (from[at / 2] >> (at % 2 * 4) & 15, from_scales[at / GROUP]);
            let unit = n.tile * units + n.unit;
            scales[(unit * 32 + n.lane) * 2 + n.upper] = recoded(scale);
            globals[n.tile * TILE + n.lane / 4 + 8 * n.upper] = 128.0 * from_globals[row];
            if scale == 0 {
                continue;
            }
            let (sign, magnitude) = [(15, 6), (12, 3), (13, 0), (14, 9)][n.c / 2 * 2 + n.upper];
            let half = u32::from(code >> 3) << sign | u32::from(code & 7) << magnitude;
            to[(unit * 32 + n.lane) * 4 + n.j] |= half << (16 * (n.c % 2));
        }
    }
    Ok(())
}

impl<E: Element, F: WeightFormat> Kernel for Pack<E, F> {
    type Args = Args;
    const NAME: &'static str = named!("pack", F::FORMAT);
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::twin::<E>(&source::PACK, Self::NAME, 128);

    fn check(args: &Args) -> Result<(), String> {
        if args.count == 0 {
            return Err("count must be positive".into());
        }
        args.matrix(F::FORMAT).check(Order::Tiles)
    }

    fn grid(args: &Args) -> Grid {
        let matrix = args.matrix(F::FORMAT);
        Grid::line(args.count as usize * matrix.tiles() * matrix.units())
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let matrix = args.matrix(F::FORMAT);
        match F::FORMAT {
            Format::Plain => pack_plain::<E>(args, matrix, memory),
            Format::Fp8 => pack_fp8(args, matrix, memory),
            Format::Nvfp4 => pack_nvfp4(args, matrix, memory),
        }
    }
}
