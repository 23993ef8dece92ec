//! Affine layers of the vision tower, with each of their finishes.

use half::bf16;
use kernels::affine::{Affine, AffineAdd, AffineErf, AffineTanh, Args};
use kernels::numerics::Element;
use kernels::weight::Matrix;
use tests::check::{Draw, Scene, Want, close, same};

use crate::ops::formula::{dot, wide};

tests::tests! {
    any: the_formula_in_bf16, a_row_alone_is_the_row_among_others;
    host: the_formula_in_f32, sizes_without_a_meaning_are_refused;
    mirror: rows_alone_and_among_others_at_real_sizes;
}

/// Inner widths and outputs on and off units of 64, products of 16, and panels of 128 outputs.
const SHAPES: [(usize, usize); 9] =
    [(1, 1), (15, 4), (16, 5), (66, 33), (64, 127), (63, 128), (65, 129), (200, 90), (136, 260)];
/// Rows at the edges of a block of 96.
const ROWS: [usize; 8] = [1, 2, 33, 95, 96, 97, 191, 193];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Finish {
    Sum,
    Tanh,
    Erf,
    Add,
}

const FINISHES: [Finish; 4] = [Finish::Sum, Finish::Tanh, Finish::Erf, Finish::Add];

struct Layer<E> {
    inner: usize,
    outputs: usize,
    w: Vec<E>,
    bias: Vec<E>,
}

impl<E: Element> Layer<E> {
    fn new(inner: usize, outputs: usize, draw: &mut Draw) -> Self {
        let w = draw.elements(inner * outputs, (inner as f32).sqrt().recip());
        Layer { inner, outputs, w, bias: draw.elements(outputs, 1.0) }
    }

    /// What becomes of `before`.
    fn run(&self, finish: Finish, x: &[E], before: &[E]) -> Vec<E> {
        let mut scene = Scene::new();
        let y = match finish {
            Finish::Add => scene.state("y", before),
            _ => scene.output::<E>("y", before.len()),
        };
        let args = Args {
            x: scene.input("x", x).cast(),
            w: scene.matrix("w", &self.w, Matrix::plain(self.outputs, self.inner), 1).cast(),
            bias: scene.input("bias", &self.bias).cast(),
            y: y.cast(),
            rows: (x.len() / self.inner) as u32,
            inner: self.inner as u32,
            outputs: self.outputs as u32,
            zero: 0,
        };
        match finish {
            Finish::Sum => scene.run::<Affine<E>>(&args),
            Finish::Tanh => scene.run::<AffineTanh<E>>(&args),
            Finish::Erf => scene.run::<AffineErf<E>>(&args),
            Finish::Add => scene.run::<AffineAdd<E>>(&args),
        }
        scene.read(y, before.len())
    }

    fn formula(&self, finish: Finish, x: &[E], before: &[E]) -> Vec<Want> {
        let (w, bias): (Vec<Vec<f64>>, _) = (self.w.chunks(self.inner).map(wide).collect(), wide(&self.bias));
        let rows = x.chunks(self.inner).zip(before.chunks(self.outputs));
        let of = |(x, before): (&[E], &[E])| {
            let (x, before) = (wide(x), wide(before));
            let of = |(o, w): (usize, &Vec<f64>)| {
                let sum = dot(&x, w) + bias[o];
                let value = match finish {
                    Finish::Sum => sum,
                    Finish::Tanh => {
                        let root = (2.0 / std::f64::consts::PI).sqrt();
                        0.5 * sum * (1.0 + (root * (sum + 0.044_715 * sum.powi(3))).tanh())
                    }
                    Finish::Erf => sum * normal(sum),
                    Finish::Add => before[o] + sum,
                };
                // Sums cancel in f32, and what a GELU makes of them.
                Want { value, scale: value.abs().max(sum.abs() * 0.01).max(0.01) }
            };
            w.iter().enumerate().map(of).collect::<Vec<_>>()
        };
        rows.flat_map(of).collect()
    }
}

/// The share of a normal distribution below `x`, by its series, which converges everywhere.
fn normal(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= x * x / f64::from(2 * n + 1);
        sum += term;
    }
    0.5 + sum * (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt()
}

fn against_the_formula<E: Element>() {
    let mut draw = Draw::new(1);
    for (inner, outputs) in SHAPES {
        for rows in ROWS {
            let layer = Layer::<E>::new(inner, outputs, &mut draw);
            let x: Vec<E> = draw.elements(rows * inner, 3.0);
            let before: Vec<E> = draw.elements(rows * outputs, 2.0);
            for finish in FINISHES {
                let label = format!("{finish:?}, {rows} rows, {inner} to {outputs}");
                let want = layer.formula(finish, &x, &before);
                close(&label, &layer.run(finish, &x, &before), &want, 1);
            }
        }
    }
}

fn the_formula_in_bf16() {
    against_the_formula::<bf16>();
}

fn the_formula_in_f32() {
    against_the_formula::<f32>();
}

fn alone_and_among(inner: usize, outputs: usize, counts: &[usize], finishes: &[Finish]) {
    let mut draw = Draw::new(2);
    let layer = Layer::<bf16>::new(inner, outputs, &mut draw);
    for &rows in counts {
        let x: Vec<bf16> = draw.elements(rows * inner, 2.0);
        let before: Vec<bf16> = draw.elements(rows * outputs, 2.0);
        for &finish in finishes {
            let among = layer.run(finish, &x, &before);
            for row in [0, rows / 2, rows - 1] {
                let at = row * outputs..(row + 1) * outputs;
                let alone = layer.run(finish, &x[row * inner..][..inner], &before[at.clone()]);
                same(&format!("{finish:?}, {inner} to {outputs}, row {row} of {rows}"), &among[at], &alone);
            }
        }
    }
}

fn a_row_alone_is_the_row_among_others() {
    alone_and_among(34, 7, &ROWS, &FINISHES);
    alone_and_among(130, 130, &ROWS, &FINISHES);
}

/// The layers of the tower.
fn rows_alone_and_among_others_at_real_sizes() {
    use Finish::{Add, Erf, Sum, Tanh};
    for (inner, outputs, finish) in [
        (1536, 1152, Sum),
        (1152, 3456, Sum),
        (1152, 1152, Add),
        (1152, 4304, Tanh),
        (4304, 1152, Add),
        (4608, 4608, Erf),
        (4608, 2560, Sum),
    ] {
        alone_and_among(inner, outputs, &[1, 97, 200], &[finish]);
    }
}

fn sizes_without_a_meaning_are_refused() {
    let scene = Scene::new();
    let args = Args { rows: 1, inner: 1, outputs: 1, ..bytemuck::Zeroable::zeroed() };
    for args in [Args { rows: 0, ..args }, Args { inner: 0, ..args }, Args { outputs: 0, ..args }] {
        for why in [scene.refused::<Affine<f32>>(&args), scene.refused::<AffineAdd<bf16>>(&args)] {
            assert!(why.contains("must all be positive"), "{why}");
        }
    }
}
