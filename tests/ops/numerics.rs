//! How numbers behave: rounding, the order of a sum, the exponential, and the order of a choice.

use std::cmp::Ordering;

use half::bf16;
use kernels::numerics::{
    Element, before, dot, exp, exp2, fold, sigmoid, silu, softplus, sum_of_squares, total,
};
use tests::check::Draw;

use crate::ops::formula;

tests::tests! {
    host: a_dot_product_is_added_in_the_order_of_a_sum, bf16_rounds_to_the_nearest_and_ties_to_even, exp_is_within_two_units_in_the_last_place, exp2_is_within_two_units_and_exact_for_integers, activations_follow_their_formulas, before_is_one_order_with_ties_to_the_lower_id_and_nan_last;
}

/// A dot product in the order of a sum, from its description: 16 partial sums by index, then pairs 8, 4, 2 and
/// 1 apart.
pub(crate) fn in_order<A: Element, B: Element>(a: &[A], b: &[B]) -> f32 {
    let partial =
        |lane: usize| (lane..a.len()).step_by(16).fold(0.0f32, |sum, i| sum + a[i].widen() * b[i].widen());
    let sixteen: Vec<f32> = (0..16).map(partial).collect();
    let eight: Vec<f32> = (0..8).map(|i| sixteen[i] + sixteen[i + 8]).collect();
    let four: Vec<f32> = (0..4).map(|i| eight[i] + eight[i + 4]).collect();
    (four[0] + four[2]) + (four[1] + four[3])
}

fn a_dot_product_is_added_in_the_order_of_a_sum() {
    let mut draw = Draw::new(1);
    let mut otherwise = 0;
    for length in (0..70).chain([255, 256, 257, 1000]) {
        let (a, b): (Vec<f32>, Vec<f32>) = (draw.elements(length, 2.0), draw.elements(length, 2.0));
        let want = in_order(&a, &b);
        assert_eq!(dot(&a, &b).to_bits(), want.to_bits(), "{length} elements");
        assert_eq!(sum_of_squares(&a).to_bits(), in_order(&a, &a).to_bits(), "{length} squares");
        assert_eq!(total(&a).to_bits(), in_order(&a, &vec![1.0f32; length]).to_bits(), "{length} added");
        let short: Vec<bf16> = draw.elements(length, 2.0);
        assert_eq!(dot(&a, &short).to_bits(), in_order(&a, &short).to_bits(), "{length} of two types");
        let ascending = a.iter().zip(&b).fold(0.0f32, |sum, (a, b)| sum + a * b);
        otherwise += usize::from(ascending.to_bits() != want.to_bits());
    }
    assert!(otherwise > 30, "the order shows in the bits of {otherwise} sums only");
    // Each element is alone in its partial sum; only pairs eight apart cancel exactly.
    let mut sums = [0.0; 16];
    (sums[3], sums[11], sums[5]) = (1e30, -1e30, 1.0);
    assert_eq!(fold(sums), 1.0);
    (sums[11], sums[4]) = (0.0, -1e30);
    assert_eq!(fold(sums), 0.0);
}

fn bf16_rounds_to_the_nearest_and_ties_to_even() {
    let mut draw = Draw::new(2);
    for _ in 0..1_000_000 {
        let value = f32::from_bits(draw.bits() as u32);
        let (got, want) = (bf16::narrow(value), bf16::from_f32(value));
        assert!(got == want || value.is_nan() && got.is_nan(), "{value:e} became {got}, not {want}");
        assert_eq!(got.widen().to_bits(), got.to_f32().to_bits(), "widening {got}");
    }
    for (value, want) in [
        (1.0 + 1.0 / 256.0, 1.0),
        (1.0 + 3.0 / 256.0, 1.0 + 4.0 / 256.0),
        (-1.0 - 1.0 / 256.0, -1.0),
        (f32::MAX, f32::INFINITY),
        (-0.0, -0.0),
    ] {
        assert_eq!(<bf16 as Element>::round(value).to_bits(), f32::to_bits(want), "{value}");
    }
    assert_eq!(<f32 as Element>::round(1.0 + f32::EPSILON), 1.0 + f32::EPSILON);
}

fn exp2_is_within_two_units_and_exact_for_integers() {
    for n in -126..=127 {
        assert_eq!(exp2(n as f32), 2f32.powi(n), "2^{n}");
    }
    let mut draw = Draw::new(4);
    for scale in [1e-6, 1e-3, 1.0, 10.0, 126.0] {
        for _ in 0..20_000 {
            let x = draw.value(scale);
            let (got, want) = (exp2(x), f64::from(x).exp2());
            assert!((f64::from(got) / want - 1.0).abs() <= 2.0 * f64::from(f32::EPSILON), "2^{x} is {got:e}");
        }
    }
    assert_eq!([exp2(-126.5), exp2(f32::NEG_INFINITY), exp2(127.5)], [0.0, 0.0, f32::INFINITY]);
    assert!(exp2(f32::NAN).is_nan());
}

fn exp_is_within_two_units_in_the_last_place() {
    let check = |x: f32| {
        let (got, want) = (exp(x), f64::from(x).exp());
        let below = f32::from_bits((want as f32).to_bits() - 1);
        let unit = f64::from(want as f32) - f64::from(below);
        assert!((f64::from(got) - want).abs() <= 2.0 * unit, "exp({x}) is {got:e}, not {want:e}");
    };
    (-87_300..=88_700).for_each(|thousandth| check(thousandth as f32 / 1000.0));
    let mut draw = Draw::new(3);
    for scale in [1e-6, 1e-3, 1.0, 10.0, 87.0] {
        (0..20_000).for_each(|_| check(draw.value(scale)));
    }
    assert_eq!([exp(0.0), exp(-0.0)], [1.0, 1.0]);
    assert_eq!([exp(-87.31), exp(-1e30), exp(f32::NEG_INFINITY)], [0.0; 3]);
    assert_eq!([exp(88.71), exp(1e30), exp(f32::INFINITY)], [f32::INFINITY; 3]);
    assert!(exp(f32::NAN).is_nan());
}

fn activations_follow_their_formulas() {
    let near = |what: &str, x: f32, got: f32, want: f64| {
        let off = (f64::from(got) - want).abs();
        assert!(off <= 1e-6 * want.abs() + 1e-30, "{what}({x}) is {got:e}, not {want:e}");
    };
    for hundredth in -8700..8700 {
        let x = hundredth as f32 / 100.0;
        let wide = f64::from(x);
        near("sigmoid", x, sigmoid(x), formula::sigmoid(wide));
        near("silu", x, silu(x), formula::silu(wide));
        near("softplus", x, softplus(x), wide.exp().ln_1p());
    }
    assert_eq!([sigmoid(200.0), sigmoid(-200.0), silu(200.0), silu(-200.0)], [1.0, 0.0, 200.0, 0.0]);
    assert_eq!(softplus(1e30), 1e30);
    assert!([sigmoid(f32::NAN), silu(f32::NAN), softplus(f32::NAN)].iter().all(|y| y.is_nan()));
}

fn before_is_one_order_with_ties_to_the_lower_id_and_nan_last() {
    let nan = f32::from_bits(0xffc0_0001);
    let values = [f32::NAN, nan, f32::NEG_INFINITY, f32::INFINITY, -0.0, 0.0, 1.0, -1.0, f32::MIN, f32::MAX];
    let pairs: Vec<(f32, u32)> = values.iter().flat_map(|&value| (0..3).map(move |id| (value, id))).collect();
    for &a in &pairs {
        for &b in &pairs {
            assert_eq!(before(a, b), before(b, a).reverse(), "{a:?} {b:?}");
            let numbers = !a.0.is_nan() && !b.0.is_nan();
            if numbers && a.0 != b.0 {
                assert_eq!(before(a, b) == Ordering::Less, a.0 > b.0, "{a:?} {b:?}");
            } else if a.0.is_nan() != b.0.is_nan() {
                assert_eq!(before(a, b) == Ordering::Less, b.0.is_nan(), "{a:?} {b:?}");
            } else {
                assert_eq!(before(a, b), a.1.cmp(&b.1), "{a:?} {b:?}");
            }
            for &c in &pairs {
                let chain = before(a, b).is_le() && before(b, c).is_le();
                assert!(!chain || before(a, c).is_le(), "{a:?} {b:?} {c:?}");
            }
        }
    }
}
