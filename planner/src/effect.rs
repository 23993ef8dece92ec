//! What the device answered, and what the world must now do.

use crate::admit::Refusal;
use crate::ids::{LaneId, RequestId, SlotId};
use smallvec::SmallVec;

/// What a round did: one answer for each of its lanes, in the round's order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Outcome {
    /// The answers.
    pub lanes: SmallVec<[LaneOutcome; 16]>,
}

/// What a round did to one of its lanes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LaneOutcome {
    /// The tokens it made: one to its rows, or none in a prompt piece that is not the last.
    pub accepted: SmallVec<[u32; 4]>,
    /// Whether the lane ends with this round, after the accepted tokens.
    pub ended: Option<Ended>,
}

/// Why the device's answer ends a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It made a stop token.
    Stop,
    /// Its numbers were not finite.
    Failed,
}

/// Why a request is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// It made a stop token.
    Stop,
    /// It made as many tokens as it may.
    Length,
    /// It was called off.
    Cancelled,
}

/// One thing that happened. Each request ends in exactly one of `Finished`, `Refused`, `Full` or `Failed`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// A request got a lane.
    Admitted {
        /// Whose.
        request: RequestId,
        /// The lane.
        lane: LaneId,
        /// Its seat.
        slot: SlotId,
    },
    /// A request made a token.
    Token {
        /// Whose.
        request: RequestId,
        /// Which.
        token: u32,
    },
    /// A request is over as it should.
    Finished {
        /// Which.
        request: RequestId,
        /// Why.
        reason: Reason,
    },
    /// A request can never run: the caller's fault.
    Refused {
        /// Which.
        request: RequestId,
        /// Why, with the number that decided.
        why: Refusal,
    },
    /// A request came while the queue was full: try later.
    Full {
        /// Which.
        request: RequestId,
        /// Requests that wait: as many as may.
        waiting: u32,
    },
    /// A request was lost: our fault.
    Failed {
        /// Which.
        request: RequestId,
        /// The lane it had.
        lane: LaneId,
        /// The round whose numbers were not finite.
        round: u64,
        /// The lane's final positions before that.
        position: u32,
    },
    /// A lane is gone; its slot and pages may be used again.
    Freed {
        /// The lane.
        lane: LaneId,
        /// The seat it had.
        slot: SlotId,
        /// How many pages it held.
        pages: u32,
    },
}

/// Things that happened, in order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[must_use = "clients wait for these"]
pub struct Effects {
    /// The things.
    pub list: SmallVec<[Effect; 8]>,
}

impl Effects {
    pub(crate) fn push(&mut self, effect: Effect) {
        self.list.push(effect);
    }

    /// Whether nothing happened.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }
}

impl IntoIterator for Effects {
    type Item = Effect;
    type IntoIter = smallvec::IntoIter<[Effect; 8]>;

    fn into_iter(self) -> Self::IntoIter {
        self.list.into_iter()
    }
}

impl<'a> IntoIterator for &'a Effects {
    type Item = &'a Effect;
    type IntoIter = std::slice::Iter<'a, Effect>;

    fn into_iter(self) -> Self::IntoIter {
        self.list.iter()
    }
}
