//! Two engines in lockstep, each a rank with its share of the model: what they make is what one makes, and what one of them
//! fails at ends both in order.

use std::iter;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use graph::Planted;
use planner::RequestId;
use runtime::engine::{Engine, EngineOptions, Event, open_rank};
use runtime::open::Progress;
use runtime::ranks::Rank;
use runtime::receipts::{Random, Schedule, play};
use runtime::request::Submission;

use crate::pair::{PATIENCE, SILENCE, end, model, one, same, tight, two, two_of_which};

#[test]
fn two_ranks_are_one_over_schedules() {
    let ((mut pair, follower), mut alone) = (two(&tight(), &tight()), one(&tight()));
    let mut random = Random::new(11);
    for _ in 0..20 {
        let schedule = Schedule::random(&mut random, 1009, 9, 180, 14);
        let [two, one] = same(&mut pair, &mut alone, &schedule);
        assert_eq!(two, one);
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

/// More requests at once than a link or a queue holds: each is answered or refused, on both ranks alike.
#[test]
fn a_flood_of_requests_is_taken_in_step() {
    const FLOOD: u64 = 10_000;
    let options = EngineOptions { queue: 20, depth: 2, trace: false, ..tight() };
    let (mut pair, follower) = two(&options, &options);
    let (sender, events) = crossbeam_channel::unbounded();
    // While no round runs, and in the middle of some.
    for wave in 0..2 {
        assert_eq!((pair.stats().tokens > 0, pair.is_idle()), (wave == 1, wave == 0));
        for id in 0..FLOOD {
            let short = Submission { max_tokens: Some(2), ..submission(3 + (id % 60) as u32) };
            pair.submit(RequestId(wave * FLOOD + id), short, sender.clone());
        }
        for _ in 0..30 * (1 - wave) {
            pair.turn().expect("they are in step");
        }
    }
    while !pair.is_idle() {
        pair.turn().expect("they are in step");
    }
    let events: Vec<Event> = events.try_iter().collect();
    let count = |is: fn(&Event) -> bool| events.iter().filter(|event| is(event)).count() as u64;
    let [full, finished] =
        [count(|e| matches!(e, Event::Full { .. })), count(|e| matches!(e, Event::Finished(_)))];
    assert!(
        finished > 20 && full + finished == 2 * FLOOD,
        "{finished} finished, {full} found the queue full"
    );
    end(pair, follower);
}

/// What one rank has no memory for, the other one does not begin to read.
#[test]
fn a_plan_that_does_not_fit_one_rank_ends_both_before_a_weight_is_read() {
    for short in 0..2 {
        let ranks = Rank::pair(PATIENCE, SILENCE).expect("sockets").into_iter().enumerate();
        let open = |(at, rank)| {
            let little = EngineOptions { host_memory: 1 << 20, ..tight() };
            let options = if at == short { little } else { tight() };
            thread::spawn(move || {
                let mut read = 0;
                let mut told = |progress| read += u32::from(matches!(progress, Progress::Loading { .. }));
                let error = open_rank(&model(), &options, rank, &mut told).err().expect("it does not fit");
                (error.to_string(), read)
            })
        };
        let both: Vec<_> = ranks.map(open).collect();
        for rank in both {
            let (error, read) = rank.join().expect("no panic");
            assert!(
                error.contains("the model does not fit the device") && read == 0,
                "{read} steps: {error}"
            );
        }
    }
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
    let (go, gone) = channel::<()>();
    let (engine, follower) = two_of_which(&tight(), &tight(), move |engine| {
        gone.recv().expect("the word to go");
        drop(engine);
        Ok(())
    });
    let (handle, engine) = engine.spawn();
    go.send(()).expect("it listens");
    follower.join().expect("no panic").expect("it opened");
    let started = Instant::now();
    let error = engine.wait().expect_err("it ends").to_string();
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    assert!(error.contains("rank 1"), "{error}");
    assert!(handle.submit(submission(3)).is_err(), "it takes nothing more");
}
