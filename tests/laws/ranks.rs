//! Two ranks are one rank: the same ids, logits and state, byte for byte, in every format.

use std::path::Path;
use std::thread;
use std::time::Duration;

use graph::host::HostOptions;
use graph::{Communicator, Device};
use kernels::numerics::ElementType;
use kernels::table::Outcome;
use runtime::config::ModelConfig;
use runtime::share::Share;
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
