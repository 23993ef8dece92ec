//! Made values: a function of seed and place, within the scale, spread evenly.

use half::bf16;
use kernels::numerics::Element;
use kernels::random::{Args, Bits, BitsArgs, Random, mixed, uniform};
use tests::check::Scene;

tests::tests! {
    any: each_value_is_that_of_its_place, each_word_is_that_of_its_place;
    host: the_numbers_are_pinned, they_lie_evenly_and_seeds_differ, nothing_and_a_scale_without_a_value_are_refused;
}

fn run<E: Element>(count: usize, seed: u64, scale: f32) -> Vec<E> {
    let mut scene = Scene::new();
    let to = scene.output::<E>("y", count);
    scene.run::<Random<E>>(&Args { to: to.cast(), count: count as u64, seed, scale, zero: 0 });
    scene.read(to, count)
}

fn each_value_is_that_of_its_place() {
    // Past a block, past the work that is spread over threads, and where a run ends early.
    for count in [1, 4095, 4096, 4097, (1 << 20) + 5] {
        let made: Vec<f32> = run(count, 3, 0.5);
        let wanted = (0..count as u64).map(|place| 0.5 * uniform(3, place));
        assert!(made.iter().copied().eq(wanted), "{count}");
    }
    let narrow: Vec<bf16> = run(5000, 3, 0.3);
    assert!((0..).zip(&narrow).all(|(place, value)| *value == bf16::narrow(0.3 * uniform(3, place))));
}

fn bits(words: usize, seed: u64, free: u32, fixed: u32) -> Vec<u32> {
    let mut scene = Scene::new();
    let to = scene.output("y", words);
    scene.run::<Bits>(&BitsArgs { to, words: words as u64, seed, free, fixed });
    scene.read(to, words)
}

fn each_word_is_that_of_its_place() {
    for words in [1, 4095, 4096, 4097, (1 << 20) + 5] {
        let (free, fixed) = (0x7f7f_5f33, 0x8000_0088);
        let made = bits(words, 9, free, fixed);
        let wanted = (0..words as u64).map(|place| (mixed(9, place) >> 32) as u32 & free | fixed);
        assert!(made.iter().copied().eq(wanted), "{words}");
        assert!(words < 4095 || made.iter().fold(0, |all, word| all | word) == free | fixed, "{words}");
    }
    // Half of all bits are set, and another seed sets others.
    let (made, other) = (bits(1 << 14, 1, u32::MAX, 0), bits(1 << 14, 2, u32::MAX, 0));
    let set = |words: &mut dyn Iterator<Item = u32>| words.map(u32::count_ones).sum::<u32>();
    let half = 32 << 13;
    // Five standard deviations of a sum of so many.
    assert!(set(&mut made.iter().copied()).abs_diff(half) < 5 * 363);
    assert!(set(&mut made.iter().zip(&other).map(|(a, b)| a ^ b)).abs_diff(half) < 5 * 363);
}

fn the_numbers_are_pinned() {
    // Other devices and later versions make the same ones.
    let steps = |seed, place| (uniform(seed, place) * (1 << 23) as f32) as i32;
    let pinned = [steps(0, 0), steps(0, 1), steps(1, 0), steps(u64::MAX, u64::MAX)];
    assert_eq!(pinned, PINNED);
    let first = |seed| (mixed(seed, 0) >> 32) as u32;
    assert_eq!([first(0), first(1), first(u64::MAX)], PINNED_BITS);
}

const PINNED: [i32; 4] = [6430888, -1148770, 1116717, 3461205];
const PINNED_BITS: [u32; 3] = [0xe220_a839, 0x910a_2dec, 0xe4d9_7177];

fn they_lie_evenly_and_seeds_differ() {
    let count = 1 << 16;
    for seed in [0, 1, u64::MAX] {
        let values: Vec<f32> = run(count, seed, 1.0);
        assert!(values.iter().all(|value| (-1.0..1.0).contains(value)));
        let mean = values.iter().sum::<f32>() / count as f32;
        let square = values.iter().map(|value| value * value).sum::<f32>() / count as f32;
        // Five standard deviations of a mean of so many.
        assert!(mean.abs() < 5.0 * (1.0f32 / 3.0).sqrt() / 256.0, "{mean}");
        assert!((square - 1.0 / 3.0).abs() < 5.0 * (4.0f32 / 45.0).sqrt() / 256.0, "{square}");
        let other: Vec<f32> = run(count, seed ^ 2, 1.0);
        assert!(values.iter().zip(&other).filter(|(a, b)| a == b).count() < 8);
    }
}

fn nothing_and_a_scale_without_a_value_are_refused() {
    let mut scene = Scene::new();
    let args = Args { to: scene.output::<f32>("y", 4).cast(), count: 4, seed: 0, scale: 1.0, zero: 0 };
    for args in [Args { count: 0, ..args }, Args { scale: f32::INFINITY, ..args }] {
        assert!(scene.refused::<Random<f32>>(&args).contains("positive and finite"));
    }
    let bits = BitsArgs { to: args.to.cast(), words: 4, seed: 0, free: 1, fixed: 2 };
    for bits in [BitsArgs { words: 0, ..bits }, BitsArgs { fixed: 3, ..bits }] {
        assert!(scene.refused::<Bits>(&bits).contains("no bit both free and fixed"));
    }
}
