//! Two engines in lockstep, each a process, as `--tp 2` has them on the host device: what one of them alone fails at is no
//! more than that, and the death of one ends the other in time, wherever it dies. Rank 0 is the test, rank 1 this program
//! started again.

use std::process::{self, Command};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use std::{iter, thread};

use graph::{Key, Planted};
use runtime::engine::{Class, Engine, EngineOptions, Event, Handle, RoundCounts, Ticket, open_rank};
use runtime::error::Error;
use runtime::ranks::{Hello, Listener, Rank, Settings};
use runtime::receipts::{Planned, Random, Schedule};
use runtime::request::Submission;
use tests::luck::all_memory;
use tests::process::{Process, on_word, part, say};
use tests::sight::planned;

use crate::pair::{PATIENCE, model, one, opened, recorded, same, sighted, tight, told};

/// On a link that is quiet for so long somebody is dead. Ten seconds unless a test says otherwise.
const SILENCE: Duration = Duration::from_secs(3);
/// What an end may take where nobody has to wait for a silence.
const SOON: Duration = Duration::from_secs(2);
/// Any port.
const ANY: &str = "127.0.0.1:0";
/// A port of a host of this machine that nothing else takes ports of, so that it stays free between two pairs.
const AGAIN: &str = if cfg!(target_os = "linux") { "127.0.0.3:0" } else { ANY };

/// Starts rank 1 as `part`, and meets it at `address`.
fn meet(part: &str, address: &str) -> (Rank, Process) {
    let listener = Listener::bind(address).unwrap_or_else(|error| panic!("{error}"));
    let part = format!("{part} {}", listener.address());
    let follower = Process::start(&part, &["processes::rank_1", "--exact", "--ignored", "--nocapture"], &[]);
    let rank = Rank::lead(listener, &hello(0), PATIENCE, || None).unwrap_or_else(|error| panic!("{error}"));
    (rank, follower)
}

fn two(part: &str, leads: &EngineOptions) -> (Engine, Process) {
    let (rank, follower) = meet(part, ANY);
    (opened(leads, rank), follower)
}

fn hello(rank: usize) -> Hello {
    let silence_ms = SILENCE.as_millis() as u64;
    Hello { silence_ms, ..Hello::new(rank, 2, "the test program", "host", Settings::default()) }
}

/// Ends both in good order.
fn end(engine: Engine, mut follower: Process) {
    engine.spawn().1.stop().expect("a good end");
    assert!(follower.ends_within(PATIENCE.answer).success());
}

#[test]
#[ignore = "it is rank 1 of the other tests, which start it"]
fn rank_1() {
    // Nobody started it who needs it.
    let Some(part) = part() else { return };
    let [part, address] = part.split(' ').collect::<Vec<_>>()[..] else { panic!("{part}") };
    let options = match part {
        "sees" | "has_no_memory" => plenty(),
        "fails_captures" => EngineOptions { planted: Some(Planted::Capture(5)), ..tight() },
        "follows" => tight(),
        dies => {
            FATE.set(Fate::of(dies)).expect("it is the only one");
            EngineOptions { key_fault: Some(meet_fate), ..tight() }
        }
    };
    let rank = Rank::follow(address, &hello(1), PATIENCE).unwrap_or_else(|error| panic!("{error}"));
    let engine = opened(&options, rank);
    let device = engine.runner().device.clone();
    match part {
        "has_no_memory" => {
            let taken = all_memory(&engine.runner().device);
            on_word("let go", || drop(taken));
        }
        "fails_captures" => on_word("capture", move || device.plant(None)),
        _ => {}
    }
    engine.follow().unwrap_or_else(|error| panic!("{error}"));
}

/// Lanes that see, and some memory for more.
fn plenty() -> EngineOptions {
    EngineOptions { host_memory: 128 << 20, ..sighted() }
}

/// A rank has no memory when requests want more lanes, and when one shows a picture: those wait, this one is refused
/// with the reason, and the pair answers what comes next as one rank does; the picture too, once there is memory.
#[test]
fn memory_that_one_rank_lacks_is_a_vote() {
    let class = Class { lanes: 3, ..plenty().classes[0].clone() };
    let few = EngineOptions { classes: vec![class], ..plenty() };
    let mut alone = one(&few);
    for (lacks, part) in [(0, "sees"), (1, "has_no_memory")] {
        let (mut pair, mut follower) = two(part, &plenty());
        let taken = (lacks == 0).then(|| all_memory(&pair.runner().device));
        let mut random = Random::new(14);
        let mut text = || {
            let mut schedule = Schedule::random(&mut random, 1009, 9, 90, 10);
            schedule.requests.iter_mut().for_each(|planned| planned.cancel = None);
            schedule
        };
        for _ in 0..4 {
            same(&mut pair, &mut alone, &text());
        }
        assert_eq!((pair.slabs().len(), pair.stats().slabs_refused), (1, 1));
        for id in 1..4 {
            let refused = told(&mut pair, id, recorded("image_one"));
            let Event::Failed(why) = &refused else { panic!("{refused:?}") };
            assert!(why.contains("memory") && why.contains("picture"), "{why}");
            same(&mut pair, &mut alone, &text());
        }
        match lacks {
            0 => drop(taken),
            _ => follower.ask("let go"),
        }
        let Submission { prompt, media, .. } = recorded("image_one");
        same(&mut pair, &mut alone, &Schedule { requests: vec![planned(prompt, media, 6)] });
        assert_eq!(pair.stats().pictures.hits + pair.stats().pictures.misses, 4);
        end(pair, follower);
    }
}

/// So many requests at once, which are decoded together until they end together.
fn crowd(requests: u32, ids: u32) -> Schedule {
    let mut random = Random::new(requests.into());
    let mut prompt = |length: u32| (0..length).map(|_| random.below(1009)).collect();
    Schedule { requests: (0..requests).map(|at| planned(prompt(5 + 11 * at), Vec::new(), ids)).collect() }
}

/// Captures fail on one rank alone: at start, and later those of rounds with lanes of a new slab. These rounds are eager
/// on both; once captures succeed, others are captured and replayed. All leave what one rank leaves.
#[test]
fn a_capture_that_fails_on_one_rank_is_eager_on_both() {
    let failing = EngineOptions { planted: Some(Planted::Capture(5)), ..tight() };
    for (leads, part) in [(&failing, "follows"), (&tight(), "fails_captures")] {
        let ((mut pair, mut follower), mut alone) = (two(part, leads), one(&tight()));
        assert_eq!((pair.stats().bank.captured, pair.stats().bank.capture_failed), (0, 3));
        let [two, one] = same(&mut pair, &mut alone, &crowd(4, 20));
        assert_eq!((two.replayed, two.captured, pair.stats().graphs), (0, 0, 0), "{two}");
        let eager = |rounds: &RoundCounts| rounds.eager.get("capture failed").copied();
        assert_eq!((eager(&two), eager(&one)), (Some(one.replayed + one.captured), None), "{two}, {one}");
        let failed = pair.stats().bank.capture_failed;
        assert!(failed > 3, "{two}");
        match part {
            "fails_captures" => follower.ask("capture"),
            _ => pair.runner().device.plant(None),
        }
        let [two, _] = same(&mut pair, &mut alone, &crowd(5, 20));
        assert!(two.captured > 0 && two.replayed > 5, "{two}");
        // What has failed is not tried again so soon.
        assert!(eager(&two).is_some() && pair.stats().bank.capture_failed == failed, "{two}");
        end(pair, follower);
    }
}

/// Where and how this process ends: at the `key`th key of a round on so many slabs.
#[derive(Debug)]
struct Fate {
    harm: String,
    slabs: usize,
    key: u32,
}

static FATE: OnceLock<Fate> = OnceLock::new();

impl Fate {
    fn of(part: &str) -> Fate {
        let [harm, slabs, key] = part.split(':').collect::<Vec<_>>()[..] else { panic!("{part}") };
        Fate { harm: harm.into(), slabs: slabs.parse().expect("slabs"), key: key.parse().expect("a key") }
    }
}

/// Ends this process, or stops it, without another word, when its key has come.
fn meet_fate(key: &mut Key) {
    static KEYS: AtomicU32 = AtomicU32::new(1);
    let fate = FATE.get().expect("it is written");
    if key.buffers.len() != fate.slabs || KEYS.fetch_add(1, Ordering::Relaxed) != fate.key {
        return;
    }
    say("now");
    if fate.harm == "abort" {
        // Nothing is unwound, and nothing is closed but by the system.
        process::abort();
    }
    let sent = Command::new("kill").args([format!("-{}", fate.harm), process::id().to_string()]).status();
    assert!(sent.expect("there is a kill command").success());
    // It may take a moment.
    thread::sleep(PATIENCE.start);
}

/// A follower dies, or hangs, in the middle of what both do for a capture: all streams end with an error in time, the
/// engine closes, and the next pair finds nothing in its way at the same port.
#[test]
fn a_follower_that_dies_in_a_capture_ends_the_leader() {
    // A round asks twice for its key: when the ranks compare how they will execute it, and to do so. Of rounds on two
    // slabs the first is eager, the second captures, and the third replays: then the leader waits in a collective, before
    // that for the word on the capture.
    const COMPARES: u32 = 3;
    const CAPTURES: u32 = 4;
    const HAS_CAPTURED: u32 = 5;
    let address = Listener::bind(AGAIN).expect("a free port").address().to_string();
    let mut alone = one(&tight());
    for (harm, key, within) in [
        ("abort", COMPARES, SOON),
        ("KILL", CAPTURES, SOON),
        ("STOP", CAPTURES, SILENCE + SOON),
        ("STOP", HAS_CAPTURED, SILENCE + SOON),
    ] {
        let (rank, follower) = meet(&format!("{harm}:2:{key}"), &address);
        let (handle, engine) = opened(&EngineOptions { trace: false, ..tight() }, rank).spawn();
        let streams = streams(&handle);
        assert_eq!(follower.line(), "now");
        let died = Instant::now();
        for stream in streams {
            let next = || stream.events.recv_deadline(died + within).ok();
            let events: Vec<Event> = iter::from_fn(next).collect();
            let (end, before) = events.split_last().expect("an end");
            assert!(matches!(end, Event::Failed(why) if why.contains("rank 1")), "{end:?}");
            assert!(!before.is_empty() && before.iter().all(|event| matches!(event, Event::Token(_))));
        }
        let error = engine.wait().expect_err("it ends").to_string();
        assert!(error.contains("rank 1"), "{error}");
        assert!(died.elapsed() < within, "{harm} at {key}: {:?}: {error}", died.elapsed());
        assert!(matches!(handle.submit(Submission::new(vec![1])), Err(Error::Ended)));
        // Three were captured at start.
        assert_eq!(handle.stats().bank.captured, 3 + u64::from(key == HAS_CAPTURED), "{harm} at {key}");
        // One that hangs is still there.
        let (rank, next) = meet("follows", &address);
        let mut pair = opened(&tight(), rank);
        same(&mut pair, &mut alone, &crowd(4, 6));
        end(pair, next);
    }
}

/// Four requests that are far from their ends when the fate of the follower comes.
fn streams(handle: &Handle) -> Vec<Ticket> {
    let submit = |Planned { prompt, .. }| {
        let submission = Submission { max_tokens: Some(60), ignore_eos: true, ..Submission::new(prompt) };
        handle.submit(submission).expect("it is taken")
    };
    crowd(4, 60).requests.into_iter().map(submit).collect()
}

/// The same between two captures of the start: there is no stream yet, and the leader does not open.
#[test]
fn a_follower_that_dies_between_the_first_captures_ends_the_leader() {
    let (rank, follower) = meet("abort:1:2", ANY);
    let died = thread::spawn(move || {
        assert_eq!(follower.line(), "now");
        Instant::now()
    });
    let opened = open_rank(&model(), &tight(), rank, &mut |_| {});
    let (error, ended) = (opened.err().expect("the other rank dies").to_string(), Instant::now());
    assert!(error.contains("rank 1"), "{error}");
    let took = ended.saturating_duration_since(died.join().expect("it dies"));
    assert!(took < SOON, "{took:?}: {error}");
}
