//! `heads`: queries, keys, values and index queries of every row.

use half::bf16;
use kernels::numerics::Element;

use crate::ops::formula::{rms, wide};
use crate::ops::layer::{EPS, Layer, Round, SMALL};

tests::tests! {
    any: heads_at_page_edges_bf16;
    host: heads_at_page_edges_f32, a_position_past_the_page_table_is_a_fault;
}

/// Asserts what `heads` left in buffers and pages.
fn check<E: Element>(layer: &Layer<E>, round: &Round<E>) {
    let shape = layer.shape;
    let (width, index_width) = (shape.width, shape.index_width);
    let [q_gain, k_gain, iq_gain, _] = layer.gains.each_ref().map(|gain| wide(gain));
    let keys_at = 2 * shape.q_heads * width;
    let values_at = keys_at + shape.kv_heads * width;
    let iq_at = values_at + shape.kv_heads * width;
    for (i, &(slot, position)) in round.rows.iter().enumerate() {
        let x = wide(layer.row(slot, position));
        let axes = layer.axes[slot][position];
        let head = |what: &str, at: usize, gain: &[f64], got: &[E]| {
            let normed = rms::<E>(&x[at..at + gain.len()], gain, EPS as f64);
            layer.rope.check(&format!("{what}, slot {slot} position {position}"), got, &normed, axes);
        };
        for h in 0..shape.q_heads {
            head("query", 2 * h * width, &q_gain, &round.q[i][h * width..][..width]);
        }
        for h in 0..shape.kv_heads {
            head("key", keys_at + h * width, &k_gain, &layer.keys(slot, position)[h * width..][..width]);
        }
        for h in 0..shape.index_heads {
            let got = &round.iq[i][h * index_width..][..index_width];
            head("index query", iq_at + h * index_width, &iq_gain, got);
        }
        assert_eq!(layer.values(slot, position), layer.row(slot, position)[values_at..iq_at], "values");
    }
}

fn at_page_edges<E: Element>() {
    for count in [1, 63, 64, 65, 129] {
        let mut layer = Layer::<E>::new(SMALL, 1);
        let round = layer.round(&[(0, 0..count)]);
        check(&layer, &round);
        let round = layer.round(&[(2, 0..3), (0, count..count + 66), (1, 0..1)]);
        check(&layer, &round);
    }
}

fn heads_at_page_edges_f32() {
    at_page_edges::<f32>();
}

fn heads_at_page_edges_bf16() {
    at_page_edges::<bf16>();
}

fn a_position_past_the_page_table_is_a_fault() {
    let mut layer = Layer::<f32>::new(SMALL, 2);
    layer.pages.capacity = 1;
    let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| layer.round(&[(0, 0..65)])));
    let why = *failed.expect_err("65 positions do not fit a page").downcast::<String>().expect("a message");
    assert!(why.contains("65 positions need 2 pages"), "{why}");
}
