//! The bank: what it replays, captures and runs eagerly, and what it gives up.

use graph::bank::NOTED;
use graph::{Bank, BankCounts, Buffers, Digest, Emission, Error, How, Key, Recording, Result};

use crate::rig::{Fail, Note, NoteArgs, Rig, device, fault, launch, zeros};

/// There is one rank: what succeeded here did everywhere.
fn alone(here: bool) -> Result<bool> {
    Ok(here)
}

/// A key of so many rows.
fn key(rows: u32) -> Key {
    let buffers = [Buffers { digest: Digest(7), rows }];
    Key {
        kind: "decode",
        buffers: buffers.into_iter().collect(),
        layout: 1,
        scratch: 2,
        weights: 3,
        communicator: 0,
        split: 0,
    }
}

/// A bank on a rig. The body of `rows` rows notes that number.
struct Counter {
    rig: Rig,
    bank: Bank,
    budget: usize,
}

impl Counter {
    /// A bank with room for so many of these graphs.
    fn new(graphs: usize) -> Counter {
        let rig = Rig::new();
        let budget = graphs * rig.log.emission(0).bytes();
        Counter { bank: Bank::new(budget), rig, budget }
    }

    fn run(&mut self, rows: u32) -> How {
        let Counter { rig, bank, .. } = self;
        let body = || Ok(rig.log.emission(rows));
        bank.run(&rig.stream, &key(rows), std::slice::from_ref(&rig.log.0), body, alone).expect("runs")
    }

    fn capture(&mut self, rows: u32) -> bool {
        let Counter { rig, bank, .. } = self;
        let body = || Ok(rig.log.emission(rows));
        bank.prepare(&rig.stream, &key(rows), std::slice::from_ref(&rig.log.0), body, alone)
            .expect("a sound body")
    }

    /// The rows of every round that ran.
    fn seen(&self) -> Vec<u32> {
        self.rig.stream.synchronize().expect("all of it runs");
        self.rig.log.seen()
    }

    /// The keys that have a graph.
    fn held(&self) -> Vec<u32> {
        let held: Vec<u32> = (0..100).filter(|&rows| self.bank.get(&key(rows)).is_some()).collect();
        assert_eq!(held.len(), self.bank.len());
        assert_eq!(held.is_empty(), self.bank.is_empty());
        let counts = self.bank.counts();
        assert_eq!(counts.captured - counts.evicted, held.len() as u64);
        let bytes: usize = held.iter().filter_map(|&rows| self.bank.get(&key(rows))).map(|e| e.bytes()).sum();
        assert_eq!(bytes, self.bank.bytes());
        held
    }
}

fn not_asked() -> Result<Emission> {
    panic!("a known key needs no body")
}

#[test]
fn a_key_is_eager_then_captured_then_replayed() {
    let mut counter = Counter::new(8);
    let how: Vec<How> = [3, 3, 4, 3, 4, 4, 3].into_iter().map(|rows| counter.run(rows)).collect();
    use How::{Captured, FirstSight, Replayed};
    assert_eq!(how, [FirstSight, Captured, FirstSight, Replayed, Captured, Replayed, Replayed]);
    assert_eq!(counter.seen(), [3, 3, 4, 3, 4, 4, 3], "each round ran once, in order");
    let counts = BankCounts { replayed: 3, captured: 2, first_sight: 2, ..BankCounts::default() };
    assert_eq!(counter.bank.counts(), counts);
    assert_eq!(counter.held(), [3, 4]);
    assert_eq!(counter.bank.run(&counter.rig.stream, &key(3), &[], not_asked, alone), Ok(Replayed));
}

#[test]
fn a_ladder_is_captured_ahead_and_nothing_of_it_runs() {
    let mut counter = Counter::new(8);
    assert!((1..=4).rev().all(|rows| counter.capture(rows)));
    assert_eq!(counter.seen(), []);
    assert_eq!(counter.held(), [1, 2, 3, 4]);
    assert_eq!([2, 4].map(|rows| counter.run(rows)), [How::Replayed; 2]);
    assert_eq!(counter.seen(), [2, 4]);
    assert!(counter.capture(2), "again");
    assert_eq!(counter.held(), [1, 2, 3, 4], "a graph takes the place of the one before it");
    let counts = BankCounts { replayed: 2, captured: 5, evicted: 1, ..BankCounts::default() };
    assert_eq!(counter.bank.counts(), counts);
}

#[test]
fn graphs_hold_what_they_point_into() {
    let Counter { rig, mut bank, .. } = Counter::new(8);
    let used = rig.device.used_bytes();
    let data = zeros(&rig.device, "data", 16);
    let body = || Ok(rig.log.emission_of(data.base()));
    bank.prepare(&rig.stream, &key(1), &[data.clone(), rig.log.0.clone()], body, alone).expect("captured");
    drop(data);
    assert_eq!(bank.run(&rig.stream, &key(1), &[], not_asked, alone), Ok(How::Replayed));
    rig.stream.synchronize().expect("the arena is there");
    assert_eq!(rig.device.used_bytes(), used + 64);
    bank.clear();
    assert_eq!(rig.device.used_bytes(), used);
}

#[test]
fn what_was_not_replayed_in_this_generation_goes_first() {
    let mut counter = Counter::new(3);
    assert!((1..=3).all(|rows| counter.capture(rows)));
    assert_eq!(counter.run(2), How::Replayed);
    assert!(counter.capture(4));
    assert_eq!(counter.held(), [2, 4]);
    assert!(counter.capture(5));
    assert_eq!(counter.held(), [2, 4, 5], "there was room");
    assert!(counter.capture(6));
    assert_eq!(counter.held(), [6], "2 was replayed in the generation before");
    // Captured in a round, and never asked for again: the replay that follows a capture does not count.
    assert_eq!([7, 7, 6].map(|rows| counter.run(rows)), [How::FirstSight, How::Captured, How::Replayed]);
    assert!((8..=9).all(|rows| counter.capture(rows)));
    assert_eq!(counter.held(), [6, 9], "8 still fitted");
}

#[test]
fn when_all_were_replayed_all_go() {
    let mut counter = Counter::new(3);
    assert!((1..=3).all(|rows| counter.capture(rows)));
    (1..=3).for_each(|rows| assert_eq!(counter.run(rows), How::Replayed));
    assert!(counter.capture(4));
    assert_eq!(counter.held(), [4]);
    assert_eq!(counter.seen(), [1, 2, 3], "queued replays hold their graphs");
}

#[test]
fn the_budget_holds_after_every_capture() {
    let mut counter = Counter::new(3);
    let mut draw = 1u64;
    let mut rounds = Vec::new();
    for _ in 0..600 {
        draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let rows = 1 + (draw >> 33) as u32 % 6;
        counter.run(rows);
        rounds.push(rows);
        assert!(counter.bank.bytes() <= counter.budget);
        counter.held();
    }
    assert_eq!(counter.seen(), rounds, "eager, captured or replayed, each round ran once");
    let counts = counter.bank.counts();
    assert!(counts.evicted > 10 && counts.replayed > 50, "{counts:?}");
    assert_eq!(counts.first_sight + counts.captured + counts.replayed, 600);
}

#[test]
fn a_graph_larger_than_the_budget_is_a_failed_capture_and_evicts_nothing() {
    let mut counter = Counter::new(1);
    assert!(counter.capture(1));
    let large = |counter: &mut Counter| {
        let Counter { rig, bank, .. } = counter;
        let body = || {
            let mut emission = rig.log.emission(2);
            emission.append(&rig.log.emission(3));
            Ok(emission)
        };
        bank.run(&rig.stream, &key(9), std::slice::from_ref(&rig.log.0), body, alone).expect("runs")
    };
    let how = [(); 4].map(|()| large(&mut counter));
    assert_eq!(how, [How::FirstSight, How::CaptureFailed, How::CaptureFailed, How::CaptureFailed]);
    assert_eq!(counter.held(), [1]);
    assert_eq!(counter.seen(), [2, 3].repeat(4));
    let counts = counter.bank.counts();
    assert_eq!((counts.capture_failed, counts.without_graph, counts.captured), (1, 3, 1));
}

#[test]
fn a_budget_of_nothing_is_a_bank_that_never_captures() {
    let mut counter = Counter::new(0);
    assert!(!counter.capture(1));
    assert_eq!([1, 1, 2, 2].map(|rows| counter.run(rows))[3], How::CaptureFailed);
    assert_eq!(counter.seen(), [1, 1, 2, 2]);
    assert_eq!(counter.held(), []);
}

/// The device refuses the capture, because another stream is being captured.
#[test]
fn a_capture_that_fails_runs_eagerly_and_is_not_tried_again_in_this_generation() {
    let mut counter = Counter::new(8);
    let other = counter.rig.device.stream();
    assert_eq!(counter.run(1), How::FirstSight);
    let recording = Recording::begin(&other, "another").expect("nothing else is captured");
    assert_eq!(counter.run(1), How::CaptureFailed);
    assert!(!counter.capture(2), "ahead of a round too");
    assert!(recording.finish(vec![]).is_err(), "a capture inside a capture breaks it");
    assert_eq!([1, 2, 1].map(|rows| counter.run(rows)), [How::CaptureFailed; 3]);
    assert_eq!(counter.seen(), [1, 1, 1, 2, 1], "nothing was lost, and nothing ran twice");
    let counts = BankCounts { first_sight: 1, capture_failed: 2, without_graph: 4, ..BankCounts::default() };
    assert_eq!(counter.bank.counts(), counts);

    counter.bank.clear();
    let how = [1, 1, 1].map(|rows| counter.run(rows));
    assert_eq!(how, [How::FirstSight, How::Captured, How::Replayed], "a new generation tries again");
    assert!(counter.capture(2));
    assert_eq!(counter.held(), [1, 2]);
}

#[test]
fn an_audit_that_finds_a_difference_drops_everything() {
    let mut counter = Counter::new(8);
    assert!((1..=3).all(|rows| counter.capture(rows)));
    let right = counter.rig.log.emission(2).digest();
    assert_eq!(counter.bank.audit(&key(2), right, alone), Ok(true));
    assert_eq!(counter.bank.audit(&key(9), right, alone), Ok(true), "there is nothing to differ");
    assert_eq!((counter.held(), counter.bank.counts().audits_failed), (vec![1, 2, 3], 0));
    assert_eq!(counter.bank.audit(&key(3), right, alone), Ok(false));
    assert_eq!(counter.held(), []);
    let counts = BankCounts { captured: 3, evicted: 3, audits_failed: 1, ..BankCounts::default() };
    assert_eq!(counter.bank.counts(), counts);
    assert_eq!([3, 3, 3].map(|rows| counter.run(rows))[1..], [How::Captured, How::Replayed]);
}

#[test]
fn clear_gives_up_graphs_and_keeps_counts() {
    let mut counter = Counter::new(8);
    let how = [1, 1, 1, 2].map(|rows| counter.run(rows));
    assert_eq!(how[1..3], [How::Captured, How::Replayed]);
    counter.bank.clear();
    assert_eq!((counter.held(), counter.bank.bytes()), (vec![], 0));
    let counts = BankCounts { replayed: 1, captured: 1, evicted: 1, first_sight: 2, ..BankCounts::default() };
    assert_eq!(counter.bank.counts(), counts);
    assert_eq!([2, 2].map(|rows| counter.run(rows)), [How::FirstSight, How::Captured]);
}

#[test]
fn so_many_first_sights_are_remembered_and_no_more() {
    let mut counter = Counter::new(2);
    let many = NOTED as u32;
    let mut run = |rows| {
        counter.rig.stream.synchronize().expect("all of it runs");
        counter.rig.log.clear();
        counter.run(rows)
    };
    assert!((0..many).all(|rows| run(rows) == How::FirstSight));
    assert_eq!(run(0), How::Captured, "a full memory knows what it holds");
    assert_eq!(run(many), How::FirstSight, "there was room for one more");
    assert_eq!(run(many + 1), How::FirstSight, "with this one the others are forgotten");
    assert_eq!([5, many + 1].map(run), [How::FirstSight, How::Captured]);
}

#[test]
fn so_many_failed_captures_are_remembered_and_no_more() {
    let mut counter = Counter::new(0);
    let many = NOTED as u32;
    assert!((0..=many).all(|rows| !counter.capture(rows)));
    assert_eq!(counter.run(many), How::CaptureFailed);
    assert_eq!(counter.run(0), How::FirstSight);
}

#[test]
fn other_errors_are_told_and_change_nothing() {
    let Counter { rig, mut bank, .. } = Counter::new(8);
    let refused = || Err(Error::Launch { kernel: "note", why: "rows 0".into() });
    for _ in 0..3 {
        assert_eq!(
            bank.run(&rig.stream, &key(1), &[], refused, alone),
            refused().map(|_: Emission| How::Replayed)
        );
    }
    assert!(bank.prepare(&rig.stream, &key(1), &[], refused, alone).is_err());
    assert_eq!(bank.counts(), BankCounts::default());

    // Arenas of another device, at a first sight and at a capture.
    let foreign = zeros(&device(1 << 16), "foreign", 4);
    let body = || Ok(rig.log.emission(1));
    let other = Err(Error::OtherDevice { call: "running work" });
    assert_eq!(bank.run(&rig.stream, &key(1), std::slice::from_ref(&foreign), body, alone), other);
    bank.run(&rig.stream, &key(1), &[], body, alone).expect("a first sight");
    assert_eq!(bank.run(&rig.stream, &key(1), std::slice::from_ref(&foreign), body, alone), other);
    assert_eq!(
        bank.run(&rig.stream, &key(1), &[], body, alone),
        Ok(How::Captured),
        "the stream is as it was"
    );
    let counts = BankCounts { first_sight: 1, captured: 1, ..BankCounts::default() };
    assert_eq!(bank.counts(), counts);
}

#[test]
fn a_device_that_failed_is_no_failed_capture() {
    let mut counter = Counter::new(8);
    assert!(counter.capture(1));
    counter.run(2);
    let Counter { rig, bank, .. } = &mut counter;
    rig.stream.run(launch::<Fail>(&0), &[]).expect("queued");
    let found = Error::Fault(fault(rig.stream.synchronize()));
    let before = bank.counts();
    for rows in [1, 2, 3] {
        let body = || Ok(launch::<Note>(&NoteArgs { value: rows, ..bytemuck::Zeroable::zeroed() }));
        assert_eq!(bank.run(&rig.stream, &key(rows), &[], body, alone), Err(found.clone()), "{rows} rows");
    }
    assert_eq!(bank.counts(), before);
}
