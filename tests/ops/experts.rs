//! `experts`: the up and down projections of the chosen experts and the shared one.

use graph::Ptr;
use half::bf16;
use kernels::experts::{DownArgs, ExpertsDown, ExpertsGroup, ExpertsProducts, ExpertsSum, ExpertsUp};
use kernels::experts::{ExpertsUpPrompt, GroupArgs, ProductsArgs, Sizes, SumArgs, UpArgs};
use kernels::numerics::Element;
use kernels::weight::Matrix;
use tests::check::{Draw, Scene, close, r16, same};

use crate::ops::formula::{REAL_ROWS, dot, silu, wide};

tests::tests! {
    any: experts_bf16, a_row_is_the_same_among_others;
    host: experts_f32, an_expert_that_is_not_there_is_a_fault;
    mirror: rows_alone_and_among_others_at_real_sizes;
}

/// A mixture with drawn weights and rows, its weights in memory.
struct Mixture<E> {
    sizes: Sizes,
    x: Vec<E>,
    ids: Vec<u32>,
    weights: Vec<f32>,
    gate_up: Vec<E>,
    shared_gate_up: Vec<E>,
    down: Vec<E>,
    shared_down: Vec<E>,
    scene: Scene,
    /// gate_up, shared_gate_up, down and shared_down.
    weights_at: [Ptr<u8>; 4],
    permanent: usize,
}

/// a, s and p.
type Outputs<E> = (Vec<E>, Vec<E>, Vec<f32>);

impl<E: Element> Mixture<E> {
    fn new(sizes: Sizes, seed: u64) -> Self {
        let mut draw = Draw::new(seed);
        let Sizes { rows, hidden, inner, shared_inner, experts, k, .. } = sizes;
        let [rows, hidden, inner, shared_inner, experts, k] =
            [rows, hidden, inner, shared_inner, experts, k].map(|size| size as usize);
        let mut ids = Vec::new();
        for _ in 0..rows {
            let mut left: Vec<u32> = (0..experts as u32).collect();
            ids.extend((0..k).map(|_| left.swap_remove(draw.below(left.len()))));
        }
        let scale = 2.0 / (hidden as f32).sqrt();
        let x = draw.elements(rows * hidden, 2.0);
        let weights = (0..rows * (k + 1)).map(|_| draw.value(1.0).abs()).collect();
        let gate_up: Vec<E> = draw.elements(experts * 2 * inner * hidden, scale);
        let shared_gate_up: Vec<E> = draw.elements(2 * shared_inner * hidden, scale);
        let down: Vec<E> = draw.elements(experts * inner * hidden, scale);
        let shared_down: Vec<E> = draw.elements(shared_inner * hidden, scale);
        let mut scene = Scene::new();
        let pairs = |inner: usize| Matrix::plain(2 * inner, hidden).grouped(2);
        let halves = |inner: usize| Matrix::plain(hidden, inner).cut();
        let weights_at = [
            scene.matrix("gate_up", &gate_up, pairs(inner), experts).cast(),
            scene.matrix("shared_gate_up", &shared_gate_up, pairs(shared_inner), 1).cast(),
            scene.matrix("down", &down, halves(inner), experts).cast(),
            scene.matrix("shared_down", &shared_down, halves(shared_inner), 1).cast(),
        ];
        let permanent = scene.buffers();
        Mixture {
            sizes,
            x,
            ids,
            weights,
            gate_up,
            shared_gate_up,
            down,
            shared_down,
            scene,
            weights_at,
            permanent,
        }
    }

    /// Runs both kernels over rows `first..first + rows`.
    fn run(&mut self, first: usize, rows: usize) -> Outputs<E> {
        let (scene, [gate_up, shared_gate_up, down, shared_down]) = (&mut self.scene, self.weights_at);
        let sizes = Sizes { rows: rows as u32, ..self.sizes };
        let [hidden, inner, shared_inner, k] =
            [sizes.hidden, sizes.inner, sizes.shared_inner, sizes.k].map(|size| size as usize);
        let ids = scene.input("ids", &self.ids[first * k..][..rows * k]);
        let list = scene.output("list", rows * k);
        let starts = scene.output("starts", sizes.experts as usize + 1);
        scene.run::<ExpertsGroup>(&GroupArgs { ids, list, starts, sizes });
        let a: Ptr<E> = scene.output("a", rows * k * inner);
        let s: Ptr<E> = scene.output("s", rows * shared_inner);
        let up = UpArgs {
            x: scene.input("x", &self.x[first * hidden..][..rows * hidden]).cast(),
            ids,
            list,
            starts,
            gate_up,
            shared_gate_up,
            a: a.cast(),
            s: s.cast(),
            sizes,
        };
        scene.run::<ExpertsUp<E>>(&up);
        let (got_a, got_s) = (scene.read(a, rows * k * inner), scene.read(s, rows * shared_inner));
        let p = scene.output("p", 2 * rows * hidden);
        let down = DownArgs {
            a: a.cast(),
            s: s.cast(),
            ids,
            weights: scene.input("weights", &self.weights[first * (k + 1)..][..rows * (k + 1)]),
            down,
            shared_down,
            p,
            sizes,
        };
        scene.run::<ExpertsDown<E>>(&down);
        same("a after experts_down", &scene.read(a, rows * k * inner), &got_a);
        same("s after experts_down", &scene.read(s, rows * shared_inner), &got_s);
        let got_p: Vec<f32> = scene.read(p, 2 * rows * hidden);

        scene.run::<ExpertsUpPrompt<E>>(&up);
        same("a of the prompt route", &scene.read(a, rows * k * inner), &got_a);
        same("s of the prompt route", &scene.read(s, rows * shared_inner), &got_s);
        let DownArgs { a, s, ids, weights, down, shared_down, p: _, sizes } = down;
        let products = scene.output("products", 2 * rows * (k + 1) * hidden);
        let args = ProductsArgs { a, s, list, starts, down, shared_down, products, sizes };
        scene.run::<ExpertsProducts<E>>(&args);
        let p = scene.output("p of the prompt route", 2 * rows * hidden);
        scene.run::<ExpertsSum>(&SumArgs { products, ids, weights, p, sizes });
        same("p of the prompt route", &scene.read(p, 2 * rows * hidden), &got_p);
        scene.truncate(self.permanent);
        (got_a, got_s, got_p)
    }

    fn check(&mut self) {
        let [rows, hidden, inner, shared_inner, k] =
            [self.sizes.rows, self.sizes.hidden, self.sizes.inner, self.sizes.shared_inner, self.sizes.k]
                .map(|size| size as usize);
        let (a, s, p) = self.run(0, rows);
        let [gate_up, shared_gate_up, down, shared_down] =
            [&self.gate_up, &self.shared_gate_up, &self.down, &self.shared_down].map(|w| wide(w));
        let activated = |x: &[f64], w: &[f64], inner: usize| -> Vec<f64> {
            let product = |o: usize| r16::<E>(dot(x, &w[o * hidden..][..hidden]));
            let one = |i: usize| silu(product(i)) * product(inner + i);
            (0..inner).map(one).collect()
        };
        for r in 0..rows {
            let x = wide(&self.x[r * hidden..][..hidden]);
            for j in 0..k {
                let id = self.ids[r * k + j] as usize;
                let want = activated(&x, &gate_up[id * 2 * inner * hidden..][..2 * inner * hidden], inner);
                close(&format!("a, row {r} place {j}"), &a[(r * k + j) * inner..][..inner], &want, 2);
            }
            let want = activated(&x, &shared_gate_up, shared_inner);
            close(&format!("s, row {r}"), &s[r * shared_inner..][..shared_inner], &want, 2);

            // The down projection is judged on the activations that it was given.
            let (s, weights) = (wide(&s[r * shared_inner..][..shared_inner]), &self.weights[r * (k + 1)..]);
            for cut in 0..2 {
                let half = |x: &[f64], w: &[f64], o: usize| {
                    let (inner, from) = (x.len(), cut * x.len() / 2);
                    dot(&x[from..from + inner / 2], &w[o * inner + from..][..inner / 2])
                };
                let one = |o: usize| {
                    let routed = (0..k).map(|j| {
                        let down = &down[self.ids[r * k + j] as usize * hidden * inner..];
                        weights[j] as f64 * half(&wide(&a[(r * k + j) * inner..][..inner]), down, o)
                    });
                    routed.sum::<f64>() + weights[k] as f64 * half(&s, &shared_down, o)
                };
                let want: Vec<f64> = (0..hidden).map(one).collect();
                let got = &p[(cut * rows + r) * hidden..][..hidden];
                close(&format!("p, cut {cut} row {r}"), got, &want, 2);
            }
        }
    }
}

fn formula<E: Element>() {
    for (rows, hidden, inner, shared_inner, experts, k) in [
        (1, 40, 24, 10, 8, 2),
        (2, 33, 2, 2, 3, 3),
        (9, 64, 34, 36, 5, 1),
        (65, 32, 16, 48, 4, 2),
        (3, 16, 8, 8, 40, 10),
    ] {
        Mixture::<E>::new(Sizes { rows, hidden, inner, shared_inner, experts, k, ..Sizes::WHOLE }, 31)
            .check();
    }
}

fn experts_f32() {
    formula::<f32>();
}

fn experts_bf16() {
    formula::<bf16>();
}

/// Asserts that rows of some that run together are what they are alone.
fn alone_and_among<E: Element>(mixture: &mut Mixture<E>, rows: usize, step: usize) {
    let [hidden, inner, shared_inner, k] =
        [mixture.sizes.hidden, mixture.sizes.inner, mixture.sizes.shared_inner, mixture.sizes.k]
            .map(|size| size as usize);
    let (a, s, p) = mixture.run(0, rows);
    for row in (0..rows).step_by(step) {
        let (a_one, s_one, p_one) = mixture.run(row, 1);
        same(&format!("a, row {row} of {rows}"), &a_one, &a[row * k * inner..][..k * inner]);
        same(&format!("s, row {row} of {rows}"), &s_one, &s[row * shared_inner..][..shared_inner]);
        for cut in 0..2 {
            let among = &p[(cut * rows + row) * hidden..][..hidden];
            same(&format!("p, cut {cut} row {row} of {rows}"), &p_one[cut * hidden..][..hidden], among);
        }
    }
}

/// Large enough that the product spreads over threads, and that CUDA gathers rows by expert: all of them, as few at a
/// time as their width leaves room for, or none where experts are too many.
fn crowd<E: Element>() {
    let few = Sizes { rows: 0, hidden: 96, inner: 48, shared_inner: 40, experts: 8, k: 2, ..Sizes::WHOLE };
    let crowds = [2, 3, 5, 64, 200].map(|rows| Sizes { rows, ..few });
    let wide = [2624, 5120, 10_240].map(|hidden| Sizes { rows: 24, hidden, inner: 24, experts: 4, ..few });
    let many = Sizes { rows: 24, experts: 600, inner: 8, ..few };
    let same = Sizes { rows: 64, experts: 1, k: 1, ..few };
    for sizes in crowds.into_iter().chain(wide).chain([many, same]) {
        let mut mixture = Mixture::<E>::new(sizes, 32);
        alone_and_among(&mut mixture, sizes.rows as usize, if sizes.rows > 64 { 13 } else { 3 });
    }
}

fn a_row_is_the_same_among_others() {
    crowd::<f32>();
    crowd::<bf16>();
}

fn rows_alone_and_among_others_at_real_sizes() {
    let sizes =
        Sizes { rows: 130, hidden: 2560, inner: 640, shared_inner: 640, experts: 16, k: 10, ..Sizes::WHOLE };
    let mut mixture = Mixture::<bf16>::new(sizes, 34);
    for rows in REAL_ROWS {
        alone_and_among(&mut mixture, rows, (rows / 3).max(1));
    }
}

fn an_expert_that_is_not_there_is_a_fault() {
    let sizes = Sizes { rows: 2, hidden: 8, inner: 4, shared_inner: 4, experts: 4, k: 2, ..Sizes::WHOLE };
    let mut mixture = Mixture::<f32>::new(sizes, 33);
    mixture.ids[3] = 4;
    let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| mixture.run(0, 2)));
    let why = *failed.expect_err("expert 4 of 4").downcast::<String>().expect("a message");
    assert!(why.contains("row 1: no expert 4 of 4"), "{why}");
}
