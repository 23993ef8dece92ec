//! Requests with pictures and clips, played on engines, and what must hold of them on either device.

use planner::ClassId;
use runtime::engine::{Class, Engine, EngineOptions, Place, Vision, open};
use runtime::receipts::{Life, Planned, Schedule, Trail, play};
use runtime::request::Media;
use runtime::sampling::SamplingOptions;
use vision::Span;

use crate::fixture::repository;
use crate::oracle::Case;
use crate::tower::{Item, media, picture, prompts};

/// The id of the small model that stands for a row of a picture.
pub const IMAGE: u32 = 1012;

/// A greedy request.
pub fn planned(prompt: Vec<u32>, media: Vec<Media>, max_tokens: u32) -> Planned {
    let (sampling, class) = (SamplingOptions::default(), ClassId(0));
    Planned { arrive: 0, prompt, max_tokens, sampling, cancel: None, class, media }
}

/// A case behind `before` ids of text and before `after` more.
pub fn among(case: &Case, before: usize, after: usize) -> Planned {
    let text = |count: usize, from: u32| (0..count as u32).map(move |at| (at * 37 + from) % 1000);
    let prompt = text(before, 11).chain(case.input_ids()).chain(text(after, 500)).collect();
    let mut media = media(case);
    media.iter_mut().flat_map(|media| &mut media.spans).for_each(|span| span.first += before);
    planned(prompt, media, 8)
}

/// A recorded case by the end of its name.
pub fn case(name: &str) -> Case {
    prompts().into_iter().find(|case| case.id().ends_with(name)).expect("a case")
}

/// A request without pictures.
pub fn text(length: u32, seed: u32) -> Planned {
    planned((0..length).map(|at| (at * 53 + seed * 97) % 1000).collect(), Vec::new(), 8)
}

/// Plays requests.
pub fn run(engine: &mut Engine, requests: Vec<Planned>) -> Trail {
    play(engine, &Schedule { requests }).unwrap_or_else(|error| panic!("{error}"))
}

/// The life of a request alone.
pub fn alone(engine: &mut Engine, request: &Planned) -> Life {
    let request = Planned { arrive: 0, ..request.clone() };
    run(engine, vec![request]).lives.pop().expect("one")
}

/// What a prompt leaves, and its reply: pieces differ, so only the end of the prompt is compared, and all behind it.
pub fn behind_the_prompt(life: &Life, prompt: usize) -> Life {
    let mut life = life.clone();
    life.traces.retain(|trace| trace.length as usize >= prompt);
    life
}

/// A picture of made pixels in a prompt of its own.
pub fn tiles(height: u32, width: u32, seed: u32) -> Planned {
    picture_of([height, width], seed, IMAGE)
}

/// The same for a model whose placeholder is `image`.
pub fn picture_of([height, width]: [u32; 2], seed: u32, image: u32) -> Planned {
    let patch = 3 * 2 * 16 * 16;
    let bytes =
        (0..height * width * patch).map(|at| (at.wrapping_mul(2654435761 + seed) >> 24) as u8).collect();
    let span = Span { medium: 0, row: 0, first: 3, height: height / 2, width: width / 2 };
    let prompt = [5, 6, 1009].into_iter().chain((0..span.rows()).map(|_| image)).chain([1010, 7]).collect();
    let media = vec![picture(Item { bytes, grid: [1, height, width] }, vec![span])];
    planned(prompt, media, 4)
}

/// Asserts that pictures and clips leave the same bytes alone and among others, in pieces of any size, encoded or kept, and
/// nothing in a lane for the text that follows.
pub fn pictures_leave_the_same_bytes(place: Place) {
    let engine = |lanes: u16, piece_rows: u32| {
        let options = EngineOptions {
            place,
            classes: vec![Class { context: 512, lanes, pages: 40 }],
            piece_rows,
            vision: Vision::Patches(256),
            depth: 1,
            trace: true,
            poison: true,
            ..EngineOptions::default()
        };
        let dir = repository("tests/oracle/checkpoints/base_bf16");
        open(&dir, &options, &mut |_| {}).unwrap_or_else(|error| panic!("{error}")).engine
    };
    let (mut many, mut pieces, mut whole) = (engine(6, 64), engine(1, 64), engine(1, 512));
    let mut requests: Vec<Planned> = prompts().iter().map(|case| among(case, 50, 80)).collect();
    requests.insert(2, text(90, 1));
    let trail = run(&mut many, requests.clone());
    assert!(trail.rounds.eager["image-bearing"] > 0 && trail.rounds.replayed > 0, "{}", trail.rounds);
    let fresh = alone(&mut pieces, &text(70, 2));
    for (request, life) in requests.iter().zip(&trail.lives) {
        let prompt = request.prompt.len();
        for _ in 0..2 {
            assert!(alone(&mut pieces, request) == *life, "a prompt of {prompt} among others");
        }
        let one = alone(&mut whole, request);
        assert!(
            behind_the_prompt(&one, prompt) == behind_the_prompt(life, prompt),
            "a prompt of {prompt} whole"
        );
        assert!(alone(&mut pieces, &text(70, 2)) == fresh, "text behind a prompt of {prompt}");
    }
    assert!(pieces.stats().pictures.hits > 6, "{:?}", pieces.stats().pictures);
}
