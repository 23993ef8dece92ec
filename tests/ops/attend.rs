//! `attend`: attention of every row over what it chose, and the laws for the whole of sparse attention.

use half::bf16;
use kernels::attend::{self, Attend};
use kernels::heads::Projection;
use kernels::numerics::Element;
use kernels::state::RowRange;
use kernels::table::Fact;
use tests::check::{Want, close, r16, same};

use crate::ops::formula::{dot, sigmoid, wide};
use crate::ops::layer::{Layer, Round, SMALL, Shape};

tests::tests! {
    any: attention_bf16, attention_at_the_real_budget, a_split_piece_equals_the_whole, a_long_split_piece_equals_the_whole, attention_at_the_edges_of_a_span, a_crowded_row_equals_the_row_alone;
    host: attention_f32, choices_that_no_selection_makes_are_faults;
}

/// Asserts the outputs of the rows for which `which` holds.
fn check<E: Element>(layer: &Layer<E>, round: &Round<E>, which: impl Fn(usize) -> bool) {
    let Shape { q_heads, kv_heads, width, ratio, .. } = layer.shape;
    for (i, &(slot, position)) in round.rows.iter().enumerate().filter(|(_, row)| which(row.1)) {
        let blocks = round.chosen[i].iter().filter(|&&id| id != u32::MAX);
        let mut positions: Vec<usize> =
            blocks.flat_map(|&id| id as usize * ratio..(id as usize + 1) * ratio).collect();
        positions.extend((position + 1) / ratio * ratio..=position);
        let cache: Vec<(Vec<f64>, Vec<f64>)> =
            positions.iter().map(|&p| (wide(&layer.keys(slot, p)), wide(&layer.values(slot, p)))).collect();
        let x = wide(layer.row(slot, position));
        for h in 0..q_heads {
            let kv = h / (q_heads / kv_heads) * width;
            let q = wide(&round.q[i][h * width..][..width]);
            let scores: Vec<f64> =
                cache.iter().map(|(k, _)| dot(&q, &k[kv..kv + width]) / (width as f64).sqrt()).collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let gate = &x[(2 * h + 1) * width..][..width];
            let mean =
                |c: usize| weights.iter().zip(&cache).map(|(w, (_, v))| w * v[kv + c]).sum::<f64>() / sum;
            // A mean that cancels is off by a few f32 units of the values, which are as large as 1.
            let scale = 1024.0 * f32::EPSILON as f64;
            let want: Vec<Want> =
                (0..width).map(|c| Want { value: r16::<E>(mean(c)) * sigmoid(gate[c]), scale }).collect();
            for (name, out) in [("out", &round.out), ("joined", &round.joined)] {
                let got = &out[i][h * width..][..width];
                close(&format!("{name}, slot {slot} position {position} head {h}"), got, &want, 2);
            }
        }
    }
}

fn at_edges<E: Element>(ratio: usize) {
    let shape = Shape { ratio, top: 16 / ratio, ..SMALL };
    let mut layer = Layer::<E>::new(shape, 11);
    let round = layer.round(&[(0, 0..1), (1, 0..70), (2, 0..22)]);
    check(&layer, &round, |_| true);
    let round = layer.round(&[(2, 22..131), (0, 1..2), (1, 70..71)]);
    check(&layer, &round, |_| true);
}

fn attention_f32() {
    at_edges::<f32>(4);
    at_edges::<f32>(2);
}

fn attention_bf16() {
    at_edges::<bf16>(4);
    at_edges::<bf16>(2);
}

/// The shape of the tiny model, at the edges of a page, of a block and of the budget.
fn attention_at_the_real_budget() {
    let mut layer = Layer::<bf16>::new(tiny(2060), 12);
    let edges = [0, 1, 2, 3, 4, 62, 63, 64, 65, 2046, 2047, 2050, 2051, 2052, 2054, 2055];
    let round = layer.round(&[(0, 0..2056)]);
    check(&layer, &round, |position| edges.contains(&position));
}

fn tiny(positions: usize) -> Shape {
    Shape {
        q_heads: 4,
        kv_heads: 2,
        width: 256,
        index_heads: 4,
        index_width: 128,
        ratio: 4,
        top: 512,
        half: 32,
        slots: 1,
        positions,
    }
}

/// Rounds of several pieces leave the bytes that one piece leaves, in state and in outputs.
fn split<E: Element>(shape: Shape, count: usize, cuts: &[usize]) {
    let mut whole = Layer::<E>::new(shape, 13);
    let want = whole.round(&[(0, 0..count)]);
    let mut pieces = Layer::<E>::new(shape, 13);
    let mut from = 0;
    for &to in cuts.iter().chain([&count]) {
        let got = pieces.round(&[(0, from..to)]);
        for (i, position) in (from..to).enumerate() {
            same_row(&format!("position {position} with cuts {cuts:?}"), (&got, i), (&want, position));
        }
        from = to;
    }
    assert!(whole.state() == pieces.state(), "state with cuts {cuts:?}");
}

/// Asserts that two rows of rounds came out the same.
fn same_row<E: Element>(label: &str, (a, i): (&Round<E>, usize), (b, j): (&Round<E>, usize)) {
    same(label, &a.q[i], &b.q[j]);
    same(label, &a.iq[i], &b.iq[j]);
    same(label, &a.chosen[i], &b.chosen[j]);
    same(label, &a.out[i], &b.out[j]);
    same(label, &a.joined[i], &b.joined[j]);
}

fn a_split_piece_equals_the_whole() {
    for cuts in [&[64][..], &[1, 2, 3, 4], &[17, 18, 19, 20, 21, 22], &[63, 65], &[66, 67, 131]] {
        split::<f32>(SMALL, 140, cuts);
        split::<bf16>(SMALL, 140, cuts);
        split::<bf16>(Shape { ratio: 2, top: 8, ..SMALL }, 140, cuts);
    }
}

fn a_long_split_piece_equals_the_whole() {
    split::<bf16>(
        Shape { q_heads: 2, kv_heads: 1, width: 32, half: 16, ..tiny(2200) },
        2200,
        &[1999, 2000, 2063, 2064, 2101],
    );
}

/// Rows of one span, of two, and of as many as the budget has, at the edges of a span.
fn attention_at_the_edges_of_a_span() {
    at_span_edges::<f32>();
    at_span_edges::<bf16>();
}

fn at_span_edges<E: Element>() {
    let shape = Shape { top: 33, positions: 260, ..SMALL };
    let mut layer = Layer::<E>::new(shape, 16);
    let round = layer.round(&[(1, 0..260)]);
    let edges = [61, 62, 63, 64, 65, 126, 127, 128, 129, 130, 131, 132, 133, 134, 135, 136, 190, 258, 259];
    check(&layer, &round, |position| edges.contains(&position));
}

/// A decode row among others, whatever their lengths and its place, equals the row alone.
fn crowd<E: Element>(slots: usize) {
    let shape = Shape { slots, positions: 150, ..SMALL };
    let length = |slot: usize| 1 + (slot * 37) % 149;
    let all = |layer: &mut Layer<E>| {
        for slot in 0..slots {
            layer.round(&[(slot, 0..length(slot))]);
        }
    };
    let decode = |slot: usize| (slot, length(slot)..length(slot) + 1);
    let mut crowded = Layer::<E>::new(shape, 14);
    all(&mut crowded);
    let mut alone = Layer::<E>::new(shape, 14);
    all(&mut alone);
    let backwards: Vec<_> = (0..slots).rev().map(decode).collect();
    let together = crowded.round(&backwards);
    for (i, piece) in backwards.into_iter().enumerate() {
        let row = alone.round(&[piece]);
        same_row(&format!("row {i} of {slots}"), (&row, 0), (&together, i));
    }
    assert!(crowded.state() == alone.state());
}

fn a_crowded_row_equals_the_row_alone() {
    for slots in [2, 3, 5, 17, 64] {
        crowd::<f32>(slots);
        crowd::<bf16>(slots);
    }
}

fn choices_that_no_selection_makes_are_faults() {
    // Position 7 has two complete blocks; none may be missing, repeated, or past them.
    for chosen in [[u32::MAX; 4], [0, u32::MAX, u32::MAX, u32::MAX], [1, 1, u32::MAX, u32::MAX], [0, 2, 3, 4]]
    {
        let mut layer = Layer::<f32>::new(SMALL, 15);
        layer.round(&[(0, 0..8)]);
        let fact = Fact { position: 7, count: 1, ..Fact::default() };
        let x: Vec<f32> = layer.row(0, 7).to_vec();
        let scene = &mut layer.scene;
        let width = SMALL.q_heads * SMALL.width;
        let args = attend::Args {
            rows: RowRange { facts: scene.input("facts", &[fact]), first: 0, count: 1 },
            projection: Projection {
                base: scene.input("x", &x).cast(),
                stride: x.len() as u32,
                q_heads: SMALL.q_heads as u32,
                index_heads: SMALL.index_heads as u32,
                zero: 0,
            },
            q: scene.input("q", &vec![1.0f32; width]).cast(),
            chosen: scene.input("chosen", &chosen),
            pages: layer.pages,
            out: scene.output::<f32>("out", width).cast(),
            top: 4,
            zero: 0,
        };
        let why = scene.domain_fault::<Attend<f32>>(&args);
        assert!(why.contains("not ascending ids below 2"), "{why}");
    }
}
