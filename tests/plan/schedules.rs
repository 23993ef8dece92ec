//! Properties over random schedules of arrivals, cancellations, growth, planning and settling.

use crate::device::{Fate, World, slab, small_limits};
use planner::{ClassId, Effect, Reason, Request, RequestId};
use proptest::prelude::*;

/// One thing that happens to a planner.
#[derive(Debug, Clone)]
pub(crate) enum Event {
    Arrive(Request, Fate),
    Cancel(prop::sample::Index),
    Grow(u8, u16),
    Book,
    Settle,
}

/// A request, numbered when it arrives, and its fate.
pub(crate) fn request() -> impl Strategy<Value = (Request, Fate)> {
    let lengths = (prop_oneof![1..40u32, 60..70u32, 120..330u32], 1..90u32);
    let shape = (0..2u8, prop_oneof![4 => Just(1u32), 1 => 2..7u32]);
    let traits = (prop::bool::weighted(0.15), prop::bool::weighted(0.1), prop::bool::weighted(0.2));
    let fate = (prop::option::weighted(0.3, 1..40u32), prop::option::weighted(0.1, 0..40u32));
    (lengths, shape, traits, fate).prop_map(|((prompt, max), (class, window), traits, (stop, fail))| {
        let mut request = Request::text(RequestId(0), prompt, max);
        (request.class, request.window) = (ClassId(class), window);
        (request.image_bearing, request.pocketed, request.constrained) = traits;
        let stop = stop.filter(|stop| *stop <= max);
        let fail = fail.filter(|fail| *fail < max && stop.is_none_or(|stop| *fail < stop));
        (request, Fate { stop: stop.filter(|_| fail.is_none()), fail })
    })
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        5 => request().prop_map(|(request, fate)| Event::Arrive(request, fate)),
        1 => any::<prop::sample::Index>().prop_map(Event::Cancel),
        1 => (0..2u8, 1..3u16).prop_map(|(class, slots)| Event::Grow(class, slots)),
        12 => Just(Event::Book),
        10 => Just(Event::Settle),
    ]
}

fn play(events: &[Event], share: u32) -> World {
    let mut world =
        World::new(planner::Limits { decode_share: share, ..small_limits() }, &[slab(0, 2), slab(1, 2)]);
    let mut arrived = 0;
    for event in events {
        match event {
            Event::Arrive(request, fate) => {
                arrived += 1;
                world.arrive(Request { id: RequestId(arrived), ..*request }, *fate);
            }
            Event::Cancel(which) if arrived > 0 => {
                world.cancel(RequestId(1 + which.index(arrived as usize) as u64))
            }
            Event::Cancel(_) => {}
            Event::Grow(class, slots) => world.state.grow(slab(*class, *slots)).expect("growth that works"),
            Event::Book => {
                world.book();
            }
            Event::Settle => {
                world.settle();
            }
        }
    }
    world
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// `World` checks every round, every page and every effect on the way.
    #[test]
    fn any_schedule_ends_with_every_request_over_and_every_page_free(
        events in prop::collection::vec(event(), 1..250),
        share in 1..4u32,
        ahead in 1..3usize,
    ) {
        let mut world = play(&events, share);
        world.drain(ahead);
        for (request, (asked, fate)) in &world.requests {
            let told = world.told.get(request).map_or(0, Vec::len) as u32;
            match world.ends[request] {
                Effect::Finished { reason: Reason::Cancelled, .. } => {}
                Effect::Refused { .. } => prop_assert!(told == 0),
                _ => prop_assert_eq!(told, fate.stop.or(fate.fail).unwrap_or(asked.max_tokens)),
            }
        }
    }

    #[test]
    fn the_same_history_gives_the_same_state(events in prop::collection::vec(event(), 1..120)) {
        let (one, two) = (play(&events, 2), play(&events, 2));
        prop_assert_eq!(one.state.to_string(), two.state.to_string());
        prop_assert_eq!(one.booked, two.booked);
    }

    #[test]
    fn requests_are_admitted_in_the_order_of_arrival(events in prop::collection::vec(event(), 1..250)) {
        let mut world = play(&events, 1);
        world.drain(2);
        prop_assert!(world.lanes.values().is_sorted(), "lanes went to {:?}", world.lanes);
        prop_assert!(world.admitted.is_sorted());
    }

    #[test]
    fn a_cancelled_lane_is_freed_when_the_rounds_in_flight_are_settled(
        events in prop::collection::vec(event(), 1..200),
    ) {
        let mut world = play(&events, 1);
        let live: Vec<_> = world.state.lanes().filter(|lane| !lane.ended()).map(|lane| lane.id()).collect();
        for lane in &live {
            world.cancel(world.lanes[lane]);
        }
        let named = |world: &World, lane| {
            world.booked.iter().any(|round| round.lanes.iter().any(|rows| rows.lane == lane))
        };
        loop {
            for lane in &live {
                prop_assert_eq!(world.freed.contains(lane), !named(&world, *lane), "{}", lane);
            }
            if !world.settle() {
                break;
            }
        }
        prop_assert_eq!(world.state.lanes().count(), 0);
    }
}
