//! The ends of every option's range, and ties.

use kernels::numerics::ElementType;
use kernels::table::{Outcome, Sampling};

use super::desk::{Desk, Random, Row, Slot};

tests::tests! {
    any: ties_go_to_the_lower_id, options_that_leave_one_id_are_greedy, the_likeliest_ids_share_when_they_are_equal, limits_that_cut_nothing_change_nothing, a_high_temperature_reaches_every_id, the_largest_finite_logits_do_no_harm, one_choice_is_always_picked;
}

const SEEDS: u64 = 300;

/// The outcomes of one row's logits under `SEEDS` seeds.
fn outcomes(logits: &[f32], options: Sampling) -> Vec<Outcome> {
    let row = |seed| Row::single(seed as u32, 9, Sampling { seed, ..options }, logits);
    Desk::decode(ElementType::F32, logits.len(), (0..SEEDS).map(row).collect()).run().outcomes
}

/// The ids that were drawn, ascending.
fn ids(logits: &[f32], options: Sampling) -> Vec<u32> {
    let mut ids: Vec<u32> = outcomes(logits, options).iter().map(|outcome| outcome.id).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

fn hot() -> Sampling {
    Sampling { temperature: 1.0, ..Sampling::default() }
}

fn ties_go_to_the_lower_id() {
    let equal = [2.0; 40];
    assert_eq!(ids(&equal, Sampling::default()), [0]);
    assert_eq!(ids(&equal, Sampling { top_k: 3, ..hot() }), [0, 1, 2]);
    // Ten of forty equal ids reach a quarter; the next mass would be too much.
    assert_eq!(ids(&equal, Sampling { top_p: 0.25, ..hot() }), (0..10).collect::<Vec<_>>());
    assert_eq!(ids(&[1.0, 3.0, 3.0, 2.0, 3.0], Sampling { top_k: 2, ..hot() }), [1, 2]);
    assert_eq!(ids(&[-0.0, 0.0, -1.0], Sampling::default()), [0]);
    let tops = outcomes(&[1.0, 3.0, 2.0, 3.0], Sampling { logprobs: 3, ..hot() })[0];
    assert_eq!(tops.top_ids[..3], [1, 3, 2]);
}

fn options_that_leave_one_id_are_greedy() {
    let logits = Random(1).logits(ElementType::F32, 300, 1.0);
    let best = ids(&logits, Sampling::default());
    for options in [
        Sampling { top_k: 1, ..hot() },
        Sampling { top_p: f32::MIN_POSITIVE, ..hot() },
        Sampling { top_p: 1e-6, top_k: 40, ..hot() },
        Sampling { min_p: 1.0, ..hot() },
        Sampling { temperature: 1e-30, ..hot() },
        Sampling { temperature: f32::from_bits(1), ..hot() },
    ] {
        assert_eq!(ids(&logits, options), best, "{options:?}");
    }
}

fn the_likeliest_ids_share_when_they_are_equal() {
    let logits = [1.0, 4.0, 0.0, 4.0, 3.999];
    assert_eq!(ids(&logits, Sampling { min_p: 1.0, ..hot() }), [1, 3]);
    assert_eq!(ids(&logits, Sampling { temperature: 1e-30, ..hot() }), [1, 3]);
}

fn limits_that_cut_nothing_change_nothing() {
    let logits = Random(2).logits(ElementType::F32, 100, 3.0);
    let off = outcomes(&logits, hot());
    for options in [
        Sampling { top_k: 100, ..hot() },
        Sampling { top_k: u32::MAX, ..hot() },
        Sampling { top_p: 1.0, min_p: 0.0, ..hot() },
        Sampling { min_p: 1e-7, ..hot() },
        Sampling { repetition: 1.0, presence: 0.0, frequency: 0.0, ..hot() },
    ] {
        assert_eq!(outcomes(&logits, options), off, "{options:?}");
    }
}

fn a_high_temperature_reaches_every_id() {
    let logits = [5.0, -5.0, 0.0, 1.0];
    assert_eq!(ids(&logits, Sampling { temperature: f32::MAX, ..hot() }), [0, 1, 2, 3]);
}

fn the_largest_finite_logits_do_no_harm() {
    let logits = [f32::MIN, 3.0, f32::MAX, f32::MIN, f32::MAX];
    assert_eq!(ids(&logits, Sampling::default()), [2]);
    assert_eq!(ids(&logits, hot()), [2, 4]);
    let row = |slot: u32, repetition| {
        Row::single(slot, 0, Sampling { repetition, presence: 2.0, biases: 1, ..hot() }, &logits)
    };
    let mut desk = Desk::decode(ElementType::F32, 5, vec![row(0, 1e-9), row(1, 1e9)]);
    desk.slots.fill(Slot { counts: vec![1; 5], biases: vec![(2, 100.0)] });
    for outcome in desk.run().outcomes {
        assert_eq!(outcome.status, 0);
        assert!([2, 4].contains(&outcome.id), "{outcome:?}");
    }
}

fn one_choice_is_always_picked() {
    let outcome = outcomes(&[-7.0], Sampling { logprobs: 20, top_p: 0.5, top_k: 5, ..hot() })[0];
    assert_eq!((outcome.id, outcome.tops, outcome.logprob, outcome.top_logprobs[0]), (0, 1, 0.0, 0.0));
}
