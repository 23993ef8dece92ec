//! What must follow from bad luck, on either device: the suites of the host and of the GPU call the same.

use crossbeam_channel::{Receiver, unbounded};
use graph::{Arena, Device, Error, Planted};
use kernels::numerics::ElementType;
use planner::RequestId;
use runtime::engine::{Class, Engine, EngineOptions, Event, Place, memory_plan, open};
use runtime::open::Opened;
use runtime::receipts::{Random, Schedule, play};
use runtime::request::Submission;
use runtime::weights::TablePlace;

use crate::engine;
use crate::fixture::repository;

const CHECKPOINT: &str = "tests/oracle/checkpoints/base_bf16";
const VOCAB: u32 = 1009;

fn engine(options: &EngineOptions) -> Engine {
    open_in(CHECKPOINT, options).unwrap_or_else(|error| panic!("{error}"))
}

fn open_in(checkpoint: &str, options: &EngineOptions) -> Result<Engine, runtime::error::Error> {
    Ok(open(&repository(checkpoint), options, &mut |_| {})?.engine)
}

/// Slabs of two lanes that grow, short pieces, no overlap, everything traced.
fn traced(place: Place) -> EngineOptions {
    let classes = vec![Class { context: 256, lanes: 6, pages: 24 }];
    EngineOptions { place, classes, slab_lanes: 2, ..engine::traced() }
}

/// A few short requests, all at once.
fn schedule(seed: u64, requests: usize) -> Schedule {
    let mut random = Random::new(seed);
    let mut planned = Vec::new();
    while planned.len() < requests {
        planned.extend(Schedule::random(&mut random, VOCAB, 4, 40, 6).requests);
    }
    planned.truncate(requests);
    planned.iter_mut().for_each(|planned| (planned.arrive, planned.cancel) = (0, None));
    Schedule { requests: planned }
}

/// A capture fails at each of its entries in turn: every round runs eagerly and leaves what it would have left.
pub fn captures_fail_at_every_entry(place: Place) {
    let mut sound = engine(&traced(place));
    let schedule = schedule(3, 2);
    let expected = play(&mut sound, &schedule).expect("runs");
    assert!(expected.rounds.replayed > 0, "{}", expected.rounds);
    let mut entries = 0;
    loop {
        let planted = Some(Planted::Capture(entries));
        let mut engine = engine(&EngineOptions { planted, ..traced(place) });
        let trail = play(&mut engine, &schedule).expect("a failed capture is no error");
        let stats = engine.stats();
        assert!(trail.lives == expected.lives, "entry {entries}: {}", trail.difference(&expected));
        if stats.bank.capture_failed == 0 {
            break;
        }
        assert_eq!(
            (stats.graphs, trail.rounds.replayed, trail.rounds.captured),
            (0, 0, 0),
            "entry {entries}"
        );
        assert_eq!(trail.rounds.eager["capture failed"], expected.rounds.replayed, "{}", trail.rounds);
        entries += 1;
    }
    assert!(entries > 40, "a round has more entries than {entries}");
}

/// What a request was told: its ids, and how it ended.
fn told(events: &Receiver<Event>) -> (Vec<u32>, Event) {
    let mut ids = Vec::new();
    for event in events {
        match event {
            Event::Token(token) => ids.push(token.id),
            end => return (ids, end),
        }
    }
    panic!("the engine went away without a word");
}

fn submissions() -> Vec<Submission> {
    let ids = |request: u32, count| (0..count).map(|i| (i * 37 + request * 101) % VOCAB).collect();
    let submission = |(request, count)| Submission {
        max_tokens: Some(8),
        ignore_eos: true,
        ..Submission::new(ids(request, count))
    };
    [(1, 5), (2, 70), (3, 11)].into_iter().map(submission).collect()
}

/// Hands the requests to an engine, numbered from `first` on.
fn submit(engine: &mut Engine, first: u64) -> Vec<Receiver<Event>> {
    let submit = |(number, submission)| {
        let (sender, events) = unbounded();
        engine.submit(RequestId(number), submission, sender);
        events
    };
    (first..).zip(submissions()).map(submit).collect()
}

/// A launch fails in the middle of a round, at every `step`th launch in turn: what was told is right, every
/// request that is not complete is told that it failed, and nothing more is taken.
pub fn launches_fail(place: Place, step: usize) {
    let options = EngineOptions { depth: 2, trace: false, ..traced(place) };
    let mut sound = engine(&options);
    let events = submit(&mut sound, 1_000);
    let (_handle, thread) = sound.spawn();
    let expected: Vec<Vec<u32>> = events.iter().map(|events| told(events).0).collect();
    thread.stop().expect("nothing was planted");
    let (mut cases, mut told_before) = (0, 0);
    for after in (0..).step_by(step) {
        let mut engine = engine(&options);
        engine.runner().device.plant(Some(Planted::Launch(after)));
        let events = submit(&mut engine, 1_000);
        let (handle, thread) = engine.spawn();
        let lives: Vec<(Vec<u32>, Event)> = events.iter().map(told).collect();
        let mut failed = 0;
        for ((ids, end), expected) in lives.iter().zip(&expected) {
            match end {
                Event::Finished(_) => assert_eq!(ids, expected, "launch {after}"),
                Event::Failed(why) => {
                    assert!(why.contains("device work failed"), "{why}");
                    assert!(expected.starts_with(ids), "launch {after}: {ids:?} of {expected:?}");
                    failed += 1;
                    told_before += ids.len();
                }
                other => panic!("launch {after}: {other:?}"),
            }
        }
        let ended = thread.stop();
        if failed == 0 && ended.is_ok() {
            break;
        }
        cases += 1;
        assert!(ended.as_ref().is_err_and(runtime::error::Error::is_device), "launch {after}: {ended:?}");
        let why = handle.stats().failed.unwrap_or_default();
        assert!(why.contains("device work failed"), "{why}");
        let later = handle.submit(submissions().remove(0)).map(|ticket| ticket.id);
        assert!(matches!(later, Err(runtime::error::Error::Ended)), "{later:?}");
    }
    assert!(cases > 5 && told_before > 0, "{cases} cases, {told_before} ids told before");
}

/// An engine without a thread takes nothing either once a launch has failed.
pub fn a_failed_engine_takes_nothing(place: Place) {
    let warm_up = EngineOptions { planted: Some(Planted::Launch(30)), ..traced(place) };
    let opened = open_in(CHECKPOINT, &warm_up).map(drop);
    assert!(opened.is_err_and(|error| error.is_device()), "warming up fails");
    let mut engine = engine(&traced(place));
    engine.runner().device.plant(Some(Planted::Launch(100)));
    let events = submit(&mut engine, 1_000);
    let error = loop {
        if let Err(error) = engine.turn() {
            break error;
        }
    };
    assert!(error.is_device(), "{error}");
    for events in events {
        assert!(matches!(told(&events).1, Event::Failed(why) if why == error.to_string()));
    }
    let (sender, events) = unbounded();
    engine.submit(RequestId(7), submissions().remove(0), sender);
    assert!(matches!(told(&events).1, Event::Failed(why) if why == error.to_string()));
    assert_eq!(engine.stats().failed, Some(error.to_string()));
    assert!(engine.turn().is_err_and(|again| again.is_device()));
}

/// Every byte that the device still has, in pieces.
pub fn all_memory(device: &Device) -> Vec<Arena> {
    let (mut size, mut all) = (device.free_bytes(), Vec::new());
    while size > 0 {
        match device.arena("hog", size) {
            Ok(arena) => all.push(arena),
            Err(Error::OutOfMemory { .. }) => size /= 2,
            Err(error) => panic!("{error}"),
        }
    }
    all
}

/// The device's memory is gone when the engine would add lanes: the lanes there are serve everyone, and answers
/// are as ever.
pub fn more_lanes_find_no_memory(place: Place) {
    let options = traced(place);
    let folder = repository(CHECKPOINT);
    let opened = Opened::new(&folder, options.form(&folder).expect("a folder"));
    let needed = memory_plan(&opened.expect("a model"), &options).expect("a plan").bytes();
    let options = EngineOptions { host_memory: needed + (64 << 10), queue: 8, ..options };
    let schedule = schedule(11, 6);
    let mut plenty = engine(&options);
    let expected = play(&mut plenty, &schedule).expect("runs");
    assert!(plenty.slabs().len() > 1, "the engine adds lanes");
    assert_eq!(plenty.stats().slabs_refused, 0);

    let mut engine = engine(&options);
    let hogs = all_memory(&engine.runner().device);
    let trail = play(&mut engine, &schedule).expect("too little memory is no fault");
    assert!(trail.lives == expected.lives, "{}", trail.difference(&expected));
    assert_eq!((engine.slabs().len(), engine.stats().slabs_refused), (1, 1));
    drop(hogs);

    // More than may wait are told so at once, and the others are answered.
    let events: Vec<_> = (1..5).flat_map(|turn| submit(&mut engine, 1_000 * turn)).collect();
    while !engine.is_idle() {
        engine.turn().expect("runs");
    }
    let ends: Vec<Event> = events.iter().map(|events| told(events).1).collect();
    let full = ends.iter().filter(|end| matches!(end, Event::Full { waiting: 8 })).count();
    let finished = ends.iter().filter(|end| matches!(end, Event::Finished(_))).count();
    assert_eq!((full, finished), (4, 8), "{ends:?}");
}

/// The tables live in each place in turn: rounds leave the same bytes. A device that cannot read mapped files
/// says so, and what to use.
pub fn tables_leave_the_same_everywhere(place: Place, models: &[(&str, ElementType, u32)]) {
    for &(model, element, vocab) in models {
        let options = |table| EngineOptions { element, table, ..traced(place) };
        let mut inside = open_in(model, &options(TablePlace::Device)).expect("opens");
        let used = inside.runner().device.used_bytes();
        assert!(inside.runner().weights.tables.is_empty());
        let mut random = Random::new(9);
        let schedules: Vec<Schedule> =
            (0..3).map(|_| Schedule::random(&mut random, vocab, 5, 90, 10)).collect();
        let expected: Vec<_> =
            schedules.iter().map(|schedule| play(&mut inside, schedule).expect("runs")).collect();
        for table in [TablePlace::Pinned, TablePlace::Mapped] {
            let mut outside = match open_in(model, &options(table)) {
                Ok(engine) => engine,
                Err(error) => {
                    let says = error.to_string();
                    assert!(
                        table == TablePlace::Mapped && inside.runner().device.maps_files().is_err(),
                        "{says}"
                    );
                    assert!(says.contains("--table mmap") && says.contains("--table pinned"), "{says}");
                    println!("{says}");
                    continue;
                }
            };
            let tables = &outside.runner().weights.tables;
            let bytes: usize = tables.iter().map(Arena::bytes).sum();
            assert!(
                bytes > 0 && outside.runner().device.used_bytes() + bytes <= used + 4096,
                "{model} {table}"
            );
            for (schedule, expected) in schedules.iter().zip(&expected) {
                let trail = play(&mut outside, schedule).expect("runs");
                assert!(trail.lives == expected.lives, "{model} {table}: {}", trail.difference(expected));
            }
            assert!(outside.stats().rounds.replayed > 0);
        }
    }
}
