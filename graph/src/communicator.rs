//! Collectives: two ranks that exchange bytes in the middle of their work, and the end of what they do together.
//!
//! **One sequence.** The n-th collective of one rank meets the n-th of the other, whatever streams and graphs
//! they come from: a gather a gather, a send a receive. What meets anything else is a fault that names both.
//!
//! **Every wait ends.** A collective takes at most the communicator's `wait`. A peer that is gone, too slow or
//! garbled, and [`Communicator::stop`] from any thread, are faults; after one the communicator has ended: every
//! later collective fails at once, and the peer finds its end of the link closed.

use std::fmt;
use std::net::TcpStream;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

mod link;
mod wire;

use crate::arena;
use crate::error::{Error, Result};
use link::Link;
use wire::{Meeting, Operation};

/// How many ranks there are.
pub const RANKS: usize = 2;

/// The bytes that both ends send each other when they are connected.
const TEST_BYTES: usize = 256;

/// One rank's end of a group of two. Clones are handles to the same end; when the last one goes, the peer finds
/// the link closed.
#[derive(Clone)]
pub struct Communicator(Arc<End>);

struct End {
    rank: usize,
    epoch: u64,
    wait: Duration,
    link: Link,
    /// The number of the next collective; whoever has it locked is in one.
    turn: Mutex<u64>,
    /// Why there are no more collectives.
    ended: OnceLock<String>,
    /// How many emissions and graphs hold this end, and the news that one let go.
    held: Mutex<usize>,
    let_go: Condvar,
}

/// What a collective does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Every rank brings its part of a buffer and gets the others'.
    Gather,
    /// Bytes go to the other rank.
    Send,
    /// Bytes come from the other rank.
    Receive,
}

impl Communicator {
    /// Both ends of a group whose ranks are threads of this process, for tests: each with a device of its own,
    /// and each waited for by its own thread.
    pub fn pair(wait: Duration) -> [Communicator; RANKS] {
        let [first, second] = Link::pair();
        [Communicator::new(first, 0, wait, 1), Communicator::new(second, 1, wait, 1)]
    }

    /// The end of `rank` of a group whose other end is behind `stream`, after both have sent each other a test
    /// message. The stream must be fresh, and nothing else may use it.
    ///
    /// # Errors
    /// The ranks are not 0 and 1; the other end is no communicator of this version; or it did not answer within
    /// `wait`.
    pub fn over(stream: TcpStream, rank: usize, wait: Duration) -> Result<Communicator> {
        let refused = |why| Error::Communicator { doing: format!("connect rank {rank} with its peer"), why };
        if rank >= RANKS {
            return Err(refused(format!("there are {RANKS} ranks, so it is 0 or 1")));
        }
        let link = Link::socket(stream)
            .map_err(|error| refused(format!("the socket cannot be set up: {error}; connect a new one")))?;
        let end = Communicator::new(link, rank, wait, 0);
        let pattern = |rank: usize| -> [u8; TEST_BYTES] { std::array::from_fn(|i| (i * 7 + rank) as u8) };
        let mut came = [0; TEST_BYTES];
        end.meet(Operation::Test, &pattern(rank), &mut came).map_err(refused)?;
        match came == pattern(end.peer()) {
            true => Ok(end),
            false => Err(refused("the test message came with other bytes; check what lies between".into())),
        }
    }

    fn new(link: Link, rank: usize, wait: Duration, next: u64) -> Communicator {
        Communicator(Arc::new(End {
            rank,
            epoch: arena::next_epoch(),
            wait,
            link,
            turn: Mutex::new(next),
            ended: OnceLock::new(),
            held: Mutex::new(0),
            let_go: Condvar::new(),
        }))
    }

    /// This end's rank.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        RANKS
    }

    /// A number that no other communicator and no arena of this process has.
    pub fn epoch(&self) -> u64 {
        self.0.epoch
    }

    /// The stop word: a collective that waits ends with a fault at once, and so does every later one, here and,
    /// as the link closes, at the peer. The first reason stays.
    pub fn stop(&self, why: &str) {
        self.end(format!("it was stopped: {why}"));
    }

    /// Ends the communicator once no emission and no graph holds it any more.
    ///
    /// # Errors
    /// Some still do at the deadline; nothing has ended, and another handle can close it later.
    pub fn close(self, deadline: Duration) -> Result<()> {
        let started = Instant::now();
        let mut held = self.0.held.lock();
        while *held > 0 {
            let left = deadline.saturating_sub(started.elapsed());
            if left.is_zero() {
                let doing = format!("close the communicator of rank {} within {deadline:?}", self.rank());
                let why = format!("{held} graphs or emissions still hold its collectives; drop them first");
                return Err(Error::Communicator { doing, why });
            }
            self.0.let_go.wait_for(&mut held, left);
        }
        self.end("it was closed".into());
        Ok(())
    }

    /// The other rank.
    pub(crate) fn peer(&self) -> usize {
        RANKS - 1 - self.rank()
    }

    /// Ends all collectives, for the first reason given, and lets the peer know.
    pub(crate) fn end(&self, why: String) {
        // The reason comes first: whoever then finds the link closed looks for it.
        let _ = self.0.ended.set(why);
        self.0.link.shut();
    }

    /// Exchanges parts: `own` goes to the peer, the peer's comes into `other`.
    pub(crate) fn gather(&self, own: &[u8], other: &mut [u8]) -> Result<(), String> {
        self.meet(Operation::Gather, own, other)
    }

    /// Sends `bytes` to the peer.
    pub(crate) fn send(&self, bytes: &[u8]) -> Result<(), String> {
        self.meet(Operation::Send, bytes, &mut [])
    }

    /// Receives `into` from the peer.
    pub(crate) fn receive(&self, into: &mut [u8]) -> Result<(), String> {
        self.meet(Operation::Send, &[], into)
    }

    /// A collective for people.
    pub(crate) fn describe(&self, what: Collective, bytes: usize) -> String {
        match what {
            Collective::Gather => format!("gather {RANKS} x {bytes} bytes as rank {}", self.rank()),
            Collective::Send => format!("send {bytes} bytes to rank {}", self.peer()),
            Collective::Receive => format!("receive {bytes} bytes from rank {}", self.peer()),
        }
    }

    fn meet(&self, operation: Operation, out: &[u8], into: &mut [u8]) -> Result<(), String> {
        let End { link, ended, wait, .. } = &*self.0;
        let mut turn = self.0.turn.lock();
        if let Some(why) = ended.get() {
            return Err(format!("the communicator had ended: {why}"));
        }
        let meeting = Meeting { link, ended, rank: self.rank(), sequence: *turn, operation };
        meeting.run(out, into, *wait).inspect_err(|why| self.end(why.clone()))?;
        *turn += 1;
        Ok(())
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "communicator of rank {} of {RANKS} epoch {}", self.rank(), self.epoch())
    }
}

/// An emission's hold on a communicator, which [`Communicator::close`] counts.
#[derive(Debug)]
pub(crate) struct Held(Communicator);

impl Held {
    pub(crate) fn new(communicator: &Communicator) -> Held {
        *communicator.0.held.lock() += 1;
        Held(communicator.clone())
    }

    pub(crate) fn communicator(&self) -> &Communicator {
        &self.0
    }
}

impl Clone for Held {
    fn clone(&self) -> Held {
        Held::new(&self.0)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        *self.0.0.held.lock() -= 1;
        self.0.0.let_go.notify_all();
    }
}
