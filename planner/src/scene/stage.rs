//! Where a scene is played: the planner, and a make-believe device that answers its rounds.

use crate::effect::{Effects, Ended, LaneOutcome, Outcome};
use crate::ids::RequestId;
use crate::limits::{LimitError, Limits, Slab};
use crate::plan::plan_round;
use crate::request::Request;
use crate::round::{Kind, Round};
use crate::settle::settle;
use crate::state::State;
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;

/// One thing that happens in a scene.
pub(super) enum Turn {
    Arrive(Request),
    Stop { request: RequestId, after: u32 },
    Fail { request: RequestId, after: u32 },
    Accept { request: RequestId, rows: u32 },
    Cancel(RequestId),
    Run(u32),
    Settle,
    Show,
}

pub(super) struct Stage {
    state: State,
    ahead: usize,
    booked: VecDeque<Round>,
    scripts: BTreeMap<RequestId, Script>,
    text: String,
}

/// What the device does with a request, and how many tokens it has made.
#[derive(Default)]
struct Script {
    stop: Option<u32>,
    fail: Option<u32>,
    accept: Option<u32>,
    made: u32,
}

impl Stage {
    pub(super) fn new(limits: Limits, slabs: &[Slab], ahead: usize) -> Result<Self, LimitError> {
        let state = State::new(limits, slabs)?;
        Ok(Self { state, ahead, booked: VecDeque::new(), scripts: BTreeMap::new(), text: String::new() })
    }

    /// Writes a command above what it does.
    pub(super) fn echo(&mut self, command: &str) {
        self.say(format_args!("> {command}\n"));
    }

    pub(super) fn grow(&mut self, slab: Slab) -> Result<(), LimitError> {
        self.state.grow(slab)
    }

    pub(super) fn play(&mut self, turn: Turn) {
        match turn {
            Turn::Arrive(request) => {
                self.scripts.insert(request.id, Script::default());
                let effects = self.state.arrive(request);
                if effects.is_empty() {
                    self.say(format_args!("  waits {}\n", request.id));
                }
                self.tell(effects);
            }
            Turn::Stop { request, after } => self.script(request).stop = Some(after),
            Turn::Fail { request, after } => self.script(request).fail = Some(after),
            Turn::Accept { request, rows } => self.script(request).accept = Some(rows),
            Turn::Cancel(request) => {
                let effects = self.state.cancel(request);
                self.tell(effects);
            }
            Turn::Run(rounds) => self.run(rounds),
            Turn::Settle => while self.settle_oldest() {},
            Turn::Show => self.text += &self.state.to_string(),
        }
    }

    pub(super) fn finish(mut self) -> String {
        self.text += &self.state.to_string();
        self.text
    }

    fn run(&mut self, rounds: u32) {
        let mut left = rounds;
        while left > 0 {
            let next = if self.booked.len() < self.ahead { plan_round(&self.state) } else { None };
            if let Some(round) = next {
                self.state.book(&round);
                self.say(format_args!("{round}"));
                self.booked.push_back(round);
                left -= 1;
            } else if !self.settle_oldest() {
                self.say(format_args!("nothing to run\n"));
                return;
            }
        }
        while self.booked.len() >= self.ahead {
            self.settle_oldest();
        }
    }

    /// Settles the oldest booked round; false if there is none.
    fn settle_oldest(&mut self) -> bool {
        let Some(round) = self.booked.pop_front() else { return false };
        let outcome = self.answer(&round);
        let effects = settle(&mut self.state, &round, &outcome);
        self.say(format_args!("settled {}\n", round.number));
        self.tell(effects);
        true
    }

    fn answer(&mut self, round: &Round) -> Outcome {
        let lanes = round.lanes.iter().map(|rows| {
            let Some(lane) = self.state.lane(rows.slot).filter(|_| round.samples()) else {
                return LaneOutcome::default();
            };
            let id = lane.request().id;
            let script = self.scripts.get_mut(&id).expect("every request has a script");
            script.answer(id, if round.kind == Kind::Decode { rows.rows() } else { 1 })
        });
        Outcome { lanes: lanes.collect() }
    }

    fn script(&mut self, request: RequestId) -> &mut Script {
        self.scripts.entry(request).or_default()
    }

    fn tell(&mut self, effects: Effects) {
        self.say(format_args!("{effects}"));
    }

    fn say(&mut self, words: std::fmt::Arguments<'_>) {
        self.text.write_fmt(words).expect("a string takes any text");
    }
}

impl Script {
    fn answer(&mut self, request: RequestId, rows: u32) -> LaneOutcome {
        let mut answer = LaneOutcome::default();
        for _ in 0..rows.min(self.accept.unwrap_or(rows).max(1)) {
            if self.fail == Some(self.made) {
                answer.ended = Some(Ended::Failed);
                break;
            }
            self.made += 1;
            answer.accepted.push(request.0 as u32 * 1000 + self.made);
            if self.stop == Some(self.made) {
                answer.ended = Some(Ended::Stop);
                break;
            }
        }
        answer
    }
}
