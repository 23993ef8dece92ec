//! The experts of a mixture of experts: up and down projections of the chosen and the shared one.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};

use crate::matrix::{Columns, product};
use crate::numerics::{CUTS, Element, silu, widened};
use crate::source::{self, NARROW_OUTPUTS};
use crate::spread;

/// Gate and up projections of each row's experts.
///
/// ```text
/// a[r, j, i] = r16(silu(r16(gate[e] row i . x[r])) * r16(up[e] row i . x[r]))      e = ids[r, j]
/// s[r, i]    = likewise with the shared expert
/// ```
/// Shapes     x: `[rows, hidden]`; gate_up: `[experts, 2 * inner, hidden]`, gate rows first;
///            shared_gate_up: `[2 * shared_inner, hidden]`; a: `[rows, k, inner]`; s: `[rows, shared_inner]`;
///            all elements; ids: `[rows, k]`
/// Domain     ids below experts
/// Effects    writes all of a and s
/// Source     MODEL: mixture of experts
pub struct ExpertsUp<E>(PhantomData<E>);

/// Down projections of each row's experts, weighed and summed, cut in two over the inner widths.
///
/// ```text
/// p[c, r, o] = sum over j of weights[r, j] * (down[e] row o . a[r, j] over half c)      e = ids[r, j]
///              + weights[r, k] * (shared_down row o . s[r] over half c)
/// ```
/// The sum over j runs in order, from 0, the shared expert last; nothing is rounded.
///
/// Shapes     a, s, ids: as [`ExpertsUp`]; weights: `[rows, k + 1]` f32; down: `[experts, hidden, inner]`,
///            shared_down: `[hidden, shared_inner]` elements; p: `[2, rows, hidden]` f32
/// Domain     ids below experts; inner and shared_inner are even
/// Effects    writes all of p
/// Source     MODEL: mixture of experts, Roundhouse's numerics
pub struct ExpertsDown<E>(PhantomData<E>);

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
}

/// Arguments of [`ExpertsUp`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct UpArgs {
    /// x.
    pub x: Ptr<u8>,
    /// ids.
    pub ids: Ptr<u32>,
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

/// Rows up to which the CUDA twin of [`ExpertsUp`] takes every (row, place) by itself; more are grouped by
/// expert. The bits are the same.
pub(crate) const ALONE_ROWS: u32 = 16;

/// Rows of the shared expert that a block of that twin takes.
pub(crate) const SHARED_ROWS: u32 = 64;

impl Sizes {
    fn check(&self) -> Result<(), String> {
        let Sizes { rows, hidden, inner, shared_inner, experts, k } = *self;
        if [rows, hidden, inner, shared_inner, experts, k].contains(&0) {
            return Err(format!("all of {self:?} must be positive"));
        }
        match k <= experts {
            true => Ok(()),
            false => Err(format!("k {k} is more than experts {experts}")),
        }
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

impl<E: Element> Kernel for ExpertsUp<E> {
    type Args = UpArgs;
    const NAME: &'static str = "experts_up";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::matrix_twin::<E>(&source::EXPERTS, Self::NAME, 256);

    fn check(args: &UpArgs) -> Result<(), String> {
        args.sizes.check()
    }

    fn grid(args: &UpArgs) -> Grid {
        let Sizes { rows, inner, shared_inner, experts, k, .. } = args.sizes;
        let tiles = inner.max(shared_inner).div_ceil(NARROW_OUTPUTS) as usize;
        let groups = match rows <= ALONE_ROWS {
            true => rows * (k + 1),
            false => rows.div_ceil(SHARED_ROWS) + experts,
        };
        Grid::line(tiles * groups as usize)
    }

    fn host(args: &UpArgs, memory: &Access<'_>) -> Result<(), Fault> {
        let sizes = &args.sizes;
        let (rows, hidden, k) = (sizes.rows as usize, sizes.hidden as usize, sizes.k as usize);
        let (inner, shared_inner) = (sizes.inner as usize, sizes.shared_inner as usize);
        let x = widened(memory.read::<E>(args.x.cast(), rows * hidden)?);
        let groups = sizes.groups(memory.read(args.ids, rows * k)?, memory)?;
        let expert = 2 * inner * hidden;
        let gate_up = memory.read::<E>(args.gate_up.cast(), sizes.experts as usize * expert)?;
        let shared = memory.read::<E>(args.shared_gate_up.cast(), 2 * shared_inner * hidden)?;
        let a = memory.write::<E>(args.a.cast(), rows * k * inner)?;
        let s = memory.write::<E>(args.s.cast(), rows * shared_inner)?;

        let products = spread::map(groups, 2 * rows * sizes.work(), |(id, pairs)| {
            let x = gather(&x, hidden, pairs.iter().map(|pair| pair / k));
            let weights = Columns::all(&gate_up[id * expert..][..expert], hidden);
            (product(Columns::all(&x, hidden), weights), pairs)
        });
        for (y, pairs) in products {
            for (i, pair) in pairs.iter().enumerate() {
                activate(&y[i * 2 * inner..], &mut a[pair * inner..][..inner]);
            }
        }
        let y = product(Columns::all(&x, hidden), Columns::all(shared, hidden));
        for (r, s) in s.chunks_exact_mut(shared_inner).enumerate() {
            activate(&y[r * 2 * shared_inner..], s);
        }
        Ok(())
    }
}

impl<E: Element> Kernel for ExpertsDown<E> {
    type Args = DownArgs;
    const NAME: &'static str = "experts_down";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::twin::<E>(&source::EXPERTS, Self::NAME, 256);

    fn check(args: &DownArgs) -> Result<(), String> {
        args.sizes.check()?;
        let Sizes { inner, shared_inner, .. } = args.sizes;
        match [inner, shared_inner].iter().all(|width| width.is_multiple_of(CUTS as u32)) {
            true => Ok(()),
            false => Err(format!(
                "inner {inner} and shared_inner {shared_inner} must be multiples of the {CUTS} cuts"
            )),
        }
    }

    fn grid(args: &DownArgs) -> Grid {
        let Sizes { rows, hidden, .. } = args.sizes;
        Grid::plane(hidden.div_ceil(NARROW_OUTPUTS) as usize * rows as usize, CUTS)
    }

    fn host(args: &DownArgs, memory: &Access<'_>) -> Result<(), Fault> {
        let sizes = &args.sizes;
        let (rows, hidden, k) = (sizes.rows as usize, sizes.hidden as usize, sizes.k as usize);
        let (inner, shared_inner) = (sizes.inner as usize, sizes.shared_inner as usize);
        let a = widened(memory.read::<E>(args.a.cast(), rows * k * inner)?);
        let s = widened(memory.read::<E>(args.s.cast(), rows * shared_inner)?);
        let groups = sizes.groups(memory.read(args.ids, rows * k)?, memory)?;
        let weights = memory.read(args.weights, rows * (k + 1))?;
        let expert = hidden * inner;
        let down = memory.read::<E>(args.down.cast(), sizes.experts as usize * expert)?;
        let shared = memory.read::<E>(args.shared_down.cast(), hidden * shared_inner)?;
        let p = memory.write(args.p, CUTS * rows * hidden)?;

        // Per used expert and cut, a product `[pairs, hidden]`; per pair, which product and row.
        let mut found = vec![(0, 0); rows * k];
        for (group, (_, pairs)) in groups.iter().enumerate() {
            pairs.iter().enumerate().for_each(|(i, &pair)| found[pair] = (group, i));
        }
        for (cut, p) in p.chunks_exact_mut(rows * hidden).enumerate() {
            let products = spread::map(groups.iter().collect(), rows * sizes.work(), |(id, pairs)| {
                let a = gather(&a, inner, pairs.iter().copied());
                product(half(&a, inner, cut), half(&down[id * expert..][..expert], inner, cut))
            });
            let shared = product(half(&s, shared_inner, cut), half(shared, shared_inner, cut));
            for (r, p) in p.chunks_exact_mut(hidden).enumerate() {
                let weights = &weights[r * (k + 1)..][..k + 1];
                p.fill(0.0);
                for (weight, &(group, i)) in weights.iter().zip(&found[r * k..][..k]) {
                    add(*weight, &products[group][i * hidden..], p);
                }
                add(weights[k], &shared[r * hidden..], p);
            }
        }
        Ok(())
    }
}

/// Columns of half `cut` of a matrix of `inner` columns.
fn half<T>(matrix: &[T], inner: usize, cut: usize) -> Columns<'_, T> {
    let half = inner / CUTS;
    Columns { matrix, inner, from: cut * half, to: (cut + 1) * half }
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
