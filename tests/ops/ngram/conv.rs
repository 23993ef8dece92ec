//! The short convolution of the n-gram embedding.

use half::bf16;
use kernels::ngram::{ConvArgs, NgramConv};
use kernels::numerics::Element;
use kernels::state::{Part, RowRange};
use tests::check::{Draw, Scene, Want, close, facts, r16, same};

use crate::ops::formula::silu;

tests::tests! {
    any: the_formula_in_bf16, two_launches_are_one, a_row_alone_is_the_row_among_others;
    host: the_formula_in_f32;
}

const WIDTH: usize = 22;
const SLOTS: usize = 4;
/// Elements between two windows of a slab that belong to nobody.
const REST: usize = 32;

/// Weights, and the windows of a slab.
#[derive(Clone)]
struct Layer<E> {
    taps: usize,
    dilation: usize,
    weight: Vec<E>,
    windows: Vec<E>,
}

/// The inputs of consecutive rows.
struct Rows<E> {
    gv: Vec<E>,
    cn: Vec<E>,
    streams: Vec<E>,
}

impl<E: Element> Rows<E> {
    fn new(rows: usize, draw: &mut Draw) -> Self {
        let mut values = || draw.elements(rows * WIDTH, 2.0);
        Rows { gv: values(), cn: values(), streams: values() }
    }

    fn part(&self, from: usize, count: usize) -> Rows<E> {
        let part = |values: &[E]| values[from * WIDTH..][..count * WIDTH].to_vec();
        Rows { gv: part(&self.gv), cn: part(&self.cn), streams: part(&self.streams) }
    }
}

impl<E: Element> Layer<E> {
    fn new(taps: usize, dilation: usize, draw: &mut Draw) -> Self {
        let weight = draw.elements(WIDTH * taps, 1.0);
        Layer { taps, dilation, weight, windows: draw.elements(SLOTS * slot(taps, dilation), 1.5) }
    }

    /// Runs rows of the given slots, behind `first` rows of others; returns the new streams of every row.
    fn run(&mut self, first: usize, runs: &[(u32, usize)], rows: &Rows<E>) -> Vec<E> {
        let mut all = vec![(SLOTS as u32, first)];
        all.extend(runs);
        let facts = facts(&all);
        let pad = |values: &[E]| {
            let mut padded = vec![E::narrow(f32::NAN); first * WIDTH];
            padded.extend(values);
            padded
        };
        let mut scene = Scene::new();
        let windows = scene.state("windows", &self.windows);
        let streams = scene.state("streams", &pad(&rows.streams));
        let args = ConvArgs {
            rows: RowRange {
                facts: scene.input("facts", &facts),
                first: first as u32,
                count: (facts.len() - first) as u32,
            },
            gv: scene.input("gv", &pad(&rows.gv)).cast(),
            cn: scene.input("cn", &pad(&rows.cn)).cast(),
            weight: scene.input("weight", &self.weight).cast(),
            window: Part {
                base: windows.cast(),
                stride: (slot(self.taps, self.dilation) * size_of::<E>()) as u64,
            },
            streams: streams.cast(),
            width: WIDTH as u32,
            taps: self.taps as u32,
            dilation: self.dilation as u32,
            zero: 0,
        };
        scene.run::<NgramConv<E>>(&args);
        self.windows = scene.read(windows, self.windows.len());
        let streams = scene.read(streams, facts.len() * WIDTH);
        same("rows before the range", &streams[..first * WIDTH], &vec![E::narrow(f32::NAN); first * WIDTH]);
        streams[first * WIDTH..].to_vec()
    }

    /// The formula over the window and the rows of one slot; returns the new streams and the new window.
    fn formula(&self, in_slot: usize, rows: &Rows<E>) -> (Vec<Want>, Vec<E>) {
        let depth = (self.taps - 1) * self.dilation;
        let mut seen = self.windows[in_slot * slot(self.taps, self.dilation)..][..depth * WIDTH].to_vec();
        seen.extend(&rows.cn);
        let wide = |x: E| f64::from(x.widen());
        let mut streams = Vec::new();
        for (i, (r, gv)) in rows.streams.iter().zip(&rows.gv).enumerate() {
            let (t, ch) = (i / WIDTH, i % WIDTH);
            let term = |j: usize| {
                wide(self.weight[ch * self.taps + j]) * wide(seen[(t + j * self.dilation) * WIDTH + ch])
            };
            let cv = r16::<E>((0..self.taps).map(term).sum());
            let value = r16::<E>(wide(*r) + wide(*gv) + silu(cv));
            streams.push(Want { value, scale: wide(*r).abs() + wide(*gv).abs() + 1.1 * cv.abs() });
        }
        (streams, seen[seen.len() - depth * WIDTH..].to_vec())
    }
}

fn slot(taps: usize, dilation: usize) -> usize {
    (taps - 1) * dilation * WIDTH + REST
}

fn against_the_formula<E: Element>() {
    let mut draw = Draw::new(1);
    for (taps, dilation) in [(4, 3), (4, 2), (2, 5), (1, 3)] {
        for n in [1, 2, 3, 8, 9, 10, 65] {
            let layer = Layer::<E>::new(taps, dilation, &mut draw);
            let runs = [(2, n), (0, 1), (3, 4)];
            let rows = Rows::new(n + 5, &mut draw);
            let mut after = layer.clone();
            let streams = after.run(n % 3, &runs, &rows);
            let mut want_windows = layer.windows.clone();
            let mut row = 0;
            for (in_slot, n) in runs {
                let (want, window) = layer.formula(in_slot as usize, &rows.part(row, n));
                let label = format!("{n} rows, {taps} taps {dilation} apart");
                close(&label, &streams[row * WIDTH..][..n * WIDTH], &want, 1);
                let at = in_slot as usize * slot(taps, dilation);
                want_windows[at..][..window.len()].copy_from_slice(&window);
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

fn two_launches_are_one() {
    let mut draw = Draw::new(2);
    for n in [2, 3, 10, 19, 64] {
        for cut in [1, n / 2, n - 1] {
            let layer = Layer::<bf16>::new(4, 3, &mut draw);
            let rows = Rows::new(n, &mut draw);
            let (mut whole, mut parts) = (layer.clone(), layer);
            let streams = whole.run(0, &[(1, n)], &rows);
            let mut pieces = parts.run(0, &[(1, cut)], &rows.part(0, cut));
            pieces.extend(parts.run(1, &[(1, n - cut)], &rows.part(cut, n - cut)));
            same("streams", &streams, &pieces);
            same("windows", &whole.windows, &parts.windows);
        }
    }
}

fn a_row_alone_is_the_row_among_others() {
    let mut draw = Draw::new(3);
    for others in [1, 2, 7, 15, 63] {
        let layer = Layer::<bf16>::new(4, 3, &mut draw);
        let rows = Rows::new(others + 1, &mut draw);
        let (mut crowded, mut alone) = (layer.clone(), layer);
        let streams = crowded.run(0, &[(0, others), (3, 1)], &rows);
        let row = alone.run(0, &[(3, 1)], &rows.part(others, 1));
        same("row", &streams[others * WIDTH..], &row);
        let at = 3 * slot(4, 3);
        same("window", &crowded.windows[at..], &alone.windows[at..]);
    }
}
