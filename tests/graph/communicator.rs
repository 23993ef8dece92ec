//! Collectives of two ranks: the bytes that they exchange, over memory and over sockets.

use std::net::{TcpListener, TcpStream};
use std::sync::Barrier;
use std::time::Duration;

use graph::{Arena, Communicator, Device, Emission, Error, Exec, Recording, Stream};
use proptest::prelude::*;

use crate::rig::{Add, AddArgs, device, set, words};

mod emission;
mod ends;
mod wire;

/// Longer than any test takes: what waits for it fails by the time it takes.
const LONG: Duration = Duration::from_secs(60);

/// One rank: a device of its own, and `data`, in which byte `i` is `i * 13 + rank`.
struct Rank {
    device: Device,
    stream: Stream,
    end: Communicator,
    data: Arena,
}

impl Rank {
    fn new(end: Communicator, bytes: usize) -> Rank {
        let device = device(1 << 30);
        let data = device.arena("data", bytes).unwrap();
        data.write(data.base(), &Rank::fresh(end.rank(), bytes)).unwrap();
        Rank { stream: device.stream(), device, end, data }
    }

    fn fresh(rank: usize, bytes: usize) -> Vec<u8> {
        (0..bytes).map(|i| (i * 13 + rank) as u8).collect()
    }

    /// An emission by this rank.
    fn emit(&self, fill: impl FnOnce(&mut Emission)) -> Emission {
        let mut emission = Emission::new();
        fill(&mut emission);
        emission
    }

    /// A gather of `bytes` bytes of each rank at the start of its data.
    fn gather(&self, bytes: usize) -> Emission {
        self.emit(|emission| emission.gather(&self.end, self.data.base(), bytes).unwrap())
    }

    fn run(&self, emission: Emission) -> Result<(), Error> {
        self.stream.run(emission, std::slice::from_ref(&self.data))?;
        self.stream.synchronize()
    }

    fn capture(&self, emission: Emission) -> Exec {
        let recording = Recording::begin(&self.stream, "round").unwrap();
        self.stream.run(emission, &[]).unwrap();
        recording.finish(vec![self.data.clone()]).unwrap()
    }

    fn bytes(&self) -> Vec<u8> {
        self.data.read(self.data.base(), self.data.bytes()).unwrap()
    }
}

fn ranks(ends: [Communicator; 2], bytes: usize) -> [Rank; 2] {
    ends.map(|end| Rank::new(end, bytes))
}

/// Runs both ranks at once, each on a thread.
fn both<T: Send>(ranks: &[Rank; 2], body: impl Fn(&Rank) -> T + Sync) -> [T; 2] {
    std::thread::scope(|scope| {
        let threads = ranks.each_ref().map(|rank| scope.spawn(|| body(rank)));
        threads.map(|thread| thread.join().unwrap())
    })
}

/// The two ends of a connection within this machine.
fn sockets() -> [TcpStream; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    [listener.accept().unwrap().0, client]
}

/// Two ends over a real socket.
fn connected(wait: Duration) -> [Communicator; 2] {
    let [first, second] = sockets();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| Communicator::over(first, 0, wait).unwrap());
        let second = Communicator::over(second, 1, wait).unwrap();
        [first.join().unwrap(), second]
    })
}

/// Both transports.
fn transports(wait: Duration) -> [[Communicator; 2]; 2] {
    [Communicator::pair(wait), connected(wait)]
}

#[test]
fn a_gather_leaves_both_parts_in_rank_order_on_both_ranks() {
    for ends in transports(LONG) {
        let ranks = ranks(ends, 4 << 20);
        let mut plain = [0, 1].map(|rank| Rank::fresh(rank, 4 << 20));
        for bytes in [1, 2, 3, 5, 31, 32, 33, 255, 4096, 10_240, 65_535, 65_536, 65_537, 999_999, 2 << 20] {
            let gathered = [&plain[0][..bytes], &plain[1][bytes..2 * bytes]].concat();
            plain.iter_mut().for_each(|plain| plain[..2 * bytes].copy_from_slice(&gathered));
            both(&ranks, |rank| rank.run(rank.gather(bytes)).unwrap());
            assert!(ranks.each_ref().map(Rank::bytes) == plain, "a gather of {bytes} bytes");
            // The parts differ again before the next size.
            for (rank, plain) in ranks.iter().zip(&mut plain) {
                plain.iter_mut().enumerate().for_each(|(i, byte)| {
                    *byte = byte.wrapping_mul(5).wrapping_add((i + rank.end.rank()) as u8);
                });
                rank.data.write(rank.data.base(), plain).unwrap();
            }
        }
    }
}

#[test]
fn what_no_buffer_of_the_link_holds_goes_both_ways_at_once() {
    const BYTES: usize = 64 << 20;
    for ends in transports(LONG) {
        let ranks = ranks(ends, 2 * BYTES);
        both(&ranks, |rank| rank.run(rank.gather(BYTES)).unwrap());
        let plain = [&Rank::fresh(0, BYTES)[..], &Rank::fresh(1, 2 * BYTES)[BYTES..]].concat();
        assert!(ranks.iter().all(|rank| rank.bytes() == plain));
    }
}

#[test]
fn a_send_reaches_the_receive_and_nothing_else_changes() {
    for ends in transports(LONG) {
        let ranks = ranks(ends, 3 << 20);
        for (from, bytes) in [(0, 1), (1, 33), (1, 7), (0, 1 << 20)] {
            both(&ranks, |rank| {
                rank.data.write(rank.data.base(), &Rank::fresh(rank.end.rank(), 3 << 20)).unwrap()
            });
            both(&ranks, |rank| {
                let (end, data) = (&rank.end, rank.data.base());
                let emission = rank.emit(|emission| match end.rank() == from {
                    true => emission.send(end, data.byte_add(11), bytes).unwrap(),
                    false => emission.receive(end, data.byte_add(1 << 20), bytes).unwrap(),
                });
                rank.run(emission).unwrap();
            });
            let (sent, mut plain) = (Rank::fresh(from, 3 << 20), Rank::fresh(1 - from, 3 << 20));
            plain[1 << 20..][..bytes].copy_from_slice(&sent[11..][..bytes]);
            assert!(ranks[from].bytes() == sent && ranks[1 - from].bytes() == plain);
        }
    }
}

#[test]
fn a_recorded_collective_replays_and_reads_what_lies_there_then() {
    for ends in transports(LONG) {
        let ranks = ranks(ends, 64);
        both(&ranks, |rank| {
            let exec = rank.capture(rank.gather(32));
            assert_eq!((exec.nodes(), exec.digest()), (1, rank.gather(32).digest()));
            for turn in 0..10u8 {
                rank.data.write(rank.data.base(), &[turn * 2 + rank.end.rank() as u8; 64]).unwrap();
                rank.stream.replay(&exec).unwrap();
                rank.stream.synchronize().unwrap();
                assert_eq!(rank.bytes(), [[turn * 2; 32], [turn * 2 + 1; 32]].concat());
            }
        });
    }
}

#[test]
fn a_rank_that_comes_first_waits_and_pinned_bytes_are_those_that_were_queued() {
    let ranks = ranks(Communicator::pair(LONG), 64);
    let late = Barrier::new(2);
    both(&ranks, |rank| match rank.end.rank() {
        0 => {
            let mut pinned = rank.device.pinned("table", 4).unwrap();
            set(&mut pinned, 77);
            let send = || rank.emit(|emission| emission.send(&rank.end, pinned.base(), 4).unwrap());
            rank.run(send()).unwrap();
            late.wait();
            let send = send();
            rank.stream.run(send, &[]).unwrap();
            set(&mut pinned, 78);
            let fault = crate::rig::fault(rank.stream.synchronize());
            assert_eq!(fault.work, "send 4 bytes to rank 1");
            assert_eq!(fault.kind, graph::error::FaultKind::Overwritten { label: "table".into() });
        }
        _ => {
            std::thread::sleep(Duration::from_millis(30));
            rank.run(rank.emit(|emission| emission.receive(&rank.end, rank.data.base(), 4).unwrap()))
                .unwrap();
            assert_eq!(words(&rank.data, 1), [77]);
            late.wait();
        }
    });
}

/// What a rank can do in the schedules below: three things whose order shows in the bytes.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Adds 3 to the own part of words 0..8, and gathers them.
    Sum,
    /// Rank 0 sends words 4..8 to words 8..12 of rank 1; both add their word 8..12 to get words 0..4.
    Hand,
    /// Gathers words 6..14.
    Wide,
}

fn add(emission: &mut Emission, data: &Arena, to: usize, from: usize, value: u32) {
    let at = |word: usize| data.base().byte_add(4 * word).cast();
    emission.launch::<Add>(&AddArgs { to: at(to), from: at(from), count: 4, value }).unwrap();
}

fn emission_of(step: Step, rank: &Rank) -> Emission {
    let (end, data) = (&rank.end, &rank.data);
    let at = |word: usize| data.base().byte_add(4 * word);
    rank.emit(|emission| match step {
        Step::Sum => {
            // Words may not overlap within a launch, so the sum goes over words 16..20.
            add(emission, data, 16, 4 * end.rank(), 3);
            emission.copy(at(4 * end.rank()), at(16), 16);
            emission.gather(end, at(0), 16).unwrap();
        }
        Step::Hand => {
            match end.rank() {
                0 => emission.send(end, at(4), 16).unwrap(),
                _ => emission.receive(end, at(8), 16).unwrap(),
            }
            add(emission, data, 0, 8, 1);
        }
        Step::Wide => emission.gather(end, at(6), 16).unwrap(),
    })
}

/// The same on plain lists of words.
fn plain(step: Step, words: &mut [Vec<u32>; 2]) {
    match step {
        Step::Sum => {
            for (rank, words) in words.iter_mut().enumerate() {
                for i in 0..4 {
                    words[4 * rank + i] = words[4 * rank + i].wrapping_add(3);
                    words[16 + i] = words[4 * rank + i];
                }
            }
            exchange(words, 0);
        }
        Step::Hand => {
            let sent = words[0][4..8].to_vec();
            words[1][8..12].copy_from_slice(&sent);
            words.iter_mut().for_each(|words| (0..4).for_each(|i| words[i] = words[8 + i].wrapping_add(1)));
        }
        Step::Wide => exchange(words, 6),
    }
}

fn exchange(words: &mut [Vec<u32>; 2], at: usize) {
    let gathered = [&words[0][at..at + 4], &words[1][at + 4..at + 8]].concat();
    words.iter_mut().for_each(|words| words[at..at + 8].copy_from_slice(&gathered));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Two graphs and an eager collective in any order, waited for at any moment, and all of it eager.
    #[test]
    fn graphs_and_eager_collectives_in_any_order_give_the_plain_bytes(
        steps in prop::collection::vec((0usize..3, any::<bool>()), 0..24),
        socket in any::<bool>(),
    ) {
        let steps: Vec<(Step, bool)> =
            steps.into_iter().map(|(step, wait)| ([Step::Sum, Step::Hand, Step::Wide][step], wait)).collect();
        for graphs in [true, false] {
            let ranks = ranks(if socket { connected(LONG) } else { Communicator::pair(LONG) }, 80);
            let mut plain_words = ranks.each_ref().map(|rank| words(&rank.data, 20));
            steps.iter().for_each(|&(step, _)| plain(step, &mut plain_words));
            let found = both(&ranks, |rank| {
                let execs = [Step::Sum, Step::Hand].map(|step| rank.capture(emission_of(step, rank)));
                for &(step, wait) in &steps {
                    match step {
                        Step::Sum if graphs => rank.stream.replay(&execs[0]).unwrap(),
                        Step::Hand if graphs => rank.stream.replay(&execs[1]).unwrap(),
                        step => rank.stream.run(emission_of(step, rank), &[]).unwrap(),
                    }
                    // The other rank waits at other moments.
                    if wait == (rank.end.rank() == 0) {
                        rank.stream.synchronize().unwrap();
                    }
                }
                rank.stream.synchronize().unwrap();
                words(&rank.data, 20)
            });
            prop_assert_eq!(found, plain_words);
        }
    }
}
