//! Every option alone and all of them together, against the naive formula.

use kernels::numerics::ElementType;
use kernels::table::{IN_PROMPT, Sampling};

use super::desk::{Desk, Random, Row, Slot};
use super::naive::naive;

tests::tests! {
    any: greedy, temperature_alone, top_k_alone, top_p_alone, min_p_alone, presence_alone, frequency_alone, repetition_alone, bias_alone, all_together, a_large_vocabulary_with_many_ties;
}

const VOCAB: usize = 203;
const CHOICES: usize = 197;

/// Sets one option, or several, at random.
type Setter = fn(&mut Sampling, &mut Random);

/// 64 random rows under random options of one sort, both element types; every id and log probability.
fn check(name: &str, set: Setter) {
    let mut random = Random(name.bytes().fold(1, |sum: u64, byte| sum.wrapping_mul(131) + u64::from(byte)));
    for element in [ElementType::F32, ElementType::Bf16] {
        let rows = (0..64).map(|slot| {
            let mut options = Sampling { seed: random.next(), ..Sampling::default() };
            set(&mut options, &mut random);
            let logits = random.logits(element, VOCAB, 6.0);
            let mut row = Row::single(slot, random.below(1000) as u32, options, &logits);
            row.fact.id = random.below(VOCAB) as u32;
            row
        });
        let mut desk = Desk::decode(element, CHOICES, rows.collect());
        for (slot, row) in desk.slots.iter_mut().zip(&desk.rows) {
            let count = |_| match random.below(6) {
                0 => IN_PROMPT,
                1 => 1 + random.below(4) as u32,
                2 => IN_PROMPT | random.below(3) as u32,
                _ => 0,
            };
            let counts = (0..VOCAB).map(count).collect();
            let first = random.below(VOCAB);
            let bias = |i| (((first + 7 * i) % VOCAB) as u32, random.within(-8.0, 8.0));
            let biases = (0..row.options.biases as usize).map(bias).collect();
            *slot = Slot { counts, biases };
        }

        let ran = desk.run();
        for (row, (slot, outcome)) in desk.rows.iter().zip(desk.slots.iter().zip(&ran.outcomes)) {
            let mut counts = slot.counts.clone();
            counts[row.fact.id as usize] += 1;
            let logits = &row.logits[..CHOICES];
            let want = naive(logits, &row.options, row.fact.position + 1, &counts, &slot.biases);
            assert_eq!((outcome.status, outcome.accepted), (0, 1), "{name}");
            assert_eq!(outcome.id, want.id, "{name} {} {:?}", element.name(), row.options);
            let logprob = want.logprobs[outcome.id as usize];
            assert!((f64::from(outcome.logprob) - logprob).abs() < 2e-6, "{name} {logprob} {outcome:?}");
            assert_eq!(ran.last_ids[row.fact.slot as usize], outcome.id);
        }
    }
}

fn temperature(options: &mut Sampling, random: &mut Random) {
    options.temperature = random.within(0.2, 2.0);
}

fn greedy() {
    check("greedy", |_, _| {});
}

fn temperature_alone() {
    check("temperature", temperature);
}

fn top_k_alone() {
    check("top_k", |options, random| {
        temperature(options, random);
        options.top_k = 1 + random.below(40) as u32;
    });
}

fn top_p_alone() {
    check("top_p", |options, random| {
        temperature(options, random);
        options.top_p = random.within(0.01, 0.99);
    });
}

fn min_p_alone() {
    check("min_p", |options, random| {
        temperature(options, random);
        options.min_p = random.within(0.01, 0.9);
    });
}

fn presence_alone() {
    check("presence", |options, random| options.presence = random.within(-2.0, 2.0));
}

fn frequency_alone() {
    check("frequency", |options, random| options.frequency = random.within(-2.0, 2.0));
}

fn repetition_alone() {
    check("repetition", |options, random| options.repetition = random.within(0.5, 2.0));
}

fn bias_alone() {
    check("bias", |options, random| options.biases = 1 + random.below(20) as u32);
}

fn all_together() {
    check("all", |options, random| {
        *options = Sampling {
            seed: options.seed,
            temperature: random.within(0.2, 2.0),
            top_p: random.within(0.3, 1.0),
            min_p: random.within(0.0, 0.2),
            presence: random.within(-2.0, 2.0),
            frequency: random.within(-2.0, 2.0),
            repetition: random.within(0.5, 2.0),
            top_k: random.below(60) as u32,
            logprobs: random.below(21) as u32,
            biases: random.below(20) as u32,
            zero: 0,
        };
    });
}

/// The selections at a size where none of them fits in one go, with many equal logits.
fn a_large_vocabulary_with_many_ties() {
    let mut random = Random(5);
    let logits: Vec<f32> =
        random.logits(ElementType::F32, 20_000, 8.0).into_iter().map(|x| (x * 4.0).round() / 4.0).collect();
    let rows = (0..48).map(|slot| {
        let options = Sampling {
            seed: random.next(),
            temperature: 1.5,
            top_p: [1.0, 0.9, 0.5, 0.1][slot as usize % 4],
            top_k: [0, 1, 50, 3000, 19_999, 20_000][slot as usize % 6],
            min_p: [0.0, 0.05][slot as usize % 2],
            ..Sampling::default()
        };
        Row::single(slot, 3, options, &logits)
    });
    let desk = Desk::decode(ElementType::F32, logits.len(), rows.collect());
    for (row, outcome) in desk.rows.iter().zip(desk.run().outcomes) {
        assert_eq!(outcome.id, naive(&logits, &row.options, 4, &[], &[]).id, "{:?}", row.options);
    }
}
