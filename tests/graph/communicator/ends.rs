//! How collectives end when they cannot go on: peers that are gone or silent, the stop word, faults, and closing.

use std::sync::mpsc;
use std::time::Instant;

use graph::error::FaultKind;
use graph::{Emission, Error, Fault};

use super::{Communicator, Duration, LONG, Rank, both, connected, ranks, transports};
use crate::rig::{Fail, Log, device, fault, launch};

/// What a collective of a lost peer may take beside its wait, on a busy machine.
const SOON: Duration = Duration::from_secs(5);

/// The words of a fault that a peer caused.
fn peer_fault(result: Result<(), Error>) -> (String, String) {
    match fault(result) {
        Fault { work, kind: FaultKind::Peer(why) } => (work, why),
        other => panic!("expected a fault of the peer, got {other:?}"),
    }
}

/// A rank with more data than any buffer of a link holds.
fn rank(end: Communicator) -> Rank {
    Rank::new(end, 64 << 20)
}

/// A fresh device that has the end of a failed one: later collectives fail at once, for the first reason.
fn assert_ended(end: &Communicator, reason: &str) {
    let (again, begun) = (Rank::new(end.clone(), 64), Instant::now());
    let (work, why) = peer_fault(again.run(again.gather(8)));
    assert_eq!(work, format!("gather 2 x 8 bytes as rank {}", end.rank()));
    assert!(why.starts_with("the communicator had ended: ") && why.contains(reason), "{why}");
    assert!(begun.elapsed() < Duration::from_millis(100));
}

#[test]
fn a_peer_that_never_comes_is_a_fault_after_the_wait() {
    let wait = Duration::from_millis(150);
    for [end, _silent] in transports(wait) {
        let rank = rank(end);
        let begun = Instant::now();
        let (work, why) = peer_fault(rank.run(rank.gather(5)));
        assert!(begun.elapsed() >= wait && begun.elapsed() < wait + SOON, "{:?}", begun.elapsed());
        assert_eq!(work, "gather 2 x 5 bytes as rank 0");
        let said = [
            "rank 1 did not do its part of collective 1 within 15",
            "0 of 37 came",
            "start both ranks again",
        ];
        said.iter().for_each(|part| assert!(why.contains(part), "{why}"));
        assert_ended(&rank.end, "rank 1 did not do its part");
    }
}

#[test]
fn a_send_that_nobody_takes_and_a_receive_of_nothing_end_too() {
    for [end, _silent] in transports(Duration::from_millis(150)) {
        let rank = rank(end);
        let large = rank.emit(|emission| emission.send(&rank.end, rank.data.base(), 64 << 20).unwrap());
        let (work, why) = peer_fault(rank.run(large));
        assert_eq!(work, "send 67108864 bytes to rank 1");
        assert!(why.contains("did not do its part") && why.contains("0 of 0 came"), "{why}");
    }
    for [_silent, end] in transports(Duration::from_millis(150)) {
        let rank = rank(end);
        let (work, why) = peer_fault(
            rank.run(rank.emit(|emission| emission.receive(&rank.end, rank.data.base(), 9).unwrap())),
        );
        assert_eq!(work, "receive 9 bytes from rank 0");
        assert!(why.contains("0 of 0 bytes went, 0 of 41 came"), "{why}");
    }
}

#[test]
fn a_peer_that_goes_is_noticed_at_once() {
    for [end, peer] in transports(LONG) {
        let rank = rank(end);
        let begun = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(30));
                drop(peer);
            });
            let (work, why) = peer_fault(rank.run(rank.gather(6)));
            assert_eq!(work, "gather 2 x 6 bytes as rank 0");
            assert!(
                why.contains("rank 1 is gone at collective 1") && why.contains("see why it ended"),
                "{why}"
            );
        });
        assert!(begun.elapsed() < SOON);
        assert_ended(&rank.end, "rank 1 is gone");
    }
}

#[test]
fn a_peer_that_goes_ends_a_send_that_it_does_not_take() {
    for [end, peer] in transports(LONG) {
        let rank = rank(end);
        let begun = Instant::now();
        std::thread::scope(|scope| {
            // The other handle stays, so nothing but the stop can be noticed.
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(30));
                peer.stop("a test");
            });
            let large = rank.emit(|emission| emission.send(&rank.end, rank.data.base(), 64 << 20).unwrap());
            let (_, why) = peer_fault(rank.run(large));
            assert!(why.contains("rank 1 is gone"), "{why}");
        });
        assert!(begun.elapsed() < SOON);
    }
}

#[test]
fn what_was_sent_before_a_peer_went_arrives() {
    for ends in transports(LONG) {
        let [first, second] = ranks(ends, 64 << 10);
        let send = first.emit(|emission| emission.send(&first.end, first.data.base(), 10_000).unwrap());
        first.run(send).unwrap();
        drop(first);
        let receive =
            || second.emit(|emission| emission.receive(&second.end, second.data.base(), 10_000).unwrap());
        second.run(receive()).unwrap();
        assert!(second.bytes()[..10_000] == Rank::fresh(0, 10_000));
        let (_, why) = peer_fault(second.run(receive()));
        assert!(why.contains("rank 0 is gone at collective"), "{why}");
    }
}

#[test]
fn the_stop_word_ends_a_wait_and_everything_later_here_and_at_the_peer() {
    for large in [false, true] {
        for [end, peer] in transports(LONG) {
            let rank = rank(end);
            let emission = match large {
                // A send whose first bytes fill the link.
                true => rank.emit(|emission| emission.send(&rank.end, rank.data.base(), 64 << 20).unwrap()),
                false => rank.gather(4),
            };
            let (tell, told) = mpsc::channel();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(50));
                    rank.end.stop("the server drains");
                    tell.send(Instant::now()).unwrap();
                });
                let (_, why) = peer_fault(rank.run(emission));
                let ended = Instant::now();
                assert!(ended.saturating_duration_since(told.recv().unwrap()) < Duration::from_millis(100));
                assert!(
                    why.starts_with("after ") && why.ends_with("it was stopped: the server drains"),
                    "{why}"
                );
            });
            rank.end.stop("another reason");
            assert_ended(&rank.end, "the server drains");
            let (begun, other) = (Instant::now(), Rank::new(peer, 64));
            let (_, why) = peer_fault(other.run(other.gather(4)));
            assert!(begun.elapsed() < SOON && why.contains("rank 0"), "{why}");
        }
    }
}

#[test]
fn a_stopped_communicator_records_but_never_waits() {
    let [end, _peer] = Communicator::pair(LONG);
    let rank = Rank::new(end, 64);
    rank.end.stop("early");
    let exec = rank.capture(rank.gather(8));
    rank.stream.replay(&exec).unwrap();
    let begun = Instant::now();
    assert!(peer_fault(rank.stream.synchronize()).1.contains("early"));
    assert!(begun.elapsed() < Duration::from_millis(100));
}

#[test]
fn work_before_a_lost_collective_stands_and_work_after_it_is_dropped() {
    let [end, peer] = Communicator::pair(LONG);
    let rank = Rank::new(end, 64);
    let (log, other) = (Log::new(&rank.device), rank.device.stream());
    let back = rank.device.pinned("back", 12).unwrap();
    let mut emission = log.emission(1);
    emission.copy::<u8>(back.base(), log.0.base(), 12);
    emission.append(&rank.gather(8));
    emission.append(&log.emission(2));
    emission.copy::<u8>(back.base(), log.0.base(), 12);
    rank.stream.run(emission, std::slice::from_ref(&log.0)).unwrap();
    rank.stream.run(rank.gather(9), &[]).unwrap();
    log.note(&other, 3);
    drop(peer);
    let found = fault(rank.stream.synchronize());
    assert_eq!(found.work, "gather 2 x 8 bytes as rank 0");
    assert_eq!(fault(other.synchronize()), found);
    assert_eq!(fault(rank.stream.run(rank.gather(4), &[])), found, "and nothing more is taken");
    let noted =
        back.read(|bytes| bytes.chunks_exact(4).map(|w| u32::from_ne_bytes(w.try_into().unwrap())).collect());
    let noted: Vec<u32> = noted;
    assert_eq!(noted[..2], [1, 1], "the note before the gather is there, and the one after it is not");
    drop(rank.data);
    assert_eq!(rank.device.used_bytes(), log.0.bytes());
}

/// Each way in which a device can fail before its collective: the peer does not wait.
#[test]
fn a_fault_of_its_own_device_is_told_to_the_peer() {
    let failing = || launch::<Fail>(&0);
    let ways: [(&str, fn(&Rank, Emission)); 3] = [
        ("in the same emission", |rank, mut failing| {
            failing.append(&rank.gather(8));
            rank.run(failing).unwrap_err();
        }),
        ("in work before it", |rank, failing| {
            rank.stream.run(failing, &[]).unwrap();
            rank.stream.run(rank.gather(8), &[]).unwrap();
            rank.stream.synchronize().unwrap_err();
        }),
        ("in work that had ended", |rank, failing| {
            let exec = rank.capture(rank.gather(8));
            rank.run(failing).unwrap_err();
            rank.stream.replay(&exec).unwrap_err();
        }),
    ];
    for (name, way) in ways {
        for ends in transports(LONG) {
            let ranks = ranks(ends, 64);
            let begun = Instant::now();
            both(&ranks, |rank| match rank.end.rank() {
                0 => way(rank, failing()),
                _ => {
                    let (_, why) = peer_fault(rank.run(rank.gather(8)));
                    assert!(why.contains("rank 0 is gone"), "{name}: {why}");
                }
            });
            assert!(begun.elapsed() < SOON, "{name}");
            assert_ended(&ranks[0].end, "this rank gave up: device work failed: fail: id 9");
        }
    }
}

#[test]
fn an_address_that_is_not_live_is_a_fault_here_and_ends_the_peer() {
    let ranks = ranks(Communicator::pair(LONG), 64);
    let [short, lost] = both(&ranks, |rank| {
        let parts = if rank.end.rank() == 0 { rank.data.base().byte_add(1) } else { rank.data.base() };
        fault(rank.run(rank.emit(|emission| emission.gather(&rank.end, parts, 32).unwrap())))
    });
    assert!(matches!(short.kind, FaultKind::Address { bytes: 64, .. }), "{short}");
    assert!(lost.to_string().contains("rank 0 is gone"), "{lost}");
}

#[test]
fn two_streams_of_two_devices_may_share_an_end() {
    let [end, peer] = connected(LONG);
    let (one, two, other) = (Rank::new(end.clone(), 16), Rank::new(end, 16), Rank::new(peer, 16));
    std::thread::scope(|scope| {
        for rank in [&one, &two] {
            scope.spawn(|| (0..50).for_each(|_| rank.run(rank.gather(8)).unwrap()));
        }
        (0..100).for_each(|_| other.run(other.gather(8)).unwrap());
    });
    assert!(one.bytes() == other.bytes() && two.bytes() == other.bytes());
}

#[test]
fn closing_waits_for_graphs_and_says_how_many_hold_it() {
    for [end, peer] in transports(LONG) {
        let rank = Rank::new(end, 64);
        let one = rank.capture(rank.gather(8));
        let two = rank.capture(rank.emit(|emission| {
            emission.append(&rank.gather(8));
            emission.append(&rank.gather(4));
        }));
        let same = one.clone();
        rank.stream.run(rank.gather(8), &[]).unwrap();
        let late = Duration::from_millis(50);
        let refused = |count: usize| {
            let begun = Instant::now();
            let error = rank.end.clone().close(late).unwrap_err();
            assert!(begun.elapsed() >= late && begun.elapsed() < late + SOON);
            let why = format!("{count} graphs or emissions still hold its collectives; drop them first");
            let doing = "close the communicator of rank 0 within 50ms".into();
            assert_eq!(error, Error::Communicator { doing, why });
        };
        // Two graphs, and the work that is queued.
        refused(3);
        drop(one);
        refused(3);
        // An end that could not be closed works as before.
        let other = Rank::new(peer, 64);
        std::thread::scope(|scope| {
            scope.spawn(|| other.run(other.gather(8)).unwrap());
            rank.stream.synchronize().unwrap();
        });
        refused(2);
        drop(same);
        refused(1);
        let begun = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(100));
                drop(two);
            });
            rank.end.clone().close(LONG).unwrap();
        });
        assert!(begun.elapsed() >= Duration::from_millis(100) && begun.elapsed() < SOON);
        assert_ended(&rank.end, "it was closed");
        assert!(peer_fault(other.run(other.gather(8))).1.contains("rank 0 is gone"));
    }
}

#[test]
fn dropping_waits_for_nothing() {
    let begun = Instant::now();
    for [end, _silent] in transports(LONG) {
        let rank = Rank::new(end, 64);
        let exec = rank.capture(rank.gather(8));
        rank.stream.replay(&exec).unwrap();
        drop((exec, rank));
    }
    assert!(begun.elapsed() < SOON);
    drop(device(1));
}
