//! `layer_norm`: mean zero, variance one, a gain and a bias.

use half::bf16;
use kernels::layer_norm::{Args, CUDA_WIDTH, LayerNorm};
use kernels::numerics::Element;
use tests::check::{Draw, Scene, cancelling, close, same};

use crate::ops::formula::wide;

tests::tests! {
    any: the_formula_in_bf16, a_row_alone_is_the_row_among_others;
    host: the_formula_in_f32, sizes_without_a_meaning_are_refused;
}

const EPS: f32 = 1e-6;
/// On and off the runs of eight elements, and at the edges of what a block holds at once.
const WIDTHS: [usize; 10] = [1, 2, 7, 8, 32, 33, 1152, 1279, 1280, 1288];

struct Norm<E> {
    gain: Vec<E>,
    bias: Vec<E>,
}

impl<E: Element> Norm<E> {
    fn new(width: usize, draw: &mut Draw) -> Self {
        Norm { gain: draw.elements(width, 2.0), bias: draw.elements(width, 1.0) }
    }

    fn run(&self, x: &[E]) -> Vec<E> {
        let (mut scene, width) = (Scene::new(), self.gain.len());
        let y = scene.output::<E>("y", x.len());
        let args = Args {
            x: scene.input("x", x).cast(),
            gain: scene.input("gain", &self.gain).cast(),
            bias: scene.input("bias", &self.bias).cast(),
            y: y.cast(),
            rows: (x.len() / width) as u32,
            width: width as u32,
            eps: EPS,
            zero: 0,
        };
        scene.run::<LayerNorm<E>>(&args);
        scene.read(y, x.len())
    }

    fn formula(&self, x: &[E]) -> Vec<f64> {
        let x = wide(x);
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (variance + f64::from(EPS)).sqrt();
        let gains = wide(&self.gain).into_iter().zip(wide(&self.bias));
        x.iter().zip(gains).map(|(x, (gain, bias))| (x - mean) * scale * gain + bias).collect()
    }
}

fn against_the_formula<E: Element>() {
    let mut draw = Draw::new(1);
    for width in WIDTHS.into_iter().chain([CUDA_WIDTH as usize - 1, CUDA_WIDTH as usize]) {
        let norm = Norm::<E>::new(width, &mut draw);
        // Rows whose mean is far from zero, too.
        let mut x: Vec<E> = draw.elements(3 * width, 2.0);
        x[width..2 * width].iter_mut().for_each(|x| *x = E::narrow(x.widen() + 4.0));
        let y = norm.run(&x);
        for (row, (x, y)) in x.chunks(width).zip(y.chunks(width)).enumerate() {
            let want = cancelling(norm.formula(x));
            close(&format!("row {row} of {width}"), y, &want, 1);
        }
    }
}

fn the_formula_in_bf16() {
    against_the_formula::<bf16>();
}

fn the_formula_in_f32() {
    against_the_formula::<f32>();
}

fn a_row_alone_is_the_row_among_others() {
    let mut draw = Draw::new(2);
    for width in [31, 72, 1152] {
        let norm = Norm::<bf16>::new(width, &mut draw);
        let x: Vec<bf16> = draw.elements(65 * width, 3.0);
        let y = norm.run(&x);
        for row in [0, 1, 32, 64] {
            let at = row * width..(row + 1) * width;
            same(&format!("row {row} of {width}"), &norm.run(&x[at.clone()]), &y[at]);
        }
    }
}

fn sizes_without_a_meaning_are_refused() {
    let scene = Scene::new();
    let args = Args { rows: 1, width: 1, ..bytemuck::Zeroable::zeroed() };
    for args in [Args { rows: 0, ..args }, Args { width: 0, ..args }] {
        let why = scene.refused::<LayerNorm<f32>>(&args);
        assert!(why.contains("both positive"), "{why}");
    }
}
