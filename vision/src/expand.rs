//! Placeholders: the one pad that a prompt has for a picture or a video becomes as many as the tower makes rows.

use crate::{ExpandError, Grid, stamp_text};

/// The ids that carry pictures and videos in a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MediaIds {
    /// Placeholder of a picture row.
    pub image: u32,
    /// Placeholder of a video row.
    pub video: u32,
    /// Stands before placeholders.
    pub start: u32,
    /// Stands after placeholders.
    pub end: u32,
}

/// A picture or a video of a prompt.
#[derive(Debug, Clone, PartialEq)]
pub enum Medium {
    /// A still picture.
    Picture {
        /// Its patches.
        grid: Grid,
    },
    /// A video.
    Video {
        /// Its patches.
        grid: Grid,
        /// The second of each time pair ([`pair_stamps`](crate::pair_stamps)).
        stamps: Vec<f64>,
    },
}

/// Neighbouring placeholders that hold one picture, or one time pair of a video.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Whose rows: an index into the media that were given to [`expand`].
    pub medium: usize,
    /// The first of them, among the medium's rows.
    pub row: usize,
    /// The sequence index of the first placeholder.
    pub first: usize,
    /// Rows of merged squares.
    pub height: u32,
    /// Columns of merged squares.
    pub width: u32,
}

impl Span {
    /// Placeholders, and rows of the language model.
    pub fn rows(&self) -> usize {
        self.height as usize * self.width as usize
    }
}

/// A prompt in which every row of a picture has its placeholder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expanded {
    /// The ids.
    pub ids: Vec<u32>,
    /// Where rows of pictures lie in them, ascending.
    pub spans: Vec<Span>,
}

/// Replaces each pad. The k-th picture pad belongs to the k-th picture of `media`, and so for videos.
///
/// A picture of `gh` x `gw` patches becomes `gh * gw / merge^2` pads. A video becomes, for each time pair, the ids of its
/// time stamp, then start, as many pads as a picture, and end. What stands around a pad in the prompt stays.
///
/// `tokenize` gives the ids of a time stamp on its own, so that no merge crosses a marker.
///
/// # Errors
/// Pads and media of a kind that are not equally many, and time stamps that `tokenize` does not take.
pub fn expand<E: std::fmt::Display>(
    ids: &[u32],
    media: &[Medium],
    merge: u32,
    tokens: &MediaIds,
    mut tokenize: impl FnMut(&str) -> Result<Vec<u32>, E>,
) -> Result<Expanded, ExpandError> {
    check(media, merge)?;
    let of_kind = |picture: bool| {
        let same = move |medium: &Medium| matches!(medium, Medium::Picture { .. }) == picture;
        media.iter().enumerate().filter(move |(_, medium)| same(medium))
    };
    for (kind, id, media) in
        [("picture", tokens.image, of_kind(true).count()), ("video", tokens.video, of_kind(false).count())]
    {
        let pads = ids.iter().filter(|other| **other == id).count();
        if pads != media {
            return Err(ExpandError::Pads { kind, id, pads, media });
        }
    }

    let (mut pictures, mut videos) = (of_kind(true), of_kind(false));
    let mut out = Expanded { ids: Vec::with_capacity(ids.len()), spans: Vec::new() };
    for &id in ids {
        let next = if id == tokens.image {
            pictures.next()
        } else if id == tokens.video {
            videos.next()
        } else {
            out.ids.push(id);
            continue;
        };
        match next.expect("pads were counted") {
            (medium, Medium::Picture { grid }) => out.pads(id, medium, 0, *grid, merge),
            (medium, Medium::Video { grid, stamps }) => {
                for (pair, seconds) in stamps.iter().enumerate() {
                    let text = stamp_text(*seconds);
                    let stamp = tokenize(&text)
                        .map_err(|error| ExpandError::Stamp { text, detail: error.to_string() })?;
                    out.ids.extend(stamp);
                    out.ids.push(tokens.start);
                    out.pads(id, medium, pair, *grid, merge);
                    out.ids.push(tokens.end);
                }
            }
        }
    }
    Ok(out)
}

impl Expanded {
    fn pads(&mut self, id: u32, medium: usize, pair: usize, grid: Grid, merge: u32) {
        let (height, width) = (grid.height / merge, grid.width / merge);
        let mut span = Span { medium, row: 0, first: self.ids.len(), height, width };
        span.row = pair * span.rows();
        self.ids.extend(std::iter::repeat_n(id, span.rows()));
        self.spans.push(span);
    }
}

fn check(media: &[Medium], merge: u32) -> Result<(), ExpandError> {
    for (index, medium) in media.iter().enumerate() {
        let (grid, pairs) = match medium {
            Medium::Picture { grid } => (grid, 1),
            Medium::Video { grid, stamps } => (grid, stamps.len()),
        };
        let Grid { pairs: own, height, width } = *grid;
        let detail = if own as usize != pairs {
            format!("{own} time pairs, and time stamps for {pairs}")
        } else if !height.is_multiple_of(merge) || !width.is_multiple_of(merge) || grid.patches() == 0 {
            format!("{height} x {width} patches do not divide into squares of {merge} x {merge}")
        } else {
            continue;
        };
        return Err(ExpandError::Medium { index, detail });
    }
    Ok(())
}
