//! The guards around lane state: a slot is cleared for a new lane, page edits arrive, and what belongs to
//! nobody is never looked at.

use graph::error::FaultKind;
use graph::{Emission, Error, Span};
use kernels::table::{Bias, Kind, PAGE, PageEdit, PromptRow, Row, Sampling};
use runtime::model::{Group, Picks, RoundShape};
use runtime::receipts::Random;
use runtime::runner::StagedTable;
use tests::fixture::{Fixture, Lane};

use crate::{VOCAB, fixture, ids};

/// Picks that depend on what was picked before.
fn penalties() -> Sampling {
    Sampling { repetition: 1e6, presence: 2.0, frequency: 2.0, ..Sampling::default() }
}

/// Ids with the bits of their log probabilities and of all logits, round by round.
fn reply(fixture: &mut Fixture, lane: &mut Lane) -> Vec<Vec<u32>> {
    let prompt = fixture.prompt(lane, &ids(11, 5));
    let mut seen = vec![prompt.into_iter().map(f32::to_bits).collect()];
    for _ in 0..3 {
        let outcome = fixture.decode(&mut [lane], None)[0];
        let logits = fixture.runner.logits(1).expect("read");
        let logits = logits.into_iter().map(f32::to_bits);
        seen.push([outcome.id, outcome.logprob.to_bits()].into_iter().chain(logits).collect());
    }
    seen
}

/// A lane that said what [`reply`] says, and more: what it leaves in slot 0.
fn lane_before(fixture: &mut Fixture) {
    let mut lane = fixture.lane(0);
    let biases = [Bias { id: 3, value: 1.0 }];
    fixture.runner.stage_biases(&fixture.lanes, 0, &biases).expect("staged");
    reply(fixture, &mut lane);
    fixture.prompt(&mut lane, &ids(100, 8));
}

/// A fresh lane, but for a part of its slot that still holds what another left.
fn all_cleared_but(fixture: &mut Fixture, span: Span) -> Lane {
    lane_before(fixture);
    let slab = fixture.lanes.slab.clone();
    let at = span.at::<u8>(slab.slot(0));
    let left: Vec<u8> = slab.arena().read(at, span.bytes).expect("read");
    assert!(left.iter().any(|byte| *byte != 0), "the lane before left nothing");
    let lane = fixture.lane(0);
    fixture.runner.stream.synchronize().expect("cleared");
    slab.arena().write(at, &left).expect("written");
    lane
}

#[test]
fn a_part_of_a_slot_that_is_not_cleared_shows() {
    let mut fixture = fixture(1);
    fixture.sampling = penalties();
    let state = |fixture: &Fixture, lane: &Lane| {
        fixture.bundle(lane).digest(&fixture.runner.stream).expect("read").whole()
    };
    let mut fresh = fixture.lane(0);
    let expected = reply(&mut fixture, &mut fresh);
    let expected_state = state(&fixture, &fresh);

    let layout = fixture.lanes.layout.clone();
    let mut silent = Vec::new();
    for (label, span) in layout.parts().filter(|(label, _)| *label != "head") {
        let mut lane = all_cleared_but(&mut fixture, span);
        let seen = reply(&mut fixture, &mut lane);
        assert_ne!(state(&fixture, &lane), expected_state, "no digest says that the {label} was not cleared");
        if seen == expected {
            silent.push(label);
        }
    }
    // These are read only as far as the lane itself has written them; the others change what it says.
    assert_eq!(silent, ["rotary ring", "bias list", "layer 3 index ring", "layer 7 index ring"]);

    lane_before(&mut fixture);
    let mut again = fixture.lane(0);
    assert_eq!(reply(&mut fixture, &mut again), expected, "cleared whole, the slot is a fresh one");
    assert_eq!(state(&fixture, &again), expected_state);
}

/// The lane would go on where the one before it ended, without pages.
#[test]
fn a_head_that_is_not_cleared_is_a_fault() {
    let mut fixture = fixture(1);
    let head = fixture.lanes.layout.head;
    let mut lane = all_cleared_but(&mut fixture, head);
    let emission = fixture.prompt_emission(&mut lane, &ids(11, 5), Picks::All);
    fixture.runner.stream.run(emission, &[]).expect("queued");
    assert!(matches!(fixture.runner.stream.synchronize(), Err(Error::Fault(_))));
}

/// Head and page table are those of the lane before: nothing faults, and the answer is another one.
#[test]
fn a_slot_that_is_not_cleared_at_all_answers_otherwise() {
    let mut fixture = fixture(1);
    let mut fresh = fixture.lane(0);
    let taken = fresh.clone();
    let expected = reply(&mut fixture, &mut fresh);
    lane_before(&mut fixture);
    assert_ne!(reply(&mut fixture, &mut taken.clone()), expected);
    lane_before(&mut fixture);
    let mut cleared = fixture.lane(0);
    assert_eq!(reply(&mut fixture, &mut cleared), expected);
}

/// Runs a prompt that fills one page, and then a row that needs another.
fn into_the_second_page(fixture: &mut Fixture, edit: bool) -> Result<(), Error> {
    let mut lane = fixture.lane(0);
    fixture.prompt(&mut lane, &ids(PAGE, 2));
    let edits = [PageEdit { slab: 0, slot: 0, index: 1, page: lane.pages[1] }];
    fixture.runner.stage(StagedTable {
        rows: &[Row { slot: 0, place: 0, first: 0, count: 1 }],
        sampling: &[Sampling::default()],
        prompt: &[],
        edits: if edit { &edits } else { &[] },
    })?;
    fixture.runner.stream.run(fixture.decode_emission(1), &[])?;
    fixture.runner.outcomes(1).map(drop)
}

#[test]
fn a_page_edit_that_is_lost_is_a_fault() {
    assert_eq!(into_the_second_page(&mut fixture(2), true), Ok(()));
    match into_the_second_page(&mut fixture(2), false) {
        Err(Error::Fault(fault)) => match fault.kind {
            FaultKind::Domain(why) => assert!(why.contains("page 4294967295 of slot 0"), "{why}"),
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

/// A page edit for another slab changes nothing here.
#[test]
fn a_page_edit_with_the_number_of_another_slab_is_a_lost_one() {
    let mut fixture = fixture(2);
    fixture.lanes.number = 1;
    // The fixture's edits name slab 0.
    let mut lane = fixture.lane(0);
    let emission = fixture.prompt_emission(&mut lane, &ids(5, 1), Picks::All);
    fixture.runner.stream.run(emission, &[]).expect("queued");
    assert!(matches!(fixture.runner.stream.synchronize(), Err(Error::Fault(_))));
}

const SLOTS: usize = 4;

/// Lanes come and go; with `poison`, whatever belongs to nobody is overwritten between rounds.
fn churn(poison: Option<u8>) -> (Vec<Vec<u32>>, Vec<graph::Digest>) {
    let mut fixture = fixture(SLOTS);
    fixture.sampling = Sampling { temperature: 0.8, seed: 3, ..penalties() };
    let exec: Vec<_> = (1..=SLOTS).map(|rows| fixture.capture_decode(rows)).collect();
    let (mut random, mut lanes) = (Random::new(9), Vec::<Lane>::new());
    let (mut seen, mut states) = (Vec::new(), Vec::new());
    for round in 0..60 {
        if let Some(value) = poison {
            overwrite(&mut fixture, &lanes, value);
        }
        let free = (0..SLOTS).find(|slot| lanes.iter().all(|lane| lane.slot != *slot));
        match (random.below(4), free) {
            (0, Some(slot)) => {
                let mut lane = fixture.lane(slot);
                let prompt: Vec<u32> = (0..1 + random.below(90)).map(|_| random.below(VOCAB)).collect();
                let logits = fixture.prompt(&mut lane, &prompt);
                seen.push(logits.into_iter().map(f32::to_bits).collect());
                lanes.insert(random.below(lanes.len() as u32 + 1) as usize, lane);
            }
            (1, _) if lanes.len() > 1 => {
                let lane = lanes.remove(random.below(lanes.len() as u32) as usize);
                states.push(fixture.bundle(&lane).digest(&fixture.runner.stream).expect("read").whole());
            }
            _ if !lanes.is_empty() => {
                let replayed = (round % 3 > 0).then_some(&exec[lanes.len() - 1]);
                let mut all: Vec<&mut Lane> = lanes.iter_mut().collect();
                let outcomes = fixture.decode(&mut all, replayed);
                seen.push(outcomes.iter().flat_map(|o| [o.id, o.logprob.to_bits(), o.status]).collect());
            }
            _ => {}
        }
    }
    (seen, states)
}

/// Overwrites free slots, pages that hold nothing, round buffers and both staging buffers.
fn overwrite(fixture: &mut Fixture, lanes: &[Lane], value: u8) {
    wild_tables(fixture, value);
    let mut emission = Emission::new();
    let (slab, pool) = (&fixture.lanes.slab, &fixture.lanes.pool);
    let page_bytes = fixture.lanes.layout.page_bytes;
    for slot in (0..SLOTS).filter(|slot| lanes.iter().all(|lane| lane.slot != *slot)) {
        emission.fill(slab.slot(slot), slab.stride(), value);
    }
    let used = |page: u32| lanes.iter().any(|lane| lane.pages[..lane.length.div_ceil(PAGE)].contains(&page));
    for page in (0..pool.pages).filter(|page| !used(*page as u32)) {
        emission.fill(pool.arena.base().byte_add(page * page_bytes), page_bytes, value);
    }
    let scratch = &fixture.runner.scratch.arena;
    emission.fill(scratch.base(), scratch.bytes(), value);
    fixture.runner.stream.run(emission, &[]).expect("queued");
}

/// Stages the largest tables there can be, twice, and runs none of them: both staging buffers then hold wild
/// values wherever the next round does not write.
fn wild_tables(fixture: &mut Fixture, value: u8) {
    let limits = fixture.runner.scratch.limits;
    let word = u32::from_ne_bytes([value; 4]);
    for _ in 0..2 {
        let staged = StagedTable {
            rows: &vec![Row { slot: word, place: word, first: word, count: word }; limits.rows],
            sampling: &vec![Sampling { temperature: f32::NAN, biases: word, ..penalties() }; limits.rows],
            prompt: &vec![PromptRow { id: word, axes: [word as i32; 3] }; limits.rows],
            edits: &vec![PageEdit { slab: 0, slot: word, index: word, page: word }; limits.edits],
        };
        fixture.runner.stage(staged).expect("staged");
    }
}

#[test]
fn what_belongs_to_nobody_changes_nothing() {
    let clean = churn(None);
    assert!(clean.0.len() > 30 && clean.1.len() > 4, "{} rounds, {} lanes", clean.0.len(), clean.1.len());
    for value in [0xff, 0x00, 0x7b] {
        assert!(churn(Some(value)) == clean, "filled with {value:#04x}");
    }
}

/// A twin: the same bytes where a lane lives are noticed.
#[test]
fn what_belongs_to_a_lane_may_not_be_overwritten() {
    let mut fixture = fixture(SLOTS);
    let mut lane = fixture.lane(1);
    fixture.prompt(&mut lane, &ids(20, 1));
    overwrite(&mut fixture, &[], 0x7b);
    fixture.stage_decode(&mut [&mut lane]);
    fixture.runner.stream.run(fixture.decode_emission(1), &[]).expect("queued");
    assert!(matches!(fixture.runner.outcomes(1), Err(Error::Fault(_))));
}

/// Another: a wild table that is run is noticed.
#[test]
fn a_wild_table_that_is_run_is_a_fault() {
    let mut fixture = fixture(SLOTS);
    wild_tables(&mut fixture, 0xff);
    let groups = [Group { lanes: &fixture.lanes, rows: 1 }];
    let shape = RoundShape { kind: Kind::Decode, groups: &groups, picks: Picks::All };
    fixture.runner.run_eager(&shape).expect("queued");
    assert!(matches!(fixture.runner.outcomes(1), Err(Error::Fault(_))));
}
