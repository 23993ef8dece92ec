//! Turns with a clock: the engine's own steps, with the host's time told apart from waiting.

use std::time::{Duration, Instant};

use super::{Engine, Flying, Ran};
use crate::error::Error;

/// A round that was read and settled, and what the turn that did so took.
#[derive(Clone, Copy, Debug)]
pub struct Metered {
    /// Planning, booking, staging and queueing the next round; settling this one.
    pub host: Duration,
    /// Waiting for this round's outcomes.
    pub wait: Duration,
    /// How this round was executed.
    pub how: Ran,
}

impl Engine {
    /// As [`Engine::turn`], with a clock; nothing if no round was read.
    ///
    /// # Errors
    /// The device failed.
    pub fn metered_turn(&mut self) -> Result<Option<Metered>, Error> {
        self.take_metered_turn().inspect_err(|error| self.fail(error))
    }

    fn take_metered_turn(&mut self) -> Result<Option<Metered>, Error> {
        let start = Instant::now();
        self.see()?;
        let next = self.stage_next()?;
        if next.is_some() || !self.flying.is_empty() {
            self.in_step(next.as_ref())?;
        }
        if let Some(round) = next {
            let flying = self.run(round)?;
            self.flying.push_back(flying);
            if self.flying.len() < self.options.depth {
                return Ok(None);
            }
        }
        let queued = start.elapsed();
        let Some(flying) = self.flying.pop_front() else { return Ok(None) };
        let how = flying.how;
        let (wait, settled) = self.land_one(flying)?;
        Ok(Some(Metered { host: queued + settled, wait, how }))
    }

    /// Reads and settles every round that is under way, and plans none. For an engine that has no other rank, which would
    /// not do the same.
    ///
    /// # Errors
    /// The device failed.
    pub fn land(&mut self) -> Result<(), Error> {
        while let Some(flying) = self.flying.pop_front() {
            self.land_one(flying).inspect_err(|error| self.fail(error))?;
        }
        Ok(())
    }

    /// Waits for a round and settles it; how long either took.
    fn land_one(&mut self, mut flying: Flying) -> Result<(Duration, Duration), Error> {
        let start = Instant::now();
        let outcomes = flying.read.take().map_or(Ok(Vec::new()), |pending| self.runner.take(pending))?;
        let waited = start.elapsed();
        self.settle(&flying.round, flying.how, &outcomes)?;
        Ok((waited, start.elapsed() - waited))
    }
}
