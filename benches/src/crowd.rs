//! An engine with requests that a bench drives turn by turn.

use std::path::Path;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use planner::{Kind, RequestId};
use runtime::engine::{Engine, EngineOptions, Event, Settled, Turn, open};
use runtime::request::Submission;

/// An engine, and the inbox of all its requests.
pub struct Crowd {
    /// The engine.
    pub engine: Engine,
    sender: Sender<Event>,
    events: Receiver<Event>,
    last: u64,
    /// The ids made since the last [`Crowd::submit`] to an idle engine.
    made: Vec<u32>,
}

impl Crowd {
    /// Opens a model.
    ///
    /// # Panics
    /// When it cannot be opened.
    pub fn open(dir: &Path, options: &EngineOptions) -> Crowd {
        let open =
            open(dir, options, &mut |_| {}).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
        let (sender, events) = unbounded();
        Crowd { engine: open.engine, sender, events, last: 0, made: Vec::new() }
    }

    /// Submits a greedy request that no id ends.
    pub fn submit(&mut self, prompt: Vec<u32>, max_tokens: u32) -> RequestId {
        if self.engine.is_idle() {
            self.made.clear();
        }
        self.last += 1;
        let id = RequestId(self.last);
        let submission =
            Submission { max_tokens: Some(max_tokens), ignore_eos: true, ..Submission::new(prompt) };
        self.engine.submit(id, submission, self.sender.clone());
        id
    }

    /// Empties the inbox.
    ///
    /// # Panics
    /// When a request was refused or failed.
    pub fn listen(&mut self) {
        for event in self.events.try_iter() {
            match event {
                Event::Token(token) => self.made.push(token.id),
                Event::Finished(_) => {}
                other => panic!("a request of a bench ended badly: {other:?}"),
            }
        }
    }

    /// The ids made since requests were submitted to an idle engine, in the order in which they were told.
    pub fn made(&mut self) -> &[u32] {
        self.listen();
        &self.made
    }

    /// Turns until a round is settled; none if the engine is idle.
    ///
    /// # Panics
    /// When the device fails.
    pub fn settled(&mut self) -> Option<Box<Settled>> {
        loop {
            match self.engine.turn().unwrap_or_else(|error| panic!("{error}")) {
                Turn::Idle => return None,
                Turn::Queued => {}
                Turn::Settled(settled) => return Some(settled),
            }
        }
    }

    /// Lets everything end by itself.
    pub fn finish(&mut self) {
        while self.settled().is_some() {}
        self.listen();
    }

    /// Calls everything off.
    pub fn disperse(&mut self) {
        (1..=self.last).for_each(|id| self.engine.cancel(RequestId(id)));
        self.last = 0;
        self.finish();
    }

    /// Fills so many lanes, and turns until all of them decode. Lane `n` has prompt `n`.
    ///
    /// # Panics
    /// When the first lane ends before the last one decodes: `max_tokens` is too small.
    pub fn gather(&mut self, lanes: usize, prompt_ids: usize, max_tokens: u32) {
        self.disperse();
        for lane in 0..lanes {
            self.submit(prompt(lane, prompt_ids), max_tokens);
        }
        loop {
            let settled = self.settled().expect("replies long enough to meet");
            if is_decode(&settled, lanes) {
                return;
            }
        }
    }

    /// The time of `rounds` decode rounds of so many lanes, whatever else must be done to get them.
    pub fn decode(&mut self, lanes: usize, prompt_ids: usize, rounds: u64) -> Duration {
        /// Rounds after which lanes begin anew, so that their lengths stay alike.
        const STRETCH: u64 = 256;
        let (mut left, mut took) = (rounds, Duration::ZERO);
        while left > 0 {
            let stretch = left.min(STRETCH);
            self.gather(lanes, prompt_ids, STRETCH as u32 + 96);
            let start = Instant::now();
            for _ in 0..stretch {
                let settled = self.settled().expect("lanes have ids to go");
                assert!(is_decode(&settled, lanes), "a round of {lanes} lanes, not\n{}", settled.round);
            }
            took += start.elapsed();
            left -= stretch;
        }
        took
    }
}

fn is_decode(settled: &Settled, lanes: usize) -> bool {
    settled.round.kind == Kind::Decode && settled.round.lanes.len() == lanes
}

/// A prompt of so many ids; different lanes have different ones.
pub fn prompt(lane: usize, ids: usize) -> Vec<u32> {
    (0..ids).map(|at| ((lane * 131 + at * 7 + at * at % 11) % 997 + 1) as u32).collect()
}
