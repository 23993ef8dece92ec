//! Pictures and clips through the engine: the recorded continuations, pieces of any size, neighbours, planted faults.

use crossbeam_channel::{Receiver, unbounded};
use kernels::numerics::ElementType;
use planner::{EagerReason, Kind, RequestId, Verdict};
use runtime::engine::{Class, Engine, EngineOptions, Event, PictureFault, Turn, Vision};
use runtime::receipts::{Life, Planned};
use runtime::request::Submission;
use tests::sight::{alone, among, behind_the_prompt, case, planned, run, text};
use tests::tower::{media, prompts};
use vision::Span;

use crate::{small, tight};

/// Margins below which another order of summation may pick another id, as in the golden tests.
const MARGINS: [(&str, f64); 3] =
    [("greedy.logit_margin", 2e-3), ("greedy.router_margin", 2e-4), ("greedy.qsa_margin", 2e-4)];

/// One lane with room for everything, one piece for every prompt.
pub(crate) fn whole() -> EngineOptions {
    EngineOptions {
        classes: vec![Class { context: 512, lanes: 1, pages: 8 }],
        piece_rows: 512,
        vision: Vision::Patches(256),
        ..tight()
    }
}

/// Lanes for all.
pub(crate) fn crowd() -> EngineOptions {
    EngineOptions { classes: vec![Class { context: 512, lanes: 6, pages: 40 }], piece_rows: 64, ..whole() }
}

pub(crate) fn submission(planned: &Planned) -> Submission {
    let Planned { prompt, max_tokens, media, .. } = planned.clone();
    Submission { max_tokens: Some(max_tokens), media, ignore_eos: true, ..Submission::new(prompt) }
}

pub(crate) fn submit(engine: &mut Engine, id: u64, submission: Submission) -> Receiver<Event> {
    let (sender, events) = unbounded();
    engine.submit(RequestId(id), submission, sender);
    events
}

pub(crate) fn drain(engine: &mut Engine) {
    while !engine.is_idle() {
        engine.turn().unwrap_or_else(|error| panic!("{error}"));
    }
}

/// Ids that stand clear of ties are those recorded, whatever the pieces.
#[test]
fn prompts_continue_as_recorded() {
    for piece_rows in [64, 512] {
        // Also ids past those that stand for text were recorded.
        let options = EngineOptions { element: ElementType::F32, text: false, piece_rows, ..whole() };
        let mut engine = small(options);
        for case in prompts() {
            let expected = case.indices("greedy.tokens");
            let count = expected.len() as u32;
            let request = Submission {
                max_tokens: Some(count),
                ..submission(&planned(case.input_ids(), media(&case), count))
            };
            let events = submit(&mut engine, 1, request);
            drain(&mut engine);
            let ids: Vec<i64> = events
                .try_iter()
                .filter_map(|event| match event {
                    Event::Token(token) => Some(token.id.into()),
                    Event::Finished(_) => None,
                    other => panic!("{}: {other:?}", case.id()),
                })
                .collect();
            let clear =
                |step: &usize| MARGINS.iter().all(|(name, least)| case.tensor(name).values[*step] >= *least);
            let steps = (0..expected.len()).take_while(clear).count();
            assert!(steps > 8, "{}: only {steps} steps stand clear of ties", case.id());
            assert_eq!(ids[..steps], expected[..steps], "{} in pieces of {piece_rows}", case.id());
        }
    }
}

#[test]
fn pieces_of_any_size_leave_the_same_bytes() {
    let mut engines: Vec<Engine> =
        [64, 128, 256, 512].map(|piece_rows| small(EngineOptions { piece_rows, ..whole() })).into();
    for case in prompts() {
        let request = among(&case, 100, 150);
        let lives = engines.iter_mut().map(|engine| {
            let life = alone(engine, &request);
            assert_eq!((life.ids.len(), &*life.end), (8, "length"), "{}", case.id());
            behind_the_prompt(&life, request.prompt.len())
        });
        let lives: Vec<Life> = lives.collect();
        assert!(lives.iter().all(|life| *life == lives[0]), "{}", case.id());
    }
}

/// A picture, two of different size, and a clip at every offset around the edge of a piece.
#[test]
fn pictures_stand_anywhere_around_the_edge_of_a_piece() {
    let (mut pieces, mut one) = (small(EngineOptions { piece_rows: 64, ..whole() }), small(whole()));
    for name in ["image_wide", "image_two", "video_one"] {
        let case = case(name);
        let spans: Vec<Span> = media(&case).into_iter().flat_map(|media| media.spans).collect();
        let (first, last) = (spans[0].first, spans.last().expect("one"));
        let end = last.first + last.rows();
        for before in
            (63usize.saturating_sub(end)..=65 - first).step_by(if name == "image_wide" { 1 } else { 3 })
        {
            let request = Planned { max_tokens: 3, ..among(&case, before, 5) };
            let [a, b] = [&mut pieces, &mut one]
                .map(|engine| behind_the_prompt(&alone(engine, &request), request.prompt.len()));
            assert!(a == b, "{name} behind {before} ids");
        }
    }
}

#[test]
fn pictures_together_are_pictures_alone() {
    let (mut many, mut single) = (small(crowd()), small(whole()));
    let mut requests: Vec<Planned> = prompts().iter().map(|case| among(case, 30, 20)).collect();
    requests.truncate(4);
    requests.insert(2, text(90, 1));
    requests.push(text(5, 2));
    for (at, request) in requests.iter_mut().enumerate() {
        request.arrive = at as u32 / 2;
    }
    let trail = run(&mut many, requests.clone());
    assert!(trail.rounds.eager["image-bearing"] > 0 && trail.rounds.replayed > 0, "{}", trail.rounds);
    let single_pieces = &mut small(EngineOptions { piece_rows: 64, ..whole() });
    for (request, life) in requests.iter().zip(&trail.lives) {
        assert!(*life == alone(single_pieces, request), "a prompt of {}", request.prompt.len());
        let whole = behind_the_prompt(&alone(&mut single, request), request.prompt.len());
        assert!(behind_the_prompt(life, request.prompt.len()) == whole);
    }
}

/// Nothing of a picture stays in a lane.
#[test]
fn text_behind_a_picture_on_its_lane_is_text_on_a_fresh_one() {
    let (mut used, mut fresh) = (small(whole()), small(whole()));
    let expected = alone(&mut fresh, &text(70, 3));
    for case in prompts() {
        alone(&mut used, &among(&case, 10, 10));
        assert!(alone(&mut used, &text(70, 3)) == expected, "behind {}", case.id());
    }
    assert!(
        alone(&mut used, &among(&case("image_two"), 0, 0))
            == alone(&mut fresh, &among(&case("image_two"), 0, 0))
    );
}

/// Beside a picture's lane, text lanes replay the same graphs with the same bytes.
#[test]
fn text_beside_a_picture_stays_in_graphs() {
    let (mut with, mut without) = (small(crowd()), small(crowd()));
    let requests =
        vec![text(20, 1), text(70, 2), Planned { max_tokens: 30, ..among(&case("image_two"), 0, 0) }];
    let expected = run(&mut without, requests[..2].to_vec());
    let trail = run(&mut with, requests);
    assert!(trail.lives[..2] == expected.lives[..], "{}", trail.difference(&expected));
    let eager: Vec<&str> = trail.rounds.eager.keys().copied().collect();
    assert_eq!(eager, ["image-bearing", "prompt pass"], "{}", trail.rounds);
    assert!(trail.rounds.replayed >= expected.rounds.replayed, "{}", trail.rounds);
}

/// Each fault changes what the tests above compare.
#[test]
fn planted_faults_show() {
    let case = case("image_wide");
    let request = among(&case, 60, 10);
    let expected = alone(&mut small(whole()), &request);
    for fault in [PictureFault::NoOffset, PictureFault::TextAxes, PictureFault::ShiftedRows] {
        let faulty = alone(&mut small(EngineOptions { picture_fault: Some(fault), ..whole() }), &request);
        let logits = |life: &Life| life.traces.iter().map(|trace| trace.logits).collect::<Vec<_>>();
        assert_ne!(logits(&faulty), logits(&expected), "{fault:?}");
        let reply = |life: &Life| behind_the_prompt(life, request.prompt.len()).traces[0].clone();
        assert_eq!(
            reply(&faulty).logits == reply(&expected).logits,
            fault == PictureFault::NoOffset,
            "{fault:?}"
        );
    }
}

/// Rounds of pictures are eager for that reason alone, and text lanes are in none of them.
#[test]
fn rounds_of_pictures_hold_no_text() {
    let mut engine = small(crowd());
    let requests =
        [among(&case("image_one"), 0, 0), text(9, 1), among(&case("video_one"), 0, 0), text(80, 2)];
    let _events: Vec<_> =
        (1..).zip(&requests).map(|(id, request)| submit(&mut engine, id, submission(request))).collect();
    let mut seen = [0, 0];
    while !engine.is_idle() {
        let Turn::Settled(settled) = engine.turn().expect("runs") else { continue };
        if settled.round.kind == Kind::Decode {
            let pictures = settled.traces.iter().filter(|trace| trace.request.0 % 2 == 1).count();
            let eager = settled.round.verdict == Verdict::Eager(EagerReason::ImageBearing);
            assert_eq!(pictures, if eager { settled.round.lanes.len() } else { 0 }, "{}", settled.round);
            seen[usize::from(eager)] += 1;
        }
    }
    assert!(seen[0] > 5 && seen[1] > 5, "{seen:?}");
}
