//! The round key: equal keys mean equal emissions, and with any field erased they no longer do.
//!
//! One field cannot vary in a run today, and nothing here pretends to test it: `layout` is a constant of the build. It
//! tells graphs of two builds apart only where graphs outlive a process.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use graph::{Communicator, Digest, Key};
use kernels::numerics::ElementType;
use kernels::table::Kind;
use kernels::weight::Order;
use runtime::checkpoint::Checkpoint;
use runtime::lanes::{LaneLayout, Lanes, PagePool};
use runtime::model::{Group, Picks, RoundShape};
use runtime::runner::Runner;
use runtime::scratch::RoundLimits;
use runtime::share::Share;
use runtime::weights::{WeightForm, WeightPlan};
use tests::fixture::{Fixture, repository};

use crate::{CHECKPOINT, fixture, ids};

/// A round: what it is, its key, and the digest of its emission.
pub(crate) struct Round {
    pub(crate) what: String,
    pub(crate) key: Key,
    pub(crate) emission: Digest,
}

/// What may be forgotten in a key.
pub(crate) const FAULTS: [(&str, fn(&mut Key)); 9] = [
    ("kind", |key| key.kind = ""),
    ("digests", |key| key.buffers.iter_mut().for_each(|buffers| buffers.digest = Digest::default())),
    ("row counts", |key| key.buffers.iter_mut().for_each(|buffers| buffers.rows = 0)),
    ("row counts but for their sum", |key| {
        let rows = key.rows();
        key.buffers.iter_mut().for_each(|buffers| buffers.rows = 0);
        key.buffers[0].rows = rows;
    }),
    ("order", |key| key.buffers.sort_by_key(|buffers| (buffers.digest, buffers.rows))),
    ("scratch", |key| key.scratch = 0),
    ("weights", |key| key.weights = 0),
    ("communicator", |key| key.communicator = 0),
    ("split", |key| key.split = 0),
];

/// Adds rounds of many shapes over three slabs.
fn collect(when: &str, runner: &Runner, slabs: &[&Lanes; 3], rounds: &mut Vec<Round>) {
    const SPLITS: [&[(usize, usize)]; 15] = [
        &[(0, 1)],
        &[(0, 2)],
        &[(0, 3)],
        &[(1, 1)],
        &[(1, 2)],
        &[(2, 1)],
        &[(2, 2)],
        &[(0, 1), (1, 2)],
        &[(1, 2), (0, 1)],
        &[(0, 2), (1, 1)],
        &[(1, 1), (0, 2)],
        &[(0, 1), (2, 1)],
        &[(1, 1), (2, 1)],
        &[(0, 1), (1, 1), (2, 1)],
        &[(2, 1), (1, 1), (0, 1)],
    ];
    for split in SPLITS {
        let groups: Vec<Group<'_>> =
            split.iter().map(|&(slab, rows)| Group { lanes: slabs[slab], rows }).collect();
        for kind in [Kind::Prompt, Kind::Decode] {
            for picks in [Picks::All, Picks::Last, Picks::None] {
                let shape = RoundShape { kind, groups: &groups, picks };
                rounds.push(Round {
                    what: format!("{when}: {kind:?} {picks:?} of (slab, rows) {split:?}"),
                    key: runner.key(&shape),
                    emission: runner.emission(&shape).expect("legal launches").digest(),
                });
            }
        }
    }
}

/// Rounds of many shapes at several moments of one device's life.
fn rounds() -> Vec<Round> {
    let mut fixture = fixture(3);
    let device = fixture.runner.device.clone();
    let first = fixture.lanes.clone();
    let second = Lanes::new(&device, 1, first.layout.clone(), 3, first.pool.clone()).expect("memory");
    let layout = Arc::new(LaneLayout::new(&fixture.runner.model.config, ElementType::Bf16, 128));
    let pool = PagePool::new(&device, &layout, 4).expect("memory");
    let other_class = Lanes::new(&device, 2, layout, 3, pool).expect("memory");
    let slabs = [&first, &second, &other_class];

    let mut rounds = Vec::new();
    collect("fresh", &fixture.runner, &slabs, &mut rounds);
    work(&mut fixture);
    collect("after rounds", &fixture.runner, &slabs, &mut rounds);
    let limits = fixture.runner.scratch.limits;
    fixture.runner.reserve(limits).expect("nothing to do");
    collect("reserved what there was", &fixture.runner, &slabs, &mut rounds);
    let limits = RoundLimits { rows: limits.rows + 64, ..limits };
    fixture.runner.reserve(limits).expect("memory");
    collect("larger buffers", &fixture.runner, &slabs, &mut rounds);
    work(&mut fixture);
    collect("larger buffers, after rounds", &fixture.runner, &slabs, &mut rounds);
    let checkpoint = Checkpoint::open(&repository(CHECKPOINT)).expect("a checkpoint");
    let form = WeightForm::new(ElementType::Bf16, Order::of(&device));
    let plan = WeightPlan::new(&checkpoint, form).expect("a plan");
    let loaded = plan.load(&checkpoint, &device, &mut |_, _| {}).expect("memory");
    (fixture.runner.weights, fixture.runner.model.weights) = (loaded.memory, loaded.weights);
    collect("weights loaded again", &fixture.runner, &slabs, &mut rounds);
    // Of a rank whose weights these could be: nothing of it runs.
    fixture.runner.model.share = Share::new(0, 2).expect("a rank of two");
    collect("as one of two ranks", &fixture.runner, &slabs, &mut rounds);
    for when in ["with a communicator", "with another one"] {
        let [communicator, _] = Communicator::pair(Duration::ZERO);
        fixture.runner.model.communicator = Some(communicator);
        collect(when, &fixture.runner, &slabs, &mut rounds);
    }
    rounds
}

/// Changes all that a round may leave behind.
fn work(fixture: &mut Fixture) {
    let (mut a, mut b) = (fixture.lane(0), fixture.lane(2));
    fixture.prompt(&mut a, &ids(70, 1));
    fixture.decode(&mut [&mut a, &mut b], None);
}

/// Two rounds with equal keys and different emissions, if there are any once `fault` has changed the keys.
pub(crate) fn unsound(rounds: &[Round], fault: impl Fn(&mut Key)) -> Option<[&Round; 2]> {
    let mut first: HashMap<Key, &Round> = HashMap::new();
    rounds.iter().find_map(|round| {
        let mut key = round.key.clone();
        fault(&mut key);
        let known = *first.entry(key).or_insert(round);
        (known.emission != round.emission).then_some([known, round])
    })
}

#[test]
fn any_field_erased_from_the_key_makes_it_unsound() {
    let rounds = rounds();
    if let Some([a, b]) = unsound(&rounds, |_| ()) {
        panic!("equal keys ({}) of different emissions:\n{}\n{}", a.key, a.what, b.what);
    }
    // Keys that are equal come from different moments, or the line above compared nothing.
    let distinct: std::collections::HashSet<&Key> = rounds.iter().map(|round| &round.key).collect();
    assert_eq!((rounds.len(), distinct.len()), (9 * 90, 6 * 90));

    for (field, fault) in FAULTS {
        let [a, b] = unsound(&rounds, fault).unwrap_or_else(|| panic!("nothing needs {field} in the key"));
        assert_ne!(a.key, b.key, "only without {field}");
    }
}

/// Which rows reach the head is part of the kind, and so is the kind of the rows.
#[test]
fn the_kind_tells_every_body_apart() {
    let fixture = fixture(1);
    let groups = [Group { lanes: &fixture.lanes, rows: 3 }];
    let mut emissions = HashMap::new();
    for kind in [Kind::Prompt, Kind::Decode] {
        for picks in [Picks::All, Picks::Last, Picks::None] {
            let shape = RoundShape { kind, groups: &groups, picks };
            let emission = fixture.runner.emission(&shape).expect("legal launches").digest();
            assert_eq!(emissions.insert(fixture.runner.key(&shape).kind, emission), None);
        }
    }
    let distinct: std::collections::HashSet<Digest> = emissions.values().copied().collect();
    assert_eq!((emissions.len(), distinct.len()), (6, 6));
}
