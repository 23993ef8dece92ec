//! Lanes that join and leave all the time.

use std::collections::VecDeque;

use crossbeam_channel::{Receiver, unbounded};
use planner::{Kind, RequestId};
use runtime::engine::{Engine, Event, Reason, Turn};
use runtime::receipts::Random;
use runtime::request::Submission;

/// Settles `rounds` rounds of 1 to 16 lanes that stay for a few ids each, then lets them end; how many decode
/// rounds there were of each width.
pub fn churn(engine: &mut Engine, rounds: usize, vocab: u32) -> [usize; 17] {
    let (mut random, mut settled, mut id) = (Random::new(6), 0, 0);
    let mut widths = [0; 17];
    let mut inboxes: VecDeque<Receiver<Event>> = VecDeque::new();
    while settled < rounds || !engine.is_idle() {
        // The crowd swells to 16 lanes and thins out again, and lanes leave after a few ids all the time.
        let wave = (settled / 200) % 32;
        let crowd = 1 + wave.min(31 - wave);
        let state = engine.state();
        if settled < rounds && state.lanes().count() + state.waiting().len() < crowd {
            id += 1;
            let prompt = (0..1 + random.below(8)).map(|_| random.below(vocab)).collect();
            let mut submission = Submission::new(prompt);
            submission.max_tokens = Some(8 + random.below(40));
            submission.ignore_eos = true;
            let (sender, events) = unbounded();
            engine.submit(RequestId(id), submission, sender);
            inboxes.push_back(events);
            // Those of long ago have ended.
            if inboxes.len() > 200 {
                let events = inboxes.pop_front().expect("there are many");
                assert!(ended_well(&events), "a request ended otherwise, or not at all");
            }
        }
        if let Turn::Settled(round) = engine.turn().expect("runs") {
            settled += 1;
            if round.round.kind == Kind::Decode {
                widths[round.round.row_count() as usize] += 1;
            }
        }
    }
    assert!(inboxes.iter().all(ended_well), "every request ends with all its ids");
    widths
}

/// Whether a request got all its ids.
fn ended_well(events: &Receiver<Event>) -> bool {
    let length = |event| matches!(event, Event::Finished(finished) if finished.reason == Reason::Length);
    events.try_iter().last().is_some_and(length)
}
