//! A row does not depend on the rows beside it.

use kernels::numerics::ElementType;
use kernels::table::{Kind, Sampling};

use super::desk::{Desk, Random, Row, Slot, UNTOUCHED};

tests::tests! {
    any: a_row_alone_equals_the_row_among_many, the_order_of_rows_changes_nothing, a_launch_over_some_rows_touches_only_those, the_last_row_of_a_prompt_picks_for_its_slot;
}

const VOCAB: usize = 150;

/// `count` rows of slots of their own with random options and state.
fn crowd(element: ElementType, count: usize) -> Desk {
    let mut random = Random(count as u64);
    let row = |slot| {
        let options = Sampling {
            seed: random.next(),
            temperature: [0.0, 0.7, 1.0][random.below(3)],
            top_p: [1.0, 0.9][random.below(2)],
            top_k: [0, 20][random.below(2)],
            presence: [0.0, 1.5][random.below(2)],
            repetition: [1.0, 1.1][random.below(2)],
            logprobs: random.below(21) as u32,
            biases: random.below(3) as u32,
            ..Sampling::default()
        };
        let logits = random.logits(element, VOCAB, 4.0);
        let mut row = Row::single(slot, random.below(500) as u32, options, &logits);
        row.fact.id = random.below(VOCAB) as u32;
        row
    };
    let mut desk = Desk::decode(element, VOCAB - 3, (0..count as u32).map(row).collect());
    for slot in &mut desk.slots {
        let counts = (0..VOCAB).map(|_| random.below(3) as u32).collect();
        *slot = Slot { counts, biases: vec![(random.below(VOCAB) as u32, 2.0), (9, -3.0)] };
    }
    desk
}

fn a_row_alone_equals_the_row_among_many() {
    for element in [ElementType::F32, ElementType::Bf16] {
        for count in [2, 3, 16, 33, 64] {
            let desk = crowd(element, count);
            let ran = desk.run();
            for (index, row) in desk.rows.iter().enumerate() {
                let mut alone = desk.clone();
                alone.rows = vec![row.clone()];
                alone.rows[0].fact.slot = 0;
                alone.slots = vec![desk.slots[index].clone()];
                let alone = alone.run();
                let bytes = bytemuck::bytes_of(&alone.outcomes[0]);
                assert_eq!(bytes, bytemuck::bytes_of(&ran.outcomes[index]), "row {index} of {count}");
                assert_eq!(alone.counts[0], ran.counts[index]);
                assert_eq!(alone.last_ids[0], ran.last_ids[index]);
            }
        }
    }
}

fn the_order_of_rows_changes_nothing() {
    let desk = crowd(ElementType::F32, 40);
    let ran = desk.run();
    let mut turned = desk.clone();
    turned.rows.rotate_left(13);
    let mut turned_ran = turned.run();
    turned_ran.outcomes.rotate_right(13);
    assert_eq!(turned_ran, ran);
}

fn a_launch_over_some_rows_touches_only_those() {
    let desk = crowd(ElementType::Bf16, 10);
    let all = desk.run();
    let some = desk.sample(3..7).unwrap();
    assert_eq!(some.outcomes, all.outcomes[3..7]);
    for slot in 0..10 {
        let covered = (3..7).contains(&slot);
        assert_eq!(some.last_ids[slot], if covered { all.last_ids[slot] } else { UNTOUCHED });
        assert_eq!(some.counts[slot] == all.counts[slot], covered);
    }
}

/// All rows of a prompt report, under the options of its first row; its last row picks for the slot.
fn the_last_row_of_a_prompt_picks_for_its_slot() {
    let mut desk = crowd(ElementType::F32, 6);
    desk.kind = Kind::Prompt;
    let options = Sampling { temperature: 1.0, seed: 4, biases: 0, ..Sampling::default() };
    for (place, row) in desk.rows.iter_mut().enumerate() {
        (row.fact.slot, row.fact.place, row.fact.count) = (0, place as u32, 6);
        row.fact.position = 64 + place as u32;
        // Only the first row's are staged.
        row.options = options;
    }
    desk.slots.truncate(1);
    let ran = desk.run();
    assert_eq!(ran.last_ids[0], ran.outcomes[5].id);
    assert_eq!(ran.counts[0], desk.slots[0].counts, "a prompt's ids are marked, not counted");
    for (place, row) in desk.rows.iter().enumerate() {
        let mut alone = desk.clone();
        alone.rows = vec![row.clone()];
        (alone.rows[0].fact.place, alone.rows[0].fact.count) = (0, 1);
        assert_eq!(alone.run().outcomes[0], ran.outcomes[place], "row {place}");
    }

    let piece = desk.sample(0..5).unwrap();
    assert_eq!(piece.last_ids[0], UNTOUCHED, "the slot's last row was not covered");
}
