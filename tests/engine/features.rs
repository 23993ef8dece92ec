//! Between a request and its features: encoding between rounds, what is kept, memory that lacks, requests that are called off
//! or do not fit.

use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::Receiver;
use planner::{Kind, RequestId, Verdict};
use runtime::engine::{Class, EngineOptions, Event, Finished, Turn, Vision, open};
use runtime::receipts::Planned;
use runtime::request::{Media, Submission};
use tests::fixture::repository;
use tests::luck::all_memory;
use tests::sight::{IMAGE, alone, among, case, run, text, tiles};
use vision::Span;

use crate::pictures::{crowd, drain, submission, submit, whole};
use crate::small;

/// The id of the small model that stands for a row of a clip.
const VIDEO: u32 = 1013;

fn end(events: &Receiver<Event>) -> Event {
    events.try_iter().last().expect("it was told something")
}

/// While a picture is encoded, text decodes between its steps, of which no two fit between two rounds: they are as large
/// as a piece, or almost.
#[test]
fn others_decode_while_a_picture_is_encoded() {
    for height in [16, 14] {
        let mut engine = small(crowd());
        let large = tiles(height, 16, 1);
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
        // Four pieces of 64 patches, and two blocks: 24 steps, the last of which ends it.
        assert!(decoded >= 23, "{decoded} rounds beside {height} lines");
        drain(&mut engine);
        assert!(matches!((end(&talk), end(&shown)), (Event::Finished(_), Event::Finished(_))));
    }
}

/// Where nothing else runs, an encoding is not queued ahead of whoever comes next: text waits for a step, not for all.
#[test]
fn text_that_comes_during_an_encoding_waits_for_a_step() {
    let classes = vec![Class { context: 1100, lanes: 2, pages: 40 }];
    let mut engine = small(EngineOptions { classes, vision: Vision::Patches(4096), ..crowd() });
    let shown = submit(&mut engine, 1, submission(&tiles(64, 64, 1)));
    let begun = Instant::now();
    // Of 384 steps.
    for _ in 0..200 {
        engine.turn().expect("runs");
    }
    let encoded = begun.elapsed();
    let asked = Instant::now();
    let talk = submit(&mut engine, 2, submission(&text(5, 1)));
    while talk.is_empty() {
        engine.turn().expect("runs");
    }
    assert_eq!(engine.stats().encoding, 1, "it is still being encoded");
    assert!(4 * asked.elapsed() < encoded, "{:?} behind {encoded:?} of an encoding", asked.elapsed());
    drain(&mut engine);
    assert!(matches!((end(&talk), end(&shown)), (Event::Finished(_), Event::Finished(_))));
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

/// A device without memory for features fails the request that needs them, and nobody else.
#[test]
fn memory_that_is_not_there_ends_one_request() {
    let mut engine = small(EngineOptions { host_memory: 256 << 20, ..crowd() });
    let expected = alone(&mut engine, &tiles(4, 4, 1));
    let taken = all_memory(&engine.runner().device);
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
    for steps in [0, 1, 2, 5, 11, 23] {
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
    refuse(&|s| s.max_tokens = Some(600), &["512"]);
    let fate: Vec<_> =
        (1..5).map(|id| submit(&mut engine, id, submission(&tiles(16, 16, id as u32)))).collect();
    assert!(matches!(end(&fate[3]), Event::Full { waiting: 2 }));
    drain(&mut engine);
    assert!(fate[..2].iter().all(|events| matches!(end(events), Event::Finished(_))));
}

/// A request that could never run is refused before anything is encoded.
#[test]
fn nothing_is_encoded_for_what_cannot_run() {
    let classes = vec![Class { context: 512, lanes: 1, pages: 1 }];
    let mut engine = small(EngineOptions { classes, ..whole() });
    let request = Submission { max_tokens: Some(100), ..submission(&tiles(4, 4, 1)) };
    let events = submit(&mut engine, 1, request);
    assert!(engine.is_idle() && engine.stats().pictures.misses == 0);
    let end = end(&events);
    assert!(matches!(&end, Event::Refused(why) if why.contains("needs 2 pages")), "{end:?}");
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
