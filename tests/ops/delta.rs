//! The gated delta rule: step, chunk and what rows bring ready against the recurrence in f64; step and chunk
//! against each other.

use graph::Kernel;
use half::bf16;
use kernels::delta::{Args, CHUNK, DeltaChunk, DeltaReady, DeltaStep, READY};
use kernels::numerics::Element;
use kernels::state::{Part, RowRange};
use tests::check::{Draw, Scene, cancelling, close, facts, poisoned, same};

tests::tests! {
    any: the_step_is_the_recurrence_in_bf16, the_chunk_is_the_recurrence_in_bf16, two_launches_of_steps_are_one, two_launches_of_chunks_are_one_on_the_grid, a_step_alone_is_the_step_among_others, ready_rows_are_the_recurrence_in_bf16, a_chunk_alone_is_the_chunk_among_others;
    host: ready_rows_are_the_recurrence_in_f32, the_step_is_the_recurrence_in_f32, the_chunk_is_the_recurrence_in_f32, the_chunk_is_the_recurrence_where_states_vanish, a_row_does_not_depend_on_the_rows_after_it, step_and_chunk_agree;
}

const SLOTS: usize = 4;
/// Rows that bring ready how they enter each other.
const SPAN: usize = 16;
/// f32 values between two states of a slab that belong to nobody.
const REST: usize = 16;

#[derive(Clone, Copy)]
struct Shape {
    k_heads: usize,
    v_heads: usize,
    k_width: usize,
    v_width: usize,
}

/// Widths off the tiles of the implementation, and on them; the second is large enough for several threads.
const SHAPES: [Shape; 3] = [
    Shape { k_heads: 2, v_heads: 6, k_width: 10, v_width: 19 },
    Shape { k_heads: 1, v_heads: 2, k_width: 64, v_width: 48 },
    Shape { k_heads: 2, v_heads: 2, k_width: 3, v_width: 33 },
];

impl Shape {
    fn channels(&self) -> usize {
        2 * self.k_heads * self.k_width + self.v_heads * self.v_width
    }

    fn state(&self) -> usize {
        self.v_heads * self.k_width * self.v_width
    }

    fn y_width(&self) -> usize {
        self.v_heads * self.v_width
    }

    /// The stacked projection: three columns of something else, b, one column of something else, a.
    fn stride(&self) -> usize {
        3 + self.v_heads + 1 + self.v_heads
    }
}

/// The inputs of consecutive rows.
#[derive(Clone)]
struct Rows<E> {
    qkv: Vec<E>,
    x: Vec<E>,
}

impl<E: Element> Rows<E> {
    fn new(shape: Shape, rows: usize, draw: &mut Draw) -> Self {
        Rows {
            qkv: draw.elements(rows * shape.channels(), 1.0),
            x: draw.elements(rows * shape.stride(), 3.0),
        }
    }

    fn part(&self, shape: Shape, from: usize, count: usize) -> Rows<E> {
        Rows {
            qkv: self.qkv[from * shape.channels()..][..count * shape.channels()].to_vec(),
            x: self.x[from * shape.stride()..][..count * shape.stride()].to_vec(),
        }
    }
}

/// Parameters, and the states of a slab.
#[derive(Clone)]
struct Layer {
    shape: Shape,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    states: Vec<f32>,
}

impl Layer {
    fn new(shape: Shape, draw: &mut Draw) -> Layer {
        Layer {
            shape,
            a_log: draw.elements(shape.v_heads, 2.0),
            dt_bias: draw.elements(shape.v_heads, 1.0),
            states: draw.elements(SLOTS * (shape.state() + REST), 0.5),
        }
    }

    fn state(&self, slot: usize) -> &[f32] {
        &self.states[slot * (self.shape.state() + REST)..][..self.shape.state()]
    }

    /// Runs rows of the given slots, behind `first` rows of others; returns the output of every row.
    fn run<E: Element, K: Kernel<Args = Args>>(
        &mut self,
        first: usize,
        runs: &[(u32, usize)],
        rows: &Rows<E>,
    ) -> Vec<E> {
        self.launch::<E, K>(first, runs, rows).0
    }

    /// What every row brings ready.
    fn ready<E: Element>(&self, first: usize, runs: &[(u32, usize)], rows: &Rows<E>) -> Vec<f32> {
        let mut after = self.clone();
        let (y, ready) = after.launch::<E, DeltaReady<E>>(first, runs, rows);
        poisoned("outputs", &y);
        same("states", &after.states, &self.states);
        ready
    }

    fn launch<E: Element, K: Kernel<Args = Args>>(
        &mut self,
        first: usize,
        runs: &[(u32, usize)],
        rows: &Rows<E>,
    ) -> (Vec<E>, Vec<f32>) {
        let shape = self.shape;
        let mut all = vec![(SLOTS as u32, first)];
        all.extend(runs);
        let facts = facts(&all);
        let pad = |width: usize, values: &[E]| {
            let mut padded = vec![E::narrow(f32::NAN); first * width];
            padded.extend(values);
            padded
        };
        let mut scene = Scene::new();
        let states = scene.state("states", &self.states);
        let y = scene.output::<E>("y", facts.len() * shape.y_width());
        let ready = scene.output::<f32>("ready", facts.len() * shape.v_heads * READY);
        let args = Args {
            rows: RowRange {
                facts: scene.input("facts", &facts),
                first: first as u32,
                count: (facts.len() - first) as u32,
            },
            qkv: scene.input("qkv", &pad(shape.channels(), &rows.qkv)).cast(),
            x: scene.input("x", &pad(shape.stride(), &rows.x)).cast(),
            a_log: scene.input("a_log", &self.a_log),
            dt_bias: scene.input("dt_bias", &self.dt_bias),
            state: Part { base: states.cast(), stride: ((shape.state() + REST) * 4) as u64 },
            y: y.cast(),
            ready,
            stride: shape.stride() as u32,
            beta_at: 3,
            decay_at: (4 + shape.v_heads) as u32,
            k_heads: shape.k_heads as u32,
            v_heads: shape.v_heads as u32,
            k_width: shape.k_width as u32,
            v_width: shape.v_width as u32,
            zero: 0,
        };
        if K::NAME == DeltaChunk::<E>::NAME {
            scene.run::<DeltaReady<E>>(&args);
        }
        scene.run::<K>(&args);
        self.states = scene.read(states, self.states.len());
        let y = scene.read(y, facts.len() * shape.y_width());
        poisoned("rows before the range", &y[..first * shape.y_width()]);
        let row_ready = shape.v_heads * READY;
        let ready = scene.read(ready, facts.len() * row_ready);
        poisoned("ready before the range", &ready[..first * row_ready]);
        (y[first * shape.y_width()..].to_vec(), ready[first * row_ready..].to_vec())
    }

    /// The recurrence in f64; advances `state` and returns the outputs.
    fn formula<E: Element>(&self, rows: &Rows<E>, state: &mut [f64]) -> Vec<f64> {
        let Shape { k_heads, v_heads, k_width, v_width } = self.shape;
        let wide = |values: &[E]| values.iter().map(|x| f64::from(x.widen())).collect::<Vec<_>>();
        let unit = |x: &[f64]| {
            let norm = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
            x.iter().map(|x| x / norm).collect::<Vec<_>>()
        };
        let mut outputs = Vec::new();
        for (qkv, x) in rows.qkv.chunks(self.shape.channels()).zip(rows.x.chunks(self.shape.stride())) {
            let (qkv, x) = (wide(qkv), wide(x));
            for h in 0..v_heads {
                let shared = h / (v_heads / k_heads);
                let q = unit(&qkv[shared * k_width..][..k_width]);
                let k = unit(&qkv[(k_heads + shared) * k_width..][..k_width]);
                let v = &qkv[2 * k_heads * k_width + h * v_width..][..v_width];
                let beta = 1.0 / (1.0 + (-x[3 + h]).exp());
                let softplus = (x[4 + v_heads + h] + f64::from(self.dt_bias[h])).exp().ln_1p();
                let decay = (-f64::from(self.a_log[h]).exp() * softplus).exp();
                let state = &mut state[h * k_width * v_width..][..k_width * v_width];
                for c in 0..v_width {
                    let mut read = 0.0;
                    for i in 0..k_width {
                        state[i * v_width + c] *= decay;
                        read += state[i * v_width + c] * k[i];
                    }
                    let mut output = 0.0;
                    for i in 0..k_width {
                        state[i * v_width + c] += k[i] * (v[c] - read) * beta;
                        output += state[i * v_width + c] * q[i];
                    }
                    outputs.push(output / (k_width as f64).sqrt());
                }
            }
        }
        outputs
    }
}

/// The outputs of a slot's rows in f64 from what they bring ready, span by span; advances `state`.
fn from_ready<E: Element>(shape: Shape, rows: &Rows<E>, ready: &[f32], state: &mut [f64]) -> Vec<f64> {
    let Shape { k_heads, v_heads, k_width, v_width } = shape;
    let count = rows.qkv.len() / shape.channels();
    let at = |row: usize, column: usize| f64::from(rows.qkv[row * shape.channels() + column].widen());
    let mut outputs = vec![0.0; count * shape.y_width()];
    for h in 0..v_heads {
        let query = h / (v_heads / k_heads) * k_width;
        let (key, value) = (query + k_heads * k_width, 2 * k_heads * k_width + h * v_width);
        let state = &mut state[h * k_width * v_width..][..k_width * v_width];
        for first in (0..count).step_by(SPAN) {
            let end = count.min(first + SPAN);
            let brought = |row: usize, i: usize| f64::from(ready[(row * v_heads + h) * READY + i]);
            for row in first..end {
                for later in row + 1 - first..SPAN {
                    assert_eq!(
                        (brought(row, later), brought(row, SPAN + later)),
                        (0.0, 0.0),
                        "row {row}, {later}"
                    );
                }
            }
            for c in 0..v_width {
                let see = |row: usize, from: usize| -> f64 {
                    (0..k_width).map(|i| state[i * v_width + c] * at(row, from + i)).sum()
                };
                let wanted: Vec<f64> = (first..end)
                    .map(|row| at(row, value + c) - brought(row, 2 * SPAN) * see(row, key))
                    .collect();
                let sum = |row: usize, from: usize, of: &[f64]| -> f64 {
                    of.iter().enumerate().map(|(j, x)| brought(row, from + j) * x).sum()
                };
                let fresh: Vec<f64> = (first..end).map(|row| sum(row, 0, &wanted)).collect();
                for row in first..end {
                    outputs[row * shape.y_width() + h * v_width + c] =
                        brought(row, 2 * SPAN + 1) * see(row, query) + sum(row, SPAN, &fresh);
                }
                for i in 0..k_width {
                    let added: f64 = (first..end)
                        .zip(&fresh)
                        .map(|(row, fresh)| brought(row, 2 * SPAN + 2) * at(row, key + i) * fresh)
                        .sum();
                    let held = &mut state[i * v_width + c];
                    *held = brought(end - 1, 2 * SPAN + 3) * *held + added;
                }
            }
        }
    }
    outputs
}

fn ready_is_the_recurrence<E: Element>() {
    let mut draw = Draw::new(7);
    for shape in SHAPES {
        for n in [1, 15, 16, 17, 40] {
            let layer = Layer::new(shape, &mut draw);
            let runs = [(2, n), (0, 1), (3, 5)];
            let rows = Rows::<E>::new(shape, n + 6, &mut draw);
            let ready = layer.ready(n % 3, &runs, &rows);
            let mut row = 0;
            for (slot, n) in runs {
                let rows = rows.part(shape, row, n);
                let brought = &ready[row * shape.v_heads * READY..][..n * shape.v_heads * READY];
                let mut want_state: Vec<f64> = layer.state(slot as usize).iter().map(|&s| s.into()).collect();
                let mut state = want_state.clone();
                let y = from_ready(shape, &rows, brought, &mut state);
                let narrow = |values: &[f64]| values.iter().map(|&x| x as f32).collect::<Vec<_>>();
                close(&format!("{n} rows"), &narrow(&y), &layer.formula(&rows, &mut want_state), 0);
                close(&format!("{n} rows: state"), &narrow(&state), &want_state, 0);
                same("alone", brought, &layer.ready(0, &[(slot, n)], &rows));
                row += n;
            }
        }
    }
}

fn ready_rows_are_the_recurrence_in_f32() {
    ready_is_the_recurrence::<f32>();
}

fn ready_rows_are_the_recurrence_in_bf16() {
    ready_is_the_recurrence::<bf16>();
}

fn against_the_formula<E: Element, K: Kernel<Args = Args>>(lengths: &[usize]) {
    let mut draw = Draw::new(1);
    for (&n, shape) in lengths.iter().zip(SHAPES.iter().cycle()).chain(lengths.iter().zip(&SHAPES)) {
        let layer = Layer::new(*shape, &mut draw);
        let runs = [(2, n), (0, 1), (3, 5)];
        let rows = Rows::<E>::new(*shape, n + 6, &mut draw);
        let mut after = layer.clone();
        let y = after.run::<E, K>(n % 3, &runs, &rows);
        let mut row = 0;
        for (slot, n) in runs {
            let mut state: Vec<f64> = layer.state(slot as usize).iter().map(|&s| s.into()).collect();
            let want = layer.formula(&rows.part(*shape, row, n), &mut state);
            let label = format!("{} {n} rows", K::NAME);
            close(&label, &y[row * shape.y_width()..][..n * shape.y_width()], &cancelling(want), 1);
            close(&format!("{label}: state"), after.state(slot as usize), &state, 0);
            row += n;
        }
        same("a state that is not covered", after.state(1), layer.state(1));
        let rest = |layer: &Layer| -> Vec<f32> {
            layer
                .states
                .chunks(shape.state() + REST)
                .flat_map(|slot| slot[shape.state()..].to_vec())
                .collect()
        };
        same("memory between states", &rest(&after), &rest(&layer));
    }
}

const LENGTHS: [usize; 10] = [1, 2, 3, 4, 5, 63, 64, 65, 128, 129];

fn the_step_is_the_recurrence_in_f32() {
    against_the_formula::<f32, DeltaStep<f32>>(&LENGTHS);
}

fn the_step_is_the_recurrence_in_bf16() {
    against_the_formula::<bf16, DeltaStep<bf16>>(&LENGTHS);
}

fn the_chunk_is_the_recurrence_in_f32() {
    against_the_formula::<f32, DeltaChunk<f32>>(&LENGTHS);
}

fn the_chunk_is_the_recurrence_in_bf16() {
    against_the_formula::<bf16, DeltaChunk<bf16>>(&LENGTHS);
}

fn the_chunk_is_the_recurrence_where_states_vanish() {
    // Decays so strong that exp(G) underflows inside a chunk.
    let mut draw = Draw::new(2);
    let shape = SHAPES[1];
    let mut layer = Layer::new(shape, &mut draw);
    layer.a_log.fill(3.0);
    let rows = Rows::<f32>::new(shape, 80, &mut draw);
    let mut state: Vec<f64> = layer.state(1).iter().map(|&s| s.into()).collect();
    let want = layer.formula(&rows, &mut state);
    let y = layer.run::<f32, DeltaChunk<f32>>(0, &[(1, 80)], &rows);
    close("outputs", &y, &want, 1);
}

/// One launch of `n` rows against two launches cut after `cut` rows: the same bytes.
fn two_launches_are_one<K: Kernel<Args = Args>>(cuts: &[(usize, usize)]) {
    let mut draw = Draw::new(3);
    for &(n, cut) in cuts {
        for shape in SHAPES {
            let layer = Layer::new(shape, &mut draw);
            let rows = Rows::<bf16>::new(shape, n, &mut draw);
            let (mut whole, mut parts) = (layer.clone(), layer);
            let y = whole.run::<bf16, K>(0, &[(1, n)], &rows);
            let mut pieces = parts.run::<bf16, K>(0, &[(1, cut)], &rows.part(shape, 0, cut));
            pieces.extend(parts.run::<bf16, K>(1, &[(1, n - cut)], &rows.part(shape, cut, n - cut)));
            same("outputs", &y, &pieces);
            same("states", &whole.states, &parts.states);
        }
    }
}

fn two_launches_of_steps_are_one() {
    two_launches_are_one::<DeltaStep<bf16>>(&[(2, 1), (3, 2), (65, 64), (70, 33)]);
}

fn two_launches_of_chunks_are_one_on_the_grid() {
    let grid = CHUNK;
    two_launches_are_one::<DeltaChunk<bf16>>(&[
        (grid + 1, grid),
        (2 * grid, grid),
        (2 * grid + 1, grid),
        (2 * grid + 1, 2 * grid),
        (3 * grid - 1, 2 * grid),
    ]);
}

fn alone_and_crowded<K: Kernel<Args = Args>>(n: usize) {
    let mut draw = Draw::new(4);
    for others in [1, 3, 14, 63] {
        for shape in SHAPES {
            let layer = Layer::new(shape, &mut draw);
            let rows = Rows::<bf16>::new(shape, 2 * others + n, &mut draw);
            let (mut crowded, mut alone) = (layer.clone(), layer);
            let y = crowded.run::<bf16, K>(2, &[(0, others), (3, n), (1, others)], &rows);
            let y_alone = alone.run::<bf16, K>(0, &[(3, n)], &rows.part(shape, others, n));
            same("rows", &y[others * shape.y_width()..][..n * shape.y_width()], &y_alone);
            same("state", crowded.state(3), alone.state(3));
        }
    }
}

fn a_step_alone_is_the_step_among_others() {
    alone_and_crowded::<DeltaStep<bf16>>(1);
    alone_and_crowded::<DeltaStep<bf16>>(3);
}

fn a_chunk_alone_is_the_chunk_among_others() {
    alone_and_crowded::<DeltaChunk<bf16>>(1);
    alone_and_crowded::<DeltaChunk<bf16>>(66);
}

fn a_row_does_not_depend_on_the_rows_after_it() {
    let mut draw = Draw::new(5);
    for shape in SHAPES {
        let layer = Layer::new(shape, &mut draw);
        let mut rows = Rows::<f32>::new(shape, 131, &mut draw);
        let long = layer.clone().run::<f32, DeltaChunk<f32>>(0, &[(1, 131)], &rows);
        for n in [1, 2, 3, 4, 5, 62, 63, 64, 65, 66, 67, 127, 128, 130] {
            let short = layer.clone().run::<f32, DeltaChunk<f32>>(0, &[(1, n)], &rows.part(shape, 0, n));
            same(&format!("the first {n} of 131 rows"), &long[..short.len()], &short);
        }
        rows.qkv[100 * shape.channels()..].fill(f32::NAN);
        let spoiled = layer.clone().run::<f32, DeltaChunk<f32>>(0, &[(1, 131)], &rows);
        same("rows before a NaN", &long[..100 * shape.y_width()], &spoiled[..100 * shape.y_width()]);
    }
}

fn step_and_chunk_agree() {
    let mut draw = Draw::new(6);
    for shape in SHAPES {
        let layer = Layer::new(shape, &mut draw);
        let rows = Rows::<f32>::new(shape, 150, &mut draw);
        let (mut steps, mut chunks) = (layer.clone(), layer);
        let want = steps.run::<f32, DeltaStep<f32>>(0, &[(1, 150)], &rows);
        let got = chunks.run::<f32, DeltaChunk<f32>>(0, &[(1, 150)], &rows);
        let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        close("outputs", &got, &wide(&want), 1);
        close("state", chunks.state(1), &wide(steps.state(1)), 1);
    }
}
