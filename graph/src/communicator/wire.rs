//! How one collective of two ranks goes over a link: a header in each used direction, then the bytes.
//!
//! ```text
//! 0 magic   4 version   8 rank of the sender   12 operation   16 sequence   24 bytes that follow      (32 bytes)
//! ```
//! Numbers are little-endian. A header must be the one that this rank expects, to the bit: nothing is sized by
//! what a peer says.

use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use super::RANKS;
use super::link::Link;

/// The first bytes of every header.
const MAGIC: [u8; 4] = *b"RHco";
/// The version of headers and of the test message.
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 32;
/// Magic and version: what headers of every version begin with.
const PREFIX_BYTES: usize = 8;

/// How often a wait only yields before it sleeps, and how long it then sleeps.
const YIELDS: u32 = 64;
const NAP: Duration = Duration::from_micros(100);

/// What a header says that its bytes are. A receive expects a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Operation {
    Test = 0,
    Gather = 1,
    Send = 2,
}

/// This rank's side of one collective.
pub(super) struct Meeting<'a> {
    pub(super) link: &'a Link,
    /// Set when there is nothing to wait for any more.
    pub(super) ended: &'a OnceLock<String>,
    pub(super) rank: usize,
    pub(super) sequence: u64,
    pub(super) operation: Operation,
}

impl Meeting<'_> {
    /// Sends `out` and receives `into`, both at once, within `wait`; an empty one means that nothing goes this way.
    /// What fails says why and what to do.
    pub(super) fn run(&self, out: &[u8], into: &mut [u8], wait: Duration) -> Result<(), String> {
        let whole = |bytes: usize| if bytes == 0 { 0 } else { HEADER_BYTES + bytes };
        let (to_go, to_come) = (whole(out.len()), whole(into.len()));
        let header = self.header(self.rank, out.len());
        let mut found = [0; HEADER_BYTES];
        let (mut gone, mut came, mut idle) = (0, 0, 0);
        let started = Instant::now();
        while gone < to_go || came < to_come {
            if let Some(why) = self.ended.get() {
                return Err(format!("after {:.1?} of waiting, {why}", started.elapsed()));
            }
            let before = gone + came;
            let mut deaf = None;
            if gone < to_go {
                let rest = if gone < HEADER_BYTES { &header[gone..] } else { &out[gone - HEADER_BYTES..] };
                match self.link.give(rest) {
                    Ok(count) => gone += count,
                    // What the peer sent before it went may say why it did.
                    Err(why) => deaf = Some(why),
                }
            }
            let heard = match came {
                _ if came == to_come => self.link.look().map(|()| 0),
                0..HEADER_BYTES => self.link.take(&mut found[came..]),
                _ => self.link.take(&mut into[came - HEADER_BYTES..]),
            };
            match heard {
                Ok(count) if came < HEADER_BYTES => {
                    came += count;
                    self.check(&found[..came], into.len())?;
                }
                Ok(count) => came += count,
                // All that was to go has gone, and all has come: a peer may leave then.
                Err(_) if gone == to_go && came == to_come => {}
                Err(why) => return Err(self.lost(&why, started, came, to_come)),
            }
            if gone + came > before {
                idle = 0;
                continue;
            }
            if let Some(why) = deaf {
                return Err(self.lost(&why, started, came, to_come));
            }
            if started.elapsed() >= wait {
                let (peer, waited) = (self.peer(), started.elapsed());
                return Err(format!(
                    "rank {peer} did not do its part of collective {} within {waited:.1?} ({gone} of {to_go} \
                     bytes went, {came} of {to_come} came); see what rank {peer} does, then start both ranks again",
                    self.sequence
                ));
            }
            pause(&mut idle);
        }
        Ok(())
    }

    fn peer(&self) -> usize {
        RANKS - 1 - self.rank
    }

    fn header(&self, sender: usize, bytes: usize) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        header[..4].copy_from_slice(&MAGIC);
        header[4..8].copy_from_slice(&VERSION.to_le_bytes());
        header[8..12].copy_from_slice(&(sender as u32).to_le_bytes());
        header[12..16].copy_from_slice(&(self.operation as u32).to_le_bytes());
        header[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        header[24..].copy_from_slice(&(bytes as u64).to_le_bytes());
        header
    }

    /// Compares as much of a header as has come with the one that `bytes` bytes must have.
    fn check(&self, found: &[u8], bytes: usize) -> Result<(), String> {
        let (peer, expected) = (self.peer(), self.header(self.peer(), bytes));
        if found.len() < PREFIX_BYTES {
            return Ok(());
        }
        if found[..4] != MAGIC {
            return Err(format!(
                "rank {peer} sent {:02x?}, which begins no message; something else is connected, or bytes were \
                 lost: connect the ranks anew",
                &found[..PREFIX_BYTES]
            ));
        }
        if number(found, 4) != VERSION {
            return Err(format!(
                "rank {peer} speaks version {} of the messages, and this rank version {VERSION}; run one build on \
                 both",
                number(found, 4)
            ));
        }
        if found.len() < HEADER_BYTES || found == expected {
            return Ok(());
        }
        if number(found, 8) != peer as u32 {
            return Err(format!(
                "the other end says that it is rank {}, and this end is rank {}; make one rank 0 and the other \
                 rank 1",
                number(found, 8),
                self.rank
            ));
        }
        Err(format!(
            "rank {peer} sent {}, and this rank expects {}; the ranks run different rounds, so start both again",
            describe(found),
            describe(&expected)
        ))
    }

    fn lost(&self, why: &str, started: Instant, came: usize, to_come: usize) -> String {
        // This end may have been shut meanwhile, by whoever ended it.
        if let Some(why) = self.ended.get() {
            return format!("after {:.1?} of waiting, {why}", started.elapsed());
        }
        let (peer, waited) = (self.peer(), started.elapsed());
        format!(
            "rank {peer} is gone at collective {} after {waited:.1?} ({why}; {came} of {to_come} bytes came); see \
             why it ended, then start both ranks again",
            self.sequence
        )
    }
}

/// What a header announces, for people.
fn describe(header: &[u8]) -> String {
    let long = |at: usize| u64::from(number(header, at)) | u64::from(number(header, at + 4)) << 32;
    let operation = match number(header, 12) {
        0 => "the test message".into(),
        1 => "a gather".into(),
        2 => "a send".into(),
        other => format!("operation {other}"),
    };
    format!("{operation} of {} bytes as collective {}", long(24), long(16))
}

fn number(header: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| header[at + i]))
}

/// A little time for the peer: hardly any at first.
fn pause(idle: &mut u32) {
    *idle += 1;
    match *idle <= YIELDS {
        true => thread::yield_now(),
        false => thread::sleep(NAP),
    }
}
