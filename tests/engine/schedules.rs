//! Random schedules: arrivals, lengths, cancellations, options, page pressure, slab growth, mixed classes.

use planner::ClassId;
use runtime::engine::{Engine, EngineOptions};
use runtime::receipts::{Planned, Random, Schedule, play};
use tests::churn::churn;

use crate::{small, tight};

const VOCAB: u32 = 1009;

fn schedule(random: &mut Random) -> Schedule {
    let mut schedule = Schedule::random(random, VOCAB, 9, 180, 14);
    for planned in &mut schedule.requests {
        planned.class = ClassId(u8::from(random.below(3) == 0));
    }
    schedule
}

/// Plays random schedules on two engines and compares everything that was seen.
fn compare(
    a: EngineOptions,
    b: EngineOptions,
    seed: u64,
    cases: usize,
    same: impl Fn(&mut Engine, &mut Engine, &Schedule),
) {
    let (mut a, mut b) = (small(a), small(b));
    let mut random = Random::new(seed);
    for _ in 0..cases {
        let schedule = schedule(&mut random);
        same(&mut a, &mut b, &schedule);
        for engine in [&a, &b] {
            let stats = engine.stats();
            assert_eq!(stats.pages_free, stats.pages_total, "the pools end full: {}", engine.state());
            assert_eq!((stats.lanes, stats.waiting), (0, 0));
        }
    }
    // Graphs were replayed, or nothing was compared.
    assert!(a.stats().rounds.replayed > 0, "{}", a.stats().rounds);
}

#[test]
fn graph_is_eager() {
    let eager = EngineOptions { graphs: false, ..tight() };
    compare(tight(), eager, 1, 25, |graph, eager, schedule| {
        let (a, b) = (play(graph, schedule).expect("runs"), play(eager, schedule).expect("runs"));
        assert!(a.lives == b.lives, "{}{schedule}", a.difference(&b));
        assert_eq!(b.rounds.replayed + b.rounds.captured, 0);
    });
}

#[test]
fn run_is_run() {
    compare(tight(), tight(), 2, 15, |a, b, schedule| {
        let (a, b) = (play(a, schedule).expect("runs"), play(b, schedule).expect("runs"));
        assert!(a.lives == b.lives, "{}{schedule}", a.difference(&b));
    });
}

#[test]
fn crowded_is_alone() {
    compare(tight(), tight(), 3, 10, |crowded, alone, schedule| {
        let mut crowd = play(crowded, schedule).expect("runs");
        for (index, planned) in schedule.requests.iter().enumerate() {
            let single = Schedule { requests: vec![Planned { arrive: 0, cancel: None, ..planned.clone() }] };
            let mut trail = play(alone, &single).expect("runs");
            if planned.cancel.is_some() {
                crowd.lives[index].keep_common(&mut trail.lives[0]);
            }
            assert!(crowd.lives[index] == trail.lives[0], "request R{index} of\n{schedule}");
        }
    });
}

/// Overlapping the next round with the reading of this one changes no id.
#[test]
fn overlapped_is_one_by_one() {
    let overlapped = EngineOptions { depth: 2, trace: false, ..tight() };
    compare(overlapped, tight(), 4, 25, |overlapped, single, schedule| {
        // Cancels fall at other moments when rounds overlap.
        let requests = schedule.requests.iter().map(|planned| Planned { cancel: None, ..planned.clone() });
        let schedule = Schedule { requests: requests.collect() };
        let (a, b) = (play(overlapped, &schedule).expect("runs"), play(single, &schedule).expect("runs"));
        for (a, b) in a.lives.iter().zip(&b.lives) {
            assert_eq!((&a.ids, &a.end), (&b.ids, &b.end), "{schedule}");
        }
    });
}

/// Equal keys have equal emission digests, whatever rounds they come from: over several slabs, two cache
/// classes and all orders of arrival.
#[test]
fn equal_keys_imply_equal_emissions() {
    let mut engine = small(EngineOptions { audit: 2, ..tight() });
    let mut random = Random::new(5);
    for _ in 0..15 {
        play(&mut engine, &schedule(&mut random)).expect("runs");
    }
    let stats = engine.stats();
    assert!(stats.rounds.eager["audit"] > 100, "{}", stats.rounds);
    // Beyond the ladder of the first slab, graphs over several slabs were captured and compared too.
    assert!(stats.bank.captured > 6, "{:?}", stats.bank);
    assert_eq!((stats.audits_failed, stats.bank.audits_failed), (0, 0));
}

/// Lanes join and leave all the time, on one slab: after the ladder nothing is captured, and memory is flat.
#[test]
fn churn_captures_nothing_after_the_ladder() {
    let mut engine = small(EngineOptions {
        classes: vec![runtime::engine::Class { context: 256, lanes: 16, pages: 64 }],
        slab_lanes: 16,
        depth: 2,
        trace: false,
        ..tight()
    });
    let ladder = engine.stats();
    assert_eq!((ladder.bank.captured, ladder.graphs), (16, 16));
    let used = engine.runner().device.used_bytes();
    let widths = churn(&mut engine, 10_000, VOCAB);
    let stats = engine.stats();
    assert_eq!((stats.bank.captured, stats.rounds.captured, stats.bank.first_sight), (16, 0, 0));
    assert!(stats.rounds.replayed > 5_000, "{}", stats.rounds);
    assert!(widths[1..].iter().all(|rounds| *rounds > 0), "rounds by lanes: {widths:?}");
    assert_eq!(engine.runner().device.used_bytes(), used);
}

/// A failing schedule shrinks to the one request that fails, and prints as a scene that the planner can play.
#[test]
fn a_failing_schedule_shrinks_to_its_core() {
    let mut random = Random::new(8);
    let schedules = std::iter::repeat_with(|| schedule(&mut random));
    let fails = |schedule: &Schedule| schedule.requests.iter().any(|planned| planned.prompt.len() > 40);
    let failing = schedules.take(50).find(|schedule| schedule.requests.len() > 3 && fails(schedule));
    let smallest = failing.expect("one of fifty").shrink(fails);
    let [only] = &smallest.requests[..] else { panic!("one request is enough:\n{smallest}") };
    assert!((41..=81).contains(&only.prompt.len()) && only.max_tokens == 1 && only.cancel.is_none());
    let played = planner::scene::run(&smallest.to_string()).expect("a scene");
    assert!(played.contains("prompt"), "{played}");
}
