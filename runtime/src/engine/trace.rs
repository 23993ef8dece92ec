//! What a round left in each of its lanes, as digests.

use graph::{Digest, Digester};
use planner::{RequestId, Round};

use super::Engine;
use crate::bundle::{Bundle, BundleDigest};
use crate::error::Error;

/// What a round left in one lane: for receipts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// The request.
    pub request: RequestId,
    /// Positions after the round.
    pub length: u32,
    /// Digest of the lane's logits; none for a piece of a prompt that is not the last.
    pub logits: Option<Digest>,
    /// Digest of the lane's state, part by part.
    pub state: BundleDigest,
}

impl Engine {
    /// What the round left in each of its lanes. Only without overlap: nothing later may have run.
    pub(super) fn trace(&self, round: &Round) -> Result<Vec<Trace>, Error> {
        let vocab = self.runner.model.config.vocab_size;
        let logits = match round.samples() {
            true => self.runner.logits(round.lanes.len())?,
            false => Vec::new(),
        };
        let trace = |(at, rows): (usize, &planner::LaneRows)| {
            let lane = self.state.lane(rows.slot)?;
            let pages: Vec<u32> = lane.pages().iter().map(|page| page.0).collect();
            let lanes = &self.slabs[rows.slot.slab as usize];
            let (slot, length) = (rows.slot.index as usize, rows.after as usize);
            let bundle = Bundle { lanes, slot, pages: &pages, length };
            let logits = logits.get(at * vocab..(at + 1) * vocab);
            let logits = logits.map(|logits| Digester::of(bytemuck::cast_slice(logits)));
            Some(bundle.digest(&self.runner.stream).map(|state| Trace {
                request: lane.request().id,
                length: rows.after,
                logits,
                state,
            }))
        };
        Ok(round.lanes.iter().enumerate().filter_map(trace).collect::<graph::Result<_>>()?)
    }
}
