//! How a weight matrix lies in device memory, and the packing that puts it there.
//!
//! The host reads matrices row by row, as checkpoints store them. A CUDA device reads them in the order of its
//! tensor-core registers: *tiles* of 16 weight rows, each a run of *units* of 64 columns, so that a warp's
//! share of a sum is one run of memory and every load is 512 bytes in a row.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Device, Fault, Grid, Kernel, Ptr, Twin, host::Access};

use crate::numerics::{CUTS, Element};
use crate::source;

/// Weight rows of a tile.
pub const TILE: usize = 16;

/// Columns of a unit.
pub const UNIT: usize = 64;

/// Rows that a warp takes at most when it walks a matrix for a decode round. The bits do not depend on it.
pub(crate) const NARROW_ROWS: usize = 32;

/// Order of a matrix in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Row by row: what host implementations read.
    Rows,
    /// Tiles: what CUDA twins read.
    Tiles,
}

impl Order {
    /// The order that a device's kernels read.
    pub fn of(device: &Device) -> Order {
        match device {
            Device::Host(_) => Order::Rows,
            Device::Cuda(_) => Order::Tiles,
        }
    }
}

/// A weight matrix of `groups * outputs` rows, group by group.
///
/// Rows that are used together share a tile: output `o` of every group. A sum that is cut has its columns
/// cut too, each cut in whole units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// Outputs of a group.
    pub outputs: usize,
    /// Groups, at most 16: 2 for gate and up projections, the streams for a mix.
    pub groups: usize,
    /// Columns.
    pub columns: usize,
    /// Cuts of the columns, 1 or [`CUTS`].
    pub cuts: usize,
}

impl Matrix {
    /// A matrix whose rows stand alone.
    pub fn plain(outputs: usize, columns: usize) -> Matrix {
        Matrix { outputs, groups: 1, columns, cuts: 1 }
    }

    /// The same matrix, its columns cut as sums over ranks are.
    pub fn cut(self) -> Matrix {
        Matrix { cuts: CUTS, ..self }
    }

    /// The same rows as so many groups.
    pub fn grouped(self, groups: usize) -> Matrix {
        Matrix { outputs: self.outputs / groups, groups, ..self }
    }

    /// Outputs of one group in a tile.
    pub fn tile_outputs(&self) -> usize {
        TILE / self.groups.next_power_of_two()
    }

    /// Tiles of the matrix.
    pub fn tiles(&self) -> usize {
        self.outputs.div_ceil(self.tile_outputs())
    }

    /// Units of a tile.
    pub fn units(&self) -> usize {
        self.cuts * (self.columns / self.cuts).div_ceil(UNIT)
    }

    /// Elements that it takes in memory.
    pub fn elements(&self, order: Order) -> usize {
        match order {
            Order::Rows => self.groups * self.outputs * self.columns,
            Order::Tiles => self.tiles() * self.units() * TILE * UNIT,
        }
    }

    /// Outputs that can be packed by themselves, at most `most` elements of them but at least one tile: all
    /// of them where groups share tiles, since those lie far apart.
    pub fn run(&self, most: usize) -> usize {
        match self.groups {
            1 => (most / self.columns / TILE * TILE).clamp(TILE, self.outputs.next_multiple_of(TILE)),
            _ => self.outputs,
        }
    }
}

/// Packs a matrix, or a run of its outputs, into tiles.
///
/// ```text
/// to[tile][unit][j][lane][e] = from[group][output][column]
///     row of the tile   g + 8 * (e / 2 % 2), g = lane / 4      group = row / n, output = tile * n + row % n
///     column            of the unit's cut: 64 * unit + 16 * (lane % 4) + 4 * j + e % 2 + e / 4 * 2
/// ```
/// with n outputs of a group per tile, j below 4, lane below 32, e below 8; zero where there is no such element.
///
/// Shapes     from: `[groups, outputs, columns]`, to: `[tiles, units, 4, 32, 8]`, elements
/// Domain     groups at most 16; columns a multiple of cuts
/// Effects    writes all of to
/// Source     the operand registers of `mma.m16n8k16`, columns permuted so that a lane owns 16 in a row
pub struct Pack<E>(PhantomData<E>);

/// Arguments of [`Pack`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Args {
    /// from.
    pub from: Ptr<u8>,
    /// to.
    pub to: Ptr<u8>,
    /// Outputs of a group.
    pub outputs: u32,
    /// Groups.
    pub groups: u32,
    /// Columns.
    pub columns: u32,
    /// Cuts of the columns.
    pub cuts: u32,
}

impl Args {
    /// Packing of a matrix.
    pub fn new(matrix: &Matrix, from: Ptr<u8>, to: Ptr<u8>) -> Args {
        let Matrix { outputs, groups, columns, cuts } = *matrix;
        let [outputs, groups, columns, cuts] = [outputs, groups, columns, cuts].map(|n| n as u32);
        Args { from, to, outputs, groups, columns, cuts }
    }

    fn matrix(&self) -> Matrix {
        let [outputs, groups, columns, cuts] =
            [self.outputs, self.groups, self.columns, self.cuts].map(|n| n as usize);
        Matrix { outputs, groups, columns, cuts }
    }
}

impl<E: Element> Kernel for Pack<E> {
    type Args = Args;
    const NAME: &'static str = "pack";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::twin::<E>(&source::PACK, Self::NAME, 128);

    fn check(args: &Args) -> Result<(), String> {
        let Matrix { outputs, groups, columns, cuts } = args.matrix();
        let fits = outputs > 0 && (1..=TILE).contains(&groups) && columns > 0;
        match fits && cuts > 0 && columns.is_multiple_of(cuts) {
            true => Ok(()),
            false => Err(format!(
                "outputs {outputs}, groups {groups}, columns {columns}, cuts {cuts}: all positive, at most \
                 {TILE} groups, columns a multiple of cuts"
            )),
        }
    }

    fn grid(args: &Args) -> Grid {
        let matrix = args.matrix();
        Grid::line(matrix.tiles() * matrix.units())
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let matrix = args.matrix();
        let from = memory.read::<E>(args.from.cast(), matrix.elements(Order::Rows))?;
        let to = memory.write::<E>(args.to.cast(), matrix.elements(Order::Tiles))?;
        let (per_tile, units) = (matrix.tile_outputs(), matrix.units());
        let width = matrix.columns / matrix.cuts;
        let units_of_cut = units / matrix.cuts;
        for (at, to) in to.iter_mut().enumerate() {
            let (e, lane, j) = (at % 8, at / 8 % 32, at / 256 % 4);
            let (unit, tile) = (at / 1024 % units, at / 1024 / units);
            let row = lane / 4 + e / 2 % 2 * 8;
            let (group, output) = (row / per_tile, tile * per_tile + row % per_tile);
            let column = unit % units_of_cut * UNIT + lane % 4 * 16 + j * 4 + e % 2 + e / 4 * 2;
            let live = group < matrix.groups && output < matrix.outputs && column < width;
            let from_at =
                (group * matrix.outputs + output) * matrix.columns + unit / units_of_cut * width + column;
            *to = if live { from[from_at] } else { E::zeroed() };
        }
        Ok(())
    }
}
