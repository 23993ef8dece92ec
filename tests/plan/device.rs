//! A device that answers rounds, and a world of requests around it that checks every round and every effect.
//!
//! The device holds what the planner must not know: true lengths, page tables, and which lane wrote a page
//! last. A token is a digest of everything that its lane's slot was fed, so a row that is lost, doubled or
//! fed to another slot shows in the tokens.

use planner::{
    ClassId, DEPTH, EagerReason, Effect, Effects, Ended, Kind, Lane, LaneId, LaneOutcome, Limits, Outcome,
    PageId, Reason, Request, RequestId, Round, Slab, SlotId, State, Verdict, plan_round, settle,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Limits that make every boundary near.
pub(crate) fn small_limits() -> Limits {
    Limits {
        context: 500,
        piece_rows: 128,
        round_rows: 6,
        decode_share: 1,
        queue: 1000,
        audit: 4,
        graphs: true,
        pages: vec![12, 9],
    }
}

pub(crate) fn slab(class: u8, slots: u16) -> Slab {
    Slab { class: ClassId(class), slots }
}

/// What will become of a request.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Fate {
    pub(crate) stop: Option<u32>,
    pub(crate) fail: Option<u32>,
}

/// The state of one slot on the device.
#[derive(Default)]
struct Slot {
    length: u32,
    made: u32,
    digest: u64,
    table: Vec<PageId>,
}

pub(crate) struct World {
    pub(crate) state: State,
    pub(crate) booked: VecDeque<Round>,
    pub(crate) requests: BTreeMap<RequestId, (Request, Fate)>,
    pub(crate) told: BTreeMap<RequestId, Vec<u32>>,
    pub(crate) ends: BTreeMap<RequestId, Effect>,
    pub(crate) admitted: Vec<RequestId>,
    pub(crate) lanes: BTreeMap<LaneId, RequestId>,
    pub(crate) freed: BTreeSet<LaneId>,
    /// Decode rounds since the last piece, counted here.
    decodes: u32,
    slots: BTreeMap<SlotId, Slot>,
    writers: BTreeMap<(ClassId, PageId), LaneId>,
}

impl World {
    pub(crate) fn new(limits: Limits, slabs: &[Slab]) -> Self {
        Self {
            state: State::new(limits, slabs).expect("limits that work"),
            booked: VecDeque::new(),
            requests: BTreeMap::new(),
            told: BTreeMap::new(),
            ends: BTreeMap::new(),
            admitted: Vec::new(),
            lanes: BTreeMap::new(),
            freed: BTreeSet::new(),
            decodes: 0,
            slots: BTreeMap::new(),
            writers: BTreeMap::new(),
        }
    }

    pub(crate) fn arrive(&mut self, request: Request, fate: Fate) {
        self.requests.insert(request.id, (request, fate));
        let effects = self.state.arrive(request);
        self.hear(effects);
    }

    pub(crate) fn cancel(&mut self, request: RequestId) {
        let over = self.ends.contains_key(&request);
        let effects = self.state.cancel(request);
        assert!(!over || effects.is_empty(), "{request} was over; cancelling it had effects");
        self.hear(effects);
    }

    /// Plans and books a round, if there is one.
    pub(crate) fn book(&mut self) -> Option<&Round> {
        let round = plan_round(&self.state)?;
        assert_eq!(Some(&round), plan_round(&self.state).as_ref(), "the same state gives the same round");
        self.check_round(&round);
        self.state.book(&round);
        self.lanes.extend(round.admits.iter().map(|admit| (admit.lane, admit.request)));
        self.booked.push_back(round);
        self.check_state();
        self.booked.back()
    }

    /// Lets the device run the oldest booked round, and settles it; false if there is none.
    pub(crate) fn settle(&mut self) -> bool {
        let Some(round) = self.booked.pop_front() else { return false };
        let outcome = self.execute(&round);
        let effects = settle(&mut self.state, &round, &outcome);
        self.hear(effects);
        self.check_state();
        true
    }

    /// Runs until nothing can be planned and nothing is in flight.
    pub(crate) fn drain(&mut self, ahead: usize) {
        loop {
            let booked = self.booked.len() < ahead && self.book().is_some();
            if !booked && !self.settle() {
                break;
            }
        }
        assert!(self.state.is_idle(), "requests are left behind:\n{}", self.state);
        for class in 0..self.state.limits().pages.len() {
            let pool = self.state.pool(ClassId(class as u8)).expect("every class has a pool");
            assert_eq!((pool.free, pool.reserved), (pool.total, 0), "class {class} ends with pages missing");
        }
        for request in self.requests.keys() {
            assert!(self.ends.contains_key(request), "{request} never ended");
        }
        assert!(self.lanes.keys().all(|lane| self.freed.contains(lane)), "a lane was never freed");
    }

    fn hear(&mut self, effects: Effects) {
        for effect in effects {
            match effect {
                Effect::Admitted { request, .. } => self.admitted.push(request),
                Effect::Token { request, token } => {
                    assert!(!self.ends.contains_key(&request), "{request} got a token after its end");
                    self.told.entry(request).or_default().push(token);
                }
                Effect::Freed { lane, .. } => assert!(self.freed.insert(lane), "{lane} was freed twice"),
                Effect::Finished { request, .. }
                | Effect::Refused { request, .. }
                | Effect::Full { request, .. }
                | Effect::Failed { request, .. } => {
                    let before = self.ends.insert(request, effect);
                    assert_eq!(before, None, "{request} ended twice");
                    self.check_end(request, effect);
                }
            }
        }
    }

    fn check_end(&self, request: RequestId, effect: Effect) {
        let (asked, fate) = self.requests[&request];
        let told = self.told.get(&request).map_or(0, |tokens| tokens.len() as u32);
        match effect {
            Effect::Finished { reason: Reason::Length, .. } => assert_eq!(told, asked.max_tokens),
            Effect::Finished { reason: Reason::Stop, .. } => assert_eq!(Some(told), fate.stop),
            Effect::Failed { .. } => assert_eq!(Some(told), fate.fail),
            _ => assert!(told < asked.max_tokens),
        }
    }

    /// What must hold of a round beyond its own check.
    fn check_round(&mut self, round: &Round) {
        assert_eq!(round.check(), Ok(()));
        assert!(round.rows().map(|row| row.slot).is_sorted());
        assert_eq!(round.rows().count() as u32, round.groups.iter().map(|group| group.rows).sum::<u32>());
        let limits = self.state.limits();
        let flying =
            |lane: LaneId| self.booked.iter().any(|other| other.lanes.iter().any(|rows| rows.lane == lane));
        for rows in &round.lanes {
            let Some(lane) = self.state.lane(rows.slot) else {
                assert!(round.admits.iter().any(|admit| admit.lane == rows.lane));
                continue;
            };
            assert!(!lane.ended(), "{} is over and was planned", rows.lane);
            let bound = lane.request().prompt + lane.request().max_tokens - 1;
            assert!(rows.after <= bound, "{} is planned to {} of {bound}", rows.lane, rows.after);
            if round.kind == Kind::Decode && lane.request().constrained {
                assert!(
                    rows.rows() == 1 && !flying(rows.lane),
                    "{} was planned before its token was read",
                    rows.lane
                );
            }
        }
        self.check_verdict(round);
        match round.kind {
            Kind::Prompt { .. } => {
                assert!(round.row_count() <= limits.piece_rows);
                let ready = |lane: &Lane| {
                    let Request { prompt, max_tokens, constrained, .. } = *lane.request();
                    let more = lane.planned() >= prompt && lane.planned() - prompt + 1 < max_tokens;
                    more && !lane.ended() && !(constrained && flying(lane.id()))
                };
                let alone = !self.state.lanes().any(ready);
                assert!(
                    alone || self.decodes >= limits.decode_share,
                    "a piece after {} decode rounds",
                    self.decodes
                );
                self.decodes = 0;
            }
            Kind::Decode => {
                assert!(round.row_count() <= limits.round_rows);
                self.decodes += 1;
            }
        }
    }

    /// Text lanes never sit in a round that must be eager, and others never in one that a graph may run.
    fn check_verdict(&self, round: &Round) {
        let lanes = || round.lanes.iter().filter_map(|rows| self.state.lane(rows.slot)).map(Lane::request);
        let (image, pocket) = (lanes().any(|r| r.image_bearing), lanes().any(|r| r.pocketed));
        let text = lanes().any(|r| !r.image_bearing && !r.pocketed);
        match (round.kind, round.verdict) {
            (Kind::Prompt { .. }, verdict) => assert_eq!(verdict, Verdict::Eager(EagerReason::PromptPass)),
            (Kind::Decode, Verdict::Eager(EagerReason::ImageBearing)) => assert!(image && !text),
            (Kind::Decode, Verdict::Eager(EagerReason::Pocketed)) => assert!(pocket && !image && !text),
            (Kind::Decode, verdict) => {
                assert!(text && !image && !pocket);
                let off = verdict == Verdict::Eager(EagerReason::GraphsOff);
                assert_eq!(off, !self.state.limits().graphs);
            }
        }
    }

    fn check_state(&self) {
        assert!(self.state.flying().len() <= DEPTH);
        assert!(self.state.flying().iter().eq(self.booked.iter().map(|round| &round.number)));
        assert!(self.state.lanes().map(Lane::slot).is_sorted());
        let mut owned = BTreeSet::new();
        for lane in self.state.lanes() {
            let class = lane.request().class;
            for page in lane.pages() {
                assert!(owned.insert((class, *page)), "{page} of {class} has two owners");
            }
        }
        for class in (0..self.state.limits().pages.len()).map(|class| ClassId(class as u8)) {
            let pool = self.state.pool(class).expect("every class has a pool");
            let leased = owned.iter().filter(|(of, _)| *of == class).count() as u32;
            assert_eq!(pool.free + leased, pool.total, "pages of {class} leaked");
            assert!(leased <= pool.reserved && pool.reserved <= pool.total);
        }
    }

    /// Runs a round on the device: stage, feed each lane's rows, answer.
    fn execute(&mut self, round: &Round) -> Outcome {
        for slot in round.clears() {
            self.slots.insert(slot, Slot::default());
        }
        for edit in &round.edits {
            let table = &mut self.slots.get_mut(&edit.slot).expect("a slot is cleared before use").table;
            assert_eq!(table.len() as u32, edit.index, "page tables grow page by page");
            table.push(edit.page);
        }
        let mut outcome = Outcome::default();
        for rows in &round.lanes {
            let (request, fate) = self.requests[&self.lanes[&rows.lane]];
            let class = request.class;
            let slot = self.slots.get_mut(&rows.slot).expect("a slot is cleared before use");
            assert!(slot.length <= rows.before, "{} is longer than its bound {}", rows.lane, rows.before);
            let mut answer = LaneOutcome::default();
            for page in &slot.table[..slot.length.div_ceil(64) as usize] {
                let writer = self.writers.get(&(class, *page));
                assert_eq!(writer, Some(&rows.lane), "{page} was overwritten under {}", rows.lane);
            }
            let accepted = match round.kind {
                Kind::Prompt { .. } => rows.rows(),
                Kind::Decode => 1 + mix(slot.digest, 7) as u32 % rows.rows(),
            };
            for _ in 0..accepted {
                let page = slot.table[slot.length as usize / 64];
                self.writers.insert((class, page), rows.lane);
                slot.digest = mix(slot.digest, slot.length as u64 ^ request.id.0 << 32);
                slot.length += 1;
                let last = slot.length >= request.prompt;
                if last && answer.ended.is_none() {
                    if fate.fail == Some(slot.made) {
                        answer.ended = Some(Ended::Failed);
                        continue;
                    }
                    slot.made += 1;
                    answer.accepted.push(slot.digest as u32);
                    if fate.stop == Some(slot.made) {
                        answer.ended = Some(Ended::Stop);
                    }
                }
            }
            outcome.lanes.push(answer);
        }
        outcome
    }
}

fn mix(state: u64, word: u64) -> u64 {
    let mut z = (state ^ word).wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
