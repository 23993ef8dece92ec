//! What a slot remembers of its ids, and what penalties make of it.

use bytemuck::Zeroable;
use kernels::numerics::ElementType;
use kernels::table::{Fact, IN_PROMPT, Kind, Sampling};

use super::desk::{Desk, Random, Row, Slot};
use super::naive::naive;

tests::tests! {
    any: prompts_mark_their_ids, an_id_past_the_vocabulary_is_a_fault, a_decode_row_counts_its_own_id_and_no_other, penalties_follow_the_ids_of_a_whole_generation, each_penalty_sees_what_it_should;
}

/// Rows of a prompt: (slot, ids).
fn prompt(pieces: &[(u32, &[u32])]) -> Desk {
    let mut rows = Vec::new();
    for &(slot, ids) in pieces {
        for (place, &id) in (0..).zip(ids) {
            let fact = Fact { slot, place, count: ids.len() as u32, id, position: place, ..Fact::zeroed() };
            rows.push(Row { fact, options: Sampling::default(), logits: vec![0.0; 12] });
        }
    }
    let slots = pieces.iter().map(|(slot, _)| *slot as usize + 1).max().unwrap();
    Desk {
        element: ElementType::F32,
        kind: Kind::Prompt,
        choices: 12,
        rows,
        slots: vec![Slot::default(); slots],
    }
}

fn prompts_mark_their_ids() {
    let mut desk = prompt(&[(0, &[3, 3, 7]), (2, &[1])]);
    desk.slots[0].counts = vec![0, 0, 0, 2, 0, 4];
    let counts = desk.mark().unwrap();
    assert_eq!(counts[0], [0, 0, 0, IN_PROMPT | 2, 0, 4, 0, IN_PROMPT, 0, 0, 0, 0]);
    assert_eq!(counts[1], [0; 12]);
    assert_eq!(counts[2][..2], [0, IN_PROMPT]);
    for (slot, counts) in desk.slots.iter_mut().zip(&counts) {
        slot.counts = counts.clone();
    }
    assert_eq!(desk.mark().unwrap(), counts, "marking twice is marking once");
}

fn an_id_past_the_vocabulary_is_a_fault() {
    let error = prompt(&[(0, &[3, 12])]).mark().unwrap_err().to_string();
    assert!(error.contains("mark") && error.contains("12"), "{error}");
}

fn a_decode_row_counts_its_own_id_and_no_other() {
    let mut desk = prompt(&[(0, &[5]), (1, &[2])]);
    desk.kind = Kind::Decode;
    desk.slots[0].counts = vec![1, 0, 0, 0, 0, IN_PROMPT | 3];
    let ran = desk.run();
    assert_eq!(ran.counts[0][..6], [1, 0, 0, 0, 0, IN_PROMPT | 4]);
    assert_eq!(ran.counts[1][..4], [0, 0, 1, 0]);
}

/// Many rounds in which each picked id is the next round's row, against a list of ids so far.
fn penalties_follow_the_ids_of_a_whole_generation() {
    const VOCAB: usize = 30;
    let mut random = Random(6);
    let given = [4, 9, 9, 20];
    for options in [
        Sampling { presence: 1.5, ..Sampling::default() },
        Sampling { frequency: 0.4, ..Sampling::default() },
        Sampling { repetition: 1.4, ..Sampling::default() },
        Sampling {
            temperature: 0.8,
            seed: 5,
            presence: 0.7,
            frequency: -0.2,
            repetition: 1.2,
            ..Sampling::default()
        },
    ] {
        let mut slot = Slot::default();
        slot.counts.resize(VOCAB, 0);
        given.iter().for_each(|&id| slot.counts[id as usize] |= IN_PROMPT);
        let mut picked: Vec<u32> = vec![random.below(VOCAB) as u32];
        for _ in 0..60 {
            let logits = random.logits(ElementType::F32, VOCAB, 2.0);
            let position = (given.len() + picked.len() - 1) as u32;
            let mut row = Row::single(0, position, options, &logits);
            row.fact.id = *picked.last().unwrap();
            let mut desk = Desk::decode(ElementType::F32, VOCAB, vec![row]);
            desk.slots[0] = slot.clone();
            let ran = desk.run();
            slot.counts = ran.counts[0].clone();

            let count = |id| {
                let times = picked.iter().filter(|x| **x == id).count() as u32;
                times | if given.contains(&id) { IN_PROMPT } else { 0 }
            };
            let counts: Vec<u32> = (0..VOCAB as u32).map(count).collect();
            assert_eq!(slot.counts, counts);
            let want = naive(&logits, &options, position + 1, &counts, &[]);
            assert_eq!(ran.outcomes[0].id, want.id, "{options:?}");
            picked.push(want.id);
        }
    }
}

/// One id, told apart by hand: in the prompt only, picked only, both.
fn each_penalty_sees_what_it_should() {
    /// What becomes of a logit: the best rival that its id still beats, on a ladder of steps of 1 in 50.
    fn change(options: Sampling, count: u32, logit: f32) -> f32 {
        let wins = |rival: f32| {
            let row = Row::single(0, 0, options, &[-50.0, rival, logit]);
            let mut desk = Desk::decode(ElementType::F32, 3, vec![row]);
            desk.slots[0].counts = vec![0, 0, count];
            desk.run().outcomes[0].id == 2
        };
        let ladder = (0..400).map(|step| step as f32 / 50.0 - 4.0);
        ladder.take_while(|rival| wins(*rival)).last().unwrap_or(f32::NEG_INFINITY)
    }
    let base = Sampling::default();
    let near = |a: f32, b: f32| assert!((a - b).abs() <= 0.021, "{a} is not near {b}");
    let (presence, frequency, repetition) = (
        Sampling { presence: 1.0, ..base },
        Sampling { frequency: 0.5, ..base },
        Sampling { repetition: 2.0, ..base },
    );
    near(change(presence, IN_PROMPT, 2.0), 2.0);
    near(change(presence, 3, 2.0), 1.0);
    near(change(frequency, IN_PROMPT, 2.0), 2.0);
    near(change(frequency, IN_PROMPT | 3, 2.0), 0.5);
    near(change(repetition, IN_PROMPT, 2.0), 1.0);
    near(change(repetition, 5, 2.0), 1.0);
    near(change(repetition, 1, -1.0), -2.0);
    near(change(repetition, 0, 2.0), 2.0);
    near(change(Sampling { presence: 0.5, frequency: 0.25, ..repetition }, IN_PROMPT | 2, 3.0), 0.5);
}
