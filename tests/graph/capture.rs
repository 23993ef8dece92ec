//! Captures: what is recorded, what is refused, and what an exec holds.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;

use graph::{Arena, Device, Emission, Error, Exec, Recording, Staging, Stream};

use crate::rig::{Add, AddArgs, Rig, launch, words, zeros};

/// A round with memory: `acc[i] = data[i] + 3; data = acc`, then a fill of the first byte.
fn round(data: &Arena, acc: &Arena) -> Emission {
    let args = AddArgs { to: acc.base().cast(), from: data.base().cast(), count: 4, value: 3 };
    let mut emission = launch::<Add>(&args);
    emission.copy(data.base(), acc.base(), 16);
    emission.fill(acc.base(), 1, 9);
    emission
}

fn capture(stream: &Stream, emission: &Emission, keeps: Vec<Arena>) -> Exec {
    let recording = Recording::begin(stream, "round").unwrap();
    stream.run(emission.clone(), &[]).unwrap();
    recording.finish(keeps).unwrap()
}

#[test]
fn a_capture_records_and_runs_nothing() {
    let rig = Rig::new();
    rig.note(1);
    let exec = capture(&rig.stream, &rig.log.emission(2), vec![]);
    rig.note(3);
    rig.stream.synchronize().unwrap();
    assert_eq!(rig.log.seen(), [1, 3]);
    rig.stream.replay(&exec).unwrap();
    assert_eq!(rig.log.seen(), [1, 3], "a replay is queued like any work");
    rig.stream.synchronize().unwrap();
    assert_eq!(rig.log.seen(), [1, 3, 2]);
}

#[test]
fn an_exec_shows_the_emission_it_was_made_of() {
    let rig = Rig::new();
    let (data, acc) = (zeros(&rig.device, "data", 4), zeros(&rig.device, "acc", 4));
    let emission = round(&data, &acc);
    let exec = capture(&rig.stream, &emission, vec![data, acc]);
    assert_eq!((exec.label(), exec.nodes(), exec.digest()), ("round", 3, emission.digest()));
    let head = format!("exec round nodes 3 digest {:.12}\n", emission.digest());
    assert_eq!(exec.to_string(), head + &emission.to_string());
}

#[test]
fn several_runs_of_one_capture_are_one_list() {
    let rig = Rig::new();
    let recording = Recording::begin(&rig.stream, "both").unwrap();
    rig.note(1);
    rig.note(2);
    let exec = recording.finish(vec![]).unwrap();
    let mut both = rig.log.emission(1);
    both.append(&rig.log.emission(2));
    assert_eq!((exec.nodes(), exec.digest()), (2, both.digest()));
}

#[test]
fn replayed_twice_equals_run_twice_byte_for_byte() {
    let rig = Rig::new();
    let run = |replayed: bool| {
        let (data, acc) = (zeros(&rig.device, "data", 4), zeros(&rig.device, "acc", 4));
        data.write(data.base().cast(), &[1u32, 20, 300, u32::MAX]).unwrap();
        let emission = round(&data, &acc);
        let exec = capture(&rig.stream, &emission, vec![]);
        for _ in 0..2 {
            match replayed {
                true => rig.stream.replay(&exec).unwrap(),
                false => rig.stream.run(emission.clone(), &[]).unwrap(),
            }
        }
        rig.stream.synchronize().unwrap();
        (words(&data, 4), words(&acc, 4))
    };
    assert_eq!(run(true), run(false));
    assert_eq!(run(true).0, [7, 26, 306, 5]);
}

/// What a refused call may use.
struct Bench {
    device: Device,
    stream: Stream,
    other: Stream,
    arena: Arena,
    staging: Staging,
    exec: Exec,
    event: graph::Event,
}

#[test]
fn what_a_capture_excludes_is_refused_by_name_and_breaks_it() {
    type Call = fn(&mut Bench) -> Result<(), Error>;
    let calls: [(&str, Call); 13] = [
        ("allocation", |b| b.device.arena("late", 1).map(drop)),
        ("pinned allocation", |b| b.device.pinned("late", 1).map(drop)),
        ("pinned allocation", |b| Staging::new(&b.device, "late", 1).map(drop)),
        ("synchronisation", |b| b.stream.synchronize()),
        ("synchronisation", |b| b.other.synchronize()),
        ("synchronisation", |b| b.event.synchronize()),
        ("synchronisation", |b| b.staging.upload(&b.stream, b.arena.base(), 4, &[], |_| ())),
        ("waiting for an event", |b| b.stream.wait(&b.event)),
        ("recording an event", |b| b.stream.record(&b.event)),
        ("a replay", |b| b.stream.replay(&b.exec)),
        ("a synchronous read", |b| b.arena.read(b.arena.base(), 1).map(drop)),
        ("a synchronous write", |b| b.arena.write(b.arena.base(), &[1u8])),
        ("beginning another capture", |b| Recording::begin(&b.other, "second").map(drop)),
    ];
    for (name, call) in calls {
        let rig = Rig::new();
        let mut bench = Bench {
            device: rig.device.clone(),
            stream: rig.stream.clone(),
            other: rig.device.stream(),
            arena: zeros(&rig.device, "arena", 4),
            staging: Staging::new(&rig.device, "staging", 4).unwrap(),
            exec: capture(&rig.stream, &rig.log.emission(9), vec![]),
            event: rig.device.event(),
        };
        let used = rig.device.used_bytes();
        let recording = Recording::begin(&rig.stream, "decode 4 rows").unwrap();
        rig.note(1);
        let refused = Error::Capturing { call: name, capture: "decode 4 rows".into() };
        assert_eq!(call(&mut bench), Err(refused), "{name}");
        rig.note(2);
        match recording.finish(vec![]).err() {
            Some(Error::CaptureFailed { capture, why }) => {
                assert_eq!(capture, "decode 4 rows");
                assert!(why.starts_with(name), "{why}");
            }
            other => panic!("{name}: {other:?}"),
        }
        assert_eq!(rig.device.used_bytes(), used);
        call(&mut bench).unwrap_or_else(|error| panic!("{name} is fine afterwards: {error}"));
        rig.stream.synchronize().unwrap();
        let expected: &[u32] = if name == "a replay" { &[9] } else { &[] };
        assert_eq!(rig.log.seen(), expected, "nothing of a broken capture runs ({name})");
    }
}

#[test]
fn the_first_thing_that_broke_a_capture_is_reported() {
    let rig = Rig::new();
    let recording = Recording::begin(&rig.stream, "round").unwrap();
    rig.device.arena("late", 1).unwrap_err();
    rig.stream.synchronize().unwrap_err();
    let why = recording.finish(vec![]).err().unwrap().to_string();
    assert!(why.contains("allocation was called inside it"), "{why}");
}

#[test]
fn a_recording_dropped_early_leaves_everything_else_alone() {
    fn early(rig: &Rig) -> Result<Exec, Error> {
        let recording = Recording::begin(&rig.stream, "early")?;
        rig.note(2);
        rig.device.arena("too large", 1 << 30)?;
        recording.finish(vec![])
    }
    fn panics(rig: &Rig) -> Result<Exec, Error> {
        let _recording = Recording::begin(&rig.stream, "panics")?;
        rig.note(2);
        panic!("a bug in a body")
    }
    for (leave, fails) in [(early as fn(&Rig) -> Result<Exec, Error>, true), (panics, false)] {
        let rig = Rig::new();
        let other = rig.device.stream();
        rig.note(1);
        rig.log.note(&other, 10);
        let left = catch_unwind(AssertUnwindSafe(|| leave(&rig).map(drop)));
        assert_eq!(left.is_ok_and(|result| result.is_err()), fails);
        rig.note(3);
        other.synchronize().unwrap();
        rig.stream.synchronize().unwrap();
        assert_eq!(rig.log.seen(), [10, 1, 3]);
        let exec = capture(&rig.stream, &rig.log.emission(4), vec![]);
        assert_eq!(exec.nodes(), 1, "nothing of the dropped capture is left");
    }
}

#[test]
fn other_streams_are_not_captured() {
    let rig = Rig::new();
    let (other, event) = (rig.device.stream(), rig.device.event());
    let replayed = capture(&rig.stream, &rig.log.emission(7), vec![]);
    let recording = Recording::begin(&rig.stream, "mine").unwrap();
    rig.note(1);
    rig.log.note(&other, 2);
    other.record(&event).unwrap();
    other.wait(&event).unwrap();
    other.replay(&replayed).unwrap();
    let exec = recording.finish(vec![]).unwrap();
    assert_eq!((exec.nodes(), exec.digest()), (1, rig.log.emission(1).digest()));
    other.synchronize().unwrap();
    assert_eq!(rig.log.seen(), [2, 7]);
}

#[test]
fn a_clone_of_the_stream_is_captured_too() {
    let rig = Rig::new();
    let clone = rig.stream.clone();
    let recording = Recording::begin(&rig.stream, "mine").unwrap();
    rig.log.note(&clone, 1);
    assert!(matches!(clone.synchronize(), Err(Error::Capturing { .. })));
    drop(recording);
    clone.synchronize().unwrap();
    assert!(rig.log.seen().is_empty());
}

#[test]
fn an_exec_holds_what_it_points_to() {
    let rig = Rig::new();
    let before = rig.device.used_bytes();
    let (given, run_with) = (zeros(&rig.device, "given", 16), zeros(&rig.device, "run with", 16));
    let recording = Recording::begin(&rig.stream, "round").unwrap();
    rig.stream.run(rig.log.emission_of(given.base()), &[]).unwrap();
    rig.stream.run(rig.log.emission_of(run_with.base()), &[run_with]).unwrap();
    let exec = recording.finish(vec![given]).unwrap();
    assert_eq!(rig.device.used_bytes(), before + 128);
    let second = exec.clone();
    rig.stream.replay(&exec).unwrap();
    drop(exec);
    rig.stream.synchronize().unwrap();
    assert_eq!(rig.log.seen(), [0, 0]);
    rig.stream.replay(&second).unwrap();
    drop(second);
    assert_eq!(rig.device.used_bytes(), before + 128, "the queued replay holds it too");
    rig.stream.synchronize().unwrap();
    assert_eq!((rig.log.seen().len(), rig.device.used_bytes()), (4, before));
}

#[test]
fn arenas_of_another_device_make_no_exec() {
    let (rig, other) = (Rig::new(), Rig::new());
    let recording = Recording::begin(&rig.stream, "mixed").unwrap();
    let result = recording.finish(vec![other.log.0.clone()]).err();
    assert_eq!(result, Some(Error::OtherDevice { call: "finishing a capture" }));
    rig.stream.synchronize().unwrap();
}

/// Two threads that capture on one device disturb each other, as they do on a GPU; but each gets its own
/// exec, or an error, and never the other's capture.
#[test]
fn captures_of_two_threads_are_never_mixed_up() {
    let rig = Rig::new();
    let barrier = Barrier::new(2);
    let good: usize = std::thread::scope(|scope| {
        let threads = [1u32, 2].map(|thread| {
            let (rig, barrier) = (&rig, &barrier);
            scope.spawn(move || {
                let (stream, label) = (rig.device.stream(), format!("thread {thread}"));
                // Long, so that its digest is still being made when the other thread begins.
                let mut list = Emission::new();
                (0..500).for_each(|value| list.append(&rig.log.emission(1000 * thread + value)));
                let expected = list.digest();
                barrier.wait();
                let mut good = 0;
                for turn in 0..4000 {
                    let Ok(recording) = Recording::begin(&stream, &*label) else {
                        (0..turn % 64).for_each(|_| std::thread::yield_now());
                        continue;
                    };
                    stream.run(list.clone(), &[]).unwrap();
                    match recording.finish(vec![]) {
                        Ok(exec) => {
                            assert_eq!((exec.label(), exec.digest()), (&*label, expected));
                            good += 1;
                        }
                        Err(Error::CaptureFailed { capture, .. }) => assert_eq!(capture, label),
                        Err(other) => panic!("{other}"),
                    }
                }
                good
            })
        });
        threads.map(|thread| thread.join().unwrap()).iter().sum()
    });
    assert!(good > 0);
}
