//! Planning ahead, windows and the cut of prompts change when tokens come, never which.

use crate::device::{Fate, World, slab, small_limits};
use crate::schedules::request;
use planner::{Effect, LaneOutcome, Limits, Outcome, Request, RequestId, State, plan_round, settle};
use proptest::prelude::*;
use std::collections::BTreeMap;

type Told = (BTreeMap<RequestId, Vec<u32>>, Vec<(RequestId, bool)>);

/// Runs all requests; returns the tokens of each and which of them failed.
fn run(limits: Limits, ahead: usize, requests: &[(Request, Fate)]) -> Told {
    let mut world = World::new(limits, &[slab(0, 3), slab(1, 2)]);
    for (at, (request, fate)) in requests.iter().enumerate() {
        world.arrive(Request { id: RequestId(at as u64), ..*request }, *fate);
        if at % 3 == 2 {
            world.book();
        }
        if world.booked.len() >= ahead {
            world.settle();
        }
    }
    world.drain(ahead);
    let failed = world.ends.iter().map(|(id, end)| (*id, matches!(end, Effect::Failed { .. })));
    (world.told, failed.collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn planning_ahead_tells_the_same_tokens(requests in prop::collection::vec(request(), 1..20)) {
        prop_assert_eq!(run(small_limits(), 1, &requests), run(small_limits(), 2, &requests));
    }

    #[test]
    fn windows_tell_the_same_tokens_as_single_rows(requests in prop::collection::vec(request(), 1..20)) {
        let single: Vec<_> = requests.iter().map(|(asked, fate)| (Request { window: 1, ..*asked }, *fate)).collect();
        prop_assert_eq!(run(small_limits(), 2, &requests), run(small_limits(), 2, &single));
    }

    #[test]
    fn pieces_shares_and_graphs_do_not_change_tokens(
        requests in prop::collection::vec(request(), 1..20),
        pieces in 1..6u32,
        share in 1..5u32,
    ) {
        let other = Limits { piece_rows: 64 * pieces, decode_share: share, graphs: false, ..small_limits() };
        prop_assert_eq!(run(small_limits(), 2, &requests), run(other, 2, &requests));
    }

    #[test]
    fn accepting_n_rows_equals_n_single_settles(prompt in 1..200u32, max in 6..40u32, n in 1..6u32) {
        let run = |window: u32| {
            let mut state = State::new(small_limits(), &[slab(0, 1)]).unwrap();
            let request = Request { window, ..Request::text(RequestId(1), prompt, max) };
            assert!(state.arrive(request).is_empty());
            let (mut told, mut next) = (Vec::new(), 0);
            while told.len() < 1 + n as usize {
                let round = plan_round(&state).unwrap();
                state.book(&round);
                let made = if !round.samples() { 0 } else if next == 0 { 1 } else { window };
                let accepted = (next..next + made).collect();
                next += made;
                let outcome = Outcome { lanes: [LaneOutcome { accepted, ended: None }].into_iter().collect() };
                let effects = settle(&mut state, &round, &outcome);
                told.extend(effects.into_iter().filter(|effect| !matches!(effect, Effect::Admitted { .. })));
            }
            let lane = state.lanes().next().map(|lane| {
                (lane.settled(), lane.planned(), lane.told(), lane.pages().to_vec())
            });
            (told, lane)
        };
        prop_assert_eq!(run(n), run(1));
    }
}
