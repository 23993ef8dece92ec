//! Decisions: which rows run in the next round, on which slots and pages, and what a settled round means.
//!
//! The same state gives the same round. The crate knows requests, lanes, slots and pages by number; it
//! names no device, weight, thread or clock, draws nothing at random, and never looks at a token.
//!
//! ```text
//! arrive ─► queue ─► plan_round(&State) ─► Round ─► State::book ─► … the device … ─► settle ─► Effects
//! ```
//!
//! `plan_round` only reads. `book` marks a round's admission, rows and pages as in flight, so that the
//! next round can be planned behind it; at most [`DEPTH`] rounds are booked and not yet settled. `settle`
//! is the one place where a booking becomes final or is undone, strictly in booking order.
//!
//! In reading order:
//!
//! - `ids`, `limits`, `request`: the words and the numbers fixed at start
//! - `pages`: a pool per cache class, and leases that must be given back
//! - `lane`, `state`: one live sequence; everything the planner knows, and `book`
//! - `admit`: can this request's whole life fit? and why does it wait?
//! - `plan`, `round`: the one function that decides, and what it decided as plain data
//! - `effect`, `settle`: what the device answered, and what the world must now do
//! - `text`, `scene`: rounds, states and effects as stable text; a small language that plays them

#![forbid(unsafe_code)]

mod admit;
mod effect;
mod ids;
mod lane;
mod limits;
mod pages;
mod plan;
mod request;
mod round;
pub mod scene;
mod settle;
mod state;
mod text;

pub use admit::{Refusal, Wait};
pub use effect::{Effect, Effects, Ended, LaneOutcome, Outcome, Reason};
pub use ids::{ClassId, LaneId, PageId, RequestId, SlotId};
pub use lane::Lane;
pub use limits::{DEPTH, GRAPH_ROWS, LimitError, Limits, PAGE, Slab, pages_for};
pub use pages::PoolUse;
pub use plan::plan_round;
pub use request::Request;
pub use round::{Admit, EagerReason, Group, Kind, LaneRows, PageEdit, Round, RoundError, Row, Verdict};
pub use settle::settle;
pub use state::State;
