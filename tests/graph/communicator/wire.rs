//! What an end says to a peer that is not what it should be: every bit of every header matters.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::Instant;

use graph::error::FaultKind;
use graph::{Emission, Error};

use super::{Communicator, Duration, LONG, Rank, both, ranks, sockets, transports};
use crate::rig::fault;

const TEST: u32 = 0;
const GATHER: u32 = 1;
const SEND: u32 = 2;

/// A header as it is documented: written here again, so that neither side can change alone.
fn header(rank: u32, operation: u32, sequence: u64, bytes: u64) -> Vec<u8> {
    let numbers = [1, rank, operation].map(u32::to_le_bytes).concat();
    [&b"RHco"[..], &numbers, &sequence.to_le_bytes(), &bytes.to_le_bytes()].concat()
}

/// The test message of a rank.
fn hello(rank: u8) -> Vec<u8> {
    let mut message = header(rank.into(), TEST, 0, 256);
    message.extend((0..256u32).map(|i| (i * 7 + u32::from(rank)) as u8));
    message
}

/// Rank 0, and a peer that says what a test wants.
fn with_raw_peer(wait: Duration) -> (Rank, TcpStream) {
    let [socket, mut peer] = sockets();
    let end = thread::spawn(move || Communicator::over(socket, 0, wait).unwrap());
    peer.write_all(&hello(1)).unwrap();
    let mut said = vec![0; 288];
    peer.read_exact(&mut said).unwrap();
    assert_eq!(said, hello(0));
    (Rank::new(end.join().unwrap(), 64), peer)
}

/// What the first gather of 5 bytes makes of `said`.
fn gather(said: &[u8], wait: Duration) -> Result<Vec<u8>, String> {
    let (rank, mut peer) = with_raw_peer(wait);
    peer.write_all(said).unwrap();
    let result = rank.run(rank.gather(5));
    let mut heard = vec![0; 37];
    if result.is_ok() {
        peer.read_exact(&mut heard).unwrap();
        let own = Rank::fresh(0, 5);
        assert_eq!(heard, [header(0, GATHER, 1, 5), own].concat());
        return Ok(rank.bytes());
    }
    match fault(result).kind {
        FaultKind::Peer(why) => Err(why),
        other => panic!("expected a fault of the peer, got {other:?}"),
    }
}

#[test]
fn the_right_header_is_taken_and_a_flip_of_any_of_its_bits_is_a_fault() {
    let right = [header(1, GATHER, 1, 5), vec![50, 51, 52, 53, 54]].concat();
    assert_eq!(gather(&right, LONG).unwrap()[5..10], right[32..]);
    for bit in 0..8 * 32 {
        let mut wrong = right.clone();
        wrong[bit / 8] ^= 1 << (bit % 8);
        let why = gather(&wrong, LONG).expect_err("a flipped bit");
        assert!(!why.contains("did not do its part"), "bit {bit}: {why}");
    }
}

#[test]
fn a_message_that_does_not_fit_is_named_with_what_was_expected() {
    let mut newer = header(1, GATHER, 1, 5);
    newer[4] = 9;
    let expected = "this rank expects a gather of 5 bytes as collective 1; the ranks run different rounds";
    let cases = [
        (b"HTTP/1.1 400 Bad Request\r\n".to_vec(), "which begins no message"),
        (
            newer[..8].to_vec(),
            "speaks version 9 of the messages, and this rank version 1; run one build on both",
        ),
        (header(0, GATHER, 1, 5), "says that it is rank 0, and this end is rank 0"),
        (header(1, GATHER, 2, 5), "rank 1 sent a gather of 5 bytes as collective 2, and this rank expects"),
        (header(1, GATHER, 0, 5), expected),
        (header(1, SEND, 1, 5), "rank 1 sent a send of 5 bytes as collective 1, and this rank expects"),
        (header(1, 77, 1, 5), "rank 1 sent operation 77 of 5 bytes"),
        (header(1, GATHER, 1, 4), expected),
        (header(1, GATHER, 1, u64::MAX), "a gather of 18446744073709551615 bytes as collective 1"),
        (hello(1), "rank 1 sent the test message of 256 bytes as collective 0"),
    ];
    for (said, part) in cases {
        let why = gather(&said, LONG).expect_err(part);
        assert!(why.contains(part), "{why}");
    }
}

#[test]
fn a_peer_that_stops_in_the_middle_or_drips_is_waited_for_once() {
    let wait = Duration::from_millis(150);
    let right = [header(1, GATHER, 1, 5), vec![0; 5]].concat();
    for bytes in [0, 1, 7, 8, 31, 32, 36] {
        let (begun, why) = (Instant::now(), gather(&right[..bytes], wait).unwrap_err());
        assert!(why.contains(&format!("{bytes} of 37 came")), "{why}");
        assert!(begun.elapsed() >= wait && begun.elapsed() < Duration::from_secs(5));
    }
    let (rank, mut peer) = with_raw_peer(wait);
    let begun = Instant::now();
    let drip = thread::spawn(move || {
        for byte in right {
            thread::sleep(Duration::from_millis(40));
            if peer.write_all(&[byte]).is_err() {
                return;
            }
        }
    });
    let why = fault(rank.run(rank.gather(5))).to_string();
    assert!(why.contains("did not do its part"), "{why}");
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    drop(rank);
    drip.join().unwrap();
}

#[test]
fn collectives_that_do_not_match_are_faults_on_both_ranks_that_name_both() {
    type Emit = fn(&Rank) -> Emission;
    let gather_4: Emit = |rank| rank.gather(4);
    let gather_8: Emit = |rank| rank.gather(8);
    let send: Emit = |rank| rank.emit(|emission| emission.send(&rank.end, rank.data.base(), 8).unwrap());
    let receive: Emit =
        |rank| rank.emit(|emission| emission.receive(&rank.end, rank.data.base(), 8).unwrap());
    let receive_9: Emit =
        |rank| rank.emit(|emission| emission.receive(&rank.end, rank.data.base(), 9).unwrap());
    let then = |first: Emit, second: Emit| {
        move |rank: &Rank| {
            let mut emission = first(rank);
            emission.append(&second(rank));
            emission
        }
    };
    // What each rank runs, and what the one that must notice says: a rank that only sends hears of it later.
    type Boxed = Box<dyn Fn(&Rank) -> Emission + Sync>;
    let cases: [(Boxed, Boxed, &str); 5] = [
        (Box::new(gather_4), Box::new(gather_8), "sent a gather of 4 bytes as collective 1"),
        (Box::new(then(gather_8, gather_4)), Box::new(then(gather_8, gather_8)), "4 bytes as collective 2"),
        (Box::new(send), Box::new(gather_8), "sent a send of 8 bytes as collective 1"),
        (Box::new(send), Box::new(receive_9), "sent a send of 8 bytes as collective 1"),
        // Crossed sends: each would be read by a receive that is one later.
        (
            Box::new(then(send, receive)),
            Box::new(then(send, receive)),
            "as collective 1, and this rank expects",
        ),
    ];
    for (first, second, says) in cases {
        for ends in transports(LONG) {
            let ranks = ranks(ends, 64);
            let begun = Instant::now();
            let [_, found] = both(&ranks, |rank| {
                let body = if rank.end.rank() == 0 { &first } else { &second };
                match rank.run(body(rank)) {
                    Err(error) => error.to_string(),
                    // A lone send is done when it is given away: the next collective hears of it.
                    Ok(()) => rank.run(gather_8(rank)).unwrap_err().to_string(),
                }
            });
            assert!(found.contains(says), "{found}");
            assert!(begun.elapsed() < Duration::from_secs(5));
        }
    }
}

#[test]
fn ends_that_do_not_fit_are_refused_when_they_are_connected() {
    let refused = |rank: usize, wait: Duration, peer: &dyn Fn(TcpStream)| {
        let [socket, other] = sockets();
        let end = thread::spawn(move || Communicator::over(socket, rank, wait));
        peer(other);
        match end.join().unwrap() {
            Err(Error::Communicator { doing, why }) => {
                assert_eq!(doing, format!("connect rank {rank} with its peer"));
                why
            }
            other => panic!("expected a refusal, got {other:?}"),
        }
    };
    let say = |bytes: Vec<u8>| {
        move |mut socket: TcpStream| {
            socket.write_all(&bytes).unwrap();
            // What was said stays readable until the other end has gone.
            let _ = socket.read_to_end(&mut Vec::new());
        }
    };
    let (mut newer, mut torn) = (hello(1), hello(1));
    newer[4] = 2;
    torn[40] ^= 1;
    let short = Duration::from_millis(150);
    let silent = |socket: TcpStream| {
        thread::sleep(Duration::from_millis(400));
        drop(socket);
    };
    let cases = [
        (refused(2, LONG, &drop), "there are 2 ranks, so it is 0 or 1"),
        (refused(0, LONG, &say(hello(0))), "the other end says that it is rank 0, and this end is rank 0"),
        (refused(1, LONG, &say(hello(1))), "the other end says that it is rank 1, and this end is rank 1"),
        (refused(0, LONG, &say(newer)), "speaks version 2 of the messages, and this rank version 1"),
        (refused(0, LONG, &say(torn)), "the test message came with other bytes"),
        (refused(0, LONG, &say(b"SSH-2.0-x\r\n".to_vec())), "which begins no message"),
        (refused(0, LONG, &say(header(1, GATHER, 0, 256))), "this rank expects the test message"),
        (refused(0, LONG, &drop), "rank 1 is gone"),
        (refused(0, short, &silent), "rank 1 did not do its part of collective 0 within 15"),
    ];
    for (why, part) in cases {
        assert!(why.contains(part), "{why}");
    }
}
