//! Faults stick, and what is missing is named.

use std::process::ExitCode;
use std::time::Duration;

use graph::error::FaultKind;
use graph::{Device, Error, Ptr, Recording};
use tests::process::{Process, part, say};

use crate::rig::{Add, AddArgs, Rig, launch, zeros};

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("a_stray_write_is_a_fault_that_stays", a_stray_write_is_a_fault_that_stays),
    ("a_device_that_is_not_there_is_named", a_device_that_is_not_there_is_named),
];

pub(crate) const WITHOUT_DRIVER: &[(&str, fn())] =
    &[("a_machine_without_a_driver_says_what_was_tried", a_machine_without_a_driver_says_what_was_tried)];

/// The part of a process that is to break its context, which no later test could use.
const STRAY: &str = "stray write";

/// Breaks the context if this process was started for that.
pub(crate) fn child() -> Option<ExitCode> {
    part().filter(|part| part == STRAY)?;
    stray_write();
    say("the fault stayed");
    Some(ExitCode::SUCCESS)
}

fn a_stray_write_is_a_fault_that_stays() {
    let mut other = Process::start(STRAY, &[], &[]);
    assert_eq!(other.line(), "the fault stayed");
    assert!(other.ends_within(Duration::from_secs(60)).success(), "see above");
    let rig = Rig::new();
    rig.note(1);
    rig.stream.synchronize().unwrap();
    assert_eq!(rig.log.seen(), [1], "another process's fault is its own");
}

fn stray_write() {
    let rig = Rig::new();
    let (data, event) = (zeros(&rig.device, "data", 4), rig.device.event());
    let exec = {
        let recording = Recording::begin(&rig.stream, "round").unwrap();
        rig.note(1);
        recording.finish(vec![]).unwrap()
    };
    let args = AddArgs { to: Ptr::new(64), from: data.base().cast(), count: 4, value: 1 };
    // Everything is queued before the write happens, so that the wait is what meets the fault.
    rig.spin(100);
    rig.stream.run(launch::<Add>(&args), std::slice::from_ref(&data)).unwrap();
    rig.stream.record(&event).unwrap();
    let first = rig.stream.synchronize().unwrap_err();
    match &first {
        Error::Fault(graph::Fault { work, kind: FaultKind::Driver { name, says } }) => {
            assert_eq!(name, "CUDA_ERROR_ILLEGAL_ADDRESS");
            assert!(says.contains("illegal memory access"), "{says}");
            assert!(work.contains("synchronisation"), "{work}");
        }
        other => panic!("{other:?}"),
    }
    let refused = [
        rig.stream.run(rig.log.emission(1), &[]),
        rig.stream.replay(&exec),
        rig.stream.record(&event),
        rig.stream.wait(&event),
        rig.stream.synchronize(),
        event.synchronize(),
        rig.device.stream().synchronize(),
        rig.device.arena("late", 4).map(drop),
        rig.device.pinned("late", 4).map(drop),
        data.read::<u32>(data.base().cast(), 1).map(drop),
        data.write(data.base().cast(), &[1u32]),
        Recording::begin(&rig.stream, "late").map(drop),
    ];
    for refused in refused {
        assert_eq!(refused, Err(first.clone()), "the first fault stays");
    }
    assert!(event.reached(), "nobody waits for ever");
}

fn a_device_that_is_not_there_is_named() {
    let there = Device::cuda_count().unwrap();
    match Device::cuda(there).err() {
        Some(Error::Missing { what, why }) => {
            assert_eq!(what, format!("CUDA device {there}"));
            assert!(why.contains(&format!("shows {there} of them")), "{why}");
        }
        other => panic!("{other:?}"),
    }
}

fn a_machine_without_a_driver_says_what_was_tried() {
    for error in [Device::cuda(0).err(), Device::cuda_count().err()] {
        let error = error.expect("there is no driver");
        let Error::Missing { what, why } = &error else { panic!("{error:?}") };
        assert_eq!(what, "the CUDA driver");
        assert!(why.contains("libcuda.so") || why.contains("says CUDA_ERROR_") || why.contains("runs CUDA"));
        println!("{error}");
    }
}
