//! A fault stays: nothing later runs, and everyone hears of it.

use graph::error::FaultKind;
use graph::{Emission, Error, Recording};

use crate::rig::{Fail, Rig, fault, launch, words, zeros};

#[test]
fn after_a_fault_nothing_runs_and_every_wait_reports_it() {
    let rig = Rig::new();
    let (other, before) = (rig.device.stream(), rig.device.used_bytes());
    let (early, late, unused) = (rig.device.event(), rig.device.event(), rig.device.event());
    let held = zeros(&rig.device, "held", 16);
    rig.note(1);
    rig.stream.record(&early).unwrap();
    let mut failing = launch::<Fail>(&0);
    failing.append(&rig.log.emission(2));
    rig.stream.run(failing, &[]).unwrap();
    rig.note(3);
    rig.stream.record(&late).unwrap();
    other.wait(&late).unwrap();
    other.run(rig.log.emission(4), &[held]).unwrap();

    early.synchronize().unwrap();
    let first = fault(other.synchronize());
    assert_eq!(first.work, "fail");
    assert_eq!(first.kind, FaultKind::Domain("id 9 of a table of 4 rows".into()));
    let same = Err(Error::Fault(first));
    assert!(late.reached(), "the queues drain all the same");
    assert_eq!(rig.device.used_bytes(), before, "what the dropped work held is free");
    let waits = [
        rig.stream.synchronize(),
        rig.stream.advance(1),
        other.synchronize(),
        early.synchronize(),
        late.synchronize(),
        unused.synchronize(),
        rig.device.stream().synchronize(),
    ];
    waits.into_iter().for_each(|wait| assert_eq!(wait, same));

    let calls = [
        rig.stream.run(Emission::new(), &[]),
        rig.device.arena("more", 1).map(drop),
        rig.device.pinned("more", 1).map(drop),
        rig.log.0.read(rig.log.0.base(), 1).map(drop),
        rig.log.0.write(rig.log.0.base(), &[0u8]),
        Recording::begin(&rig.stream, "round").map(drop),
    ];
    calls.into_iter().for_each(|call| assert_eq!(call, same));
}

/// The bytes are looked at through pinned memory, which stays readable.
#[test]
fn the_work_before_a_fault_stands_and_the_work_after_it_never_happened() {
    let rig = Rig::new();
    let (word, back) = (zeros(&rig.device, "word", 1), rig.device.pinned("back", 4).unwrap());
    let emission = |value| {
        let mut emission = Emission::new();
        emission.fill(word.base(), 4, value);
        emission.copy(back.base(), word.base(), 4);
        emission
    };
    let mut all = emission(1);
    all.append(&launch::<Fail>(&0));
    all.append(&emission(2));
    rig.stream.run(all, &[]).unwrap();
    rig.stream.run(emission(3), &[]).unwrap();
    fault(rig.stream.synchronize());
    assert!(back.read(|bytes| bytes == [1; 4]));
}

#[test]
fn a_kernel_that_panics_is_a_fault_and_the_queue_still_drains() {
    let rig = Rig::new();
    let (other, event) = (rig.device.stream(), rig.device.event());
    rig.stream.run(launch::<Fail>(&1), &[]).unwrap();
    rig.note(1);
    rig.stream.record(&event).unwrap();
    other.wait(&event).unwrap();
    let found = fault(other.synchronize());
    assert_eq!((found.work.as_str(), &found.kind), ("fail", &FaultKind::Panicked("kernel bug 1".into())));
    assert!(event.reached());
    assert_eq!(rig.stream.synchronize(), Err(Error::Fault(found)));
}

#[test]
fn a_replay_on_a_faulted_device_is_refused() {
    let rig = Rig::new();
    let recording = Recording::begin(&rig.stream, "round").unwrap();
    rig.note(1);
    let exec = recording.finish(vec![]).unwrap();
    rig.stream.run(launch::<Fail>(&0), &[]).unwrap();
    let first = rig.stream.synchronize();
    assert!(first.is_err());
    assert_eq!(rig.stream.replay(&exec), first);
}

#[test]
fn a_capture_during_which_the_device_failed_makes_no_exec() {
    let rig = Rig::new();
    let other = rig.device.stream();
    other.run(launch::<Fail>(&0), &[]).unwrap();
    let recording = Recording::begin(&rig.stream, "round").unwrap();
    rig.note(1);
    let first = other.advance(1);
    assert!(first.is_err());
    assert_eq!(recording.finish(vec![]).map(drop), first);
}

#[test]
fn devices_fail_alone() {
    let (rig, other) = (Rig::new(), Rig::new());
    rig.stream.run(launch::<Fail>(&0), &[]).unwrap();
    other.note(1);
    fault(rig.stream.synchronize());
    other.stream.synchronize().unwrap();
    assert_eq!(other.log.seen(), [1]);
    assert_eq!(words(&other.log.0, 1), [1]);
}
