//! Two engines in lockstep, each a process with a CUDA device and its share of the model: what they make is what one
//! makes, and what one of them fails at is known to both.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use std::{iter, thread};

use graph::{Exchange, Key, Planted};
use planner::{ClassId, RequestId};
use runtime::checkpoint::layout::Format;
use runtime::convert::{ConvertOptions, Source, convert};
use runtime::engine::{Class, Engine, EngineOptions, Event, Place, open, open_rank};
use runtime::ranks::{Hello, Listener, Patience, Rank, Settings};
use runtime::receipts::{Planned, Random, Schedule, Trail, play};
use runtime::request::Submission;
use runtime::sampling::SamplingOptions;
use serde_json::Value;
use tests::churn::churn;
use tests::fixture::repository;
use tests::luck::all_memory;
use tests::process::say;
use tests::sight::{among, text};
use tests::tower::prompts;

use crate::ranks::ranks;

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("two_ranks_are_one_in_every_format", formats),
    ("two_ranks_are_one_at_the_real_widths", real_widths),
    ("two_ranks_see_what_one_sees", || pair("pictures", &repository(SMALL))),
    ("churn_captures_nothing_and_takes_no_memory", || pair("churn", &repository(SMALL))),
    ("a_capture_that_fails_on_one_rank_is_eager_on_both", || {
        pair("capture-0", &repository(SMALL));
        pair("capture-1", &repository(SMALL));
    }),
    ("a_launch_that_fails_on_one_rank_ends_both", || {
        pair("launch-0", &repository(SMALL));
        pair("launch-1", &repository(SMALL));
    }),
    ("a_rank_that_dies_between_captures_ends_the_other", || {
        pair("dies-0", &repository(SMALL));
        pair("dies-1", &repository(SMALL));
    }),
    ("memory_that_one_rank_lacks_is_a_vote", || pair("memory", &repository(SMALL))),
];

const SMALL: &str = "tests/oracle/checkpoints/base_bf16";
/// What begins the name of a case of this file.
const PAIR: &str = "pair:";
const PATIENCE: Patience = Patience { start: Duration::from_secs(60), answer: Duration::from_secs(30) };
/// What ending may take when one rank has failed.
const SOON: Duration = Duration::from_secs(10);

fn pair(case: &str, dir: &Path) {
    pair_over(Exchange::Auto, case, dir);
}

fn pair_over(exchange: Exchange, case: &str, dir: &Path) {
    ranks(&format!("{PAIR}{case}:{}", dir.display()), exchange);
}

fn formats() {
    for dir in [
        "models/tiny",
        SMALL,
        "tests/oracle/checkpoints/quant_fp8_block",
        "tests/oracle/checkpoints/quant_nvfp4",
    ] {
        pair("one", &repository(dir));
    }
    pair_over(Exchange::Nccl, "one", &repository("models/tiny"));
}

/// Four layers with the widths, heads and ids of the real model, and fewer experts and rows of n-grams.
fn real_widths() {
    let (home, made) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let text = fs::read_to_string(repository("models/real/config.json")).expect("settings");
    let mut config: Value = serde_json::from_str(&text).expect("JSON");
    for (name, size) in [("num_experts", 64), ("ngram_vocab_size_base", 20_000)] {
        assert!(config["text_config"][name].is_u64(), "{name} is a setting");
        config["text_config"][name] = size.into();
    }
    fs::write(home.path().join("config.json"), config.to_string()).expect("settings");
    let from = Source::Made { layers: Some(4), seed: 3 };
    for (experts, dense) in [(Format::Nvfp4, None), (Format::Fp8, Some(Format::Fp8))] {
        let out = made.path().join(experts.to_string());
        let options = ConvertOptions { from, experts: Some(experts), dense, ..ConvertOptions::default() };
        convert(home.path(), &out, &options, &mut |_, _| {}).expect("it is made");
        pair("one", &out);
        fs::remove_dir_all(&out).expect("it is there");
    }
}

/// Does a rank's part of a case, if it is one of this file's.
pub(crate) fn child(case: &str, exchange: Exchange, rank: usize, port: &str) -> bool {
    let Some((case, dir)) = case.strip_prefix(PAIR).and_then(|case| case.split_once(':')) else {
        return false;
    };
    let hello = Hello::new(rank, 2, "the test program", "CUDA", Settings::default());
    let met = match rank {
        0 => {
            let listener = Listener::bind("127.0.0.1:0").expect("a port is free");
            say(&listener.address().port().to_string());
            Rank::lead(listener, &hello, PATIENCE, || None)
        }
        _ => Rank::follow(&format!("127.0.0.1:{port}"), &hello, PATIENCE),
    };
    let met = Met(met.unwrap_or_else(|error| panic!("{error}")), exchange);
    let dir = Path::new(dir);
    match (case, rank) {
        ("one", 0) => two_are_one(dir, met),
        ("one", _) => follow(dir, &seen_whole(rank), met),
        ("pictures", 0) => sees(dir, met),
        ("pictures", _) => follow(dir, &tight(rank), met),
        ("churn", 0) => churns(dir, met),
        ("churn", _) => follow(dir, &churning(rank), met),
        ("capture-0" | "capture-1", _) => {
            let mut options = tight(rank);
            options.planted = (case == format!("capture-{rank}")).then_some(Planted::Capture(5));
            match rank {
                0 => all_eager(dir, &options, met),
                _ => follow(dir, &options, met),
            }
        }
        ("launch-0" | "launch-1", _) => {
            let engine = opened(dir, &tight(rank), met);
            // In the middle of the first piece.
            engine.runner().device.plant((case == format!("launch-{rank}")).then_some(Planted::Launch(50)));
            match rank {
                0 => fails(engine),
                _ => eprintln!("rank 1: {}", engine.follow().expect_err("one of the two fails")),
            }
        }
        ("dies-0" | "dies-1", _) => {
            let dies = case == format!("dies-{rank}");
            let options = EngineOptions { key_fault: dies.then_some(die as fn(&mut Key)), ..tight(rank) };
            let (Met(rank, exchange), begun) = (met, Instant::now());
            let options = EngineOptions { exchange, ..options };
            let error =
                open_rank(dir, &options, rank, &mut |_| {}).err().expect("the other rank dies").to_string();
            eprintln!("after {:.1?}: {error}", begun.elapsed());
            assert!(error.contains("rank ") && begun.elapsed() < 2 * SOON, "{error}");
        }
        ("memory", 0) => waits(dir, met),
        ("memory", _) => {
            let engine = opened(dir, &tight(rank), met);
            let _hogs = all_memory(&engine.runner().device);
            engine.follow().unwrap_or_else(|error| panic!("{error}"));
        }
        _ => panic!("no case is called {case}"),
    }
    true
}

/// Ends this process as a kill does, when the second key is asked for: while the other rank captures or waits for the
/// word on a capture.
fn die(_: &mut Key) {
    static KEYS: AtomicU32 = AtomicU32::new(0);
    if KEYS.fetch_add(1, Ordering::Relaxed) == 1 {
        // Nothing is unwound, and nothing is closed but by the system.
        std::process::abort();
    }
}

/// A rank that has met the other, and what is to carry their gathers.
struct Met(Rank, Exchange);

fn opened(dir: &Path, options: &EngineOptions, Met(rank, exchange): Met) -> Engine {
    let options = EngineOptions { exchange, ..options.clone() };
    open_rank(dir, &options, rank, &mut |_| {}).unwrap_or_else(|error| panic!("{error}")).engine
}

fn follow(dir: &Path, options: &EngineOptions, met: Met) {
    opened(dir, options, met).follow().unwrap_or_else(|error| panic!("{error}"));
}

fn alone(dir: &Path, options: &EngineOptions) -> Engine {
    open(dir, options, &mut |_| {}).unwrap_or_else(|error| panic!("{error}")).engine
}

/// Ends both in good order.
fn end(engine: Engine) {
    let begun = Instant::now();
    engine.spawn().1.stop().unwrap_or_else(|error| panic!("{error}"));
    eprintln!("rank 0 ended after {:.1?}", begun.elapsed());
}

/// Rounds one after another, each of which says what it left.
fn seen_whole(rank: usize) -> EngineOptions {
    EngineOptions {
        place: Place::Cuda(rank),
        text: false,
        classes: vec![Class { context: 2304, lanes: 8, pages: 0 }],
        slab_lanes: 5,
        depth: 1,
        trace: true,
        poison: true,
        ..EngineOptions::default()
    }
}

/// Slabs of three lanes that grow, few pages, short pieces.
fn tight(rank: usize) -> EngineOptions {
    EngineOptions {
        classes: vec![Class { context: 512, lanes: 8, pages: 14 }],
        slab_lanes: 3,
        piece_rows: 64,
        decode_share: 2,
        ..seen_whole(rank)
    }
}

/// Random requests, and some whose lanes see 2,052 positions, a few less or a few more.
fn schedules(vocab: u32, cases: u32) -> Vec<Schedule> {
    let mut random = Random::new(21);
    let mut request = |index: u32, length: u32, max_tokens: u32| Planned {
        arrive: index * 3,
        prompt: (0..length).map(|_| random.below(vocab)).collect(),
        max_tokens,
        sampling: SamplingOptions::default(),
        cancel: None,
        class: ClassId(0),
        media: Vec::new(),
    };
    let lengths = [(2_040, 24), (2_051, 6), (2_052, 6), (2_053, 6), (2_112, 9), (17, 40)];
    let long = (0..).zip(lengths).map(|(index, (length, ids))| request(index, length, ids)).collect();
    let mut all = vec![Schedule { requests: long }];
    all.extend((0..cases).map(|_| Schedule::random(&mut random, vocab, 9, 180, 40)));
    all
}

/// What was made, without the state, of which each rank has a part.
fn played(engine: &mut Engine, schedules: &[Schedule]) -> Vec<Trail> {
    let trail = |schedule| {
        let mut trail = play(engine, schedule).unwrap_or_else(|error| panic!("{error}"));
        trail.forget_state();
        trail
    };
    schedules.iter().map(trail).collect()
}

fn same(schedules: &[Schedule], two: &[Trail], one: &[Trail]) {
    for ((schedule, two), one) in schedules.iter().zip(two).zip(one) {
        assert!(two.lives == one.lives, "{}{schedule}", two.difference(one));
    }
}

fn two_are_one(dir: &Path, met: Met) {
    let mut pair = opened(dir, &seen_whole(0), met);
    let schedules = schedules(pair.runner().model.config.text_ids() as u32, 40);
    let two = played(&mut pair, &schedules);
    let stats = pair.stats();
    end(pair);
    let one = played(&mut alone(dir, &seen_whole(0)), &schedules);
    same(&schedules, &two, &one);
    let rounds = stats.rounds.replayed + stats.rounds.captured + stats.rounds.eager.values().sum::<u64>();
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    eprintln!("{name}: two ranks = one over {rounds} rounds: {}", stats.rounds);
    assert!(rounds > 1000 && stats.rounds.replayed > 700, "{}", stats.rounds);
}

/// Recorded pictures and clips, several at once, among text: features come over the wire of the collectives.
fn sees(dir: &Path, met: Met) {
    let mut requests: Vec<Planned> = prompts().iter().map(|case| among(case, 30, 40)).collect();
    requests.extend([text(90, 1), requests[0].clone(), text(9, 2)]);
    let schedules = [Schedule { requests }];
    let mut pair = opened(dir, &tight(0), met);
    let two = played(&mut pair, &schedules);
    assert!(pair.stats().pictures.hits > 0, "{:?}", pair.stats().pictures);
    end(pair);
    let one = played(&mut alone(dir, &tight(0)), &schedules);
    same(&schedules, &two, &one);
    assert!(two[0].lives.iter().all(|life| life.end == "length"), "{}", two[0].lives[0].end);
}

fn churning(rank: usize) -> EngineOptions {
    EngineOptions {
        classes: vec![Class { context: 256, lanes: 16, pages: 64 }],
        slab_lanes: 16,
        decode_share: 1,
        depth: 2,
        trace: false,
        ..seen_whole(rank)
    }
}

fn churns(dir: &Path, met: Met) {
    let mut pair = opened(dir, &churning(0), met);
    let device = pair.runner().device.clone();
    churn(&mut pair, 1_000, 1009);
    let (used, free, begun) = (device.used_bytes(), device.free_bytes(), Instant::now());
    churn(&mut pair, 10_000, 1009);
    eprintln!("10,000 rounds of two ranks in {:.1?}", begun.elapsed());
    let stats = pair.stats();
    assert_eq!((stats.bank.captured, stats.rounds.captured, stats.bank.first_sight), (16, 0, 0));
    assert_eq!((stats.lanes, stats.waiting, stats.pages_free), (0, 0, stats.pages_total));
    assert!(stats.rounds.replayed > 7_000, "{}", stats.rounds);
    assert_eq!((device.used_bytes(), device.free_bytes()), (used, free));
    end(pair);
}

fn all_eager(dir: &Path, options: &EngineOptions, met: Met) {
    let mut pair = opened(dir, options, met);
    let schedules = schedules(1009, 6).split_off(1);
    let two = played(&mut pair, &schedules);
    assert_eq!(pair.stats().graphs, 0);
    end(pair);
    let one = played(&mut alone(dir, &tight(0)), &schedules);
    same(&schedules, &two, &one);
    let eager: u64 = two.iter().filter_map(|trail| trail.rounds.eager.get("capture failed")).sum();
    assert!(eager > 0 && two.iter().all(|trail| trail.rounds.replayed + trail.rounds.captured == 0));
}

/// Turns until the engine fails; every request is told.
fn fails(mut pair: Engine) {
    let (sender, events) = crossbeam_channel::unbounded();
    let begun = Instant::now();
    let mut submission = Submission::new((0..70).map(|id| id * 7 % 1000).collect());
    (submission.max_tokens, submission.ignore_eos) = (Some(400), true);
    pair.submit(RequestId(1), submission, sender);
    let why =
        iter::repeat_with(|| pair.turn()).take(1000).find_map(Result::err).expect("it fails").to_string();
    let told: Vec<Event> = events.try_iter().collect();
    assert!(matches!(told.last(), Some(Event::Failed(_))), "{told:?}");
    eprintln!("rank 0: {why}, after {:.1?}", begun.elapsed());
    assert!(why.contains("LAUNCH_FAILED") || why.contains("rank 1"), "{why}");
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    let (ended, begun) = (thread::spawn(move || pair.spawn().1.wait()), Instant::now());
    while !ended.is_finished() {
        assert!(begun.elapsed() < SOON, "the engine does not end");
        thread::sleep(Duration::from_millis(10));
    }
}

/// More lanes than the first slab has are wanted, and one rank has no memory for them.
fn waits(dir: &Path, met: Met) {
    let mut pair = opened(dir, &tight(0), met);
    let mut schedules = schedules(1009, 4).split_off(1);
    schedules
        .iter_mut()
        .flat_map(|schedule| &mut schedule.requests)
        .for_each(|planned| planned.cancel = None);
    let two = played(&mut pair, &schedules);
    assert_eq!((pair.slabs().len(), pair.stats().slabs_refused), (1, 1));
    end(pair);
    let few = EngineOptions { classes: vec![Class { context: 512, lanes: 3, pages: 14 }], ..tight(0) };
    same(&schedules, &two, &played(&mut alone(dir, &few), &schedules));
}
