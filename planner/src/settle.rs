//! `settle`: make a booked round final, or undo what did not come true; returns what the world must now do.
//!
//! ```text
//! a window of 4 rows of which 3 were accepted, with another window booked behind it:
//!
//! before   settled ·········· 4 rows ·········· 4 rows ·········· planned
//! after            3 accepted ► settled ·········· 4 rows ·········· planned, one lower
//! ```
//!
//! A lane that ends here may have rows in a round that is booked behind. That round's answer for it is
//! discarded, and slot and pages are freed when no booked round names the lane.

use crate::effect::{Effect, Effects, Ended, LaneOutcome, Outcome, Reason};
use crate::lane::Lane;
use crate::round::{Kind, LaneRows, Round};
use crate::state::State;

/// Makes the oldest booked round final. Each round is settled exactly once, in booking order.
pub fn settle(state: &mut State, round: &Round, outcome: &Outcome) -> Effects {
    assert_eq!(state.flying.first(), Some(&round.number), "rounds are settled once, in booking order");
    assert_eq!(outcome.lanes.len(), round.lanes.len(), "round {} is answered lane by lane", round.number);
    state.flying.remove(0);
    let mut effects = Effects::default();
    for admit in &round.admits {
        if state.lane(admit.slot).is_some_and(|lane| !lane.ended) {
            effects.push(Effect::Admitted { request: admit.request, lane: admit.lane, slot: admit.slot });
        }
    }
    for (rows, answer) in round.lanes.iter().zip(&outcome.lanes) {
        let seat = state.seat(rows.slot);
        let lane = state.lane_mut(seat);
        assert_eq!(lane.id, rows.lane, "slot {} changed hands in flight", rows.slot);
        lane.flying -= 1;
        if !lane.ended {
            accept(lane, round, rows, answer, &mut effects);
        }
        state.release_if_over(seat, &mut effects);
    }
    effects
}

/// Makes a lane's accepted rows final, tells its tokens, and ends it if that is due.
fn accept(lane: &mut Lane, round: &Round, rows: &LaneRows, answer: &LaneOutcome, effects: &mut Effects) {
    let request = lane.request.id;
    let position = lane.settled;
    let tokens = answer.accepted.len() as u32;
    let most = match round.kind {
        Kind::Prompt { last, .. } => last as u32,
        Kind::Decode => rows.rows(),
    };
    let least = if answer.ended.is_none() { most.min(1) } else { 0 };
    assert!(
        (least..=most).contains(&tokens),
        "{tokens} tokens for {} of round {}: {least} to {most}",
        rows.lane,
        round.number
    );
    match round.kind {
        Kind::Prompt { .. } => lane.settled = rows.after,
        Kind::Decode => {
            lane.settled += tokens;
            lane.planned -= rows.rows() - tokens;
        }
    }
    for token in &answer.accepted {
        effects.push(Effect::Token { request, token: *token });
    }
    lane.told += tokens;
    let end = match answer.ended {
        Some(Ended::Failed) => Effect::Failed { request, lane: lane.id, round: round.number, position },
        Some(Ended::Stop) => Effect::Finished { request, reason: Reason::Stop },
        None if lane.told == lane.request.max_tokens => Effect::Finished { request, reason: Reason::Length },
        None => return,
    };
    lane.ended = true;
    effects.push(end);
}
