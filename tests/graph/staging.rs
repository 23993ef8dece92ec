//! Pinned memory under queued copies, and the ring of buffers that makes its reuse safe.

use std::panic::{AssertUnwindSafe, catch_unwind};

use graph::error::FaultKind;
use graph::{Arena, Emission, Error, Pinned, Recording, Staging};
use proptest::prelude::*;

use crate::rig::{Rig, copy_word, fault, near, set, words, zeros};

fn overwritten(label: &str) -> FaultKind {
    FaultKind::Overwritten { label: label.into() }
}

/// A rig with one word of device memory and one of pinned memory.
fn with_pinned() -> (Rig, Arena, Pinned) {
    let rig = Rig::new();
    let (to, mut pinned) = (zeros(&rig.device, "to", 1), rig.device.pinned("table", 4).unwrap());
    set(&mut pinned, 1);
    (rig, to, pinned)
}

fn upload(rig: &Rig, ring: &mut Staging, to: &Arena, value: u32) -> Result<(), Error> {
    let keeps = std::slice::from_ref(to);
    ring.upload(&rig.stream, to.base(), 4, keeps, |bytes| bytes.copy_from_slice(&value.to_ne_bytes()))
}

#[test]
fn pinned_memory_goes_up_and_down() {
    let (rig, to, pinned) = with_pinned();
    let back = rig.device.pinned("back", 4).unwrap();
    let mut emission = copy_word(to.base(), pinned.base());
    emission.append(&copy_word(back.base(), to.base()));
    rig.stream.run(emission, &[]).unwrap();
    assert!(back.read(|bytes| bytes == [0xff; 4]));
    rig.stream.synchronize().unwrap();
    assert!(back.read(|bytes| bytes == 1u32.to_ne_bytes()));
}

#[test]
fn a_write_under_a_queued_copy_is_a_fault_that_names_the_memory() {
    let (rig, to, mut pinned) = with_pinned();
    rig.stream.run(copy_word(to.base(), pinned.base()), &[]).unwrap();
    set(&mut pinned, 1);
    let found = fault(rig.stream.synchronize());
    assert_eq!((found.work.as_str(), found.kind), ("copy of 4 bytes", overwritten("table")));
}

#[test]
fn a_write_under_a_queued_replay_is_a_fault_too() {
    let (rig, to, mut pinned) = with_pinned();
    let recording = Recording::begin(&rig.stream, "up").unwrap();
    rig.stream.run(copy_word(to.base(), pinned.base()), &[]).unwrap();
    let exec = recording.finish(vec![to.clone()]).unwrap();
    for value in [5, 6] {
        set(&mut pinned, value);
        rig.stream.replay(&exec).unwrap();
        rig.stream.synchronize().unwrap();
        assert_eq!(words(&to, 1), [value], "a write between replays is what replays are for");
    }
    rig.stream.replay(&exec).unwrap();
    set(&mut pinned, 7);
    assert_eq!(fault(rig.stream.synchronize()).kind, overwritten("table"));
}

#[test]
fn a_write_after_the_copy_ran_is_fine_and_so_is_one_elsewhere() {
    let (rig, to, mut pinned) = with_pinned();
    let mut elsewhere = rig.device.pinned("elsewhere", 4).unwrap();
    rig.stream.run(copy_word(to.base(), pinned.base()), &[]).unwrap();
    rig.note(1);
    set(&mut elsewhere, 2);
    rig.stream.advance(1).unwrap();
    set(&mut pinned, 3);
    assert_eq!(rig.stream.synchronize(), Ok(()));
    assert_eq!(words(&to, 1), [1]);
}

#[test]
fn pinned_memory_that_is_gone_is_named() {
    let (rig, to, pinned) = with_pinned();
    rig.stream.run(copy_word(to.base(), pinned.base()), &[]).unwrap();
    drop(pinned);
    assert_eq!(near(rig.stream.synchronize()), "0 bytes into freed `table` of 4 bytes");
}

#[test]
fn two_uploads_may_be_pending_and_the_third_waits_for_the_first() {
    let rig = Rig::new();
    let to = zeros(&rig.device, "to", 1);
    let mut ring = Staging::new(&rig.device, "ring", 4).unwrap();
    for (value, landed) in [(1, 0), (2, 0), (3, 1), (4, 2)] {
        upload(&rig, &mut ring, &to, value).unwrap();
        assert_eq!(words(&to, 1), [landed], "after upload {value}");
    }
    rig.stream.synchronize().unwrap();
    assert_eq!(words(&to, 1), [4]);
}

#[test]
fn each_buffer_waits_for_the_stream_that_reads_it() {
    let rig = Rig::new();
    let (to, other) = (zeros(&rig.device, "to", 2), rig.device.stream());
    let mut ring = Staging::new(&rig.device, "ring", 4).unwrap();
    for turn in 0..10u32 {
        let stream = if turn % 3 == 0 { &rig.stream } else { &other };
        let at = to.base().byte_add(if turn % 3 == 0 { 0 } else { 4 });
        ring.upload(stream, at, 4, &[], |bytes| bytes.copy_from_slice(&turn.to_ne_bytes())).unwrap();
    }
    rig.stream.synchronize().unwrap();
    other.synchronize().unwrap();
    assert_eq!(words(&to, 2), [9, 8]);
}

#[test]
fn an_upload_that_is_too_large_is_refused_and_changes_nothing() {
    let rig = Rig::new();
    let to = zeros(&rig.device, "to", 2);
    let mut ring = Staging::new(&rig.device, "ring", 4).unwrap();
    let text = ring.upload(&rig.stream, to.base(), 5, &[], |_| panic!("not asked")).unwrap_err().to_string();
    assert_eq!(text, "upload: 5 bytes do not fit a staging buffer of 4");
    upload(&rig, &mut ring, &to, 7).unwrap();
    rig.stream.synchronize().unwrap();
    assert_eq!((ring.bytes(), words(&to, 2)), (4, vec![7, 0]));
}

#[test]
fn a_fill_that_panics_leaves_the_ring_usable() {
    let rig = Rig::new();
    let to = zeros(&rig.device, "to", 1);
    let mut ring = Staging::new(&rig.device, "ring", 4).unwrap();
    upload(&rig, &mut ring, &to, 1).unwrap();
    upload(&rig, &mut ring, &to, 2).unwrap();
    let panics = AssertUnwindSafe(|| ring.upload(&rig.stream, to.base(), 4, &[], |_| panic!("no bytes")));
    assert!(catch_unwind(panics).is_err());
    upload(&rig, &mut ring, &to, 3).unwrap();
    rig.stream.synchronize().unwrap();
    assert_eq!(words(&to, 1), [3]);
}

#[test]
fn what_cannot_be_filled_or_emitted_queues_nothing_and_keeps_its_turn() {
    let rig = Rig::new();
    let to = zeros(&rig.device, "to", 1);
    let mut ring = Staging::new(&rig.device, "ring", 4).unwrap();
    let refused = || Error::Size { call: "a test", why: "no".into() };
    let mut send = |value: u32, fills: bool, emits: bool| {
        let fill = |bytes: &mut [u8]| {
            bytes.copy_from_slice(&value.to_ne_bytes());
            if fills { Ok(value) } else { Err(refused()) }
        };
        let emit = |from| if emits { Ok(copy_word(to.base(), from)) } else { Err(refused()) };
        ring.send(&rig.stream, std::slice::from_ref(&to), fill, emit)
    };
    assert_eq!(send(1, true, true), Ok(1));
    assert_eq!((send(2, false, true), send(3, true, false)), (Err(refused()), Err(refused())));
    assert_eq!((send(4, true, true), words(&to, 1)), (Ok(4), vec![0]), "the first is still pending");
    assert_eq!((send(5, true, true), words(&to, 1)), (Ok(5), vec![1]), "its buffer comes next");
    rig.stream.synchronize().unwrap();
    assert_eq!(words(&to, 1), [5]);
}

/// What happens between rounds.
#[derive(Clone, Debug)]
enum Step {
    Upload(u32),
    Advance(usize),
    Synchronize,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => any::<u32>().prop_map(Step::Upload),
        3 => (0usize..5).prop_map(Step::Advance),
        1 => Just(Step::Synchronize),
    ];
    prop::collection::vec(step, 0..60)
}

proptest! {
    /// Whenever the device runs its work, each round sees the word that was staged for it; eager rounds and
    /// replayed ones alike.
    #[test]
    fn the_device_sees_what_was_staged_whenever_it_runs(steps in steps(), replayed in any::<bool>()) {
        let rig = Rig::new();
        let to = zeros(&rig.device, "to", 1);
        let mut ring = Staging::new(&rig.device, "ring", 4).unwrap();
        let round = rig.log.emission_of(to.base());
        let recording = Recording::begin(&rig.stream, "round").unwrap();
        rig.stream.run(round.clone(), &[]).unwrap();
        let exec = recording.finish(vec![to.clone(), rig.log.0.clone()]).unwrap();
        let mut staged = Vec::new();
        for step in steps {
            match step {
                Step::Upload(value) => {
                    upload(&rig, &mut ring, &to, value).unwrap();
                    match replayed {
                        true => rig.stream.replay(&exec).unwrap(),
                        false => rig.stream.run(round.clone(), &[]).unwrap(),
                    }
                    staged.push(value);
                }
                Step::Advance(items) => rig.stream.advance(items).unwrap(),
                Step::Synchronize => rig.stream.synchronize().unwrap(),
            }
        }
        rig.stream.synchronize().unwrap();
        prop_assert_eq!(rig.log.seen(), staged);
    }

    /// The same without the fence: as soon as a buffer is written while its copy is pending, that is a
    /// fault, never a wrong word.
    #[test]
    fn a_ring_without_a_fence_is_caught(advances in prop::collection::vec(0usize..3, 1..20)) {
        let rig = Rig::new();
        let to = zeros(&rig.device, "to", 1);
        let mut buffers = [(); 2].map(|()| rig.device.pinned("bare ring", 4).unwrap());
        let (mut staged, mut ran, mut torn) = (0usize, 0usize, false);
        for items in advances {
            let buffer = &mut buffers[staged % 2];
            torn |= staged >= 2 && ran < staged - 1;
            set(buffer, staged as u32);
            let mut round: Emission = copy_word(to.base(), buffer.base());
            round.append(&rig.log.emission_of(to.base()));
            if rig.stream.run(round, &[]).is_err() {
                break;
            }
            staged += 1;
            ran = staged.min(ran + items);
            if rig.stream.advance(items).is_err() {
                break;
            }
        }
        let result = rig.stream.synchronize();
        match torn {
            true => prop_assert_eq!(fault(result).kind, overwritten("bare ring")),
            false => {
                prop_assert_eq!(result, Ok(()));
                prop_assert_eq!(rig.log.seen(), (0..staged as u32).collect::<Vec<_>>());
            }
        }
    }
}
