//! Planning costs little beside a round: the best of many rounds is timed, so a busy machine does not matter.

use planner::{ClassId, LaneOutcome, Limits, Outcome, Request, RequestId, Slab, State, plan_round, settle};
use std::time::{Duration, Instant};

/// The shortest time to plan and book a decode round of so many lanes, with a second one in flight.
fn best(lanes: u32) -> Duration {
    let limits = Limits {
        context: 100_000,
        piece_rows: 512,
        round_rows: 64,
        decode_share: 1,
        queue: 256,
        audit: 0,
        graphs: true,
        pages: vec![100_000],
    };
    let mut state = State::new(limits, &[Slab { class: ClassId(0), slots: 64 }]).unwrap();
    for id in 0..lanes {
        assert!(state.arrive(Request::text(RequestId(id as u64), 700, 5000)).is_empty());
    }
    let mut flying = None;
    let mut best = Duration::MAX;
    for _ in 0..4000 {
        let start = Instant::now();
        let round = plan_round(&state).expect("lanes have tokens to go");
        state.book(&round);
        let took = start.elapsed();
        if round.lanes.len() == lanes as usize && round.admits.is_empty() {
            best = best.min(took);
        }
        if let Some(oldest) = flying.replace(round) {
            let accepted = std::iter::repeat_n(1, oldest.samples() as usize).collect();
            let answer = LaneOutcome { accepted, ended: None };
            let outcome = Outcome { lanes: oldest.lanes.iter().map(|_| answer.clone()).collect() };
            assert!(!settle(&mut state, &oldest, &outcome).is_empty() || !oldest.samples());
        }
    }
    best
}

#[test]
fn a_round_is_planned_and_booked_in_microseconds() {
    for (lanes, bound) in [(1, 5), (16, 20), (64, 80)] {
        let took = best(lanes);
        println!("plan and book at {lanes} lanes: {} ns", took.as_nanos());
        assert!(took < Duration::from_micros(bound), "{lanes} lanes took {took:?}; the bound is {bound} us");
    }
}
