//! On the 64 grid, a prompt in pieces is the prompt in one pass.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::{ELEMENTS, assert_same_state, bits, ids, small};

#[test]
fn on_grid_pieces_are_the_whole_prompt() {
    for element in ELEMENTS {
        let fixture = std::cell::RefCell::new(small(element, 2));
        let cases = (1usize..320, proptest::collection::vec(1usize..4, 1..5), 0u32..1000);
        let mut runner =
            TestRunner::new(Config { cases: 24, failure_persistence: None, ..Config::default() });
        let result = runner.run(&cases, |(length, cuts, seed)| {
            let fixture = &mut *fixture.borrow_mut();
            let prompt = ids(length, seed);
            let (mut whole, mut parts) = (fixture.lane(0), fixture.lane(1));
            let expected = fixture.prompt(&mut whole, &prompt);
            let (mut got, mut rest) = (Vec::new(), prompt.as_slice());
            for blocks in cuts {
                let (piece, after) = rest.split_at((64 * blocks).min(rest.len()));
                if !piece.is_empty() {
                    got.extend(fixture.prompt(&mut parts, piece));
                }
                rest = after;
            }
            if !rest.is_empty() {
                got.extend(fixture.prompt(&mut parts, rest));
            }
            prop_assert_eq!(bits(&got), bits(&expected));
            assert_same_state("pieces against whole", fixture, &whole, &parts);
            Ok(())
        });
        result.unwrap_or_else(|error| panic!("{}: {error}", element.name()));
    }
}

/// The test above could not fail if pieces off the grid were equal too.
#[test]
fn off_grid_pieces_differ_in_their_last_bits() {
    let mut fixture = small(ELEMENTS[0], 2);
    let prompt = ids(200, 3);
    let (mut whole, mut parts) = (fixture.lane(0), fixture.lane(1));
    let expected = fixture.prompt(&mut whole, &prompt);
    let mut got = fixture.prompt(&mut parts, &prompt[..37]);
    got.extend(fixture.prompt(&mut parts, &prompt[37..]));
    assert_ne!(bits(&got), bits(&expected));
    let largest = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let worst = got.iter().zip(&expected).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
    assert!(worst <= 1e-4 * largest, "off by {worst} of {largest}");
}
