//! Pictures and clips of a request, for the command line and the server alike.
//!
//! ```text
//! count ─► look (headers, budget) ─► plan (patches) ─► Placed (tokens, context) ─► Decoding (pixels) ─► Media
//! ```
//! Everything that a limit can decide is decided before the first pixel is decoded. What is wrong is said with the place
//! of the part, as in `messages[1].content[0]`.

mod decoding;
mod placed;

use std::fmt;

use runtime::pictures::Sight;
use serde_json::Value;
use vision::{
    Budget, Choice, Grid, Limits, Medium, PictureError, Size, Spent, Times, choose_frames, pair_stamps,
    picture_size, read_header, video_size,
};

pub(crate) use decoding::{Decoding, Step};
pub(crate) use placed::{Placed, check_words, stray};

/// What pictures may cost.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Allowed {
    /// Of all pictures of a request.
    pub(crate) budget: Budget,
    /// Of each.
    pub(crate) limits: Limits,
}

/// A picture or a clip as somebody sent it.
#[derive(Debug)]
pub(crate) struct Sent {
    /// The part that brought it.
    pub(crate) place: String,
    pub(crate) content: Content,
}

/// The bytes of files.
pub(crate) enum Content {
    Picture(Vec<u8>),
    /// Frames, so many of them for each second.
    Clip {
        frames: Vec<Vec<u8>>,
        fps: f64,
    },
}

/// One whose headers keep the limits.
#[derive(Debug)]
pub(crate) struct Looked {
    sent: Sent,
    /// Columns and rows, of all frames alike.
    size: Size,
}

/// One that the model can take: how many patches it becomes is known.
#[derive(Debug)]
pub(crate) struct Planned {
    sent: Sent,
    size: Size,
    medium: Medium,
    /// The second of each frame.
    seconds: Vec<f64>,
    /// Bytes of its patches.
    patch_bytes: usize,
}

/// Why pictures are not taken, and which part decided.
#[derive(Debug, PartialEq)]
pub(crate) struct Refused {
    pub(crate) place: String,
    pub(crate) why: String,
}

/// Refuses more pictures than may come, before any of them is looked at. Frames of clips are pictures.
pub(crate) fn count(messages: &Value, most: usize) -> Result<(), Refused> {
    let (mut count, mut over) = (0, None);
    for (at, message) in messages.as_array().into_iter().flatten().enumerate() {
        for (number, part) in message["content"].as_array().into_iter().flatten().enumerate() {
            count += match part["type"].as_str() {
                Some("image" | "image_url") => 1,
                Some("video") => part["video"].as_array().map_or(1, Vec::len),
                _ => 0,
            };
            if count > most && over.is_none() {
                over = Some(part_place(at, number));
            }
        }
    }
    match over {
        Some(place) => Err(Refused::new(place, PictureError::Count { count, limit: most })),
        None => Ok(()),
    }
}

/// Where a part stands.
pub(crate) fn part_place(message: usize, part: usize) -> String {
    format!("messages[{message}].content[{part}]")
}

/// Reads headers, one after the other, until one breaks a limit or all together do.
pub(crate) fn look(sent: Vec<Sent>, allowed: &Allowed) -> Result<Vec<Looked>, Refused> {
    let mut spent = Spent::default();
    sent.into_iter().map(|sent| Looked::new(sent, allowed, &mut spent)).collect()
}

impl Looked {
    /// The part that brought it.
    pub(crate) fn place(&self) -> &str {
        &self.sent.place
    }

    fn new(sent: Sent, allowed: &Allowed, spent: &mut Spent) -> Result<Looked, Refused> {
        let mut first = None;
        for (at, file) in sent.content.files().iter().enumerate() {
            let wrong = |why| Refused::new(sent.file_place(at), why);
            let header = read_header(file, &allowed.limits).map_err(wrong)?;
            *spent = allowed.budget.take(*spent, &[header]).map_err(wrong)?;
            let size = Size { width: header.width, height: header.height };
            let given = *first.get_or_insert(size);
            if size != given {
                let [size, given] = [size, given].map(|size| [size.width, size.height]);
                return Err(wrong(PictureError::FrameSize { frame: at, size, given }));
            }
        }
        let none = || Refused::new(&sent.place, "the video has no frame; send two at least");
        let size = first.ok_or_else(none)?;
        Ok(Looked { sent, size })
    }

    /// How a model sees it.
    pub(crate) fn plan(self, sight: &Sight) -> Result<Planned, Refused> {
        let Looked { sent, size } = self;
        let measured = match &sent.content {
            Content::Picture(_) => still(size, sight),
            Content::Clip { frames, fps } => clip(size, frames.len(), *fps, sight),
        };
        let (medium, seconds, values) = measured.map_err(|why| Refused::new(&sent.place, why))?;
        let (Medium::Picture { grid } | Medium::Video { grid, .. }) = &medium;
        let (patches, most) = (grid.patches(), sight.most_patches);
        if patches > most {
            let Size { width, height } = size;
            let why = format!(
                "of {width} x {height} pixels it becomes {patches} patches; {most} of one part are taken at most \
                 (--vision); send it smaller, or fewer frames"
            );
            return Err(Refused::new(&sent.place, why));
        }
        let patch_bytes = patches.saturating_mul(values);
        Ok(Planned { sent, size, medium, seconds, patch_bytes })
    }
}

type Measured = (Medium, Vec<f64>, usize);

fn still(size: Size, sight: &Sight) -> Result<Measured, PictureError> {
    let settings = &sight.picture;
    let grid = Grid::picture(picture_size(size, settings)?, settings);
    Ok((Medium::Picture { grid }, Vec::new(), settings.patch_values()))
}

/// Every frame is used: who sends frames has chosen them.
fn clip(size: Size, frames: usize, fps: f64, sight: &Sight) -> Result<Measured, PictureError> {
    let settings = &sight.video.preprocess;
    let times = Times::at_rate(frames, Some(fps))?;
    choose_frames(&times, Choice::Frames(frames), &sight.video)?;
    let grid = Grid::video(video_size(size, frames, settings)?, frames, settings);
    let seconds = times.seconds().to_vec();
    let stamps = pair_stamps(&seconds, settings);
    Ok((Medium::Video { grid, stamps }, seconds, settings.patch_values()))
}

impl Planned {
    /// Rows of the language model.
    fn rows(&self, sight: &Sight) -> usize {
        match &self.medium {
            Medium::Picture { grid } => grid.rows(sight.picture.merge),
            Medium::Video { grid, .. } => grid.rows(sight.video.preprocess.merge),
        }
    }

    /// Bytes that it holds until the model has seen it: its files first, then its patches.
    pub(crate) fn held_bytes(&self) -> usize {
        self.sent.content.files().iter().fold(self.patch_bytes, |sum, file| sum.saturating_add(file.len()))
    }
}

impl Sent {
    /// Where one of its files stands.
    fn file_place(&self, at: usize) -> String {
        match self.content {
            Content::Picture(_) => self.place.clone(),
            Content::Clip { .. } => frame_place(&self.place, at),
        }
    }
}

/// Where a frame of the clip at `place` stands.
pub(crate) fn frame_place(place: &str, frame: usize) -> String {
    format!("{place}.video[{frame}]")
}

impl Content {
    fn files(&self) -> &[Vec<u8>] {
        match self {
            Content::Picture(file) => std::slice::from_ref(file),
            Content::Clip { frames, .. } => frames,
        }
    }
}

impl Refused {
    pub(crate) fn new(place: impl Into<String>, why: impl fmt::Display) -> Refused {
        Refused { place: place.into(), why: why.to_string() }
    }

    /// The part at `place`, of a model that is blind.
    pub(crate) fn blind(place: &str) -> Refused {
        let why = "this model reads no pictures and no videos: it has no vision tower, or was opened without it (--vision off); leave the part out";
        Refused::new(place, why)
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.why)
    }
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Content::Picture(file) => write!(f, "Picture({} bytes)", file.len()),
            Content::Clip { frames, fps } => write!(f, "Clip({} frames, {fps} a second)", frames.len()),
        }
    }
}

#[cfg(test)]
mod tests;
