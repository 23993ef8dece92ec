//! What a weight matrix is: its shape, how its numbers are stored, how its sum is cut, and where its bytes lie.
//!
//! The host reads matrices row by row, as checkpoints store them. A CUDA device reads them in the order of its
//! tensor-core registers: *tiles* of 16 weight rows, each a run of *units* of 64 columns, so that a warp's
//! share of a sum is one run of memory and every load is 512 bytes in a row.

use crate::numerics::CUTS;
use graph::Device;

/// Weight rows of a tile.
pub const TILE: usize = 16;

/// Columns of a unit.
pub const UNIT: usize = 64;

/// Rows and columns of a block of [`Format::Fp8`] that share a scale in a checkpoint.
pub const BLOCK: usize = 128;

/// Neighbouring columns of a row of [`Format::Nvfp4`] that share a scale.
pub const GROUP: usize = 16;

/// Rows that a warp takes at most when it walks a matrix for a decode round. The bits do not depend on it.
pub(crate) const NARROW_ROWS: usize = 32;

/// How the numbers of a matrix are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Format {
    /// Elements of the model.
    #[default]
    Plain,
    /// `w = code * scale`: e4m3 codes; an f32 scale for every row and [`BLOCK`] columns, the same in the
    /// [`BLOCK`] rows of a stored block.
    Fp8,
    /// `w = code * (scale * global)`: e2m1 codes, two to a byte, the even column low; an e4m3 scale for every row and
    /// [`GROUP`] columns; an f32 number for every row, the same in all rows of a stored tensor.
    Nvfp4,
}

impl Format {
    /// "plain", "fp8" or "nvfp4".
    pub const fn name(self) -> &'static str {
        match self {
            Format::Plain => "plain",
            Format::Fp8 => "fp8",
            Format::Nvfp4 => "nvfp4",
        }
    }
}

/// A [`Format`] as a type: which instance of a kernel reads it.
pub trait WeightFormat: Send + Sync + 'static {
    /// The format.
    const FORMAT: Format;
}

/// [`Format::Plain`] as a type.
pub struct Plain;
/// [`Format::Fp8`] as a type.
pub struct Fp8;
/// [`Format::Nvfp4`] as a type.
pub struct Nvfp4;

impl WeightFormat for Plain {
    const FORMAT: Format = Format::Plain;
}
impl WeightFormat for Fp8 {
    const FORMAT: Format = Format::Fp8;
}
impl WeightFormat for Nvfp4 {
    const FORMAT: Format = Format::Nvfp4;
}

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
    /// Columns of a longer row that share the first [`BLOCK`] with this one's and come before it: what another rank has.
    pub offset: usize,
    /// How its numbers are stored.
    pub format: Format,
}

/// Bytes of one matrix, part by part, or where the parts of several begin.
///
/// | format | order | codes | scales | globals |
/// | --- | --- | --- | --- | --- |
/// | plain | rows | elements `[rows, columns]` | | |
/// | | tiles | bf16 `[tiles, units, 4, 32, 8]` | | |
/// | fp8 | rows | u8 `[rows, columns]` | f32 `[rows, (offset + columns) / 128]` | |
/// | | tiles | u8 `[tiles, units, 2, 32, 16]` | f32 `[tiles, units, 2]`: rows 0..8 and 8..16 of the tile | |
/// | nvfp4 | rows | u8 `[rows, columns / 2]` | u8 `[rows, columns / 16]` | f32 `[rows]` |
/// | | tiles | u8 `[tiles, units, 32, 16]` | u8 `[tiles, units, 32, 2]` | f32 `[tiles, 16]` |
///
/// The order inside of a unit is what [`Pack`](crate::tiles::Pack) says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// The codes, or the elements.
    pub codes: usize,
    /// Their scales.
    pub scales: usize,
    /// The numbers of whole rows.
    pub globals: usize,
}

impl Matrix {
    /// A matrix of elements whose rows stand alone.
    pub fn plain(outputs: usize, columns: usize) -> Matrix {
        Matrix { outputs, groups: 1, columns, cuts: 1, offset: 0, format: Format::Plain }
    }

    /// The same matrix, its numbers stored like this.
    pub fn stored(self, format: Format) -> Matrix {
        Matrix { format, ..self }
    }

    /// The same matrix, its columns cut as sums over ranks are.
    pub fn cut(self) -> Matrix {
        Matrix { cuts: CUTS, ..self }
    }

    /// The same matrix, whose rows go on from column `first` of longer ones.
    pub fn from_column(self, first: usize) -> Matrix {
        Matrix { offset: first % BLOCK, ..self }
    }

    /// The same rows as so many groups.
    pub fn grouped(self, groups: usize) -> Matrix {
        Matrix { outputs: self.outputs / groups, groups, ..self }
    }

    /// Rows of the matrix.
    pub fn rows(&self) -> usize {
        self.groups * self.outputs
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

    /// Numbers that it takes in memory, what pads them included.
    pub fn elements(&self, order: Order) -> usize {
        match order {
            Order::Rows => self.rows() * self.columns,
            Order::Tiles => self.tiles() * self.units() * TILE * UNIT,
        }
    }

    /// Whether it can lie in this order.
    ///
    /// # Errors
    /// Which size does not fit the format, and what would.
    pub fn check(&self, order: Order) -> Result<(), String> {
        let Matrix { outputs, groups, columns, cuts, offset, format } = *self;
        let fits = outputs > 0 && (1..=TILE).contains(&groups) && columns > 0;
        if !fits || cuts == 0 || !columns.is_multiple_of(cuts) || offset >= BLOCK {
            return Err(format!(
                "outputs {outputs}, groups {groups}, columns {columns}, cuts {cuts}, offset {offset}: all but the last \
                 positive, at most {TILE} groups, columns a multiple of cuts, an offset below {BLOCK}"
            ));
        }
        let width = columns / cuts;
        match (format, order) {
            (Format::Nvfp4, _) if !columns.is_multiple_of(GROUP) => {
                Err(format!("{columns} columns in nvfp4 are no groups of {GROUP} that share a scale"))
            }
            (Format::Nvfp4, Order::Tiles) if !width.is_multiple_of(GROUP) => Err(format!(
                "a cut of {width} columns in nvfp4 is no groups of {GROUP} that share a scale, which CUDA kernels need"
            )),
            (Format::Fp8, Order::Tiles) if !self.units_lie_in_blocks() => Err(format!(
                "a cut of {width} columns in fp8 has units of {UNIT} columns across two blocks of {BLOCK}, which CUDA \
                 kernels do not read"
            )),
            _ => Ok(()),
        }
    }

    fn units_lie_in_blocks(&self) -> bool {
        let width = self.columns / self.cuts;
        (0..self.cuts).all(|cut| {
            (0..width).step_by(UNIT).all(|from| {
                let last = (from + UNIT).min(width) - 1;
                let block = |column: usize| (self.offset + cut * width + column) / BLOCK;
                block(from) == block(last)
            })
        })
    }

    /// Scales of a row in fp8.
    pub fn blocks(&self) -> usize {
        (self.offset + self.columns).div_ceil(BLOCK)
    }

    /// Bytes of the parts of one matrix, for elements of so many bytes.
    pub fn sizes(&self, order: Order, element_bytes: usize) -> Parts {
        let numbers = self.elements(order);
        let (scales, globals) = match (self.format, order) {
            (Format::Plain, _) => (0, 0),
            (Format::Fp8, Order::Rows) => (self.rows() * self.blocks() * 4, 0),
            (Format::Fp8, Order::Tiles) => (self.tiles() * self.units() * 2 * 4, 0),
            (Format::Nvfp4, Order::Rows) => (numbers / GROUP, self.rows() * 4),
            (Format::Nvfp4, Order::Tiles) => (numbers / GROUP, self.tiles() * TILE * 4),
        };
        let codes = match self.format {
            Format::Plain => numbers * element_bytes,
            Format::Fp8 => numbers,
            Format::Nvfp4 => numbers / 2,
        };
        Parts { codes, scales, globals }
    }

    /// Where the parts of `count` such matrices begin, one part of all after another, and the bytes of everything.
    pub fn parts(&self, count: usize, order: Order, element_bytes: usize) -> (Parts, usize) {
        let sizes = self.sizes(order, element_bytes);
        let part = |bytes: usize| (count * bytes).next_multiple_of(16);
        let scales = part(sizes.codes);
        let globals = scales + part(sizes.scales);
        (Parts { codes: 0, scales, globals }, globals + part(sizes.globals))
    }

    /// Bytes of `count` such matrices.
    pub fn bytes(&self, count: usize, order: Order, element_bytes: usize) -> usize {
        self.parts(count, order, element_bytes).1
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

/// The name of a kernel's instance for a format, and what follows it.
macro_rules! named {
    ($base:literal, $format:expr $(, $end:literal)?) => {
        match $format {
            $crate::weight::Format::Plain => concat!($base $(, $end)?),
            $crate::weight::Format::Fp8 => concat!($base, "_fp8" $(, $end)?),
            $crate::weight::Format::Nvfp4 => concat!($base, "_nvfp4" $(, $end)?),
        }
    };
}
pub(crate) use named;
