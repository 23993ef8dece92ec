//! Pictures and clips in random schedules: small ones of made pixels, where edges are.

use std::convert::Infallible;

use vision::{Clip, ClipBuilder, Picture, Preprocess, Size, Times, VideoSettings, stamp_text};

use super::{Planned, Random, Schedule};
use crate::pictures::{Decoded, Sight};

/// Rows and columns of merged squares that a picture has at most.
const SQUARES: [u32; 2] = [5, 6];
/// The same of a frame of a clip.
const FRAME_SQUARES: [u32; 2] = [2, 3];
/// Frames that a clip has at most.
const FRAMES: u32 = 5;

impl Schedule {
    /// Shows pictures in the first of the requests and in some of the others: of one row of the model to thirty, one or two in a
    /// request, behind text, among it, and across the edge of a piece of `piece` rows or right behind it. Some are clips
    /// of two frames to five. Some come again, and some are of the size of another one.
    pub(super) fn show(&mut self, random: &mut Random, sight: &Sight, vocab: u32, piece: u32) {
        let sight = every_size(sight);
        let mut before = Vec::new();
        for (index, planned) in self.requests.iter_mut().enumerate() {
            if index == 0 {
                // It is there for a while, so that those who come later find it.
                (planned.cancel, planned.max_tokens) = (None, planned.max_tokens.max(8));
            } else if random.below(5) > 1 {
                continue;
            }
            let count = 1 + usize::from(random.below(3) == 0);
            let drawn: Vec<(Drawing, Decoded)> =
                (0..count).map(|_| draw(random, &sight, &mut before)).collect();
            place(random, planned, &drawn, &sight, vocab, piece);
        }
    }
}

/// Sight that leaves what is small small, so that a few pixels are enough.
fn every_size(sight: &Sight) -> Sight {
    let range = |settings: Preprocess| {
        let square = u64::from(settings.factor()).pow(2);
        let most = SQUARES.iter().fold(square, |pixels, squares| pixels * u64::from(*squares));
        Preprocess { min_pixels: square, max_pixels: u64::from(FRAMES + 1) * most, ..settings }
    };
    let preprocess = range(sight.video.preprocess);
    let video = VideoSettings { preprocess, max_frames: FRAMES as usize, ..sight.video };
    Sight { picture: range(sight.picture), video, ..sight.clone() }
}

/// What pixels are drawn for.
#[derive(Clone, Copy)]
struct Drawing {
    /// Of a clip; none of a still picture.
    frames: Option<u32>,
    /// Rows and columns.
    pixels: [u32; 2],
}

impl Drawing {
    fn random(random: &mut Random, factor: u32) -> Drawing {
        let frames = (random.below(3) == 0).then(|| 2 + random.below(FRAMES - 1));
        let squares = if frames.is_some() { FRAME_SQUARES } else { SQUARES };
        // Up to half a square off: it is resized to whole ones. A frame with a side below a square would grow on both.
        let pixels = squares.map(|most| {
            let (whole, off) = ((1 + random.below(most)) * factor, random.below(factor / 2));
            if frames.is_some() { whole + off } else { whole - off }
        });
        Drawing { frames, pixels }
    }

    /// What the model takes for it, or for its first pair of frames.
    fn rows(&self, factor: u32) -> u32 {
        self.pixels.iter().map(|side| (side + factor / 2) / factor).product()
    }

    /// Ids between the one that stands before its placeholder and its first row: a time stamp and another such id.
    fn ids_ahead(&self) -> u32 {
        self.frames.map_or(0, |_| stamp_text(0.0).len() as u32 + 1)
    }
}

/// Something to see: another one, one that was there before, or one like it.
fn draw(random: &mut Random, sight: &Sight, before: &mut Vec<(Drawing, Decoded)>) -> (Drawing, Decoded) {
    let known = before.len() as u32;
    let again = (known > 0 && random.below(3) > 0).then(|| before[random.below(known) as usize].clone());
    let drawing = match again {
        Some(again) if random.below(2) == 0 => return again,
        Some((drawing, _)) => drawing,
        None => Drawing::random(random, sight.picture.factor()),
    };
    let shown = match drawing.frames {
        None => Decoded::Picture(picture(random, drawing.pixels)),
        Some(frames) => Decoded::Clip(clip(random, frames, drawing.pixels, &sight.video)),
    };
    before.push((drawing, shown.clone()));
    (drawing, shown)
}

fn picture(random: &mut Random, [height, width]: [u32; 2]) -> Picture {
    let rgb = (0..3 * height * width).map(|_| random.below(256) as u8).collect();
    Picture::new(width, height, rgb).expect("three bytes for each pixel")
}

fn clip(random: &mut Random, frames: u32, pixels: [u32; 2], settings: &VideoSettings) -> Clip {
    let [height, width] = pixels;
    let rate = [0.5, 2.0, 24.0][random.below(3) as usize];
    let times = Times::at_rate(frames as usize, Some(rate)).expect("a rate that is taken");
    let seconds = times.seconds().to_vec();
    let mut clip = ClipBuilder::new(Size { width, height }, seconds, settings).expect("a few small frames");
    (0..frames).for_each(|_| clip.push(&picture(random, pixels)).expect("frames of one size"));
    clip.finish().expect("every frame is there")
}

/// Puts what was drawn into the text of a request.
fn place(
    random: &mut Random,
    planned: &mut Planned,
    drawn: &[(Drawing, Decoded)],
    sight: &Sight,
    vocab: u32,
    piece: u32,
) {
    let mut text = std::mem::take(&mut planned.prompt);
    let mut at = match random.below(3) {
        0 => random.below(text.len() as u32 + 1) as usize,
        1 => text.len(),
        _ => {
            // Its first row is at the edge, or so far ahead of it that the last one is there or behind it.
            let drawing = drawn[0].0;
            let ahead = 1 + drawing.ids_ahead() + random.below(drawing.rows(sight.picture.factor()));
            let start = piece.saturating_sub(ahead) as usize;
            while text.len() < start {
                text.push(random.below(vocab));
            }
            start
        }
    };
    for (drawing, _) in drawn {
        let pad = if drawing.frames.is_some() { sight.ids.video } else { sight.ids.image };
        text.splice(at..at, [sight.ids.start, pad, sight.ids.end]);
        at += 3;
        at += random.below((text.len() - at) as u32 + 1) as usize;
    }
    let shown: Vec<Decoded> = drawn.iter().map(|(_, shown)| shown.clone()).collect();
    // One for each byte: any ids will do.
    let stamp = |text: &str| Ok::<_, Infallible>(text.bytes().map(|byte| u32::from(byte) % vocab).collect());
    (planned.prompt, planned.media) =
        sight.place(&text, &shown, stamp).expect("pictures of a size that fits");
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use vision::{MediaIds, Span};

    use super::*;
    use crate::request::Media;

    const PIECE: u32 = 128;
    const IDS: MediaIds = MediaIds { image: 1000, video: 1001, start: 1002, end: 1003 };

    /// Ten schedules of a seed.
    fn schedules(seed: u64) -> Vec<Schedule> {
        let sight = Sight {
            picture: Preprocess::PICTURE,
            video: VideoSettings::default(),
            ids: IDS,
            most_patches: 4096,
        };
        let mut random = Random::new(seed);
        let schedule = |_| {
            let mut schedule = Schedule::random(&mut random, 1000, 6, 160, 12);
            schedule.show(&mut random, &sight, 1000, PIECE);
            schedule
        };
        (0..10).map(schedule).collect()
    }

    /// The spans of a request, whose placeholders are there and nowhere else.
    fn spans(planned: &Planned) -> Vec<Span> {
        let spans: Vec<Span> = planned.media.iter().flat_map(|media| media.spans.clone()).collect();
        let within =
            |at: usize| spans.iter().any(|span| (span.first..span.first + span.rows()).contains(&at));
        let pad = |id: u32| [IDS.image, IDS.video].contains(&id);
        let ids = planned.prompt.iter().enumerate();
        ids.for_each(|(at, id)| assert_eq!(pad(*id), within(at), "position {at}"));
        spans
    }

    /// Whatever the seed, a few schedules have all that can go wrong.
    #[test]
    fn schedules_show_every_kind_of_place() {
        let (mut rows, mut clips_across) = (Vec::new(), 0);
        for seed in 1..20 {
            let (mut across, mut behind, mut two, mut again, mut sized) = (0, 0, 0, 0, 0);
            let (mut later_pairs, mut texts) = (0, 0);
            for schedule in schedules(seed) {
                let (mut shown, mut grids) = (HashMap::new(), HashSet::new());
                let media: Vec<&Media> =
                    schedule.requests.iter().flat_map(|planned| &planned.media).collect();
                assert!(!media.is_empty(), "{schedule}");
                for media in &media {
                    let first = shown.entry(media.key).or_insert(&media.patches);
                    assert_eq!(*first, &media.patches, "a key is of one picture");
                    grids.insert(media.patches.grid);
                }
                again += media.len() - shown.len();
                sized += shown.len() - grids.len();
                for planned in &schedule.requests {
                    let spans = spans(planned);
                    let ends = |span: &Span| span.first + span.rows();
                    let crosses = |span: &&Span| (span.first + 1..ends(span)).contains(&128);
                    across += spans.iter().filter(crosses).count();
                    let of_clip = |span: &&Span| planned.prompt[span.first] == IDS.video;
                    clips_across += spans.iter().filter(of_clip).filter(crosses).count();
                    behind += spans.iter().filter(|span| span.first >= 100).count();
                    texts += usize::from(spans.is_empty());
                    two += usize::from(planned.media.len() == 2);
                    later_pairs += spans.iter().filter(|span| span.row > 0).count();
                    rows.extend(spans.iter().map(Span::rows));
                }
            }
            let counts = [across, behind, two, again, sized, later_pairs, texts];
            assert!(counts.iter().all(|count| *count > 0), "seed {seed}: {counts:?}");
        }
        assert!(clips_across > 5, "{clips_across}");
        rows.sort_unstable();
        rows.dedup();
        let sizes = (1..=30).filter(|rows| (1..=5).any(|height| rows % height == 0 && rows / height <= 6));
        assert_eq!(rows, sizes.collect::<Vec<usize>>());
    }
}
