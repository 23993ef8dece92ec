//! Engines on CUDA over many rounds: long churn, and the real shape on both sides of the attention's budget.

use runtime::checkpoint::layout::Wanted;
use runtime::engine::{Class, Engine, EngineOptions, Place, open, open_opened};
use runtime::open::{Load, Opened};
use runtime::receipts::{Planned, Random, Schedule, play};
use runtime::sampling::SamplingOptions;
use tests::churn::churn;
use tests::fixture::repository;

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("a_hundred_thousand_rounds_of_churn", a_hundred_thousand_rounds_of_churn),
    ("the_real_shape_on_both_sides_of_its_budget", the_real_shape_on_both_sides_of_its_budget),
];

/// A small model, lanes that join and leave all the time: after the ladder nothing is captured, and neither the
/// device's memory nor the process grows.
fn a_hundred_thousand_rounds_of_churn() {
    let options = EngineOptions {
        place: Place::Cuda(0),
        classes: vec![Class { context: 256, lanes: 16, pages: 64 }],
        slab_lanes: 16,
        // As many prompts as decode rounds, so that lanes come as fast as they go.
        decode_share: 1,
        ..EngineOptions::default()
    };
    let dir = repository("tests/oracle/checkpoints/base_bf16");
    let mut engine = open(&dir, &options, &mut |_| {}).unwrap_or_else(|error| panic!("{error}")).engine;
    let device = engine.runner().device.clone();
    churn(&mut engine, 2_000, 1009);
    let (used, free, resident) = (device.used_bytes(), device.free_bytes(), resident_bytes());
    let widths = churn(&mut engine, 100_000, 1009);
    let stats = engine.stats();
    assert_eq!((stats.bank.captured, stats.rounds.captured, stats.bank.first_sight), (16, 0, 0));
    assert_eq!((stats.lanes, stats.waiting, stats.pages_free), (0, 0, stats.pages_total));
    assert!(stats.rounds.replayed > 70_000, "{}", stats.rounds);
    assert!(widths[1..].iter().all(|rounds| *rounds > 0), "rounds by lanes: {widths:?}");
    assert_eq!((device.used_bytes(), device.free_bytes()), (used, free));
    let grown = resident_bytes().saturating_sub(resident);
    assert!(grown < 8 << 20, "the process grew by {grown} bytes");
}

/// Bytes of this process in memory.
fn resident_bytes() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("the system tells");
    pages.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).expect("it is a number") * 4096
}

/// Four layers of the real shape, one of them sparse: lanes that pass 2,052 visible positions beside lanes that do
/// not. Graph = eager, run = run and crowded = alone, in every id, logit and byte of state.
fn the_real_shape_on_both_sides_of_its_budget() {
    let engine = |graphs| -> Engine {
        let options = EngineOptions {
            place: Place::Cuda(0),
            load: Load::Dummy { layers: Some(4), seed: 5, stored: Wanted::default() },
            graphs,
            classes: vec![Class { context: 2304, lanes: 6, pages: 0 }],
            depth: 1,
            trace: true,
            poison: true,
            ..EngineOptions::default()
        };
        let (dir, form) = (repository("models/real"), options.place.form(options.element, options.table));
        let opened = Opened::without_text(&dir, form, options.load).expect("a shape");
        open_opened(opened, &options, &mut |_| {}).unwrap_or_else(|error| panic!("{error}")).engine
    };
    let mut random = Random::new(8);
    let mut request = |index: u32, length: u32, max_tokens: u32| Planned {
        arrive: index * 3,
        prompt: (0..length).map(|_| random.below(240_000)).collect(),
        max_tokens,
        sampling: SamplingOptions::default(),
        cancel: None,
        class: planner::ClassId(0),
        media: Vec::new(),
    };
    let lengths = [(2_040, 24), (2_051, 6), (2_052, 6), (2_053, 6), (2_112, 9), (17, 40)];
    let schedule = Schedule {
        requests: (0..).zip(lengths).map(|(index, (length, ids))| request(index, length, ids)).collect(),
    };
    let mut graph = engine(true);
    let lives = |engine: &mut Engine, schedule: &Schedule| play(engine, schedule).expect("runs").lives;
    let first = lives(&mut graph, &schedule);
    assert!(first.iter().all(|life| life.traces.len() > 5), "every lane decoded");
    assert!(graph.stats().rounds.replayed > 20, "{}", graph.stats().rounds);
    assert!(first == lives(&mut graph, &schedule), "run = run");
    for (planned, life) in schedule.requests.iter().zip(&first) {
        let alone = Schedule { requests: vec![Planned { arrive: 0, ..planned.clone() }] };
        assert!(ids_and_traces(&lives(&mut graph, &alone)[0]) == ids_and_traces(life), "crowded = alone");
    }
    drop(graph);
    assert!(first == lives(&mut engine(false), &schedule), "graph = eager");
}

/// What a life was, without whose it was.
fn ids_and_traces(
    life: &runtime::receipts::Life,
) -> (Vec<u32>, Vec<(u32, Option<graph::Digest>, graph::Digest)>) {
    let trace = |trace: &runtime::engine::Trace| (trace.length, trace.logits, trace.state.whole());
    (life.ids.clone(), life.traces.iter().map(trace).collect())
}
