//! `plan_round`: the one function that decides.
//!
//! - A prompt piece is a round of its own. The oldest unfinished prompt comes first; when there is none, the
//!   head of the queue is admitted, if it fits, and its first piece is the round. So one prompt runs at a
//!   time, in the order of arrival.
//! - A decode round goes before a prompt piece if some lane can take a decode row now and fewer than
//!   `decode_share` decode rounds have gone since the last piece. In all other cases a piece goes first. No
//!   round waits for a lane that cannot be planned yet.
//! - Lanes whose rounds must be eager (image-bearing, pocketed) decode in rounds of their own, so that the
//!   others keep their graphs. The rounds are the same whether graphs are on or off.
//! - The lane that has waited longest for a decode round decides which of the two families goes next. If
//!   its family has more rows than a round, those that waited longest go, ties by slot. So no lane is passed
//!   over for ever, and which lanes go depends on the state alone.
//! - Lanes are listed by slot, that is by slab, whatever their order of arrival.

use crate::admit;
use crate::ids::{ClassId, SlotId};
use crate::lane::Lane;
use crate::limits::DEPTH;
use crate::round::{Admit, EagerReason, Group, Kind, LaneRows, PageEdit, Round, Verdict};
use crate::state::State;
use smallvec::SmallVec;

/// The next round, or nothing if none can be planned before one is settled or a request arrives.
pub fn plan_round(state: &State) -> Option<Round> {
    if state.flying.len() == DEPTH {
        return None;
    }
    let Survey { prompting, ready } = Survey::of(state);
    let decode_first = !ready.is_empty() && state.decodes < state.limits.decode_share;
    let round = if decode_first {
        decode_round(state, ready)
    } else if let Some(lane) = prompting {
        prompt_piece(state, lane)
    } else if let Some(Ok(admit)) = admit::admit(state) {
        first_piece(state, admit)
    } else if !ready.is_empty() {
        decode_round(state, ready)
    } else {
        return None;
    };
    if let Err(error) = round.check() {
        panic!("planned a round that is not well formed: {error}\n{round}");
    }
    Some(round)
}

/// What the lanes want.
struct Survey<'a> {
    /// The lane with prompt rows to go: at most one, as a request is admitted only where there is none.
    prompting: Option<&'a Lane>,
    /// Lanes that can take a decode row now, by slot.
    ready: SmallVec<[Ready<'a>; 32]>,
}

#[derive(Clone, Copy)]
struct Ready<'a> {
    lane: &'a Lane,
    rows: u32,
}

impl<'a> Survey<'a> {
    fn of(state: &'a State) -> Self {
        let mut survey = Survey { prompting: None, ready: SmallVec::new() };
        for lane in state.lanes().filter(|lane| !lane.ended) {
            if lane.prompt_left() > 0 {
                survey.prompting = Some(lane);
            } else if let rows @ 1.. = lane.decode_rows() {
                survey.ready.push(Ready { lane, rows });
            }
        }
        survey
    }
}

/// The next piece of a prompt that has begun.
fn prompt_piece(state: &State, lane: &Lane) -> Round {
    let rows = LaneRows { lane: lane.id, slot: lane.slot, before: lane.planned, after: 0 };
    piece(state, rows, lane.request.prompt, lane.request.class, lane.pages().len())
}

/// The first piece of the prompt of a request that gets its lane with it.
fn first_piece(state: &State, admit: Admit) -> Round {
    let request = state.queue[0];
    let rows = LaneRows { lane: admit.lane, slot: admit.slot, before: 0, after: 0 };
    let mut round = piece(state, rows, request.prompt, request.class, 0);
    round.admits.push(admit);
    round
}

fn piece(state: &State, mut rows: LaneRows, prompt: u32, class: ClassId, held: usize) -> Round {
    rows.after = prompt.min(rows.before + state.limits.piece_rows);
    let kind = Kind::Prompt { start: rows.before, last: rows.after == prompt };
    let mut round = empty_round(state, kind, Verdict::Eager(EagerReason::PromptPass));
    add(&mut round, state, rows, class, held);
    round
}

fn decode_round(state: &State, mut ready: SmallVec<[Ready<'_>; 32]>) -> Round {
    let longest = ready.iter().min_by_key(|ready| (ready.lane.last_round, ready.lane.slot));
    let eager = longest.is_some_and(|ready| must_be_eager(ready.lane));
    ready.retain(|ready| must_be_eager(ready.lane) == eager);
    choose(&mut ready, state.limits.round_rows);

    let image_bearing = ready.iter().any(|ready| ready.lane.request.image_bearing);
    let audit = state.limits.audit as u64;
    let verdict = if image_bearing {
        Verdict::Eager(EagerReason::ImageBearing)
    } else if eager {
        Verdict::Eager(EagerReason::Pocketed)
    } else if !state.limits.graphs {
        Verdict::Eager(EagerReason::GraphsOff)
    } else if audit > 0 && (state.graph_rounds + 1).is_multiple_of(audit) {
        Verdict::Eager(EagerReason::Audit)
    } else {
        Verdict::Graph
    };
    let mut round = empty_round(state, Kind::Decode, verdict);
    for Ready { lane, rows } in ready {
        let rows =
            LaneRows { lane: lane.id, slot: lane.slot, before: lane.planned, after: lane.planned + rows };
        add(&mut round, state, rows, lane.request.class, lane.pages().len());
    }
    round
}

fn must_be_eager(lane: &Lane) -> bool {
    lane.request.image_bearing || lane.request.pocketed
}

/// Keeps the lanes that waited longest, as many as fit into a round of `most` rows, by slot.
fn choose(ready: &mut SmallVec<[Ready<'_>; 32]>, most: u32) {
    if ready.iter().map(|ready| ready.rows).sum::<u32>() <= most {
        return;
    }
    ready.sort_unstable_by_key(|ready| (ready.lane.last_round, ready.lane.slot));
    let mut total = 0;
    let fit = ready.iter().take_while(|ready| {
        total += ready.rows;
        total <= most
    });
    let fit = fit.count();
    ready.truncate(fit);
    ready.sort_unstable_by_key(|ready| ready.lane.slot);
}

fn empty_round(state: &State, kind: Kind, verdict: Verdict) -> Round {
    Round {
        number: state.next_round,
        kind,
        verdict,
        lanes: SmallVec::new(),
        groups: SmallVec::new(),
        edits: SmallVec::new(),
        admits: SmallVec::new(),
    }
}

/// Appends a lane's rows with the pages that they need beyond the `held` ones, lowest free page first.
fn add(round: &mut Round, state: &State, rows: LaneRows, class: ClassId, held: usize) {
    let SlotId { slab, .. } = rows.slot;
    match round.groups.last_mut() {
        Some(group) if group.slab == slab => group.rows += rows.rows(),
        _ => round.groups.push(Group { slab, rows: rows.rows() }),
    }
    for index in held as u32..rows.pages() {
        let taken = round.edits.iter().rev().find(|edit| edit.class == class);
        let from = taken.map_or(0, |edit| edit.page.0 + 1);
        let page = state.pools[class.0 as usize]
            .next_free(from)
            .expect("the reservation of a lane covers its pages");
        round.edits.push(PageEdit { slot: rows.slot, index, class, page });
    }
    round.lanes.push(rows);
}
