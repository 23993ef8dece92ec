//! The fences between host and device: without one, a schedule goes wrong and is caught.

use kernels::table::{Bias, Outcome};
use planner::ClassId;
use runtime::engine::EngineOptions;
use runtime::receipts::{Life, Planned, Schedule, play};
use runtime::runner::Ring;
use runtime::sampling::SamplingOptions;
use tests::fixture::{Fixture, Lane};

use crate::{engine, fixture, ids, options};

/// Two requests: one whose prompt takes many rounds that nobody reads, and one beside it.
fn requests() -> Schedule {
    let request = |prompt: Vec<u32>| Planned {
        arrive: 0,
        prompt,
        max_tokens: 8,
        sampling: SamplingOptions::default(),
        cancel: None,
        class: ClassId(0),
        media: Vec::new(),
    };
    Schedule { requests: vec![request(ids(300, 3)), request(ids(9, 4))] }
}

/// What the requests saw on an engine that overlaps rounds, without one of the fences.
fn overlapped(without: Option<Ring>) -> Result<Vec<Life>, String> {
    let mut engine = engine(EngineOptions { depth: 2, ..options() });
    if let Some(ring) = without {
        engine.runner_mut().remove_fence(ring);
    }
    let trail = play(&mut engine, &requests()).map_err(|error| error.to_string())?;
    Ok(trail.lives)
}

#[test]
fn with_every_fence_overlapped_rounds_are_rounds_one_by_one() {
    let one_by_one = play(&mut engine(options()), &requests()).expect("runs");
    assert_eq!(overlapped(None).as_ref(), Ok(&one_by_one.lives));
    assert!(one_by_one.lives.iter().all(|life| !life.ids.is_empty()));
}

#[test]
fn without_the_fence_of_the_table_ring_a_table_is_overwritten_under_its_copy() {
    let error = overlapped(Some(Ring::Table)).expect_err("the device notices");
    assert!(error.contains("`staged table` was overwritten"), "{error}");
}

#[test]
fn without_the_fence_of_the_read_back_ring_replies_are_wrong() {
    let right = overlapped(None).expect("runs");
    let wrong = overlapped(Some(Ring::Results)).expect("the device itself sees nothing wrong");
    assert_ne!(wrong, right);
}

/// The bias lists of three lanes that begin before any round is read.
fn bias_lists(fixture: &mut Fixture) -> Result<(), String> {
    let mut lists = Vec::new();
    for slot in 0..3 {
        let list = [Bias { id: slot as u32, value: 1.0 }, Bias { id: 100, value: slot as f32 }];
        let staged = fixture.runner.stage_biases(&fixture.lanes, slot, &list);
        staged.map_err(|error| error.to_string())?;
        lists.push(list.to_vec());
    }
    fixture.runner.stream.synchronize().map_err(|error| error.to_string())?;
    let slab = &fixture.lanes.slab;
    let at = |slot| fixture.lanes.layout.biases.at::<Bias>(slab.slot(slot));
    let landed: Vec<Vec<Bias>> = (0..3).map(|slot| slab.arena().read(at(slot), 2).expect("read")).collect();
    assert_eq!(landed, lists);
    Ok(())
}

#[test]
fn without_the_fence_of_the_bias_ring_a_list_is_overwritten_under_its_copy() {
    bias_lists(&mut fixture(3)).expect("each slot has its own list");
    let mut bare = fixture(3);
    bare.runner.remove_fence(Ring::Biases);
    let error = bias_lists(&mut bare).expect_err("the device notices");
    assert!(error.contains("`bias list` was overwritten"), "{error}");
}

/// Queues three decode rounds of one lane; takes the outcomes of each as late as the ring allows.
fn three_rounds(fixture: &mut Fixture) -> Result<[Outcome; 3], String> {
    let mut lane: Lane = fixture.lane(0);
    fixture.prompt(&mut lane, &ids(20, 6));
    let round = |fixture: &mut Fixture, lane: &mut Lane| {
        fixture.stage_decode(&mut [lane]);
        let emission = fixture.decode_emission(1);
        fixture.runner.stream.run(emission, &[]).expect("queued");
        fixture.runner.read_back(1).map_err(|error| error.to_string())
    };
    let first = round(fixture, &mut lane)?;
    let second = round(fixture, &mut lane)?;
    let third = round(fixture, &mut lane)?;
    fixture.runner.stream.synchronize().expect("the rounds run");
    Ok([first, second, third].map(|pending| fixture.runner.take(pending).expect("read")[0]))
}

/// Reading late is refused; without the fence the first round would be told what the third one picked.
#[test]
fn without_the_fence_of_the_read_back_ring_outcomes_are_of_a_later_round() {
    let error = three_rounds(&mut fixture(1)).expect_err("two are under way, and no more");
    assert!(error.contains("take the oldest first"), "{error}");
    let mut bare = fixture(1);
    bare.runner.remove_fence(Ring::Results);
    let [first, second, third] = three_rounds(&mut bare).expect("nothing is refused");
    assert_eq!((first.id, first.logprob), (third.id, third.logprob));
    assert_ne!((first.id, first.logprob), (second.id, second.logprob));
}
