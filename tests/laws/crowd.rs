//! A lane among others is the lane alone.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tests::fixture::Lane;

use crate::{ELEMENTS, assert_same_state, bits, ids, small};

#[test]
fn crowded_lanes_are_lanes_alone() {
    for element in ELEMENTS {
        // Slots 0 to 6 run together; the lane of interest runs again alone in slot 7.
        let fixture = std::cell::RefCell::new(small(element, 8));
        let cases =
            (proptest::collection::vec(1usize..140, 2..8), any::<proptest::sample::Index>(), 0u32..1000);
        let mut runner =
            TestRunner::new(Config { cases: 16, failure_persistence: None, ..Config::default() });
        let result = runner.run(&cases, |(lengths, chosen, seed)| {
            let fixture = &mut *fixture.borrow_mut();
            let chosen = chosen.index(lengths.len());
            let prompt = |at: usize| ids(lengths[at], seed + at as u32);
            let mut crowd: Vec<Lane> = (0..lengths.len()).map(|slot| fixture.lane(slot)).collect();
            let mut alone = fixture.lane(7);
            for (at, lane) in crowd.iter_mut().enumerate() {
                fixture.prompt(lane, &prompt(at));
            }
            fixture.prompt(&mut alone, &prompt(chosen));
            for _ in 0..8 {
                let mut all: Vec<&mut Lane> = crowd.iter_mut().collect();
                fixture.decode(&mut all, None);
                let logits = fixture.runner.logits(lengths.len()).expect("read");
                let vocab = logits.len() / lengths.len();
                fixture.decode(&mut [&mut alone], None);
                let expected = fixture.runner.logits(1).expect("read");
                prop_assert_eq!(bits(&logits[chosen * vocab..][..vocab]), bits(&expected));
            }
            assert_same_state("crowded against alone", fixture, &crowd[chosen], &alone);
            Ok(())
        });
        result.unwrap_or_else(|error| panic!("{}: {error}", element.name()));
    }
}

#[test]
fn a_slot_used_before_is_a_fresh_one() {
    for element in ELEMENTS {
        let mut fixture = small(element, 2);
        let mut fresh = fixture.lane(0);
        let mut used = fixture.lane(1);
        fixture.prompt(&mut used, &ids(200, 9));
        fixture.decode(&mut [&mut used], None);
        let mut used = fixture.lane(1);
        let expected = fixture.prompt(&mut fresh, &ids(90, 5));
        let got = fixture.prompt(&mut used, &ids(90, 5));
        assert_eq!(bits(&got), bits(&expected));
        fixture.decode(&mut [&mut fresh], None);
        fixture.decode(&mut [&mut used], None);
        assert_same_state("used slot against fresh", &fixture, &fresh, &used);
    }
}
