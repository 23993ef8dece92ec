//! How an engine keeps in step with that of the other rank: what they agree on, what they measure together, and how they
//! part.

use std::time::Duration;

use graph::{GatherTimes, Stream};
use planner::{Round, Verdict};

use super::{Engine, Ran, Sink, groups, reason_text, shape};
use crate::error::Error;
use crate::ranks::{self, Order, Peer};

/// What the end of collectives may take.
const END: Duration = Duration::from_secs(5);

impl Engine {
    /// Tells the follower, if this rank has one, what it is to do too.
    pub(super) fn command(&self, tell: impl FnOnce(&Peer) -> Result<(), Error>) -> Result<(), Error> {
        let Some(peer) = self.peer.as_ref().filter(|peer| peer.leads()) else { return Ok(()) };
        // With much untold it waits for the follower, which may wait for this rank's part of a collective.
        self.runner.stream.progress()?;
        tell(peer)
    }

    /// That the other rank, if there is one, takes this turn too.
    pub(super) fn in_step(&mut self, round: Option<&Round>) -> Result<(), Error> {
        let Some(peer) = &mut self.peer else { return Ok(()) };
        self.runner.stream.progress()?;
        let ran = match round.map(|round| (round, round.verdict)) {
            None => Ran::Eager("no round"),
            Some((_, Verdict::Eager(reason))) => Ran::Eager(reason_text(reason)),
            Some((round, Verdict::Graph)) => {
                let groups = groups(round, &self.slabs);
                self.bank.next(&self.runner.key(&shape(round, &groups))).into()
            }
        };
        let how = match ran {
            Ran::Replayed => ranks::How::Replay,
            Ran::Captured => ranks::How::Capture,
            Ran::Eager(reason) => ranks::How::Eager(reason.into()),
        };
        peer.turn(round, how)
    }

    /// Follows the leader's orders until it ends.
    ///
    /// # Errors
    /// The leader is gone or has failed, the ranks are no longer in step, or the device failed. The leader was told.
    ///
    /// # Panics
    /// If there is no other rank, or this one leads.
    pub fn follow(mut self) -> Result<(), Error> {
        let followed = self.follow_orders();
        if let Err(error) = &followed {
            self.fail(error);
        }
        self.close();
        followed
    }

    fn follow_orders(&mut self) -> Result<(), Error> {
        loop {
            let peer = self.peer.as_mut().filter(|peer| !peer.leads()).expect("there is a leader");
            match peer.order()? {
                // The caller listens at the leader.
                Order::Submit(id, submission) => self.take(id, submission, Sink::new(|_| Ok(())))?,
                Order::Cancel(id) => self.cancel(id),
                Order::Graphs(on) => self.set_graphs(on),
                Order::Measure => drop(self.measure_gathers()?),
                Order::Turn => {
                    self.take_turn()?;
                    self.runner.stream.progress()?;
                }
                Order::End => return Ok(()),
            }
        }
    }

    /// Tells the other rank, if there is one, that this one ends: in good order, or why not.
    pub(crate) fn part(&mut self, failed: Option<&str>) {
        if let Some(peer) = self.peer.take() {
            peer.part(failed);
        }
        // Whoever still waits in a collective, here or there, waits in vain.
        if let (Some(communicator), Some(why)) = (&self.runner.model.communicator, failed) {
            communicator.stop(why);
        }
    }

    /// Lets go of the device, and ends collectives that have one for themselves: with the other rank, or, if something
    /// failed, by ending what waits for it.
    pub(crate) fn close(self) {
        let Engine { bank, peer, runner, classes, slabs, eyes, live, .. } = self;
        // The other rank waits for this one's end, and the end of collectives for that of graphs.
        drop((bank, peer));
        let own = runner.model.communicator.clone().filter(|communicator| communicator.nccl().is_some());
        if own.is_some_and(|communicator| communicator.close(END).is_err()) {
            // Something runs on that nothing has ended. Memory goes when that ends, or with the process.
            std::mem::forget((runner, classes, slabs, eyes, live));
        }
    }

    /// Measures gathers of two ranks on CUDA devices, by every means there is; of others there is nothing to measure.
    /// For benches, between rounds.
    ///
    /// # Errors
    /// The device failed, or the other rank is gone.
    pub(crate) fn measure_gathers(&self) -> Result<Vec<GatherTimes>, Error> {
        const BYTES: [usize; 5] = [5 << 10, 10 << 10, 20 << 10, 64 << 10, 512 << 10];
        let own =
            self.runner.model.communicator.as_ref().filter(|communicator| communicator.nccl().is_some());
        let Some(communicator) = own else { return Ok(Vec::new()) };
        self.command(Peer::measure)?;
        Ok(communicator.measure(&self.runner.stream, &BYTES)?)
    }
}

/// Whether something that succeeded here or not did on every rank.
pub(super) fn agreed<'a>(
    peer: &'a mut Option<Peer>,
    stream: &'a Stream,
    what: &'a str,
) -> impl FnOnce(bool) -> Result<bool, Error> + 'a {
    move |here| match peer {
        Some(peer) => {
            stream.progress()?;
            peer.agree(what, here)
        }
        None => Ok(here),
    }
}
