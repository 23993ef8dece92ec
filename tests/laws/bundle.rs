//! The bundle holds all of a lane's state: restored it goes on as the original, and no part can be left out.

use kernels::numerics::ElementType;
use kernels::table::{Bias, PAGE, Sampling};
use runtime::bundle::{Bundle, BundleDigest};
use tests::fixture::{Fixture, Lane};

use crate::{ELEMENTS, assert_same_state, bits, ids, small};

/// A prompt that ends inside a page, inside an index block, past the sparse limit.
const LENGTH: usize = PAGE + 6;
/// Rounds that follow: enough to complete the open block, few enough that no window is rewritten whole.
const ROUNDS: usize = 4;

/// The logits of the next rounds, and the state after them.
fn go_on(fixture: &mut Fixture, lane: &mut Lane) -> (Vec<Vec<u32>>, BundleDigest) {
    let round = |fixture: &mut Fixture, lane: &mut Lane| {
        fixture.decode(&mut [lane], None);
        bits(&fixture.runner.logits(1).expect("read"))
    };
    let logits = (0..ROUNDS).map(|_| round(fixture, lane)).collect();
    (logits, fixture.bundle(lane).digest(&fixture.runner.stream).expect("read"))
}

/// Overwrites a lane's slot (but for its page table) and pages.
fn wreck(fixture: &Fixture, lane: &Lane) {
    let layout = &fixture.lanes.layout;
    for (_, span) in layout.parts() {
        let at = span.at(fixture.lanes.slab.slot(lane.slot));
        fixture.lanes.slab.arena().write(at, &vec![0xffu8; span.bytes]).expect("written");
    }
    for page in lane.pages.iter().take(LENGTH.div_ceil(PAGE)) {
        let at = fixture.lanes.pool.arena.base().byte_add(*page as usize * layout.page_bytes);
        fixture.lanes.pool.arena.write(at, &vec![0xffu8; layout.page_bytes]).expect("written");
    }
}

#[test]
fn a_restored_bundle_goes_on_as_the_original() {
    for element in ELEMENTS {
        let mut fixture = small(element, 1);
        let mut lane = fixture.lane(0);
        fixture.prompt(&mut lane, &ids(LENGTH, 4));
        let at_mark = lane.clone();
        let (device, stream) = (fixture.runner.device.clone(), fixture.runner.stream.clone());
        let snapshot = fixture.bundle(&lane).snapshot(&device, &stream).expect("taken");
        let before = fixture.bundle(&lane).digest(&stream).expect("read");
        let expected = go_on(&mut fixture, &mut lane);
        wreck(&fixture, &at_mark);
        fixture.bundle(&at_mark).restore(&snapshot, &stream).expect("restored");
        let after = fixture.bundle(&at_mark).digest(&stream).expect("read");
        assert!(before == after, "restored state differs in {:?}", before.differences(&after));
        let got = go_on(&mut fixture, &mut at_mark.clone());
        assert_eq!(got.0, expected.0);
        assert!(got.1 == expected.1, "in {:?}", got.1.differences(&expected.1));
    }
}

#[test]
fn a_copied_bundle_goes_on_as_the_original() {
    for element in ELEMENTS {
        let mut fixture = small(element, 2);
        let (mut original, mut copy) = (fixture.lane(0), fixture.lane(1));
        fixture.prompt(&mut original, &ids(LENGTH, 4));
        // The copy's table names its own pages once it has run a prompt of the same length.
        fixture.prompt(&mut copy, &ids(LENGTH, 5));
        wreck(&fixture, &copy);
        let mut emission = graph::Emission::new();
        fixture.bundle(&original).copy_to(&fixture.bundle(&copy), &mut emission);
        fixture.runner.stream.run(emission, &[]).expect("queued");
        assert_same_state("copy against original", &fixture, &original, &copy);
        assert_eq!(go_on(&mut fixture, &mut copy), go_on(&mut fixture, &mut original));
    }
}

/// Planted faults: each part of the bundle, and the pages, are lost in turn after a restore. What follows
/// must show it, in the logits or in another part.
#[test]
fn no_part_of_the_bundle_can_be_left_out() {
    let mut fixture = small(ElementType::F32, 1);
    let mut lane = fixture.lane(0);
    let prompt = ids(LENGTH, 4);
    // The first id would win if the penalty did not know that it occurs in the prompt; the others take turns.
    let others = (0..1000).filter(|id| !prompt.contains(id)).take(2 * ROUNDS);
    let mut biases = vec![Bias { id: prompt[3], value: 100.0 }];
    biases.extend(others.map(|id| Bias { id, value: 90.0 }));
    fixture.sampling = Sampling { repetition: 1.5, biases: biases.len() as u32, ..Sampling::default() };
    fixture.runner.stage_biases(&fixture.lanes, 0, &biases).expect("staged");
    fixture.prompt(&mut lane, &prompt);
    let at_mark = lane.clone();
    let (device, stream) = (fixture.runner.device.clone(), fixture.runner.stream.clone());
    let snapshot = fixture.bundle(&lane).snapshot(&device, &stream).expect("taken");
    let expected = go_on(&mut fixture, &mut lane);

    let layout = fixture.lanes.layout.clone();
    let parts: Vec<(String, graph::Span)> =
        layout.parts().map(|(label, span)| (label.into(), span)).collect();
    assert!(parts.len() > 12, "head, rings, states, windows: {}", parts.len());
    for (label, span) in &parts {
        let mut lane = at_mark.clone();
        fixture.bundle(&lane).restore(&snapshot, &stream).expect("restored");
        stream.synchronize().expect("ran");
        // The head keeps its length here, or the lane would only be shorter.
        let lost = if label == "head" { 4..span.bytes } else { 0..span.bytes };
        let at = span.at::<u8>(fixture.lanes.slab.slot(0)).byte_add(lost.start);
        fixture.lanes.slab.arena().write(at, &vec![0u8; lost.len()]).expect("written");
        let got = go_on(&mut fixture, &mut lane);
        let elsewhere = got.1.differences(&expected.1).iter().any(|part| *part != label);
        assert!(got.0 != expected.0 || elsewhere, "losing `{label}` changed nothing");
    }

    let mut lane = at_mark.clone();
    fixture.bundle(&lane).restore(&snapshot, &stream).expect("restored");
    stream.synchronize().expect("ran");
    let page = lane.pages[0] as usize * layout.page_bytes;
    let at = fixture.lanes.pool.arena.base().byte_add(page);
    fixture.lanes.pool.arena.write(at, &vec![0u8; layout.page_bytes]).expect("written");
    assert_ne!(go_on(&mut fixture, &mut lane).0, expected.0, "losing a page changed nothing");
}

#[test]
fn a_zeroed_bundle_is_a_fresh_lane() {
    let mut fixture = small(ElementType::Bf16, 1);
    let fresh = fixture.lane(0);
    let expected = fixture.bundle(&fresh).digest(&fixture.runner.stream).expect("read");
    let mut used = fixture.lane(0);
    fixture.prompt(&mut used, &ids(LENGTH, 4));
    let mut emission = graph::Emission::new();
    Bundle { length: 0, ..fixture.bundle(&used) }.zero(&mut emission);
    fixture.runner.stream.run(emission, &[]).expect("queued");
    let got = fixture.bundle(&fresh).digest(&fixture.runner.stream).expect("read");
    assert!(got == expected, "in {:?}", got.differences(&expected));
}
