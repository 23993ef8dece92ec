//! Pictures and clips through the engine: the recorded continuations, pieces of any size, neighbours, features that are
//! kept, and requests that do not fit.

use std::sync::Arc;

use crossbeam_channel::{Receiver, unbounded};
use graph::Arena;
use kernels::numerics::ElementType;
use planner::{ClassId, EagerReason, Kind, RequestId, Verdict};
use runtime::engine::{Class, Engine, EngineOptions, Event, Finished, PictureFault, Turn, Vision, open};
use runtime::receipts::{Life, Planned, Schedule, Trail, play};
use runtime::request::{Media, Submission};
use runtime::sampling::SamplingOptions;
use tests::fixture::repository;
use tests::oracle::Case;
use tests::tower::{Item, media, picture, prompts};
use vision::Span;

use crate::{small, tight};

/// The id of the small model that stands for a row of a picture.
const IMAGE: u32 = 1012;
/// The same of a clip.
const VIDEO: u32 = 1013;
/// Margins below which another order of summation may pick another id, as in the golden tests.
const MARGINS: [(&str, f64); 3] =
    [("greedy.logit_margin", 2e-3), ("greedy.router_margin", 2e-4), ("greedy.qsa_margin", 2e-4)];

/// One lane with room for everything, one piece for every prompt.
fn whole() -> EngineOptions {
    EngineOptions {
        classes: vec![Class { context: 512, lanes: 1, pages: 8 }],
        piece_rows: 512,
        vision: Vision::Patches(256),
        ..tight()
    }
}

/// Lanes for all.
fn crowd() -> EngineOptions {
    EngineOptions { classes: vec![Class { context: 512, lanes: 6, pages: 40 }], piece_rows: 64, ..whole() }
}

fn planned(prompt: Vec<u32>, media: Vec<Media>, max_tokens: u32) -> Planned {
    let (sampling, class) = (SamplingOptions::default(), ClassId(0));
    Planned { arrive: 0, prompt, max_tokens, sampling, cancel: None, class, media }
}

/// A case behind `before` ids of text and before `after` more.
fn among(case: &Case, before: usize, after: usize) -> Planned {
    let text = |count: usize, from: u32| (0..count as u32).map(move |at| (at * 37 + from) % 1000);
    let prompt = text(before, 11).chain(case.input_ids()).chain(text(after, 500)).collect();
    let mut media = media(case);
    media.iter_mut().flat_map(|media| &mut media.spans).for_each(|span| span.first += before);
    planned(prompt, media, 8)
}

fn case(name: &str) -> Case {
    prompts().into_iter().find(|case| case.id().ends_with(name)).expect("a case")
}

fn text(length: u32, seed: u32) -> Planned {
    planned((0..length).map(|at| (at * 53 + seed * 97) % 1000).collect(), Vec::new(), 8)
}

fn run(engine: &mut Engine, requests: Vec<Planned>) -> Trail {
    play(engine, &Schedule { requests }).unwrap_or_else(|error| panic!("{error}"))
}

/// The life of a request alone.
fn alone(engine: &mut Engine, request: &Planned) -> Life {
    let request = Planned { arrive: 0, ..request.clone() };
    run(engine, vec![request]).lives.pop().expect("one")
}

fn submission(planned: &Planned) -> Submission {
    let Planned { prompt, max_tokens, media, .. } = planned.clone();
    Submission { max_tokens: Some(max_tokens), media, ignore_eos: true, ..Submission::new(prompt) }
}

fn submit(engine: &mut Engine, id: u64, submission: Submission) -> Receiver<Event> {
    let (sender, events) = unbounded();
    engine.submit(RequestId(id), submission, sender);
    events
}

fn drain(engine: &mut Engine) {
    while !engine.is_idle() {
        engine.turn().unwrap_or_else(|error| panic!("{error}"));
    }
}

fn end(events: &Receiver<Event>) -> Event {
    events.try_iter().last().expect("it was told something")
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

/// What a prompt leaves, and its reply: pieces differ, so only the end of the prompt is compared, and all behind it.
fn behind_the_prompt(life: &Life, prompt: usize) -> Life {
    let mut life = life.clone();
    life.traces.retain(|trace| trace.length as usize >= prompt);
    life
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

/// While a picture is encoded, text decodes between its steps; the steps between two rounds are few.
#[test]
fn others_decode_while_a_picture_is_encoded() {
    let mut engine = small(crowd());
    let large = tiles(16, 16, 1);
    let talk = submit(&mut engine, 1, submission(&Planned { max_tokens: 60, ..text(20, 1) }));
    while talk.is_empty() {
        engine.turn().expect("runs");
    }
    let shown = submit(&mut engine, 2, submission(&large));
    let mut decoded = 0;
    loop {
        let turn = engine.turn().expect("runs");
        if engine.stats().encoding == 0 {
            break;
        }
        if let Turn::Settled(settled) = turn {
            assert_eq!((settled.round.kind, settled.round.verdict), (Kind::Decode, Verdict::Graph));
            decoded += 1;
        }
    }
    // Two blocks of 256 patches: six steps, each as large as a piece.
    assert!(decoded >= 6, "{decoded} rounds");
    drain(&mut engine);
    assert!(matches!((end(&talk), end(&shown)), (Event::Finished(_), Event::Finished(_))));
}

/// A picture of made pixels in a prompt of its own.
fn tiles(height: u32, width: u32, seed: u32) -> Planned {
    let patch = 3 * 2 * 16 * 16;
    let bytes =
        (0..height * width * patch).map(|at| (at.wrapping_mul(2654435761 + seed) >> 24) as u8).collect();
    let span = Span { medium: 0, row: 0, first: 3, height: height / 2, width: width / 2 };
    let prompt = [5, 6, 1009].into_iter().chain((0..span.rows()).map(|_| IMAGE)).chain([1010, 7]).collect();
    let media = vec![picture(Item { bytes, grid: [1, height, width] }, vec![span])];
    planned(prompt, media, 4)
}

#[test]
fn a_picture_that_comes_again_is_not_encoded_again() {
    let mut engine = small(whole());
    let request = among(&case("image_two"), 0, 0);
    let first = alone(&mut engine, &request);
    let counts = engine.stats().pictures;
    assert_eq!((counts.hits, counts.misses, counts.entries), (0, 2, 2));
    assert!(alone(&mut engine, &request) == first);
    let counts = engine.stats().pictures;
    assert_eq!((counts.hits, counts.misses, counts.evictions), (2, 2, 0));
    // Twice in one prompt is once, too.
    let mut twice = tiles(4, 4, 9);
    let span = Span { medium: 1, first: 20, ..twice.media[0].spans[0] };
    twice.prompt.extend((twice.prompt.len()..20).map(|_| 8));
    twice.prompt.extend((0..span.rows()).map(|_| IMAGE));
    twice.media.push(Media { spans: vec![span], ..twice.media[0].clone() });
    assert_eq!(alone(&mut engine, &twice).end, "length");
    let counts = engine.stats().pictures;
    assert_eq!((counts.hits, counts.misses), (3, 3));
}

/// Features that nobody needs make room, the oldest first; a request that needs more than there is is refused.
#[test]
fn features_are_kept_within_their_budget() {
    let row = 64 * 2;
    // Two pictures of 16 rows.
    let options = EngineOptions { feature_bytes: Some(32 * row), ..crowd() };
    let mut engine = small(options);
    let [a, b, c] = [1, 2, 3].map(|seed| tiles(8, 8, seed));
    let expected = [&a, &b, &c].map(|request| alone(&mut small(crowd()), request));
    for (request, expected) in [&a, &b, &a, &c].into_iter().zip([0, 1, 0, 2].map(|at: usize| &expected[at])) {
        assert!(alone(&mut engine, request) == *expected);
    }
    let counts = engine.stats().pictures;
    assert_eq!((counts.hits, counts.misses, counts.evictions, counts.bytes), (1, 3, 1, 32 * row));
    // `b` was asked for longest ago.
    assert!(alone(&mut engine, &a) == expected[0]);
    assert_eq!(engine.stats().pictures.hits, 2);
    // All at once: those that do not fit beside what is needed wait for it.
    let trail = run(&mut engine, vec![b.clone(), c.clone(), a.clone(), b.clone()]);
    for (life, at) in trail.lives.iter().zip([1usize, 2, 0, 1]) {
        assert!(*life == expected[at], "{}", life.end);
    }
    let refused = alone(&mut engine, &tiles(12, 12, 4));
    let says = [(36 * row).to_string(), (32 * row).to_string()];
    assert!(says.iter().all(|number| refused.end.contains(number)), "{}", refused.end);
}

/// Takes all memory of an engine's device.
fn hog(engine: &Engine) -> Arena {
    let device = &engine.runner().device;
    device.arena("what others have", device.free_bytes()).expect("it is free")
}

/// A device without memory for features fails the request that needs them, and nobody else.
#[test]
fn memory_that_is_not_there_ends_one_request() {
    let mut engine = small(EngineOptions { host_memory: 256 << 20, ..crowd() });
    let expected = alone(&mut engine, &tiles(4, 4, 1));
    let taken = hog(&engine);
    let talk = submit(&mut engine, 1, submission(&text(20, 1)));
    let shown = submit(&mut engine, 2, submission(&tiles(16, 16, 2)));
    let kept = submit(&mut engine, 3, submission(&tiles(4, 4, 1)));
    drain(&mut engine);
    assert!(matches!(end(&talk), Event::Finished(_)));
    assert!(matches!(end(&shown), Event::Failed(why) if why.contains("picture features")));
    // What was kept made room in vain, but enough for itself.
    assert!(matches!(end(&kept), Event::Finished(_)));
    assert_eq!((engine.stats().pictures.evictions, engine.stats().pictures.entries), (1, 1));
    drop(taken);
    assert!(alone(&mut engine, &tiles(4, 4, 1)) == expected);
}

#[test]
fn a_request_is_called_off_while_its_picture_is_encoded() {
    let mut engine = small(whole());
    let expected = alone(&mut small(whole()), &tiles(8, 8, 2));
    let [first, second] = [1, 2].map(|seed| tiles(16, 16, seed));
    for steps in 0..7 {
        let [a, b] =
            [(1, &first), (2, &second)].map(|(id, request)| submit(&mut engine, id, submission(request)));
        for _ in 0..steps {
            engine.turn().expect("runs");
        }
        assert_eq!(engine.stats().encoding, 2);
        // Both the one that is encoded and the one that waits for that.
        engine.cancel(RequestId(1));
        engine.cancel(RequestId(2));
        for events in [a, b] {
            let cancelled = runtime::engine::Reason::Cancelled;
            assert!(matches!(end(&events), Event::Finished(Finished { reason, .. }) if reason == cancelled));
        }
        assert!(engine.is_idle());
        assert!(alone(&mut engine, &tiles(8, 8, 2)) == expected, "after {steps} steps");
    }
    let stats = engine.stats();
    assert_eq!((stats.lanes, stats.waiting, stats.pages_free), (0, 0, stats.pages_total));
}

#[test]
fn what_does_not_fit_is_refused_with_the_number_that_decided() {
    let mut engine = small(EngineOptions { queue: 2, ..whole() });
    let good = tiles(4, 4, 1);
    let mut refuse = |change: &dyn Fn(&mut Submission), words: &[&str]| {
        let mut submission = submission(&good);
        change(&mut submission);
        let events = submit(&mut engine, 1, submission);
        let Event::Refused(why) = end(&events) else { panic!("not refused, where {words:?} were due") };
        assert!(words.iter().all(|word| why.contains(word)), "{words:?}: {why}");
    };
    refuse(&|s| s.media.clear(), &["id 1012", "position 3"]);
    refuse(&|s| s.prompt.push(VIDEO), &["id 1013", "position 9"]);
    refuse(&|s| s.prompt.push(IMAGE), &["id 1012", "position 9"]);
    refuse(&|s| s.prompt.truncate(6), &["picture 0", "6 ids"]);
    refuse(&|s| s.prompt[4] = 7, &["picture 0", "id 7", "position 4"]);
    refuse(&|s| s.prompt[4] = VIDEO, &["picture 0", "id 1013"]);
    refuse(&|s| s.media[0].spans[0].first = usize::MAX, &["picture 0", "9 ids"]);
    refuse(&|s| s.media[0].spans[0].row = 1, &["picture 0", "span 0"]);
    refuse(&|s| s.media[0].spans[0].height = 1, &["picture 0", "span 0"]);
    refuse(&|s| s.media[0].spans.clear(), &["picture 0", "0 spans"]);
    refuse(&|s| s.media.push(s.media[0].clone()), &["picture 1"]);
    let grid = |s: &mut Submission, height, width, bytes: usize| {
        let grid = vision::Grid { pairs: 1, height, width };
        s.media[0].patches = Arc::new(vision::Patches { grid, bytes: vec![0; bytes] });
    };
    refuse(&|s| grid(s, 4, 4, 5), &["picture 0", "5 bytes", "24576"]);
    refuse(&|s| grid(s, 3, 4, 12 * 1536), &["picture 0", "3 x 4"]);
    refuse(&|s| grid(s, 0, 4, 0), &["picture 0", "0 x 4"]);
    refuse(&|s| grid(s, 32, 32, 0), &["picture 0", "1024 patches", "256"]);
    refuse(&|s| grid(s, u32::MAX, u32::MAX, 0), &["picture 0"]);
    // A request that could never run is refused before anything is encoded, and so is one too many.
    refuse(&|s| s.max_tokens = Some(600), &["512"]);
    let fate: Vec<_> =
        (1..5).map(|id| submit(&mut engine, id, submission(&tiles(16, 16, id as u32)))).collect();
    assert!(matches!(end(&fate[3]), Event::Full { waiting: 2 }));
    drain(&mut engine);
    assert!(fate[..2].iter().all(|events| matches!(end(events), Event::Finished(_))));
}

/// An engine that takes no pictures says so, and one whose folder does not say how they are prepared says why.
#[test]
fn who_does_not_see_says_so() {
    let mut blind = small(EngineOptions { vision: Vision::Off, ..whole() });
    for (request, words) in [(tiles(4, 4, 1), "takes none"), (text(5, 1), "")] {
        let request = Submission { media: request.media.clone(), ..submission(&request) };
        let events = submit(&mut blind, 1, request);
        drain(&mut blind);
        match end(&events) {
            Event::Refused(why) => assert!(!words.is_empty() && why.contains(words), "{why}"),
            other => assert!(matches!(other, Event::Finished(_)) && words.is_empty(), "{other:?}"),
        }
    }
    let from = repository("tests/oracle/checkpoints/base_bf16");
    let folder = tempfile::tempdir().expect("a folder");
    for file in std::fs::read_dir(&from).expect("a folder").map(|file| file.expect("a file").path()) {
        let name = file.file_name().expect("a name");
        if name != "video_preprocessor_config.json" {
            std::fs::copy(&file, folder.path().join(name)).expect("copied");
        }
    }
    let mut told = Vec::new();
    let mut tell = |progress: runtime::open::Progress| told.push(progress.to_string());
    let auto = EngineOptions { vision: Vision::Auto, ..whole() };
    let opened = open(folder.path(), &auto, &mut tell).unwrap_or_else(|error| panic!("{error}"));
    assert!(opened.sight.is_none());
    assert!(told.iter().any(|line| line.contains("video_preprocessor_config.json is missing")), "{told:?}");
    let error = open(folder.path(), &whole(), &mut |_| {}).err().expect("it was asked for").to_string();
    assert!(error.contains("video_preprocessor_config.json") && error.contains("--vision"), "{error}");
    let clip = folder.path().join("video_preprocessor_config.json");
    for (says, words) in
        [("{\"patch_size\": 14}", "patch_size is 14"), ("{\"fps\":1,\"fps\":2}", "fps"), ("[]", "object")]
    {
        std::fs::write(&clip, says).expect("written");
        let error = open(folder.path(), &auto, &mut |_| {}).err().expect("refused").to_string();
        assert!(error.contains(words) && error.contains("video_preprocessor"), "{error}");
    }
    let sight = open(&from, &whole(), &mut |_| {}).expect("opens").sight.expect("it sees");
    assert_eq!((sight.most_patches, sight.ids.image, sight.ids.video), (256, IMAGE, VIDEO));
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
