//! The model on CUDA: every launch against the host, probes, and the equalities of the design.

use std::path::Path;

use graph::{CudaOptions, Device, Digest, Exchange};
use kernels::numerics::ElementType;
use runtime::checkpoint::layout::Format;
use runtime::convert::{ConvertOptions, convert};
use runtime::engine::{EngineOptions, Place, open};
use runtime::lanes::LayerSpans;
use runtime::model::Picks;
use runtime::open::Load;
use runtime::receipts::{CheckOptions, Random, Schedule, check, play};
use runtime::weights::{DenseForm, TablePlace};
use tests::differ::{Kind, differ};
use tests::engine::tight;
use tests::fixture::{Fixture, Lane, Size, repository};
use tests::oracle::{cases, read_json, rms_relative};

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("every_launch_agrees_with_the_host", every_launch_agrees_with_the_host),
    ("crowded_rows_are_rows_alone", crowded_rows_are_rows_alone),
    ("replayed_rounds_are_eager_rounds", replayed_rounds_are_eager_rounds),
    ("text_probes_answer_as_recorded", text_probes_answer_as_recorded),
    (
        "quantised_logits_are_close_by_the_rule_of_the_oracle",
        quantised_logits_are_close_by_the_rule_of_the_oracle,
    ),
    ("receipts_hold_in_every_format", receipts_hold_in_every_format),
    ("schedules_leave_the_same_with_graphs_and_without", schedules_leave_the_same_with_graphs_and_without),
];

fn cuda() -> Device {
    Device::cuda_with(CudaOptions { poison: true, ..CudaOptions::default() }).expect("a device")
}

fn small(device: &Device, slots: usize) -> Fixture {
    let size = Size { slots, context: 512, rows: 320 };
    Fixture::on(device, &repository("tests/oracle/checkpoints/base_bf16"), ElementType::Bf16, size)
}

fn ids(count: usize, seed: u32) -> Vec<u32> {
    let id = |i: u32| (i.wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(40_503)) >> 8) % 300;
    (1..=count as u32).map(id).collect()
}

/// A typed run of bytes in one of the fixture's arenas.
struct Part {
    label: String,
    arena: usize,
    offset: usize,
    bytes: usize,
    kind: Kind,
}

/// The arenas that rounds write: buffers, slots, pages.
fn arenas(fixture: &Fixture) -> [graph::Arena; 3] {
    [
        fixture.runner.scratch.arena.clone(),
        fixture.lanes.slab.arena().clone(),
        fixture.lanes.pool.arena.clone(),
    ]
}

/// What is where in them.
fn parts(fixture: &Fixture) -> Vec<Part> {
    let b = &fixture.runner.scratch.buffers;
    let base = fixture.runner.scratch.arena.base().address();
    let starts: Vec<(&str, u64, Kind)> = vec![
        ("table", b.table_base.address(), Kind::Exact),
        ("facts", b.facts.address(), Kind::Exact),
        ("streams", b.streams.address(), Kind::Bf16),
        ("normed", b.normed.address(), Kind::Bf16),
        ("low", b.low.address(), Kind::Bf16),
        ("inject", b.inject.address(), Kind::Wide),
        ("mixed", b.mixed.address(), Kind::Bf16),
        ("stacked", b.stacked.address(), Kind::Bf16),
        ("conv", b.conv.address(), Kind::Bf16),
        ("ready", b.ready.address(), Kind::F32),
        ("core", b.core.address(), Kind::Bf16),
        ("gated", b.gated.address(), Kind::Bf16),
        ("queries", b.queries.address(), Kind::Bf16),
        ("index queries", b.index_queries.address(), Kind::Bf16),
        ("chosen", b.chosen.address(), Kind::Exact),
        ("index scores", b.scores.address(), Kind::F32),
        ("span sums", b.span_sums.address(), Kind::F32),
        ("span marks", b.span_marks.address(), Kind::F32),
        ("partials", b.partials.address(), Kind::F32),
        ("router", b.router.address(), Kind::F32),
        ("experts", b.experts.address(), Kind::Exact),
        ("expert weights", b.expert_weights.address(), Kind::F32),
        ("expert inner", b.expert_inner.address(), Kind::Bf16),
        ("shared inner", b.shared_inner.address(), Kind::Bf16),
        ("expert list", b.expert_list.address(), Kind::Exact),
        ("expert starts", b.expert_starts.address(), Kind::Exact),
        ("expert products", b.expert_products.address(), Kind::F32),
        ("n-gram", b.ngram.address(), Kind::Bf16),
        ("n-gram key value", b.ngram_key_value.address(), Kind::Bf16),
        ("n-gram gated", b.ngram_gated.address(), Kind::Bf16),
        ("n-gram normed", b.ngram_normed.address(), Kind::Bf16),
        ("hidden", b.hidden.address(), Kind::Bf16),
        ("logits", b.logits.address(), Kind::Bf16),
        ("outcomes", b.outcomes.address(), Kind::F32),
    ];
    let end = base + fixture.runner.scratch.arena.bytes() as u64;
    let mut sorted = starts;
    sorted.sort_by_key(|start| start.1);
    let ends: Vec<u64> = sorted.iter().skip(1).map(|start| start.1).chain([end]).collect();
    let mut parts: Vec<Part> = sorted
        .into_iter()
        .zip(ends)
        .map(|((label, start, kind), end)| Part {
            label: label.into(),
            arena: 0,
            offset: (start - base) as usize,
            bytes: (end - start) as usize,
            kind,
        })
        .collect();
    let layout = &fixture.lanes.layout;
    for slot in 0..fixture.lanes.slab.slots() {
        for (label, span) in layout.slot.spans() {
            let floats = layout.layers.iter().find_map(|spans| match *spans {
                LayerSpans::Recurrent { state, .. } if state == span => Some(Kind::F32),
                LayerSpans::Recurrent { window, .. } if window == span => Some(Kind::Bf16),
                LayerSpans::Sparse { ring, .. } if ring == span => Some(Kind::Bf16),
                _ => None,
            });
            let window = layout.ngram_windows.contains(&Some(span)).then_some(Kind::Bf16);
            let kind = floats.or(window).unwrap_or(Kind::Exact);
            let offset = slot * fixture.lanes.slab.stride() + span.offset;
            parts.push(Part {
                label: format!("slot {slot} {label}"),
                arena: 1,
                offset,
                bytes: span.bytes,
                kind,
            });
        }
    }
    let bytes = fixture.lanes.pool.arena.bytes();
    parts.push(Part { label: "pages".into(), arena: 2, offset: 0, bytes, kind: Kind::Bf16 });
    parts
}

/// Runs the same rounds on the host and on CUDA, launch by launch, each from the host's memory, and compares
/// all memory after each.
fn every_launch_agrees_with_the_host() {
    let device = cuda();
    let mut problems = Vec::new();
    for (dir, rows) in [
        ("tests/oracle/checkpoints/base_bf16", 150),
        ("tests/oracle/checkpoints/two_ple", 70),
        ("tests/oracle/checkpoints/ratio2_oddheads", 66),
        ("tests/oracle/checkpoints/quant_fp8_block", 70),
        ("tests/oracle/checkpoints/quant_nvfp4", 70),
        ("models/tiny", 130),
    ] {
        let size = Size { slots: 3, context: 512, rows: 320 };
        let dir = repository(dir);
        let mut host = Fixture::open(&dir, ElementType::Bf16, size);
        let mut gpu = Fixture::on(&device, &dir, ElementType::Bf16, size);
        let mut lanes = (Vec::new(), Vec::new());
        for slot in 0..3 {
            lanes.0.push(host.lane(slot));
            lanes.1.push(gpu.lane(slot));
        }
        for slot in 0..3 {
            let prompt = ids(rows / (slot + 1), slot as u32);
            let emission = host.prompt_emission(&mut lanes.0[slot], &prompt, Picks::All);
            let twin = gpu.prompt_emission(&mut lanes.1[slot], &prompt, Picks::All);
            compare(&host, &gpu, &emission, &twin, &mut problems);
        }
        for _ in 0..2 {
            let mut all: Vec<&mut Lane> = lanes.0.iter_mut().collect();
            host.stage_decode(&mut all);
            let mut all: Vec<&mut Lane> = lanes.1.iter_mut().collect();
            gpu.stage_decode(&mut all);
            compare(&host, &gpu, &host.decode_emission(3), &gpu.decode_emission(3), &mut problems);
        }
    }
    assert!(
        problems.is_empty(),
        "{} differences, such as:\n{}",
        problems.len(),
        problems[..problems.len().min(40)].join("\n")
    );
}

fn compare(
    host: &Fixture,
    gpu: &Fixture,
    emission: &graph::Emission,
    twin: &graph::Emission,
    problems: &mut Vec<String>,
) {
    assert_eq!(emission.len(), twin.len());
    host.runner.stream.synchronize().expect("staged");
    gpu.runner.stream.synchronize().expect("staged");
    let (host_arenas, gpu_arenas) = (arenas(host), arenas(gpu));
    let parts = parts(host);
    for index in 0..emission.len() {
        for (from, to) in host_arenas.iter().zip(&gpu_arenas) {
            let bytes = from.read::<u8>(from.base(), from.bytes()).expect("read");
            to.write(to.base(), &bytes).expect("written");
        }
        host.runner.stream.run(emission.slice(index..index + 1), &[]).expect("queued");
        host.runner.stream.synchronize().expect("the host's launch runs");
        gpu.runner.stream.run(twin.slice(index..index + 1), &[]).expect("queued");
        let name = format!("{}", emission.slice(index..index + 1)).chars().take(60).collect::<String>();
        gpu.runner.stream.synchronize().unwrap_or_else(|error| panic!("{name}: {error}"));
        let read = |arenas: &[graph::Arena; 3]| {
            arenas.each_ref().map(|arena| arena.read::<u8>(arena.base(), arena.bytes()).expect("read"))
        };
        let (a, b) = (read(&host_arenas), read(&gpu_arenas));
        for part in &parts {
            let range = part.offset..part.offset + part.bytes;
            let (a, b) = (&a[part.arena][range.clone()], &b[part.arena][range]);
            if a != b
                && let Some(why) = differ(part.kind, a, b)
            {
                problems.push(format!("{name}: {}: {why}", part.label));
            }
        }
    }
}

fn logits(fixture: &Fixture, rows: usize) -> Vec<u32> {
    fixture.runner.logits(rows).expect("read").into_iter().map(f32::to_bits).collect()
}

fn state(fixture: &Fixture, lane: &Lane) -> Digest {
    fixture.bundle(lane).digest(&fixture.runner.stream).expect("read").whole()
}

fn crowded_rows_are_rows_alone() {
    let mut fixture = small(&cuda(), 10);
    let lengths = [5, 64, 19, 130, 21, 63, 3, 90, 1];
    let mut crowd: Vec<Lane> = (0..lengths.len()).map(|slot| fixture.lane(slot)).collect();
    for (lane, length) in crowd.iter_mut().zip(lengths) {
        fixture.prompt(lane, &ids(length, length as u32));
    }
    let start = crowd.clone();
    for round in 0..6 {
        let mut all: Vec<&mut Lane> = crowd.iter_mut().collect();
        fixture.decode(&mut all, None);
        if round < 5 {
            continue;
        }
        let together = logits(&fixture, lengths.len());
        let vocab = together.len() / lengths.len();
        for (at, length) in lengths.into_iter().enumerate() {
            let mut alone = fixture.lane(9);
            fixture.prompt(&mut alone, &ids(length, length as u32));
            for _ in 0..6 {
                fixture.decode(&mut [&mut alone], None);
            }
            assert!(
                together[at * vocab..][..vocab] == logits(&fixture, 1),
                "lane of {} ids",
                start[at].length
            );
            assert_eq!(state(&fixture, &crowd[at]), state(&fixture, &alone), "lane of {length} ids");
        }
    }
}

fn replayed_rounds_are_eager_rounds() {
    let mut fixture = small(&cuda(), 6);
    let exec = fixture.capture_decode(3);
    let lengths = [17, 64, 130];
    let mut eager: Vec<Lane> = (0..3).map(|slot| fixture.lane(slot)).collect();
    let mut replayed: Vec<Lane> = (3..6).map(|slot| fixture.lane(slot)).collect();
    for (at, length) in lengths.into_iter().enumerate() {
        fixture.prompt(&mut eager[at], &ids(length, 1));
        fixture.prompt(&mut replayed[at], &ids(length, 1));
    }
    for _ in 0..20 {
        let mut all: Vec<&mut Lane> = eager.iter_mut().collect();
        fixture.decode(&mut all, None);
        let expected = logits(&fixture, 3);
        let mut all: Vec<&mut Lane> = replayed.iter_mut().collect();
        fixture.decode(&mut all, Some(&exec));
        assert!(logits(&fixture, 3) == expected);
    }
    for (a, b) in eager.iter().zip(&replayed) {
        assert_eq!(state(&fixture, a), state(&fixture, b));
    }
}

fn text_probes_answer_as_recorded() {
    let size = Size { slots: 1, context: 4096, rows: 512 };
    let mut fixture = Fixture::on(&cuda(), &repository("models/tiny"), ElementType::Bf16, size);
    let exec = fixture.capture_decode(1);
    let probes = read_json("tests/probes/tiny.json");
    let list = |value: &serde_json::Value| -> Vec<u32> {
        value.as_array().expect("ids").iter().map(|id| id.as_u64().expect("an id") as u32).collect()
    };
    let (mut wrong, mut count) = (Vec::new(), 0);
    for probe in probes["probes"].as_array().expect("probes") {
        let text = |message: &serde_json::Value| message["content"].is_string();
        if !probe["messages"].as_array().expect("messages").iter().all(text) {
            continue;
        }
        let (prompt, expected) = (list(&probe["prompt_ids"]), list(&probe["bf16"]["ids"]));
        let mut lane = fixture.lane(0);
        let mut last = None;
        for piece in prompt.chunks(512) {
            let emission = fixture.prompt_emission(&mut lane, piece, Picks::Last);
            fixture.runner.stream.run(emission, &[]).expect("queued");
            last = fixture.runner.outcomes(1).expect("runs").pop();
        }
        let mut got = vec![last.expect("a last row").id];
        while got.len() < expected.len() {
            got.push(fixture.decode(&mut [&mut lane], Some(&exec))[0].id);
        }
        count += 1;
        if got != expected {
            wrong.push(probe["id"].to_string());
        }
    }
    assert!(count >= 20 && wrong.is_empty(), "{} of {count} differ: {wrong:?}", wrong.len());
}

/// As `logits_are_close_in_bf16` of the golden suite does on the host.
fn quantised_logits_are_close_by_the_rule_of_the_oracle() {
    let noises =
        cases("prefill_logits").into_iter().map(|case| case.number("/noise/bf16_sdpa_vs_f32/rms_rel"));
    let allowed = 1.5 * noises.fold(f64::MAX, f64::min) + 0.02;
    let device = cuda();
    for case in cases("quantised") {
        let size = Size { slots: 1, context: 512, rows: 320 };
        let mut fixture = Fixture::on(&device, &case.checkpoint(), ElementType::Bf16, size);
        for (name, ids, positions) in case.prompts() {
            let mut lane = fixture.lane(0);
            let logits = fixture.prompt(&mut lane, &ids);
            let vocab = logits.len() / ids.len();
            let got: Vec<f32> =
                positions.into_iter().flat_map(|at| logits[at * vocab..][..vocab].to_vec()).collect();
            let distance = rms_relative(&got, &case.tensor(&format!("{name}.logits_f32")).values);
            let id = case.id();
            assert!(distance <= allowed, "{id} {name}: rms distance {distance:.4}, allowed {allowed:.4}");
        }
    }
}

/// The tiny model, converted; and with dense projections that become fp8 while they are loaded.
fn receipts_hold_in_every_format() {
    let tiny = repository("models/tiny");
    let check = |dir: &Path, load, words: &str| {
        let (place, element, table) = (Place::Cuda(0), ElementType::Bf16, TablePlace::Device);
        let options =
            CheckOptions { place, element, load, table, exchange: Exchange::Auto, cases: 2, seed: 3 };
        for receipt in
            check(dir, &options, None, &mut |_| {}).unwrap_or_else(|error| panic!("{words}: {error}"))
        {
            assert!(receipt.passed && receipt.ids > 0 && receipt.pictured > 0, "{words}: {receipt}");
        }
    };
    for (experts, table) in
        [(Format::Bf16, Format::Fp8Tensor), (Format::Fp8, Format::Nvfp4), (Format::Nvfp4, Format::Fp8Tensor)]
    {
        for dense in [Format::Bf16, Format::Fp8] {
            let folder = tempfile::tempdir().expect("a folder");
            let (experts, dense, table) = (Some(experts), Some(dense), Some(table));
            let options = ConvertOptions { experts, dense, table, ..ConvertOptions::default() };
            let out = folder.path().join("out");
            convert(&tiny, &out, &options, &mut |_, _| {}).unwrap_or_else(|error| panic!("{error}"));
            check(&out, Load::default(), &format!("{options:?}"));
        }
    }
    check(&tiny, Load::Checkpoint { dense: DenseForm::Fp8 }, "--dense fp8");
}

fn schedules_leave_the_same_with_graphs_and_without() {
    let options = |graphs| EngineOptions { place: Place::Cuda(0), graphs, ..tight() };
    for (name, vocab, schedules) in
        [("base_bf16", 1009, 12), ("quant_fp8_block", 309, 4), ("quant_nvfp4", 309, 4)]
    {
        let dir = repository("tests/oracle/checkpoints").join(name);
        let engine = |graphs| {
            open(&dir, &options(graphs), &mut |_| {}).unwrap_or_else(|error| panic!("{error}")).engine
        };
        let (mut graph, mut eager) = (engine(true), engine(false));
        let mut random = Random::new(1);
        for _ in 0..schedules {
            let schedule = Schedule::random(&mut random, vocab, 9, 180, 14);
            let (a, b) =
                (play(&mut graph, &schedule).expect("runs"), play(&mut eager, &schedule).expect("runs"));
            assert!(a.lives == b.lives, "{name}: {}{schedule}", a.difference(&b));
        }
        assert!(graph.stats().rounds.replayed > 8 * schedules as u64, "{name}: {}", graph.stats().rounds);
    }
}
