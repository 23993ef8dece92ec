//! `attend_span`: every row over all rows of its span, with each head.

use half::bf16;
use kernels::numerics::Element;
use kernels::span::{Args, AttendSpan, CUDA_WIDTH, KEYS, QUERIES};
use tests::check::{Draw, Scene, Want, close, r16, same};

use crate::ops::formula::{dot, wide};

tests::tests! {
    any: attention_in_bf16, scores_of_any_size_in_bf16, pieces_equal_the_whole, a_span_alone_is_the_span_among_others;
    host: attention_in_f32, sizes_without_a_meaning_are_refused;
    mirror: attention_at_real_sizes;
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    span: usize,
    spans: usize,
    heads: usize,
    width: usize,
}

impl Shape {
    fn hidden(&self) -> usize {
        self.heads * self.width
    }

    fn rows(&self) -> usize {
        self.span * self.spans
    }

    /// Stacked queries, keys and values.
    fn draw<E: Element>(&self, draw: &mut Draw, scale: f32) -> Vec<E> {
        draw.elements(self.rows() * 3 * self.hidden(), scale)
    }

    fn run<E: Element>(&self, x: &[E], first: usize, rows: usize) -> Vec<E> {
        let mut scene = Scene::new();
        let out = scene.output::<E>("out", rows * self.hidden());
        let args = Args {
            x: scene.input("x", x).cast(),
            out: out.cast(),
            total: (x.len() / (3 * self.hidden())) as u32,
            span: self.span as u32,
            first: first as u32,
            rows: rows as u32,
            heads: self.heads as u32,
            width: self.width as u32,
        };
        scene.run::<AttendSpan<E>>(&args);
        scene.read(out, rows * self.hidden())
    }

    /// One head of one row.
    fn formula<E: Element>(&self, x: &[E], row: usize, head: usize) -> Vec<Want> {
        let (hidden, width) = (self.hidden(), self.width);
        let part = |row: usize, which: usize| wide(&x[(row * 3 + which) * hidden + head * width..][..width]);
        let span = row / self.span * self.span..(row / self.span + 1) * self.span;
        let query = part(row, 0);
        let scale = std::f64::consts::LOG2_E / (width as f64).sqrt();
        let scores: Vec<f64> = span.clone().map(|row| dot(&query, &part(row, 1)) * scale).collect();
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max).ceil();
        let weights: Vec<f64> = scores.iter().map(|score| r16::<E>((score - most).exp2())).collect();
        let (sum, mut means, mut sizes) = (weights.iter().sum::<f64>(), vec![0.0; width], vec![0.0; width]);
        for (row, weight) in span.zip(&weights) {
            for (j, value) in part(row, 2).into_iter().enumerate() {
                means[j] += weight * value / sum;
                sizes[j] += (weight * value / sum).powi(2);
            }
        }
        // A weight may fall on the other side of a rounding; what is added cancels.
        let want = |(value, size): (f64, f64)| Want { value, scale: value.abs().max(size.sqrt()).max(1e-3) };
        means.into_iter().zip(sizes).map(want).collect()
    }

    fn check<E: Element>(&self, x: &[E], rows: impl IntoIterator<Item = usize>) {
        let out = self.run(x, 0, self.rows());
        for row in rows {
            for head in 0..self.heads {
                let got = &out[row * self.hidden() + head * self.width..][..self.width];
                close(&format!("{self:?} row {row} head {head}"), got, &self.formula(x, row, head), 1);
            }
        }
    }
}

/// Spans at the edges of what a block takes at a time.
fn spans() -> [usize; 10] {
    let (keys, queries) = (KEYS as usize, QUERIES as usize);
    [1, 2, 4, keys - 1, keys, keys + 1, queries - 1, queries, queries + 1, 3 * keys + 4]
}

fn attention<E: Element>() {
    let mut draw = Draw::new(1);
    for span in spans() {
        for (heads, width) in [(2, 16), (1, 32), (2, 72), (1, 5), (1, 71)] {
            let shape = Shape { span, spans: 2, heads, width };
            let x: Vec<E> = shape.draw(&mut draw, 1.0);
            let edges = [0, 1, span / 2, span - 1, span, 2 * span - 1];
            shape.check(&x, edges.into_iter().filter(|row| *row < 2 * span));
        }
    }
}

fn attention_in_bf16() {
    attention::<bf16>();
}

fn attention_in_f32() {
    attention::<f32>();
}

/// Scores that grow from one tile of keys to the next, that fall, and that are all alike.
fn scores_of_any_size_in_bf16() {
    let mut draw = Draw::new(2);
    let shape = Shape { span: 200, spans: 1, heads: 2, width: 72 };
    let (hidden, rows) = (shape.hidden(), shape.rows());
    for factor in [|row: usize| row as f32 * 0.05, |row: usize| 10.0 - row as f32 * 0.05, |_| 0.0, |_| 20.0] {
        let mut x: Vec<bf16> = shape.draw(&mut draw, 1.0);
        for row in 0..rows {
            let keys = &mut x[(row * 3 + 1) * hidden..][..hidden];
            keys.iter_mut().for_each(|key| *key = bf16::narrow(key.widen() * factor(row)));
        }
        shape.check(&x, [0, 63, 64, 130, 199]);
    }
}

fn pieces_equal_the_whole() {
    let mut draw = Draw::new(3);
    for (span, spans) in [(4, 9), (100, 3), (260, 1)] {
        let shape = Shape { span, spans, heads: 2, width: 72 };
        let x: Vec<bf16> = shape.draw(&mut draw, 1.0);
        let whole = shape.run(&x, 0, shape.rows());
        for (first, rows) in [(0, 1), (1, 3), (3, 20), (13, 17), (shape.rows() - 1, 1), (2, shape.rows() - 3)]
        {
            let at = first * shape.hidden()..(first + rows) * shape.hidden();
            same(&format!("{shape:?}, {rows} rows from {first} on"), &shape.run(&x, first, rows), &whole[at]);
        }
    }
}

fn a_span_alone_is_the_span_among_others() {
    let mut draw = Draw::new(4);
    for span in [4, 63, 129] {
        let shape = Shape { span, spans: 4, heads: 2, width: 72 };
        let x: Vec<bf16> = shape.draw(&mut draw, 1.0);
        let among = shape.run(&x, 0, shape.rows());
        let (each, out) = (span * 3 * shape.hidden(), span * shape.hidden());
        for (number, x) in x.chunks(each).enumerate() {
            let alone = shape.run(x, 0, span);
            same(&format!("span {number} of {span} rows"), &alone, &among[number * out..][..out]);
        }
    }
}

/// The tower's heads over a small picture and a larger one.
fn attention_at_real_sizes() {
    let mut draw = Draw::new(5);
    for span in [256, 1200] {
        let shape = Shape { span, spans: 1, heads: 16, width: CUDA_WIDTH as usize };
        let x: Vec<bf16> = shape.draw(&mut draw, 2.0);
        shape.check(&x, [0, span / 2, span - 1]);
    }
}

fn sizes_without_a_meaning_are_refused() {
    let scene = Scene::new();
    let args = Args { total: 12, span: 4, rows: 12, heads: 1, width: 8, ..bytemuck::Zeroable::zeroed() };
    for args in [
        Args { span: 0, ..args },
        Args { rows: 0, ..args },
        Args { heads: 0, ..args },
        Args { width: 0, ..args },
    ] {
        let why = scene.refused::<AttendSpan<f32>>(&args);
        assert!(why.contains("all positive"), "{why}");
    }
    let why = scene.refused::<AttendSpan<f32>>(&Args { span: 5, ..args });
    assert!(why.contains("12 rows are not spans of 5"), "{why}");
    let why = scene.refused::<AttendSpan<f32>>(&Args { first: 1, ..args });
    assert!(why.contains("rows 1 and 12 from there on, of 12"), "{why}");
}
