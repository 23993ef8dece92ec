//! Linear layers: rounded, wide, and with the sum cut in two.

use graph::Kernel;
use half::bf16;
use kernels::linear::{Args, Linear, LinearCut, LinearWide};
use kernels::numerics::Element;
use tests::check::{Draw, Scene, cancelling, close, same};

use crate::ops::formula::{ROWS, dot, wide};
use crate::ops::numerics::in_order;

tests! {
    any: the_formula_in_bf16, a_row_alone_is_the_row_among_others;
    host: the_formula_in_f32, sums_are_in_the_order_of_a_sum, sizes_without_a_meaning_are_refused;
}

/// Inner widths and outputs on and off the 16 partial sums and the tiles of four.
const SHAPES: [(usize, usize); 8] =
    [(1, 1), (2, 3), (15, 4), (16, 5), (17, 31), (40, 8), (66, 33), (200, 90)];

struct Layer<E> {
    inner: usize,
    outputs: usize,
    w: Vec<E>,
}

impl<E: Element> Layer<E> {
    fn new(inner: usize, outputs: usize, draw: &mut Draw) -> Self {
        Layer { inner, outputs, w: draw.elements(inner * outputs, 1.0) }
    }

    fn run<K: Kernel<Args = Args>, Y: Element>(&self, x: &[E], parts: usize) -> Vec<Y> {
        let rows = x.len() / self.inner;
        let mut scene = Scene::new();
        let y = scene.output::<Y>("y", parts * rows * self.outputs);
        let args = Args {
            x: scene.input("x", x).cast(),
            w: scene.input("w", &self.w).cast(),
            y: y.cast(),
            rows: rows as u32,
            inner: self.inner as u32,
            outputs: self.outputs as u32,
            zero: 0,
        };
        scene.run::<K>(&args);
        scene.read(y, parts * rows * self.outputs)
    }

    /// The sums over columns `from..to`.
    fn formula(&self, x: &[E], from: usize, to: usize) -> Vec<f64> {
        let w: Vec<Vec<f64>> = self.w.chunks(self.inner).map(|w| wide(&w[from..to])).collect();
        let row = |x: &[E]| {
            let x = wide(&x[from..to]);
            w.iter().map(|w| dot(&x, w)).collect::<Vec<_>>()
        };
        x.chunks(self.inner).flat_map(row).collect()
    }
}

fn against_the_formula<E: Element>() {
    let mut draw = Draw::new(1);
    for (inner, outputs) in SHAPES {
        for rows in ROWS {
            let layer = Layer::<E>::new(inner, outputs, &mut draw);
            let x: Vec<E> = draw.elements(rows * inner, 2.0);
            let label = format!("{rows} rows, {inner} to {outputs}");
            let want = layer.formula(&x, 0, inner);
            close(&label, &layer.run::<Linear<E>, E>(&x, 1), &cancelling(want.iter().copied()), 1);
            close(&format!("{label}, wide"), &layer.run::<LinearWide<E>, f32>(&x, 1), &want, 0);
            if inner % 2 == 0 {
                let p: Vec<f32> = layer.run::<LinearCut<E>, f32>(&x, 2);
                let (first, second) = p.split_at(rows * outputs);
                close(&format!("{label}, first half"), first, &layer.formula(&x, 0, inner / 2), 0);
                close(&format!("{label}, second half"), second, &layer.formula(&x, inner / 2, inner), 0);
            }
        }
    }
}

fn the_formula_in_f32() {
    against_the_formula::<f32>();
}

fn the_formula_in_bf16() {
    against_the_formula::<bf16>();
}

/// Every output is the dot product in the one order of a sum, bit for bit, however the work is cut up.
fn sums_are_in_the_order_of_a_sum() {
    let mut draw = Draw::new(2);
    // The last two are large enough to be spread over threads, by outputs and by rows.
    for (rows, inner, outputs) in [(5, 66, 9), (33, 50, 6), (3, 514, 700), (70, 130, 120)] {
        let layer = Layer::<bf16>::new(inner, outputs, &mut draw);
        let x: Vec<bf16> = draw.elements(rows * inner, 2.0);
        let sums = |from: usize, to: usize| -> Vec<f32> {
            let row =
                |x: &[bf16]| layer.w.chunks(inner).map(|w| in_order(&x[from..to], &w[from..to])).collect();
            x.chunks(inner).flat_map(|x| -> Vec<f32> { row(x) }).collect()
        };
        let whole = sums(0, inner);
        same("wide", &layer.run::<LinearWide<bf16>, f32>(&x, 1), &whole);
        let rounded: Vec<bf16> = whole.iter().map(|&sum| bf16::from_f32(sum)).collect();
        same("rounded", &layer.run::<Linear<bf16>, bf16>(&x, 1), &rounded);
        let halves = [sums(0, inner / 2), sums(inner / 2, inner)].concat();
        same("cut", &layer.run::<LinearCut<bf16>, f32>(&x, 2), &halves);
    }
}

fn a_row_alone_is_the_row_among_others() {
    let mut draw = Draw::new(3);
    for (inner, outputs) in [(34, 7), (130, 130)] {
        let layer = Layer::<bf16>::new(inner, outputs, &mut draw);
        for rows in [2, 3, 4, 5, 31, 32, 33, 63, 64] {
            let x: Vec<bf16> = draw.elements(rows * inner, 2.0);
            let y: Vec<bf16> = layer.run::<Linear<bf16>, bf16>(&x, 1);
            let y_wide: Vec<f32> = layer.run::<LinearWide<bf16>, f32>(&x, 1);
            let p: Vec<f32> = layer.run::<LinearCut<bf16>, f32>(&x, 2);
            for row in [0, rows / 2, rows - 1] {
                let x = &x[row * inner..][..inner];
                let label = format!("row {row} of {rows}");
                let at = row * outputs..(row + 1) * outputs;
                same(&label, &y[at.clone()], &layer.run::<Linear<bf16>, bf16>(x, 1));
                same(&label, &y_wide[at.clone()], &layer.run::<LinearWide<bf16>, f32>(x, 1));
                let among = [&p[at.clone()], &p[rows * outputs..][at]].concat();
                same(&label, &among, &layer.run::<LinearCut<bf16>, f32>(x, 2));
            }
        }
    }
}

fn sizes_without_a_meaning_are_refused() {
    let scene = Scene::new();
    let args = Args { rows: 1, inner: 3, outputs: 1, ..bytemuck::Zeroable::zeroed() };
    let why = scene.refused::<LinearCut<f32>>(&args);
    assert!(why.contains("inner 3 is not a multiple of the 2 cuts"), "{why}");
    for args in [Args { rows: 0, ..args }, Args { inner: 0, ..args }, Args { outputs: 0, ..args }] {
        for why in [
            scene.refused::<Linear<f32>>(&args),
            scene.refused::<LinearWide<f32>>(&args),
            scene.refused::<LinearCut<f32>>(&args),
        ] {
            assert!(why.contains("must all be positive"), "{why}");
        }
    }
}
