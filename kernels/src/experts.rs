//! The experts of a mixture of experts: up and down projections of the chosen and the shared one.
//!
//! The routed experts are stored in format F, the shared one in format S; sums with either are those of
//! [`linear`](crate::linear) layers.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Source, Twin, host::Access};

use crate::matrix::{Columns, Weights, product};
use crate::numerics::{CUTS, Element, silu, widened};
use crate::source::{self, PART_ROWS, PART_TILES, part_shared};
use crate::spread;
use crate::weight::{Format, Matrix, Order, Plain, TILE, WeightFormat};

/// Gate and up projections of each row's experts.
///
/// ```text
/// a[r, j, i] = r16(silu(r16(gate[e] row i . x[r])) * r16(up[e] row i . x[r]))      e = ids[r, j]
/// s[r, i]    = likewise with the shared expert
/// ```
/// Shapes     x: `[rows, hidden]`, a: `[rows, k, inner]`, s: `[rows, shared_inner]` elements; gate_up:
///            `[experts, 2 * inner, hidden]` in format F, gate rows first, shared_gate_up: `[2 * shared_inner, hidden]`
///            in format S, each in the device's order as two groups; ids: `[rows, k]`; list and starts as
///            [`ExpertsGroup`] makes them, on the prompt route; null on the other
/// Domain     ids below experts
/// Effects    writes all of a and s
/// Source     MODEL: mixture of experts
pub struct ExpertsUp<E, F = Plain, S = Plain, const PROMPT: bool = false>(PhantomData<(E, F, S)>);

/// The prompt route of [`ExpertsUp`].
pub type ExpertsUpPrompt<E, F = Plain, S = Plain> = ExpertsUp<E, F, S, true>;

/// Down projections of each row's experts, weighed and summed, cut in two over the inner widths (a rank may have one
/// half): the decode route. The launch ahead of it in a round must be [`ExpertsUp`], since it may read ids while that still runs.
///
/// ```text
/// p[c, r, o] = sum over j of weights[r, j] * (down[e] row o . a[r, j] over cut c)      e = ids[r, j]
///              + weights[r, k] * (shared_down row o . s[r] over cut c)
/// ```
/// The sum over j runs in order, from 0, the shared expert last; nothing is rounded.
///
/// Shapes     a, s, ids: as [`ExpertsUp`]; weights: `[rows, k + 1]` f32; down: `[experts, hidden, inner]` in
///            format F, shared_down: `[hidden, shared_inner]` in format S, each cut, in the device's order; p: `[cuts, rows, hidden]`
///            f32
/// Domain     ids below experts; inner and shared_inner are multiples of the cuts
/// Effects    writes all of p
/// Source     MODEL: mixture of experts, Roundhouse's numerics
pub struct ExpertsDown<E, F = Plain, S = Plain>(PhantomData<(E, F, S)>);

/// The places of a prompt's rows, gathered by expert.
///
/// ```text
/// starts[e] = number of (r, j) with ids[r, j] < e
/// list[starts[e]..starts[e + 1]] = r * k + j of every ids[r, j] = e, ascending
/// ```
/// Shapes     ids: `[rows, k]`; list: `[rows * k]`; starts: `[experts + 1]`
/// Domain     ids below experts
/// Effects    writes all of list and starts
pub struct ExpertsGroup;

/// Down projections of each row's experts: the first half of the prompt route of [`ExpertsDown`].
///
/// ```text
/// products[c, r, j, o] = down[e] row o . a[r, j] over cut c      e = ids[r, j]
/// products[c, r, k, o] = shared_down row o . s[r] over cut c
/// ```
/// Shapes     as [`ExpertsDown`] and [`ExpertsGroup`]; products: `[cuts, rows, k + 1, hidden]` f32
/// Domain     inner and shared_inner are multiples of the cuts
/// Effects    writes all of products
pub struct ExpertsProducts<E, F = Plain, S = Plain>(PhantomData<(E, F, S)>);

/// Down projections weighed and summed: the second half of the prompt route of [`ExpertsDown`].
///
/// ```text
/// p[c, r, o] = sum over j <= k of weights[r, j] * products[c, r, j, o]
/// ```
/// The sum over j runs in order, from 0; nothing is rounded.
///
/// Shapes     as [`ExpertsDown`] and [`ExpertsProducts`]
/// Domain     ids below experts
/// Effects    writes all of p
pub struct ExpertsSum;

/// The sizes of a mixture.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Sizes {
    /// Number of rows.
    pub rows: u32,
    /// Width of a row.
    pub hidden: u32,
    /// Inner width of an expert.
    pub inner: u32,
    /// Inner width of the shared expert.
    pub shared_inner: u32,
    /// Number of experts, the shared one not counted.
    pub experts: u32,
    /// Experts per row.
    pub k: u32,
    /// Cuts of the inner widths: 2, or 1 on a rank that has one half.
    pub cuts: u32,
    /// Columns of a longer row of a routed expert's down projection that the first block of fp8 has before the first.
    pub offset: u32,
    /// The same of the shared expert.
    pub shared_offset: u32,
    /// Not used; zero.
    pub zero: u32,
}

/// Arguments of [`ExpertsUp`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct UpArgs {
    /// x.
    pub x: Ptr<u8>,
    /// ids.
    pub ids: Ptr<u32>,
    /// list, or null.
    pub list: Ptr<u32>,
    /// starts, or null.
    pub starts: Ptr<u32>,
    /// gate_up.
    pub gate_up: Ptr<u8>,
    /// shared_gate_up.
    pub shared_gate_up: Ptr<u8>,
    /// a.
    pub a: Ptr<u8>,
    /// s.
    pub s: Ptr<u8>,
    /// The sizes.
    pub sizes: Sizes,
}

/// Arguments of [`ExpertsDown`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct DownArgs {
    /// a.
    pub a: Ptr<u8>,
    /// s.
    pub s: Ptr<u8>,
    /// ids.
    pub ids: Ptr<u32>,
    /// weights.
    pub weights: Ptr<f32>,
    /// down.
    pub down: Ptr<u8>,
    /// shared_down.
    pub shared_down: Ptr<u8>,
    /// p.
    pub p: Ptr<f32>,
    /// The sizes.
    pub sizes: Sizes,
}

/// Arguments of [`ExpertsGroup`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct GroupArgs {
    /// ids.
    pub ids: Ptr<u32>,
    /// list.
    pub list: Ptr<u32>,
    /// starts.
    pub starts: Ptr<u32>,
    /// The sizes.
    pub sizes: Sizes,
}

/// Arguments of [`ExpertsProducts`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct ProductsArgs {
    /// a.
    pub a: Ptr<u8>,
    /// s.
    pub s: Ptr<u8>,
    /// list.
    pub list: Ptr<u32>,
    /// starts.
    pub starts: Ptr<u32>,
    /// down.
    pub down: Ptr<u8>,
    /// shared_down.
    pub shared_down: Ptr<u8>,
    /// products.
    pub products: Ptr<f32>,
    /// The sizes.
    pub sizes: Sizes,
}

/// Arguments of [`ExpertsSum`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct SumArgs {
    /// products.
    pub products: Ptr<f32>,
    /// ids.
    pub ids: Ptr<u32>,
    /// weights.
    pub weights: Ptr<f32>,
    /// p.
    pub p: Ptr<f32>,
    /// The sizes.
    pub sizes: Sizes,
}

/// Columns of x that CUDA twins of [`ExpertsUp`] take at most.
pub const CUDA_COLUMNS: u32 = 10_240;
/// Inner width that CUDA twins of [`ExpertsDown`] take at most.
pub const CUDA_INNER: u32 = 2 * DOWN_COLUMNS;

/// Warps of a block of the CUDA twin of [`ExpertsDown`]: one for each of so many places, the shared expert's last.
pub(crate) const PLACES: u32 = 11;
/// Rows and tiles of such a block at most, and columns of a half.
pub(crate) const DOWN_ROWS: u32 = 2;
pub(crate) const DOWN_TILES: u32 = 10;
pub(crate) const DOWN_COLUMNS: u32 = 512;
/// Rows of a block of the shared expert in the twin of [`ExpertsUp`], the tiles of the routed experts whose sums one
/// keeps, and the rows that an expert takes at once.
pub(crate) const UP_ROWS: u32 = 16;
pub(crate) const UP_TILES: u32 = 8;
pub(crate) const GROUP: u32 = 4;
/// Shared memory of these blocks: sums of tiles, zeros and rows; zeros, rows, a tile of the shared expert and products.
const UP_SHARED: u32 = UP_TILES * 8 * GROUP * 16 * 4 + 32 + CUDA_COLUMNS * 2 + GROUP * 16;
const DOWN_SHARED: u32 = 32
    + (PLACES - 1) * 2 * DOWN_COLUMNS * 2
    + DOWN_ROWS * (DOWN_COLUMNS * 2 + 16)
    + DOWN_COLUMNS / 64 * 2048
    + DOWN_TILES * DOWN_ROWS * PLACES * 16 * 4;
/// Multiprocessors of the devices that grids are cut for; others run the same grids.
const MULTIPROCESSORS: u32 = 132;

/// The name of an instance: the format of the routed experts, then that of the shared one; nothing where all is plain.
macro_rules! named {
    ($base:literal, $end:literal) => {
        match (F::FORMAT, S::FORMAT) {
            (Format::Plain, Format::Plain) => concat!($base, $end),
            (Format::Plain, Format::Fp8) => concat!($base, "_plain_fp8", $end),
            (Format::Plain, Format::Nvfp4) => concat!($base, "_plain_nvfp4", $end),
            (Format::Fp8, Format::Plain) => concat!($base, "_fp8", $end),
            (Format::Fp8, Format::Fp8) => concat!($base, "_fp8_fp8", $end),
            (Format::Fp8, Format::Nvfp4) => concat!($base, "_fp8_nvfp4", $end),
            (Format::Nvfp4, Format::Plain) => concat!($base, "_nvfp4", $end),
            (Format::Nvfp4, Format::Fp8) => concat!($base, "_nvfp4_fp8", $end),
            (Format::Nvfp4, Format::Nvfp4) => concat!($base, "_nvfp4_nvfp4", $end),
        }
    };
}

/// Whether CUDA twins read such experts together.
pub const fn has_twins(routed: Format, shared: Format) -> bool {
    source_of(routed, shared).is_some()
}

const fn source_of(routed: Format, shared: Format) -> Option<&'static Source> {
    Some(match (routed, shared) {
        (Format::Plain, Format::Plain) => &source::EXPERTS,
        (Format::Plain, Format::Fp8) => &source::EXPERTS_PLAIN_FP8,
        (Format::Fp8, Format::Plain) => &source::EXPERTS_FP8,
        (Format::Fp8, Format::Fp8) => &source::EXPERTS_FP8_FP8,
        (Format::Nvfp4, Format::Plain) => &source::EXPERTS_NVFP4,
        (Format::Nvfp4, Format::Fp8) => &source::EXPERTS_NVFP4_FP8,
        (Format::Nvfp4, Format::Nvfp4) => &source::EXPERTS_NVFP4_NVFP4,
        (Format::Plain | Format::Fp8, Format::Nvfp4) => return None,
    })
}

const fn twin<E: Element>(
    routed: Format,
    shared: Format,
    symbol: &'static str,
    block: u32,
    bytes: u32,
) -> Option<Twin> {
    match source_of(routed, shared) {
        Some(source) => source::shared_twin::<E>(source, symbol, block, bytes),
        None => None,
    }
}

/// Shared memory of a prompt's blocks.
const fn parts_shared(routed: Format, shared: Format) -> u32 {
    let (a, b) = (part_shared(routed), part_shared(shared));
    if a > b { a } else { b }
}

impl Sizes {
    /// No rows, of a rank that has everything.
    pub const WHOLE: Sizes = Sizes {
        rows: 0,
        hidden: 0,
        inner: 0,
        shared_inner: 0,
        experts: 0,
        k: 0,
        cuts: CUTS as u32,
        offset: 0,
        shared_offset: 0,
        zero: 0,
    };

    fn check(&self) -> Result<(), String> {
        let Sizes { rows, hidden, inner, shared_inner, experts, k, .. } = *self;
        if [rows, hidden, inner, shared_inner, experts, k].contains(&0) {
            return Err(format!("all sizes of {self:?} must be positive"));
        }
        match k <= experts {
            true => Ok(()),
            false => Err(format!("k {k} is more than experts {experts}")),
        }
    }

    /// Gate and up projections of a routed expert, and of the shared one.
    fn up(&self, routed: Format, shared: Format) -> [Matrix; 2] {
        let matrix = |inner: u32, format| pairs(inner as usize, self.hidden as usize).stored(format);
        [matrix(self.inner, routed), matrix(self.shared_inner, shared)]
    }

    /// Down projections of a routed expert, and of the shared one.
    fn down(&self, routed: Format, shared: Format) -> [Matrix; 2] {
        let matrix = |inner: u32, offset: u32, format| Matrix {
            cuts: self.cuts as usize,
            offset: offset as usize,
            ..Matrix::plain(self.hidden as usize, inner as usize).stored(format)
        };
        [matrix(self.inner, self.offset, routed), matrix(self.shared_inner, self.shared_offset, shared)]
    }

    fn check_cuts(&self, routed: Format, shared: Format) -> Result<(), String> {
        let Sizes { inner, shared_inner, cuts, .. } = *self;
        let fits = |width: &u32| width.is_multiple_of(cuts);
        if !(1..=CUTS as u32).contains(&cuts) || ![inner, shared_inner].iter().all(fits) {
            return Err(format!(
                "inner {inner} and shared_inner {shared_inner} in {cuts} cuts: multiples of them, which are 1 to {CUTS}"
            ));
        }
        self.down(routed, shared).iter().try_for_each(|matrix| matrix.check(Order::Rows))
    }

    /// Runs of rows that the blocks of a prompt's twins share out: of the shared expert, then one per expert.
    fn work_groups(&self) -> usize {
        (self.rows as usize).div_ceil(PART_ROWS) + self.experts as usize
    }

    /// `[cuts, rows, k + 1, hidden]`: the down projections of every place, the shared expert's last. The weights
    /// are a, s, down and shared_down.
    fn products<E: Element>(
        &self,
        [a, s, down, shared_down]: [Ptr<u8>; 4],
        [routed, shared]: [Format; 2],
        ids: &[u32],
        memory: &Access<'_>,
    ) -> Result<Vec<f32>, Fault> {
        let (rows, hidden, k) = (self.rows as usize, self.hidden as usize, self.k as usize);
        let (inner, shared_inner) = (self.inner as usize, self.shared_inner as usize);
        let a = widened(memory.read::<E>(a.cast(), rows * k * inner)?);
        let s = widened(memory.read::<E>(s.cast(), rows * shared_inner)?);
        let groups = self.groups(ids, memory)?;
        let [routed, shared] = self.down(routed, shared);
        let down = Weights::<E>::read(&routed, self.experts as usize, down, memory)?;
        let shared_down = Weights::<E>::read(&shared, 1, shared_down, memory)?;
        let mut products = vec![0.0; self.cuts as usize * rows * (k + 1) * hidden];
        for (cut, products) in products.chunks_exact_mut(rows * (k + 1) * hidden).enumerate() {
            let routed = spread::map(groups.iter().collect(), rows * self.work(), |(id, pairs)| {
                let a = gather(&a, inner, pairs.iter().copied());
                product(self.columns(&a, inner, cut), self.weights_of(down.matrix(*id, hidden), inner, cut))
            });
            for ((_, pairs), routed) in groups.iter().zip(&routed) {
                for (pair, routed) in pairs.iter().zip(routed.chunks_exact(hidden)) {
                    products[(pair / k * (k + 1) + pair % k) * hidden..][..hidden].copy_from_slice(routed);
                }
            }
            let columns = self.columns(&s, shared_inner, cut);
            let shared = product(columns, self.weights_of(shared_down, shared_inner, cut));
            for (r, shared) in shared.chunks_exact(hidden).enumerate() {
                products[(r * (k + 1) + k) * hidden..][..hidden].copy_from_slice(shared);
            }
        }
        Ok(products)
    }

    /// Columns of cut `cut` of a matrix of `inner` columns.
    fn columns<'a, T>(&self, matrix: &'a [T], inner: usize, cut: usize) -> Columns<'a, T> {
        let part = inner / self.cuts as usize;
        Columns { matrix, inner, from: cut * part, to: (cut + 1) * part }
    }

    /// Columns of cut `cut` of weights of `inner` columns.
    fn weights_of<'a, E: Element>(
        &self,
        weights: Weights<'a, E>,
        inner: usize,
        cut: usize,
    ) -> Weights<'a, E> {
        let part = inner / self.cuts as usize;
        weights.columns(cut * part, (cut + 1) * part)
    }

    /// The multiply-adds of one row through matrices of `inner` and `shared_inner` by `hidden`.
    fn work(&self) -> usize {
        (self.k * self.inner + self.shared_inner) as usize * self.hidden as usize
    }

    /// For every expert that is used, its id and its (row, place) pairs as `row * k + place`, ascending.
    fn groups(&self, ids: &[u32], memory: &Access<'_>) -> Result<Vec<(usize, Vec<usize>)>, Fault> {
        let mut groups = vec![Vec::new(); self.experts as usize];
        for (pair, &id) in ids.iter().enumerate() {
            let Some(group) = groups.get_mut(id as usize) else {
                let row = pair / self.k as usize;
                return Err(memory.domain(format!("row {row}: no expert {id} of {}", self.experts)));
            };
            group.push(pair);
        }
        Ok(groups.into_iter().enumerate().filter(|(_, pairs)| !pairs.is_empty()).collect())
    }
}

impl<E: Element, F: WeightFormat, S: WeightFormat, const PROMPT: bool> Kernel for ExpertsUp<E, F, S, PROMPT> {
    type Args = UpArgs;
    const NAME: &'static str = match PROMPT {
        true => named!("experts_up", "_prompt"),
        false => named!("experts_up", ""),
    };
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = twin::<E>(
        F::FORMAT,
        S::FORMAT,
        Self::NAME,
        256,
        if PROMPT { parts_shared(F::FORMAT, S::FORMAT) } else { UP_SHARED },
    );

    fn check(args: &UpArgs) -> Result<(), String> {
        args.sizes.check()?;
        args.sizes.up(F::FORMAT, S::FORMAT).iter().try_for_each(|matrix| matrix.check(Order::Rows))?;
        match PROMPT && (args.list.is_null() || args.starts.is_null()) {
            true => Err("a prompt needs the list of places by expert".into()),
            false => Ok(()),
        }
    }

    fn grid(args: &UpArgs) -> Grid {
        let Sizes { rows, inner, shared_inner, k, .. } = args.sizes;
        let [tiles, shared] = [inner, shared_inner].map(|inner| pairs(inner as usize, 1).tiles() as u32);
        if PROMPT {
            return Grid::line((tiles.max(shared) as usize).div_ceil(PART_TILES) * args.sizes.work_groups());
        }
        let shared = shared * rows.div_ceil(UP_ROWS);
        let at_once = MULTIPROCESSORS * up_blocks(F::FORMAT, S::FORMAT);
        // As many as run at once, but for those that the shared expert takes if they are most of them.
        let routed = if shared > at_once / 2 { at_once } else { at_once - shared };
        Grid::line((shared + routed.min(rows * k * tiles)) as usize)
    }

    fn host(args: &UpArgs, memory: &Access<'_>) -> Result<(), Fault> {
        let sizes = &args.sizes;
        let (rows, hidden, k) = (sizes.rows as usize, sizes.hidden as usize, sizes.k as usize);
        let (inner, shared_inner) = (sizes.inner as usize, sizes.shared_inner as usize);
        let x = widened(memory.read::<E>(args.x.cast(), rows * hidden)?);
        let groups = sizes.groups(memory.read(args.ids, rows * k)?, memory)?;
        let [routed, shared] = sizes.up(F::FORMAT, S::FORMAT);
        let gate_up = Weights::<E>::read(&routed, sizes.experts as usize, args.gate_up, memory)?;
        let shared = Weights::<E>::read(&shared, 1, args.shared_gate_up, memory)?;
        let a = memory.write::<E>(args.a.cast(), rows * k * inner)?;
        let s = memory.write::<E>(args.s.cast(), rows * shared_inner)?;

        let products = spread::map(groups, 2 * rows * sizes.work(), |(id, pairs)| {
            let x = gather(&x, hidden, pairs.iter().map(|pair| pair / k));
            (product(Columns::all(&x, hidden), gate_up.matrix(id, 2 * inner)), pairs)
        });
        for (y, pairs) in products {
            for (i, pair) in pairs.iter().enumerate() {
                activate(&y[i * 2 * inner..], &mut a[pair * inner..][..inner]);
            }
        }
        let y = product(Columns::all(&x, hidden), shared);
        for (r, s) in s.chunks_exact_mut(shared_inner).enumerate() {
            activate(&y[r * 2 * shared_inner..], s);
        }
        Ok(())
    }
}

impl<E: Element, F: WeightFormat, S: WeightFormat> Kernel for ExpertsDown<E, F, S> {
    type Args = DownArgs;
    const NAME: &'static str = named!("experts_down", "");
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = twin::<E>(F::FORMAT, S::FORMAT, Self::NAME, PLACES * 32, DOWN_SHARED);

    fn check(args: &DownArgs) -> Result<(), String> {
        args.sizes.check()?;
        args.sizes.check_cuts(F::FORMAT, S::FORMAT)
    }

    fn grid(args: &DownArgs) -> Grid {
        let groups = args.sizes.rows.div_ceil(DOWN_ROWS);
        let tiles = args.sizes.hidden.div_ceil(TILE as u32);
        let runs = runs(tiles, groups * args.sizes.cuts, DOWN_TILES, 2 * MULTIPROCESSORS);
        Grid::plane((runs * groups) as usize, args.sizes.cuts as usize)
    }

    fn host(args: &DownArgs, memory: &Access<'_>) -> Result<(), Fault> {
        let sizes = &args.sizes;
        let (rows, hidden, places) = (sizes.rows as usize, sizes.hidden as usize, sizes.k as usize + 1);
        let weights = memory.read(args.weights, rows * places)?;
        let ids = memory.read(args.ids, rows * sizes.k as usize)?;
        let products = sizes.products::<E>(
            [args.a, args.s, args.down, args.shared_down],
            [F::FORMAT, S::FORMAT],
            ids,
            memory,
        )?;
        let p = memory.write(args.p, sizes.cuts as usize * rows * hidden)?;
        sum(&products, weights, places, hidden, p);
        Ok(())
    }
}

impl Kernel for ExpertsGroup {
    type Args = GroupArgs;
    const NAME: &'static str = "experts_group";
    const ELEMENT: &'static str = "";
    const TWIN: Option<Twin> = source::plain(&source::EXPERTS, Self::NAME, 256);

    fn check(args: &GroupArgs) -> Result<(), String> {
        args.sizes.check()
    }

    fn grid(args: &GroupArgs) -> Grid {
        Grid::line(args.sizes.experts as usize)
    }

    fn host(args: &GroupArgs, memory: &Access<'_>) -> Result<(), Fault> {
        let sizes = &args.sizes;
        let pairs = (sizes.rows * sizes.k) as usize;
        let groups = sizes.groups(memory.read(args.ids, pairs)?, memory)?;
        let list = memory.write(args.list, pairs)?;
        let starts = memory.write(args.starts, sizes.experts as usize + 1)?;
        let mut next = 0;
        let mut from = 0;
        for (expert, group) in groups {
            starts[from..=expert].fill(next as u32);
            for pair in group {
                list[next] = pair as u32;
                next += 1;
            }
            from = expert + 1;
        }
        starts[from..].fill(next as u32);
        Ok(())
    }
}

impl<E: Element, F: WeightFormat, S: WeightFormat> Kernel for ExpertsProducts<E, F, S> {
    type Args = ProductsArgs;
    const NAME: &'static str = named!("experts_products", "");
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> =
        twin::<E>(F::FORMAT, S::FORMAT, Self::NAME, 256, parts_shared(F::FORMAT, S::FORMAT));

    fn check(args: &ProductsArgs) -> Result<(), String> {
        args.sizes.check()?;
        args.sizes.check_cuts(F::FORMAT, S::FORMAT)
    }

    fn grid(args: &ProductsArgs) -> Grid {
        let runs = (args.sizes.hidden as usize).div_ceil(TILE).div_ceil(PART_TILES);
        Grid::plane(runs * args.sizes.work_groups(), args.sizes.cuts as usize)
    }

    fn host(args: &ProductsArgs, memory: &Access<'_>) -> Result<(), Fault> {
        let sizes = &args.sizes;
        let (rows, hidden, k) = (sizes.rows as usize, sizes.hidden as usize, sizes.k as usize);
        let list = memory.read(args.list, rows * k)?;
        let starts = memory.read(args.starts, sizes.experts as usize + 1)?;
        let mut ids = vec![0; rows * k];
        for expert in 0..sizes.experts as usize {
            for &pair in &list[starts[expert] as usize..starts[expert + 1] as usize] {
                ids[pair as usize] = expert as u32;
            }
        }
        let products = sizes.products::<E>(
            [args.a, args.s, args.down, args.shared_down],
            [F::FORMAT, S::FORMAT],
            &ids,
            memory,
        )?;
        memory
            .write(args.products, sizes.cuts as usize * rows * (k + 1) * hidden)?
            .copy_from_slice(&products);
        Ok(())
    }
}

impl Kernel for ExpertsSum {
    type Args = SumArgs;
    const NAME: &'static str = "experts_sum";
    const ELEMENT: &'static str = "";
    const TWIN: Option<Twin> = source::plain(&source::EXPERTS, Self::NAME, 256);

    fn check(args: &SumArgs) -> Result<(), String> {
        args.sizes.check()
    }

    fn grid(args: &SumArgs) -> Grid {
        Grid::plane(args.sizes.rows as usize, args.sizes.cuts as usize)
    }

    fn host(args: &SumArgs, memory: &Access<'_>) -> Result<(), Fault> {
        let sizes = &args.sizes;
        let (rows, hidden, places) = (sizes.rows as usize, sizes.hidden as usize, sizes.k as usize + 1);
        sizes.groups(memory.read(args.ids, rows * sizes.k as usize)?, memory)?;
        let cuts = sizes.cuts as usize;
        let products = memory.read(args.products, cuts * rows * places * hidden)?;
        let weights = memory.read(args.weights, rows * places)?;
        sum(products, weights, places, hidden, memory.write(args.p, cuts * rows * hidden)?);
        Ok(())
    }
}

/// Blocks of the twin of [`ExpertsUp`] that a multiprocessor runs at once.
const fn up_blocks(routed: Format, shared: Format) -> u32 {
    match (routed, shared) {
        (Format::Plain, Format::Plain) => 4,
        (Format::Nvfp4, _) => 2,
        _ => 3,
    }
}

/// Runs of about equal length, of at most `most` tiles, that the tiles of each of `lists` are cut into: as many as fill
/// whole waves of blocks, of which `at_once` run.
fn runs(tiles: u32, lists: u32, most: u32, at_once: u32) -> u32 {
    let waves = (lists * tiles.div_ceil(most)).div_ceil(at_once);
    (waves * at_once / lists).clamp(tiles.div_ceil(most), tiles)
}

/// Adds up the places of each row in order, weighed. `products` is `[cuts, rows, places, hidden]`.
fn sum(products: &[f32], weights: &[f32], places: usize, hidden: usize, p: &mut [f32]) {
    let rows = weights.len() / places;
    for (at, (p, products)) in
        p.chunks_exact_mut(hidden).zip(products.chunks_exact(places * hidden)).enumerate()
    {
        let weights = &weights[at % rows * places..][..places];
        p.fill(0.0);
        for (weight, product) in weights.iter().zip(products.chunks_exact(hidden)) {
            add(*weight, product, p);
        }
    }
}

/// Gate and up rows of an inner width.
fn pairs(inner: usize, columns: usize) -> Matrix {
    Matrix::plain(2 * inner, columns).grouped(2)
}

/// The named rows of `x`, one after another.
fn gather(x: &[f32], width: usize, rows: impl Iterator<Item = usize>) -> Vec<f32> {
    rows.flat_map(|row| &x[row * width..][..width]).copied().collect()
}

/// A row of gate and up products, `[2 * inner]`, activated.
fn activate<E: Element>(y: &[f32], a: &mut [E]) {
    let (gate, up) = y[..2 * a.len()].split_at(a.len());
    for ((a, gate), up) in a.iter_mut().zip(gate).zip(up) {
        *a = E::narrow(silu(E::round(*gate)) * E::round(*up));
    }
}

/// Adds a row of a product, weighed.
fn add(weight: f32, y: &[f32], p: &mut [f32]) {
    p.iter_mut().zip(y).for_each(|(p, y)| *p += weight * y);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_hold_no_more_tiles_than_a_block_and_fill_waves() {
        for tiles in [1, 2, 7, 80, 160] {
            for lists in [1, 2, 3, 10, 160, 640] {
                for (most, at_once) in [(20, 396), (10, 264)] {
                    let runs = runs(tiles, lists, most, at_once);
                    let words = format!("{tiles} tiles, {lists} lists: {runs} runs");
                    assert!((1..=tiles).contains(&runs) && tiles.div_ceil(runs) <= most, "{words}");
                    // As the kernels cut them: every tile once, none more than `most`.
                    let ends: Vec<u32> = (0..=runs).map(|run| run * tiles / runs).collect();
                    assert!(
                        ends.windows(2).all(|ends| ends[1] > ends[0] && ends[1] - ends[0] <= most),
                        "{words}"
                    );
                    assert_eq!((ends[0], ends[runs as usize]), (0, tiles), "{words}");
                    // One run more of each list would take another wave, or there are no more tiles.
                    let waves = |runs: u32| (lists * runs).div_ceil(at_once);
                    assert!(runs == tiles || waves(runs + 1) > waves(runs), "{words}");
                }
            }
        }
    }

    #[test]
    fn grids_count_on_as_many_blocks_as_the_sources_ask_for() {
        const FORMATS: [Format; 3] = [Format::Plain, Format::Fp8, Format::Nvfp4];
        let mut seen = 0;
        for (routed, shared) in FORMATS.into_iter().flat_map(|routed| FORMATS.map(|shared| (routed, shared)))
        {
            let Some(source) = source_of(routed, shared) else { continue };
            let bounds = format!("__launch_bounds__(UP_THREADS, {}) experts_up", up_blocks(routed, shared));
            let entry =
                source.text.lines().find(|line| line.contains(" experts_up") && !line.contains("_prompt("));
            let entry = entry.expect("it has the kernel");
            assert!(entry.contains(&bounds), "{routed:?} beside {shared:?}: {entry} lacks {bounds}");
            seen += 1;
        }
        assert_eq!(seen, 7);
    }
}
