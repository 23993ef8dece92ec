//! Made weights: a model that is only a shape runs, stays finite, and is what its seed says.

use std::path::Path;

use kernels::numerics::ElementType;
use runtime::checkpoint::layout::{Format, Wanted};
use runtime::engine::{Class, EngineOptions, Place, open_opened};
use runtime::open::{Load, Opened};
use runtime::probe::{Logits, LogitsOptions, LogitsRequest, logits};
use runtime::receipts::{Planned, Random, Schedule, play};
use runtime::weights::{TablePlace, WeightForm};
use tests::fixture::repository;

fn dummy(layers: Option<usize>, seed: u64) -> Load {
    Load::Dummy { layers, seed, stored: Wanted::default() }
}

/// Every combination of formats.
fn formats() -> impl Iterator<Item = Wanted> {
    let tables = [Format::Bf16, Format::Fp8Tensor, Format::Nvfp4];
    let experts = [Format::Bf16, Format::Fp8, Format::Nvfp4];
    let dense = [Format::Bf16, Format::Fp8];
    let all =
        experts.into_iter().flat_map(move |experts| dense.into_iter().map(move |dense| (experts, dense)));
    all.flat_map(move |(experts, dense)| {
        tables.into_iter().map(move |table| Wanted { experts, dense, table })
    })
}

fn form() -> WeightForm {
    Place::Host.form(ElementType::Bf16, TablePlace::Device)
}

fn some_logits(element: ElementType, load: Load) -> Logits {
    let request =
        LogitsRequest { ids: (10..90).collect(), decode_from: Some(70), ..LogitsRequest::default() };
    let options = LogitsOptions { element, load, ..LogitsOptions::default() };
    logits(&repository("models/tiny"), &options, &request, &mut |_| {}).unwrap()
}

/// What a few requests get from an engine with made weights, in a folder without weights and texts.
fn played(dir: &Path, seed: u64) -> Vec<Vec<u32>> {
    let options = EngineOptions {
        load: dummy(None, seed),
        classes: vec![Class { context: 256, lanes: 4, pages: 0 }],
        depth: 1,
        trace: true,
        ..EngineOptions::default()
    };
    let opened = Opened::without_text(dir, form(), options.load).unwrap();
    let mut engine = open_opened(opened, &options, &mut |_| {}).unwrap().engine;
    let mut random = Random::new(3);
    let schedules = (0..4).map(|_| Schedule::random(&mut random, 2000, 4, 100, 12));
    let requests: Vec<Planned> = schedules
        .flat_map(|schedule| schedule.requests)
        .map(|planned| Planned { cancel: None, ..planned })
        .collect();
    play(&mut engine, &Schedule { requests }).unwrap().lives.into_iter().map(|life| life.ids).collect()
}

#[test]
fn a_made_model_stays_finite_and_is_its_seed() {
    for element in [ElementType::Bf16, ElementType::F32] {
        let [one, again, other] = [1, 1, 2].map(|seed| some_logits(element, dummy(None, seed)).data);
        assert!(one.iter().all(|logit| logit.is_finite() && logit.abs() < 100.0));
        assert!(one.iter().any(|logit| logit.abs() > 0.05), "the logits say nothing");
        assert_eq!(one, again);
        assert_ne!(one, other);
    }
}

/// In every format, with logits about as large as those of plain weights.
#[test]
fn a_made_model_may_be_quantised() {
    let size = |logits: &[f32]| (logits.iter().map(|l| l * l).sum::<f32>() / logits.len() as f32).sqrt();
    let mut seen: Vec<Vec<f32>> = Vec::new();
    for stored in formats() {
        let made = |seed| some_logits(ElementType::Bf16, Load::Dummy { layers: None, seed, stored }).data;
        let (one, other) = (made(1), made(2));
        assert!(one.iter().all(|logit| logit.is_finite()), "{stored:?}");
        assert!(one != other && !seen.contains(&one), "{stored:?}");
        seen.push(one);
        let ratio = size(seen.last().expect("just pushed")) / size(&seen[0]);
        assert!((0.5..2.0).contains(&ratio), "{stored:?}: {ratio}");
    }
}

#[test]
fn a_folder_of_a_config_alone_runs_requests() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(repository("models/tiny/config.json"), dir.path().join("config.json")).unwrap();
    let [one, again, other] = [1, 1, 2].map(|seed| played(dir.path(), seed));
    assert!(one.iter().any(|ids| ids.len() > 4), "{one:?}");
    assert_eq!(one, again);
    assert_ne!(one, other);
    assert!(Opened::with(dir.path(), form(), dummy(None, 1)).is_err(), "there is no tokenizer");
}

#[test]
fn the_first_layers_are_those_of_the_config() {
    let dir = repository("models/tiny");
    let open = |layers| Opened::without_text(&dir, form(), dummy(layers, 1));
    let whole = open(None).unwrap();
    for layers in [1, 2, 5] {
        let part = open(Some(layers)).unwrap();
        let (config, full) = (&part.checkpoint.config, &whole.checkpoint.config);
        assert_eq!(config.layers, full.layers[..layers]);
        assert_eq!(config.ple.len(), usize::from(layers > 1), "the n-gram embedding is in layer 1");
        assert_eq!((part.full_layers, config.num_hidden_layers), (8, layers));
        assert!(part.weights.bytes() < whole.weights.bytes());
        assert!(some_logits(ElementType::Bf16, dummy(Some(layers), 1)).data.iter().all(|l| l.is_finite()));
    }
    for layers in [0, 9] {
        let error = open(Some(layers)).err().unwrap().to_string();
        assert!(error.contains(&format!("--layers {layers}")) && error.contains('8'), "{error}");
    }
}

#[test]
fn the_real_shape_has_the_published_sizes() {
    let dir = repository("models/real");
    let opened = Opened::without_text(&dir, form(), dummy(None, 1)).unwrap();
    let published = 120_795_955_200u64 + 3_676_300_160 + 1_271_398_400;
    let rest = opened.weights.bytes();
    // Spans start on a grid, and two kinds of weights are f32.
    let over = rest as f64 / 2.0 / published as f64 - 1.0;
    assert!((0.0..1e-5).contains(&over), "{rest} bytes");
    // 16 heads of a little over a million rows of 160 values.
    assert!((5_120_000_000..5_130_000_000).contains(&opened.weights.table_bytes()));
    let first = Opened::without_text(&dir, form(), dummy(Some(1), 1)).unwrap();
    assert_eq!(first.weights.table_bytes(), 0);
    // As the public NVFP4 checkpoint: 2,764,812 bytes of an expert, whose number for a whole tensor lies with every row
    // here, and a whole table outside of device memory.
    let stored = Wanted { experts: Format::Nvfp4, table: Format::Fp8Tensor, ..Wanted::default() };
    let pinned = Place::Host.form(ElementType::Bf16, TablePlace::Pinned);
    let load = Load::Dummy { layers: None, seed: 1, stored };
    let opened = Opened::without_text(&dir, pinned, load).unwrap();
    let published = 48 * 512 * (2_764_800 + 4 * 3840) as u64 + 2 * (3_676_300_160 + 1_271_398_400);
    let over = opened.weights.bytes() as f64 / published as f64 - 1.0;
    assert!((0.0..1e-4).contains(&over), "{} bytes, not {published}", opened.weights.bytes());
    assert_eq!(opened.weights.table_bytes(), 320_001_536 * 160);
}

#[test]
fn what_does_not_fit_is_said_before_it_is_made() {
    let options = EngineOptions {
        load: dummy(None, 1),
        classes: vec![Class { context: 512, lanes: 1, pages: u32::MAX >> 8 }],
        ..EngineOptions::default()
    };
    let opened = Opened::without_text(&repository("models/real"), form(), options.load).unwrap();
    let error = open_opened(opened, &options, &mut |_| {}).err().unwrap().to_string();
    for word in ["does not fit the device", "free", "pages", "fewer --layers"] {
        assert!(error.contains(word), "{error}");
    }
}

#[test]
fn made_tables_live_in_memory_alone() {
    let dir = repository("models/tiny");
    let request =
        LogitsRequest { ids: (10..90).collect(), decode_from: Some(70), ..LogitsRequest::default() };
    let run = |table| {
        let options = LogitsOptions { load: dummy(None, 1), table, ..LogitsOptions::default() };
        logits(&dir, &options, &request, &mut |_| {})
    };
    let [device, pinned] = [TablePlace::Device, TablePlace::Pinned].map(|table| run(table).unwrap().data);
    assert!(device == pinned, "they are the same wherever they live");
    let error = run(TablePlace::Mapped).err().unwrap().to_string();
    for word in ["--table mmap", "--load dummy", "--table pinned"] {
        assert!(error.contains(word), "{word:?} is not in: {error}");
    }
}
