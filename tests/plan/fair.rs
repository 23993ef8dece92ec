//! Turns: nobody is passed over, and the order of arrival does not reach the round key.

use crate::device::{Fate, World, slab, small_limits};
use planner::{ClassId, Group, Kind, LaneId, Limits, Request, RequestId, Verdict};
use proptest::prelude::*;
use std::collections::BTreeMap;

fn roomy() -> Limits {
    Limits { context: 4000, pages: vec![4000, 4000], ..small_limits() }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn every_lane_decodes_within_one_turn_of_all_the_others(
        eager in prop::collection::vec(any::<bool>(), 2..30),
        rows in 1..9u32,
        ahead in 1..3usize,
    ) {
        let slots = eager.len() as u16;
        let mut world = World::new(Limits { round_rows: rows, ..roomy() }, &[slab(0, slots)]);
        for (at, pocketed) in eager.iter().enumerate() {
            let request = Request { pocketed: *pocketed, ..Request::text(RequestId(at as u64), 5, 1000) };
            world.arrive(request, Fate::default());
        }
        let pocketed = eager.iter().filter(|pocketed| **pocketed).count() as u32;
        let turn = (pocketed.div_ceil(rows) + (slots as u32 - pocketed).div_ceil(rows)) as u64;
        let mut served: BTreeMap<LaneId, u64> = BTreeMap::new();
        let mut decodes = 0;
        while decodes < 40 + 2 * turn {
            while world.booked.len() >= ahead {
                world.settle();
            }
            let round = world.book().expect("lanes have tokens to go").clone();
            if round.kind == Kind::Decode && world.state.lanes().count() == slots as usize {
                decodes += 1;
                served.extend(round.lanes.iter().map(|rows| (rows.lane, decodes)));
                for lane in world.state.lanes() {
                    let last = served.get(&lane.id()).copied().unwrap_or(0);
                    prop_assert!(decodes - last < turn + 1, "{} last decoded {} rounds ago", lane.id(), decodes - last);
                }
            }
        }
    }

    /// While pictures decode, text lanes decode in graph rounds of their own, all of them together, every second round.
    #[test]
    fn text_lanes_stay_in_graphs_beside_pictures(
        pictures in prop::collection::vec(any::<bool>(), 2..12),
        ahead in 1..3usize,
    ) {
        let limits = Limits { round_rows: 64, audit: 0, ..roomy() };
        let mut world = World::new(limits, &[slab(0, pictures.len() as u16)]);
        for (at, image_bearing) in pictures.iter().enumerate() {
            let text = Request::text(RequestId(at as u64), 5, 40);
            world.arrive(Request { image_bearing: *image_bearing, ..text }, Fate::default());
        }
        let mut rounds = Vec::new();
        loop {
            let booked = world.book().map(|round| (round.kind, round.verdict, round.lanes.len()));
            match booked {
                Some((Kind::Decode, verdict, lanes)) => rounds.push((verdict, lanes)),
                Some(_) => {}
                None if world.settle() => {}
                None => break,
            }
            while world.booked.len() >= ahead {
                world.settle();
            }
        }
        let graph = |(verdict, _): &(Verdict, usize)| *verdict == Verdict::Graph;
        let texts = pictures.iter().filter(|picture| !**picture).count();
        let full = rounds.iter().position(|round| graph(round) && round.1 == texts);
        prop_assert_eq!(full.is_some(), texts > 0, "{:?}", rounds);
        // No two rounds of pictures follow each other while text has ids to make.
        let last = rounds.iter().rposition(graph).unwrap_or(0);
        for pair in rounds[full.unwrap_or(last)..=last.min(rounds.len() - 1)].windows(2) {
            prop_assert!(pair.iter().any(graph), "{rounds:?}");
        }
    }

    #[test]
    fn the_order_of_arrival_does_not_change_the_groups(
        order in Just([0u8, 0, 0, 0, 1, 1, 1, 0, 1, 0].to_vec()).prop_shuffle(),
    ) {
        let steady = |classes: &[u8]| {
            let slabs = [slab(0, 2), slab(1, 3), slab(0, 9), slab(1, 9)];
            let mut world = World::new(Limits { round_rows: 64, audit: 0, ..roomy() }, &slabs);
            for (at, class) in classes.iter().enumerate() {
                let text = Request::text(RequestId(at as u64), 5 + 40 * at as u32, 900);
                world.arrive(Request { class: ClassId(*class), ..text }, Fate::default());
            }
            loop {
                let round = world.book().expect("lanes have tokens to go").clone();
                if round.lanes.len() == classes.len() {
                    return round.groups.to_vec();
                }
                world.settle();
            }
        };
        let expected = [(0, 2), (1, 3), (2, 4), (3, 1)].map(|(slab, rows)| Group { slab, rows });
        prop_assert_eq!(steady(&order), expected.to_vec());
    }
}

/// A head that needs nearly the whole pool is admitted although small requests keep coming.
#[test]
fn a_large_request_is_not_starved_by_small_ones() {
    let mut world = World::new(small_limits(), &[slab(0, 4)]);
    let mut arrived = 0;
    let mut arrive = |world: &mut World, prompt, max| {
        arrived += 1;
        world.arrive(Request::text(RequestId(arrived), prompt, max), Fate::default());
    };
    for _ in 0..3 {
        arrive(&mut world, 100, 20);
    }
    world.book();
    world.settle();
    arrive(&mut world, 400, 100);
    let large = RequestId(4);
    for round in 0.. {
        arrive(&mut world, 10, 5);
        world.book();
        world.settle();
        if world.admitted.contains(&large) {
            break;
        }
        assert!(round < 100, "the large request waits since {round} rounds:\n{}", world.state);
    }
    assert_eq!(world.admitted.len(), 4, "nobody overtook it");
    world.drain(2);
}
