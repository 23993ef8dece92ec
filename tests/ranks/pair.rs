//! Engines for the tests of two ranks: a pair of threads, one rank alone, and what they have in common.

use std::path::PathBuf;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam_channel::unbounded;
use planner::RequestId;
use runtime::engine::{Class, Engine, EngineOptions, Event, RoundCounts, Vision, open, open_rank};
use runtime::error::Error;
use runtime::ranks::{Patience, Rank};
use runtime::receipts::{Life, Schedule, Trail, play};
use runtime::request::Submission;
use tests::engine::traced;
use tests::fixture::repository;
use tests::sight::case;
use tests::tower::media;

pub(crate) const PATIENCE: Patience =
    Patience { start: Duration::from_secs(60), answer: Duration::from_secs(30) };
pub(crate) const SILENCE: Duration = Duration::from_secs(10);

pub(crate) fn model() -> PathBuf {
    repository("tests/oracle/checkpoints/base_bf16")
}

/// Slabs of three lanes that grow, few pages, short pieces.
pub(crate) fn tight() -> EngineOptions {
    EngineOptions { classes: vec![Class { context: 512, lanes: 8, pages: 14 }], ..traced() }
}

/// Lanes that see.
pub(crate) fn sighted() -> EngineOptions {
    let classes = vec![Class { context: 512, lanes: 8, pages: 24 }];
    EngineOptions { classes, vision: Vision::Patches(256), ..tight() }
}

/// An engine that leads, and the thread of one that follows, which may have settings of its own.
pub(crate) fn two(leads: &EngineOptions, follows: &EngineOptions) -> (Engine, JoinHandle<Result<(), Error>>) {
    two_of_which(leads, follows, Engine::follow)
}

/// As [`two`], where the other one does this instead of following.
pub(crate) fn two_of_which(
    leads: &EngineOptions,
    follows: &EngineOptions,
    does: impl FnOnce(Engine) -> Result<(), Error> + Send + 'static,
) -> (Engine, JoinHandle<Result<(), Error>>) {
    let [leader, follower] = Rank::pair(PATIENCE, SILENCE).expect("sockets");
    let options = follows.clone();
    let thread = thread::spawn(move || does(open_rank(&model(), &options, follower, &mut |_| {})?.engine));
    (opened(leads, leader), thread)
}

/// An engine that is one of two ranks.
pub(crate) fn opened(options: &EngineOptions, rank: Rank) -> Engine {
    open_rank(&model(), options, rank, &mut |_| {}).unwrap_or_else(|error| panic!("{error}")).engine
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
fn seen(trail: &Trail) -> Vec<(Vec<u32>, String, Vec<(u32, Option<graph::Digest>)>)> {
    let life = |life: &Life| {
        let traces = life.traces.iter().map(|trace| (trace.length, trace.logits));
        (life.ids.clone(), life.end.clone(), traces.collect())
    };
    trail.lives.iter().map(life).collect()
}

/// Plays a schedule on a pair and on one rank, which must see the same; how each executed its rounds.
pub(crate) fn same(pair: &mut Engine, alone: &mut Engine, schedule: &Schedule) -> [RoundCounts; 2] {
    let (two, one) = (play(pair, schedule).expect("runs"), play(alone, schedule).expect("runs"));
    assert!(seen(&two) == seen(&one), "{}{schedule}", two.difference(&one));
    [two.rounds, one.rounds]
}

/// A request that shows a recorded picture or clip.
pub(crate) fn recorded(name: &str) -> Submission {
    let case = case(name);
    Submission {
        max_tokens: Some(6),
        media: media(&case),
        ignore_eos: true,
        ..Submission::new(case.input_ids())
    }
}

/// Hands a request to an engine, and turns until it is over.
pub(crate) fn told(engine: &mut Engine, id: u64, submission: Submission) -> Event {
    let (sender, events) = unbounded();
    engine.submit(RequestId(id), submission, sender);
    while !engine.is_idle() {
        engine.turn().unwrap_or_else(|error| panic!("{error}"));
    }
    events.try_iter().last().expect("it was told something")
}
