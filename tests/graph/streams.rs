//! When work runs, in which order, and what events mark.

use std::sync::mpsc;
use std::time::Duration;

use graph::{Error, Stream};

use crate::rig::{Log, Rig, copy_word, words, zeros};

/// A second stream of the rig's device with a log of its own.
fn second(rig: &Rig) -> (Stream, Log) {
    (rig.device.stream(), Log::new(&rig.device))
}

#[test]
fn nothing_runs_before_something_waits() {
    let rig = Rig::new();
    rig.note(1);
    rig.note(2);
    assert!(rig.log.seen().is_empty());
    rig.stream.synchronize().unwrap();
    assert_eq!(rig.log.seen(), [1, 2]);
    rig.stream.synchronize().unwrap();
    assert_eq!(rig.log.seen(), [1, 2], "nothing runs twice");
}

#[test]
fn advance_runs_that_many_items() {
    let rig = Rig::new();
    (0..6).for_each(|value| rig.note(value));
    for (items, done) in [(0, 0), (1, 1), (3, 4), (9, 6), (usize::MAX, 6)] {
        rig.stream.advance(items).unwrap();
        assert_eq!(rig.log.seen(), (0..done).collect::<Vec<_>>());
    }
    rig.note(6);
    assert_eq!(rig.log.seen().len(), 6, "an advance past the end is not owed later");
}

#[test]
fn an_emission_is_one_item() {
    let rig = Rig::new();
    let mut emission = rig.log.emission(1);
    emission.append(&rig.log.emission(2));
    rig.stream.run(emission, &[]).unwrap();
    rig.note(3);
    rig.stream.advance(1).unwrap();
    assert_eq!(rig.log.seen(), [1, 2]);
}

#[test]
fn streams_do_not_run_each_other() {
    let rig = Rig::new();
    let (other, log) = second(&rig);
    rig.note(1);
    log.note(&other, 2);
    other.synchronize().unwrap();
    assert_eq!((rig.log.seen(), log.seen()), (vec![], vec![2]));
}

#[test]
fn an_edge_runs_the_other_stream_up_to_its_event_and_no_further() {
    let rig = Rig::new();
    let (other, log) = second(&rig);
    let event = rig.device.event();
    assert!(event.reached(), "an event that was never recorded");
    rig.note(1);
    rig.stream.record(&event).unwrap();
    rig.note(2);
    other.wait(&event).unwrap();
    log.note(&other, 3);
    assert!(!event.reached());
    other.synchronize().unwrap();
    assert!(event.reached());
    assert_eq!((rig.log.seen(), log.seen()), (vec![1], vec![3]));
}

#[test]
fn later_work_waits_and_earlier_work_does_not() {
    let rig = Rig::new();
    let (other, event) = (rig.device.stream(), rig.device.event());
    rig.log.note(&other, 1);
    rig.note(2);
    rig.stream.record(&event).unwrap();
    other.wait(&event).unwrap();
    rig.log.note(&other, 3);
    other.advance(1).unwrap();
    assert_eq!(rig.log.seen(), [1]);
    other.synchronize().unwrap();
    assert_eq!(rig.log.seen(), [1, 2, 3]);
}

#[test]
fn a_wait_means_the_point_marked_when_it_was_queued() {
    let rig = Rig::new();
    let (other, event) = (rig.device.stream(), rig.device.event());
    other.wait(&event).unwrap();
    rig.note(1);
    rig.stream.record(&event).unwrap();
    other.wait(&event).unwrap();
    rig.note(2);
    rig.stream.record(&event).unwrap();
    other.synchronize().unwrap();
    assert_eq!(rig.log.seen(), [1], "the later record does not move a wait that is queued");
    assert!(!event.reached(), "the event itself marks the later point");
    rig.note(3);
    event.synchronize().unwrap();
    assert_eq!(rig.log.seen(), [1, 2]);
}

#[test]
fn an_event_outlives_the_handle_of_its_stream() {
    let rig = Rig::new();
    let (other, event) = (rig.device.stream(), rig.device.event());
    rig.log.note(&other, 1);
    other.record(&event).unwrap();
    drop(other);
    event.synchronize().unwrap();
    assert_eq!(rig.log.seen(), [1]);
}

#[test]
fn edges_there_and_back_keep_the_order() {
    let rig = Rig::new();
    let (other, event) = (rig.device.stream(), rig.device.event());
    for turn in 0..50 {
        let (now, then) = if turn % 2 == 0 { (&rig.stream, &other) } else { (&other, &rig.stream) };
        rig.log.note(now, turn);
        now.record(&event).unwrap();
        then.wait(&event).unwrap();
    }
    other.synchronize().unwrap();
    rig.stream.synchronize().unwrap();
    assert_eq!(rig.log.seen(), (0..50).collect::<Vec<_>>());
}

#[test]
fn two_threads_may_wait_for_streams_that_wait_for_each_other() {
    let (tell, done) = mpsc::channel();
    std::thread::spawn(move || {
        for _ in 0..50 {
            let rig = Rig::new();
            let (other, log) = second(&rig);
            let (here, there) = (rig.device.event(), rig.device.event());
            for turn in 0..20 {
                rig.note(turn);
                log.note(&other, turn);
                rig.stream.record(&here).unwrap();
                other.record(&there).unwrap();
                rig.stream.wait(&there).unwrap();
                other.wait(&here).unwrap();
            }
            std::thread::scope(|scope| {
                for stream in [&rig.stream, &other, &rig.stream] {
                    scope.spawn(|| stream.synchronize().unwrap());
                }
            });
            let all: Vec<u32> = (0..20).collect();
            assert_eq!((rig.log.seen(), log.seen()), (all.clone(), all));
        }
        tell.send(()).unwrap();
    });
    done.recv_timeout(Duration::from_secs(60)).expect("neither a deadlock nor a failed assertion");
}

#[test]
fn threads_that_queue_while_another_waits_lose_nothing() {
    let rig = Rig::new();
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let rig = &rig;
            scope.spawn(move || {
                for turn in 0..100 {
                    rig.note(thread * 100 + turn);
                    if turn % 7 == 0 {
                        rig.stream.synchronize().unwrap();
                    }
                }
            });
        }
    });
    rig.stream.synchronize().unwrap();
    let seen = rig.log.seen();
    for thread in 0..3 {
        let own: Vec<u32> = seen.iter().copied().filter(|value| value / 100 == thread).collect();
        assert_eq!(own, (thread * 100..thread * 100 + 100).collect::<Vec<_>>());
    }
}

#[test]
fn a_copy_reads_its_source_when_it_runs() {
    let rig = Rig::new();
    let (from, to) = (zeros(&rig.device, "from", 1), zeros(&rig.device, "to", 1));
    rig.stream.run(copy_word(to.base(), from.base()), &[]).unwrap();
    from.write(from.base().cast(), &[5u32]).unwrap();
    assert_eq!(words(&to, 1), [0]);
    rig.stream.synchronize().unwrap();
    assert_eq!(words(&to, 1), [5]);
}

#[test]
fn events_and_execs_of_another_device_are_refused() {
    let (rig, other) = (Rig::new(), Rig::new());
    let event = other.device.event();
    other.note(1);
    other.stream.record(&event).unwrap();
    assert_eq!(rig.stream.wait(&event), Err(Error::OtherDevice { call: "waiting for an event" }));
    assert_eq!(rig.stream.record(&event), Err(Error::OtherDevice { call: "recording an event" }));
    let recording = graph::Recording::begin(&other.stream, "theirs").unwrap();
    other.note(2);
    let exec = recording.finish(vec![]).unwrap();
    assert_eq!(rig.stream.replay(&exec), Err(Error::OtherDevice { call: "a replay" }));
    rig.stream.synchronize().unwrap();
    assert!(rig.log.seen().is_empty() && other.log.seen().is_empty());
}
