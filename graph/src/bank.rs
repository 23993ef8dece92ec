//! The bank: execs by key, and the decision between replay, capture and eager.
//!
//! ```text
//! known key                      -> replay
//! key asked for a second time    -> capture, then replay
//! key asked for the first time   -> eager (first sight)
//! capture failed                 -> eager (capture failed); the key is not tried again in this generation
//! ```
//! Time goes in *generations*. When a capture would pass the byte budget, every exec that was not replayed in
//! this generation goes, and the next one begins; if that is not enough, all go. A replay right after the
//! capture is none: what was captured and never asked for again goes first. What the bank noted of keys
//! without execs goes with every generation. An exec larger than the whole budget is a failed capture:
//! nothing goes to make room for it.

use std::collections::{HashMap, HashSet};

use crate::arena::Arena;
use crate::digest::Digest;
use crate::emission::Emission;
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::key::Key;
use crate::recording::Recording;
use crate::stream::Stream;

/// How many first sights are remembered, and how many failed captures; at the next one all are forgotten.
pub const NOTED: usize = 4096;

/// A store of execs.
pub struct Bank {
    execs: HashMap<Key, Held>,
    /// Keys that ran once, since the generation began.
    seen: HashSet<Key>,
    /// Keys whose capture failed, since the generation began.
    failed: HashSet<Key>,
    budget_bytes: usize,
    bytes: usize,
    generation: u64,
    counts: BankCounts,
}

struct Held {
    exec: Exec,
    /// The generation of its last replay.
    replayed: Option<u64>,
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
    /// Rounds that ran eagerly because the capture of their key failed, then or earlier.
    pub without_graph: u64,
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
    /// called only if there is no graph. `keeps` are the arenas that they point into. `agreed` is asked after a
    /// capture, with whether it succeeded here, and says whether it did on every rank: a graph that one rank lacks is
    /// given up on all.
    ///
    /// # Errors
    /// The body cannot be emitted; the stream takes nothing; or what `agreed` returns. A capture that fails is none:
    /// the round runs eagerly.
    pub fn run<E: From<Error>>(
        &mut self,
        stream: &Stream,
        key: &Key,
        keeps: &[Arena],
        body: impl Fn() -> Result<Emission>,
        agreed: impl FnOnce(bool) -> std::result::Result<bool, E>,
    ) -> std::result::Result<How, E> {
        match self.next(key) {
            How::Replayed => {
                let held = self.execs.get_mut(key).expect("there is a graph");
                stream.replay(&held.exec)?;
                held.replayed = Some(self.generation);
                self.counts.replayed += 1;
                return Ok(How::Replayed);
            }
            How::FirstSight => {
                stream.run(body()?, keeps)?;
                note(&mut self.seen, key);
                self.counts.first_sight += 1;
                return Ok(How::FirstSight);
            }
            How::Captured if self.prepare(stream, key, keeps, &body, agreed)? => {
                stream.replay(&self.execs[key].exec)?;
                return Ok(How::Captured);
            }
            How::Captured | How::CaptureFailed => {}
        }
        // A failed capture leaves the stream as it was: the round loses nothing by running eagerly.
        stream.run(body()?, keeps)?;
        self.counts.without_graph += 1;
        Ok(How::CaptureFailed)
    }

    /// Captures a body ahead of its first round, as start-up does for the ladder of row counts. False if the
    /// capture failed here, or, as `agreed` says, on another rank: nothing is lost, and the key runs eagerly in this
    /// generation.
    ///
    /// # Errors
    /// As [`Bank::run`].
    pub fn prepare<E: From<Error>>(
        &mut self,
        stream: &Stream,
        key: &Key,
        keeps: &[Arena],
        body: impl Fn() -> Result<Emission>,
        agreed: impl FnOnce(bool) -> std::result::Result<bool, E>,
    ) -> std::result::Result<bool, E> {
        // Emitted before the capture begins: capturing is for launches alone.
        let emission = body()?;
        let captured = match record(stream, key, keeps, emission) {
            Ok(exec) => Some(exec).filter(|exec| exec.bytes() <= self.budget_bytes),
            Err(Error::CaptureFailed { .. } | Error::Capturing { .. } | Error::OutOfMemory { .. }) => None,
            Err(error) => return Err(error.into()),
        };
        // Nothing makes room for what is not kept.
        match (agreed(captured.is_some())?, captured) {
            (true, Some(exec)) => {
                self.hold(key, exec);
                Ok(true)
            }
            _ => {
                self.counts.capture_failed += 1;
                note(&mut self.failed, key);
                Ok(false)
            }
        }
    }

    /// How a round of this key would be executed now, if a capture succeeds.
    pub fn next(&self, key: &Key) -> How {
        match (self.execs.contains_key(key), self.failed.contains(key), self.seen.contains(key)) {
            (true, _, _) => How::Replayed,
            (_, true, _) => How::CaptureFailed,
            (_, _, true) => How::Captured,
            _ => How::FirstSight,
        }
    }

    /// Compares the graph of `key` with what the key emits now. A graph that differs, here or, as `agreed` says, on
    /// another rank, is dropped with its whole generation. True if all are equal, or there is no graph.
    ///
    /// # Errors
    /// What `agreed` returns.
    pub fn audit<E>(
        &mut self,
        key: &Key,
        emitted: Digest,
        agreed: impl FnOnce(bool) -> std::result::Result<bool, E>,
    ) -> std::result::Result<bool, E> {
        let equal = agreed(self.execs.get(key).is_none_or(|held| held.exec.digest() == emitted))?;
        if !equal {
            self.counts.audits_failed += 1;
            self.evict(|_| true);
        }
        Ok(equal)
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

    /// Takes an exec that fits the budget.
    fn hold(&mut self, key: &Key, exec: Exec) {
        if let Some(old) = self.execs.remove(key) {
            self.bytes -= old.exec.bytes();
            self.counts.evicted += 1;
        }
        self.make_room(exec.bytes());
        self.bytes += exec.bytes();
        self.counts.captured += 1;
        self.seen.remove(key);
        self.failed.remove(key);
        self.execs.insert(key.clone(), Held { exec, replayed: None });
    }

    fn make_room(&mut self, bytes: usize) {
        let left = self.budget_bytes - bytes;
        if self.bytes <= left {
            return;
        }
        let now = Some(self.generation);
        let used = self.execs.values().filter(|held| held.replayed == now);
        match used.map(|held| held.exec.bytes()).sum::<usize>() <= left {
            true => self.evict(|held| held.replayed != now),
            false => self.evict(|_| true),
        }
    }

    /// Gives up the graphs that `gone` names, and begins a generation.
    fn evict(&mut self, gone: impl Fn(&Held) -> bool) {
        let before = self.execs.len();
        self.execs.retain(|_, held| !gone(held));
        self.bytes = self.execs.values().map(|held| held.exec.bytes()).sum();
        self.counts.evicted += (before - self.execs.len()) as u64;
        self.seen.clear();
        self.failed.clear();
        self.generation += 1;
    }
}

/// Adds a key to a set of at most [`NOTED`].
fn note(keys: &mut HashSet<Key>, key: &Key) {
    if keys.len() >= NOTED && !keys.contains(key) {
        keys.clear();
    }
    keys.insert(key.clone());
}

fn record(stream: &Stream, key: &Key, keeps: &[Arena], emission: Emission) -> Result<Exec> {
    let recording = Recording::begin(stream, key.to_string())?;
    stream.run(emission, keeps)?;
    recording.finish(keeps.to_vec())
}
