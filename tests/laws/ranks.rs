//! Two ranks are one rank: the same ids, logits and state, byte for byte, in every format.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use graph::host::HostOptions;
use graph::{Communicator, Device};
use kernels::numerics::ElementType;
use kernels::table::Outcome;
use runtime::checkpoint::layout::Format;
use runtime::config::ModelConfig;
use runtime::convert::{ConvertOptions, Source, convert};
use runtime::share::Share;
use serde_json::Value;
use tests::fixture::{Fixture, Lane, Size, repository};

use crate::{ELEMENTS, bits, ids};

const SIZE: Size = Size { slots: 4, context: 512, rows: 320 };

/// How long a collective may wait for the other thread, which may be busy with a prompt.
const WAIT: Duration = Duration::from_secs(60);

/// What a rank saw: the logits of every round, and what it picked.
#[derive(Default)]
struct Seen {
    logits: Vec<Vec<u32>>,
    ids: Vec<u32>,
}

impl Seen {
    fn note(&mut self, outcomes: &[Outcome], logits: &[f32]) {
        self.ids.extend(outcomes.iter().map(|outcome| outcome.id));
        self.logits.push(bits(logits));
    }
}

/// Prompts of several lengths, decode rounds of some of the lanes, eager and replayed in turn, and a lane that comes late.
fn rounds(fixture: &mut Fixture) -> Seen {
    let mut seen = Seen::default();
    let vocab = fixture.runner.model.config.vocab_size as u32;
    let ids = |count: usize, seed: u32| ids(count, seed).into_iter().map(|id| id % vocab).collect::<Vec<_>>();
    let mut lanes: Vec<Lane> = (0..3).map(|slot| fixture.lane(slot)).collect();
    for (lane, length) in lanes.iter_mut().zip([1, 70, 130]) {
        let logits = fixture.prompt(lane, &ids(length, length as u32));
        seen.note(&[], &logits);
    }
    for round in 0..6 {
        if round == 3 {
            let mut late = fixture.lane(3);
            let logits = fixture.prompt(&mut late, &ids(33, 7));
            seen.note(&[], &logits);
            lanes.push(late);
        }
        let mut some: Vec<&mut Lane> = lanes.iter_mut().skip(round % 2).collect();
        let count = some.len();
        let exec = (round % 3 == 1).then(|| fixture.capture_decode(count));
        let outcomes = fixture.decode(&mut some, exec.as_ref());
        let logits = fixture.runner.logits(count).expect("read");
        seen.note(&outcomes, &logits);
    }
    seen
}

/// Runs the same on both ranks, each a thread with a device of its own.
fn on_two(dir: &Path, element: ElementType) -> [Seen; 2] {
    let ranks = Communicator::pair(WAIT).map(|communicator| {
        let dir = dir.to_owned();
        thread::spawn(move || {
            let device = Device::host(HostOptions::default());
            rounds(&mut Fixture::share(&device, &dir, element, SIZE, communicator))
        })
    });
    ranks.map(|rank| rank.join().expect("a rank runs"))
}

fn two_are_one(dir: &Path, element: ElementType) {
    let name = dir.display();
    let one = rounds(&mut Fixture::open(dir, element, SIZE));
    for (rank, seen) in on_two(dir, element).into_iter().enumerate() {
        assert_eq!(seen.ids, one.ids, "{name} in {}: ids of rank {rank}", element.name());
        let same = seen.logits.iter().zip(&one.logits).position(|(two, one)| two != one);
        assert_eq!(same, None, "{name} in {}: the first round of rank {rank} that differs", element.name());
        assert_eq!(seen.logits.len(), one.logits.len());
    }
}

/// Doubles or halves the numbers of some runs of 128 columns of every matrix, so that each block has another scale.
fn unlike_blocks(file: &Path) {
    let mut bytes = fs::read(file).expect("weights");
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("a length")) as usize + 8;
    let tensors: Value = serde_json::from_slice(&bytes[8..header]).expect("a header");
    let number = |value: &Value| value.as_u64().expect("a number") as usize;
    let mut changed = 0;
    for (_, tensor) in tensors.as_object().expect("tensors") {
        let width = match tensor["shape"].as_array().map(|shape| (shape.len(), shape.last())) {
            Some((2.., Some(width))) if tensor["dtype"] == "BF16" && number(width) >= 128 => number(width),
            _ => continue,
        };
        let offsets = &tensor["data_offsets"];
        let numbers = &mut bytes[header + number(&offsets[0])..header + number(&offsets[1])];
        for (at, bits) in numbers.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let value = u16::from_le_bytes(*bits);
            let exponent = i32::from(value >> 7 & 255) + [0, 1, -1, 2][at % width / 128 % 4];
            if (2..200).contains(&exponent) {
                *bits = (value & 0x807f | (exponent as u16) << 7).to_le_bytes();
            }
        }
        changed += 1;
    }
    assert!(changed > 40);
    fs::write(file, bytes).expect("weights");
}

/// Widths whose halves begin inside of a block of fp8, and go on past its end.
#[test]
fn blocks_across_the_cut_are_shared() {
    let (home, made) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let text = fs::read_to_string(repository("models/tiny/config.json")).expect("settings");
    let mut config: Value = serde_json::from_str(&text).expect("JSON");
    for (name, size) in [
        ("moe_intermediate_size", 640),
        ("shared_expert_intermediate_size", 384),
        ("linear_value_head_dim", 96),
    ] {
        config["text_config"][name] = size.into();
    }
    fs::write(home.path().join("config.json"), config.to_string()).expect("settings");
    let plain = made.path().join("plain");
    let from = Source::Made { layers: Some(4), seed: 3 };
    let options = ConvertOptions { from, ..ConvertOptions::default() };
    convert(home.path(), &plain, &options, &mut |_, _| {}).expect("it is made");
    unlike_blocks(&plain.join("model.safetensors"));
    for (experts, dense) in [
        (Format::Fp8, Format::Fp8),
        (Format::Nvfp4, Format::Fp8),
        (Format::Fp8, Format::Bf16),
        (Format::Bf16, Format::Bf16),
    ] {
        let out = made.path().join(format!("{experts} {dense}"));
        let options =
            ConvertOptions { experts: Some(experts), dense: Some(dense), ..ConvertOptions::default() };
        convert(&plain, &out, &options, &mut |_, _| {}).expect("it is converted");
        two_are_one(&out, ElementType::Bf16);
    }
}

#[test]
fn two_ranks_are_one() {
    let mut shared = 0;
    let folder = repository("tests/oracle/checkpoints");
    let mut folders: Vec<_> =
        folder.read_dir().expect("it is there").map(|entry| entry.expect("read").path()).collect();
    folders.sort();
    // Its 451 ids cannot be halved.
    let odd = folder.join("ratio2_oddheads");
    for dir in folders.into_iter().filter(|dir| *dir != odd).chain([repository("models/tiny")]) {
        for element in ELEMENTS {
            two_are_one(&dir, element);
            shared += 1;
        }
    }
    assert_eq!(shared, 14);
    let config = ModelConfig::open(&odd).expect("it is there");
    let why = Share::new(1, 2).expect("a rank of two").of(&config).expect_err("451 ids").to_string();
    assert!(why.contains("vocab_size is 451"), "{why}");
}
