//! Two engines in lockstep, each a rank with its share of the model: what they make is what one makes, and what one of them
//! fails at ends both in order.

use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{iter, thread};

use graph::{Arena, Planted};
use kernels::numerics::ElementType;
use planner::RequestId;
use runtime::engine::{Class, Engine, EngineOptions, Event, Vision, open, open_rank};
use runtime::error::Error;
use runtime::ranks::{Patience, Rank};
use runtime::receipts::{Life, Random, Schedule, Trail, play};
use runtime::request::Submission;
use tests::fixture::repository;

pub(crate) const PATIENCE: Patience =
    Patience { start: Duration::from_secs(60), answer: Duration::from_secs(30) };
pub(crate) const SILENCE: Duration = Duration::from_secs(10);

pub(crate) fn model() -> PathBuf {
    repository("tests/oracle/checkpoints/base_bf16")
}

/// Slabs of three lanes that grow, few pages, short pieces.
pub(crate) fn tight() -> EngineOptions {
    EngineOptions {
        element: ElementType::Bf16,
        classes: vec![Class { context: 512, lanes: 8, pages: 14 }],
        slab_lanes: 3,
        piece_rows: 64,
        decode_share: 2,
        depth: 1,
        trace: true,
        poison: true,
        ..EngineOptions::default()
    }
}

/// An engine that leads, and the thread of one that follows, which may have settings of its own.
pub(crate) fn two(leads: &EngineOptions, follows: &EngineOptions) -> (Engine, JoinHandle<Result<(), Error>>) {
    let [leader, follower] = Rank::pair(PATIENCE, SILENCE).expect("sockets");
    let options = follows.clone();
    let thread = thread::spawn(move || {
        let engine = open_rank(&model(), &options, follower, &mut |_| {})?.engine;
        engine.follow()
    });
    let engine =
        open_rank(&model(), leads, leader, &mut |_| {}).unwrap_or_else(|error| panic!("{error}")).engine;
    (engine, thread)
}

pub(crate) fn one(options: &EngineOptions) -> Engine {
    open(&model(), options, &mut |_| {}).unwrap_or_else(|error| panic!("{error}")).engine
}

/// Ends both in good order.
pub(crate) fn end(engine: Engine, follower: JoinHandle<Result<(), Error>>) {
    engine.spawn().1.stop().expect("a good end");
    follower.join().expect("no panic").expect("a good end");
}

/// What must be equal, whatever part of the state a rank holds.
pub(crate) fn seen(trail: &Trail) -> Vec<(Vec<u32>, String, Vec<(u32, Option<graph::Digest>)>)> {
    let life = |life: &Life| {
        let traces = life.traces.iter().map(|trace| (trace.length, trace.logits));
        (life.ids.clone(), life.end.clone(), traces.collect())
    };
    trail.lives.iter().map(life).collect()
}

#[test]
fn two_ranks_are_one_over_schedules() {
    let ((mut pair, follower), mut alone) = (two(&tight(), &tight()), one(&tight()));
    let mut random = Random::new(11);
    for _ in 0..20 {
        let schedule = Schedule::random(&mut random, 1009, 9, 180, 14);
        let (two, one) =
            (play(&mut pair, &schedule).expect("runs"), play(&mut alone, &schedule).expect("runs"));
        assert!(seen(&two) == seen(&one), "{}{schedule}", two.difference(&one));
        assert_eq!(two.rounds, one.rounds);
    }
    let stats = pair.stats();
    assert!(stats.rounds.replayed > 100, "{}", stats.rounds);
    assert!(stats.lanes == 0 && pair.slabs().len() > 1, "slabs grew on both ranks");
    end(pair, follower);
}

/// Rounds overlap, graphs are switched off and on, and requests without a seed draw the same on both ranks.
#[test]
fn overlapped_ranks_stay_in_step() {
    let options = EngineOptions { depth: 2, trace: false, audit: 7, ..tight() };
    let (mut pair, follower) = two(&options, &options);
    let mut random = Random::new(12);
    for case in 0..12 {
        let mut schedule = Schedule::random(&mut random, 1009, 9, 180, 14);
        schedule.requests.iter_mut().for_each(|planned| planned.sampling.seed = None);
        pair.set_graphs(case % 3 != 1);
        play(&mut pair, &schedule).expect("both ranks draw the same");
    }
    assert!(pair.stats().rounds.replayed > 50, "{}", pair.stats().rounds);
    end(pair, follower);
}

fn submission(ids: u32) -> Submission {
    let mut submission = Submission::new((0..ids).map(|id| id * 7 % 1000).collect());
    (submission.max_tokens, submission.ignore_eos) = (Some(40), true);
    submission
}

/// Turns until the engine fails, and says why; how long that took; what a request was told.
fn fails(mut engine: Engine) -> (String, Duration, Vec<Event>) {
    let (sender, events) = crossbeam_channel::unbounded();
    let started = Instant::now();
    engine.submit(RequestId(1), submission(70), sender);
    let why = iter::repeat_with(|| engine.turn()).take(1000).find_map(Result::err).expect("it fails");
    (why.to_string(), started.elapsed(), events.try_iter().collect())
}

fn ended_with_an_error(events: &[Event]) {
    assert!(matches!(events.last(), Some(Event::Failed(_))), "{events:?}");
}

/// A rank that plans another round stops both before that round runs: no id of it is told.
#[test]
fn ranks_that_disagree_stop_before_the_round() {
    // The follower alternates pieces and decode rounds in another way.
    let other = EngineOptions { piece_rows: 128, ..tight() };
    let (pair, follower) = two(&tight(), &other);
    let (why, took, events) = fails(pair);
    assert!(why.contains("do not agree on turn 1"), "{why}");
    assert!(took < Duration::from_secs(5), "{took:?}");
    ended_with_an_error(&events);
    assert_eq!(events.len(), 1, "nothing was told before: {events:?}");
    let error = follower.join().expect("no panic").expect_err("it fails too").to_string();
    assert!(error.contains("do not agree on turn 1"), "{error}");
}

/// A capture that fails on one rank alone makes its rounds eager on both, with the same ids.
#[test]
fn a_capture_that_fails_on_one_rank_is_eager_on_both() {
    let failing = EngineOptions { planted: Some(Planted::Capture(5)), ..tight() };
    let mut alone = one(&tight());
    for (leads, follows) in [(&tight(), &failing), (&failing, &tight())] {
        let (mut pair, follower) = two(leads, follows);
        let (mut random, mut eager) = (Random::new(13), 0);
        for _ in 0..4 {
            let schedule = Schedule::random(&mut random, 1009, 5, 90, 10);
            let (two, one) =
                (play(&mut pair, &schedule).expect("runs"), play(&mut alone, &schedule).expect("runs"));
            assert!(seen(&two) == seen(&one), "{}{schedule}", two.difference(&one));
            assert_eq!((two.rounds.replayed, two.rounds.captured), (0, 0), "{}", two.rounds);
            eager += two.rounds.eager.get("capture failed").copied().unwrap_or_default();
        }
        assert!(eager > 0 && pair.stats().graphs == 0, "{eager} rounds were eager");
        end(pair, follower);
    }
}

/// Takes all memory of an engine's device.
pub(crate) fn hog(engine: &Engine) -> Arena {
    let device = &engine.runner().device;
    device.arena("what others have", device.free_bytes()).expect("it is free")
}

/// A rank without memory for more lanes keeps both at those there are: requests wait, and the answers are the same.
#[test]
fn memory_that_one_rank_lacks_is_a_vote() {
    let options = EngineOptions { host_memory: 64 << 20, vision: Vision::Off, ..tight() };
    let few = EngineOptions { classes: vec![Class { context: 512, lanes: 3, pages: 14 }], ..tight() };
    let mut alone = one(&few);
    for leader_lacks in [false, true] {
        let [leader, follower] = Rank::pair(PATIENCE, SILENCE).expect("sockets");
        let theirs = options.clone();
        let follower = thread::spawn(move || {
            let engine = open_rank(&model(), &theirs, follower, &mut |_| {})?.engine;
            let _taken = (!leader_lacks).then(|| hog(&engine));
            engine.follow()
        });
        let mut pair = open_rank(&model(), &options, leader, &mut |_| {}).expect("it opens").engine;
        let _taken = leader_lacks.then(|| hog(&pair));
        let mut random = Random::new(14);
        for _ in 0..4 {
            let mut schedule = Schedule::random(&mut random, 1009, 9, 90, 10);
            schedule.requests.iter_mut().for_each(|planned| planned.cancel = None);
            let (two, one) =
                (play(&mut pair, &schedule).expect("runs"), play(&mut alone, &schedule).expect("runs"));
            assert!(seen(&two) == seen(&one), "{}{schedule}", two.difference(&one));
        }
        assert_eq!((pair.slabs().len(), pair.stats().slabs_refused), (1, 1));
        end(pair, follower);
    }
}

/// A device that fails on one rank ends both at once, and every request with an error.
#[test]
fn a_rank_that_fails_ends_both() {
    let failing = EngineOptions { planted: Some(Planted::Launch(2000)), ..tight() };
    for (leads, follows) in [(&tight(), &failing), (&failing, &tight())] {
        let (pair, follower) = two(leads, follows);
        let (why, took, events) = fails(pair);
        assert!(took < Duration::from_secs(10), "{took:?}");
        assert!(why.contains("planted") || why.contains("rank"), "{why}");
        ended_with_an_error(&events);
        assert!(follower.join().expect("no panic").is_err());
    }
}

/// A follower that is gone ends the leader, also one that has nothing to do.
#[test]
fn a_follower_that_is_gone_ends_the_leader() {
    let [leader, follower] = Rank::pair(PATIENCE, SILENCE).expect("sockets");
    let (go, gone) = std::sync::mpsc::channel::<()>();
    let thread = thread::spawn(move || {
        let engine = open_rank(&model(), &tight(), follower, &mut |_| {}).expect("it opens").engine;
        gone.recv().expect("the word to go");
        drop(engine);
    });
    let engine = open_rank(&model(), &tight(), leader, &mut |_| {}).expect("it opens").engine;
    let (handle, engine) = engine.spawn();
    go.send(()).expect("it listens");
    thread.join().expect("no panic");
    let started = Instant::now();
    let error = engine.wait().expect_err("it ends").to_string();
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    assert!(error.contains("rank 1"), "{error}");
    assert!(handle.submit(submission(3)).is_err(), "it takes nothing more");
}
