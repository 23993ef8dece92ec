//! Where patches lie in their pictures: what is added to them for it, and how their queries and keys turn.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};
use rayon::prelude::*;

use crate::numerics::Element;
use crate::source;

/// Rows that are patches of pictures of one size, one picture after another. Patches come in squares of `merge` by
/// `merge`: the squares of a picture line by line, and so the patches of a square.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Patches {
    /// Patches before the first row.
    pub first: u32,
    /// Number of rows.
    pub rows: u32,
    /// Patches of a column of a picture: a multiple of `merge`.
    pub height: u32,
    /// Patches of a line of a picture: a multiple of `merge`.
    pub width: u32,
    /// Edge of a square.
    pub merge: u32,
    /// Not used; zero.
    pub zero: u32,
}

impl Patches {
    /// Patches of one picture.
    pub fn of_picture(&self) -> usize {
        self.height as usize * self.width as usize
    }

    /// The line and the column of a row's patch.
    pub fn place(&self, row: usize) -> (usize, usize) {
        let (width, merge) = (self.width as usize, self.merge as usize);
        let at = (self.first as usize + row) % self.of_picture();
        let (square, inside) = (at / (merge * merge), at % (merge * merge));
        let squares = width / merge;
        (square / squares * merge + inside / merge, square % squares * merge + inside % merge)
    }

    fn check(&self) -> Result<(), String> {
        let Patches { rows, height, width, merge, .. } = *self;
        if [rows, height, width, merge].contains(&0) {
            return Err(format!("rows {rows}, height {height}, width {width}, merge {merge}: all positive"));
        }
        if height % merge != 0 || width % merge != 0 {
            return Err(format!("{height} by {width} patches are not squares of {merge} by {merge}"));
        }
        match u32::try_from(self.of_picture()) {
            Ok(_) => Ok(()),
            Err(_) => Err(format!("{height} by {width} patches are more than 2^32")),
        }
    }
}

/// Adds what a square table of learned positions says of each patch's place: the table is stretched over the picture,
/// corner to corner, and read between its four nearest entries.
///
/// ```text
/// sy = line * (side - 1) / max(height - 1, 1);   y0 = floor(sy), y1 = min(y0 + 1, side - 1), dy = sy - y0
/// sx, x0, x1, dx likewise of column and width
/// pe      = t[y0, x0] (1 - dy)(1 - dx) + t[y0, x1] (1 - dy) dx + t[y1, x0] dy (1 - dx) + t[y1, x1] dy dx
/// x[r, j] = r16(x[r, j] + r16(pe[j]))
/// ```
/// Shapes     x: `[rows, hidden]` elements; t: `[side, side, hidden]` elements
/// Effects    writes x in place
/// Source     MODEL: vision tower, position table
pub struct AddPositions<E>(PhantomData<E>);

/// Arguments of [`AddPositions`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct PositionArgs {
    /// The rows.
    pub patches: Patches,
    /// x.
    pub x: Ptr<u8>,
    /// t.
    pub table: Ptr<u8>,
    /// Edge of the table.
    pub side: u32,
    /// Width of a row.
    pub hidden: u32,
}

/// Two neighbours along an axis, and how near each is.
struct Between {
    entries: [usize; 2],
    shares: [f32; 2],
}

impl Between {
    fn new(at: usize, count: u32, side: u32) -> Between {
        let place = (at as u32 * (side - 1)) as f32 / count.saturating_sub(1).max(1) as f32;
        let low = place.floor();
        let first = low as usize;
        let share = place - low;
        Between { entries: [first, (first + 1).min(side as usize - 1)], shares: [1.0 - share, share] }
    }
}

impl<E: Element> Kernel for AddPositions<E> {
    type Args = PositionArgs;
    const NAME: &'static str = "add_positions";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::twin::<E>(&source::PATCH, Self::NAME, 128);

    fn check(args: &PositionArgs) -> Result<(), String> {
        args.patches.check()?;
        let PositionArgs { side, hidden, .. } = *args;
        if side == 0 || hidden == 0 {
            return Err(format!("side {side} and hidden {hidden}: both positive"));
        }
        let longest = args.patches.height.max(args.patches.width);
        match longest.checked_mul(side) {
            Some(_) => Ok(()),
            None => Err(format!("{longest} patches in a line are too many for a table of {side}")),
        }
    }

    fn grid(args: &PositionArgs) -> Grid {
        Grid::line(args.patches.rows as usize)
    }

    fn host(args: &PositionArgs, memory: &Access<'_>) -> Result<(), Fault> {
        let PositionArgs { patches, side, .. } = *args;
        let (rows, hidden) = (patches.rows as usize, args.hidden as usize);
        let table = memory.read::<E>(args.table.cast(), side as usize * side as usize * hidden)?;
        let x = memory.write::<E>(args.x.cast(), rows * hidden)?;
        let entry = |y: usize, x: usize| &table[(y * side as usize + x) * hidden..][..hidden];
        x.par_chunks_exact_mut(hidden).enumerate().with_min_len(16).for_each(|(row, x)| {
            let (line, column) = patches.place(row);
            let (y, z) =
                (Between::new(line, patches.height, side), Between::new(column, patches.width, side));
            let near: [&[E]; 4] = std::array::from_fn(|i| entry(y.entries[i / 2], z.entries[i % 2]));
            let shares: [f32; 4] = std::array::from_fn(|i| y.shares[i / 2] * z.shares[i % 2]);
            for (j, x) in x.iter_mut().enumerate() {
                let part = |i: usize| near[i][j].widen() * shares[i];
                *x = E::narrow(x.widen() + E::round(part(0) + part(1) + part(2) + part(3)));
            }
        });
        Ok(())
    }
}

/// Turns the queries and keys of every row by the place of its patch: the first half of the angles by its line, the
/// second by its column. An element turns with the one half a head further.
///
/// ```text
/// angle[i]            = line * f[i], angle[quarter + i] = column * f[i]                i in 0 .. quarter
/// v'[i], v'[half + i] = r16(v[i] cos - v[half + i] sin), r16(v[half + i] cos + v[i] sin)
/// ```
/// Shapes     x: `[rows, stride]` elements, of which the first `2 * heads * width` are queries and keys; f:
///            `[width / 4]` f32
/// Domain     width is a multiple of 4
/// Effects    writes queries and keys in place, nothing between rows
/// Source     MODEL: vision tower, rotary
pub struct TurnPatches<E>(PhantomData<E>);

/// Arguments of [`TurnPatches`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct TurnArgs {
    /// The rows.
    pub patches: Patches,
    /// x.
    pub x: Ptr<u8>,
    /// f.
    pub frequencies: Ptr<f32>,
    /// Number of heads.
    pub heads: u32,
    /// Width of a head.
    pub width: u32,
    /// From one row of x to the next, in elements.
    pub stride: u32,
    /// Not used; zero.
    pub zero: u32,
}

/// The widest head that the CUDA twin takes; wider ones it leaves as they are.
pub const CUDA_TURNED: u32 = 256;

impl<E: Element> Kernel for TurnPatches<E> {
    type Args = TurnArgs;
    const NAME: &'static str = "turn_patches";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::twin::<E>(&source::PATCH, Self::NAME, 128);

    fn check(args: &TurnArgs) -> Result<(), String> {
        args.patches.check()?;
        let TurnArgs { heads, width, stride, .. } = *args;
        if heads == 0 || width == 0 || !width.is_multiple_of(4) {
            return Err(format!("{heads} heads of {width}: at least one, of a multiple of 4"));
        }
        match 2 * u64::from(heads) * u64::from(width) <= stride.into() {
            true => Ok(()),
            false => {
                Err(format!("queries and keys of {heads} heads of {width} do not fit a row of {stride}"))
            }
        }
    }

    fn grid(args: &TurnArgs) -> Grid {
        Grid::line(args.patches.rows as usize)
    }

    fn host(args: &TurnArgs, memory: &Access<'_>) -> Result<(), Fault> {
        let (heads, width) = (args.heads as usize, args.width as usize);
        let frequencies = memory.read(args.frequencies, width / 4)?;
        let mut rows = Vec::with_capacity(args.patches.rows as usize);
        for row in 0..args.patches.rows as usize {
            let at = args.x.cast::<E>().at(row * args.stride as usize);
            rows.push(memory.write::<E>(at, 2 * heads * width)?);
        }
        rows.into_par_iter().enumerate().with_min_len(16).for_each(|(row, x)| {
            let (line, column) = args.patches.place(row);
            let angles =
                [line, column].into_iter().flat_map(|at| frequencies.iter().map(move |f| at as f32 * f));
            let turns: Vec<(f32, f32)> = angles.map(|angle| (angle.cos(), angle.sin())).collect();
            for head in x.chunks_exact_mut(width) {
                let (low, high) = head.split_at_mut(width / 2);
                for ((a, b), (cos, sin)) in low.iter_mut().zip(high).zip(&turns) {
                    let (from, to) = (a.widen(), b.widen());
                    *a = E::narrow(from * cos - to * sin);
                    *b = E::narrow(to * cos + from * sin);
                }
            }
        });
        Ok(())
    }
}
