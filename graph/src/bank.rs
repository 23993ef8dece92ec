//! The bank: execs by key, and the decision between replay, capture and eager.
//!
//! ```text
//! known key                      -> replay
//! key asked for a second time    -> capture, then replay
//! key asked for the first time   -> eager (first sight)
//! capture failed                 -> eager (capture failed); the key is not tried again in this generation
//! ```
//! Execs have a *generation*: that of their last use. When a capture would pass the byte budget, every exec
//! not used in the current generation goes, and a new generation begins; if all were used in it, all go.

use std::collections::{HashMap, HashSet};

use crate::arena::Arena;
use crate::digest::Digest;
use crate::emission::Emission;
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::key::Key;
use crate::recording::Recording;
use crate::stream::Stream;

/// How many first sights are remembered; when there are more, all are forgotten.
const SIGHTS: usize = 4096;

/// A store of execs.
pub struct Bank {
    execs: HashMap<Key, Held>,
    seen: HashSet<Key>,
    failed: HashSet<Key>,
    budget_bytes: usize,
    bytes: usize,
    generation: u64,
    counts: BankCounts,
}

struct Held {
    exec: Exec,
    generation: u64,
}

/// How one round was executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum How {
    /// A graph was replayed.
    Replayed,
    /// A graph was captured, and then replayed.
    Captured,
    /// Launch by launch: the key was new.
    FirstSight,
    /// Launch by launch: the capture failed.
    CaptureFailed,
}

/// What a bank has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BankCounts {
    /// Rounds that were replays of a known graph.
    pub replayed: u64,
    /// Graphs captured, at start or since.
    pub captured: u64,
    /// Graphs given up.
    pub evicted: u64,
    /// Rounds that ran eagerly at the first sight of their key.
    pub first_sight: u64,
    /// Captures that failed.
    pub capture_failed: u64,
    /// Audits that found a graph unequal to what its key emits now.
    pub audits_failed: u64,
}

impl Bank {
    /// An empty bank for at most `budget_bytes` bytes of graphs.
    pub fn new(budget_bytes: usize) -> Bank {
        Bank {
            execs: HashMap::new(),
            seen: HashSet::new(),
            failed: HashSet::new(),
            budget_bytes,
            bytes: 0,
            generation: 0,
            counts: BankCounts::default(),
        }
    }

    /// Executes a body on `stream`, by whatever the bank knows of its key. `body` emits the launches, and is
    /// called only if there is no graph. `keeps` are the arenas that they point into.
    pub fn run(
        &mut self,
        stream: &Stream,
        key: &Key,
        keeps: &[Arena],
        body: impl Fn() -> Result<Emission>,
    ) -> Result<How> {
        if let Some(held) = self.execs.get_mut(key) {
            held.generation = self.generation;
            self.counts.replayed += 1;
            stream.replay(&held.exec)?;
            return Ok(How::Replayed);
        }
        if self.failed.contains(key) {
            stream.run(body()?, keeps)?;
            return Ok(How::CaptureFailed);
        }
        if self.first_sight(key) {
            self.counts.first_sight += 1;
            stream.run(body()?, keeps)?;
            return Ok(How::FirstSight);
        }
        match self.capture(stream, key, keeps, &body) {
            Ok(()) => {
                stream.replay(&self.execs[key].exec)?;
                Ok(How::Captured)
            }
            // The stream is as it was: the round loses nothing by running eagerly.
            Err(Error::CaptureFailed { .. } | Error::Capturing { .. } | Error::OutOfMemory { .. }) => {
                stream.run(body()?, keeps)?;
                Ok(How::CaptureFailed)
            }
            Err(error) => Err(error),
        }
    }

    /// Captures a body ahead of its first round, as start-up does for the ladder of row counts.
    ///
    /// # Errors
    /// The capture failed; the key will run eagerly.
    pub fn capture(
        &mut self,
        stream: &Stream,
        key: &Key,
        keeps: &[Arena],
        body: impl Fn() -> Result<Emission>,
    ) -> Result<()> {
        let captured = record(stream, key, keeps, body);
        let exec = captured.inspect_err(|_| {
            self.counts.capture_failed += 1;
            self.failed.insert(key.clone());
        })?;
        self.make_room(exec.bytes());
        self.bytes += exec.bytes();
        self.counts.captured += 1;
        self.seen.remove(key);
        let held = Held { exec, generation: self.generation };
        if let Some(old) = self.execs.insert(key.clone(), held) {
            self.bytes -= old.exec.bytes();
        }
        Ok(())
    }

    /// Compares the graph of `key` with what the key emits now. A graph that differs is dropped with its
    /// whole generation. True if they are equal, or there is no graph.
    pub fn audit(&mut self, key: &Key, emitted: Digest) -> bool {
        let Some(held) = self.execs.get(key) else { return true };
        if held.exec.digest() == emitted {
            return true;
        }
        self.counts.audits_failed += 1;
        self.evict(|_| true);
        false
    }

    /// Gives up every graph, as before a change of what they point to.
    pub fn clear(&mut self) {
        self.evict(|_| true);
    }

    /// What was done so far.
    pub fn counts(&self) -> BankCounts {
        self.counts
    }

    /// Number of graphs.
    pub fn len(&self) -> usize {
        self.execs.len()
    }

    /// Whether there is no graph.
    pub fn is_empty(&self) -> bool {
        self.execs.is_empty()
    }

    /// Bytes of all graphs.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The graph of a key.
    pub fn get(&self, key: &Key) -> Option<&Exec> {
        self.execs.get(key).map(|held| &held.exec)
    }

    /// Notes a key; whether it was new.
    fn first_sight(&mut self, key: &Key) -> bool {
        if self.seen.len() >= SIGHTS {
            self.seen.clear();
        }
        self.seen.insert(key.clone())
    }

    fn make_room(&mut self, bytes: usize) {
        if self.bytes + bytes <= self.budget_bytes {
            return;
        }
        let current = self.generation;
        self.evict(|held| held.generation < current);
        if self.bytes + bytes > self.budget_bytes {
            self.evict(|_| true);
        }
    }

    /// Gives up the graphs that `gone` names, and begins a generation.
    fn evict(&mut self, gone: impl Fn(&Held) -> bool) {
        let before = self.execs.len();
        self.execs.retain(|_, held| !gone(held));
        self.bytes = self.execs.values().map(|held| held.exec.bytes()).sum();
        self.counts.evicted += (before - self.execs.len()) as u64;
        self.failed.clear();
        self.generation += 1;
    }
}

fn record(stream: &Stream, key: &Key, keeps: &[Arena], body: impl Fn() -> Result<Emission>) -> Result<Exec> {
    // Emitted before the capture begins: capturing is for launches alone.
    let emission = body()?;
    let recording = Recording::begin(stream, key.to_string())?;
    stream.run(emission, keeps)?;
    recording.finish(keeps.to_vec())
}
