//! Draws over many seeds and positions follow the distribution; the noise is pinned.

use kernels::numerics::ElementType;
use kernels::sample::draw::{Draw, ln, mass, weight_of};
use kernels::table::Sampling;

use super::desk::{Desk, Random, Row};
use super::naive::{naive, output};

tests::tests! {
    any: draws_follow_the_softmax_over_seeds_and_over_positions, draws_follow_what_the_limits_leave, neighbouring_draws_are_independent, a_wrong_distribution_is_found_out, the_noise_is_pinned, logarithms_and_waits_are_precise, masses_are_whole_numbers_of_units;
}

/// Draws of each distribution that is tested.
const DRAWS: usize = 20_000;

/// The bound that a chi-square value of `freedom` degrees passes once in a million (Wilson and Hilferty).
fn bound(freedom: usize) -> f64 {
    const QUANTILE: f64 = 4.753_424;
    let (f, part) = (freedom as f64, 2.0 / (9.0 * freedom as f64));
    f * (1.0 - part + QUANTILE * part.sqrt()).powi(3)
}

/// Chi-square of counted draws against probabilities; cells below five expected draws are joined.
fn chi_square(counted: &[(f64, usize)]) -> (f64, usize) {
    let draws: usize = counted.iter().map(|(_, n)| n).sum();
    let mut cells: Vec<(f64, f64)> = Vec::new();
    let mut rest = (0.0, 0.0);
    for &(p, n) in counted {
        let expected = p * draws as f64;
        if expected < 5.0 {
            rest = (rest.0 + expected, rest.1 + n as f64);
        } else {
            cells.push((expected, n as f64));
        }
    }
    if rest.0 >= 5.0 {
        cells.push(rest);
    } else if let Some(last) = cells.last_mut() {
        *last = (last.0 + rest.0, last.1 + rest.1);
    }
    let value = cells.iter().map(|(expected, n)| (n - expected) * (n - expected) / expected).sum();
    (value, cells.len() - 1)
}

/// Ids drawn from one row's logits, for each (seed, position).
fn drawn(logits: &[f32], options: Sampling, keys: impl Iterator<Item = (u64, u32)>) -> Vec<u32> {
    let row = |(slot, (seed, position)): (usize, (u64, u32))| {
        Row::single(slot as u32, position, Sampling { seed, ..options }, logits)
    };
    let rows: Vec<Row> = keys.enumerate().map(row).collect();
    let pieces = rows.chunks(2_000).map(|rows| {
        let first = rows[0].fact.slot;
        let mut rows = rows.to_vec();
        rows.iter_mut().for_each(|row| row.fact.slot -= first);
        Desk::decode(ElementType::F32, logits.len(), rows).run()
    });
    pieces.flat_map(|ran| ran.outcomes).map(|outcome| outcome.id).collect()
}

fn follows(options: Sampling, keys: impl Iterator<Item = (u64, u32)>) {
    let logits = Random(11).logits(ElementType::F32, 50, 3.0);
    let ids = drawn(&logits, options, keys);
    let want = naive(&logits, &options, 0, &[], &[]).drawn;
    let count = |id: u32| ids.iter().filter(|x| **x == id).count();
    let counted: Vec<(f64, usize)> = want.iter().map(|&(id, p)| (p, count(id))).collect();
    let inside: usize = counted.iter().map(|(_, n)| n).sum();
    assert_eq!(inside, ids.len(), "an id was drawn that is cut off");
    let (value, freedom) = chi_square(&counted);
    assert!(value < bound(freedom), "{options:?}: chi-square {value} with {freedom} degrees");
}

fn seeds() -> impl Iterator<Item = (u64, u32)> {
    (0..DRAWS as u64).map(|seed| (seed, 77))
}

fn positions() -> impl Iterator<Item = (u64, u32)> {
    (0..DRAWS as u32).map(|position| (1, position))
}

fn draws_follow_the_softmax_over_seeds_and_over_positions() {
    for temperature in [0.5, 1.0, 3.0] {
        let options = Sampling { temperature, ..Sampling::default() };
        follows(options, seeds());
        follows(options, positions());
    }
}

fn draws_follow_what_the_limits_leave() {
    let base = Sampling { temperature: 1.2, ..Sampling::default() };
    follows(Sampling { top_k: 7, ..base }, seeds());
    follows(Sampling { top_p: 0.8, ..base }, seeds());
    follows(Sampling { min_p: 0.1, ..base }, positions());
    follows(Sampling { top_k: 20, top_p: 0.9, min_p: 0.05, ..base }, positions());
}

/// Draws at neighbouring positions, and of neighbouring seeds, are independent.
fn neighbouring_draws_are_independent() {
    let logits = [0.0, 0.5, 1.0, 0.25];
    let options = Sampling { temperature: 1.0, ..Sampling::default() };
    let p = naive(&logits, &options, 0, &[], &[]).drawn;
    for ids in [drawn(&logits, options, seeds()), drawn(&logits, options, positions())] {
        let mut counted = Vec::new();
        for &(a, p_a) in &p {
            for &(b, p_b) in &p {
                let pairs = ids.chunks_exact(2).filter(|pair| pair[0] == a && pair[1] == b).count();
                counted.push((p_a * p_b, pairs));
            }
        }
        let (value, freedom) = chi_square(&counted);
        assert!(value < bound(freedom), "chi-square {value} with {freedom} degrees");
    }
}

/// The test itself can fail: draws of one distribution do not pass for another.
fn a_wrong_distribution_is_found_out() {
    let logits = [0.0, 0.5, 1.0, 0.25];
    let options = Sampling { temperature: 1.0, ..Sampling::default() };
    let ids = drawn(&logits, options, seeds());
    let wrong = Sampling { temperature: 1.2, ..options };
    let want = naive(&logits, &wrong, 0, &[], &[]).drawn;
    let counted: Vec<(f64, usize)> =
        want.iter().map(|&(id, p)| (p, ids.iter().filter(|x| **x == id).count())).collect();
    let (value, freedom) = chi_square(&counted);
    assert!(value > bound(freedom));
}

/// (seed, position, id) and its 64 bits: recorded, so that a resumed or restarted server draws the same.
const PINNED: [(u64, u32, u32, u64); 6] = [
    (0, 0, 0, 0x2382_75bc_38fc_be91),
    (0, 0, 1, 0xf89a_2566_b582_2c54),
    (0, 1, 0, 0x2f10_1fe2_1496_ea20),
    (1, 0, 0, 0xb18a_02f4_6d8d_86c3),
    (1234, 4095, 248_043, 0xceea_eda8_edbf_4977),
    (u64::MAX, u32::MAX, u32::MAX, 0x5700_bc00_5279_0741),
];

fn the_noise_is_pinned() {
    for (seed, position, id, bits) in PINNED {
        let got = Draw::new(seed, position).bits(id);
        assert_eq!(got, bits, "({seed}, {position}, {id}): {got:#018x}");
    }
    // The published first outputs of SplitMix64 from state 1234567.
    assert_eq!(output(1_234_567, 0), 6_457_827_717_110_365_317);
    assert_eq!(output(1_234_567, 3), 4_593_380_528_125_082_431);
    // And its use: three levels, the id's output from the position's from the seed's.
    assert_eq!(Draw::new(9, 30).bits(1000), output(output(output(9, 0), 30), 1000));
}

fn logarithms_and_waits_are_precise() {
    let mut random = Random(3);
    for _ in 0..100_000 {
        let x = f32::from_bits(0x0080_0000 + random.below(0x7f00_0000) as u32);
        let (got, want) = (f64::from(ln(x)), f64::from(x).ln());
        assert!((got - want).abs() <= 2.5e-7 * want.abs(), "ln({x}): {got}, not {want}");

        let draw = Draw::new(random.next(), 0);
        let uniform = draw.uniform(0);
        assert!(uniform > 0.0 && uniform < 1.0);
        let (got, want) = (f64::from(draw.wait(0)), -(-f64::from(uniform)).ln_1p());
        assert!((got - want).abs() <= 3e-7 * want, "wait for {uniform}: {got}, not {want}");
    }
    assert_eq!(ln(1.0), 0.0);
    // The first id of this row whose bits round up to 1: its wait is long, not endless.
    let draw = Draw::new(0, 0);
    assert_eq!(draw.bits(76_218_990) >> 39, (1 << 25) - 1);
    assert!(draw.uniform(76_218_990) < 1.0 && draw.wait(76_218_990) < 17.0);
}

fn masses_are_whole_numbers_of_units() {
    assert_eq!([mass(0.0), mass(1.0), mass(0.75)], [0, 1 << 40, 3 << 38]);
    let half = 0.5f32.powi(41);
    // Ties to even: half a unit is none, one and a half are two.
    assert_eq!([mass(half), mass(3.0 * half), mass(1.01 * half)], [0, 2, 1]);
    assert_eq!(weight_of(5 << 39), 2.5);
}
