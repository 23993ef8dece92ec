//! Keys that say too little, in a running engine: the audit tells.

use graph::{Digest, Key};
use planner::ClassId;
use runtime::engine::{EngineOptions, Stats};
use runtime::receipts::{Random, Schedule, play};

use crate::{VOCAB, engine, options};

fn schedule(random: &mut Random) -> Schedule {
    let mut schedule = Schedule::random(random, VOCAB, 14, 90, 16);
    for planned in &mut schedule.requests {
        // A crowd: lanes of several slabs share rounds.
        planned.arrive /= 4;
        planned.class = ClassId(u8::from(random.below(3) == 0));
    }
    schedule
}

/// Plays random schedules on an engine.
fn stats(options: EngineOptions) -> Stats {
    let mut engine = engine(options);
    let mut random = Random::new(5);
    for _ in 0..10 {
        play(&mut engine, &schedule(&mut random)).expect("an audited round runs eagerly");
    }
    engine.stats()
}

/// Every round is audited, so that none is replayed: what was captured are the ladders of the two classes.
#[test]
fn an_audit_reports_keys_that_say_too_little() {
    let every = EngineOptions { audit: 1, ..options() };
    let faults: [(&str, fn(&mut Key)); 4] = [
        ("digests", |key| key.buffers.iter_mut().for_each(|buffers| buffers.digest = Digest::default())),
        ("row counts", |key| key.buffers.iter_mut().for_each(|buffers| buffers.rows = 0)),
        ("all slabs but the first", |key| {
            key.buffers[0].rows = key.rows();
            key.buffers.truncate(1);
        }),
        ("all", |key| key.buffers.clear()),
    ];
    for (missing, fault) in faults {
        let stats = stats(EngineOptions { key_fault: Some(fault), ..every.clone() });
        assert!(stats.audits_failed > 0, "keys without {missing}");
        assert_eq!(stats.audits_failed, stats.bank.audits_failed);
        assert_eq!(stats.graphs, 0, "what was captured is given up");
    }
    let stats = stats(every);
    assert_eq!((stats.audits_failed, stats.bank.audits_failed, stats.graphs), (0, 0, 6));
    assert!(stats.rounds.eager["audit"] > 100, "{}", stats.rounds);
}

/// Every third round is audited, so that graphs over several slabs are captured, replayed and compared.
#[test]
fn audits_between_replays_find_nothing_in_sound_keys() {
    let stats = stats(EngineOptions { audit: 3, ..options() });
    assert_eq!((stats.audits_failed, stats.bank.audits_failed), (0, 0));
    assert!(stats.graphs > 6 && stats.rounds.replayed > 50, "{} graphs; {}", stats.graphs, stats.rounds);
    assert!(stats.rounds.eager["audit"] > 30, "{}", stats.rounds);
}

/// A bank too small for the ladder, or for anything: rounds are eager, and right.
#[test]
fn a_budget_that_holds_nothing_changes_no_id() {
    let play_once = |graph_bytes| {
        let mut engine = engine(EngineOptions { graph_bytes, trace: true, ..options() });
        let trail = play(&mut engine, &schedule(&mut Random::new(8))).expect("runs");
        (trail, engine.stats())
    };
    let (plenty, stats) = play_once(EngineOptions::default().graph_bytes);
    assert_eq!(stats.bank.capture_failed, 0);
    assert!(stats.rounds.replayed > 0);
    let one = stats.graph_bytes / stats.graphs;
    for budget in [0, 2 * one] {
        let (trail, stats) = play_once(budget);
        assert!(trail.lives == plenty.lives, "{}", trail.difference(&plenty));
        assert!(stats.graph_bytes <= budget);
        assert_eq!(stats.graphs == 0, budget == 0);
        assert_eq!(stats.bank.without_graph > 0, budget == 0, "{}", stats.rounds);
    }
}
