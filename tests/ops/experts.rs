//! `experts`: the up and down projections of the chosen experts and the shared one.

use graph::Ptr;
use half::bf16;
use kernels::experts::{DownArgs, ExpertsDown, ExpertsUp, Sizes, UpArgs};
use kernels::numerics::Element;

use crate::bench::{Bench, Dice};
use crate::naive::{self, dot, sigmoid, stored, wide};

/// A mixture with drawn weights and rows.
struct Mixture<E> {
    sizes: Sizes,
    x: Vec<E>,
    ids: Vec<u32>,
    weights: Vec<f32>,
    gate_up: Vec<E>,
    shared_gate_up: Vec<E>,
    down: Vec<E>,
    shared_down: Vec<E>,
}

/// a, s and p.
type Outputs<E> = (Vec<E>, Vec<E>, Vec<f32>);

impl<E: Element> Mixture<E> {
    fn new(sizes: Sizes, seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let Sizes { rows, hidden, inner, shared_inner, experts, k } = sizes;
        let [rows, hidden, inner, shared_inner, experts, k] =
            [rows, hidden, inner, shared_inner, experts, k].map(|size| size as usize);
        let mut ids = Vec::new();
        for _ in 0..rows {
            let mut left: Vec<u32> = (0..experts as u32).collect();
            ids.extend((0..k).map(|_| left.swap_remove(dice.below(left.len()))));
        }
        let scale = 2.0 / (hidden as f32).sqrt();
        Mixture {
            sizes,
            x: dice.elements(rows * hidden, 2.0),
            ids,
            weights: (0..rows * (k + 1)).map(|_| dice.unit().abs()).collect(),
            gate_up: dice.elements(experts * 2 * inner * hidden, scale),
            shared_gate_up: dice.elements(2 * shared_inner * hidden, scale),
            down: dice.elements(experts * inner * hidden, scale),
            shared_down: dice.elements(shared_inner * hidden, scale),
        }
    }

    /// Runs both kernels over rows `first..first + rows`.
    fn run(&self, first: usize, rows: usize) -> Outputs<E> {
        let mut bench = Bench::new();
        let sizes = Sizes { rows: rows as u32, ..self.sizes };
        let [hidden, inner, shared_inner, k] =
            [sizes.hidden, sizes.inner, sizes.shared_inner, sizes.k].map(|size| size as usize);
        let ids = bench.input(&self.ids[first * k..][..rows * k]);
        let a: Ptr<E> = bench.output(rows * k * inner);
        let s: Ptr<E> = bench.output(rows * shared_inner);
        let up = UpArgs {
            x: bench.input(&self.x[first * hidden..][..rows * hidden]).cast(),
            ids,
            gate_up: bench.input(&self.gate_up).cast(),
            shared_gate_up: bench.input(&self.shared_gate_up).cast(),
            a: a.cast(),
            s: s.cast(),
            sizes,
        };
        bench.run::<ExpertsUp<E>>(&up);
        let (got_a, got_s) = (bench.read(a, rows * k * inner), bench.read(s, rows * shared_inner));
        let p = bench.output(2 * rows * hidden);
        let down = DownArgs {
            a: a.cast(),
            s: s.cast(),
            ids,
            weights: bench.input(&self.weights[first * (k + 1)..][..rows * (k + 1)]),
            down: bench.input(&self.down).cast(),
            shared_down: bench.input(&self.shared_down).cast(),
            p,
            sizes,
        };
        bench.run::<ExpertsDown<E>>(&down);
        let same = bench.read(a, rows * k * inner) == got_a && bench.read(s, rows * shared_inner) == got_s;
        assert!(same, "experts_down changed its inputs");
        (got_a, got_s, bench.read(p, 2 * rows * hidden))
    }

    fn check(&self) {
        let [rows, hidden, inner, shared_inner, k] =
            [self.sizes.rows, self.sizes.hidden, self.sizes.inner, self.sizes.shared_inner, self.sizes.k]
                .map(|size| size as usize);
        let (a, s, p) = self.run(0, rows);
        let [gate_up, shared_gate_up, down, shared_down] =
            [&self.gate_up, &self.shared_gate_up, &self.down, &self.shared_down].map(|w| wide(w));
        let activated = |x: &[f64], w: &[f64], inner: usize| -> Vec<f64> {
            let product = |o: usize| stored::<E>(dot(x, &w[o * hidden..][..hidden]));
            let one = |i: usize| product(i) * sigmoid(product(i)) * product(inner + i);
            (0..inner).map(one).collect()
        };
        for r in 0..rows {
            let x = wide(&self.x[r * hidden..][..hidden]);
            for j in 0..k {
                let id = self.ids[r * k + j] as usize;
                let want = activated(&x, &gate_up[id * 2 * inner * hidden..][..2 * inner * hidden], inner);
                naive::check(
                    &format!("a, row {r} place {j}"),
                    &a[(r * k + j) * inner..][..inner],
                    &want,
                    |_| 0.0,
                );
            }
            let want = activated(&x, &shared_gate_up, shared_inner);
            naive::check(&format!("s, row {r}"), &s[r * shared_inner..][..shared_inner], &want, |_| 0.0);

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
                naive::check(&format!("p, cut {cut} row {r}"), got, &want, |_| 0.0);
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
        Mixture::<E>::new(Sizes { rows, hidden, inner, shared_inner, experts, k }, 31).check();
    }
}

#[test]
fn experts_f32() {
    formula::<f32>();
}

#[test]
fn experts_bf16() {
    formula::<bf16>();
}

/// Large enough that the product spreads over threads.
fn crowd<E: Element>() {
    for rows in [2, 3, 5, 64, 200] {
        let sizes = Sizes { rows, hidden: 96, inner: 48, shared_inner: 40, experts: 8, k: 2 };
        let mixture = Mixture::<E>::new(sizes, 32);
        let (a, s, p) = mixture.run(0, rows as usize);
        for row in (0..rows as usize).step_by(if rows > 64 { 13 } else { 3 }) {
            let (a_one, s_one, p_one) = mixture.run(row, 1);
            let bits = |x: &[E]| bytemuck::cast_slice::<E, u8>(x).to_vec();
            assert!(bits(&a_one) == bits(&a[row * 96..][..96]), "a, row {row} of {rows}");
            assert!(bits(&s_one) == bits(&s[row * 40..][..40]), "s, row {row} of {rows}");
            for cut in 0..2 {
                let among = &p[(cut * rows as usize + row) * 96..][..96];
                let same = p_one[cut * 96..][..96].iter().zip(among).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "p, cut {cut} row {row} of {rows}");
            }
        }
    }
}

#[test]
fn a_row_is_the_same_among_others() {
    crowd::<f32>();
    crowd::<bf16>();
}

#[test]
fn an_expert_that_is_not_there_is_a_fault() {
    let sizes = Sizes { rows: 2, hidden: 8, inner: 4, shared_inner: 4, experts: 4, k: 2 };
    let mut mixture = Mixture::<f32>::new(sizes, 33);
    mixture.ids[3] = 4;
    let failed = std::panic::catch_unwind(|| mixture.run(0, 2));
    let why = *failed.expect_err("expert 4 of 4").downcast::<String>().expect("a message");
    assert!(why.contains("row 1: no expert 4 of 4"), "{why}");
}
