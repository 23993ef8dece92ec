//! Planning, booking and staging a decode round: all that the host does before its launches. The model does
//! not run; outcomes are made up.
//!
//! `warm` repeats the work at once. `cold` reads 4 MiB of other memory before each round, more than the caches
//! of a core hold, as the kernels of a round in between would.

use std::collections::VecDeque;
use std::hint::black_box;
use std::time::Duration;

use benches::{Crowd, Figure, Meter, Unit, options, prompt, small, spent_on};
use kernels::table::Outcome;
use planner::{Kind, Round};
use runtime::engine::Ran;

const CONTEXT: u32 = 4096;

/// An engine whose rounds are staged and settled, and never run.
struct Desk {
    crowd: Crowd,
    lanes: usize,
    /// Staged and not settled: one, while the next is staged.
    flying: VecDeque<Round>,
    other: Vec<u64>,
}

impl Desk {
    fn new(lanes: u16) -> Desk {
        let crowd = Crowd::open(&small(), &options(lanes, CONTEXT));
        Desk { crowd, lanes: lanes.into(), flying: VecDeque::new(), other: vec![1; (4 << 20) / 8] }
    }

    /// Stages `rounds` decode rounds of all lanes; the time that it takes.
    fn rounds(&mut self, rounds: u64, cold: bool) -> Duration {
        let (mut left, mut took) = (rounds, Duration::ZERO);
        while left > 0 {
            while self.crowd.engine.state().lanes().count() + self.crowd.engine.state().waiting().len()
                < self.lanes
            {
                self.crowd.submit(prompt(0, 700), CONTEXT - 700);
            }
            if cold {
                black_box(self.other.iter().sum::<u64>());
            }
            let (time, round) = spent_on(|| self.crowd.engine.stage_next());
            // The copy runs; of the round there is nothing to run.
            self.crowd.engine.runner().stream.synchronize().expect("the copy runs");
            let Some(round) = round.expect("staged") else {
                // What is in flight ends every lane.
                self.settle();
                continue;
            };
            if round.kind == Kind::Decode && round.lanes.len() == self.lanes {
                (left, took) = (left - 1, took + time);
            }
            self.flying.push_back(round);
            if self.flying.len() == 2 {
                self.settle();
            }
        }
        took
    }

    fn settle(&mut self) {
        let round = self.flying.pop_front().expect("a round was staged");
        let outcome = Outcome { id: 7, ..Default::default() };
        let outcomes = if round.samples() { vec![outcome; round.lanes.len()] } else { Vec::new() };
        self.crowd.engine.settle(&round, Ran::Replayed, &outcomes).expect("settled");
        self.crowd.listen();
    }
}

fn main() {
    let mut meter = Meter::new("plan");
    for (lanes, need) in [(1, Some(25.0)), (4, None), (16, Some(60.0)), (64, None)] {
        let mut desk = Desk::new(lanes);
        for (state, cold) in [("warm", false), ("cold", true)] {
            let figure =
                Figure::new(format!("plan + book + stage {lanes} lanes {state}"), Unit::Microseconds);
            let figure = Figure { need, ..figure }.seconds(if cold { 0.1 } else { 1.0 });
            meter.measure(&figure, |rounds| desk.rounds(rounds, cold));
        }
        // What was staged last is what was planned last.
        desk.rounds(1, false);
        let staged = desk.flying.back().expect("one is in flight");
        assert_eq!((staged.lanes.len(), staged.row_count()), (lanes.into(), lanes.into()));
        assert_eq!(staged.groups.len(), usize::from(lanes).div_ceil(16));
    }
}
