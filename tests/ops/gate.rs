//! The output gate of the recurrent layers.

use half::bf16;
use kernels::gate::{Args, GatedNorm, SIGMOID, SILU};
use kernels::numerics::Element;
use tests::check::{Draw, Scene, Want, close, r16, same};

use crate::ops::formula::{sigmoid, silu};

tests::tests! {
    any: the_formula_in_bf16, a_row_alone_is_the_row_among_others;
    host: the_formula_in_f32;
}

const HEADS: usize = 3;
const Z_AT: usize = 5;
const EPS: f32 = 1e-6;

#[derive(Clone, Copy)]
struct Shape {
    width: usize,
    gate: u32,
}

impl Shape {
    fn columns(&self) -> usize {
        HEADS * self.width
    }

    fn stride(&self) -> usize {
        Z_AT + self.columns() + 2
    }

    fn run<E: Element>(&self, o: &[E], x: &[E], gain: &[E]) -> Vec<E> {
        let mut scene = Scene::new();
        let y = scene.output::<E>("y", o.len());
        let args = Args {
            o: scene.input("o", o).cast(),
            x: scene.input("x", x).cast(),
            gain: scene.input("gain", gain).cast(),
            y: y.cast(),
            rows: (o.len() / self.columns()) as u32,
            heads: HEADS as u32,
            width: self.width as u32,
            stride: self.stride() as u32,
            z_at: Z_AT as u32,
            gate: self.gate,
            eps: EPS,
            zero: 0,
        };
        scene.run::<GatedNorm<E>>(&args);
        scene.read(y, o.len())
    }

    fn formula<E: Element>(&self, o: &[E], x: &[E], gain: &[E]) -> Vec<Want> {
        let wide = |x: &E| f64::from(x.widen());
        let mut y = Vec::new();
        for (t, row) in o.chunks(self.columns()).enumerate() {
            for (h, head) in row.chunks(self.width).enumerate() {
                let mean = head.iter().map(|o| wide(o) * wide(o)).sum::<f64>() / self.width as f64;
                for (j, o) in head.iter().enumerate() {
                    let z = wide(&x[t * self.stride() + Z_AT + h * self.width + j]);
                    let act = if self.gate == SILU { silu(z) } else { sigmoid(z) };
                    y.push(r16::<E>(wide(&gain[j]) * wide(o) / (mean + f64::from(EPS)).sqrt() * act).into());
                }
            }
        }
        y
    }
}

fn against_the_formula<E: Element>() {
    let mut draw = Draw::new(1);
    for gate in [SIGMOID, SILU] {
        for width in [1, 15, 16, 17, 128] {
            for rows in [1, 2, 3, 8, 9, 65] {
                let shape = Shape { width, gate };
                let o: Vec<E> = draw.elements(rows * shape.columns(), 2.0);
                let x: Vec<E> = draw.elements(rows * shape.stride(), 6.0);
                let gain: Vec<E> = draw.elements(width, 1.5);
                let label = format!("gate {gate}, width {width}, {rows} rows");
                close(&label, &shape.run(&o, &x, &gain), &shape.formula(&o, &x, &gain), 1);
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

fn a_row_alone_is_the_row_among_others() {
    let mut draw = Draw::new(2);
    let shape = Shape { width: 24, gate: SIGMOID };
    let (columns, stride) = (shape.columns(), shape.stride());
    for rows in [2, 3, 17, 64] {
        let o: Vec<bf16> = draw.elements(rows * columns, 2.0);
        let x: Vec<bf16> = draw.elements(rows * stride, 6.0);
        let gain: Vec<bf16> = draw.elements(24, 1.5);
        let y = shape.run(&o, &x, &gain);
        for row in [0, rows / 2, rows - 1] {
            let alone = shape.run(&o[row * columns..][..columns], &x[row * stride..][..stride], &gain);
            same("row", &y[row * columns..][..columns], &alone);
        }
    }
}
