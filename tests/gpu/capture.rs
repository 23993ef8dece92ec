//! Captures: what is recorded, what is refused, what an exec holds, and that replayed equals eager.

use std::panic::{AssertUnwindSafe, catch_unwind};

use graph::host::HostOptions;
use graph::{Arena, Device, Emission, Error, Event, Exec, Kernel, Recording, Staging, Stream};

use crate::rig::{
    Add, AddArgs, AddF32, Crowd, KERNELS, Rig, Turn, TurnArgs, add, launch, of_words, open, words, zeros,
};

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("a_capture_records_and_runs_nothing", a_capture_records_and_runs_nothing),
    ("an_exec_shows_the_emission_it_was_made_of", an_exec_shows_the_emission_it_was_made_of),
    ("a_host_capture_has_the_same_digest", a_host_capture_has_the_same_digest),
    ("replayed_equals_eager_byte_for_byte", replayed_equals_eager_byte_for_byte),
    ("a_replay_reads_what_was_staged_for_it", a_replay_reads_what_was_staged_for_it),
    ("what_a_capture_excludes_is_refused_by_name", what_a_capture_excludes_is_refused_by_name),
    ("kernels_are_not_loaded_in_a_capture", kernels_are_not_loaded_in_a_capture),
    ("a_kernel_without_a_twin_breaks_the_capture", a_kernel_without_a_twin_breaks_the_capture),
    ("a_recording_dropped_early_leaves_the_stream", a_recording_dropped_early_leaves_the_stream),
    ("a_capture_that_fails_at_any_node_loses_nothing", a_capture_that_fails_at_any_node_loses_nothing),
    ("an_exec_holds_its_arenas", an_exec_holds_its_arenas),
    ("an_exec_may_go_while_it_runs", an_exec_may_go_while_it_runs),
    ("an_exec_runs_on_any_stream_of_its_device", an_exec_runs_on_any_stream_of_its_device),
    ("an_empty_capture_is_an_exec", an_empty_capture_is_an_exec),
    ("other_streams_are_not_captured", other_streams_are_not_captured),
    ("captures_take_turns_and_others_go_on", captures_take_turns_and_others_go_on),
    ("execs_of_another_device_are_refused", execs_of_another_device_are_refused),
];

fn capture(stream: &Stream, emission: &Emission, keeps: Vec<Arena>) -> Exec {
    let recording = Recording::begin(stream, "round").unwrap();
    stream.run(emission.clone(), &[]).unwrap();
    recording.finish(keeps).unwrap()
}

/// A round with memory: `acc[i] = data[i] + 3; data = acc turned around`, then a fill of the first byte.
fn round(data: &Arena, acc: &Arena) -> Emission {
    let mut emission = add(acc, data, 4, 3);
    emission.launch::<Turn>(&TurnArgs { words: acc.base().cast(), count: 4, pad: 0 }).unwrap();
    emission.copy(data.base(), acc.base(), 16);
    emission.fill(acc.base(), 1, 9);
    emission
}

fn a_capture_records_and_runs_nothing() {
    let rig = Rig::new();
    rig.note(1);
    let exec = capture(&rig.stream, &rig.log.emission(2), vec![rig.log.0.clone()]);
    rig.note(3);
    rig.stream.synchronize().unwrap();
    assert_eq!(rig.log.seen(), [1, 3]);
    for _ in 0..2 {
        rig.stream.replay(&exec).unwrap();
    }
    rig.stream.synchronize().unwrap();
    assert_eq!(rig.log.seen(), [1, 3, 2, 2]);
}

fn an_exec_shows_the_emission_it_was_made_of() {
    let rig = Rig::new();
    let (data, acc) = (zeros(&rig.device, "data", 4), zeros(&rig.device, "acc", 4));
    let emission = round(&data, &acc);
    let exec = capture(&rig.stream, &emission, vec![data, acc]);
    assert_eq!((exec.label(), exec.nodes(), exec.digest()), ("round", 4, emission.digest()));
    assert!(exec.bytes() > 4 * 1024, "{} bytes", exec.bytes());
    let head = format!("exec round nodes 4 digest {:.12}\n", emission.digest());
    assert_eq!(exec.to_string(), head + &emission.to_string());
}

fn a_host_capture_has_the_same_digest() {
    // Emitting needs no device, so one emission can be captured on both; only CUDA's may be replayed.
    let (rig, host) = (Rig::new(), Rig::on(Device::host(HostOptions::default())));
    let (data, acc) = (zeros(&rig.device, "data", 4), zeros(&rig.device, "acc", 4));
    let emission = round(&data, &acc);
    let here = capture(&rig.stream, &emission, vec![data, acc]);
    let there = capture(&host.stream, &emission, vec![]);
    assert_eq!(here.digest(), there.digest());
    assert_eq!(here.to_string(), there.to_string());
}

fn replayed_equals_eager_byte_for_byte() {
    let rig = Rig::new();
    let run = |replayed: bool| {
        let data = of_words(&rig.device, "data", &[1, 20, 300, u32::MAX]);
        let acc = zeros(&rig.device, "acc", 4);
        let keeps = [data.clone(), acc.clone()];
        let emission = round(&data, &acc);
        let exec = capture(&rig.stream, &emission, keeps.to_vec());
        for _ in 0..101 {
            match replayed {
                true => rig.stream.replay(&exec).unwrap(),
                false => rig.stream.run(emission.clone(), &keeps).unwrap(),
            }
        }
        rig.stream.synchronize().unwrap();
        (words(&data, 4), words(&acc, 4))
    };
    assert_eq!(run(true), run(false));
    assert_eq!(run(true).0, [302, 603, 323, 304], "101 rounds turn it around");
}

fn a_replay_reads_what_was_staged_for_it() {
    let rig = Rig::new();
    let to = zeros(&rig.device, "to", 1);
    let keeps = vec![to.clone(), rig.log.0.clone()];
    let exec = capture(&rig.stream, &rig.log.emission_of(to.base()), keeps);
    let mut ring = Staging::new(&rig.device, "ring", 4).unwrap();
    for value in 0..200u32 {
        if value % 50 == 0 {
            rig.spin(10);
        }
        ring.upload(&rig.stream, to.base(), 4, &[], |bytes| bytes.copy_from_slice(&value.to_ne_bytes()))
            .unwrap();
        rig.stream.replay(&exec).unwrap();
    }
    rig.stream.synchronize().unwrap();
    assert_eq!(rig.log.seen(), (0..200).collect::<Vec<_>>());
}

/// What a refused call may use.
struct Bench {
    device: Device,
    stream: Stream,
    other: Stream,
    arena: Arena,
    staging: Staging,
    exec: Exec,
    event: Event,
}

fn what_a_capture_excludes_is_refused_by_name() {
    type Call = fn(&mut Bench) -> Result<(), Error>;
    let calls: [(&str, Call); 14] = [
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
        ("loading kernels", |b| b.device.prepare(&KERNELS)),
    ];
    for (name, call) in calls {
        let rig = Rig::new();
        let mut bench = Bench {
            device: rig.device.clone(),
            stream: rig.stream.clone(),
            other: rig.device.stream(),
            arena: zeros(&rig.device, "arena", 4),
            staging: Staging::new(&rig.device, "staging", 4).unwrap(),
            exec: capture(&rig.stream, &rig.log.emission(9), vec![rig.log.0.clone()]),
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

fn kernels_are_not_loaded_in_a_capture() {
    let rig = Rig::on(open(true));
    let recording = Recording::begin(&rig.stream, "round").unwrap();
    let refused = rig.stream.run(rig.log.emission(1), &[]);
    assert_eq!(refused, Err(Error::Capturing { call: "loading a kernel", capture: "round".into() }));
    assert!(matches!(recording.finish(vec![]).err(), Some(Error::CaptureFailed { .. })));
    rig.device.prepare(&KERNELS).unwrap();
    let exec = capture(&rig.stream, &rig.log.emission(1), vec![rig.log.0.clone()]);
    rig.stream.replay(&exec).unwrap();
    rig.stream.synchronize().unwrap();
    assert_eq!(rig.log.seen(), [1]);
}

fn a_kernel_without_a_twin_breaks_the_capture() {
    let rig = Rig::new();
    let a = zeros(&rig.device, "a", 4);
    let args = AddArgs { to: a.base().cast(), from: a.base().cast(), count: 4, value: 1 };
    let recording = Recording::begin(&rig.stream, "round").unwrap();
    let refused = rig.stream.run(launch::<AddF32>(&args), &[]);
    assert!(matches!(refused, Err(Error::Launch { kernel: "add", .. })), "{refused:?}");
    match recording.finish(vec![]).err() {
        Some(Error::CaptureFailed { why, .. }) => assert!(why.contains("host device only"), "{why}"),
        other => panic!("{other:?}"),
    }
}

fn a_recording_dropped_early_leaves_the_stream() {
    fn early(rig: &Rig) -> Result<Exec, Error> {
        let recording = Recording::begin(&rig.stream, "early")?;
        rig.note(2);
        rig.device.arena("late", 1 << 30)?;
        recording.finish(vec![])
    }
    fn panics(rig: &Rig) -> Result<Exec, Error> {
        let _recording = Recording::begin(&rig.stream, "panics")?;
        rig.note(2);
        panic!("a bug in a body")
    }
    for (leave, fails) in [(early as fn(&Rig) -> Result<Exec, Error>, true), (panics, false)] {
        let rig = Rig::new();
        rig.note(1);
        let left = catch_unwind(AssertUnwindSafe(|| leave(&rig).map(drop)));
        assert_eq!(left.is_ok_and(|result| result.is_err()), fails);
        rig.note(3);
        rig.stream.synchronize().unwrap();
        assert_eq!(rig.log.seen(), [1, 3]);
        let exec = capture(&rig.stream, &rig.log.emission(4), vec![]);
        assert_eq!(exec.nodes(), 1, "nothing of the dropped capture is left");
    }
}

/// The driver refuses one node of the capture, wherever it is: the capture fails by name, the stream is as it
/// was, and the round runs eagerly.
fn a_capture_that_fails_at_any_node_loses_nothing() {
    const NODES: u32 = 5;
    let rig = Rig::new();
    let a = zeros(&rig.device, "a", 4);
    let args = AddArgs { to: a.base().cast(), from: a.base().cast(), count: 4, value: 1 };
    rig.device.prepare(&[Crowd::DEFINITION]).unwrap();
    let mut expected = Vec::new();
    for bad in 0..NODES {
        let recording = Recording::begin(&rig.stream, "round").unwrap();
        for node in 0..NODES {
            match node == bad {
                true => rig.stream.run(launch::<Crowd>(&args), &[]).unwrap(),
                false => rig.note(node),
            }
        }
        match recording.finish(vec![a.clone()]).err() {
            Some(Error::CaptureFailed { why, .. }) => {
                assert!(why.starts_with(&format!("entry {bad}, crowd[u32]")), "{why}");
                assert!(why.contains("CUDA_ERROR_"), "{why}");
            }
            other => panic!("{other:?}"),
        }
        for node in 0..NODES {
            rig.note(node);
            expected.push(node);
        }
        rig.stream.synchronize().unwrap();
        assert_eq!(rig.log.seen(), expected, "the round ran once, eagerly");
    }
    let exec = capture(&rig.stream, &launch::<Add>(&args), vec![a.clone()]);
    rig.stream.replay(&exec).unwrap();
    rig.stream.synchronize().unwrap();
    assert_eq!(words(&a, 4), [1; 4], "and later captures are fine");
}

fn an_exec_holds_its_arenas() {
    let rig = Rig::new();
    let result = rig.device.pinned("result", 16).unwrap();
    let used = rig.device.used_bytes();
    let data = of_words(&rig.device, "data", &[1, 2, 3, 4]);
    let mut emission = add(&data, &data, 4, 10);
    emission.copy(result.base(), data.base(), 16);
    let recording = Recording::begin(&rig.stream, "round").unwrap();
    rig.stream.run(emission, &[data]).unwrap();
    let exec = recording.finish(vec![]).unwrap();
    let _others: Vec<_> = (0..8).map(|_| zeros(&rig.device, "other", 4)).collect();
    assert_eq!(rig.device.used_bytes(), used + 9 * 16, "the exec alone holds it");
    rig.spin(30);
    rig.stream.replay(&exec).unwrap();
    drop(exec);
    assert_eq!(rig.device.used_bytes(), used + 9 * 16, "the queued replay holds it too");
    rig.stream.synchronize().unwrap();
    result.read(|bytes| assert_eq!(bytemuck::pod_collect_to_vec::<u8, u32>(bytes), [11, 12, 13, 14]));
    assert_eq!(rig.device.used_bytes(), used + 8 * 16);
}

fn an_exec_may_go_while_it_runs() {
    let rig = Rig::new();
    let mut emission = rig.log.emission(0);
    emission.append(&launch::<crate::rig::Spin>(&20_000_000));
    emission.append(&rig.log.emission(1));
    for _ in 0..3 {
        let exec = capture(&rig.stream, &emission, vec![rig.log.0.clone()]);
        rig.stream.replay(&exec).unwrap();
        drop(exec);
    }
    rig.stream.synchronize().unwrap();
    assert_eq!(rig.log.seen(), [0, 1, 0, 1, 0, 1]);
}

fn an_exec_runs_on_any_stream_of_its_device() {
    let rig = Rig::new();
    let (other, event) = (rig.device.stream(), rig.device.event());
    let exec = capture(&rig.stream, &rig.log.emission(1), vec![rig.log.0.clone()]);
    rig.note(0);
    rig.stream.record(&event).unwrap();
    other.wait(&event).unwrap();
    other.replay(&exec).unwrap();
    other.synchronize().unwrap();
    assert_eq!(rig.log.seen(), [0, 1]);
}

fn an_empty_capture_is_an_exec() {
    let rig = Rig::new();
    let exec = Recording::begin(&rig.stream, "nothing").unwrap().finish(vec![]).unwrap();
    assert_eq!(exec.nodes(), 0);
    rig.stream.replay(&exec).unwrap();
    rig.stream.synchronize().unwrap();
}

fn other_streams_are_not_captured() {
    let rig = Rig::new();
    let (other, event) = (rig.device.stream(), rig.device.event());
    let replayed = capture(&rig.stream, &rig.log.emission(7), vec![rig.log.0.clone()]);
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

/// Threads capture and replay on streams of their own; a refused begin is tried again. Meanwhile another
/// thread allocates, frees and launches whenever no capture is in progress.
fn captures_take_turns_and_others_go_on() {
    let rig = Rig::new();
    let refused = |error: &Error| matches!(error, Error::Capturing { .. } | Error::CaptureFailed { .. });
    let lanes: Vec<(Stream, Arena)> =
        (0..4).map(|_| (rig.device.stream(), zeros(&rig.device, "data", 64))).collect();
    std::thread::scope(|scope| {
        for (thread, (stream, data)) in (0u32..).zip(lanes) {
            scope.spawn(move || {
                let mut done = 0u32;
                while done < 50 {
                    let recording = match Recording::begin(&stream, "mine") {
                        Ok(recording) => recording,
                        Err(error) => {
                            assert!(refused(&error), "{error}");
                            std::thread::yield_now();
                            continue;
                        }
                    };
                    stream.run(add(&data, &data, 64, thread), std::slice::from_ref(&data)).unwrap();
                    match recording.finish(vec![]) {
                        Ok(exec) => {
                            stream.replay(&exec).unwrap();
                            done += 1;
                        }
                        Err(error) => assert!(refused(&error), "{error}"),
                    }
                }
                loop {
                    match stream.synchronize().and_then(|()| data.read::<u32>(data.base().cast(), 64)) {
                        Ok(words) => break assert_eq!(words, vec![50 * thread; 64]),
                        Err(error) => assert!(refused(&error), "{error}"),
                    }
                    std::thread::yield_now();
                }
            });
        }
        let device = rig.device.clone();
        scope.spawn(move || {
            for _ in 0..200 {
                if let Err(error) = device.arena("passing", 4096).map(drop) {
                    assert!(refused(&error), "{error}");
                }
                std::thread::yield_now();
            }
        });
    });
}

fn execs_of_another_device_are_refused() {
    let (rig, host) = (Rig::new(), Rig::on(Device::host(HostOptions::default())));
    let exec = capture(&host.stream, &host.log.emission(1), vec![]);
    assert_eq!(rig.stream.replay(&exec), Err(Error::OtherDevice { call: "a replay" }));
}
