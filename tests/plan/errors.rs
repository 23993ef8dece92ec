//! What is refused, and in which words: limits, scenes, rounds, and calls out of order.

use crate::device::{slab, small_limits};
use planner::{
    EagerReason, Kind, LaneId, LaneOutcome, Limits, Outcome, PageId, Request, RequestId, Round, Slab, State,
    Verdict, plan_round, scene, settle,
};

#[test]
fn limits_that_cannot_work_name_the_setting_and_the_number() {
    let said = |change: fn(&mut Limits), slabs: &[Slab]| {
        let mut limits = small_limits();
        change(&mut limits);
        State::new(limits, slabs).expect_err("these limits cannot work").to_string()
    };
    let seats = [slab(0, 1)];
    let zero = |name: &str| format!("`{name}` is 0; set it to at least 1");
    assert_eq!(said(|l| l.context = 0, &seats), zero("context"));
    assert_eq!(said(|l| l.piece_rows = 0, &seats), zero("piece_rows"));
    assert_eq!(said(|l| l.round_rows = 0, &seats), zero("round_rows"));
    assert_eq!(said(|l| l.decode_share = 0, &seats), zero("decode_share"));
    assert_eq!(said(|l| l.queue = 0, &seats), zero("queue"));
    assert_eq!(
        said(|l| l.piece_rows = 100, &seats),
        "`piece_rows` is 100; prompt pieces must be a multiple of 64"
    );
    assert_eq!(
        said(|l| l.round_rows = 65, &seats),
        "`round_rows` is 65; a captured round has at most 64 rows"
    );
    assert_eq!(said(|l| l.pages.clear(), &seats), "`pages` names 0 cache classes; there must be 1 to 256");
    assert_eq!(said(|l| l.pages[1] = 0, &seats), "`pages` of class 1 is 0; give its pool at least 1 page");
    let untouched: fn(&mut Limits) = |_| {};
    assert_eq!(said(untouched, &[]), "there are 0 slabs; give at least one, so that a lane has a slot");
    assert_eq!(said(untouched, &[slab(0, 1), slab(1, 0)]), "`slots` of slab 1 is 0; set it to at least 1");
    assert_eq!(
        said(untouched, &[slab(2, 4)]),
        "slab 0 is of class 2; `pages` names 2 classes, counted from 0"
    );
}

#[test]
fn growth_that_cannot_work_changes_nothing() {
    let mut state = State::new(small_limits(), &[slab(0, 1)]).unwrap();
    let before = state.to_string();
    assert!(state.grow(slab(2, 1)).is_err() && state.grow(slab(0, 0)).is_err());
    assert_eq!(state.to_string(), before);
}

#[test]
fn scene_errors_name_the_line_and_the_word() {
    let said = |text: &str| scene::run(text).expect_err("this scene cannot be played").to_string();
    assert_eq!(said("slab slots=1\n\ndance"), "scene line 3, `dance`: no such command");
    assert_eq!(said("slab slots=x"), "scene line 1, `slots=x`: not a number that fits here");
    assert_eq!(said("slab slots=70000"), "scene line 1, `slots=70000`: not a number that fits here");
    assert_eq!(said("slab seats=1"), "scene line 1, `seats=1`: a slab has no such property");
    assert_eq!(said("limits depth=1"), "scene line 1, `depth=1`: no such limit");
    assert_eq!(said("limits pages=4,,4"), "scene line 1, `pages=4,,4`: not a number that fits here");
    assert_eq!(
        said("limits ahead=3"),
        "scene line 1, `ahead=3`: 1 to 2 rounds may be booked and not settled"
    );
    assert_eq!(said("limits graphs=maybe"), "scene line 1, `graphs=maybe`: graphs are `on` or `off`");
    assert_eq!(
        said("limits piece=65"),
        "scene line 1, `limits`: `piece_rows` is 65; prompt pieces must be a multiple of 64"
    );
    assert_eq!(
        said("slab slots=1\nlimits"),
        "scene line 2, `limits`: it is the first command, if it is given"
    );
    assert_eq!(said("arrive A max=1"), "scene line 1, `A`: `prompt=` is missing");
    assert_eq!(said("arrive A prompt=1"), "scene line 1, `A`: `max=` is missing");
    assert_eq!(said("arrive prompt=1 max=1"), "scene line 1, `arrive`: name the request first");
    assert_eq!(
        said("arrive A prompt=1 max=1 video"),
        "scene line 1, `video`: a request has no such property"
    );
    assert_eq!(
        said("slab slots=1\narrive A prompt=1 max=1\narrive A prompt=1 max=1"),
        "scene line 3, `A`: a request has this name already"
    );
    assert_eq!(said("cancel"), "scene line 1, `cancel`: name a request");
    assert_eq!(said("cancel B"), "scene line 1, `B`: no request has this name");
    assert_eq!(said("run"), "scene line 1, `run`: say how many rounds, or `all`");
    assert_eq!(said("run two"), "scene line 1, `two`: not a number that fits here");
    assert_eq!(said("run 2 3"), "scene line 1, `3`: nothing should stand here");
    assert_eq!(
        said("slab slots=1\narrive A prompt=1 max=1\nstop A after"),
        "scene line 3, `after`: `after=` and a number should stand here"
    );
    assert_eq!(
        said("slab slots=1\narrive A prompt=1 max=1\nstop A"),
        "scene line 3, `stop`: `after=` and a number should stand here"
    );
    assert_eq!(
        said("# nothing\nrun 1"),
        "scene line 2, `run`: there are 0 slabs; give at least one, so that a lane has a slot"
    );
}

/// A decode round of two lanes in two slabs, both with a new page.
fn good_round() -> Round {
    let mut state = State::new(small_limits(), &[slab(0, 1), slab(0, 1)]).unwrap();
    for (id, prompt) in [(1, 63), (2, 64)] {
        assert!(state.arrive(Request::text(RequestId(id), prompt, 9)).is_empty());
    }
    loop {
        let round = plan_round(&state).unwrap();
        if round.lanes.len() == 2 && round.edits.len() == 2 {
            return round;
        }
        state.book(&round);
        let answer = LaneOutcome { accepted: [1].into_iter().collect(), ended: None };
        let outcome = Outcome { lanes: round.lanes.iter().map(|_| answer.clone()).collect() };
        assert!(!settle(&mut state, &round, &outcome).is_empty());
    }
}

#[test]
fn a_round_that_is_not_well_formed_is_told_apart() {
    let said = |change: fn(&mut Round)| {
        let mut round = good_round();
        assert_eq!(round.check(), Ok(()));
        change(&mut round);
        round.check().expect_err("this round is not well formed").to_string()
    };
    assert_eq!(said(|r| r.lanes.clear()), "the round has 0 lanes");
    assert_eq!(said(|r| r.lanes[1].after = r.lanes[1].before), "lane 2 has 0 rows");
    assert_eq!(said(|r| r.lanes.swap(0, 1)), "slot 0.0 comes after slot 1.0; slots must ascend");
    assert_eq!(
        said(|r| r.lanes[1].slot = r.lanes[0].slot),
        "slot 0.0 comes after slot 0.0; slots must ascend"
    );
    assert_eq!(said(|r| r.lanes[0].after += 64), "a decode round of 66 rows; it has at most 64");
    assert_eq!(
        said(|r| r.verdict = Verdict::Eager(EagerReason::PromptPass)),
        "a decode round admits a request or is named a prompt pass"
    );
    assert_eq!(
        said(|r| r.kind = Kind::Prompt { start: 64, last: true }),
        "a prompt round of 2 lanes; it has one lane and is eager as a prompt pass"
    );
    assert_eq!(
        said(|r| r.kind = Kind::Prompt { start: 64, last: false }),
        "a prompt piece of 2 rows starts at 64; it must start at its lane's position and lie on the grid of 64"
    );
    assert_eq!(said(|r| r.groups[0].rows = 2), "slab 0 has 1 rows and its group names 2");
    assert_eq!(said(|r| r.groups.truncate(1)), "slab 1 has 1 rows and its group names 0");
    assert_eq!(said(|r| r.edits[1].page = r.edits[0].page), "p2 of class 0 is taken twice or out of order");
    assert_eq!(said(|r| r.edits[0].index = 2), "slot 0.0 takes p2 as page 2, where its rows need none");
    assert_eq!(
        said(|r| {
            r.edits[1].slot.index = 1;
            r.edits[1].page = PageId(9);
        }),
        "slot 1.1 takes p9 as page 1, where its rows need none"
    );
}

#[test]
#[should_panic(expected = "rounds are settled once, in booking order")]
fn a_round_cannot_be_settled_before_an_older_one() {
    let mut state = State::new(small_limits(), &[slab(0, 1)]).unwrap();
    assert!(state.arrive(Request::text(RequestId(1), 5, 9)).is_empty());
    let first = plan_round(&state).unwrap();
    state.book(&first);
    let second = plan_round(&state).unwrap();
    state.book(&second);
    let _ = settle(&mut state, &second, &Outcome::default());
}

#[test]
#[should_panic(expected = "rounds are booked in the order of their numbers, each once")]
fn a_round_cannot_be_booked_twice() {
    let mut state = State::new(small_limits(), &[slab(0, 1)]).unwrap();
    assert!(state.arrive(Request::text(RequestId(1), 5, 9)).is_empty());
    let round = plan_round(&state).unwrap();
    state.book(&round);
    state.book(&round);
}

#[test]
#[should_panic(expected = "2 tokens for lane 1 of round 1: 1 to 1")]
fn an_answer_with_too_many_tokens_is_caught() {
    let mut state = State::new(small_limits(), &[slab(0, 1)]).unwrap();
    assert!(state.arrive(Request::text(RequestId(1), 5, 9)).is_empty());
    let round = plan_round(&state).unwrap();
    state.book(&round);
    let answer = LaneOutcome { accepted: [1, 2].into_iter().collect(), ended: None };
    let outcome = Outcome { lanes: [answer].into_iter().collect() };
    let _ = settle(&mut state, &round, &outcome);
}

#[test]
fn a_request_number_is_taken_until_its_request_is_over() {
    let mut state = State::new(small_limits(), &[slab(0, 1)]).unwrap();
    let request = Request::text(RequestId(7), 5, 9);
    assert!(state.arrive(request).is_empty());
    let refused = "  refused r7: another request is r7; wait for its end or take a new number\n";
    assert_eq!(state.arrive(request).to_string(), refused);
    let round = plan_round(&state).unwrap();
    state.book(&round);
    assert_eq!(state.arrive(request).to_string(), refused);
    assert_eq!(state.cancel(RequestId(7)).to_string(), "  finished r7: cancelled\n");
    assert!(state.arrive(request).is_empty());
    assert_eq!(round.lanes[0].lane, LaneId(1));
}
