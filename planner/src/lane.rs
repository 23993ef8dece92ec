//! One live sequence in a slot: how far it is settled, how far it is planned, and what it wants next.
//!
//! ```text
//! 0 ────────── settled ────────── planned ────────── prompt + max_tokens - 1
//!   rows final          rows in flight    rows to come
//! ```
//!
//! The last prompt row makes the first token, so a lane with `planned` positions has at most
//! `planned - prompt + 1` tokens, and the last token of a reply never becomes a row. `planned` is an upper
//! bound: a lane with a window may accept fewer rows than it was granted, and its bound falls when that is read.

use crate::ids::{LaneId, PageId, SlotId};
use crate::pages::Lease;
use crate::request::Request;

/// One live sequence.
#[derive(Debug)]
pub struct Lane {
    pub(crate) id: LaneId,
    pub(crate) request: Request,
    pub(crate) slot: SlotId,
    pub(crate) settled: u32,
    pub(crate) planned: u32,
    pub(crate) told: u32,
    /// Booked rounds that hold rows of this lane.
    pub(crate) flying: u32,
    /// The last round that was booked with rows of this lane.
    pub(crate) last_round: u64,
    /// The request was told its end; the lane stays until no booked round names it.
    pub(crate) ended: bool,
    pub(crate) lease: Lease,
}

impl Lane {
    /// Its number.
    pub fn id(&self) -> LaneId {
        self.id
    }

    /// The request that it serves.
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// Its seat on the device.
    pub fn slot(&self) -> SlotId {
        self.slot
    }

    /// Positions whose rows are final.
    pub fn settled(&self) -> u32 {
        self.settled
    }

    /// Positions whose rows are final or in flight, at most.
    pub fn planned(&self) -> u32 {
        self.planned
    }

    /// Tokens that were told.
    pub fn told(&self) -> u32 {
        self.told
    }

    /// Whether its request was told its end; such a lane only waits for its rounds in flight.
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// The pages it holds, in the order of its positions.
    pub fn pages(&self) -> &[PageId] {
        self.lease.pages()
    }

    /// Prompt rows that no round holds yet.
    pub(crate) fn prompt_left(&self) -> u32 {
        self.request.prompt.saturating_sub(self.planned)
    }

    /// Rows it could take in a decode round planned now; 0 if none.
    pub(crate) fn decode_rows(&self) -> u32 {
        let prompting = self.planned < self.request.prompt;
        let unread = self.request.constrained && self.flying > 0;
        if self.ended || prompting || unread {
            return 0;
        }
        let tokens = self.planned - self.request.prompt + 1;
        let window = if self.request.constrained { 1 } else { self.request.window };
        window.min(self.request.max_tokens - tokens)
    }
}
