//! `index`: pooled keys, the ring of raw keys, and the choice of blocks.

use half::bf16;
use kernels::index::scores;
use kernels::numerics::Element;
use kernels::table::PAGE;
use tests::check::{Draw, close, r16};

use crate::ops::formula::{best, dot, rms, wide};
use crate::ops::layer::{EPS, Layer, Round, SMALL, Shape};

tests::tests! {
    any: index_with_blocks_of_four_bf16, index_with_blocks_of_two_bf16, the_choice_begins_one_block_past_the_budget, the_choice_at_the_real_budget, ties_go_to_the_lower_block;
    host: index_with_blocks_of_four_f32, index_with_blocks_of_two_f32, zero_scores_fill_up_from_the_lowest;
}

/// Asserts pooled keys, ring and choices after a round.
fn check<E: Element>(layer: &Layer<E>, round: &Round<E>) {
    let Shape { ratio, top, index_width, .. } = layer.shape;
    let raw =
        |slot: usize, position: usize| &layer.row(slot, position)[layer.index_key_at()..][..index_width];
    for (i, &(slot, position)) in round.rows.iter().enumerate() {
        let blocks = (position + 1) / ratio;
        if (position + 1) % ratio == 0 {
            let first = position + 1 - ratio;
            let mean: Vec<f64> = (0..index_width)
                .map(|c| (first..=position).map(|p| raw(slot, p)[c].widen() as f64).sum::<f64>())
                .map(|sum| r16::<E>(sum / ratio as f64))
                .collect();
            let normed = rms::<E>(&mean, &wide(&layer.gains[3]), EPS as f64);
            let what = format!("pooled, slot {slot} block {}", blocks - 1);
            layer.rope.check(&what, &layer.pooled(slot, blocks - 1), &normed, layer.axes[slot][first]);
        }
        let last = round.rows.iter().filter(|row| row.0 == slot).map(|row| row.1).max().expect("a row");
        if position + PAGE > last {
            let kept = &layer.kept(slot)[position % PAGE * index_width..][..index_width];
            assert_eq!(kept, raw(slot, position), "ring, slot {slot} position {position}");
        }
        let keys: Vec<E> = (0..blocks).flat_map(|block| layer.pooled(slot, block)).collect();
        let heads = layer.shape.index_heads;
        let queries: Vec<f32> = round.iq[i].iter().map(|x| x.widen()).collect();
        let got = scores(&queries, heads, &[&keys[..]], index_width, blocks);
        let want: Vec<f64> = keys
            .chunks_exact(index_width)
            .map(|key| {
                let lines = round.iq[i].chunks_exact(index_width);
                let sum: f64 = lines.map(|q| dot(&wide(q), &wide(key)).max(0.0)).sum();
                sum / (index_width as f64).sqrt()
            })
            .collect();
        close("scores", &got, &want, 0);
        let mut want = best(&got, top.min(blocks));
        want.resize(top, u32::MAX);
        assert_eq!(round.chosen[i], want, "chosen, slot {slot} position {position}");
    }
}

fn in_all_splits<E: Element>(ratio: usize) {
    let shape = Shape { ratio, top: 16 / ratio, ..SMALL };
    for cut in [1, 2, 3, 4, 5, 18, 19, 20, 21, 63, 64, 65] {
        let mut layer = Layer::<E>::new(shape, 3);
        for pieces in [vec![(0, 0..cut), (1, 0..1)], vec![(1, 1..2), (2, 0..70), (0, cut..cut + 70)]] {
            let round = layer.round(&pieces);
            check(&layer, &round);
        }
        for position in cut + 70..cut + 76 {
            let round = layer.round(&[(0, position..position + 1), (2, position - cut..position - cut + 1)]);
            check(&layer, &round);
        }
    }
}

fn index_with_blocks_of_four_f32() {
    in_all_splits::<f32>(4);
}

fn index_with_blocks_of_four_bf16() {
    in_all_splits::<bf16>(4);
}

fn index_with_blocks_of_two_f32() {
    in_all_splits::<f32>(2);
}

fn index_with_blocks_of_two_bf16() {
    in_all_splits::<bf16>(2);
}

/// With 16 positions of budget and blocks of four: all blocks up to 19 visible positions, all but one from 20.
fn the_choice_begins_one_block_past_the_budget() {
    let mut layer = Layer::<bf16>::new(SMALL, 4);
    let round = layer.round(&[(0, 0..24)]);
    let chosen = |visible: usize| round.chosen[visible - 1].iter().filter(|&&id| id != u32::MAX).count();
    assert_eq!([3, 4, 15, 16, 19, 20, 21, 24].map(chosen), [0, 1, 3, 4, 4, 4, 4, 4]);
    assert_eq!(round.chosen[18], [0, 1, 2, 3]);
}

/// Appendix A of the model's specification.
fn the_choice_at_the_real_budget() {
    let shape = Shape {
        q_heads: 2,
        kv_heads: 1,
        width: 24,
        index_heads: 4,
        index_width: 128,
        ratio: 4,
        top: 512,
        half: 9,
        slots: 1,
        positions: 2060,
    };
    let mut layer = Layer::<bf16>::new(shape, 5);
    layer.round(&[(0, 0..2040)]);
    let round = layer.round(&[(0, 2040..2056)]);
    check(&layer, &round);
    let left_out = |position: usize| {
        let chosen = &round.chosen[position - 2040];
        (0..(position as u32 + 1) / 4).filter(|id| !chosen.contains(id)).count()
    };
    assert_eq!([2046, 2047, 2050, 2051, 2054, 2055].map(left_out), [0, 0, 0, 1, 1, 2]);
}

/// A head whose dot products are all negative scores 0 everywhere; equal blocks score alike.
fn ties_go_to_the_lower_block() {
    ties::<f32>();
    ties::<bf16>();
}

fn ties<E: Element>() {
    for equal in [false, true] {
        let mut layer = Layer::<E>::new(SMALL, 6);
        let at = layer.index_key_at();
        let (heads, width) = (SMALL.index_heads, SMALL.index_width);
        for axes in &mut layer.axes {
            axes.fill([0; 3]);
        }
        for position in 0..60 {
            // Blocks 0..5 and 12.. point away from the queries; with `equal`, the others point along them.
            let along = equal && (5..12).contains(&(position / 4));
            let row = layer.row_mut(0, position);
            row[at - heads * width..at].fill(E::narrow(1.0));
            row[at..at + width].fill(E::narrow(if along { 1.0 } else { -1.0 }));
        }
        let round = layer.round(&[(0, 0..60)]);
        check(&layer, &round);
        let want = if equal { [5, 6, 7, 8] } else { [0, 1, 2, 3] };
        assert_eq!(round.chosen[59], want);
    }
}

/// Three better blocks, then the lowest of the many at 0.
fn zero_scores_fill_up_from_the_lowest() {
    let mut draw = Draw::new(7);
    let (heads, width, blocks) = (2, 16, 40);
    let queries = vec![1.0f32; heads * width];
    for _ in 0..20 {
        let better: Vec<usize> = (0..3).map(|_| draw.below(blocks)).collect();
        let value = |block: usize| if better.contains(&block) { 1.0 } else { -1.0 };
        let keys: Vec<f32> = (0..blocks).flat_map(|block| vec![value(block); width]).collect();
        let pages: Vec<&[f32]> = keys.chunks(16 * width).collect();
        let got = scores(&queries, heads, &pages, width, blocks);
        for (block, score) in got.iter().enumerate() {
            assert_eq!(*score, if better.contains(&block) { 8.0 } else { 0.0 });
        }
    }
}
