//! `router`: the chosen experts and their weights.

use kernels::router::{Args, Route};
use tests::check::{Draw, Scene, close, same};

use crate::ops::formula::sigmoid;

tests::tests! {
    any: routes_match_the_formula, ties_go_to_the_lower_expert, close_logits_that_exp_makes_equal_keep_their_order, numbers_that_are_none_lose_and_are_not_chosen_twice, a_row_is_the_same_among_others;
}

fn route(logits: &[f32], experts: usize, k: usize, norm: bool) -> (Vec<u32>, Vec<f32>) {
    let rows = logits.len() / (experts + 1);
    let mut scene = Scene::new();
    let args = Args {
        logits: scene.input("logits", logits),
        ids: scene.output("ids", rows * k),
        weights: scene.output("weights", rows * (k + 1)),
        rows: rows as u32,
        experts: experts as u32,
        k: k as u32,
        norm: norm.into(),
    };
    scene.run::<Route>(&args);
    (scene.read(args.ids, rows * k), scene.read(args.weights, rows * (k + 1)))
}

fn routes_match_the_formula() {
    let mut draw = Draw::new(21);
    for (experts, k, rows) in [(8, 2, 1), (8, 2, 65), (512, 10, 7), (3, 3, 4), (1, 1, 2)] {
        let logits: Vec<f32> = (0..rows * (experts + 1)).map(|_| draw.value(6.0)).collect();
        for norm in [true, false] {
            let (ids, weights) = route(&logits, experts, k, norm);
            for (row, l) in logits.chunks_exact(experts + 1).enumerate() {
                let mut order: Vec<usize> = (0..experts).collect();
                order.sort_by(|&a, &b| l[b].total_cmp(&l[a]).then(a.cmp(&b)));
                let got: Vec<usize> = ids[row * k..][..k].iter().map(|&id| id as usize).collect();
                assert_eq!(got, order[..k]);
                let total: f64 = l[..experts].iter().map(|&l| (l as f64).exp()).sum();
                let p = |id: usize| (l[id] as f64).exp() / total;
                let chosen: f64 = order[..k].iter().map(|&id| p(id)).sum();
                let scale = if norm { chosen } else { 1.0 };
                let mut want: Vec<f64> = order[..k].iter().map(|&id| p(id) / scale).collect();
                close("weights", &weights[row * (k + 1)..][..k], &want, 0);
                want = vec![sigmoid(l[experts] as f64)];
                close("shared weight", &weights[row * (k + 1) + k..][..1], &want, 0);
            }
        }
    }
}

fn ties_go_to_the_lower_expert() {
    assert_eq!(route(&[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0], 6, 4, true).0, [1, 3, 2, 4]);
    let (ids, weights) = route(&[0.5; 9], 8, 2, true);
    assert_eq!((ids, &weights[..2]), (vec![0, 1], &[0.5, 0.5][..]));
    assert_eq!(route(&[0.0, -0.0, 0.0, -0.0, 0.0], 4, 3, true).0, [0, 1, 2]);
}

fn close_logits_that_exp_makes_equal_keep_their_order() {
    let far = -60.0f32;
    let next = f32::from_bits(far.to_bits() - 1);
    assert_eq!(route(&[far, next, 0.0, 0.0], 3, 2, true).0, [2, 1]);
    assert_eq!(route(&[-200.0, -150.0, 0.0, 0.0], 3, 3, true).0, [2, 1, 0]);
}

fn numbers_that_are_none_lose_and_are_not_chosen_twice() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    assert_eq!(route(&[nan, 1.0, nan, -inf, nan], 4, 2, true).0, [1, 3]);
    assert_eq!(route(&[nan, nan, nan, nan, nan], 4, 3, true).0, [0, 1, 2]);
    assert_eq!(route(&[-inf, nan, inf, 0.0, 0.0], 4, 4, false).0, [2, 3, 0, 1]);
    assert_eq!(route(&[-inf, -inf, -inf, 0.0], 3, 2, true).0, [0, 1]);
}

fn a_row_is_the_same_among_others() {
    let mut draw = Draw::new(22);
    for rows in [2, 3, 33, 64, 700] {
        let mut logits: Vec<f32> = (0..rows * 65).map(|_| draw.value(4.0)).collect();
        logits[3] = f32::NAN;
        let (ids, weights) = route(&logits, 64, 4, true);
        for (row, l) in logits.chunks_exact(65).enumerate().step_by(7) {
            let (id, weight) = route(l, 64, 4, true);
            assert_eq!(id, ids[row * 4..][..4]);
            same("weights", &weight, &weights[row * 5..][..5]);
        }
    }
}
