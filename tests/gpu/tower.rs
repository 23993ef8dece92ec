//! The vision tower on CUDA: recorded features, pictures together, and the real shape.

use std::fs;
use std::time::Instant;

use crossbeam_channel::{Receiver, unbounded};
use graph::{CudaOptions, Device};
use kernels::numerics::ElementType;
use planner::RequestId;
use runtime::bench::time_tower;
use runtime::checkpoint::layout::Wanted;
use runtime::engine::{Class, Engine, EngineOptions, Event, Gone, Sink, Vision, open};
use runtime::open::Load;
use runtime::place::Place;
use runtime::request::Submission;
use runtime::tower::TowerLimits;
use tests::fixture::repository;
use tests::sight::{picture_of, pictures_leave_the_same_bytes};
use tests::tower::{self, Item, Rig, alone};

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("features_are_close_to_the_recorded_ones", features_are_close_to_the_recorded_ones),
    (
        "pictures_together_and_in_pieces_are_pictures_alone",
        pictures_together_and_in_pieces_are_pictures_alone,
    ),
    ("pictures_through_the_engine_leave_the_same_bytes", || pictures_leave_the_same_bytes(Place::Cuda(0))),
    ("real_pictures_together_are_pictures_alone", real_pictures_together_are_pictures_alone),
    ("a_picture_of_2040_tokens_is_timed", a_picture_of_2040_tokens_is_timed),
    ("text_rounds_beside_the_tower_are_as_quick", text_rounds_beside_the_tower_are_as_quick),
    ("a_picture_delays_others_by_a_round_and_a_piece", a_picture_delays_others_by_a_round_and_a_piece),
];

fn cuda() -> Device {
    let device = Device::cuda_with(CudaOptions { poison: true, ..CudaOptions::default() }).expect("a device");
    // All kernels of a source are compiled at once.
    device.prepare(kernels::source::ALL).expect("the kernels compile");
    device
}

fn features_are_close_to_the_recorded_ones() {
    tower::features_are_close_in_bf16(&cuda());
}

fn pictures_together_and_in_pieces_are_pictures_alone() {
    tower::pictures_together_and_in_pieces_are_pictures_alone(&cuda(), ElementType::Bf16);
}

/// The shape of the published model, with made weights: pictures at and off the edges of tiles, two of one size.
fn real_pictures_together_are_pictures_alone() {
    let dir = repository("models/real");
    let device = cuda();
    let item = |seed: usize, grid: [u32; 3]| {
        let patches = grid.iter().product::<u32>() as usize;
        Item { bytes: (0..patches * 1536).map(|at| (at * seed / 7 % 256) as u8).collect(), grid }
    };
    let items = vec![item(3, [1, 34, 60]), item(5, [1, 16, 16]), item(11, [3, 8, 14]), item(13, [1, 8, 14])];
    let mut rig = Rig::made(&device, &dir, TowerLimits::of(4096));
    let together = rig.encode(items.clone());
    assert!(together.features.iter().all(|x| x.is_finite() && x.abs() < 100.0), "features of made weights");
    assert!(alone(&mut rig, items.clone()) == together.features, "alone");
    drop(rig);
    let limits = TowerLimits { patches: 4096, piece: 1000 };
    assert!(Rig::made(&device, &dir, limits).encode(items) == together, "in pieces");
}

/// An engine with eight text layers of the real shape, whose first lane decodes.
fn talking(vision: Vision) -> (Engine, Receiver<Instant>) {
    let home = tempfile::tempdir().expect("a folder");
    for file in ["real/config.json", "tiny/preprocessor_config.json", "tiny/video_preprocessor_config.json"] {
        let from = repository("models").join(file);
        fs::copy(&from, home.path().join(from.file_name().expect("a name"))).expect("it is there");
    }
    let options = EngineOptions {
        place: Place::Cuda(0),
        load: Load::Dummy { layers: Some(8), seed: 1, stored: Wanted::default() },
        text: false,
        vision,
        classes: vec![Class { context: 8192, lanes: 2, pages: 0 }],
        ..EngineOptions::default()
    };
    let opened = open(home.path(), &options, &mut |_| {});
    let mut engine = opened.unwrap_or_else(|error| panic!("{error}")).engine;
    let mut submission = Submission::new((1..1000).collect());
    (submission.max_tokens, submission.ignore_eos) = (Some(7000), true);
    let (told, times) = unbounded();
    let sink = Sink::new(move |event| match event {
        Event::Token(_) => told.send(Instant::now()).map_err(|_| Gone),
        _ => Ok(()),
    });
    engine.submit(RequestId(1), submission, sink);
    while times.is_empty() {
        engine.turn().unwrap_or_else(|error| panic!("{error}"));
    }
    (engine, times)
}

/// Text rounds of the real shape, with its tower in memory and without, in turn. Says by how much they differ.
fn text_rounds_beside_the_tower_are_as_quick() {
    // One after another: both do not fit at once with all that they reserve.
    let median = |vision| {
        let (mut engine, _told) = talking(vision);
        let mut times = Vec::new();
        let mut last = Instant::now();
        while times.len() < 1500 {
            engine.metered_turn().unwrap_or_else(|error| panic!("{error}"));
            times.push(last.elapsed());
            last = Instant::now();
        }
        times.sort();
        times[times.len() / 2].as_secs_f64()
    };
    let [off, on] = [Vision::Off, Vision::Patches(8192)].map(median);
    let [off, on] = [off.min(median(Vision::Off)), on.min(median(Vision::Patches(8192)))];
    println!("a text round with the tower in memory: {:.4} ms; without: {:.4} ms", 1e3 * on, 1e3 * off);
    assert!(on < 1.01 * off, "{on} {off}");
}

/// A lane of text that decodes waits for a picture of 2,040 tokens as for as many of text, and while it is encoded for
/// less than a block of the tower at a time.
fn a_picture_delays_others_by_a_round_and_a_piece() {
    const GRID: [u32; 2] = [68, 120];
    let load = Load::Dummy { layers: Some(1), seed: 1, stored: Wanted::default() };
    let dir = repository("models/real");
    let line = time_tower(&dir, Place::Cuda(0), ElementType::Bf16, load, GRID, &mut |_| {}).expect("it runs");

    let (mut engine, told) = talking(Vision::Patches(8192));
    let vision = engine.runner().model.config.vision.as_ref().expect("it sees");
    let (image, depth) = (vision.tokens.image, vision.depth);
    let ms = |from: Instant, to: Instant| 1e3 * (to - from).as_secs_f64();
    let mut id = 1;
    // The longest waits between two tokens of the lane, until this request's first token and until it is encoded.
    let mut waits = |submission: Option<Submission>| {
        let (mut longest, mut encoding, mut last) = (0f64, 0f64, None);
        told.try_iter().for_each(|time| last = Some(time));
        let (first, firsts) = unbounded();
        let rounds = submission.is_none().then_some(300);
        if let Some(submission) = submission {
            id += 1;
            let sink = Sink::new(move |event| first.send(event).map_err(|_| Gone));
            engine.submit(RequestId(id), submission, sink);
        }
        let mut turns = 0;
        while rounds.map_or(firsts.is_empty(), |rounds| turns < rounds) {
            let encodes = engine.stats().encoding > 0;
            engine.turn().unwrap_or_else(|error| panic!("{error}"));
            for time in told.try_iter() {
                if let Some(last) = last.replace(time) {
                    longest = longest.max(ms(last, time));
                    encoding = if encodes { encoding.max(ms(last, time)) } else { encoding };
                }
            }
            turns += 1;
        }
        if rounds.is_none() {
            assert!(matches!(firsts.try_recv(), Ok(Event::Token(_))), "it is answered");
            engine.cancel(RequestId(id));
        }
        assert!(longest > 0.0, "the lane decodes");
        [longest, encoding]
    };
    let shown = |seed: u32| {
        let request = picture_of(GRID, seed, image);
        Submission { media: request.media, max_tokens: Some(1), ..Submission::new(request.prompt) }
    };
    let rows = shown(0).prompt.len() as u32;
    let written = |seed: u32| {
        let prompt = (0..rows).map(|at| (at * 53 + seed * 97) % 1000).collect();
        Submission { max_tokens: Some(1), ..Submission::new(prompt) }
    };
    // What the machine itself puts between two tokens now and then is none of ours: the least of a few.
    let least =
        |all: [[f64; 2]; 4]| all.into_iter().reduce(|a, b| [a[0].min(b[0]), a[1].min(b[1])]).expect("some");
    let [quiet, _] = least([0; 4].map(|_| waits(None)));
    let [text, _] = least([1, 2, 3, 4].map(|seed| waits(Some(written(seed)))));
    let [picture, encoding] = least([1, 2, 3, 4].map(|seed| waits(Some(shown(seed)))));
    let block = 1e3 * line.device_seconds / depth as f64;
    println!(
        "the longest wait between two tokens: {quiet:.2} ms alone, {text:.2} beside a prompt of {rows} ids, {picture:.2} \
         beside a picture of {} tokens, {encoding:.2} while it is encoded; a block of the tower: {block:.2} ms",
        line.tokens
    );
    assert!(encoding > 0.0 && encoding < quiet + block, "while it is encoded");
    assert!(picture < text + block, "until its first token");
}

/// Says what it takes; what it may take is for a bench on a device that does nothing else.
fn a_picture_of_2040_tokens_is_timed() {
    let load = Load::Dummy { layers: Some(1), seed: 1, stored: Default::default() };
    let dir = repository("models/real");
    let line =
        time_tower(&dir, Place::Cuda(0), ElementType::Bf16, load, [68, 120], &mut |_| {}).expect("it runs");
    println!("{line}");
    assert_eq!(line.tokens, 2040);
}
