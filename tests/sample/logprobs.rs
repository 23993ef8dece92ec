//! Log probabilities: the model's own distribution, which sums to one.

use kernels::numerics::ElementType;
use kernels::table::{Sampling, TOPS};

use super::desk::{Desk, Random, Row, Slot};
use super::naive::naive;

tests::tests! {
    any: log_probabilities_of_all_choices_sum_to_one, tops_are_the_likeliest_in_order, no_option_changes_the_reported_distribution;
}

/// Every id of a row is picked once, forced by its bias: the reported probabilities sum to one.
fn log_probabilities_of_all_choices_sum_to_one() {
    for (element, choices, spread) in [
        (ElementType::F32, 500, 0.0),
        (ElementType::F32, 500, 5.0),
        (ElementType::Bf16, 431, 12.0),
        (ElementType::F32, 31, 90.0),
    ] {
        let logits = Random(choices as u64).logits(element, choices + 3, spread);
        let options = Sampling { biases: 1, repetition: 1.3, presence: 0.5, ..Sampling::default() };
        let rows = (0..choices as u32).map(|id| Row::single(id, 0, options, &logits));
        let mut desk = Desk::decode(element, choices, rows.collect());
        for (id, slot) in (0..).zip(&mut desk.slots) {
            *slot = Slot { biases: vec![(id, 1e4)], ..Slot::default() };
        }
        let mut sum = 0.0;
        for (id, outcome) in (0..).zip(desk.run().outcomes) {
            assert_eq!(outcome.id, id, "a bias forces its id");
            sum += f64::from(outcome.logprob).exp();
        }
        assert!((sum - 1.0).abs() < 1e-6, "{choices} choices of spread {spread} sum to {sum}");
    }
}

fn tops_are_the_likeliest_in_order() {
    for element in [ElementType::F32, ElementType::Bf16] {
        let logits = Random(8).logits(element, 700, 7.0);
        let row = |logprobs| {
            let options = Sampling { logprobs, temperature: 1.0, seed: 3, ..Sampling::default() };
            Row::single(logprobs, 0, options, &logits)
        };
        let desk = Desk::decode(element, 690, (0..=TOPS as u32).map(row).collect());
        let want = naive(&logits[..690], &Sampling::default(), 0, &[], &[]).logprobs;
        let mut order: Vec<u32> = (0..690).collect();
        order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
        let ran = desk.run();
        for (tops, outcome) in ran.outcomes.iter().enumerate() {
            assert_eq!(outcome.tops as usize, tops);
            assert_eq!(outcome.top_ids[..tops], order[..tops]);
            for (id, logprob) in order.iter().zip(&outcome.top_logprobs[..tops]) {
                assert!((f64::from(*logprob) - want[*id as usize]).abs() < 2e-6);
            }
            assert_eq!(outcome.top_ids[tops..], [0; TOPS][tops..]);
            assert_eq!(outcome.top_logprobs[tops..], [0.0; TOPS][tops..]);
            // The report changes nothing else.
            assert_eq!((outcome.id, outcome.logprob), (ran.outcomes[0].id, ran.outcomes[0].logprob));
        }
    }
}

fn no_option_changes_the_reported_distribution() {
    let logits = Random(4).logits(ElementType::F32, 90, 2.0);
    let plain = Sampling { logprobs: 20, ..Sampling::default() };
    let rows = vec![
        Row::single(0, 0, plain, &logits),
        Row::single(
            1,
            0,
            Sampling {
                temperature: 0.3,
                top_k: 4,
                top_p: 0.5,
                min_p: 0.2,
                presence: 2.0,
                frequency: 1.0,
                repetition: 1.5,
                biases: 1,
                ..plain
            },
            &logits,
        ),
    ];
    let mut desk = Desk::decode(ElementType::F32, 90, rows);
    desk.slots[1] = Slot { counts: vec![2; 90], biases: vec![(5, 3.0)] };
    let ran = desk.run();
    assert_eq!(ran.outcomes[0].top_ids, ran.outcomes[1].top_ids);
    assert_eq!(ran.outcomes[0].top_logprobs, ran.outcomes[1].top_logprobs);
}
