//! Pictures in random schedules: small ones of made pixels, where edges are.

use vision::{Picture, Preprocess};

use super::{Planned, Random, Schedule};
use crate::pictures::Sight;

/// Rows and columns of merged squares that a picture has at most.
const SQUARES: [u32; 2] = [5, 6];

impl Schedule {
    /// Shows pictures in the first of the requests and in some of the others: of one row of the model to thirty, one or two in a
    /// request, behind text, among it, and across the edge of a piece of `piece` rows or right behind it. Some come again,
    /// and some are of the size of another one.
    pub(super) fn show(&mut self, random: &mut Random, sight: &Sight, vocab: u32, piece: u32) {
        let sight = every_size(sight);
        let mut shown = Vec::new();
        for (index, planned) in self.requests.iter_mut().enumerate() {
            if index == 0 {
                // It is there for a while, so that those who come later find it.
                (planned.cancel, planned.max_tokens) = (None, planned.max_tokens.max(8));
            } else if random.below(5) > 1 {
                continue;
            }
            let count = 1 + usize::from(random.below(3) == 0);
            let pictures: Vec<Picture> =
                (0..count).map(|_| picture(random, &sight.picture, &mut shown)).collect();
            place(random, planned, &pictures, &sight, vocab, piece);
        }
    }
}

/// Sight that leaves small pictures small, so that a few pixels are enough.
fn every_size(sight: &Sight) -> Sight {
    let square = u64::from(sight.picture.factor()).pow(2);
    let [height, width] = SQUARES.map(u64::from);
    let picture = Preprocess { min_pixels: square, max_pixels: height * width * square, ..sight.picture };
    Sight { picture, ..sight.clone() }
}

/// A picture: another one, one that was shown before, or one of its size.
fn picture(random: &mut Random, settings: &Preprocess, shown: &mut Vec<Picture>) -> Picture {
    let known = shown.len() as u32;
    let before = (known > 0 && random.below(3) > 0).then(|| shown[random.below(known) as usize].clone());
    let [height, width] = match before {
        Some(before) if random.below(2) == 0 => return before,
        Some(before) => [before.height(), before.width()],
        // Up to half a square less: it is resized to whole ones.
        None => SQUARES
            .map(|most| (1 + random.below(most)) * settings.factor() - random.below(settings.factor() / 2)),
    };
    let rgb = (0..3 * height * width).map(|_| random.below(256) as u8).collect();
    let picture = Picture::new(width, height, rgb).expect("three bytes for each pixel");
    shown.push(picture.clone());
    picture
}

/// Puts pictures into the text of a request.
fn place(
    random: &mut Random,
    planned: &mut Planned,
    pictures: &[Picture],
    sight: &Sight,
    vocab: u32,
    piece: u32,
) {
    let mut text = std::mem::take(&mut planned.prompt);
    let mut at = match random.below(3) {
        0 => random.below(text.len() as u32 + 1) as usize,
        1 => text.len(),
        _ => {
            let squares = |side: u32| side.div_ceil(sight.picture.factor());
            let rows = squares(pictures[0].height()) * squares(pictures[0].width());
            // The id before a picture is at this position, its first row behind it.
            let start = (piece - 1).saturating_sub(random.below(rows)) as usize;
            while text.len() < start {
                text.push(random.below(vocab));
            }
            start
        }
    };
    for _ in pictures {
        text.splice(at..at, [sight.ids.start, sight.ids.image, sight.ids.end]);
        at += 3;
        at += random.below((text.len() - at) as u32 + 1) as usize;
    }
    (planned.prompt, planned.media) = sight.place(&text, pictures).expect("pictures of a size that fits");
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use vision::{MediaIds, Span, VideoSettings};

    use super::*;
    use crate::request::Media;

    const PIECE: u32 = 128;
    const IMAGE: u32 = 1000;

    /// Ten schedules of a seed.
    fn schedules(seed: u64) -> Vec<Schedule> {
        let sight = Sight {
            picture: Preprocess::PICTURE,
            video: VideoSettings::default(),
            ids: MediaIds { image: IMAGE, video: 1001, start: 1002, end: 1003 },
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
        let ids = planned.prompt.iter().enumerate();
        ids.for_each(|(at, id)| assert_eq!(*id == IMAGE, within(at), "position {at}"));
        spans
    }

    /// Whatever the seed, a few schedules have all that can go wrong.
    #[test]
    fn schedules_show_every_kind_of_place() {
        let mut rows = Vec::new();
        for seed in 1..20 {
            let (mut across, mut behind, mut two, mut again, mut sized, mut texts) = (0, 0, 0, 0, 0, 0);
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
                for spans in schedule.requests.iter().map(spans) {
                    let ends = |span: &Span| span.first + span.rows();
                    across += spans.iter().filter(|span| (span.first + 1..ends(span)).contains(&128)).count();
                    behind += spans.iter().filter(|span| span.first >= 100).count();
                    texts += usize::from(spans.is_empty());
                    two += usize::from(spans.len() == 2);
                    rows.extend(spans.iter().map(Span::rows));
                }
            }
            let counts = [across, behind, two, again, sized, texts];
            assert!(counts.iter().all(|count| *count > 0), "seed {seed}: {counts:?}");
        }
        rows.sort_unstable();
        rows.dedup();
        let sizes = (1..=30).filter(|rows| (1..=5).any(|height| rows % height == 0 && rows / height <= 6));
        assert_eq!(rows, sizes.collect::<Vec<usize>>());
    }
}
