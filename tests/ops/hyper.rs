//! Hyper-connections: down to the low rank, and up to one block's input.

use std::collections::BTreeSet;

use graph::Ptr;
use half::bf16;
use kernels::hyper::{DownArgs, MixDown, MixDownPrompt, MixUp, MixUpPrompt, UpArgs};
use kernels::numerics::Element;
use kernels::weight::Matrix;
use tests::check::{Draw, Scene, Want, close, poisoned, r16, same};
use tests::differ::Kind;

use crate::ops::formula::{REAL_ROWS, ROWS, dot, sigmoid, silu, sixteenths, wide};

tests::tests! {
    any: the_formula_in_bf16, a_row_alone_is_the_row_among_others;
    host: the_formula_in_f32, zero_weights_mix_evenly, sizes_without_a_meaning_are_refused;
    mirror: rows_alone_and_among_others_at_real_sizes;
}

const STREAMS: usize = 4;

struct Mixer<E> {
    hidden: usize,
    rank: usize,
    down: Vec<E>,
    injection: Vec<E>,
    up: Vec<E>,
}

impl<E: Element> Mixer<E> {
    /// Weights with exact sums, so that only what is made of them is judged.
    fn new(hidden: usize, rank: usize, draw: &mut Draw) -> Self {
        let width = STREAMS * hidden;
        Mixer {
            hidden,
            rank,
            down: sixteenths(draw, rank * width),
            injection: sixteenths(draw, STREAMS * width),
            up: sixteenths(draw, width * rank),
        }
    }

    fn width(&self) -> usize {
        STREAMS * self.hidden
    }

    /// d and inject; inject is left as it was without an injection.
    fn run_down(&self, normed: &[E], with_injection: bool) -> (Vec<E>, Vec<f32>) {
        let rows = normed.len() / self.width();
        let mut scene = Scene::new();
        let down = match with_injection {
            true => [&self.down[..], &self.injection[..]].concat(),
            false => self.down.clone(),
        };
        let outputs = down.len() / self.width();
        let args = DownArgs {
            normed: scene.input("n", normed).cast(),
            down: scene.matrix("down", &down, Matrix::plain(outputs, self.width()), 1).cast(),
            low: Ptr::NULL,
            inject: Ptr::NULL,
            rows: rows as u32,
            streams: STREAMS as u32,
            hidden: self.hidden as u32,
            rank: self.rank as u32,
        };
        let mut run = |launch: fn(&Scene, &DownArgs)| {
            let low = scene.output::<E>("d", rows * self.rank);
            let inject = scene.output::<f32>("inject", rows * STREAMS);
            scene.holds(inject, Kind::Wide);
            let to = if with_injection { inject } else { Ptr::NULL };
            launch(&scene, &DownArgs { low: low.cast(), inject: to, ..args });
            (scene.read(low, rows * self.rank), scene.read(inject, rows * STREAMS))
        };
        let (low, inject) = run(|scene, args| scene.run::<MixDown<E>>(args));
        let (low_prompt, inject_prompt) = run(|scene, args| scene.run::<MixDownPrompt<E>>(args));
        same("d of the prompt route", &low_prompt, &low);
        same("inject of the prompt route", &inject_prompt, &inject);
        (low, inject)
    }

    fn run_up(&self, low: &[E], normed: &[E]) -> Vec<E> {
        let rows = normed.len() / self.width();
        let mut scene = Scene::new();
        let count = rows * self.hidden;
        let (mixed, mixed_prompt) =
            (scene.output::<E>("x", count), scene.output::<E>("x of the prompt route", count));
        let up = Matrix::plain(self.width(), self.rank).grouped(STREAMS);
        let args = UpArgs {
            low: scene.input("d", low).cast(),
            up: scene.matrix("up", &self.up, up, 1).cast(),
            normed: scene.input("n", normed).cast(),
            mixed: mixed.cast(),
            rows: rows as u32,
            streams: STREAMS as u32,
            hidden: self.hidden as u32,
            rank: self.rank as u32,
        };
        scene.run::<MixUp<E>>(&args);
        scene.run::<MixUpPrompt<E>>(&UpArgs { mixed: mixed_prompt.cast(), ..args });
        let made = scene.read(mixed, count);
        same("x of the prompt route", &scene.read(mixed_prompt, count), &made);
        made
    }

    /// The sums of every row of `x` with every row of `w`, as they are stored.
    fn sums(x: &[E], w: &[E], inner: usize) -> Vec<f64> {
        let (x, w) = (wide(x), wide(w));
        let row = |x: &[f64]| w.chunks(inner).map(|w| r16::<E>(dot(x, w))).collect::<Vec<_>>();
        x.chunks(inner).flat_map(row).collect()
    }

    /// x from d and n.
    fn formula_up(&self, low: &[E], normed: &[E]) -> Vec<Want> {
        let u = Self::sums(low, &self.up, self.rank);
        let n = wide(normed);
        let mut mixed = Vec::new();
        for (u, n) in u.chunks(self.width()).zip(n.chunks(self.width())) {
            for j in 0..self.hidden {
                let term = |s: usize| sigmoid(u[s * self.hidden + j]) * n[s * self.hidden + j];
                let size: f64 = (0..STREAMS).map(|s| term(s).abs()).sum();
                let sum: f64 = (0..STREAMS).map(term).sum();
                // A sum that cancels is off by f32 units of its terms, not by bf16 units.
                let scale = sum.abs().max(size / 1024.0) / STREAMS as f64;
                mixed.push(Want { value: sum / STREAMS as f64, scale });
            }
        }
        mixed
    }
}

fn against_the_formula<E: Element>() {
    let mut draw = Draw::new(1);
    // The last is large enough to be spread over threads.
    for (hidden, rank) in [(1, 1), (5, 3), (16, 8), (17, 15), (103, 41)] {
        for rows in ROWS {
            let mixer = Mixer::<E>::new(hidden, rank, &mut draw);
            let label = format!("{rows} rows of {hidden}, rank {rank}");
            let normed: Vec<E> = sixteenths(&mut draw, rows * mixer.width());
            let (low, inject) = mixer.run_down(&normed, true);
            let scaled = |sum: f64| sum / STREAMS as f64;
            let want: Vec<f64> = Mixer::sums(&normed, &mixer.down, mixer.width())
                .into_iter()
                .map(|sum| silu(scaled(sum)))
                .collect();
            close(&format!("{label}: d"), &low, &want, 1);
            let want: Vec<f64> = Mixer::sums(&normed, &mixer.injection, mixer.width())
                .into_iter()
                .map(|sum| 2.0 * sigmoid(scaled(sum)))
                .collect();
            close(&format!("{label}: inject"), &inject, &want, 0);

            let (same_low, nothing) = mixer.run_down(&normed, false);
            same(&format!("{label}: d without an injection"), &same_low, &low);
            poisoned(&format!("{label}: inject without an injection"), &nothing);

            let low: Vec<E> = sixteenths(&mut draw, rows * rank);
            let normed: Vec<E> = draw.elements(rows * mixer.width(), 3.0);
            let mixed = mixer.run_up(&low, &normed);
            close(&format!("{label}: x"), &mixed, &mixer.formula_up(&low, &normed), 1);
        }
    }
}

fn the_formula_in_f32() {
    against_the_formula::<f32>();
}

fn the_formula_in_bf16() {
    against_the_formula::<bf16>();
}

/// Sums of zero: d is zero, every stream takes the whole output, and x is half the mean of the streams.
fn zero_weights_mix_evenly() {
    let mixer =
        Mixer::<f32> { hidden: 2, rank: 3, down: vec![0.0; 24], injection: vec![0.0; 32], up: vec![0.0; 24] };
    let normed = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
    assert_eq!(mixer.run_down(&normed, true), (vec![0.0; 3], vec![1.0; 4]));
    assert_eq!(mixer.run_up(&[0.0; 3], &normed), [2.0, 2.5]);
}

fn a_row_alone_is_the_row_among_others() {
    for (hidden, rank) in [(19, 7), (103, 41)] {
        alone_and_among(hidden, rank, 1.0, &[2, 3, 4, 5, 31, 32, 33, 63, 64]);
    }
}

fn rows_alone_and_among_others_at_real_sizes() {
    // Sums as large as a model's, not so large that every gate is open or shut.
    alone_and_among(2560, 320, 1.0 / 16.0, &REAL_ROWS);
}

fn alone_and_among(hidden: usize, rank: usize, scale: f32, counts: &[usize]) {
    let mut draw = Draw::new(2);
    let mut mixer = Mixer::<bf16>::new(hidden, rank, &mut draw);
    let width = mixer.width();
    mixer.down = draw.elements(rank * width, scale);
    mixer.injection = draw.elements(STREAMS * width, scale);
    mixer.up = draw.elements(width * rank, scale);
    for &rows in counts {
        let normed: Vec<bf16> = draw.elements(rows * width, 2.0);
        let (low, inject) = mixer.run_down(&normed, true);
        let mixed = mixer.run_up(&low, &normed);
        for row in BTreeSet::from([0, rows / 2, rows - 1]) {
            let normed = &normed[row * width..][..width];
            let (low_alone, inject_alone) = mixer.run_down(normed, true);
            same("d", &low[row * rank..][..rank], &low_alone);
            same("inject", &inject[row * STREAMS..][..STREAMS], &inject_alone);
            let mixed_alone = mixer.run_up(&low_alone, normed);
            same("x", &mixed[row * hidden..][..hidden], &mixed_alone);
        }
    }
}

fn sizes_without_a_meaning_are_refused() {
    let scene = Scene::new();
    for (rows, streams, hidden, rank) in [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)] {
        let down = DownArgs { rows, streams, hidden, rank, ..bytemuck::Zeroable::zeroed() };
        let up = UpArgs { rows, streams, hidden, rank, ..bytemuck::Zeroable::zeroed() };
        for why in [scene.refused::<MixDown<f32>>(&down), scene.refused::<MixUp<f32>>(&up)] {
            assert!(why.contains("all positive"), "{why}");
        }
    }
}
