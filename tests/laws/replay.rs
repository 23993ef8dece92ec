//! A replayed decode round is the eager one, over whole runs; and a run is a run.

use graph::Exec;
use kernels::numerics::ElementType;
use runtime::lanes::Lanes;
use tests::fixture::{Fixture, Lane};

use crate::{ELEMENTS, bits, ids, small};

/// On CUDA the down projections read the chosen experts while the launch ahead of them runs: it must be the one
/// that starts them when those are complete.
/// Launches whose CUDA twins read what older launches wrote before they wait, and the launch that each must follow:
/// that one lets it start only after its own wait.
const EARLY: [(&str, &str); 4] = [
    ("delta_step", "conv"),
    ("experts_down", "experts_up"),
    ("attend_part", "index_top"),
    ("attend_join", "attend_part"),
];

#[test]
fn launches_that_read_early_follow_one_that_starts_them_late() {
    let fixture = small(ElementType::Bf16, 3);
    let emission = fixture.decode_emission(2);
    let names: Vec<&str> = emission
        .entries()
        .iter()
        .filter_map(|entry| match entry {
            graph::Entry::Launch { kernel, .. } => Some(kernel.name),
            _ => None,
        })
        .collect();
    for (early, ahead) in EARLY {
        let places: Vec<usize> = (0..names.len()).filter(|&at| names[at] == early).collect();
        assert!(!places.is_empty(), "no {early} in {names:?}");
        assert!(
            places.iter().all(|&at| names[at - 1] == ahead),
            "{early} does not follow {ahead}: {names:?}"
        );
    }
}

/// What a run leaves: ids and logits of every round, and the digest of every lane at the end.
#[derive(PartialEq, Debug)]
struct Trail {
    ids: Vec<u32>,
    logits: Vec<Vec<u32>>,
    states: Vec<graph::Digest>,
}

/// Prompts of these lengths, then `rounds` decode rounds of all lanes.
fn run(fixture: &mut Fixture, lengths: &[usize], rounds: usize, exec: Option<&Exec>) -> Trail {
    let mut lanes: Vec<Lane> = (0..lengths.len()).map(|slot| fixture.lane(slot)).collect();
    for (lane, length) in lanes.iter_mut().zip(lengths) {
        fixture.prompt(lane, &ids(*length, *length as u32));
    }
    let mut trail = Trail { ids: Vec::new(), logits: Vec::new(), states: Vec::new() };
    for _ in 0..rounds {
        let mut all: Vec<&mut Lane> = lanes.iter_mut().collect();
        let outcomes = fixture.decode(&mut all, exec);
        assert!(outcomes.iter().all(|outcome| outcome.status == 0), "logits are finite");
        trail.ids.extend(outcomes.iter().map(|outcome| outcome.id));
        trail.logits.push(bits(&fixture.runner.logits(lengths.len()).expect("read")));
    }
    let digest = |lane| fixture.bundle(lane).digest(&fixture.runner.stream).expect("read").whole();
    trail.states = lanes.iter().map(digest).collect();
    trail
}

#[test]
fn replayed_rounds_are_eager_rounds() {
    // Lengths on both sides of a page, of a block and of the sparse limit.
    for lengths in [&[1][..], &[63], &[64], &[17, 127], &[130, 3, 62, 20, 19]] {
        for element in ELEMENTS {
            let mut fixture = small(element, lengths.len());
            let exec = fixture.capture_decode(lengths.len());
            assert_eq!(exec.digest(), fixture.decode_emission(lengths.len()).digest());
            let eager = run(&mut fixture, lengths, 12, None);
            let replayed = run(&mut fixture, lengths, 12, Some(&exec));
            assert!(eager == replayed, "{} lanes of {lengths:?} in {}", lengths.len(), element.name());
            let again = run(&mut fixture, lengths, 12, Some(&exec));
            assert!(replayed == again, "run = run, {lengths:?} in {}", element.name());
        }
    }
}

/// The emission of a decode round depends on its shape alone: not on lengths, slots, order or content.
#[test]
fn one_emission_serves_every_round_of_a_shape() {
    let mut fixture = small(ElementType::Bf16, 3);
    let before = fixture.decode_emission(2).digest();
    let (mut a, mut b) = (fixture.lane(2), fixture.lane(0));
    fixture.prompt(&mut a, &ids(70, 1));
    fixture.prompt(&mut b, &ids(5, 2));
    for _ in 0..70 {
        fixture.decode(&mut [&mut a, &mut b], None);
        assert_eq!(fixture.decode_emission(2).digest(), before);
    }
    assert_ne!(fixture.decode_emission(1).digest(), before);
    let lanes = &fixture.lanes;
    let other =
        Lanes::new(&fixture.runner.device, 0, lanes.layout.clone(), 3, lanes.pool.clone()).expect("memory");
    assert_ne!(other.digest(), lanes.digest(), "another slab has another buffer digest");
    fixture.lanes = other;
    assert_ne!(fixture.decode_emission(2).digest(), before, "and another emission");
}
