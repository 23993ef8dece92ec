//! Launches, order, events, staging, and what is held while work runs.

use std::time::{Duration, Instant};

use graph::host::HostOptions;
use graph::{Device, Emission, Error, Kernel, Recording, Staging};

use crate::rig::{
    Absent, Add, AddArgs, AddF32, Crowd, Echo, EchoArgs, Hasty, KERNELS, Late, LateArgs, Look, LookArgs,
    Misfit, Rig, Spin, TURN, Turn, TurnArgs, add, launch, of_words, open, spin, words, zeros,
};

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("a_launch_covers_its_grid", a_launch_covers_its_grid),
    ("an_argument_block_arrives_whole", an_argument_block_arrives_whole),
    ("a_kernel_gets_the_shared_memory_of_its_twin", a_kernel_gets_the_shared_memory_of_its_twin),
    ("host_and_cuda_give_the_same_bytes", host_and_cuda_give_the_same_bytes),
    ("a_kernel_is_loaded_at_its_first_launch", a_kernel_is_loaded_at_its_first_launch),
    ("a_kernel_without_a_twin_is_refused", a_kernel_without_a_twin_is_refused),
    ("a_twin_that_does_not_fit_is_refused", a_twin_that_does_not_fit_is_refused),
    ("an_early_launch_waits_for_the_one_ahead", an_early_launch_waits_for_the_one_ahead),
    ("an_event_is_reached_when_its_work_is", an_event_is_reached_when_its_work_is),
    ("a_stream_waits_for_an_event_of_another", a_stream_waits_for_an_event_of_another),
    ("an_event_waited_for_is_the_point_of_then", an_event_waited_for_is_the_point_of_then),
    ("staged_words_survive_a_busy_device", staged_words_survive_a_busy_device),
    ("running_work_holds_its_arenas", running_work_holds_its_arenas),
    ("released_memory_is_not_used_again_too_early", released_memory_is_not_used_again_too_early),
    ("a_dropped_stream_ends_its_work", a_dropped_stream_ends_its_work),
    ("threads_share_a_device", threads_share_a_device),
    ("a_launch_that_cannot_be_is_a_fault", a_launch_that_cannot_be_is_a_fault),
];

fn a_launch_covers_its_grid() {
    let rig = Rig::new();
    for count in [1, 127, 128, 129, 100_003] {
        let values: Vec<u32> = (0..count as u32).map(|i| i * 3).collect();
        let from = of_words(&rig.device, "from", &values);
        let to = rig.device.arena("to", 4 * count + 4).unwrap();
        rig.stream.run(add(&to, &from, count, 11), &[from.clone(), to.clone()]).unwrap();
        rig.stream.synchronize().unwrap();
        let expected: Vec<u32> = values.iter().map(|value| value + 11).chain([u32::MAX]).collect();
        assert!(words(&to, count + 1) == expected, "{count} words and the poison behind them");
    }
}

fn an_argument_block_arrives_whole() {
    let rig = Rig::new();
    let to = rig.device.arena("to", 8 * 63).unwrap();
    let blocks = [1u64, 7].map(|seed| EchoArgs {
        to: to.base().cast(),
        words: std::array::from_fn(|i| (i as u64 + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15)),
    });
    // The second block does not start where the first did: a launch of another size lies between.
    let mut emission = rig.log.emission(1);
    for args in &blocks {
        emission.launch::<Echo>(args).unwrap();
        rig.stream.run(emission, &[to.clone(), rig.log.0.clone()]).unwrap();
        rig.stream.synchronize().unwrap();
        assert_eq!(to.read::<u64>(to.base().cast(), 63).unwrap(), args.words);
        emission = launch::<Spin>(&1);
    }
}

fn a_kernel_gets_the_shared_memory_of_its_twin() {
    let rig = Rig::new();
    let values: Vec<u32> = (0..TURN as u32).collect();
    let list = of_words(&rig.device, "list", &values);
    let args = TurnArgs { words: list.base().cast(), count: TURN as u32, pad: 0 };
    rig.stream.run(launch::<Turn>(&args), std::slice::from_ref(&list)).unwrap();
    rig.stream.synchronize().unwrap();
    assert!(words(&list, TURN).into_iter().eq(values.into_iter().rev()));
}

/// A list of work with every kind of entry; the words that it leaves.
fn work_through(device: &Device) -> Vec<u32> {
    let stream = device.stream();
    let (a, b) = (of_words(device, "a", &[5, 6, 7, 8]), zeros(device, "b", 4));
    let mut emission = add(&b, &a, 4, 100);
    emission.copy(a.base(), b.base().byte_add(4), 8);
    emission.fill(b.base().byte_add(14), 2, 0x77);
    emission.launch::<Turn>(&TurnArgs { words: a.base().cast(), count: 4, pad: 0 }).unwrap();
    stream.run(emission, &[a.clone(), b.clone()]).unwrap();
    stream.synchronize().unwrap();
    [words(&a, 4), words(&b, 4)].concat()
}

fn host_and_cuda_give_the_same_bytes() {
    let host = Device::host(HostOptions::default());
    assert_eq!(work_through(&open(true)), work_through(&host));
}

fn a_kernel_is_loaded_at_its_first_launch() {
    let rig = Rig::on(open(true));
    rig.note(3);
    rig.stream.synchronize().unwrap();
    assert_eq!(rig.log.seen(), [3]);
    rig.device.prepare(&KERNELS).unwrap();
    rig.note(4);
    rig.stream.synchronize().unwrap();
    assert_eq!(rig.log.seen(), [3, 4]);
}

fn a_kernel_without_a_twin_is_refused() {
    let rig = Rig::new();
    rig.device.prepare(&[AddF32::DEFINITION]).unwrap();
    let a = zeros(&rig.device, "a", 4);
    let args = AddArgs { to: a.base().cast(), from: a.base().cast(), count: 4, value: 1 };
    let mut emission = rig.log.emission(1);
    emission.launch::<AddF32>(&args).unwrap();
    let refused = rig.stream.run(emission, &[]);
    let why = "f32 runs on the host device only".to_owned();
    assert_eq!(refused, Err(Error::Launch { kernel: "add", why }));
    rig.stream.synchronize().unwrap();
    assert!(rig.log.seen().is_empty(), "nothing was queued");
}

fn a_twin_that_does_not_fit_is_refused() {
    let rig = Rig::new();
    match rig.device.prepare(&[Misfit::DEFINITION]) {
        Err(Error::Launch { kernel: "misfit", why }) => {
            assert!(why.contains("[24] bytes") && why.ends_with("has 8"), "{why}");
        }
        other => panic!("{other:?}"),
    }
    match rig.device.prepare(&[Absent::DEFINITION]) {
        Err(Error::Code { source, doing, .. }) => {
            assert_eq!((source.as_str(), doing.as_str()), ("words.cu", "find `absent` of"));
        }
        other => panic!("{other:?}"),
    }
    rig.note(1);
    rig.stream.synchronize().unwrap();
}

/// Launches that start early see what the launch ahead wrote if they wait, eager and replayed; one that does not
/// wait shows that there is something to wait for.
fn an_early_launch_waits_for_the_one_ahead() {
    let rig = Rig::new();
    let (from, to) = (zeros(&rig.device, "from", 1), zeros(&rig.device, "to", 1));
    let keeps = [from.clone(), to.clone()];
    let look = LookArgs { to: to.base().cast(), from: from.base().cast() };
    let pair = |value: u32, hasty: bool| {
        let late = LateArgs { to: from.base().cast(), value, nanoseconds: 200_000 };
        let mut pair = launch::<Late>(&late);
        match hasty {
            true => pair.launch::<Hasty>(&look).unwrap(),
            false => pair.launch::<Look>(&look).unwrap(),
        }
        pair
    };
    let seen = |hasty: bool, value: u32| {
        rig.stream.run(pair(value, hasty), &keeps).unwrap();
        rig.stream.synchronize().unwrap();
        words(&to, 1)[0]
    };
    assert!((1..50).all(|value| seen(false, value) == value));
    let capture = Recording::begin(&rig.stream, "look").unwrap();
    rig.stream.run(pair(77, false), &keeps).unwrap();
    let exec = capture.finish(keeps.to_vec()).unwrap();
    for _ in 0..20 {
        from.write(from.base().cast(), &[0u32]).unwrap();
        rig.stream.replay(&exec).unwrap();
        rig.stream.synchronize().unwrap();
        assert_eq!(words(&to, 1)[0], 77);
    }
    let Device::Cuda(cuda) = &rig.device else { unreachable!("the rig's device is one") };
    if !cuda.architecture().starts_with("sm_8") {
        assert!((100..150).any(|value| seen(true, value) != value), "no launch started early");
    }
}

fn an_event_is_reached_when_its_work_is() {
    let rig = Rig::new();
    let event = rig.device.event();
    assert!(event.reached(), "an event that was never recorded");
    event.synchronize().unwrap();
    rig.spin(50);
    rig.note(1);
    rig.stream.record(&event).unwrap();
    assert!(!event.reached());
    let start = Instant::now();
    event.synchronize().unwrap();
    assert!(start.elapsed() > Duration::from_millis(20), "it waited");
    assert!(event.reached());
    assert_eq!(rig.log.seen(), [1]);
}

fn a_stream_waits_for_an_event_of_another() {
    let rig = Rig::new();
    let (other, event) = (rig.device.stream(), rig.device.event());
    for turn in 0..10 {
        rig.spin(5);
        rig.note(2 * turn);
        rig.stream.record(&event).unwrap();
        other.wait(&event).unwrap();
        rig.log.note(&other, 2 * turn + 1);
        other.record(&event).unwrap();
        rig.stream.wait(&event).unwrap();
    }
    rig.stream.synchronize().unwrap();
    assert_eq!(rig.log.seen(), (0..20).collect::<Vec<_>>());
}

fn an_event_waited_for_is_the_point_of_then() {
    let rig = Rig::new();
    let (other, event) = (rig.device.stream(), rig.device.event());
    rig.note(1);
    rig.stream.record(&event).unwrap();
    other.wait(&event).unwrap();
    rig.spin(100);
    rig.stream.record(&event).unwrap();
    let start = Instant::now();
    other.synchronize().unwrap();
    assert!(start.elapsed() < Duration::from_millis(60), "the later point was not waited for");
    assert!(!event.reached(), "the event itself marks the later point");
    rig.stream.synchronize().unwrap();
}

fn staged_words_survive_a_busy_device() {
    let rig = Rig::new();
    let to = zeros(&rig.device, "to", 1);
    let mut ring = Staging::new(&rig.device, "ring", 4).unwrap();
    for value in 0..200u32 {
        if value % 20 == 0 {
            rig.spin(10);
        }
        ring.upload(&rig.stream, to.base(), 4, &[], |bytes| bytes.copy_from_slice(&value.to_ne_bytes()))
            .unwrap();
        rig.stream.run(rig.log.emission_of(to.base()), &[to.clone(), rig.log.0.clone()]).unwrap();
    }
    rig.stream.synchronize().unwrap();
    assert_eq!(rig.log.seen(), (0..200).collect::<Vec<_>>());
}

fn running_work_holds_its_arenas() {
    const BYTES: usize = 1 << 20;
    let rig = Rig::new();
    let result = rig.device.pinned("result", 4).unwrap();
    let used = rig.device.used_bytes();
    let data = of_words(&rig.device, "data", &vec![7; BYTES / 4]);
    rig.spin(50);
    let mut emission = add(&data, &data, BYTES / 4, 1);
    emission.copy(result.base(), data.base().byte_add(BYTES - 4), 4);
    rig.stream.run(emission, &[data]).unwrap();
    let others: Vec<_> = (0..8).map(|_| zeros(&rig.device, "other", BYTES / 4)).collect();
    assert_eq!(rig.device.used_bytes(), used + 9 * BYTES, "the queue holds it");
    rig.stream.synchronize().unwrap();
    result.read(|bytes| assert_eq!(bytes, 8u32.to_ne_bytes()));
    assert_eq!(rig.device.used_bytes(), used + 8 * BYTES);
    assert!(others.iter().all(|other| words(other, BYTES / 4).iter().all(|&word| word == 0)));
}

fn released_memory_is_not_used_again_too_early() {
    let rig = Rig::new();
    let (data, result) = (of_words(&rig.device, "data", &[7; 1024]), rig.device.pinned("result", 4));
    let result = result.unwrap();
    rig.spin(50);
    let mut emission = Emission::new();
    emission.copy(result.base(), data.base(), 4);
    // Nothing holds the arena, and it goes while the copy waits.
    rig.stream.run(emission, &[]).unwrap();
    drop(data);
    let _others: Vec<_> = (0..8).map(|_| zeros(&rig.device, "other", 1024)).collect();
    rig.stream.synchronize().unwrap();
    result.read(|bytes| assert_eq!(bytes, 7u32.to_ne_bytes()));
}

fn a_dropped_stream_ends_its_work() {
    let rig = Rig::new();
    let other = rig.device.stream();
    spin(&other, 20);
    rig.log.note(&other, 6);
    drop(other);
    assert_eq!(rig.log.seen(), [6], "what held an arena was waited for");
}

fn threads_share_a_device() {
    let rig = Rig::new();
    std::thread::scope(|scope| {
        for thread in 0..4u32 {
            let device = rig.device.clone();
            scope.spawn(move || {
                let stream = device.stream();
                let data = zeros(&device, "data", 1000);
                for _ in 0..200 {
                    stream.run(add(&data, &data, 1000, thread), std::slice::from_ref(&data)).unwrap();
                }
                stream.synchronize().unwrap();
                assert_eq!(words(&data, 1000), vec![200 * thread; 1000]);
            });
        }
    });
}

fn a_launch_that_cannot_be_is_a_fault() {
    // The driver refuses it before it runs, so the context lives; this device does not trust it any more.
    let rig = Rig::new();
    let a = zeros(&rig.device, "a", 4);
    let args = AddArgs { to: a.base().cast(), from: a.base().cast(), count: 4, value: 1 };
    let first = rig.stream.run(launch::<Crowd>(&args), std::slice::from_ref(&a)).unwrap_err();
    let text = first.to_string();
    assert!(text.contains("crowd[u32]") && text.contains("CUDA_ERROR_INVALID_VALUE"), "{text}");
    assert_eq!(rig.stream.run(launch::<Add>(&args), &[]), Err(first.clone()));
    assert_eq!(rig.stream.synchronize(), Err(first));
    Rig::new().note(1);
}
