//! Linear layers: rounded, wide, and with the sum cut in two; by the route of decode rounds and by that of prompts.

use std::collections::BTreeSet;

use graph::{Kernel, Ptr};
use half::bf16;
use kernels::linear::{Args, Linear, LinearCut, LinearCutPrompt, LinearPrompt, LinearWide, LinearWidePrompt};
use kernels::numerics::Element;
use kernels::weight::Matrix;
use tests::check::{Draw, Scene, cancelling, close, same};

use crate::ops::formula::{REAL_ROWS, ROWS, dot, wide};
use crate::ops::numerics::in_order;

tests::tests! {
    any: the_formula_in_bf16, a_row_alone_is_the_row_among_others;
    host: the_formula_in_f32, sums_are_in_the_order_of_a_sum, sizes_without_a_meaning_are_refused;
    mirror: rows_alone_and_among_others_at_real_sizes;
}

/// Inner widths and outputs on and off the 16 partial sums and the tiles of four.
const SHAPES: [(usize, usize); 8] =
    [(1, 1), (2, 3), (15, 4), (16, 5), (17, 31), (40, 8), (66, 33), (200, 90)];

struct Layer<E> {
    inner: usize,
    outputs: usize,
    w: Vec<E>,
    scene: Scene,
    /// The weights in memory, whole and cut, once they were used.
    weights: [Option<Ptr<u8>>; 2],
}

impl<E: Element> Layer<E> {
    fn new(inner: usize, outputs: usize, draw: &mut Draw) -> Self {
        let w = draw.elements(inner * outputs, 1.0);
        Layer { inner, outputs, w, scene: Scene::new(), weights: [None; 2] }
    }

    /// y as [`Linear`] makes it.
    fn rounded(&mut self, x: &[E]) -> Vec<E> {
        self.run::<Linear<E>, LinearPrompt<E>, E>(x, 1)
    }

    /// y as [`LinearWide`] makes it.
    fn wide(&mut self, x: &[E]) -> Vec<f32> {
        self.run::<LinearWide<E>, LinearWidePrompt<E>, f32>(x, 1)
    }

    /// p as [`LinearCut`] makes it.
    fn cut(&mut self, x: &[E]) -> Vec<f32> {
        self.run::<LinearCut<E>, LinearCutPrompt<E>, f32>(x, 2)
    }

    /// The weights for sums of so many parts.
    fn weights(&mut self, parts: usize) -> Ptr<u8> {
        let matrix = Matrix { cuts: parts, ..Matrix::plain(self.outputs, self.inner) };
        let make = || self.scene.matrix("w", &self.w, matrix, 1).cast();
        *self.weights[parts - 1].get_or_insert_with(make)
    }

    /// What both routes make.
    fn run<D: Kernel<Args = Args>, P: Kernel<Args = Args>, Y: Element>(
        &mut self,
        x: &[E],
        parts: usize,
    ) -> Vec<Y> {
        let w = self.weights(parts);
        let (rows, scene) = (x.len() / self.inner, &mut self.scene);
        let permanent = scene.buffers();
        let count = parts * rows * self.outputs;
        let (y, y_prompt) =
            (scene.output::<Y>("y", count), scene.output::<Y>("y of the prompt route", count));
        let args = Args {
            x: scene.input("x", x).cast(),
            w,
            y: y.cast(),
            rows: rows as u32,
            inner: self.inner as u32,
            outputs: self.outputs as u32,
            stride: self.outputs as u32,
            cuts: parts as u32,
            offset: 0,
        };
        scene.run::<D>(&args);
        scene.run::<P>(&Args { y: y_prompt.cast(), ..args });
        let made = scene.read(y, count);
        same(&format!("the prompt route of {}", D::NAME), &scene.read(y_prompt, count), &made);
        scene.truncate(permanent);
        made
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
            let mut layer = Layer::<E>::new(inner, outputs, &mut draw);
            let x: Vec<E> = draw.elements(rows * inner, 2.0);
            let label = format!("{rows} rows, {inner} to {outputs}");
            let want = layer.formula(&x, 0, inner);
            close(&label, &layer.rounded(&x), &cancelling(want.iter().copied()), 1);
            close(&format!("{label}, wide"), &layer.wide(&x), &want, 0);
            if inner % 2 == 0 {
                let p: Vec<f32> = layer.cut(&x);
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
        let mut layer = Layer::<bf16>::new(inner, outputs, &mut draw);
        let (w, x) = (layer.w.clone(), draw.elements::<bf16>(rows * inner, 2.0));
        let sums = |from: usize, to: usize| -> Vec<f32> {
            let row = |x: &[bf16]| w.chunks(inner).map(|w| in_order(&x[from..to], &w[from..to])).collect();
            x.chunks(inner).flat_map(|x| -> Vec<f32> { row(x) }).collect()
        };
        let whole = sums(0, inner);
        same("wide", &layer.wide(&x), &whole);
        let rounded: Vec<bf16> = whole.iter().map(|&sum| bf16::from_f32(sum)).collect();
        same("rounded", &layer.rounded(&x), &rounded);
        let halves = [sums(0, inner / 2), sums(inner / 2, inner)].concat();
        same("cut", &layer.cut(&x), &halves);
    }
}

/// A way to run a layer: its partial sums, each of all rows.
type Form = fn(&mut Layer<bf16>, &[bf16]) -> Vec<Vec<f32>>;

const ROUNDED: Form = |layer, x| vec![layer.rounded(x).into_iter().map(f32::from).collect()];
const WIDE: Form = |layer, x| vec![layer.wide(x)];
const CUT: Form = |layer, x| {
    let p = layer.cut(x);
    p.chunks(p.len() / 2).map(<[f32]>::to_vec).collect()
};

fn a_row_alone_is_the_row_among_others() {
    for (inner, outputs) in [(34, 7), (130, 130)] {
        for form in [ROUNDED, WIDE, CUT] {
            alone_and_among(form, inner, outputs, &[2, 3, 4, 5, 31, 32, 33, 63, 64]);
        }
    }
}

/// The input of a mixer and its output, the router, and a part of the head.
fn rows_alone_and_among_others_at_real_sizes() {
    for (form, inner, outputs) in
        [(ROUNDED, 2560, 16480), (CUT, 6144, 2560), (WIDE, 2560, 513), (ROUNDED, 2560, 4096)]
    {
        alone_and_among(form, inner, outputs, &REAL_ROWS);
    }
}

fn alone_and_among(form: Form, inner: usize, outputs: usize, counts: &[usize]) {
    let mut draw = Draw::new(3);
    let mut layer = Layer::<bf16>::new(inner, outputs, &mut draw);
    for &rows in counts {
        let x: Vec<bf16> = draw.elements(rows * inner, 2.0);
        let parts = form(&mut layer, &x);
        for row in BTreeSet::from([0, rows / 2, rows - 1]) {
            let alone = form(&mut layer, &x[row * inner..][..inner]);
            for (among, alone) in parts.iter().zip(&alone) {
                let label = format!("{inner} to {outputs}, row {row} of {rows}");
                same(&label, &among[row * outputs..][..outputs], alone);
            }
        }
    }
}

fn sizes_without_a_meaning_are_refused() {
    let scene = Scene::new();
    let args = Args { rows: 1, inner: 3, outputs: 1, stride: 1, cuts: 1, ..bytemuck::Zeroable::zeroed() };
    let why = scene.refused::<LinearCut<f32>>(&Args { cuts: 2, ..args });
    assert!(why.contains("inner 3 in 2 cuts: a multiple of them, which are 1 to 2"), "{why}");
    for (why, cuts) in [
        (scene.refused::<Linear<f32>>(&Args { inner: 2, cuts: 2, ..args }), 2),
        (scene.refused::<LinearCut<f32>>(&Args { inner: 3, cuts: 3, ..args }), 3),
        (scene.refused::<LinearCut<f32>>(&Args { inner: 2, cuts: 0, ..args }), 0),
    ] {
        assert!(why.contains(&format!("in {cuts} cuts")), "{why}");
    }
    for args in [Args { rows: 0, ..args }, Args { inner: 0, ..args }, Args { outputs: 0, ..args }] {
        for why in [
            scene.refused::<Linear<f32>>(&args),
            scene.refused::<LinearWide<f32>>(&args),
            scene.refused::<LinearCut<f32>>(&args),
        ] {
            assert!(why.contains("must all be positive"), "{why}");
        }
    }
    let why = scene.refused::<Linear<f32>>(&Args { outputs: 2, ..args });
    assert!(why.contains("stride 1 is less than outputs 2"), "{why}");
}
