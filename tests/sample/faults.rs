//! Damaged logits, ids without text, and staged values outside the domain.

use kernels::numerics::ElementType;
use kernels::table::{Outcome, Sampling};

use super::desk::{Desk, Random, Row, Slot};

tests::tests! {
    any: logits_that_are_not_finite_are_reported, a_damaged_row_leaves_others_alone, ids_without_text_are_never_picked_nor_part_of_a_sum, staged_values_outside_the_domain_are_faults_that_name_them, options_that_nobody_staged_are_a_fault, a_bias_past_the_vocabulary_is_a_fault, launches_that_cannot_be_right_are_refused;
}

fn hot() -> Sampling {
    Sampling { temperature: 1.0, logprobs: 5, seed: 2, ..Sampling::default() }
}

fn picked(logits: &[f32], choices: usize, options: Sampling) -> Outcome {
    let row = Row::single(0, 0, options, logits);
    Desk::decode(ElementType::F32, choices, vec![row]).run().outcomes[0]
}

fn logits_that_are_not_finite_are_reported() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let damaged = [
        (vec![1.0, nan, 3.0, 3.0], 2),
        (vec![nan; 4], 0),
        (vec![nan, -inf, nan, -inf], 1),
        (vec![1.0, inf, inf, 2.0], 1),
        (vec![1.0, 2.0, -inf, 0.0], 1),
    ];
    for (logits, id) in damaged {
        for options in [Sampling::default(), hot(), Sampling { top_k: 2, top_p: 0.5, presence: 1.0, ..hot() }]
        {
            let want = Outcome { id, status: 1, accepted: 1, ..Outcome::default() };
            assert_eq!(picked(&logits, 4, options), want, "{logits:?}");
        }
    }
    // A damaged logit of an id without text is damage too, but it is not picked.
    let outcome = picked(&[1.0, 2.0, inf], 2, hot());
    assert_eq!((outcome.status, outcome.id), (1, 1));
}

fn a_damaged_row_leaves_others_alone() {
    let logits = Random(1).logits(ElementType::F32, 64, 3.0);
    let mut rows: Vec<Row> = (0..3).map(|slot| Row::single(slot, 0, hot(), &logits)).collect();
    rows[1].logits[7] = f32::NAN;
    let outcomes = Desk::decode(ElementType::F32, 64, rows).run().outcomes;
    assert_eq!(outcomes.iter().map(|outcome| outcome.status).collect::<Vec<_>>(), [0, 1, 0]);
    assert_eq!(outcomes[0], picked(&logits, 64, hot()));
    assert_eq!(outcomes[0], outcomes[2]);
}

fn ids_without_text_are_never_picked_nor_part_of_a_sum() {
    let mut logits = Random(1).logits(ElementType::F32, 80, 3.0);
    let text = logits.clone();
    logits[60..].fill(50.0);
    for seed in 0..200 {
        let options = Sampling { seed, temperature: 2.0, logprobs: 20, ..Sampling::default() };
        let outcome = picked(&logits, 60, options);
        assert!(outcome.id < 60 && outcome.top_ids.iter().all(|id| *id < 60), "{outcome:?}");
        assert_eq!(outcome, picked(&text[..60], 60, options));
    }
    let mut desk = Desk::decode(
        ElementType::F32,
        60,
        vec![Row::single(0, 0, Sampling { biases: 2, ..Sampling::default() }, &logits)],
    );
    desk.slots[0] = Slot { biases: vec![(70, 100.0), (59, 100.0)], ..Slot::default() };
    assert_eq!(desk.run().outcomes[0].id, 59, "a bias does not give an id text");
}

fn staged_values_outside_the_domain_are_faults_that_name_them() {
    let base = Sampling::default();
    let cases = [
        ("temperature", Sampling { temperature: -1.0, ..base }),
        ("temperature", Sampling { temperature: f32::NAN, ..base }),
        ("temperature", Sampling { temperature: f32::INFINITY, ..base }),
        ("top_p", Sampling { top_p: 0.0, ..base }),
        ("top_p", Sampling { top_p: 1.5, ..base }),
        ("min_p", Sampling { min_p: -0.1, ..base }),
        ("presence", Sampling { presence: 2.5, ..base }),
        ("frequency", Sampling { frequency: f32::NAN, ..base }),
        ("repetition", Sampling { repetition: 0.0, ..base }),
        ("logprobs", Sampling { logprobs: 21, ..base }),
        ("biases", Sampling { biases: 513, ..base }),
    ];
    for (name, options) in cases {
        let desk = Desk::decode(ElementType::F32, 4, vec![Row::single(0, 0, options, &[0.0; 4])]);
        let error = desk.sample(0..1).unwrap_err().to_string();
        assert!(error.contains("sample") && error.contains(&format!("{name} of")), "{name}: {error}");
    }
}

fn options_that_nobody_staged_are_a_fault() {
    let mut row = Row::single(0, 0, Sampling::default(), &[0.0; 4]);
    (row.fact.place, row.fact.count) = (1, 2);
    let first = Row::single(1, 0, Sampling::default(), &[0.0; 4]);
    // The second row says that the first row's options are its own; a place of 2 points at poison.
    let mut desk = Desk::decode(ElementType::F32, 4, vec![first.clone(), row, first]);
    desk.rows[2].fact.place = 1;
    desk.rows[2].fact.count = 2;
    assert!(desk.sample(1..2).is_ok());
    let error = desk.sample(2..3).unwrap_err().to_string();
    assert!(error.contains("temperature of"), "{error}");
}

fn a_bias_past_the_vocabulary_is_a_fault() {
    for bias in [(4, 1.0), (0, f32::NAN)] {
        let row = Row::single(0, 0, Sampling { biases: 1, ..Sampling::default() }, &[0.0; 4]);
        let mut desk = Desk::decode(ElementType::F32, 4, vec![row]);
        desk.slots[0].biases = vec![bias];
        let error = desk.sample(0..1).unwrap_err().to_string();
        assert!(error.contains("Bias"), "{error}");
    }
}

fn launches_that_cannot_be_right_are_refused() {
    let row = Row::single(0, 0, Sampling::default(), &[0.0; 4]);
    for choices in [0, 5] {
        let error = Desk::decode(ElementType::F32, choices, vec![row.clone()]).sample(0..1).unwrap_err();
        assert!(matches!(error, graph::Error::Launch { kernel: "sample", .. }), "{error}");
    }
    let error = Desk::decode(ElementType::F32, 4, vec![row]).sample(0..0).unwrap_err();
    assert!(matches!(error, graph::Error::Launch { kernel: "sample", .. }), "{error}");
}
