//! Everything the planner knows, and `book`: mark a round as in flight.

use crate::admit::{self, Refusal, Wait, whole_life};
use crate::effect::{Effect, Effects, Reason};
use crate::ids::{ClassId, RequestId, SlotId};
use crate::lane::Lane;
use crate::limits::{DEPTH, LimitError, Limits, Slab};
use crate::pages::{Pool, PoolUse};
use crate::request::Request;
use crate::round::{EagerReason, Kind, Round, Verdict};
use smallvec::SmallVec;
use std::collections::VecDeque;

/// Everything the planner knows: limits, who waits, who lives, which pages are whose, what is in flight.
#[derive(Debug)]
pub struct State {
    pub(crate) limits: Limits,
    pub(crate) slabs: Vec<SlabSeats>,
    /// The lanes, by slot: slab after slab.
    pub(crate) seats: Vec<Option<Lane>>,
    pub(crate) pools: Vec<Pool>,
    pub(crate) queue: VecDeque<Request>,
    /// Rounds that are booked and not settled, oldest first.
    pub(crate) flying: SmallVec<[u64; DEPTH]>,
    pub(crate) next_round: u64,
    pub(crate) next_lane: u64,
    /// Decode rounds booked since the last prompt piece.
    pub(crate) decodes: u32,
    /// Rounds booked that a graph could run, audited ones included.
    pub(crate) graph_rounds: u64,
}

/// Where the seats of a slab lie, and how many are taken.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SlabSeats {
    pub(crate) class: ClassId,
    pub(crate) slots: u16,
    pub(crate) first: usize,
    pub(crate) taken: u16,
}

impl State {
    /// An empty planner with these capacities.
    pub fn new(limits: Limits, slabs: &[Slab]) -> Result<Self, LimitError> {
        limits.check()?;
        if slabs.is_empty() {
            return Err(LimitError::NoSlabs);
        }
        let pools = limits.pages.iter().map(|pages| Pool::new(*pages)).collect();
        let mut state = Self {
            limits,
            slabs: Vec::new(),
            seats: Vec::new(),
            pools,
            queue: VecDeque::new(),
            flying: SmallVec::new(),
            next_round: 1,
            next_lane: 1,
            decodes: 0,
            graph_rounds: 0,
        };
        for slab in slabs {
            state.grow(*slab)?;
        }
        Ok(state)
    }

    /// Adds a slab after the others; no lane moves.
    pub fn grow(&mut self, slab: Slab) -> Result<(), LimitError> {
        self.limits.check_slab(slab, self.slabs.len())?;
        let first = self.seats.len();
        self.slabs.push(SlabSeats { class: slab.class, slots: slab.slots, first, taken: 0 });
        self.seats.resize_with(first + slab.slots as usize, || None);
        Ok(())
    }

    /// Why a request could never run, whatever else does; nothing if it could.
    pub fn refuses(&self, request: &Request) -> Option<Refusal> {
        admit::refuse(request, &self.limits).or_else(|| self.refuse_beside(request))
    }

    /// Takes a request into the queue, or says why not. No effect means that it waits.
    pub fn arrive(&mut self, request: Request) -> Effects {
        let mut effects = Effects::default();
        let id = request.id;
        let waiting = self.queue.len() as u32;
        if let Some(why) = self.refuses(&request) {
            effects.push(Effect::Refused { request: id, why });
        } else if waiting >= self.limits.queue {
            effects.push(Effect::Full { request: id, waiting });
        } else {
            self.queue.push_back(request);
        }
        effects
    }

    /// Calls a request off. One that waits is gone at once. A live one is not planned again, its later
    /// tokens are not told, and its lane is freed when its rounds in flight are settled. One that is over,
    /// or never was, has no effect.
    pub fn cancel(&mut self, request: RequestId) -> Effects {
        let mut effects = Effects::default();
        let finished = Effect::Finished { request, reason: Reason::Cancelled };
        if let Some(at) = self.queue.iter().position(|waiting| waiting.id == request) {
            self.queue.remove(at);
            effects.push(finished);
            return effects;
        }
        let seat = self
            .seats
            .iter_mut()
            .position(|seat| seat.as_ref().is_some_and(|lane| lane.request.id == request && !lane.ended));
        if let Some(seat) = seat {
            self.lane_mut(seat).ended = true;
            effects.push(finished);
            self.release_if_over(seat, &mut effects);
        }
        effects
    }

    /// Marks what `round` admits, runs and leases as in flight. Nothing may have changed since it was planned.
    pub fn book(&mut self, round: &Round) {
        let number = round.number;
        assert_eq!(number, self.next_round, "rounds are booked in the order of their numbers, each once");
        assert!(
            self.flying.len() < DEPTH,
            "round {number} is booked behind {} unsettled rounds",
            self.flying.len()
        );
        for admit in &round.admits {
            let request = self.queue.pop_front().filter(|head| head.id == admit.request);
            let request = request.unwrap_or_else(|| panic!("{} is not the head of the queue", admit.request));
            assert_eq!(admit.lane.0, self.next_lane, "lanes are numbered in the order of admission");
            self.next_lane += 1;
            let lease = self.pools[request.class.0 as usize].reserve(whole_life(&request));
            let lane = Lane {
                id: admit.lane,
                request,
                slot: admit.slot,
                settled: 0,
                planned: 0,
                told: 0,
                flying: 0,
                last_round: number,
                ended: false,
                lease,
            };
            let seat = self.seat(admit.slot);
            assert!(self.seats[seat].is_none(), "slot {} is taken", admit.slot);
            self.slabs[admit.slot.slab as usize].taken += 1;
            self.seats[seat] = Some(lane);
        }
        for edit in &round.edits {
            let seat = self.seat(edit.slot);
            let lane = self.seats[seat].as_mut().expect("a page goes to a live lane");
            assert_eq!(edit.index as usize, lane.lease.pages().len(), "{} gets its next page", lane.id);
            self.pools[edit.class.0 as usize].take(edit.page, &mut lane.lease);
        }
        for rows in &round.lanes {
            let seat = self.seat(rows.slot);
            let lane = self.lane_mut(seat);
            assert!(
                lane.id == rows.lane && lane.planned == rows.before && !lane.ended,
                "round {number} was not planned from this state: {} at {}, {} at {}",
                rows.lane,
                rows.before,
                lane.id,
                lane.planned
            );
            lane.planned = rows.after;
            lane.flying += 1;
            lane.last_round = number;
        }
        match round.kind {
            Kind::Prompt { .. } => self.decodes = 0,
            Kind::Decode => self.decodes = self.decodes.saturating_add(1),
        }
        if matches!(round.verdict, Verdict::Graph | Verdict::Eager(EagerReason::Audit)) {
            self.graph_rounds += 1;
        }
        self.flying.push(number);
        self.next_round += 1;
    }

    /// Whether rounds may be replayed, from the next plan on.
    pub fn set_graphs(&mut self, on: bool) {
        self.limits.graphs = on;
    }

    /// The capacities it was made with.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The slabs, in order.
    pub fn slabs(&self) -> impl Iterator<Item = Slab> {
        self.slabs.iter().map(|slab| Slab { class: slab.class, slots: slab.slots })
    }

    /// The lanes, by slot.
    pub fn lanes(&self) -> impl Iterator<Item = &Lane> {
        self.seats.iter().flatten()
    }

    /// The lane in a slot.
    pub fn lane(&self, slot: SlotId) -> Option<&Lane> {
        let slab = self.slabs.get(slot.slab as usize)?;
        (slot.index < slab.slots).then(|| self.seats[slab.first + slot.index as usize].as_ref())?
    }

    /// The requests that wait, first come first.
    pub fn waiting(&self) -> impl ExactSizeIterator<Item = &Request> {
        self.queue.iter()
    }

    /// Why the first of those that wait could not be admitted now; nothing if it could, or if nobody waits.
    pub fn wait(&self) -> Option<Wait> {
        admit::admit(self)?.err()
    }

    /// Numbers of the rounds that are booked and not settled, oldest first.
    pub fn flying(&self) -> &[u64] {
        &self.flying
    }

    /// How much of a class's pool is spoken for.
    pub fn pool(&self, class: ClassId) -> Option<PoolUse> {
        self.pools.get(class.0 as usize).map(Pool::count)
    }

    /// Whether nobody waits, nobody lives and nothing is in flight.
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.flying.is_empty() && self.slabs.iter().all(|slab| slab.taken == 0)
    }

    /// The refusals that depend on slabs and on other requests.
    fn refuse_beside(&self, request: &Request) -> Option<Refusal> {
        let Request { id, class, .. } = *request;
        if !self.slabs.iter().any(|slab| slab.class == class) {
            return Some(Refusal::Class { class });
        }
        let mut lanes = self.lanes().filter(|lane| !lane.ended);
        let taken = self.queue.iter().any(|other| other.id == id) || lanes.any(|lane| lane.request.id == id);
        taken.then_some(Refusal::Taken { request: id })
    }

    /// The first free slot of a class, in slab order.
    pub(crate) fn vacant_slot(&self, class: ClassId) -> Option<SlotId> {
        let free = |slab: &SlabSeats| slab.class == class && slab.taken < slab.slots;
        let slab = self.slabs.iter().position(free)?;
        let SlabSeats { first, slots, .. } = self.slabs[slab];
        let seats = &self.seats[first..first + slots as usize];
        let index = seats.iter().position(Option::is_none)?;
        Some(SlotId { slab: slab as u16, index: index as u16 })
    }

    pub(crate) fn seat(&self, slot: SlotId) -> usize {
        let slab = self.slabs[slot.slab as usize];
        assert!(slot.index < slab.slots, "slot {slot} lies outside its slab of {} slots", slab.slots);
        slab.first + slot.index as usize
    }

    pub(crate) fn lane_mut(&mut self, seat: usize) -> &mut Lane {
        self.seats[seat].as_mut().expect("a lane lives until no booked round names it")
    }

    /// Frees the lane of a seat if its request is over and no booked round names it.
    pub(crate) fn release_if_over(&mut self, seat: usize, effects: &mut Effects) {
        if let Some(lane) = self.seats[seat].take_if(|lane| lane.ended && lane.flying == 0) {
            let Lane { id, slot, request, lease, .. } = lane;
            self.slabs[slot.slab as usize].taken -= 1;
            let pages = self.pools[request.class.0 as usize].give_back(lease);
            effects.push(Effect::Freed { lane: id, slot, pages });
        }
    }
}

impl Drop for State {
    /// A planner may be dropped with lanes live; their leases go back, as always.
    fn drop(&mut self) {
        for lane in self.seats.drain(..).flatten() {
            self.pools[lane.request.class.0 as usize].give_back(lane.lease);
        }
    }
}
