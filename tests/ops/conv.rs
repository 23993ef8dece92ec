//! The short convolution of the recurrent layers.

use half::bf16;
use kernels::conv::{Args, Conv};
use kernels::numerics::Element;
use kernels::state::{Part, RowRange};
use kernels::table::Fact;
use tests::check::{Draw, Scene, Want, close, facts, poisoned, r16, same};

use crate::ops::formula::silu;

tests::tests! {
    any: the_formula_in_bf16, two_launches_are_one, a_row_alone_is_the_row_among_others;
    host: the_formula_in_f32, a_fresh_slot_sees_zeros, broken_runs_are_refused;
}

const CHANNELS: usize = 37;
const STRIDE: usize = 41;
const SLOTS: usize = 4;
/// Elements between two windows of a slab that belong to nobody.
const REST: usize = 32;

/// Weights, and the windows of a slab.
#[derive(Clone)]
struct Layer<E> {
    taps: usize,
    weight: Vec<E>,
    windows: Vec<E>,
}

impl<E: Element> Layer<E> {
    fn new(taps: usize, draw: &mut Draw) -> Self {
        let slot = (taps - 1) * CHANNELS + REST;
        Layer { taps, weight: draw.elements(CHANNELS * taps, 1.0), windows: draw.elements(SLOTS * slot, 1.5) }
    }

    fn slot_elements(&self) -> usize {
        (self.taps - 1) * CHANNELS + REST
    }

    /// Runs rows of the given slots, behind `first` rows of others; returns the output of every row.
    fn run(&mut self, first: usize, runs: &[(u32, usize)], x: &[E]) -> Vec<E> {
        let mut all = vec![(SLOTS as u32, first)];
        all.extend(runs);
        let facts = facts(&all);
        let mut padded = vec![E::narrow(f32::NAN); first * STRIDE];
        padded.extend(x);
        let mut scene = Scene::new();
        let windows = scene.state("windows", &self.windows);
        let y = scene.output::<E>("y", facts.len() * CHANNELS);
        let args = Args {
            rows: RowRange {
                facts: scene.input("facts", &facts),
                first: first as u32,
                count: (facts.len() - first) as u32,
            },
            x: scene.input("x", &padded).cast(),
            weight: scene.input("weight", &self.weight).cast(),
            window: Part { base: windows.cast(), stride: (self.slot_elements() * size_of::<E>()) as u64 },
            y: y.cast(),
            channels: CHANNELS as u32,
            taps: self.taps as u32,
            stride: STRIDE as u32,
            zero: 0,
        };
        scene.run::<Conv<E>>(&args);
        self.windows = scene.read(windows, self.windows.len());
        let y = scene.read(y, facts.len() * CHANNELS);
        poisoned("rows before the range", &y[..first * CHANNELS]);
        y[first * CHANNELS..].to_vec()
    }

    /// The formula over the window and the rows, one slot; returns the output and the new window.
    fn formula(&self, slot: usize, x: &[E]) -> (Vec<Want>, Vec<E>) {
        let depth = self.taps - 1;
        let mut seen = self.windows[slot * self.slot_elements()..][..depth * CHANNELS].to_vec();
        x.chunks(STRIDE).for_each(|row| seen.extend(&row[..CHANNELS]));
        let mut y = Vec::new();
        for t in 0..x.len() / STRIDE {
            for ch in 0..CHANNELS {
                let term = |j: usize| {
                    f64::from(self.weight[ch * self.taps + j].widen())
                        * f64::from(seen[(t + j) * CHANNELS + ch].widen())
                };
                let size: f64 = (0..self.taps).map(|j| term(j).abs()).sum();
                let c = r16::<E>((0..self.taps).map(term).sum());
                let value = r16::<E>(silu(c));
                // silu has a slope of at most 1.1, and its store rounds by its own value.
                y.push(Want { value, scale: (1.1 * c.abs()).max(size / 64.0) });
            }
        }
        (y, seen[seen.len() - depth * CHANNELS..].to_vec())
    }
}

fn against_the_formula<E: Element>() {
    let mut draw = Draw::new(1);
    for taps in [1, 2, 4, 5] {
        for n in [1, 2, 3, 4, 5, 9, 64] {
            let layer = Layer::<E>::new(taps, &mut draw);
            let runs = [(2, n), (0, 1), (3, 2)];
            let x = draw.elements((n + 3) * STRIDE, 2.0);
            let mut after = layer.clone();
            let y = after.run(n % 3, &runs, &x);
            let mut want_windows = layer.windows.clone();
            let mut row = 0;
            for (slot, n) in runs {
                let (want, window) = layer.formula(slot as usize, &x[row * STRIDE..][..n * STRIDE]);
                close(&format!("{n} rows, {taps} taps"), &y[row * CHANNELS..][..n * CHANNELS], &want, 2);
                want_windows[slot as usize * layer.slot_elements()..][..window.len()]
                    .copy_from_slice(&window);
                row += n;
            }
            same("windows", &after.windows, &want_windows);
        }
    }
}

fn the_formula_in_f32() {
    against_the_formula::<f32>();
}

fn the_formula_in_bf16() {
    against_the_formula::<bf16>();
}

fn a_fresh_slot_sees_zeros() {
    let mut layer = Layer::<f32>::new(4, &mut Draw::new(2));
    layer.windows.fill(0.0);
    let x = Draw::new(3).elements::<f32>(STRIDE, 1.0);
    let y = layer.run(0, &[(1, 1)], &x);
    for ch in 0..CHANNELS {
        let c = layer.weight[ch * 4 + 3] * x[ch];
        assert!((y[ch] - c / (1.0 + (-c).exp())).abs() < 1e-6);
    }
}

fn two_launches_are_one() {
    let mut draw = Draw::new(4);
    for n in [2, 3, 4, 7, 64, 65] {
        for cut in [1, n / 2, n - 1] {
            let layer = Layer::<bf16>::new(4, &mut draw);
            let x = draw.elements(n * STRIDE, 2.0);
            let (mut whole, mut parts) = (layer.clone(), layer);
            let y = whole.run(0, &[(1, n)], &x);
            let mut pieces = parts.run(0, &[(1, cut)], &x[..cut * STRIDE]);
            pieces.extend(parts.run(1, &[(1, n - cut)], &x[cut * STRIDE..]));
            same("outputs", &y, &pieces);
            same("windows", &whole.windows, &parts.windows);
        }
    }
}

fn a_row_alone_is_the_row_among_others() {
    let mut draw = Draw::new(5);
    for others in [1, 2, 7, 15, 63] {
        let layer = Layer::<bf16>::new(4, &mut draw);
        let x = draw.elements((others + 1) * STRIDE, 2.0);
        let (mut crowded, mut alone) = (layer.clone(), layer);
        let y = crowded.run(0, &[(0, others), (3, 1)], &x);
        let row = alone.run(0, &[(3, 1)], &x[others * STRIDE..]);
        same("row", &y[others * CHANNELS..], &row);
        let at = 3 * crowded.slot_elements();
        same("window", &crowded.windows[at..], &alone.windows[at..]);
    }
}

fn broken_runs_are_refused() {
    let faults: [fn(&mut [Fact]); 3] =
        [|facts| facts[1].place = 2, |facts| facts[2].count = 4, |facts| facts[2].slot = 1];
    for break_them in faults {
        let mut facts = facts(&[(0, 3)]);
        break_them(&mut facts);
        let mut scene = Scene::new();
        let args = Args {
            rows: RowRange { facts: scene.input("facts", &facts), first: 0, count: 3 },
            x: scene.input("x", &[0f32; 3]).cast(),
            weight: scene.input("weight", &[0f32; 2]).cast(),
            window: Part { base: scene.state("windows", &[0f32; 2]).cast(), stride: 4 },
            y: scene.output::<f32>("y", 3).cast(),
            channels: 1,
            taps: 2,
            stride: 1,
            zero: 0,
        };
        let why = scene.domain_fault::<Conv<f32>>(&args);
        assert!(why.contains("rows of slot"), "{why}");
    }
}
