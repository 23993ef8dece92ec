//! How a link lives and ends: heartbeats, silence, death, nonsense, and a drop that does not wait.

use std::net::Shutdown;
use std::thread;
use std::time::{Duration, Instant};

use runtime::ranks::wire::{MAX_PAYLOAD, WireError, encode};
use runtime::ranks::{Command, Link, LinkError, Message};
use runtime::request::Submission;

use crate::{LONG, Puppet, assert_says, end_of, hello, linked};

/// Long before a silence of [`hello`] is over.
const AT_ONCE: Duration = Duration::from_millis(500);

fn pair() -> (Link, Link) {
    Link::pair(hello(0).silence()).expect("a pair")
}

#[test]
fn heartbeats_keep_an_idle_link_alive() {
    for (leader, follower) in [pair(), linked()] {
        let late = leader.receive(2 * hello(0).silence()).expect_err("nobody said anything");
        assert!(matches!(late, LinkError::Late { .. }), "{late}");
        assert_says(late, &["2 s", "rank 1"]);
        assert_eq!((leader.failure(), follower.failure()), (None, None));
        leader.send(&Message::Welcome).expect("alive");
        assert_eq!(follower.receive(LONG), Ok(Message::Welcome));
    }
}

#[test]
fn a_message_is_received_at_once() {
    let (leader, follower) = linked();
    let sender = thread::spawn(move || {
        thread::sleep(Duration::from_millis(200));
        let sent = Instant::now();
        leader.send(&Message::Welcome).expect("alive");
        (sent, leader)
    });
    assert_eq!(follower.receive(LONG), Ok(Message::Welcome));
    let received = Instant::now();
    let (sent, _leader) = sender.join().expect("no panic");
    assert!(received.saturating_duration_since(sent) < Duration::from_millis(90));
}

#[test]
fn a_silent_peer_is_found() {
    let (leader, puppet) = Puppet::followed();
    let (error, after) = end_of(&leader);
    assert!(matches!(error, LinkError::Silent { .. }), "{error}");
    assert!(after > AT_ONCE && after < 3 * hello(0).silence(), "{after:?}");
    assert_says(&error, &["rank 1 at 127.0.0.1", "1 s", "stopped"]);
    assert_eq!(leader.receive(LONG), Err(error.clone()));
    assert_eq!(leader.send(&Message::Welcome), Err(error));
    drop(puppet);
}

#[test]
fn whoever_was_silent_finds_the_link_closed() {
    let (leader, mut puppet) = Puppet::followed();
    end_of(&leader);
    assert_eq!(puppet.hear(), None);
}

#[test]
fn a_dead_peer_is_found_at_once() {
    let (leader, puppet) = Puppet::followed();
    drop(puppet);
    let (error, after) = end_of(&leader);
    assert!(matches!(error, LinkError::Gone { .. }), "{error}");
    assert!(after < AT_ONCE, "{after:?}");
    assert_eq!(leader.receive(LONG), Err(error.clone()));
    assert_eq!(leader.send(&Message::Welcome), Err(error));
}

#[test]
fn a_receiver_that_waits_is_woken_by_the_end() {
    let (leader, follower) = pair();
    let waiting = thread::spawn(move || (leader.receive(LONG), Instant::now()));
    thread::sleep(Duration::from_millis(50));
    let began = Instant::now();
    drop(follower);
    let (received, at) = waiting.join().expect("no panic");
    assert!(matches!(received, Err(LinkError::Gone { .. })));
    assert!(at.saturating_duration_since(began) < AT_ONCE);
}

#[test]
fn a_peer_that_dies_in_the_middle_of_a_message_is_told() {
    let (leader, mut puppet) = Puppet::followed();
    let bytes = encode(&Message::Bye { why: "well".into() }).expect("fits");
    puppet.write(&bytes[..bytes.len() - 1]);
    puppet.stream.shutdown(Shutdown::Write).expect("open");
    let (error, _) = end_of(&leader);
    assert!(matches!(error, LinkError::Gone { .. }), "{error}");
    assert_says(error, &["in the middle of a message"]);
}

#[test]
fn what_was_said_before_the_end_is_received() {
    for (leader, follower) in [pair(), linked()] {
        for number in 0..50 {
            leader.send(&Message::Done { number, round: "ab".into() }).expect("alive");
        }
        leader.send(&Message::Bye { why: "done".into() }).expect("alive");
        // Bytes that the leader does not read must not take back what it said.
        for number in 0..50 {
            let _ = follower.send(&Message::Done { number, round: "cd".into() });
        }
        drop(leader);
        end_of(&follower);
        for number in 0..50 {
            assert_eq!(follower.receive(LONG), Ok(Message::Done { number, round: "ab".into() }));
        }
        assert_eq!(follower.receive(LONG), Ok(Message::Bye { why: "done".into() }));
        assert!(matches!(follower.receive(LONG), Err(LinkError::Gone { .. })));
    }
}

#[test]
fn nonsense_ends_the_link_and_the_peer_hears_why() {
    let mut other_major = encode(&Message::Beat).expect("fits");
    other_major[3] = 3;
    let mut damaged = encode(&Message::Done { number: 12, round: "ab".into() }).expect("fits");
    let last = damaged.len() - 1;
    damaged[last] ^= 1;
    let mut endless = encode(&Message::Beat).expect("fits");
    endless[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    for (bytes, part) in [
        (b"GET / HTTP/1.1\r\n".to_vec(), "GET / HTTP/1.1"),
        (other_major, "version is 3 and this build speaks 1"),
        (damaged, "checksum"),
        (endless, "4294967295"),
    ] {
        let (leader, mut puppet) = Puppet::followed();
        puppet.say(&Message::Done { number: 1, round: "ab".into() });
        puppet.write(&bytes);
        let (error, after) = end_of(&leader);
        assert!(matches!(error, LinkError::Garbled { .. }), "{error}");
        assert!(after < AT_ONCE, "{after:?}");
        assert_says(&error, &["rank 1 at", part]);
        assert_eq!(leader.receive(LONG), Ok(Message::Done { number: 1, round: "ab".into() }));
        assert_eq!(leader.receive(LONG), Err(error));
        let Some(Message::Failed { why }) = puppet.hear() else { panic!("no word of why") };
        assert_says(why, &[part]);
        assert_eq!(puppet.hear(), None);
    }
}

#[test]
fn a_peer_that_takes_nothing_does_not_hold_the_sender() {
    let (leader, puppet) = Puppet::followed();
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let mut beating = Puppet::of(puppet.stream.try_clone().expect("a handle"));
    let beats = thread::spawn(move || {
        while stopped.recv_timeout(Duration::from_millis(50)).is_err() {
            if std::io::Write::write_all(&mut beating.stream, &encode(&Message::Beat).expect("fits")).is_err()
            {
                return;
            }
        }
    });
    let began = Instant::now();
    let error = leader
        .send(&Message::Answer { question: 1, yes: false, what: "x".repeat(32 << 20) })
        .expect_err("stuck");
    assert!(matches!(error, LinkError::Stuck { message: "Answer", .. }), "{error}");
    assert!(began.elapsed() < 4 * hello(0).silence());
    assert_eq!(leader.failure(), Some(error));
    let _ = stop.send(());
    beats.join().expect("no panic");
    puppet.stream.shutdown(Shutdown::Both).ok();
}

#[test]
fn a_long_message_arrives_and_a_longer_one_does_no_harm() {
    let (leader, follower) = linked();
    let submission = Submission::new((0..1_000_000).collect());
    let message = Message::Command(Command::Submit { id: 1, submission });
    let sender = thread::spawn(move || {
        let too_long = leader.send(&Message::Bye { why: "x".repeat(MAX_PAYLOAD) }).expect_err("too long");
        leader.send(&message).expect("alive");
        (too_long, message, leader)
    });
    let received = follower.receive(LONG).expect("alive");
    let (too_long, message, _leader) = sender.join().expect("no panic");
    assert_eq!(received, message);
    assert!(matches!(too_long, LinkError::Oversized { problem: WireError::TooLong { .. }, .. }));
    assert_says(too_long, &["Bye", &MAX_PAYLOAD.to_string()]);
}

#[test]
fn a_callback_that_comes_late_is_called_too() {
    let (leader, follower) = pair();
    drop(follower);
    assert!(matches!(leader.receive(LONG), Err(LinkError::Gone { .. })));
    assert!(matches!(end_of(&leader), (LinkError::Gone { .. }, _)));
}

#[test]
fn dropping_neither_waits_nor_calls_back() {
    for (leader, follower) in [pair(), linked()] {
        leader.on_failure(|error| panic!("dropped, not failed: {error}"));
        let began = Instant::now();
        drop(leader);
        assert!(began.elapsed() < AT_ONCE);
        assert!(matches!(end_of(&follower), (LinkError::Gone { .. }, after) if after < AT_ONCE));
    }
    // Not even beside a peer that is stopped.
    let (leader, _puppet) = Puppet::followed();
    let began = Instant::now();
    drop(leader);
    assert!(began.elapsed() < AT_ONCE);
}

#[cfg(target_os = "linux")]
#[test]
fn the_threads_of_dropped_links_end() {
    let threads = || std::fs::read_dir("/proc/self/task").expect("a process").count();
    // Each beside a peer that neither answers nor closes.
    let puppets: Vec<Puppet> = (0..60).map(|_| Puppet::followed().1).collect();
    let live: Vec<(Link, Link)> = (0..60).map(|_| pair()).collect();
    assert!(threads() >= 240);
    drop(live);
    let began = Instant::now();
    while threads() >= 120 {
        assert!(began.elapsed() < LONG, "{} threads", threads());
        thread::sleep(Duration::from_millis(20));
    }
    drop(puppets);
}
